package fencing_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/fencing"
	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/agent/act/plugin"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/observe"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/test/clientset"
)

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// began is when the change did that the journals of the tests are of.
var began = now.Add(-10 * time.Minute)

var (
	startup = corev1.Taint{Key: config.TaintNotReady, Value: "pool-a", Effect: corev1.TaintEffectNoExecute}
	theirs  = corev1.Taint{Key: "team", Effect: corev1.TaintEffectNoSchedule}
)

// disk is the host's.
type disk struct{ record journal.Record }

// Read implements journal.Store.
func (d *disk) Read(context.Context) (*journal.Record, error) { return &d.record, nil }

// Write implements journal.Store.
func (d *disk) Write(_ context.Context, r journal.Record) error { d.record = r; return nil }

// Try implements journal.Store.
func (*disk) Try(context.Context, journal.Record) error { return nil }

// SetAside implements journal.Store.
func (*disk) SetAside(context.Context) (string, error) { return "", errors.New("there is none") }

// host is a node, and what fences it.
type host struct {
	t       *testing.T
	client  *fake.Clientset
	clock   *clocktesting.FakeClock
	events  *record.FakeRecorder
	disk    disk
	fencing *fencing.Fencing
	seen    *state.Observed
}

// newHost returns the node as the agent has observed it: it has two GPUs, and no change is under way.
func newHost(t *testing.T, change ...func(*corev1.Node)) *host {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", UID: "uid", ResourceVersion: "1", Labels: map[string]string{}, Annotations: map[string]string{}}}
	for _, c := range change {
		c(node)
	}
	h := &host{t: t, client: fake.NewClientset(node), clock: clocktesting.NewFakeClock(now), events: record.NewFakeRecorder(100)}
	settings, clock := config.Default(), monotonic.New(h.clock)
	env := act.Env{
		Node: "gpu-1", Settings: settings, Events: events.Recorder{To: h.events}, Clock: clock, Log: zap.NewNop(),
		Nodes: nodewrite.Writer{Client: clientset.Of(h.client), Timeout: time.Minute, Startup: settings.StartupTaints()},
		Fence: fence.Fence{
			Taint: state.FenceTaint(), StartupKeys: settings.StartupTaints().Keys(), JournalKey: config.AnnotationJournal,
			KeepCordonedKey: config.AnnotationKeepCordoned, ReasonKey: config.AnnotationCordonReason, ReasonPrefix: config.CordonReasonPrefix,
		},
	}
	keeper := &journal.Keeper{Store: &h.disk, Log: env.Log}
	h.fencing = &fencing.Fencing{
		Env: env, Record: keeper, Journal: &journal.Writer{Record: keeper, Nodes: env.Nodes, Fence: env.Fence, Clock: clock},
		Slot: &fleet.Slot{Slots: &fleet.Leases{}, Clock: clock, Log: env.Log}, Processes: &observe.Processes{Settings: settings, Clock: clock},
		Handover: &plugin.Handover{Plugin: &deviceplugin.Plugin{Settings: settings, Clock: clock, Log: env.Log}},
		Timing:   &fencing.Timing{}, Retries: decide.NewRetries(clock, settings),
	}
	h.seen = &state.Observed{Boot: state.Boot{ID: "boot"}}
	h.observe()
	return h
}

// node returns the node as the API server has it.
func (h *host) node() *corev1.Node {
	h.t.Helper()
	node, err := h.client.CoreV1().Nodes().Get(h.t.Context(), "gpu-1", metav1.GetOptions{})
	if err != nil {
		h.t.Fatal(err)
	}
	return node
}

// observe brings what the agent has observed of the node object up to date.
func (h *host) observe() {
	h.t.Helper()
	h.seen.Node = h.node()
	h.seen.Marks.Fenced = h.fencing.Fence.IsRaised(h.seen.Node)
	h.seen.Marks.Startup = h.fencing.Startup(h.seen.Node, h.seen.Journal)
	h.seen.Marks.Tools = fence.Markers(h.seen.Node, h.fencing.Settings.Operands)
	h.seen.Journal = nil
	if text := h.seen.Node.Annotations[config.AnnotationJournal]; text != "" {
		var err error
		if h.seen.Journal, err = journal.Parse(text); err != nil {
			h.t.Fatal(err)
		}
	}
}

