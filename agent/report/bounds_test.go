package report_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// cutUp is a status of so many GPUs of seven instances.
func cutUp(gpus int) []api.StatusGPU {
	var out []api.StatusGPU
	for i := range gpus {
		g := api.StatusGPU{Index: i, MIG: true, Slices: 8, Geometry: strings.Repeat("1g.10gb@0 ", 7)}
		for at := range 7 {
			g.Instances = append(g.Instances, api.StatusInstance{Is: fmt.Sprintf("1g.10gb@%d", at), At: at, Size: 1, ID: 7 + at})
		}
		out = append(out, g)
	}
	return out
}

// Promise 16. A condition has room for the desired config, and for what becomes of the node, beside the cause; the status has room for its failure.
func TestADecisionLeavesRoomForWhatIsSaidBesideIt(t *testing.T) {
	as := func(text string) string { return text }
	long := strings.Repeat("no answer from the driver ", 100)
	for name, c := range map[string]struct {
		text string
		most int
	}{
		"a short text stays": {"no answer", len("no answer")},
		"a long one is cut":  {long, 768},
	} {
		t.Run(name, func(t *testing.T) {
			d := outcome.Decision{Message: c.text, Failure: &api.Failure{Message: c.text}}.Bounded(as)
			for of, got := range map[string]string{"message": d.Message, "failure": d.Failure.Message} {
				if n := utf8.RuneCountInString(got); n > c.most || n < c.most/2 || !strings.HasPrefix(got, "no answer") {
					t.Errorf("%d characters of the %s are left, want at most %d: %s", n, of, c.most, got)
				}
			}
			if d = (outcome.Decision{Message: c.text}).Bounded(as); d.Failure != nil {
				t.Errorf("a decision without a failure has %v", d.Failure)
			}
		})
	}
}

