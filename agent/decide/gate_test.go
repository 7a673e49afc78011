package decide_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	testclock "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/config/window"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// noon is a Saturday's.
var noon = time.Date(2000, 1, 1, 12, 0, 0, 0, time.UTC)

// evicts are the steps of a change for which a pod has to leave, and adds those of one that disturbs none.
var evicts, adds = []plan.Kind{plan.Fence, plan.Evict, plan.SetMode, plan.Release}, []plan.Kind{plan.Record, plan.Create, plan.Release}

// nights is open from 22:00 to 04:00.
func nights() window.Schedule {
	days := []time.Weekday{time.Sunday, time.Monday, time.Tuesday, time.Wednesday, time.Thursday, time.Friday, time.Saturday}
	return window.Schedule{Windows: []window.Window{{Days: days, Start: 22 * time.Hour, Duration: 6 * time.Hour}}}
}

// openFor is open from before noon until d after it, and never again.
func openFor(d time.Duration) window.Schedule {
	return window.Schedule{Windows: []window.Window{{NotBefore: noon.Add(-24 * time.Hour), NotAfter: noon.Add(d)}}}
}

// waiting is a node at noon, whose windows are at night, before a change that takes ten minutes.
func waiting() (*state.Observed, *state.Desired) {
	seen := &state.Observed{Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", Annotations: map[string]string{}}}, GPUs: []nvml.GPU{{UUID: "GPU-a"}}}
	seen.Pool.Schedule, seen.Pool.Estimate = nights(), 10*time.Minute
	return seen, &state.Desired{Name: "all-1g.10gb", Fingerprint: "asked"}
}

// cordoned is a change behind the fence that has touched no GPU, and touched is one that has turned MIG mode on.
func cordoned(seen *state.Observed) {
	seen.Journal = &journal.Journal{
		Target: "all-1g.10gb", Fingerprint: "asked", Operation: "op", Cordoned: true, Previous: []journal.GPULayout{{GPU: "GPU-a"}},
	}
}

func touched(seen *state.Observed) {
	cordoned(seen)
	seen.GPUs[0].Enabled = true
}

// allow asks the gate, and returns the reason of the wait or the failure; empty if the steps may go on.
func allow(t *testing.T, seen *state.Observed, want state.Desired, kinds []plan.Kind) (reason config.Reason, putOff bool, wait *outcome.Waiting) {
	t.Helper()
	err := gateAtNoon().Allow(seen, want, steps(kinds))
	var failure *api.Failure
	switch {
	case err == nil:
	case errors.As(err, &wait):
		reason = wait.Reason
	case errors.As(err, &failure):
		reason, putOff = failure.Reason, failure.Later
	default:
		t.Fatal(err)
	}
	return reason, putOff, wait
}

func gateAtNoon() *decide.Gate {
	clock := testclock.NewFakeClock(noon)
	return &decide.Gate{Settings: config.Default(), Wall: clock, Clock: monotonic.New(clock)}
}

func steps(kinds []plan.Kind) []plan.Step {
	out := make([]plan.Step, len(kinds))
	for i, kind := range kinds {
		out[i].Kind = kind
	}
	return out
}

// Promises 10 and 11: what waits outside of the window, what is put off, and what goes on. A preview says of the same that it begins at once.
func TestWhatMayBeginOrGoOnOutsideOfTheWindow(t *testing.T) {
	t.Parallel()
	annotate := func(key, value string) func(*state.Observed, *state.Desired) {
		return func(seen *state.Observed, _ *state.Desired) { seen.Node.Annotations[key] = value }
	}
	of := func(changes ...func(*state.Observed)) func(*state.Observed, *state.Desired) {
		return func(seen *state.Observed, _ *state.Desired) {
			for _, change := range changes {
				change(seen)
			}
		}
	}
	held := func(seen *state.Observed) { seen.Node.Annotations[config.AnnotationHold] = "" }
	fresh := func(seen *state.Observed) { seen.Marks.Startup = []corev1.Taint{{Key: config.TaintNotReady}} }
	silent := func(seen *state.Observed) { seen.Kubelet.Err = errors.New("silent") }
	unread := func(seen *state.Observed) { seen.Pool.Err = errors.New("no Caturday") }
	verified := func(seen *state.Observed) { seen.Record.Learnt.Verified = "asked" }
	bare := func(seen *state.Observed) { seen.Record.Learnt.Cut, seen.Boot.ID = "boot-1", "boot-2" }
	older := func(seen *state.Observed, want *state.Desired) {
		seen.Node.Labels = map[string]string{config.LabelMIGConfig: "all-1g.10gb"}
		seen.Record.Learnt.Found = map[string]string{config.LabelMIGConfig: "all-1g.10gb", config.AnnotationForce: config.ForceNow}
		want.Label, seen.Pool.Schedule = config.LabelMIGConfig, openFor(time.Hour)
	}
	foreign := func(times int, ago time.Duration) func(*state.Observed, *state.Desired) {
		return of(verified, func(seen *state.Observed) {
			seen.Record.Learnt.Foreign = &journal.Foreign{Repeats: outcome.Repeats{Times: times, Last: noon.Add(-ago)}, Open: true}
		})
	}
	creates, destroys := []plan.Kind{plan.Record, plan.Create}, []plan.Kind{plan.Fence, plan.Destroy, plan.Create}
	for name, row := range map[string]struct {
		change func(*state.Observed, *state.Desired)
		kinds  []plan.Kind
		reason config.Reason // empty: it may
		putOff bool
	}{
		"a pod has to leave":            {of(), evicts, config.ReasonAwaitingWindow, false},
		"no pod is disturbed":           {of(), adds, "", false},
		"a fence is for pods that come": {of(), []plan.Kind{plan.Fence, plan.SetMode}, config.ReasonAwaitingWindow, false},
		"an undo":                       {func(seen *state.Observed, want *state.Desired) { cordoned(seen); want.Undo = true }, evicts, "", false},
		"an undo under a hold":          {func(seen *state.Observed, want *state.Desired) { cordoned(seen); held(seen); want.Undo = true }, evicts, "", false},
		"forced":                        {annotate(config.AnnotationForce, config.ForceNow), evicts, "", false},
		"this change is forced":         {annotate(config.AnnotationForce, "asked"), evicts, "", false},
		"another change is forced":      {annotate(config.AnnotationForce, "0123456789ab"), evicts, config.ReasonAwaitingWindow, false},
		"held":                          {of(held), evicts, config.ReasonHeld, false},
		"held, and forced, which is about windows": {func(seen *state.Observed, _ *state.Desired) {
			held(seen)
			seen.Node.Annotations[config.AnnotationForce] = "asked"
		}, evicts, config.ReasonHeld, false},
		"held, where no pod is disturbed": {of(held), adds, config.ReasonHeld, false},
		"held in its middle":              {of(touched, held), evicts, "", false},
		"held in the middle of another":   {of(touched, held, func(seen *state.Observed) { seen.Journal.Target = "other" }), evicts, config.ReasonHeld, true},
		"held, and another target was only noted": {of(held, func(seen *state.Observed) {
			seen.Journal = &journal.Journal{Target: "other", Fingerprint: "former"}
		}), evicts, config.ReasonHeld, true},
		"held, and only what was left is taken":         {of(held), []plan.Kind{plan.Adopt, plan.Release}, "", false},
		"held, and only the capacity is verified":       {of(held), []plan.Kind{plan.VerifyCapacity}, "", false},
		"a fresh node without pods":                     {of(fresh), []plan.Kind{plan.Fence, plan.SetMode}, "", false},
		"a fresh node with a pod":                       {of(fresh), evicts, config.ReasonAwaitingWindow, false},
		"a fresh node whose kubelet is silent":          {of(fresh, silent), evicts, "", false},
		"a node whose kubelet is silent":                {of(silent), evicts, config.ReasonAwaitingWindow, false},
		"the node was as asked":                         {of(verified), []plan.Kind{plan.Fence, plan.Create}, "", false},
		"the node was as asked, and has a pod":          {of(verified), evicts, config.ReasonAwaitingWindow, false},
		"the node was as asked, and heals":              {of(verified), []plan.Kind{plan.Fence, plan.Heal}, config.ReasonAwaitingWindow, false},
		"a reboot has taken all instances":              {of(bare), []plan.Kind{plan.Fence, plan.Create}, "", false},
		"a reboot has taken nothing":                    {of(bare, func(seen *state.Observed) { seen.GPUs[0].Instances = make([]nvml.Instance, 1) }), []plan.Kind{plan.Fence, plan.Create}, config.ReasonAwaitingWindow, false},
		"there was no reboot":                           {of(bare, func(seen *state.Observed) { seen.Boot.ID = "boot-1" }), []plan.Kind{plan.Fence, plan.Create}, config.ReasonAwaitingWindow, false},
		"the file cannot be read":                       {of(unread), evicts, config.ReasonInvalidMaintenance, false},
		"the file cannot be read behind the fence":      {of(cordoned, unread), evicts, config.ReasonInvalidMaintenance, true},
		"the file cannot be read when a GPU is touched": {of(touched, unread), evicts, "", false},
		"the window has closed behind the fence":        {of(cordoned), evicts, config.ReasonWindowClosed, true},
		"the window has closed when a GPU is touched":   {of(touched), evicts, "", false},
		"touched, and edited since":                     {func(seen *state.Observed, want *state.Desired) { touched(seen); want.Fingerprint = "edited" }, evicts, config.ReasonWindowClosed, true},
		"touched for another":                           {func(seen *state.Observed, want *state.Desired) { touched(seen); want.Name = "other" }, evicts, config.ReasonWindowClosed, true},
		"forced behind the fence":                       {of(cordoned, func(seen *state.Observed) { seen.Journal.Forced = true }), evicts, "", false},
		"forced behind the fence, and edited since": {func(seen *state.Observed, want *state.Desired) {
			cordoned(seen)
			seen.Journal.Forced, want.Fingerprint = true, "edited"
		}, evicts, config.ReasonWindowClosed, true},
		"touched, parked, and no pod has come": {of(touched, func(seen *state.Observed) { seen.Journal.Cordoned = false }), []plan.Kind{plan.Fence, plan.SetMode}, "", false},
		"touched, parked, and a pod has come":  {of(touched, func(seen *state.Observed) { seen.Journal.Cordoned = false }), evicts, config.ReasonAwaitingWindow, false},
		"behind the fence, with time enough":   {of(cordoned, func(seen *state.Observed) { seen.Pool.Schedule = openFor(10 * time.Minute) }), evicts, "", false},
		"behind the fence, with a second less": {of(cordoned, func(seen *state.Observed) { seen.Pool.Schedule = openFor(10*time.Minute - time.Second) }), evicts, config.ReasonWindowClosed, true},
		"behind the fence, and frozen": {of(cordoned, func(seen *state.Observed) {
			seen.Pool.Schedule = window.Schedule{Freezes: []window.Freeze{{From: noon, To: noon.Add(time.Hour)}}}
		}), evicts, config.ReasonWindowClosed, true},
		"older than the agent, and a pod has to leave":    {older, evicts, config.ReasonOlderRequest, false},
		"older than the agent, and an instance has to go": {older, destroys, config.ReasonOlderRequest, false},
		"older than the agent, and takes nothing":         {older, creates, "", false},
		"older than the agent, and only the mode changes": {older, []plan.Kind{plan.Fence, plan.SetMode, plan.Create}, "", false},
		"older than the agent, which has begun":           {func(seen *state.Observed, want *state.Desired) { older(seen, want); cordoned(seen) }, evicts, "", false},
		"older than the agent, and kubelet is silent":     {func(seen *state.Observed, want *state.Desired) { older(seen, want); silent(seen) }, evicts, "", false},
		"older than the agent, and held":                  {func(seen *state.Observed, want *state.Desired) { older(seen, want); held(seen) }, evicts, config.ReasonHeld, false},
		"older than the agent, as the one that forces it": {func(seen *state.Observed, want *state.Desired) {
			older(seen, want)
			annotate(config.AnnotationForce, config.ForceNow)(seen, want)
		}, evicts, config.ReasonOlderRequest, false},
		"older than the agent, and forced since": {func(seen *state.Observed, want *state.Desired) {
			older(seen, want)
			annotate(config.AnnotationForce, "asked")(seen, want)
		}, evicts, "", false},
		"older than the agent, and another change allowed": {func(seen *state.Observed, want *state.Desired) {
			older(seen, want)
			annotate(config.AnnotationAllowEviction, "nvidia.com/mig.config=other")(seen, want)
		}, evicts, config.ReasonOlderRequest, false},
		"older than the agent, and allowed since": {func(seen *state.Observed, want *state.Desired) {
			older(seen, want)
			annotate(config.AnnotationAllowEviction, "nvidia.com/mig.config=all-1g.10gb")(seen, want)
		}, evicts, "", false},
		"the label below it is older than the agent": {func(seen *state.Observed, want *state.Desired) { older(seen, want); want.Label = config.LabelProfile }, evicts, "", false},
		"the label next to it is older than the agent": {func(seen *state.Observed, want *state.Desired) {
			older(seen, want)
			seen.Node.Labels[config.LabelDevicePluginConfig] = "slices"
			seen.Record.Learnt.Found = map[string]string{config.LabelDevicePluginConfig: "slices"}
		}, evicts, config.ReasonOlderRequest, false},
		"something else has changed the GPUs once":               {foreign(1, 0), creates, "", false},
		"something else has changed the GPUs twice":              {foreign(2, 59*time.Second), creates, config.ReasonStepHadNoEffect, false},
		"something else has changed the GPUs twice, a while ago": {foreign(2, time.Minute), creates, "", false},
		"something else has changed the GPUs for ever":           {foreign(1<<40, 59*time.Minute), creates, config.ReasonStepHadNoEffect, false},
		"something else has changed the GPUs, an hour ago":       {foreign(1<<40, time.Hour), creates, "", false},
		"something else has changed the GPUs in the future":      {foreign(9, -time.Hour), creates, "", false},
		"something else has changed the GPUs, and it is forced": {func(seen *state.Observed, want *state.Desired) {
			foreign(2, 0)(seen, want)
			annotate(config.AnnotationForce, config.ForceNow)(seen, want)
		}, creates, "", false},
		"something else has changed the GPUs, and the request is new": {func(seen *state.Observed, want *state.Desired) { foreign(2, 0)(seen, want); want.Fingerprint = "new" }, creates, "", false},
		"something else has changed the GPUs, which are verified":     {foreign(2, 0), []plan.Kind{plan.VerifyCapacity}, "", false},
		"something else has changed the GPUs before it was verified": {func(seen *state.Observed, want *state.Desired) {
			foreign(2, 0)(seen, want)
			seen.Record.Learnt.Foreign.Open = false
		}, creates, "", false},
		"a fresh node that a change has begun to shape": {of(cordoned, func(seen *state.Observed) {
			seen.Journal.RecordStartup([]corev1.Taint{{Key: config.TaintNotReady, Effect: corev1.TaintEffectNoSchedule}})
		}), evicts, "", false},
	} {
		seen, want := waiting()
		row.change(seen, want)
		if reason, putOff, _ := allow(t, seen, *want, row.kinds); reason != row.reason || putOff != row.putOff {
			t.Errorf("%s: %q, put off: %t; want %q, %t", name, reason, putOff, row.reason, row.putOff)
		}
		if runs := gateAtNoon().Runs(seen, *want, steps(row.kinds), false); strings.HasPrefix(runs, "at once") != (row.reason == "") {
			t.Errorf("%s: the preview says that it runs %s, and the gate %q", name, runs, row.reason)
		}
	}
}

// A DaemonSet that keeps GPUs open without having one is on each new node, and comes back.
func TestADaemonSetThatKeepsGPUsOpenHoldsUpNoOlderRequest(t *testing.T) {
	t.Parallel()
	for source, want := range map[holders.Source]config.Reason{"device file /dev/nvidia0": "", holders.SourceNVML: config.ReasonOlderRequest} {
		seen, desired := waiting()
		seen.Node.Labels = map[string]string{config.LabelMIGConfig: "all-1g.10gb"}
		seen.Record.Learnt.Found = map[string]string{config.LabelMIGConfig: "all-1g.10gb"}
		desired.Label, seen.Pool.Schedule = config.LabelMIGConfig, openFor(time.Hour)
		seen.Holders.Pods = []holders.Pod{{Namespace: "team", Name: "exporter", UID: "exporter", Daemon: true, Sources: []holders.Source{source}}}
		err := gateAtNoon().Allow(seen, *desired, []plan.Step{{Kind: plan.Fence}, {Kind: plan.Evict, Pods: []plan.Pod{{Namespace: "team", Name: "exporter", UID: "exporter"}}}})
		var wait *outcome.Waiting
		if errors.As(err, &wait); (wait == nil) != (want == "") || wait != nil && wait.Reason != want {
			t.Errorf("known by %s: %v, want %q", source, err, want)
		}
	}
}

// Promise 11: a change begins in a window that is long enough, and the node says when that is.
func TestAChangeWaitsForAWindowThatIsLongEnough(t *testing.T) {
	t.Parallel()
	took := []journal.Took{{Whole: 300, Rest: 600}} // its last steps take longer than a window is open that is as long as the whole
	for name, row := range map[string]struct {
		schedule window.Schedule
		took     []journal.Took
		planned  time.Time // zero if it begins at once, or never
		says     string    // empty if it begins at once
	}{
		"no windows":                    {window.Schedule{}, nil, time.Time{}, ""},
		"open to the second":            {openFor(10 * time.Minute), nil, time.Time{}, ""},
		"a second less":                 {openFor(10*time.Minute - time.Second), nil, time.Time{}, " is as long as the change takes, 10m0s"},
		"later":                         {nights(), nil, noon.Add(10 * time.Hour), "the change begins at Sat 2000-01-01 22:00:00Z by the windows of the maintenance file, and takes 10m0s"},
		"earlier changes took longer":   {openFor(11 * time.Minute), []journal.Took{{Whole: 660, Rest: 10}, {Whole: 20, Rest: 15}}, time.Time{}, ""},
		"one drain took hours":          {window.Schedule{Windows: []window.Window{{NotBefore: noon, NotAfter: noon.Add(time.Hour)}}}, []journal.Took{{Whole: 7200, Rest: 600}}, time.Time{}, ""},
		"the last steps take too long":  {openFor(7 * time.Minute), took, time.Time{}, "as the change takes, 10m0s"},
		"frozen until tomorrow evening": {frozen(), nil, noon.Add(34 * time.Hour), "Sun 2000-01-02 22:00:00Z"},
	} {
		seen, want := waiting()
		seen.Pool.Schedule, seen.Record.Learnt.Took = row.schedule, row.took
		_, _, wait := allow(t, seen, *want, evicts)
		switch {
		case row.says == "" && wait == nil:
		case row.says == "" || wait == nil:
			t.Errorf("%s: %v", name, wait)
		case wait.Reason != config.ReasonAwaitingWindow || !wait.Planned.Equal(row.planned) || !strings.Contains(wait.Message, row.says):
			t.Errorf("%s: %s, at %s: %s; want %s and %q", name, wait.Reason, wait.Planned, wait.Message, row.planned, row.says)
		case !strings.Contains(wait.Advice, config.AnnotationForce+"=asked"):
			t.Errorf("%s: %s", name, wait.Advice)
		case !row.planned.IsZero() && wait.After != row.planned.Sub(noon): // a window may be shorter than the time between two observations
			t.Errorf("%s: the agent observes the node again after %s", name, wait.After)
		}
	}
}

// frozen has nights of which one is frozen.
func frozen() window.Schedule {
	s := nights()
	s.Freezes = []window.Freeze{{From: noon, To: noon.Add(24 * time.Hour)}}
	return s
}

// The windows of a profile count in place of those of the pool.
func TestTheMessageNamesTheWindowsThatCount(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		change func(*state.Observed, *state.Desired)
		says   string
	}{
		"of the file": {func(*state.Observed, *state.Desired) {}, "the change begins at Sat 2000-01-01 22:00:00Z by the windows of the maintenance file,"},
		"of the pool": {func(seen *state.Observed, _ *state.Desired) { seen.Pool.Name = "trainers" }, "22:00:00Z by the windows of pool trainers,"},
		"of the profile": {func(seen *state.Observed, want *state.Desired) {
			seen.Pool.Name = "trainers"
			want.Windows = []window.Window{{Days: []time.Weekday{time.Saturday}, Start: 18 * time.Hour, Duration: time.Hour, Zone: time.FixedZone("EST", -5*3600)}}
		}, "the change begins at Sat 2000-01-01 18:00:00 EST (Sat 23:00:00Z) by the windows of profile all-1g.10gb,"},
	} {
		seen, want := waiting()
		row.change(seen, want)
		if _, _, wait := allow(t, seen, *want, evicts); wait == nil || !strings.Contains(wait.Message, row.says) {
			t.Errorf("%s: %v; want %q", name, wait, row.says)
		}
	}
}

