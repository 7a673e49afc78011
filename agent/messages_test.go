package agent_test

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

const (
	eightH100 = "gpus:\n- model: H100-80GB\n  count: 8\n"
	fiveH100  = "gpus:\n- model: H100-80GB\n  count: 5\n"
)

// budgetKeepsApp has a budget keep the pods of the app: from now on none of them may be evicted. Healthy of expected pods are.
func (w *world) budgetKeepsApp(budget, app string, desired, healthy, expected int32) {
	w.t.Helper()
	_, err := w.client.PolicyV1().PodDisruptionBudgets("team").Create(w.t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: budget, Namespace: "team"},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}},
		Status:     policyv1.PodDisruptionBudgetStatus{DesiredHealthy: desired, CurrentHealthy: healthy, ExpectedPods: expected},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	w.client.PrependReactor("create", "pods", func(action k8stesting.Action) (bool, runtime.Object, error) {
		eviction, is := action.(k8stesting.CreateAction).GetObject().(*policyv1.Eviction)
		if !is || !strings.HasPrefix(eviction.Name, app+"-") {
			return false, nil, nil
		}
		refused := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 0)
		refused.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: policyv1.DisruptionBudgetCause, Message: "The disruption budget " + budget + " needs more"}}
		return true, nil, refused
	})
}

// ofApp makes the pod one of the app, which is ready.
func ofApp(app string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Labels = map[string]string{"app": app}
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	}
}

// podsOnGPUs runs n pods of the app on the GPUs from the first on.
func (w *world) podsOnGPUs(app string, first, n int) {
	w.t.Helper()
	for i := range n {
		w.pod(fmt.Sprintf("%s-%d", app, i), w.gpus.UUIDs()[first+i], ofApp(app))
	}
}

