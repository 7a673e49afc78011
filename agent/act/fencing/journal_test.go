package fencing_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	dcgm     = config.LabelOperandPrefix + "dcgm"
	exporter = config.LabelOperandPrefix + "dcgm-exporter"
	monitor  = "nvidia-dcgm.service"
)

// Promise 7: what the first write of the journal holds, by the steps that follow and by what the journal holds already.
func TestTheJournalHoldsWhatTheStepsTake(t *testing.T) {
	t.Parallel()
	asked := state.Desired{Name: "all-1g.10gb", Fingerprint: "asked", Targets: plan.Targets{"GPU-a": {}}}
	undo := asked
	undo.Undo = true
	failure := &api.Failure{Fingerprint: "asked", Reason: config.ReasonHardwareFailure, Message: "it broke"}
	started := journal.Journal{Target: "all-1g.10gb", Fingerprint: "asked", Operation: "op", BootID: "boot", Started: began, Paused: map[string]string{}}
	first := started
	first.Started = now
	of := func(j journal.Journal, change func(*journal.Journal)) *journal.Journal { change(&j); return &j }
	shape := plan.Step{Kind: plan.SetMode, GPU: "GPU-a"}
	for name, row := range map[string]struct {
		observed func(*state.Observed)
		before   *journal.Journal
		want     state.Desired
		steps    []plan.Step // without the first, which is to record
		journal  *journal.Journal
	}{
		"a change that only creates": {nil, nil, asked, nil, &first},
		"operands and units": {
			func(s *state.Observed) { s.Node.Labels = map[string]string{dcgm: "true", exporter: fence.PausedValue} }, nil, asked,
			[]plan.Step{
				{Kind: plan.PauseOperands, Label: exporter}, {Kind: plan.PauseOperands, Label: dcgm}, {Kind: plan.PauseOperands}, {Kind: plan.StopUnits, Unit: monitor},
			},
			of(first, func(j *journal.Journal) { j.Paused, j.Stopped = map[string]string{dcgm: "true"}, []string{monitor} }),
		},
		"the oldest values count": {
			func(s *state.Observed) { s.Node.Labels = map[string]string{dcgm: "false"} },
			of(started, func(j *journal.Journal) { j.Paused, j.Stopped = map[string]string{dcgm: "true"}, []string{"a.service"} }), asked,
			[]plan.Step{{Kind: plan.PauseOperands, Label: dcgm}, {Kind: plan.StopUnits, Unit: monitor}, {Kind: plan.StopUnits, Unit: "a.service"}},
			of(started, func(j *journal.Journal) {
				j.Paused, j.Stopped = map[string]string{dcgm: "true"}, []string{"a.service", monitor}
			}),
		},
		"a GPU, and the device plugin": {
			func(s *state.Observed) {
				s.DevicePlugin.Pods = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{UID: "plugin"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Args: []string{"--mig-strategy=mixed"}}}}}}
			}, nil, asked,
			[]plan.Step{shape},
			of(first, func(j *journal.Journal) {
				j.Previous, j.Operands, j.Strategy = []journal.GPULayout{{GPU: "GPU-a", MIG: true, Persistent: true}}, []string{"plugin"}, config.MIGStrategyMixed
			}),
		},
		"a GPU that is reset, since it is not well": {
			nil, nil, asked,
			[]plan.Step{{Kind: plan.SetMode, GPU: "GPU-b"}},
			of(first, func(j *journal.Journal) { j.Previous = []journal.GPULayout{{GPU: "GPU-b", Foreign: true}} }),
		},
		"pods of the plugin come and go": {
			func(s *state.Observed) {
				s.DevicePlugin.Pods = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{UID: "b"}}, {ObjectMeta: metav1.ObjectMeta{UID: "c"}}}
			},
			of(started, func(j *journal.Journal) {
				j.Operands, j.Previous = []string{"a", "b"}, []journal.GPULayout{{GPU: "GPU-a", Persistent: true}}
			}), asked,
			[]plan.Step{shape},
			of(started, func(j *journal.Journal) {
				j.Operands, j.Previous = []string{"b", "c"}, []journal.GPULayout{{GPU: "GPU-a", Persistent: true}}
			}),
		},
		"another target": {
			nil, of(started, func(j *journal.Journal) {
				j.Target, j.Fingerprint, j.Reboots, j.RebootAsked, j.NoReset = "other", "former", []string{"boot"}, began, &journal.NoReset{Boot: "boot", GPUs: []nvml.UUID{"GPU-a"}}
				j.Forced, j.Parked, j.Stopped = true, true, []string{monitor}
			}), asked, nil,
			of(first, func(j *journal.Journal) {
				j.NoReset, j.Stopped = &journal.NoReset{Boot: "boot", GPUs: []nvml.UUID{"GPU-a"}}, []string{monitor}
			}),
		},
		"the driver has refused a reset in another boot": {
			func(s *state.Observed) {
				s.Record.Learnt.NoReset = &journal.NoReset{Boot: "former", GPUs: []nvml.UUID{"GPU-a"}}
			}, nil, asked, nil, &first,
		},
		"an undo": {nil, of(started, func(j *journal.Journal) { j.Undo, j.Target = failure, "other" }), undo, nil, of(started, func(j *journal.Journal) { j.Undo, j.Target = failure, "other" })},
		"a user has forced it": {
			func(s *state.Observed) { s.Node.Annotations[config.AnnotationForce] = "asked" }, nil, asked, nil, of(first, func(j *journal.Journal) { j.Forced = true }),
		},
		"a user has edited what was forced": {
			nil, of(started, func(j *journal.Journal) { j.Fingerprint, j.Forced = "former", true }), asked, nil, &started,
		},
		"a verified capacity": {func(s *state.Observed) { s.Capacity.Verified = true }, nil, asked, nil, of(first, func(j *journal.Journal) { j.Verified = true })},
		"what an agent has left": {
			func(s *state.Observed) {
				s.Record.Learnt.Failed = failure
				s.Leftovers.Orphan = state.Orphan{
					Cordon: true, Kept: []string{scaleDown}, Labels: map[string]string{dcgm: "true"},
					Host: state.ToRestore{Stopped: []string{monitor}, Persistent: []nvml.UUID{"GPU-b"}},
				}
			}, nil, asked,
			[]plan.Step{{Kind: plan.Adopt}},
			of(first, func(j *journal.Journal) {
				j.Verified, j.Cordoned, j.Kept, j.Paused, j.Undo = true, true, []string{scaleDown}, map[string]string{dcgm: "true"}, failure
				j.Stopped, j.Persistent = []string{monitor}, []nvml.UUID{"GPU-b"}
			}),
		},
	} {
		h := newHost(t)
		h.seen.Journal = row.before
		h.seen.GPUs = []nvml.GPU{{UUID: "GPU-a", Enabled: true, Pending: true, Persistent: true}, {UUID: "GPU-b"}}
		if row.observed != nil {
			row.observed(h.seen)
		}
		steps := row.steps
		if len(steps) == 0 || steps[0].Kind != plan.Adopt {
			steps = append([]plan.Step{{Kind: plan.Record}}, steps...)
		}
		if err := h.fencing.WriteJournal(t.Context(), act.Input{Seen: h.seen, Want: row.want, Steps: steps}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		got := h.written()
		if got.Operation == "" {
			t.Errorf("%s: the operation has no id", name)
		}
		if diff := cmp.Diff(row.journal, got, cmpopts.IgnoreFields(journal.Journal{}, "Version", "Summary", "Operation"), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// Each target has its own tries of a step; an undo continues the count of the change.
func TestAnotherTargetHasItsOwnTriesOfAStep(t *testing.T) {
	t.Parallel()
	asked := state.Desired{Name: "all-1g.10gb", Fingerprint: "asked"}
	undo := asked
	undo.Undo = true
	create := plan.Step{Kind: plan.Create, GPU: "GPU-a"}
	for name, row := range map[string]struct {
		target string // of the journal before
		want   state.Desired
		counts bool // former failures count
	}{
		"the same target": {"all-1g.10gb", asked, true}, "another": {"other", asked, false}, "the undo of another": {"other", undo, true},
	} {
		for _, step := range []plan.Kind{plan.Record, plan.Fence} {
			h := newHost(t)
			h.seen.Journal = &journal.Journal{Target: row.target, Fingerprint: "asked", Operation: "op", BootID: "boot", Started: began}
			for range h.fencing.Settings.Retry.Failures - 1 {
				h.fencing.Retries.CountFailure(create)
			}
			write := h.fencing.WriteJournal
			if step == plan.Fence {
				write = h.fencing.Raise
			}
			if err := write(t.Context(), act.Input{Seen: h.seen, Want: row.want, Steps: []plan.Step{{Kind: step}, create}}); err != nil {
				t.Fatalf("%s: %s: %v", name, step, err)
			}
			if counts := h.fencing.Retries.OneMoreIsTooMany(create); counts != row.counts {
				t.Errorf("%s: %s: former failures count: %t, want %t", name, step, counts, row.counts)
			}
		}
	}
}

// written returns the journal that the node has by now.
func (h *host) written() *journal.Journal {
	h.t.Helper()
	j, err := journal.Parse(h.node().Annotations[config.AnnotationJournal])
	if err != nil {
		h.t.Fatal(err)
	}
	return j
}

// Promise 6: the fence notes whose cordon there was, and the deadlines count from it, once.
func TestTheFenceNotesWhatTheNodeHadBefore(t *testing.T) {
	t.Parallel()
	cordoned := func(node *corev1.Node) { node.Spec.Unschedulable = true }
	tainted := func(node *corev1.Node) { node.Spec.Taints = []corev1.Taint{startup} }
	slurm := func(label string) corev1.Pod {
		return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "slurmd-1", Labels: map[string]string{label: "1"}}}
	}
	autoscalers := []string{scaleDown, config.AnnotationDoNotDisrupt}
	for name, row := range map[string]struct {
		node    []func(*corev1.Node)
		pods    []corev1.Pod
		was     bool
		kept    []string
		startup int
		started time.Time
	}{
		"an open node":               {kept: autoscalers, started: now},
		"a cordoned one":             {node: []func(*corev1.Node){cordoned}, was: true, kept: autoscalers, started: now},
		"one that autoscalers leave": {node: []func(*corev1.Node){annotated(scaleDown, "false")}, kept: []string{config.AnnotationDoNotDisrupt}, started: now},
		"a fresh one":                {node: []func(*corev1.Node){tainted}, kept: autoscalers, startup: 1, started: now},
		"one whose fence is up": {
			node: []func(*corev1.Node){behind(journal.Journal{}), annotated(config.AnnotationDoNotDisrupt, "true")}, kept: []string{scaleDown}, started: began,
		},
		"one with Slurm's pods": {
			pods: []corev1.Pod{slurm("nodeset.slinky.slurm.net/pod-name")}, kept: append(autoscalers, config.AnnotationCordonReason), started: now,
		},
		"one whose administrator gave Slurm a reason": {
			node: []func(*corev1.Node){annotated(config.AnnotationCordonReason, "disk 3")}, pods: []corev1.Pod{slurm("nodeset.slinky.slurm.net/pod-name")},
			kept: autoscalers, started: now,
		},
		"one with a pod of another label": {pods: []corev1.Pod{slurm("example.com/nodeset.slinky.slurm.net")}, kept: autoscalers, started: now},
	} {
		h := newHost(t, row.node...)
		h.seen.Pods = row.pods
		in := act.Input{Seen: h.seen, Want: state.Desired{Name: "all-1g.10gb", Fingerprint: "asked"}, Steps: []plan.Step{{Kind: plan.Fence}}}
		if err := h.fencing.Raise(t.Context(), in); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		j := h.written()
		if !j.Cordoned || j.WasUnschedulable != row.was || len(j.Startup()) != row.startup || !j.Started.Equal(row.started) {
			t.Errorf("%s: the journal is %+v", name, j)
		}
		if diff := cmp.Diff(row.kept, j.Kept, cmpopts.SortSlices(func(a, b string) bool { return a < b })); diff != "" {
			t.Errorf("%s: annotations (-want +got):\n%s", name, diff)
		}
		if node := h.node(); !node.Spec.Unschedulable || !h.fencing.Fence.IsRaised(node) {
			t.Errorf("%s: the node is %+v", name, node.Spec)
		}
	}
}
