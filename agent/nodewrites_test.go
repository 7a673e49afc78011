package agent_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
)

// The API server refuses a guarded write of a node that another program has written since the observation, and some write 50 times a second.
func TestAChangeComesToItsEndWhileOthersWriteTheNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.edit(func(n *corev1.Node) { // the agent compares the marks of other tools, too
			metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelOperandPrefix+"client", "paused-for-mig-change")
			n.Spec.Taints = []corev1.Taint{{Key: "DeletionCandidateOfClusterAutoscaler", Value: "946684800", Effect: corev1.TaintEffectPreferNoSchedule}}
		})
		version := func() string { return fmt.Sprint(time.Now().UnixMilli() / 20) }
		w.client.PrependReactor("get", "nodes", func(a k8stesting.Action) (bool, runtime.Object, error) {
			o, err := w.client.nodes.Get(corev1.SchemeGroupVersion.WithResource("nodes"), "", nodeName)
			if err != nil {
				return true, nil, err
			}
			n, ok := o.(*corev1.Node)
			if !ok {
				return false, nil, nil
			}
			n = n.DeepCopy()
			n.ResourceVersion = version()
			return true, n, nil
		})
		w.patched(func(patch string) error {
			if i := strings.Index(patch, `"resourceVersion":"`); i >= 0 && !strings.HasPrefix(patch[i+19:], version()+`"`) {
				return apierrors.NewConflict(corev1.Resource("nodes"), nodeName, errors.New("the object has been modified"))
			}
			return nil
		})
		w.kubeletDelay = 30 * time.Millisecond
		w.label("all-balanced")
		if !w.passesWithin(400, w.done("all-balanced")) {
			t.Errorf("after 400 passes: %s: %s", w.condition().Reason, w.condition().Message)
		}
	})
}

var nodeResource = corev1.SchemeGroupVersion.WithResource("nodes")

// writeBeforeEachPatch lets another program write the node before each guarded patch, unless the agent has read the node just before.
func (w *world) writeBeforeEachPatch(write func(*corev1.Node)) {
	fresh := false
	w.client.PrependReactor("*", "*", func(action k8stesting.Action) (bool, runtime.Object, error) {
		patch, ok := action.(k8stesting.PatchAction)
		guarded := ok && action.GetResource() == nodeResource && strings.Contains(string(patch.GetPatch()), "resourceVersion")
		refused := guarded && !fresh
		fresh = action.Matches("get", "nodes")
		if !refused {
			return false, nil, nil
		}
		if err := w.writeBetween(write); err != nil {
			return true, nil, err
		}
		return true, nil, apierrors.NewConflict(nodeResource.GroupResource(), nodeName, nil)
	})
}

// The agent does not write by a former state of the node if it would decide otherwise by the present one.
func TestAWriteThatSomethingNewSpeaksAgainstIsNotMade(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*corev1.Node){
		"another request": func(n *corev1.Node) { metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelMIGConfig, "all-3g.40gb") },
		"a cordon":        func(n *corev1.Node) { n.Spec.Unschedulable = true },
		"another tool": func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: "medik8s.io/drain", Effect: corev1.TaintEffectNoSchedule}}
		},
		"a hand-over": func(n *corev1.Node) {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, config.AnnotationKeepCordoned, "for the night shift")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.pod("trainer", w.devices()["nvidia.com/gpu"][0])
				w.edit(func(n *corev1.Node) { // another tool has announced that it will come
					n.Spec.Taints = []corev1.Taint{{Key: "DeletionCandidateOfClusterAutoscaler", Value: "946684800", Effect: corev1.TaintEffectPreferNoSchedule}}
				})
				w.label("all-balanced")
				changed := false
				w.writeBeforeEachPatch(func(n *corev1.Node) {
					if !changed {
						change(n)
					}
					changed = true
				})
				w.passes("the fence", func() bool { return changed })
				if w.hasJournal() {
					t.Error("the fence was raised all the same")
				}
			})
		})
	}
}