// A message is read in kubectl describe node: it says each thing once, and first what its reader has to do.
func TestMessagesOfANode(t *testing.T) {
	t.Parallel()
	for _, s := range []struct {
		name   string
		models string
		do     func(w *world)
		reason config.Reason
		want   string
	}{
		{"three pods, one budget, before the cordon", fiveH100, func(w *world) {
			w.turn()
			w.podsOnGPUs("llama", 0, 3)
			w.budgetKeepsApp("llama", "llama", 3, 3, 3)
			w.label("all-1g.10gb")
		}, config.ReasonEvictionBlocked, `EvictionBlocked: all-1g.10gb: change PDB team/llama or add pods to it: it needs 3 healthy pods and has 3 of 3, and keeps team/llama-0, team/llama-1, team/llama-2; ` +
			`since 2000-01-01 00:00:00Z; changes nothing until then; to cancel, remove the label nvidia.com/mig.config; to request it behind the cordon, write a drain rule with action ask`},
		{"three pods, one budget, in the drain", fiveH100, func(w *world) {
			w.turn()
			w.podsOnGPUs("llama", 0, 3)
			w.grace = 10 * time.Minute
			w.label("all-1g.10gb")
			w.passes("the drain", func() bool { return w.reason() == config.ReasonEvicting && w.hasJournal() })
			for i := range 3 {
				p := w.mustPod(fmt.Sprintf("llama-%d", i))
				p.DeletionTimestamp = nil
				if err := w.client.Tracker().Update(podResource, p, "team"); err != nil {
					w.t.Fatal(err)
				}
			}
			w.budgetKeepsApp("llama", "llama", 3, 3, 3)
		}, config.ReasonEvictionBlocked, `EvictionBlocked: all-1g.10gb: change PDB team/llama or add pods to it: it needs 3 healthy pods and has 3 of 3, and keeps team/llama-0, team/llama-1, team/llama-2; ` +
			`since 2000-01-01 00:00:00Z; at 2000-01-01 01:00:00Z the change is given up and undone; to continue at once, delete the pods; ` +
			`to cancel, remove the label nvidia.com/mig.config`},
		{"two budgets, five pods, a successor Pending", fiveH100, func(w *world) {
			w.turn()
			w.podsOnGPUs("llama", 0, 3)
			w.podsOnGPUs("mistral", 3, 2)
			w.budgetKeepsApp("llama", "llama", 3, 3, 3)
			w.budgetKeepsApp("mistral", "mistral", 2, 2, 3)
			w.podWithoutRoom("mistral-x", "mistral", "0/12 nodes are available: 4 Insufficient nvidia.com/gpu, 8 node(s) were unschedulable. preemption: none")
			w.label("all-1g.10gb")
		}, config.ReasonEvictionBlocked, `EvictionBlocked: all-1g.10gb: change PDB team/llama or add pods to it: it needs 3 healthy pods and has 3 of 3, and keeps team/llama-0, team/llama-1, team/llama-2; ` +
			`give team/mistral-x room on another node: it is Pending (0/12 nodes are available: 4 Insufficient nvidia.com/gpu, 8 node(s) were unschedulable), and PDB team/mistral needs 2 healthy pods and has 2, and keeps team/mistral-0, team/mistral-1; ` +
			`since 2000-01-01 00:00:00Z; changes nothing until then; to cancel, remove the label nvidia.com/mig.config; to request it behind the cordon, write a drain rule with action ask`},
		{"a geometry that fits on no GPU, 8 GPUs", eightH100, func(w *world) {
			w.profiles(strictProfiles)
			w.profile("crowded")
		}, config.ReasonImpossibleGeometry, `ImpossibleGeometry: request 2x 3g.40gb, or 1x 3g.40gb + 4x 1g.10gb on GPU 0: 2x 3g.40gb take all 8 memory slices; 1g.10gb needs 1 more`},
		{"a window", oneH100, func(w *world) {
			w.turn()
			w.podsOnGPUs("llama", 0, 1)
			w.setMaintenance(noon)
			w.label("all-1g.10gb")
		}, config.ReasonAwaitingWindow, `AwaitingWindow: all-1g.10gb: to begin at once: kubectl annotate node gpu-1 gpuslice.io/force=3906b69e37af; ` +
			`the change begins at Sat 2000-01-01 12:00:00Z by the windows of the maintenance file, and takes 10m0s; since 2000-01-01 00:00:00Z`},
		{"a slot, 12 nodes ahead", oneH100, func(w *world) {
			_, pool, other := w.pool()
			w.turn()
			w.podsOnGPUs("llama", 0, 1)
			slots, _, _ := w.otherNode()
			if err := slots.Take(w.t.Context(), pool, other); err != nil {
				w.t.Fatal(err)
			}
			for i := range 12 {
				name := fmt.Sprintf("gpu-%d", i+3)
				n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), Labels: map[string]string{"pool": "research"}}, Status: withGPUs()}
				if _, err := w.client.CoreV1().Nodes().Create(w.t.Context(), n, metav1.CreateOptions{}); err != nil {
					w.t.Fatal(err)
				}
				w.ready(name)
				slots, _, _ := w.otherNode()
				c := other
				c.Node, c.UID, c.Operation = name, types.UID(name), name
				_ = slots.Take(w.t.Context(), pool, c)
			}
			<-time.After(time.Second)
			w.label("all-1g.10gb")
		}, config.ReasonAwaitingSlot, `AwaitingSlot: all-1g.10gb: pool research: 1 node may be unavailable at once; more than 10 nodes wait longer; since 2000-01-01 00:00:01Z; ` +
			`changes nothing until then; the node that has waited longest goes first; to let more nodes change at once, raise maxUnavailable of pool research in the maintenance file`},
		{"an undo after a failure of a GPU", eightH100, func(w *world) {
			w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
			w.label("all-1g.10gb")
		}, config.ReasonRollingBack, `RollingBack: undoing all-1g.10gb: 3 steps left; done: GPU 0: turn MIG off; ` +
			`the cause: creating 1g.10gb@0 on GPU 0: ERROR_UNKNOWN; given up after 10 attempts`},
		{"after the undo", eightH100, func(w *world) {
			w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
			w.label("all-1g.10gb")
		}, config.ReasonHardwareFailure, `HardwareFailure: to try again, remove the label nvidia.com/mig.config and set it again; creating 1g.10gb@0 on GPU 0: ERROR_UNKNOWN; ` +
			`given up after 10 attempts; the agent has undone the change`},
		{"devices that kubelet does not offer", eightH100, func(w *world) {
			w.converge("all-1g.10gb")
			w.pluginBroken = true
			w.label("all-balanced")
		}, config.ReasonCapacityMismatch, `CapacityMismatch: see the device plugin's log on this node; ` +
			`the GPUs are restored, but their capacity is not back after 5m0s: nvidia.com/mig-1g.10gb: the GPUs have 56, kubelet 0; ` +
			`the node stays cordoned until this is mended`},
		{"a cordon of another", oneH100, func(w *world) {
			w.cordon(true)
			w.label("all-1g.10gb")
		}, config.ReasonConverged, `Converged: all-1g.10gb: nvidia.com/mig-1g.10gb 7; the node is cordoned; the agent does not lift that cordon`},
		{"a hold", oneH100, func(w *world) {
			w.annotate(config.AnnotationHold, "audit until Friday")
			w.label("all-1g.10gb")
		}, config.ReasonHeld, `Held: all-1g.10gb: to go on: kubectl annotate node gpu-1 gpuslice.io/hold-; ` +
			`changes nothing until annotation gpuslice.io/hold ("audit until Friday") is removed; since 2000-01-01 00:00:00Z`},
		{"another tool", oneH100, func(w *world) {
			w.annotate("weave.works/kured-reboot-in-progress", "2000-01-01T00:00:00Z")
			w.label("all-1g.10gb")
		}, config.ReasonOtherMaintenance, `OtherMaintenance: all-1g.10gb: changes nothing until other tools are done with this node: kured, by annotation weave.works/kured-reboot-in-progress=2000-01-01T00:00:00Z (kured removes it after the reboot; ` +
			`after a reboot by others: kubectl annotate node gpu-1 weave.works/kured-reboot-in-progress-); since 2000-01-01 00:00:00Z`},
		{"a process of no pod", oneH100, func(w *world) {
			w.turn()
			w.startGPUProcess(w.gpus.UUIDs()[0], 5000, "python", "0::/user.slice")
			w.label("all-1g.10gb")
		}, config.ReasonGPUInUse, `GPUInUse: all-1g.10gb: end what holds the GPUs on the node, or stop its unit; ` +
			`processes of no pod hold what changes: GPU 0 by pid 5000 python; since 2000-01-01 00:00:00Z; changes nothing until then`},
		{"bare pods", fiveH100, func(w *world) {
			w.turn()
			for i := range 5 {
				w.pod(fmt.Sprintf("notebook-%d", i), w.gpus.UUIDs()[i], bare)
			}
			w.label("all-1g.10gb")
		}, config.ReasonEvictionBlocked, `EvictionBlocked: to let this change evict what would be lost: kubectl gpuslice apply gpu-1 --mig-config all-1g.10gb --force-unmanaged; ` +
			`team/notebook-0, team/notebook-1, team/notebook-2 and 2 more: no controller would recreate it (drain.unmanagedPods: refuse); ` +
			`since 2000-01-01 00:00:00Z; changes nothing until then; to cancel, remove the label nvidia.com/mig.config`},
		{"pods that end", fiveH100, func(w *world) {
			w.turn()
			w.podsOnGPUs("llama", 0, 5)
			w.grace = 10 * time.Minute
			w.label("all-1g.10gb")
		}, config.ReasonEvicting, `Evicting: all-1g.10gb: waiting for pods to leave: team/llama-0, team/llama-1, team/llama-2 and 2 more: terminating, its grace ends at 00:10:00Z; ` +
			`since 2000-01-01 00:00:00Z; at 2000-01-01 01:00:00Z the change is given up and undone`},
		{"capacity that is awaited", eightH100, func(w *world) {
			w.converge("all-1g.10gb")
			w.pluginBroken = true
			w.label("all-balanced")
		}, config.ReasonAwaitingCapacity, `AwaitingCapacity: all-balanced: waiting for kubelet and the device plugin: nvidia.com/mig-1g.10gb: the GPUs have 16, kubelet 0; ` +
			`nvidia.com/mig-2g.20gb: the GPUs have 8, kubelet 0; nvidia.com/mig-3g.40gb: the GPUs have 8, kubelet 0; since 2000-01-01 00:05:02Z; ` +
			`at 2000-01-01 00:10:02Z the change is given up and undone`},
	} {
		t.Run(s.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, s.models)
				events := w.restartWithEvents()
				s.do(w)
				c := w.untilReason(s.reason)
				w.passesWithin(2, func() bool { return false })
				if w.reason() == s.reason { // it has counted all pods
					c = w.condition()
				}
				if got := c.Reason + ": " + c.Message; got != s.want {
					t.Errorf("%d characters:\n%s\nwant\n%s", utf8.RuneCountInString(got), got, s.want)
				}
				readable(t, c.Message)
				for len(events) > 0 {
					readable(t, <-events)
				}
			})
		})
	}
}