// behind puts the node behind the fence of a change.
func behind(j journal.Journal, taints ...corev1.Taint) func(*corev1.Node) {
	return func(node *corev1.Node) {
		j.Operation, j.Target, j.BootID, j.Started, j.Cordoned = "op", "all-1g.10gb", "boot", began, true
		text, err := j.Encode()
		if err != nil {
			panic(err)
		}
		node.Annotations[config.AnnotationJournal] = text
		node.Spec.Unschedulable = true
		node.Spec.Taints = append(taints, state.FenceTaint())
	}
}

func annotated(key, value string) func(*corev1.Node) {
	return func(node *corev1.Node) { node.Annotations[key] = value }
}

// is fails the test if the node has another cordon, or other taints.
func (h *host) is(what string, unschedulable bool, taints ...corev1.Taint) {
	h.t.Helper()
	node := h.node()
	if diff := cmp.Diff(taints, node.Spec.Taints, cmpopts.EquateEmpty()); diff != "" || node.Spec.Unschedulable != unschedulable {
		h.t.Errorf("%s: unschedulable is %t, taints (-want +got):\n%s", what, node.Spec.Unschedulable, diff)
	}
}

// fresh is a journal of a change that began with the startup taint.
func fresh() journal.Journal {
	var j journal.Journal
	j.RecordStartup([]corev1.Taint{startup})
	return j
}

const (
	scaleDown = config.AnnotationScaleDownDisabled
)

// Promises 6, 9, 10 and 13: the end of a change takes away what the change has set, and nothing else. A fresh node whose change has failed is as
// it was registered.
func TestWhatIsTakenAwayWhenTheNodeIsGivenBack(t *testing.T) {
	t.Parallel()
	wanted, undo := state.Desired{Name: "all-1g.10gb", Fingerprint: "asked"}, state.Desired{Name: "all-1g.10gb", Fingerprint: "asked", Undo: true}
	for name, row := range map[string]struct {
		node          []func(*corev1.Node)
		want          state.Desired
		waits         string // for this tool; empty if the node is given back
		unschedulable bool
		taints        []corev1.Taint
		kept          string // the annotation for an autoscaler
	}{
		"our own cordon":             {[]func(*corev1.Node){behind(journal.Journal{}, theirs)}, wanted, "", false, []corev1.Taint{theirs}, ""},
		"one from before the change": {[]func(*corev1.Node){behind(journal.Journal{WasUnschedulable: true})}, wanted, "", true, nil, ""},
		"one that a user keeps":      {[]func(*corev1.Node){behind(journal.Journal{}), annotated(config.AnnotationKeepCordoned, "yes")}, wanted, "", true, nil, ""},
		"one that a tool relies on": {
			[]func(*corev1.Node){behind(journal.Journal{}), annotated("talos.dev/cordoned", "true")}, wanted, "Talos", true, []corev1.Taint{state.FenceTaint()}, "",
		},
		"one from before that a tool relies on": {
			[]func(*corev1.Node){behind(journal.Journal{WasUnschedulable: true}), annotated("talos.dev/cordoned", "true")}, wanted, "", true, nil, "",
		},
		"our annotation": {[]func(*corev1.Node){behind(journal.Journal{Kept: []string{scaleDown}}), annotated(scaleDown, "true")}, wanted, "", false, nil, ""},
		"a user's":       {[]func(*corev1.Node){behind(journal.Journal{}), annotated(scaleDown, "true")}, wanted, "", false, nil, "true"},
		"ours, which a user has changed since": {
			[]func(*corev1.Node){behind(journal.Journal{Kept: []string{scaleDown}}), annotated(scaleDown, "false")}, wanted, "", false, nil, "false",
		},
		"a fresh node that is as asked":          {[]func(*corev1.Node){behind(fresh(), startup, theirs)}, wanted, "", false, []corev1.Taint{theirs}, ""},
		"a fresh node that is not":               {[]func(*corev1.Node){behind(fresh(), theirs)}, undo, "", false, []corev1.Taint{theirs, startup}, ""},
		"an undo of a node that is open":         {[]func(*corev1.Node){behind(journal.Journal{}, theirs)}, undo, "", false, []corev1.Taint{theirs}, ""},
		"a fresh node of which nothing is asked": {[]func(*corev1.Node){behind(fresh())}, state.Desired{Undo: true}, "", false, nil, ""},
	} {
		h := newHost(t, row.node...)
		err := h.fencing.Release(t.Context(), act.Input{Seen: h.seen, Want: row.want, Steps: []plan.Step{{Kind: plan.Release}}})
		var wait *outcome.Waiting
		switch {
		case row.waits == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case row.waits != "" && (!errors.As(err, &wait) || wait.Reason != config.ReasonOtherMaintenance || !strings.Contains(wait.Message, row.waits)):
			t.Errorf("%s: got %v, want a wait for %s", name, err, row.waits)
		}
		h.is(name, row.unschedulable, row.taints...)
		annotations := h.node().Annotations
		if _, pending := annotations[config.AnnotationJournal]; pending != (row.waits != "") || annotations[scaleDown] != row.kept {
			t.Errorf("%s: annotations %v", name, annotations)
		}
		if h.disk.record.Journal != "" && row.waits == "" {
			t.Errorf("%s: the record still has the journal", name)
		}
	}
}

