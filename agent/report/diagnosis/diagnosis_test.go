package diagnosis_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report/diagnosis"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	nodeName = "gpu-1"
	dcgm     = config.LabelOperandPrefix + "dcgm"
	target   = "all-1g.10gb"
)

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// train is a pod that holds a GPU.
var train = holders.Pod{
	Namespace: "team", Name: "train", UID: "train-uid", Sources: []holders.Source{holders.SourceKubelet}, Devices: []string{"GPU-a"}, DevicesKnown: true,
}

// evidence is that of a node at rest, of which nothing is asked, with an agent.
func evidence() *diagnosis.Evidence {
	return &diagnosis.Evidence{
		Observed: &state.Observed{
			Node: &corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{}, Annotations: map[string]string{}},
				Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
			},
			Boot: state.Boot{ID: "boot-2"}, Complete: true,
		},
		Now: now, Running: true, Settings: config.Default(),
	}
}

// cordonedBy cordons the node as the field manager, or without one.
func cordonedBy(manager string) func(*diagnosis.Evidence) {
	return func(e *diagnosis.Evidence) {
		e.Node.Spec.Unschedulable = true
		if manager != "" {
			e.Node.ManagedFields = append(e.Node.ManagedFields, metav1.ManagedFieldsEntry{
				Manager: manager, Time: &metav1.Time{Time: now.Add(-time.Hour)}, FieldsV1: metav1.NewFieldsV1(`{"f:spec":{"f:unschedulable":{}}}`),
			})
		}
	}
}

// fenced begins a change ten minutes before, of which the steps are left.
func fenced(steps ...plan.Kind) func(*diagnosis.Evidence) {
	return func(e *diagnosis.Evidence) {
		if !e.Node.Spec.Unschedulable {
			cordonedBy(config.FieldManager)(e)
			e.Node.ManagedFields[0].Time.Time = now.Add(-10 * time.Minute)
		}
		e.Marks.Fenced = true
		e.Journal = &journal.Journal{Operation: "op", Target: target, Started: now.Add(-10 * time.Minute), BootID: "boot-2", Cordoned: true}
		e.Want.Name, e.Want.Label = target, config.LabelMIGConfig
		for _, kind := range steps {
			e.Steps = append(e.Steps, plan.Step{Kind: kind})
		}
	}
}

// stays gives the pod the verdict of a dry run.
func stays(v drain.Verdict) func(*diagnosis.Evidence) {
	return func(e *diagnosis.Evidence) {
		v.Pod = train
		e.Verdicts = append(e.Verdicts, v)
	}
}

// undone says that the change in the journal has failed.
func undone(e *diagnosis.Evidence) {
	e.Journal.Undo = &api.Failure{Reason: config.ReasonHardwareFailure, Message: "the driver refused"}
	e.Want.Undo = true
}

// stalled says that the agent has reported that it can do no more.
func stalled(e *diagnosis.Evidence) {
	e.Record.Learnt.Reported.Phase = api.PhaseStalled
	e.Node.Status.Conditions = append(e.Node.Status.Conditions, corev1.NodeCondition{Type: config.ConditionGPUPartitionReady, Message: "the unit dcgm does not start"})
}

// withoutAgent says that no agent runs on the machine.
func withoutAgent(e *diagnosis.Evidence) { e.Running = false }

// operand pauses an operand by its label.
func operand(value string) func(*diagnosis.Evidence) {
	return func(e *diagnosis.Evidence) { e.Node.Labels[dcgm] = value }
}