// readable checks what holds of all messages.
func readable(t *testing.T, message string) {
	t.Helper()
	if wholeUUID.MatchString(message) {
		t.Errorf("a GPU is named by its UUID: %s", message)
	}
	seen := map[string]bool{}
	for clause := range strings.SplitSeq(message, "; ") {
		if seen[clause] {
			t.Errorf("%q is said twice: %s", clause, message)
		}
		seen[clause] = true
	}
	for word := range strings.FieldsFuncSeq(strings.ToLower(message), func(r rune) bool { return !unicode.IsLetter(r) }) {
		if slices.Contains([]string{"wish", "wishes", "owe", "owes", "owed", "told", "look", "looking", "meanwhile"}, word) {
			t.Errorf("%q is no word of the field: %s", word, message)
		}
	}
	for _, phrase := range []string{"given back", "gives back", "by now", "all the same"} {
		if strings.Contains(strings.ToLower(message), phrase) {
			t.Errorf("%q is no phrase of the field: %s", phrase, message)
		}
	}
}

var wholeUUID = regexp.MustCompile(`GPU-[0-9a-f]{8}-`)

// mustPod is the pod.
func (w *world) mustPod(name string) *corev1.Pod {
	w.t.Helper()
	p, err := w.client.CoreV1().Pods("team").Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

// podWithoutRoom adds a pod of the app for which no node has room.
func (w *world) podWithoutRoom(name, app, why string) {
	w.t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "team", UID: types.UID(name), Labels: map[string]string{"app": app}}, Status: corev1.PodStatus{
		Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: why}},
	}}
	if _, err := w.client.CoreV1().Pods("team").Create(w.t.Context(), p, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}
