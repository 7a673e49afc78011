package api_test

import (
	"encoding/json"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
)

// A pass that cannot see all of the node writes the condition alone: readers must not take the phase of an earlier pass for the present one.
func TestThePhaseBesideAReason(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		phase          api.Phase
		reason, beside config.Reason
		want           api.Phase
	}{
		"the same reason":                         {api.PhaseApplying, config.ReasonRetrying, config.ReasonRetrying, api.PhaseApplying},
		"no status":                               {"", config.ReasonConverged, config.ReasonDriverNotLoaded, ""},
		"a journal that cannot be read":           {api.PhaseDraining, config.ReasonEvicting, config.ReasonJournalUnreadable, api.PhaseStalled},
		"no driver":                               {api.PhaseIdle, config.ReasonConverged, config.ReasonDriverNotLoaded, api.PhaseWaiting},
		"a driver that does not answer":           {api.PhaseIdle, config.ReasonConverged, config.ReasonDriverUnresponsive, api.PhaseWaiting},
		"a call that failed":                      {api.PhaseApplying, config.ReasonAwaitingCapacity, config.ReasonRetrying, api.PhaseWaiting},
		"a disk that does not answer":             {api.PhaseIdle, config.ReasonConverged, config.ReasonHostRecordUnavailable, api.PhaseWaiting},
		"a condition that the status will follow": {api.PhaseDraining, config.ReasonFencing, config.ReasonEvicting, api.PhaseDraining},
	} {
		if got := (api.Status{Phase: row.phase, Reason: row.reason}).PhaseBeside(row.beside); got != row.want {
			t.Errorf("%s: %q, want %q", name, got, row.want)
		}
	}
}

// Scripts read durations as people write them.
func TestADurationInJSON(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{
		`"33m0s"`: 33 * time.Minute, `"0s"`: 0, `"-1.5s"`: -1500 * time.Millisecond, `"2562047h47m16.854775807s"`: 1<<63 - 1,
	} {
		var d api.Duration
		if err := json.Unmarshal([]byte(text), &d); err != nil || time.Duration(d) != want {
			t.Errorf("%s is read as %s: %v", text, time.Duration(d), err)
		}
		if got, err := json.Marshal(api.Duration(want)); err != nil || string(got) != text {
			t.Errorf("%s is written as %s: %v", want, got, err)
		}
	}
	for _, text := range []string{`1980000000000`, `"soon"`, `""`, `"33"`, `{}`} {
		if err := json.Unmarshal([]byte(text), new(api.Duration)); err == nil {
			t.Errorf("%s is read as a duration", text)
		}
	}
	// An agent that has nothing to say of a duration leaves it out, and a reader finds 0. An answer that no agent gave has no moment.
	text, err := json.Marshal(api.Answer{For: "all-1g.10gb"})
	if err != nil || string(text) != `{"for":"all-1g.10gb"}` {
		t.Errorf("an answer with nothing in it is %s: %v", text, err)
	}
}

// The separator can be in no value of a label, so that it separates two names and is never part of one.
func TestNoLabelContainsTheSeparator(t *testing.T) {
	t.Parallel()
	if len(validation.IsValidLabelValue("all"+api.DesiredSeparator+"slices")) == 0 {
		t.Errorf("a label may have the value all%sslices", api.DesiredSeparator)
	}
}