// Each cause by what it follows from, with whether the agent or a user has to act. What the evidence itself is read from is in the tests of the loop.
func TestTheCauseAndWhoHasToAct(t *testing.T) {
	t.Parallel()
	type change = func(*diagnosis.Evidence)
	drained := fenced(plan.Evict, plan.SetMode, plan.VerifyCapacity)
	ending := func(finalizers ...string) change {
		return func(e *diagnosis.Evidence) {
			p := train
			p.Terminating, p.GraceEnds, p.Finalizers = true, now.Add(-time.Minute), finalizers
			e.Holders.Pods = []holders.Pod{p}
		}
	}
	kured := func(e *diagnosis.Evidence) {
		e.Marks.Tools = []fence.Marker{{Tool: "kured", Sign: "its annotation", Since: now.Add(-time.Hour), Cordons: true, Done: "uncordons after the reboot"}}
	}
	const free = "the node takes pods, and nothing is left to restore"
	for name, row := range map[string]struct {
		changes []change
		causes  []api.Cause
		verdict api.Verdict
		says    []string
		never   string
	}{
		"a node at rest": {nil, nil, api.VerdictFree, []string{free, `"causes":[]`}, `"asked"`},
		"no answer from the API server": {
			[]change{func(e *diagnosis.Evidence) { e.Node = nil }},
			nil, api.VerdictUnknown,
			[]string{"unknown until the API server answers"},
			"",
		},
		"what no agent has begun": {
			[]change{func(e *diagnosis.Evidence) { e.Want.Name, e.Steps = target, []plan.Step{{Kind: plan.Fence}} }},
			nil, api.VerdictFree,
			[]string{"does not match all-1g.10gb", `"steps":["fence`},
			"",
		},
		"what is impossible": {
			[]change{func(e *diagnosis.Evidence) { e.Want.Name, e.Refused = target, errors.New("no such profile") }},
			nil, api.VerdictFree,
			[]string{"does not match all-1g.10gb", `"refused":"no such profile"`},
			"",
		},
		"what waits for its window": {
			[]change{func(e *diagnosis.Evidence) { e.NotYet = &outcome.Waiting{Message: "no window", Advice: "force it"} }},
			[]api.Cause{api.CauseNotAllowedYet},
			api.VerdictFree,
			[]string{"no window", `"you":"force it"`},
			"",
		},
		"a user's taint": {
			[]change{func(e *diagnosis.Evidence) {
				e.Node.Spec.Taints = append(e.Node.Spec.Taints, corev1.Taint{Key: "team", Value: "b", Effect: corev1.TaintEffectNoExecute}, corev1.Taint{Key: "soft", Effect: corev1.TaintEffectPreferNoSchedule})
			}},
			nil, api.VerdictFree,
			[]string{"the node takes pods that tolerate team:NoExecute, and nothing is left to restore"},
			"soft",
		},
		"a cordon by hand": {
			[]change{cordonedBy("kubectl-cordon")},
			[]api.Cause{api.CauseCordonedByPerson},
			api.VerdictNotOurs,
			[]string{
				"cordoned by kubectl-cordon since 2026-03-01T11:00:00Z (60m)",
				`"command":"kubectl uncordon gpu-1"`,
				"not ours: cordoned by kubectl-cordon",
			},
			"",
		},
		"a cordon that managers hide": {
			[]change{cordonedBy("")},
			[]api.Cause{api.CauseCordonedByPerson},
			api.VerdictNotOurs,
			[]string{"does not say by whom"},
			"",
		},
		"a cordon of a controller": {
			[]change{cordonedBy("machine-controller")},
			[]api.Cause{api.CauseCordonedByTool},
			api.VerdictNotOurs,
			[]string{"cordoned by machine-controller"},
			"",
		},
		"a cordon by hand before": {
			[]change{cordonedBy("kubectl"), drained},
			[]api.Cause{api.CauseCordonedByPerson, api.CauseChangeUnderWay},
			api.VerdictGivesBack,
			[]string{"removes its own marks within", "the node stays closed: cordoned by kubectl"},
			"",
		},
		"another tool": {
			[]change{cordonedBy("kured"), kured},
			[]api.Cause{api.CauseCordonedByTool},
			api.VerdictNotOurs,
			[]string{"kured is at work here since", "uncordons after the reboot"},
			"",
		},
		"another tool that cordons not": {
			[]change{kured, func(e *diagnosis.Evidence) { e.Marks.Tools[0].Cordons = false }},
			nil, api.VerdictFree,
			[]string{`"tool":"kured"`, free},
			"",
		},
		"a cordon that is to be kept": {
			[]change{drained, func(e *diagnosis.Evidence) { e.Node.Annotations[config.AnnotationKeepCordoned] = "rack" }},
			[]api.Cause{api.CauseKeepCordoned, api.CauseChangeUnderWay},
			api.VerdictWaitsForYou,
			[]string{`keep-cordoned="rack"`, "kubectl annotate node gpu-1 gpuslice.io/keep-cordoned-"},
			"",
		},
		"a cordon by hand that is to be kept": {
			[]change{cordonedBy("kubectl"), func(e *diagnosis.Evidence) { e.Node.Annotations[config.AnnotationKeepCordoned] = "rack" }},
			[]api.Cause{api.CauseKeepCordoned, api.CauseCordonedByPerson},
			api.VerdictNotOurs,
			[]string{"not ours: cordoned by kubectl"},
			"",
		},
		"one that would be, and is not": {
			[]change{func(e *diagnosis.Evidence) { e.Node.Annotations[config.AnnotationKeepCordoned] = "rack" }},
			nil, api.VerdictFree,
			[]string{free},
			"",
		},
		"the taint of a lifted cordon": {
			[]change{
				func(e *diagnosis.Evidence) {
					e.Node.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}}
				},
			},
			[]api.Cause{api.CauseUnschedulableTaintLeft},
			api.VerdictNotOurs,
			[]string{"left behind by a lifted cordon", "kubectl taint node gpu-1 node.kubernetes.io/unschedulable-"},
			"",
		},
		"the taint of a cordon": {
			[]change{
				cordonedBy("kubectl"),
				func(e *diagnosis.Evidence) {
					e.Node.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}}
				},
			},
			[]api.Cause{api.CauseCordonedByPerson},
			api.VerdictNotOurs,
			nil, "left behind",
		},
		"kubelet is away": {
			[]change{drained, func(e *diagnosis.Evidence) { e.Node.Status.Conditions[0].Status = corev1.ConditionUnknown }},
			[]api.Cause{api.CauseNodeNotReady, api.CauseChangeUnderWay},
			api.VerdictWaitsForYou,
			[]string{`"ready":"Unknown"`, "waits for you: bring kubelet back"},
			"",
		},
		"kubelet is away from a node": {
			[]change{func(e *diagnosis.Evidence) { e.Node.Status.Conditions = nil }},
			[]api.Cause{api.CauseNodeNotReady},
			api.VerdictNotOurs,
			[]string{"kubelet has never reported it"},
			"",
		},
		"kubelet names no devices": {
			[]change{func(e *diagnosis.Evidence) { e.Kubelet.Err = errors.New("no socket") }},
			[]api.Cause{api.CauseNodeNotReady},
			api.VerdictFree,
			[]string{"which pod has which device: no socket"},
			"",
		},
		"no driver": {
			[]change{drained, func(e *diagnosis.Evidence) { e.Driver = "not loaded" }},
			[]api.Cause{api.CauseDriverAway, api.CauseChangeUnderWay},
			api.VerdictWaitsForYou,
			[]string{"nvidia-smi # on gpu-1"},
			"",
		},
		"an upgrade of the driver": {
			[]change{operand(fence.PausedForDriverUpgrade), func(e *diagnosis.Evidence) { e.Driver = "not loaded" }},
			[]api.Cause{api.CauseDriverAway, api.CauseOperandsPaused},
			api.VerdictNotOurs,
			[]string{"how far the upgrade of the driver has come"},
			"",
		},
		"a change that drains": {
			[]change{drained},
			[]api.Cause{api.CauseChangeUnderWay},
			api.VerdictGivesBack,
			[]string{`"deadline":"2026-03-01T12:50:00Z"`, "begun at 2026-03-01T11:50:00Z", "3 steps left, the next: evict"},
			"",
		},
		"one whose agent died in a drain": {
			[]change{withoutAgent, drained},
			[]api.Cause{api.CauseAgentDiedInDrain},
			api.VerdictWaitsForYou,
			[]string{"continues where this one stopped", "gpuslice-agent recover --node gpu-1"},
			"",
		},
		"one whose agent died after": {
			[]change{withoutAgent, fenced(plan.SetMode, plan.VerifyCapacity)},
			[]api.Cause{api.CauseAgentDiedInChange},
			api.VerdictWaitsForYou,
			[]string{"gpuslice-agent recover --node gpu-1"},
			"deadline",
		},
		"a reboot in its middle": {
			[]change{drained, func(e *diagnosis.Evidence) { e.Boot.ID = "boot-3" }},
			[]api.Cause{api.CauseRebootInTheMiddle},
			api.VerdictGivesBack,
			[]string{"in boot boot-2; this is boot boot-3", "recreates what the reboot removed"},
			"",
		},
		"a boot that is not known": {
			[]change{drained, func(e *diagnosis.Evidence) { e.Boot.ID = "" }},
			[]api.Cause{api.CauseChangeUnderWay},
			api.VerdictGivesBack,
			nil, "",
		},
		"a change that is undone": {
			[]change{drained, undone},
			[]api.Cause{api.CauseChangeFailed},
			api.VerdictGivesBack,
			[]string{"was given up: the driver refused"},
			"deadline",
		},
		"one that cannot be undone": {
			[]change{drained, undone, stalled},
			[]api.Cause{api.CauseChangeFailed},
			api.VerdictWaitsForYou,
			[]string{"mend what the agent says it cannot do: the unit dcgm does not start"},
			"",
		},
		"a change that is about to fail": {
			[]change{drained, func(e *diagnosis.Evidence) { e.Refused = &api.Failure{Message: "the window has closed"} }},
			[]api.Cause{api.CauseChangeFailed},
			api.VerdictGivesBack,
			[]string{"the window has closed", "gives the change up"},
			"",
		},
		"a label that is gone": {
			[]change{drained, func(e *diagnosis.Evidence) { e.Want.Undo, e.Want.UndoCause = true, errors.New("the label was removed") }},
			[]api.Cause{api.CauseRequestGone},
			api.VerdictGivesBack,
			[]string{"the label was removed", "restores the former GPUs"},
			"was given up",
		},
		"a cordon without a journal": {
			[]change{cordonedBy(config.FieldManager), func(e *diagnosis.Evidence) { e.Leftovers.Orphan.Cordon = true }},
			[]api.Cause{api.CauseOwnCordonLeft},
			api.VerdictGivesBack,
			[]string{`"left":["the cordon since 2026-03-01T11:00:00Z`, "the agent's own, without a journal"},
			"",
		},
		"the same, and no agent": {
			[]change{withoutAgent, cordonedBy(config.FieldManager), func(e *diagnosis.Evidence) { e.Leftovers.Orphan.Cordon = true }},
			[]api.Cause{api.CauseOwnCordonLeft},
			api.VerdictWaitsForYou,
			[]string{"start the agent"},
			"",
		},
		"the same, with a new journal": {
			[]change{drained, func(e *diagnosis.Evidence) { e.Journal.Target = "" }},
			[]api.Cause{api.CauseOwnCordonLeft},
			api.VerdictGivesBack,
			[]string{"without a journal, found at"},
			"",
		},
		"a journal that cannot be read": {
			[]change{cordonedBy(config.FieldManager), func(e *diagnosis.Evidence) { e.Unreadable = "it is of version 99" }},
			[]api.Cause{api.CauseJournalUnreadable},
			api.VerdictWaitsForYou,
			[]string{"kubectl annotate node gpu-1 gpuslice.io/journal-", `"unreadable":"it is of version 99"`},
			`"left"`,
		},
		"a budget": {
			[]change{drained, stays(drain.Verdict{State: drain.Blocked, PDB: "team/train, team/all", Message: "needs 1"})},
			[]api.Cause{api.CauseChangeUnderWay, api.CauseBudgetBlocks},
			api.VerdictGivesBack,
			[]string{"asks again until 2026-03-01T12:50:00Z; then it undoes the change", "kubectl get pdb -n team train all"},
			"",
		},
		"a budget, before the cordon": {
			[]change{
				stays(drain.Verdict{State: drain.Blocked}),
				func(e *diagnosis.Evidence) { e.Want.Name, e.Steps = target, []plan.Step{{Kind: plan.Evict}} },
			},
			[]api.Cause{api.CauseBudgetBlocks},
			api.VerdictFree,
			[]string{"disturbs nothing until then", "does not match all-1g.10gb", `"kubectl get pdb -n team"`},
			"",
		},
		"a budget, on the way back": {
			[]change{drained, undone, stays(drain.Verdict{State: drain.Blocked})},
			[]api.Cause{api.CauseChangeFailed, api.CauseBudgetBlocks},
			api.VerdictWaitsForYou,
			[]string{"asks again without a limit"},
			"",
		},
		"a budget, and pods are deleted": {
			[]change{
				drained,
				stays(drain.Verdict{State: drain.Blocked}),
				func(e *diagnosis.Evidence) { e.Settings.Drain.AfterDeadline = config.AfterDeadlineDelete },
			},
			[]api.Cause{api.CauseChangeUnderWay, api.CauseBudgetBlocks},
			api.VerdictGivesBack,
			[]string{"then it deletes the remaining pods"},
			"",
		},
		"a budget that lacks a pod": {
			[]change{drained, stays(drain.Verdict{State: drain.Blocked, Awaits: "team/train-next"})},
			[]api.Cause{api.CauseChangeUnderWay, api.CauseBudgetBlocks},
			api.VerdictGivesBack,
			[]string{"give team/train-next room on another node; or remove the label nvidia.com/mig.config", "kubectl describe pod -n team train-next"},
			"",
		},
		"a pod that is not evictable": {
			[]change{drained, stays(drain.Verdict{State: drain.Failed, Message: "it is static"})},
			[]api.Cause{api.CauseChangeUnderWay, api.CausePodNotEvictable},
			api.VerdictGivesBack,
			[]string{"it is static", "kubectl describe pod -n team train"},
			"",
		},
		"a pod that the policy keeps": {
			[]change{drained, stays(drain.Verdict{State: drain.Refused, Allow: []drain.Choice{{Flag: "--force-unmanaged"}}})},
			[]api.Cause{api.CauseChangeUnderWay, api.CausePolicyRefuses},
			api.VerdictGivesBack,
			[]string{"kubectl gpuslice apply gpu-1 --mig-config all-1g.10gb --force-unmanaged"},
			"",
		},
		"a pod that no flag lets go": {
			[]change{drained, stays(drain.Verdict{State: drain.Refused})},
			[]api.Cause{api.CauseChangeUnderWay, api.CausePolicyRefuses},
			api.VerdictGivesBack,
			[]string{"or change drain in the settings", "kubectl describe pod -n team train"},
			"gpuslice apply",
		},
		"pods that go": {
			[]change{
				drained,
				stays(drain.Verdict{State: drain.Requested}),
				stays(drain.Verdict{State: drain.Gone}),
				stays(drain.Verdict{State: drain.Queued}),
				stays(drain.Verdict{State: drain.Terminating}),
			},
			[]api.Cause{api.CauseChangeUnderWay},
			api.VerdictGivesBack,
			[]string{"MayGo"},
			"",
		},
		"a rule that lets a pod end": {
			[]change{
				drained,
				stays(drain.Verdict{State: drain.Waiting, By: "drain.rules[0]"}),
				func(e *diagnosis.Evidence) {
					e.Settings.Drain.Rules = []config.DrainRule{{Selector: labels.Everything(), Action: config.DrainWait, For: 8 * time.Hour}}
				},
			},
			[]api.Cause{api.CauseChangeUnderWay, api.CauseRuleWaits},
			api.VerdictGivesBack,
			[]string{`"deadline":"2026-03-01T20:50:00Z"`, "within 8h"},
			"",
		},
		"a mode that lets pods end": {
			[]change{
				drained,
				stays(drain.Verdict{State: drain.Waiting, By: decide.ModeField}),
				func(e *diagnosis.Evidence) {
					e.Settings.Drain.Mode, e.Settings.Drain.GradualFor = config.DrainGradual, 8*time.Hour
					e.Settings.Drain.UnmanagedPods = config.DrainEvict
				},
			},
			[]api.Cause{api.CauseChangeUnderWay, api.CauseRuleWaits},
			api.VerdictGivesBack,
			[]string{`"deadline":"2026-03-01T20:50:00Z"`, "within 8h"},
			"",
		},
		"a finalizer": {
			[]change{ending("team.example/backup")},
			[]api.Cause{api.CausePodKeepsTerminating},
			api.VerdictFree,
			[]string{
				"its grace ended at 2026-03-01T11:59:00Z",
				"the finalizers team.example/backup",
				"kubectl get pod -n team train -o jsonpath='{.metadata.finalizers}'",
			},
			"",
		},
		"a finalizer, in a drain": {
			[]change{
				drained,
				ending("team.example/backup"),
				func(e *diagnosis.Evidence) {
					e.Verdicts = []drain.Verdict{{Pod: e.Holders.Pods[0], State: drain.Terminating}}
				},
			},
			[]api.Cause{api.CauseChangeUnderWay, api.CausePodKeepsTerminating},
			api.VerdictGivesBack,
			[]string{"team.example/backup"},
			"",
		},
		"a pod within its grace": {
			[]change{ending(), func(e *diagnosis.Evidence) { e.Holders.Pods[0].GraceEnds = now.Add(time.Minute) }},
			nil, api.VerdictFree,
			[]string{`"state":"Terminating"`},
			"",
		},
		"no driver of claims": {
			[]change{
				ending(),
				func(e *diagnosis.Evidence) {
					e.Holders.Pods[0].Sources, e.Holders.Pods[0].DeviceClaims = []holders.Source{holders.SourceClaim}, []string{"train-gpu"}
				},
			},
			[]api.Cause{api.CauseClaimDriverGone},
			api.VerdictFree,
			[]string{"cannot unprepare the pod's claims (train-gpu)", "grep dra"},
			"",
		},
		"a process": {
			[]change{
				drained,
				func(e *diagnosis.Evidence) {
					e.Processes = []api.ProcessSeen{{PID: 4711, Name: "pid 4711 python", Holds: []string{"GPU 0"}, Unit: "session-3.scope"}}
				},
			},
			[]api.Cause{api.CauseChangeUnderWay, api.CauseProcessHoldsGPU},
			api.VerdictGivesBack,
			[]string{"pid 4711 python holds GPU 0", "kill 4711 # on gpu-1", "end it, if it is not needed"},
			"",
		},
		"a process of a unit": {
			[]change{
				drained,
				func(e *diagnosis.Evidence) {
					e.Processes = []api.ProcessSeen{{PID: 99, Unit: "dcgm.service", Remedy: "name it"}}
				},
			},
			[]api.Cause{api.CauseChangeUnderWay, api.CauseProcessHoldsGPU},
			api.VerdictGivesBack,
			[]string{"systemctl stop dcgm.service # on gpu-1", `"you":"name it"`},
			"kill 99",
		},
		"our operand": {
			[]change{operand(fence.PausedValue), func(e *diagnosis.Evidence) { e.Leftovers.Orphan.Labels = map[string]string{dcgm: "true"} }},
			[]api.Cause{api.CauseOwnCordonLeft, api.CauseOperandsPaused},
			api.VerdictGivesBack,
			[]string{`sets the label back to "true"`},
			"",
		},
		"our operand in change": {
			[]change{drained, operand(fence.PausedValue)},
			[]api.Cause{api.CauseChangeUnderWay},
			api.VerdictGivesBack,
			[]string{`"by":"gpuslice"`},
			"",
		},
		"mig-manager's operand": {
			[]change{operand(fence.PausedForMIGChange)},
			[]api.Cause{api.CauseOperandsPaused},
			api.VerdictNotOurs,
			[]string{"does not change it, unless recover.adopt names mig-manager", "gpuslice-agent recover --adopt mig-manager"},
			"",
		},
		"one that is adopted": {
			[]change{operand(fence.PausedForMIGChange), func(e *diagnosis.Evidence) { e.Settings.Recover.Adopt = []string{config.AdoptMIGManager} }},
			[]api.Cause{api.CauseOperandsPaused},
			api.VerdictNotOurs,
			[]string{"since recover.adopt names mig-manager"},
			"unless",
		},
		"an operand that a user has off": {[]change{operand("false")}, nil, api.VerdictFree, []string{free}, ""},
		"an operand of some tool": {
			[]change{operand("paused-for-lunch")},
			[]api.Cause{api.CauseOperandsPaused},
			api.VerdictNotOurs,
			[]string{"a tool that writes paused-for-lunch", "kubectl label node gpu-1 " + dcgm + "=true --overwrite"},
			"",
		},
		"capacity that does not come": {
			[]change{fenced(plan.VerifyCapacity, plan.Release), func(e *diagnosis.Evidence) { e.Capacity.Missing = []string{"14, kubelet 0"} }},
			[]api.Cause{api.CauseChangeUnderWay, api.CauseCapacityMissing},
			api.VerdictGivesBack,
			[]string{"14, kubelet 0", ", then undoes the change"},
			"",
		},
		"capacity before the change": {
			[]change{fenced(plan.SetMode, plan.VerifyCapacity), func(e *diagnosis.Evidence) { e.Capacity.Missing = []string{"14, kubelet 0"} }},
			[]api.Cause{api.CauseChangeUnderWay},
			api.VerdictGivesBack,
			nil, "undoes",
		},
		"capacity that was lost": {
			[]change{func(e *diagnosis.Evidence) { e.Want.Name, e.Capacity.Missing = target, []string{"14, kubelet 0"} }},
			[]api.Cause{api.CauseCapacityMissing},
			api.VerdictFree,
			[]string{"without a limit"},
			"",
		},
		"capacity of which nothing is": {
			[]change{func(e *diagnosis.Evidence) { e.Capacity.Missing = []string{"14, kubelet 0"} }},
			[]api.Cause{api.CauseCapacityMissing},
			api.VerdictFree,
			[]string{"no label requests a config", "--field-selector spec.nodeName=gpu-1"},
			"",
		},
		"capacity by another strategy": {
			[]change{func(e *diagnosis.Evidence) { e.Capacity.Missing, e.StrategyAdvice = []string{"x"}, "set mixed" }},
			[]api.Cause{api.CauseCapacityMissing},
			api.VerdictFree,
			[]string{`"you":"set mixed"`},
			"",
		},
		"capacity that the DRA driver does not offer": {
			[]change{func(e *diagnosis.Evidence) {
				e.Capacity.Missing, e.Owner = []string{"x"}, state.Owner{Kind: api.OwnerDRAStatic, Driver: "NVIDIA's DRA driver (pod dra/gpus)"}
			}},
			[]api.Cause{api.CauseCapacityMissing},
			api.VerdictFree,
			[]string{`"you":"see the log of NVIDIA's DRA driver (pod dra/gpus)"`},
			"",
		},
		"capacity after the DRA driver has gone": {
			[]change{func(e *diagnosis.Evidence) {
				e.Capacity.Missing, e.Owner = []string{"x"}, state.Owner{Kind: api.OwnerDRAStarting, Claimants: "team/trainer"}
			}},
			[]api.Cause{api.CauseCapacityMissing},
			api.VerdictFree,
			[]string{`"you":"start NVIDIA's DRA driver on this node again: without it no pod that has claims can end: team/trainer"`},
			"",
		},
		"capacity without a plugin": {
			[]change{func(e *diagnosis.Evidence) { e.Capacity.Missing, e.PluginAdvice = []string{"x"}, "install it" }},
			[]api.Cause{api.CauseCapacityMissing},
			api.VerdictFree,
			[]string{`"you":"install it"`},
			"",
		},
		"the device plugin holds a GPU for others": {
			[]change{func(e *diagnosis.Evidence) {
				plugin := train
				plugin.Name, plugin.UID = "plugin", "plugin-uid"
				e.Holders.Pods = []holders.Pod{plugin, train}
				e.DevicePlugin.Pods = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{UID: "plugin-uid"}}}
			}},
			nil, api.VerdictFree,
			[]string{`"name":"plugin","devices":["GPU-a"],"foundBy":["kubelet"],"leaves":false,"operand":true`, `"name":"train","devices":["GPU-a"],"foundBy":["kubelet"],"leaves":false}`},
			"",
		},
		"a GPU is off the bus": {
			[]change{func(e *diagnosis.Evidence) {
				e.GPUs, e.Capacity.Missing = []nvml.GPU{{Index: 3, UUID: "GPU-d", Lost: true}}, []string{"x"}
			}},
			[]api.Cause{"GPULost", api.CauseCapacityMissing},
			api.VerdictFree,
			[]string{"GPU 3 has fallen off the bus", "then reboot the node", `"index":3,"uuid":"GPU-d","mig":false,"lost":true`},
			"",
		},
		"a GPU is off the bus, as the watch says": {
			[]change{func(e *diagnosis.Evidence) {
				e.GPUs, e.Capacity.Missing = []nvml.GPU{{Index: 3, UUID: "GPU-d", Lost: true}}, []string{"x"}
				e.Sick = []api.Finding{{Cause: "GPULost", GPU: "GPU-d", Evidence: "off since 12:00:00Z"}}
			}},
			[]api.Cause{"GPULost", api.CauseCapacityMissing},
			api.VerdictFree,
			[]string{"off since 12:00:00Z"},
			"has fallen off the bus",
		},
		"a config that has failed before": {
			[]change{
				func(e *diagnosis.Evidence) {
					e.Want.Name, e.Want.Label, e.Want.Fingerprint, e.Record.Learnt.Failed = target, "l", "f", &api.Failure{Fingerprint: "f", Message: "broke"}
				},
			},
			[]api.Cause{api.CauseChangeFailed},
			api.VerdictFree,
			[]string{"all-1g.10gb failed: broke", "kubectl label node gpu-1 l- && kubectl label node gpu-1 l=all-1g.10gb"},
			"",
		},
		"another one has failed": {
			[]change{
				func(e *diagnosis.Evidence) {
					e.Want.Name, e.Want.Fingerprint, e.Record.Learnt.Failed = target, "g", &api.Failure{Fingerprint: "f"}
				},
			},
			nil, api.VerdictFree,
			nil, "does not retry",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := evidence()
			for _, change := range row.changes {
				change(e)
			}
			if e.Node != nil {
				e.ReadNode()
			}
			d := diagnosis.Of(e)
			page := page(t, d)
			var causes []api.Cause
			for _, f := range d.Causes {
				causes = append(causes, f.Cause)
			}
			if diff := cmp.Diff(row.causes, causes); diff != "" || d.Outcome.Verdict != row.verdict {
				t.Errorf("verdict %s, want %s; causes (-want +got):\n%s\n%s", d.Outcome.Verdict, row.verdict, diff, page)
			}
			for _, text := range row.says {
				if !strings.Contains(page, text) {
					t.Errorf("it does not say %q:\n%s", text, page)
				}
			}
			if row.never != "" && strings.Contains(page, row.never) {
				t.Errorf("it says %q:\n%s", row.never, page)
			}
		})
	}
}

