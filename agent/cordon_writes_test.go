package agent_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// recordCordons notes each patch of the node that cordons it, from now on. A test that observes the node only in the end does not see a cordon that was
// taken back.
func (w *world) recordCordons() *[]string {
	var patches []string
	w.client.PrependReactor("patch", "nodes", func(action k8stesting.Action) (bool, runtime.Object, error) {
		if p, ok := action.(k8stesting.PatchAction); ok && strings.Contains(string(p.GetPatch()), `"unschedulable":true`) {
			patches = append(patches, string(p.GetPatch()))
		}
		return false, nil, nil
	})
	return &patches
}

// budgetKeeps lets a disruption budget keep the pods while on returns true, in a dry run too.
func (w *world) budgetKeeps(on func() bool, names ...string) {
	w.client.PrependReactor("create", "pods", func(action k8stesting.Action) (bool, runtime.Object, error) {
		if action.GetSubresource() != "eviction" || !on() {
			return false, nil, nil
		}
		e, ok := action.(k8stesting.CreateAction).GetObject().(*policyv1.Eviction)
		if !ok || !slices.Contains(names, e.Name) {
			return false, nil, nil
		}
		return true, nil, apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 0)
	})
}

// Promise 7: one write makes the cordon, the taint and the journal, so that a crash leaves no cordon that no journal knows of.
func TestEachWriteThatCordonsHasTheJournalAndTheTaint(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]bool{"a change that succeeds": false, "a change that is undone": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := busy(t)
				cordons := w.recordCordons()
				if fails {
					w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
				}
				w.label("all-1g.10gb")
				w.settle(config.ReasonConverged, config.ReasonHardwareFailure)
				w.expectGivenBack()
				if len(*cordons) == 0 {
					t.Fatal("the node was never cordoned")
				}
				for _, patch := range *cordons {
					if !strings.Contains(patch, `"`+config.AnnotationJournal+`":"`) || !strings.Contains(patch, config.TaintRepartitioning) {
						t.Errorf("the write has no journal, or no taint: %s", patch)
					}
				}
			})
		})
	}
}

// Promise 5. A GPU that is reset takes the device plugin's pod along, whose budget counts as that of any other pod.
func TestABudgetOfTheDevicePluginIsAskedBeforeTheCordon(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, oneA100)
		w.turn()
		full := true
		w.budgetKeeps(func() bool { return full }, "plugin-1")
		cordons := w.recordCordons()
		w.label("all-balanced")
		c := w.untilReason(config.ReasonEvictionBlocked)
		w.spend(10 * time.Minute)
		if len(*cordons) > 0 || !strings.Contains(c.Message, "kube-system/plugin-1") {
			t.Errorf("the node was cordoned %d times; it says %s", len(*cordons), c.Message)
		}
		full = false
		w.reach("all-balanced")
	})
}

// Promise 3. Such a pod asks for no GPU and computes on none; but while it has the file open, the driver does not reset the GPU.
func TestAPodThatOnlyHasTheFileOfAGPUOpenLeavesBeforeItsReset(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, oneA100)
		const uid, pid = "7a0c6a4e-0000-4000-8000-000000000002", 5000
		w.pod("watcher", "", func(p *corev1.Pod) {
			p.UID, p.Spec.Containers[0].Resources = uid, corev1.ResourceRequirements{}
		})
		if err := w.gpus.HoldHidden(w.gpus.UUIDs()[0], pid, "python"); err != nil {
			t.Fatal(err)
		}
		w.addProcess(pid, "python", podCgroup(uid), "/dev/nvidia0")
		w.label("all-balanced")
		w.passes("the eviction", func() bool { return !w.runs("watcher") })
		w.endGPUProcess(pid)
		w.reach("all-balanced")
	})
}

// Promise 13. The label of the device plugin's config is a config of its own: a profile that it replaces leaves nothing on the node.
func TestLabelsOfAProfileGoWhenAConfigOfTheDevicePluginAloneIsAskedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployConfigManager()
		w.profile("two")
		w.reach("two")
		if value := w.node().Labels["workload-type"]; value != "development" {
			t.Fatalf("the profile's label is %q", value)
		}
		w.edit(func(n *corev1.Node) {
			delete(n.Labels, config.LabelProfile)
			metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelDevicePluginConfig, "default")
		})
		w.reach("default")
		if n := w.node(); n.Labels["workload-type"] != "" || n.Annotations[config.AnnotationPublished] != "" {
			t.Errorf("labels %v, annotations %v", n.Labels, n.Annotations)
		}
	})
}
