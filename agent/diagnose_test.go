package agent_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// What the agent reads for a diagnosis, and that it changes nothing for one. Which cause follows from what is read is a table of package
// diagnosis.
func TestADiagnosisNamesTheCause(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		models  string
		provoke func(w *world)
		dead    bool // no agent runs
		causes  []api.Cause
		verdict api.Verdict
		says    []string
		never   string
	}{
		{
			name: "a change that no one has begun", dead: true, provoke: func(w *world) { w.podOnGPU0(); w.label("all-1g.10gb") },
			verdict: api.VerdictFree,
			says:    []string{`"name":"train","devices":["GPU 0"]`, `"leaves":true`, "MayGo", "fence: journal, cordon, taint"},
		}, {
			name: "1: the agent died between cordon and drain end", dead: true, provoke: func(w *world) { w.startDrain(); w.budgetKeepsAll("team/train: needs 1 healthy pod and has 1") },
			causes: []api.Cause{api.CauseAgentDiedInDrain, api.CauseBudgetBlocks}, verdict: api.VerdictWaitsForYou,
			says: []string{`"runs":false`, "continues where this one stopped", `"command":"gpuslice-agent recover`, "evict team/train"},
		}, {
			name: "4: a budget", provoke: func(w *world) { w.startDrain(); w.budgetKeepsAll("team/train: needs 1 healthy pod and has 1") },
			causes: []api.Cause{api.CauseChangeUnderWay, api.CauseBudgetBlocks}, verdict: api.VerdictGivesBack,
			says: []string{"asks again until", "then it undoes the change", `"command":"kubectl get pdb -n team train`},
		}, {
			name: "4: a budget that waits for a successor", provoke: func(w *world) {
				w.startDrain()
				w.budgetKeepsAll("needs 1 healthy pod and has 1")
				w.addSuccessor("train-next", "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
				w.passes("the cause", func() bool { return strings.Contains(w.condition().Message, "train-next") })
				c := w.condition().Message
				for _, want := range []string{
					"give team/train-next room on another node: it is Pending (0/2 nodes are available: 2 Insufficient nvidia.com/gpu), and PDB team/train needs 1 healthy pod",
					"to cancel, remove the label nvidia.com/mig.config, and there is room here again",
				} {
					if !strings.Contains(c, want) {
						w.t.Errorf("want %q: %s", want, c)
					}
				}
			},
			causes: []api.Cause{api.CauseChangeUnderWay, api.CauseBudgetBlocks}, verdict: api.VerdictGivesBack,
			says: []string{
				"give team/train-next room on another node; or remove the label nvidia.com/mig.config: the pods then come back to this node",
				"kubectl describe pod -n team train-next",
			},
		}, {
			name: "4: a budget before the cordon", provoke: func(w *world) {
				w.podOnGPU0()
				w.budgetKeepsAll("team/train: needs 1")
				w.label("all-1g.10gb")
				w.spend(time.Minute)
			},
			causes: []api.Cause{api.CauseBudgetBlocks}, verdict: api.VerdictFree,
			says: []string{"disturbs nothing until then", "the node takes pods, but does not match all-1g.10gb"},
		}, {
			name: "6: kubelet is away", provoke: func(w *world) { w.startDrain(); w.kubeletSilent = true; w.setReadiness(corev1.ConditionUnknown) },
			causes: []api.Cause{api.CauseNodeNotReady, api.CauseChangeUnderWay}, verdict: api.VerdictWaitsForYou,
			says: []string{`"ready":"Unknown"`, "evicts nothing until kubelet answers", `"command":"systemctl status kubelet`},
		}, {
			name: "8: the settings refuse", provoke: func(w *world) {
				w.pod("train", string(w.snapshot()[0].UUID), bare)
				w.label("all-1g.10gb")
				w.spend(time.Minute)
			},
			causes: []api.Cause{api.CausePolicyRefuses}, verdict: api.VerdictFree,
			says: []string{"drain.unmanagedPods", "change drain in the settings", "--force-unmanaged", "the node takes pods"},
		}, {
			name: "8: a rule lets a pod end by itself", provoke: func(w *world) {
				w.settings.Drain.Rules = []config.DrainRule{{Namespaces: []string{"team"}, Selector: labels.Everything(), Action: config.DrainWait, For: 8 * time.Hour}}
				w.restart()
				w.podOnGPU0()
				w.label("all-1g.10gb")
				w.passes("the fence", w.hasJournal)
				w.spend(time.Hour)
			},
			causes: []api.Cause{api.CauseChangeUnderWay, api.CauseRuleWaits}, verdict: api.VerdictGivesBack,
			says: []string{"drain.rules[0]", `"deadline":"2000-01-01T09:00:`, "within 8h"},
		}, {
			name: "10: our cordon without a journal", provoke: func(w *world) {
				w.startDrain()
				w.unannotate(config.AnnotationJournal)
				w.label("")
			},
			causes: []api.Cause{api.CauseOwnCordonLeft}, verdict: api.VerdictGivesBack,
			says: []string{`"left":["the cordon since`, "the agent's own, without a journal"},
		}, {
			name:    "a label that names a GPU which the node does not have",
			provoke: func(w *world) { w.label("gpu99_1g.10gb"); w.untilReason(config.ReasonInvalidCatalog) },
			causes:  []api.Cause{api.CauseRequestRefused}, verdict: api.VerdictFree,
			says: []string{
				"nvidia.com/mig.config=gpu99_1g.10gb, InvalidCatalog: ", `"you":"fix the ConfigMap at the line that the message names, or the label; `,
				`"command":"kubectl label node gpu-1 nvidia.com/mig.config-"`,
			},
		}, {
			name:    "a label that names no config",
			provoke: func(w *world) { w.label("all-9g.999gb"); w.untilReason(config.ReasonUnknownConfig) },
			causes:  []api.Cause{api.CauseRequestRefused}, verdict: api.VerdictFree,
			says: []string{"UnknownConfig", "set the label to one of the names in the message"},
		}, {
			name: "a GPU is lost in the middle", provoke: func(w *world) { w.startDrain(); w.setLost(1, true) },
			causes: []api.Cause{api.Cause(config.ReasonGPULost), api.CauseChangeFailed}, verdict: api.VerdictGivesBack,
			says: []string{"restores the former GPUs", "reboot the node"},
		}, {
			name: "outside of its window", provoke: func(w *world) {
				w.setMaintenance(until(time.Now()))
				w.turn()
				w.pod("holder", w.gpus.UUIDs()[0])
				w.label("all-1g.10gb")
				w.untilReason(config.ReasonAwaitingWindow)
			},
			causes: []api.Cause{api.CauseNotAllowedYet}, verdict: api.VerdictFree,
			says: []string{"none of the windows of ", "begins by itself when it may", config.AnnotationForce},
		}, {
			name: "a pool without a free slot, before the agent has tried to get one", dead: true, provoke: func(w *world) {
				slots, pool, c := w.pool()
				if err := slots.Take(w.t.Context(), pool, c); err != nil {
					w.t.Fatal(err)
				}
				w.label("all-1g.10gb")
			},
			causes: []api.Cause{api.CauseNotAllowedYet}, verdict: api.VerdictFree,
			says: []string{"gpu-2", "the node takes pods, but does not match all-1g.10gb"},
		}, {
			name: "a device plugin that is away", dead: true, provoke: func(w *world) {
				w.endPods("kube-system")
				w.label("all-1g.10gb")
			},
			causes: []api.Cause{api.CauseNotAllowedYet}, verdict: api.VerdictFree,
			says:  []string{"no pod that devicePlugin of the settings matches", "the node takes pods, but does not match all-1g.10gb"},
			never: "cannot be",
		}, {
			name: "16: a change that failed", provoke: func(w *world) {
				w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
				w.label("all-1g.10gb")
				w.settle(config.ReasonHardwareFailure)
			},
			causes: []api.Cause{api.CauseChangeFailed}, verdict: api.VerdictFree,
			says: []string{"does not retry by itself", "nvidia.com/mig.config=all-1g.10gb", "the node takes pods, but does not match all-1g.10gb"},
		}, {
			name: "16: a process that does not go", provoke: func(w *world) {
				w.startChange("all-1g.10gb")
				w.addProcess(4711, "python", "0::/user.slice/session-3.scope", "/dev/nvidia0")
				w.holdDevice(w.gpus.MIGDevice(0, 0), 4711)
				w.label("all-3g.40gb")
				w.spend(time.Minute)
			},
			causes: []api.Cause{api.CauseChangeUnderWay, api.CauseProcessHoldsGPU}, verdict: api.VerdictGivesBack,
			says: []string{`"name":"pid 4711 python of session-3.scope","holds":["GPU 0 1g.10gb@0"],"foundBy":["NVML"]`, `"command":"kill 4711 # on gpu-1`, "within 64m"},
		}, {
			name: "a process of no pod, and one of a pod without a request, on GPUs that nothing changes", provoke: func(w *world) {
				w.turn()
				w.podOnGPU0()
				w.startGPUProcess(w.gpus.UUIDs()[0], 5000, "python", podCgroup("train"))
				w.pod("all", "", func(p *corev1.Pod) { p.Spec.Containers[0].Resources = corev1.ResourceRequirements{} })
				w.startGPUProcess(w.gpus.UUIDs()[0], 5001, "python", podCgroup("all"))
				w.startGPUProcess(w.gpus.UUIDs()[0], 4711, "py\x1bthon", "0::/user.slice/session-3.scope")
			},
			verdict: api.VerdictFree,
			says: []string{
				`"name":"pid 4711 py?thon of session-3.scope","holds":["GPU 0"],"foundBy":["NVML"]`, `"name":"pid 5001 python of pod team/all"`,
			},
			never: "pid 5000",
		}, {
			name: "17: operands that we have left paused", provoke: func(w *world) { w.set(config.LabelDevicePlugin, fence.PausedValue) },
			causes: []api.Cause{api.CauseOwnCordonLeft, api.CauseOperandsPaused}, verdict: api.VerdictGivesBack,
			says: []string{`"by":"gpuslice"`, `sets the label back to "true"`},
		}, {
			name: "17: operands that the driver manager has left paused", provoke: func(w *world) { w.upgrade(true) },
			causes: []api.Cause{api.CauseDriverAway, api.CauseOperandsPaused}, verdict: api.VerdictNotOurs,
			says: []string{"the driver is being upgraded", `"command":"kubectl label node gpu-1 nvidia.com/gpu.deploy.dcgm=true --overwrite`},
		}, {
			name: "a journal of a newer agent", provoke: func(w *world) {
				w.startDrain()
				w.annotate(config.AnnotationJournal, `{"version": 99}`)
				w.disk.text = []byte(`{"version":1,"node":"` + nodeName + `","uid":"node-uid","journal":"{\"version\": 99}"}`)
			},
			causes: []api.Cause{api.CauseJournalUnreadable}, verdict: api.VerdictWaitsForYou,
			says: []string{"version 99", `"command":"kubectl annotate node gpu-1 gpuslice.io/journal-`},
		}, {
			name: "a journal that another client has written", provoke: func(w *world) { w.startDrain(); w.annotate(config.AnnotationJournal, `{"version":1,"target":"evil"}`) },
			causes: []api.Cause{api.CauseOwnCordonLeft}, verdict: api.VerdictGivesBack,
			says: []string{"is not from this host's agent, which ignores it"}, never: "evil",
		}, {
			name: "a driver that is not loaded", provoke: func(w *world) { w.startDrain(); w.unloadDriver() },
			causes: []api.Cause{api.CauseDriverAway, api.CauseChangeUnderWay}, verdict: api.VerdictWaitsForYou,
			says: []string{`"unseen":[`, "team/train", `"asked":"all-1g.10gb"`, `"before":[{"index":0`},
		}, {
			name: "a driver that is not loaded, where a config of the device plugin is asked for", provoke: func(w *world) {
				w.set(config.LabelDevicePluginConfig, "two")
				w.unloadDriver()
			},
			causes: []api.Cause{api.CauseDriverAway}, verdict: api.VerdictFree,
			says: []string{`"asked":"two"`},
		}, {
			name: "capacity that does not come", provoke: func(w *world) {
				w.startChange("all-1g.10gb")
				w.pluginBroken = true
				w.untilReason(config.ReasonAwaitingCapacity)
				w.spend(time.Minute)
			},
			causes: []api.Cause{api.CauseChangeUnderWay, api.CauseCapacityMissing}, verdict: api.VerdictGivesBack,
			says: []string{"the GPUs have 14, kubelet 0", `"command":"kubectl logs -n kube-system plugin-`},
		}, {
			name: "a reboot that is awaited", models: passthrough, provoke: func(w *world) { w.label("all-balanced"); w.untilParked() },
			causes: []api.Cause{api.CauseRebootAwaited}, verdict: api.VerdictFree,
			says: []string{"pending until the node's next reboot", "the node takes pods, and all-balanced waits for its next reboot"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				models := row.models
				if models == "" {
					models = h100
				}
				w := newWorld(t, models)
				w.setReadiness(corev1.ConditionTrue)
				w.fillManagedFields()
				w.turn()
				row.provoke(w)
				before := w.allObjects()
				d := w.diagnose(!row.dead)
				page := jsonOf(t, d)
				if diff := cmp.Diff(row.causes, causesOf(d)); diff != "" {
					t.Errorf("causes (-want +got):\n%s\n%s", diff, page)
				}
				if d.Outcome.Verdict != row.verdict {
					t.Errorf("verdict %s, want %s:\n%s", d.Outcome.Verdict, row.verdict, page)
				}
				for _, text := range row.says {
					if !strings.Contains(page, text) {
						t.Errorf("it does not say %q:\n%s", text, page)
					}
				}
				if row.never != "" && strings.Contains(page, row.never) {
					t.Errorf("it says %q:\n%s", row.never, page)
				}
				if diff := cmp.Diff(before, w.allObjects()); diff != "" {
					t.Errorf("the diagnosis has changed something (-before +after):\n%s", diff)
				}
			})
		})
	}
}

