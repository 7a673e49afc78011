package fencing_test

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// Promise 5: before the first step that leads to a disturbance, whatever would keep the change from its end is found, and named. Behind that, and
// for steps that disturb nothing, nothing is checked.
func TestWhatIsCheckedBeforeTheFirstDisturbance(t *testing.T) {
	t.Parallel()
	kured := func(s *state.Observed) {
		s.Marks.Tools = []fence.Marker{{Tool: "kured", Sign: "annotation weave.works/kured-reboot-in-progress"}}
	}
	of := func(changes ...func(*state.Observed)) func(*state.Observed) {
		return func(s *state.Observed) {
			for _, change := range changes {
				change(s)
			}
		}
	}
	journaled := func(j journal.Journal) func(*state.Observed) {
		return func(s *state.Observed) { s.Journal = &j }
	}
	paused := func(s *state.Observed) { s.Pauses = []fence.Operand{{Label: dcgm, State: fence.OperandPaused}} }
	deaf := func(s *state.Observed) { s.Kubelet.Err = errors.New("kubelet is silent") }
	blind := func(s *state.Observed) { s.Holders.Err = errors.New("no table") }
	python := func(s *state.Observed) {
		s.Holders.Processes = []holders.Client{{PID: 4711, Command: "python", Devices: []string{"GPU-a"}, Sources: []holders.Source{holders.SourceNVML}}}
	}
	unplugged := func(s *state.Observed) { s.DevicePlugin.Pods = nil }
	tainted := func(keys ...string) func(*state.Observed) {
		return func(s *state.Observed) {
			for _, key := range keys {
				s.Node.Spec.Taints = append(s.Node.Spec.Taints, corev1.Taint{Key: key, Value: "yes", Effect: corev1.TaintEffectNoSchedule})
			}
		}
	}
	restricted := tainted("restrictedaccess")
	bears := func(s *state.Observed) {
		s.DevicePlugin.Pods[0].Spec.Tolerations = []corev1.Toleration{{Key: "restrictedaccess", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}}
	}
	daemon := func(s *state.Observed) {
		s.DevicePlugin.MPSDaemons = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "mps", UID: "mps"}}}
	}
	starting := func(s *state.Observed) { tainted("fresh")(s); s.Marks.Startup = s.Node.Spec.Taints }
	restarts := []plan.Kind{plan.Record, plan.Create, plan.RestartOperands}
	fences, creates := []plan.Kind{plan.Record, plan.Fence, plan.SetMode}, []plan.Kind{plan.Record, plan.Create}
	for name, row := range map[string]struct {
		observed func(*state.Observed)
		kinds    []plan.Kind
		undo     bool
		reason   config.Reason // empty: nothing is checked
		says     string
	}{
		"another tool":                                  {kured, fences, false, config.ReasonOtherMaintenance, "kured, by annotation weave.works/kured-reboot-in-progress"},
		"a tool that only announces":                    {of(kured, deaf, func(s *state.Observed) { s.Marks.Tools[0].Planned = true }), fences, false, config.ReasonKubeletUnavailable, "kubelet is silent"},
		"another tool, before a slot":                   {kured, []plan.Kind{plan.AcquireSlot, plan.Create}, false, config.ReasonOtherMaintenance, "kured"},
		"another tool, before what disrupts":            {kured, []plan.Kind{plan.Record, plan.Evict}, false, config.ReasonOtherMaintenance, "kured"},
		"a silent kubelet":                              {of(deaf, blind, python), fences, false, config.ReasonKubeletUnavailable, "kubelet is silent"},
		"no table of processes":                         {of(blind, python), fences, false, config.ReasonHoldersUnknown, "no table"},
		"a process of no pod":                           {python, fences, false, config.ReasonGPUInUse, "python"},
		"no device plugin":                              {of(python, unplugged), fences, false, config.ReasonNoDevicePlugin, "changes nothing until then"},
		"no device plugin, and instances are made":      {unplugged, creates, false, config.ReasonNoDevicePlugin, "changes nothing until then"},
		"no device plugin, and more instances are made": {of(unplugged, journaled(journal.Journal{})), creates, false, "", ""},
		"a taint that keeps the plugin from starting again": {
			of(python, restricted),
			[]plan.Kind{plan.Record, plan.Fence, plan.PauseOperands},
			false, config.ReasonNoDevicePlugin,
			"add the toleration to the DaemonSet of pod kube-system/plugin; pod kube-system/plugin does not tolerate the taint restrictedaccess=yes:NoSchedule, and would not start again",
		},
		"such a taint, and instances are made":         {restricted, restarts, false, config.ReasonNoDevicePlugin, "changes nothing until then"},
		"such a taint, and MPS has a daemon":           {of(restricted, bears, daemon), restarts, false, config.ReasonNoDevicePlugin, "pod kube-system/mps does not tolerate"},
		"such a taint, and the plugin goes on running": {of(kured, restricted), creates, false, "", ""},
		"such a taint, and the plugin bears it":        {of(restricted, bears), restarts, false, "", ""},
		"taints that go by themselves":                 {of(starting, tainted("node.kubernetes.io/not-ready", config.TaintGPUUnhealthy)), restarts, false, "", ""},
		"a silent kubelet, and instances are made":     {of(kured, deaf), creates, false, config.ReasonKubeletUnavailable, "kubelet is silent"},
		"no pod is disturbed":                          {of(kured, blind, python), creates, false, "", ""},
		"the fence is up":                              {of(kured, journaled(journal.Journal{Cordoned: true})), fences, false, "", ""},
		"an operand is paused":                         {of(kured, journaled(journal.Journal{}), paused), fences, false, "", ""},
		"a change without a fence turns into one with": {of(kured, journaled(journal.Journal{})), fences, false, config.ReasonOtherMaintenance, "kured"},
		"an undo":                                {kured, fences, true, "", ""},
		"a pod leaves, behind what comes before": {kured, []plan.Kind{plan.Evict, plan.SetMode}, false, "", ""},
	} {
		h := newHost(t)
		h.seen.DevicePlugin.Pods = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "plugin", UID: "plugin"}}}
		row.observed(h.seen)
		steps := make([]plan.Step, len(row.kinds))
		for i, kind := range row.kinds {
			steps[i].Kind = kind
			if kind == plan.PauseOperands || kind == plan.RestartOperands {
				steps[i].Pods = []plan.Pod{{UID: "plugin"}, {UID: "mps"}}
			}
		}
		err := h.fencing.Preflight(t.Context(), act.Input{Seen: h.seen, Want: state.Desired{Fingerprint: "asked", Undo: row.undo}, Steps: steps})
		var wait *outcome.Waiting
		switch {
		case row.reason == "" && err == nil:
		case row.reason == "" || !errors.As(err, &wait):
			t.Errorf("%s: %v, want %q", name, err, row.reason)
		case wait.Reason != row.reason || !strings.Contains(wait.Error(), row.says) || !wait.Since.Equal(now):
			t.Errorf("%s: %s since %s: %s; want %s: %s", name, wait.Reason, wait.Since, wait.Error(), row.reason, row.says)
		}
	}
}