// Promise 8: an agent that is killed when the node is given back is followed by one that tries no failed change again, and knows what was verified.
func TestWhatIsLearntBeforeTheNodeIsGivenBack(t *testing.T) {
	t.Parallel()
	failure := func(later bool) *api.Failure {
		return &api.Failure{Fingerprint: "asked", Reason: config.ReasonHardwareFailure, Message: "it broke", Later: later}
	}
	for name, row := range map[string]struct {
		journal  journal.Journal
		undo     bool
		verified string
		failed   bool
		took     []journal.Took
	}{
		"it is as asked":      {journal.Journal{}, false, "asked", false, []journal.Took{{Whole: 600, Rest: 120}}},
		"it has failed":       {journal.Journal{Undo: failure(false)}, true, "", true, nil},
		"it was put off":      {journal.Journal{Undo: failure(true)}, true, "", false, nil},
		"it has come to pass": {journal.Journal{Undo: failure(false)}, false, "asked", false, []journal.Took{{Whole: 600, Rest: 120}}},
	} {
		h := newHost(t, behind(row.journal))
		h.fencing.Timing.NoteTouched(now.Add(-2 * time.Minute))
		want := state.Desired{Name: "all-1g.10gb", Fingerprint: "asked", Undo: row.undo}
		if err := h.fencing.Release(t.Context(), act.Input{Seen: h.seen, Want: want, Steps: []plan.Step{{Kind: plan.Release}}}); err != nil {
			t.Fatal(err)
		}
		learnt := h.disk.record.Learnt
		if diff := cmp.Diff(row.took, learnt.Took); diff != "" || learnt.Verified != row.verified || (learnt.Failed != nil) != row.failed {
			t.Errorf("%s: verified %q, failed %v; took (-want +got):\n%s", name, learnt.Verified, learnt.Failed, diff)
		}
	}
}

// The time for which another tool keeps the node after the capacity is verified is no part of the change.
func TestTheWaitForAnotherToolIsNoPartOfTheEstimate(t *testing.T) {
	t.Parallel()
	h := newHost(t, behind(journal.Journal{}), annotated("talos.dev/cordoned", "true"))
	in := act.Input{Seen: h.seen, Want: state.Desired{Name: "all-1g.10gb", Fingerprint: "asked"}, Steps: []plan.Step{{Kind: plan.Release}}}
	h.fencing.Timing.NoteTouched(now.Add(-2 * time.Minute))
	if err := h.fencing.Release(t.Context(), in); err == nil {
		t.Fatal("the node is given back under the tool's hands")
	}
	h.clock.Step(2 * time.Hour)
	h.seen.Marks.Tools = nil
	if err := h.fencing.Release(t.Context(), in); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]journal.Took{{Whole: 600, Rest: 120}}, h.disk.record.Learnt.Took); diff != "" {
		t.Errorf("took (-want +got):\n%s", diff)
	}
}