// What the wait, the postponement and the preview of a change say is of one verdict.
func TestTheGateSaysTheSameOfAChangeAndOfItsPreview(t *testing.T) {
	t.Parallel()
	of := func(changes ...func(*state.Observed)) []func(*state.Observed) { return changes }
	held := func(seen *state.Observed) { seen.Node.Annotations[config.AnnotationHold] = "audit" }
	heldUnsaid := func(seen *state.Observed) { seen.Node.Annotations[config.AnnotationHold] = "" }
	other := func(seen *state.Observed) { seen.Journal.Target = "other" }
	forced := func(seen *state.Observed) { seen.Node.Annotations[config.AnnotationForce] = config.ForceNow }
	fresh := func(seen *state.Observed) {
		seen.Journal.RecordStartup([]corev1.Taint{{Key: config.TaintNotReady}})
	}
	unread := func(seen *state.Observed) { seen.Pool.Err = errors.New("no Caturday") }
	opens := func(seen *state.Observed) { seen.Pool.Schedule = openFor(time.Hour) }
	always := func(seen *state.Observed) { seen.Pool.Schedule = window.Schedule{} }
	never := func(seen *state.Observed) { seen.Pool.Schedule = openFor(time.Minute) }
	later := func(seen *state.Observed) {
		seen.Pool.Schedule = window.Schedule{Windows: []window.Window{{NotBefore: noon.Add(time.Hour)}}}
	}
	closes := func(seen *state.Observed) {
		seen.Pool.Schedule = window.Schedule{Windows: append(openFor(time.Minute).Windows, nights().Windows...)}
	}
	pool := func(seen *state.Observed) {
		seen.Pool.Name, seen.Pool.MaxUnavailable = "trainers", &maintenance.Limit{Nodes: 2}
	}
	unlimited := func(seen *state.Observed) { seen.Pool.MaxUnavailable = nil }
	takesSlot := append([]plan.Kind{plan.AcquireSlot}, evicts...)
	const (
		unrestricted, undisturbing = "at once: no window restricts it", "at once: it disturbs no pod"
		isOpen                     = "at once: a window is open until Sat 2000-01-01 13:00:00Z, by the windows of the maintenance file"
		tonight                    = "at Sat 2000-01-01 22:00:00Z, by the windows of "
		turn                       = "when a slot is free (pool trainers changes at most 2 nodes at a time)"
		none                       = " is as long as the change takes, 10m0s"
		untilGone                  = `only after annotation gpuslice.io/hold ("audit") is removed`
		force                      = "to begin at once: kubectl annotate node gpu-1 gpuslice.io/force=asked; "
		begins                     = force + "the change begins at Sat 2000-01-01 22:00:00Z by the windows of "
		since, takes               = "; since 2000-01-01 12:00:00Z", ", and takes 10m0s; since 2000-01-01 12:00:00Z"
		heldUp                     = "to go on: kubectl annotate node gpu-1 gpuslice.io/hold-; " +
			`changes nothing until annotation gpuslice.io/hold ("audit") is removed` + since
		longer = "make a window longer in the maintenance file or the profile; " + force
		putOff = "; the change is postponed"
	)
	for name, row := range map[string]struct {
		changes []func(*state.Observed)
		kinds   []plan.Kind
		runs    string
		err     string // empty if it may
	}{
		"no windows":          {of(always), evicts, unrestricted, ""},
		"no pod is disturbed": {of(), adds, undisturbing, ""},
		"a window is open":    {of(opens), evicts, isOpen, ""},
		"a window comes":      {of(), evicts, tonight + "the maintenance file", begins + "the maintenance file" + takes},
		"no window comes":     {of(never), evicts, "never: none of the windows of the maintenance file" + none, longer + "none of the windows of the maintenance file" + none + since},
		"held":                {of(held), evicts, untilGone, heldUp},
		"held without a text": {
			of(heldUnsaid), evicts, "only after annotation gpuslice.io/hold is removed",
			"to go on: kubectl annotate node gpu-1 gpuslice.io/hold-; changes nothing until annotation gpuslice.io/hold is removed" + since,
		},
		"held, and begun":         {of(cordoned, always, held), evicts, unrestricted, ""},
		"another was begun, held": {of(cordoned, always, held, other), evicts, untilGone, `annotation gpuslice.io/hold ("audit") is set, and the change had begun for another target, other` + putOff},
		"the file cannot be read": {
			of(unread), evicts, "only after the maintenance file can be read: no Caturday",
			"fix the maintenance file, or delete its ConfigMap to have no windows; " +
				"changes nothing until the file says when this node may be disturbed: no Caturday" + since,
		},
		"begun, the file cannot be read": {
			of(cordoned, unread), evicts, "only after the maintenance file can be read: no Caturday",
			"the maintenance file can no longer be read: no Caturday" + putOff,
		},
		"forced":                    {of(forced), evicts, unrestricted, ""},
		"forced in an open window":  {of(forced, opens), evicts, unrestricted, ""},
		"a GPU was touched":         {of(touched), evicts, unrestricted, ""},
		"a fresh node has a daemon": {of(cordoned, fresh), evicts, unrestricted, ""},
		"begun in an open window":   {of(cordoned, opens), evicts, isOpen, ""},
		"begun, the window closes": {
			of(cordoned, closes), evicts, tonight + "the maintenance file",
			"the window closes at Sat 2000-01-01 12:01:00Z, and the rest of the change takes 10m0s" + putOff,
		},
		"begun, the window has closed": {
			of(cordoned), evicts, tonight + "the maintenance file",
			"the window closed at Sat 2000-01-01 04:00:00Z before a GPU was touched" + putOff,
		},
		"begun before the first window": {
			of(cordoned, later), evicts, "at Sat 2000-01-01 13:00:00Z, by the windows of the maintenance file",
			"the window is closed before a GPU was touched" + putOff,
		},
		"a slot is to be taken":  {of(always, pool), takesSlot, turn, ""},
		"and a window comes":     {of(pool), takesSlot, tonight + "pool trainers, " + turn, begins + "pool trainers" + takes},
		"a slot was taken":       {of(pool), evicts, tonight + "pool trainers", begins + "pool trainers" + takes},
		"the pool has no limit":  {of(pool, unlimited), takesSlot, tonight + "pool trainers", begins + "pool trainers" + takes},
		"a slot for a held node": {of(pool, held), takesSlot, untilGone, heldUp},
		"a slot, and no window":  {of(pool, never), takesSlot, "never: none of the windows of pool trainers" + none, longer + "none of the windows of pool trainers" + none + since},
	} {
		seen, want := waiting()
		for _, change := range row.changes {
			change(seen)
		}
		said := ""
		if err := gateAtNoon().Allow(seen, *want, steps(row.kinds)); err != nil {
			said = err.Error()
		}
		if said != row.err {
			t.Errorf("%s: the error is\n%q, want\n%q", name, said, row.err)
		}
		if runs := gateAtNoon().Runs(seen, *want, steps(row.kinds), false); runs != row.runs {
			t.Errorf("%s: the preview says\n%q, want\n%q", name, runs, row.runs)
		}
	}
}