// A status that is too long loses one thing after the other, and always the same first.
func TestAStatusLosesWhatAdviceNeedsBeforeItsGeometry(t *testing.T) {
	whole := api.Status{Phase: api.PhaseIdle, GPUs: cutUp(16), Blockers: []string{"pod team/a"}, Models: []api.Model{{Name: "NVIDIA H100 80GB HBM3"}}, Held: []api.Held{}}
	for i := range 112 {
		whole.Held = append(whole.Held, api.Held{Pod: types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012d", i)), On: []string{fmt.Sprintf("%d/%d", i/7, i%7)}})
	}
	full, _, err := report.EncodeStatus(whole, report.StatusRoom)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		room int
		want string
	}{
		{len(full), "blockers held models instances GPUs"},
		{len(full) - 1, "blockers models instances GPUs"},
		{4 << 10, "GPUs"},
		{200, ""},
	} {
		text, fits, err := report.EncodeStatus(whole, row.room)
		var s api.Status
		if err != nil || !fits || len(text) > row.room || json.Unmarshal([]byte(text), &s) != nil {
			t.Fatalf("%d bytes in %d, fits %t: %v", len(text), row.room, fits, err)
		}
		var has []string
		for _, part := range []struct {
			name string
			is   bool
		}{
			{"blockers", s.Blockers != nil},
			{"held", s.Held != nil},
			{"models", s.Models != nil},
			{"instances", len(s.GPUs) > 0 && s.GPUs[0].Instances != nil},
			{"GPUs", s.GPUs != nil},
		} {
			if part.is {
				has = append(has, part.name)
			}
		}
		if got := strings.Join(has, " "); got != row.want {
			t.Errorf("in %d bytes: %q, want %q; %d bytes", row.room, got, row.want, len(text))
		}
	}
}

func TestADiagnosisSaysWhatItLeavesOut(t *testing.T) {
	d := api.Diagnosis{Node: "gpu-1", Outcome: api.Outcome{Verdict: api.VerdictFree, Text: "free"}, GPUs: api.GPUsSeen{Now: cutUp(8)}}
	for i := range 5000 {
		d.Pods = append(d.Pods, api.PodSeen{Namespace: "team", Name: fmt.Sprintf("notebook-%d", i), Devices: []string{"GPU 0"}})
	}
	for room, whole := range map[int]bool{1 << 20: true, report.AnswerRoom: false, 2 << 10: false} {
		text, err := report.EncodeAnswer(api.Answer{For: "diagnosis", Diagnosis: &d}, room)
		var given api.Answer
		if err != nil || len(text) > room || json.Unmarshal([]byte(text), &given) != nil || given.Diagnosis == nil {
			t.Fatalf("%d bytes in %d: %v: %.200s", len(text), room, err, text)
		}
		got := given.Diagnosis
		said := strings.Contains(strings.Join(got.Unseen, "\n"), "not all pods are named")
		if got.Outcome.Verdict != api.VerdictFree || (len(got.Pods) == len(d.Pods)) != whole || said == whole {
			t.Errorf("in %d bytes: %d of %d pods, unseen %q", room, len(got.Pods), len(d.Pods), got.Unseen)
		}
	}
	text, err := report.EncodeAnswer(api.Answer{For: "diagnosis", At: time.Now(), Diagnosis: &d}, 300)
	if err != nil || !strings.Contains(text, "too full") || len(text) > 300 {
		t.Errorf("%d bytes without room: %v: %s", len(text), err, text)
	}
}

// The answer leaves out the uses with the least memory, and counts them.
func TestTheUsesOfAFullNodeAreCutToTheRoom(t *testing.T) {
	a := api.Answer{For: "top"}
	for i := range 2000 {
		a.Uses = append(a.Uses, api.Use{Namespace: "team", Pod: fmt.Sprintf("notebook-%d", i), GPU: 3, Instance: "1g.10gb@2", MemoryMiB: 2000 - i})
	}
	text, err := report.EncodeAnswer(a, report.AnswerRoom)
	var given api.Answer
	if err != nil || len(text) > report.AnswerRoom || json.Unmarshal([]byte(text), &given) != nil {
		t.Fatalf("%d bytes: %v: %.200s", len(text), err, text)
	}
	if n := len(given.Uses); n < 100 || n+given.MoreUses != 2000 || given.Uses[0].Pod != "notebook-0" || given.Uses[n-1].Pod != fmt.Sprintf("notebook-%d", n-1) {
		t.Errorf("%d uses are named and %d not", n, given.MoreUses)
	}
}

// Promise 22: what is lost with many pods of long names may take all the room. That something is to do, and that pods leave, is in the answer all the same.
func TestAnAnswerWithoutRoomStillSaysThatThereIsSomethingToDo(t *testing.T) {
	var a api.Answer
	for i := range 100 {
		pod := fmt.Sprintf("team/%s-%d", strings.Repeat("x", 250), i)
		a.Pods, a.Lost = append(a.Pods, pod), append(a.Lost, "the files of "+pod+" on emptyDir "+strings.Repeat("y", 250))
	}
	a.Steps, a.Lost[0], a.Lost[1] = []string{"evict " + a.Pods[0]}, "pod team/first", "pod team/second"
	for _, room := range []int{report.AnswerRoom, 4 << 10, 1 << 10} {
		text, err := report.EncodeAnswer(a, room)
		var given api.Answer
		if err != nil || len(text) > room || json.Unmarshal([]byte(text), &given) != nil {
			t.Fatalf("%d bytes in %d: %v: %.200s", len(text), room, err, text)
		}
		if len(given.Steps) != 1 || len(given.Pods) == 0 || len(given.Pods)+given.MorePods != 100 || len(given.Lost)+given.MoreLost != 100 {
			t.Errorf("in %d bytes: %d steps and %d more, %d pods and %d more, %d losses and %d more", room,
				len(given.Steps), given.More, len(given.Pods), given.MorePods, len(given.Lost), given.MoreLost)
		}
	}
	a.HeldUp = strings.Repeat("z", 1000)
	text, err := report.EncodeAnswer(a, 300)
	if err != nil || !strings.Contains(text, "too full") || len(text) > 300 {
		t.Errorf("%d bytes without room: %v: %s", len(text), err, text)
	}
}

func TestADrawingOfTheGPUsLeavesRoomForTheRest(t *testing.T) {
	a := api.Answer{GPUs: []api.Recut{{Model: strings.Repeat("m", 4<<10)}}, Steps: []string{"fence"}}
	if text, err := report.EncodeAnswer(a, 1<<10); err != nil || strings.Contains(text, "too full") || strings.Contains(text, `"gpus"`) {
		t.Errorf("%v: %s", err, text)
	}
}

// Promise 16. Whoever sets a condition, and whatever the texts in it, its message is printable and no longer than a condition may have.
func TestTheMessageOfAnyConditionIsBounded(t *testing.T) {
	c := report.After(nil, config.ConditionGPUPartitionReady, corev1.ConditionFalse, config.ReasonStepFailed, strings.Repeat("é\x1b", 10_000), time.Now())
	if n := utf8.RuneCountInString(c.Message); n == 0 || n > sanitize.Longest || strings.Contains(c.Message, "\x1b") {
		t.Errorf("the message has %d characters, want at most %d, and none for terminals: %.60q", n, sanitize.Longest, c.Message)
	}
}