// A process that ends what another one has begun does not know how long that took.
func TestTheEstimateGoesByTheLastChangesThatOneProcessHasSeen(t *testing.T) {
	t.Parallel()
	before := []journal.Took{{Whole: 1}, {Whole: 2}, {Whole: 3}, {Whole: 4}, {Whole: 5}}
	whole := journal.Took{Whole: 601, Rest: 61}
	for name, row := range map[string]struct {
		touched []time.Duration // before now, at which a GPU was
		before  []journal.Took
		want    []journal.Took
	}{
		"the first":                {[]time.Duration{time.Minute + time.Millisecond}, nil, []journal.Took{whole}},
		"by its first touch":       {[]time.Duration{time.Minute + time.Millisecond, time.Second}, nil, []journal.Took{whole}},
		"five are remembered":      {[]time.Duration{time.Minute + time.Millisecond}, before, append(before[1:5:5], whole)},
		"another process began it": {nil, before, before},
	} {
		timing := &fencing.Timing{}
		for _, d := range row.touched {
			timing.NoteTouched(now.Add(-d))
		}
		timing.NoteVerified(now)
		timing.NoteVerified(now.Add(time.Hour))
		if diff := cmp.Diff(row.want, timing.With(row.before, began.Add(-time.Millisecond))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		timing.Forget(now)
		if diff := cmp.Diff(row.before, timing.With(row.before, began)); diff != "" {
			t.Errorf("%s, and the clock was set (-want +got):\n%s", name, diff)
		}
	}
}

// A node that is given back until its reboot has nothing to restore of operands and units any more, and keeps its journal and its startup taint.
func TestAParkedNodeKeepsItsJournal(t *testing.T) {
	t.Parallel()
	j := fresh()
	j.Paused, j.Stopped, j.Kept = map[string]string{"nvidia.com/gpu.deploy.dcgm": "true"}, []string{"nvidia-dcgm.service"}, []string{scaleDown}
	h := newHost(t, behind(j, theirs), annotated(scaleDown, "true"))
	if err := h.fencing.Park(t.Context(), act.Input{Seen: h.seen, Want: state.Desired{Name: "all-1g.10gb"}, Steps: []plan.Step{{Kind: plan.Park}}}); err != nil {
		t.Fatal(err)
	}
	h.is("parked", false, theirs, startup)
	h.observe()
	if j := h.seen.Journal; j == nil || !j.Parked || j.Cordoned || len(j.Paused)+len(j.Stopped)+len(j.Kept) > 0 || len(j.Startup()) != 1 {
		t.Errorf("the journal is %+v", j)
	}
	if text, is := h.node().Annotations[scaleDown]; is {
		t.Errorf("autoscalers still read %q", text)
	}
}

// A user may uncordon a node that was cordoned before the change, or kubelet set its startup taint, while the change is under way: the journal says so
// before anything is taken away, and until the taint is gone nothing is done.
func TestWhatHasComeSinceIsInTheJournalBeforeTheTaintIsTakenAway(t *testing.T) {
	t.Parallel()
	for name, since := range map[string]func(*corev1.Node){
		"an uncordon":     func(n *corev1.Node) { n.Spec.Unschedulable = false },
		"a startup taint": func(n *corev1.Node) { n.Spec.Taints = append(n.Spec.Taints, startup) },
	} {
		h := newHost(t, behind(journal.Journal{WasUnschedulable: true}, theirs), since)
		resume := func() error {
			h.observe()
			return h.fencing.Resume(t.Context(), act.Input{Seen: h.seen, Steps: []plan.Step{{Kind: plan.ResumeOperands}}})
		}
		before := h.node()
		if err := resume(); !errors.Is(err, outcome.ErrPlanAgain) || !slices.Equal(h.node().Spec.Taints, before.Spec.Taints) {
			t.Errorf("%s: %v, and the taints are %v", name, err, h.node().Spec.Taints)
		}
		if err := resume(); err != nil || !slices.Equal(h.node().Spec.Taints, []corev1.Taint{theirs}) {
			t.Errorf("%s, once the journal has it: %v, and the taints are %v", name, err, h.node().Spec.Taints)
		}
		if h.observe(); h.seen.Journal == nil || h.seen.Journal.WasUnschedulable == (name == "an uncordon") || len(h.seen.Journal.Startup()) > 0 != (name == "a startup taint") {
			t.Errorf("%s: the journal is %+v", name, h.seen.Journal)
		}
	}
}