// A diagnosis reports what the agent can see, whatever it cannot.
func TestADiagnosisOfAPartialObservation(t *testing.T) {
	t.Parallel()
	drains := func(w *world) { w.startDrain() }
	requests := func(w *world) {
		w.pool()
		w.turn()
		w.label("all-1g.10gb")
	}
	for _, row := range []struct {
		name  string
		begin func(w *world)
		deny  string // verb and resource that the API server denies
		says  []string
	}{
		{"no node", drains, "get nodes", []string{`"node":""`, `"now":[{"index":0`, "unknown until the API server answers"}},
		{"no pods", drains, "list pods", []string{`"ours":true`, `"unseen":[`, `"now":[{"index":0`}},
		{"no configs", drains, "get configmaps", []string{`"ours":true`, "team/train"}},
		{"no slots, which refuses no change", requests, "get leases", []string{`"asked":"all-1g.10gb"`, `"unseen":["`}},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.setConfigs(nil)
				w.setReadiness(corev1.ConditionTrue)
				row.begin(w)
				verb, resource, _ := strings.Cut(row.deny, " ")
				w.client.PrependReactor(verb, resource, func(k8stesting.Action) (bool, runtime.Object, error) {
					return true, nil, errors.New("connection refused")
				})
				text := jsonOf(t, w.diagnose(true))
				for _, want := range append(row.says, "connection refused") {
					if !strings.Contains(text, want) {
						t.Errorf("it does not say %q:\n%s", want, text)
					}
				}
			})
		})
	}
}