// The nodes of a pool begin within its jitter, each at a moment of its own, and in no more than a tenth of a window that ends.
func TestTheNodesOfAPoolBeginWithinItsJitter(t *testing.T) {
	t.Parallel()
	from := noon.Add(time.Hour)
	for name, row := range map[string]struct {
		window window.Window
		jitter time.Duration
		least  time.Duration // after the window opens
		most   time.Duration
	}{
		"a window without an end":         {window: window.Window{NotBefore: from}, jitter: time.Hour, least: time.Second, most: time.Hour},
		"a window of a day":               {window: window.Window{NotBefore: from, NotAfter: from.Add(24 * time.Hour)}, jitter: time.Hour, least: time.Second, most: time.Hour},
		"a window of an hour":             {window: window.Window{NotBefore: from, NotAfter: from.Add(time.Hour)}, jitter: time.Hour, least: time.Second, most: 6 * time.Minute},
		"a window as long as the change":  {window: window.Window{NotBefore: from, NotAfter: from.Add(10 * time.Minute)}, jitter: time.Hour},
		"all at once":                     {window: window.Window{NotBefore: from, NotAfter: from.Add(24 * time.Hour)}},
		"all at once, and it has no end":  {window: window.Window{NotBefore: from}},
		"a window with a minute to spare": {window: window.Window{NotBefore: from, NotAfter: from.Add(11 * time.Minute)}, jitter: time.Hour, least: time.Second, most: time.Minute},
	} {
		seen, want := waiting()
		seen.Pool.Schedule, seen.Pool.Jitter = window.Schedule{Windows: []window.Window{row.window}}, row.jitter
		_, _, wait := allow(t, seen, *want, evicts)
		if wait == nil || wait.Planned.Sub(from) < row.least || wait.Planned.Sub(from) > row.most {
			t.Errorf("%s: %v, want between %s and %s after it opens", name, wait, row.least, row.most)
		}
	}
}