// page is the diagnosis in JSON, as scripts read it.
func page(t *testing.T, d api.Diagnosis) string {
	t.Helper()
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(d); err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(b.String(), `\"`, `"`)
}

// The time within which the agent gives the node back is the time that the pods have left, and what the steps may take.
func TestHowLongItTakesAtMost(t *testing.T) {
	t.Parallel()
	settings := config.Default()
	left := settings.Timeouts.Drain - 10*time.Minute
	for name, row := range map[string]struct {
		change func(*diagnosis.Evidence)
		want   time.Duration
	}{
		"a minute at least":           {fenced(plan.Release), time.Minute},
		"the deadline of the pods":    {fenced(plan.Evict), left},
		"with the capacity":           {fenced(plan.Evict, plan.VerifyCapacity), left + settings.Timeouts.Capacity},
		"the driver":                  {fenced(plan.Evict, plan.SetMode, plan.SetMode), left + 10*time.Second},
		"a reboot":                    {fenced(plan.Reboot), settings.Timeouts.Reboot},
		"units":                       {fenced(plan.StopUnits, plan.StartUnits), 2 * settings.Timeouts.Unit},
		"a process is as a pod":       {func(e *diagnosis.Evidence) { fenced(plan.Release)(e); e.Processes = []api.ProcessSeen{{PID: 1}} }, left},
		"no deadline on the way back": {func(e *diagnosis.Evidence) { fenced(plan.Evict, plan.VerifyCapacity)(e); e.Want.Undo = true }, settings.Timeouts.Capacity},
		"a deadline that has passed":  {func(e *diagnosis.Evidence) { fenced(plan.Evict)(e); e.Journal.Started = now.Add(-24 * time.Hour) }, time.Minute},
	} {
		e := evidence()
		row.change(e)
		e.ReadNode()
		if got := time.Duration(diagnosis.Of(e).Outcome.Within); got != max(row.want, time.Minute) {
			t.Errorf("%s: %s, want %s", name, got, row.want)
		}
	}
}

// A process of the agent, of a pod that leaves or of a unit that stops goes by itself. Any other one is in the way.
func TestWhichProcessesAreInTheWay(t *testing.T) {
	t.Parallel()
	e := evidence()
	e.Steps = []plan.Step{{Kind: plan.Evict, Pods: []plan.Pod{{UID: "leaves"}}}, {Kind: plan.StopUnits, Unit: "stops.service"}, {Kind: plan.SetMode}}
	for pid, c := range []holders.Client{
		{Self: true},
		{Sibling: true},
		{Owner: holders.Owner{PodUID: "leaves"}},
		{Owner: holders.Owner{Unit: "stops.service"}},
		{Owner: holders.Owner{PodUID: "stays"}},
		{Owner: holders.Owner{Unit: "stays.service"}},
		{},
	} {
		c.PID = pid
		e.Holders.Processes = append(e.Holders.Processes, c)
	}
	var got []int
	for _, p := range e.UnownedProcesses() {
		got = append(got, p.PID)
	}
	if want := []int{4, 5, 6}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("in the way are %v, want %v", got, want)
	}
}