// jsonOf is all that a diagnosis says, in JSON as scripts read it.
func jsonOf(t *testing.T, d api.Diagnosis) string {
	t.Helper()
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(d); err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(b.String(), `\"`, `"`)
}

// Scripts read the diagnosis.
func TestADiagnosisInJSON(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.setReadiness(corev1.ConditionTrue)
		w.fillManagedFields()
		w.startDrain()
		text, err := json.Marshal(w.diagnose(true))
		if err != nil {
			t.Fatal(err)
		}
		var got struct {
			Cordon         struct{ Ours bool }
			PendingRestore struct{ Target, Phase string }
			Pods           []struct{ Name string }
			Causes         []struct{ Cause string }
			Outcome        struct{ Verdict, Within string }
		}
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatal(err)
		}
		if !got.Cordon.Ours || got.PendingRestore.Target != "all-1g.10gb" || len(got.Pods) != 1 || len(got.Causes) != 1 || got.Outcome.Verdict != "GivesBack" {
			t.Errorf("got %+v of %s", got, text)
		}
		if within, err := time.ParseDuration(got.Outcome.Within); err != nil || within < 30*time.Minute || within > 2*time.Hour {
			t.Errorf("within is %q, which is not what the pods have left: %v", got.Outcome.Within, err)
		}
	})
}

