package outcome_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
)

// Promises 12 and 14: a wait says since when, until when and what a user can do, in moments, so that the same wait has the same text in each pass.
func TestAWaitSaysSinceAndUntilWhen(t *testing.T) {
	t.Parallel()
	since := time.Date(2026, 3, 1, 13, 0, 0, 0, time.FixedZone("CET", 3600))
	for want, wait := range map[string]outcome.Waiting{
		"pods leave": {Message: "pods leave"},
		"end them; pods leave; since 2026-03-01 12:00:00Z; at 2026-03-01 13:00:00Z it is given up; changes nothing until then": {
			Message: "pods leave", Since: since, Until: since.Add(time.Hour), Then: "it is given up", Advice: "end them", Else: "changes nothing until then",
		},
	} {
		if got := wait.Error(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// Promise 16: texts of others leave room for what a user has to read.
func TestTextsOfOthersAreBounded(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("ä\x1b[2J", 100_000)
	wait := outcome.Waiting{Message: long, Advice: "end them", Else: "to go on: wait"}
	if text := wait.Error(); utf8.RuneCountInString(text) > 600 || !strings.HasPrefix(text, "end them; ") || !strings.HasSuffix(text, "; to go on: wait") || strings.Contains(text, "\x1b") {
		t.Errorf("the wait has %d characters: %.100q", utf8.RuneCountInString(text), text)
	}
	failure := &api.Failure{Message: long, Fingerprint: "asked"}
	d := outcome.Decision{Message: long, Failure: failure}.Bounded(func(text string) string { return "GPU 0: " + text })
	if !strings.HasPrefix(d.Message, "GPU 0: ") || !strings.HasPrefix(d.Failure.Message, "GPU 0: ") {
		t.Errorf("the GPUs are not named: %.20q, %.20q", d.Message, d.Failure.Message)
	}
	for _, text := range []string{d.Message, d.Failure.Message, outcome.BoundedFailure(failure).Message} {
		if n := utf8.RuneCountInString(text); n == 0 || n > 768 || strings.Contains(text, "\x1b") {
			t.Errorf("the decision has %d characters: %.100q", n, text)
		}
	}
	if failure.Message != long || d.Failure.Fingerprint != "asked" || outcome.BoundedFailure(nil) != nil {
		t.Error("the failure itself is changed, or another")
	}
}

func TestTimesOfWindowsAreThoseOfTheirZone(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for want, at := range map[string]time.Time{
		"Sun 2026-03-01 12:00:00Z":                     noon,
		"Sun 2026-03-01 07:00:00 EST (Sun 12:00:00Z)":  noon.In(time.FixedZone("EST", -5*3600)),
		"Mon 2026-03-02 01:00:00 NZDT (Sun 12:00:00Z)": noon.In(time.FixedZone("NZDT", 13*3600)),
	} {
		if got := outcome.Zoned(at); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestWhatCouldNotBeSeenIsKnownBehindOtherErrors(t *testing.T) {
	t.Parallel()
	silent := errors.New("silent")
	unseen := fmt.Errorf("the file: %w", &outcome.UnseenError{Err: silent})
	if !outcome.IsUnseen(unseen) || !errors.Is(unseen, silent) || outcome.IsUnseen(silent) || outcome.IsUnseen(nil) {
		t.Error("an error counts as one of what could not be seen, or does not")
	}
}