// The moment follows from the node's name alone: the next agent of the node waits for the same one, and the agents of other nodes for others.
func TestTheMomentOfANodeFollowsFromItsName(t *testing.T) {
	t.Parallel()
	moment := func(node string) time.Time {
		seen, want := waiting()
		seen.Node.Name, seen.Pool.Jitter = node, time.Hour
		_, _, wait := allow(t, seen, *want, evicts)
		if wait == nil {
			t.Fatalf("%s does not wait for its window", node)
		}
		return wait.Planned
	}
	moments := map[time.Time]bool{}
	for _, node := range []string{"gpu-1", "gpu-2", "gpu-3"} {
		at := moment(node)
		if again := moment(node); !again.Equal(at) {
			t.Errorf("another agent of %s begins at %s, and not at %s", node, again, at)
		}
		moments[at] = true
	}
	if len(moments) != 3 {
		t.Errorf("three nodes begin at %v", moments)
	}
}

// A node whose pool has no windows is open until the next freeze, whatever the jitter.
func TestAChangeBeginsAtOnceWhereItIsDoneBeforeTheNextFreeze(t *testing.T) {
	t.Parallel()
	for left, begins := range map[time.Duration]bool{10 * time.Minute: true, 10*time.Minute - time.Second: false} {
		seen, want := waiting()
		seen.Pool.Schedule = window.Schedule{Freezes: []window.Freeze{{From: noon.Add(left), To: noon.Add(left + time.Hour)}}}
		seen.Pool.Jitter = time.Hour
		if _, _, wait := allow(t, seen, *want, evicts); (wait == nil) != begins {
			t.Errorf("%s before the freeze: %v", left, wait)
		}
	}
}