func causesOf(d api.Diagnosis) []api.Cause {
	var out []api.Cause
	for _, f := range d.Causes {
		out = append(out, f.Cause)
	}
	return out
}

// diagnose runs a process beside the agent's, and returns its diagnosis.
func (w *world) diagnose(running bool) api.Diagnosis {
	w.t.Helper()
	return agent.New(w.optionsFor(&w.host)).Diagnose(w.t.Context(), running)
}

// allObjects returns what a diagnosis must not change.
func (w *world) allObjects() any {
	w.t.Helper()
	pods, err := w.client.CoreV1().Pods("").List(w.t.Context(), metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return []any{w.node(), pods.Items, w.gpus.String()}
}

// setReadiness sets the node's condition Ready, as kubelet or the node lifecycle controller does.
func (w *world) setReadiness(status corev1.ConditionStatus) {
	w.t.Helper()
	n := w.node()
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status, LastTransitionTime: metav1.Now(), Message: "Kubelet stopped posting node status."}}
	if _, err := w.client.CoreV1().Nodes().UpdateStatus(w.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// podOnGPU0 runs a pod on the first GPU.
func (w *world) podOnGPU0(finalizers ...string) {
	w.t.Helper()
	w.pod("train", string(w.snapshot()[0].UUID), func(p *corev1.Pod) { p.Finalizers = finalizers })
}

// startDrain lets the agent begin a change for which a pod has to leave, and takes a while.
func (w *world) startDrain(finalizers ...string) {
	w.t.Helper()
	w.grace = 5 * time.Minute
	w.podOnGPU0(finalizers...)
	w.label("all-1g.10gb")
	w.passes("the drain", func() bool { return w.reason() == config.ReasonEvicting && w.hasJournal() })
}

// budgetKeepsAll lets a budget keep all pods from now on, even those that are about to end.
func (w *world) budgetKeepsAll(message string) {
	w.t.Helper()
	_, err := w.client.PolicyV1().PodDisruptionBudgets("team").Create(w.t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "train", Namespace: "team"}, Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{}},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	pods, err := w.client.CoreV1().Pods("team").List(w.t.Context(), metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, p := range pods.Items {
		p.DeletionTimestamp = nil
		if err := w.client.Tracker().Update(podResource, &p, p.Namespace); err != nil {
			w.t.Fatal(err)
		}
	}
	w.client.PrependReactor("create", "pods", func(action k8stesting.Action) (bool, runtime.Object, error) {
		if action.GetSubresource() != "eviction" {
			return false, nil, nil
		}
		refused := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 0)
		refused.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: policyv1.DisruptionBudgetCause, Message: message}}
		return true, nil, refused
	})
}

