package fencing_test

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

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
		"a silent kubelet, and instances are made":      {of(kured, deaf), creates, false, config.ReasonKubeletUnavailable, "kubelet is silent"},
		"no pod is disturbed":                           {of(kured, blind, python), creates, false, "", ""},
		"the fence is up":                               {of(kured, journaled(journal.Journal{Cordoned: true})), fences, false, "", ""},
		"an operand is paused":                          {of(kured, journaled(journal.Journal{}), paused), fences, false, "", ""},
		"a change without a fence turns into one with":  {of(kured, journaled(journal.Journal{})), fences, false, config.ReasonOtherMaintenance, "kured"},
		"an undo":                                {kured, fences, true, "", ""},
		"a pod leaves, behind what comes before": {kured, []plan.Kind{plan.Evict, plan.SetMode}, false, "", ""},
	} {
		h := newHost(t)
		h.seen.DevicePlugin.Pods = []corev1.Pod{{}}
		row.observed(h.seen)
		steps := make([]plan.Step, len(row.kinds))
		for i, kind := range row.kinds {
			steps[i].Kind = kind
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