// addSuccessor adds a pod of the budget for which no node has room.
func (w *world) addSuccessor(name, why string) {
	w.t.Helper()
	budgets := w.client.PolicyV1().PodDisruptionBudgets("team")
	b, err := budgets.Get(w.t.Context(), "train", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	b.Status = policyv1.PodDisruptionBudgetStatus{DesiredHealthy: 1, CurrentHealthy: 1, ExpectedPods: 2}
	if _, err := budgets.Update(w.t.Context(), b, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "team", UID: types.UID(name)}, Status: corev1.PodStatus{
		Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: why}},
	}}
	if _, err := w.client.CoreV1().Pods("team").Create(w.t.Context(), p, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// unloadDriver takes the driver away, for processes that start after it.
func (w *world) unloadDriver() { w.wrapDriver = func(d nvml.Driver) nvml.Driver { return unloaded{d} } }

type unloaded struct{ nvml.Driver }

// Snapshot implements nvml.Driver.
func (unloaded) Snapshot(context.Context) ([]nvml.GPU, error) { return nil, nvml.ErrNoDriver }

// What the agent waits for ends by itself, or by what the condition names: no user has to mend a label for it.
func TestADiagnosisWithoutTheDriverSaysThatTheAgentWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, oneH100)
		w.label("nonsense")
		w.settle(config.ReasonUnknownConfig)
		w.unloadDriver()
		w.restart()
		w.untilReason(config.ReasonDriverNotLoaded)
		if seen := w.diagnose(true).Agent; seen.Reason != config.ReasonDriverNotLoaded || seen.Phase != api.PhaseWaiting {
			t.Errorf("the diagnosis has %s beside the phase %s", seen.Reason, seen.Phase)
		}
	})
}
