package show

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

// h100 is what an agent reports of the model.
var h100 = api.Model{Name: "NVIDIA H100 80GB HBM3", Profiles: []api.Profile{
	{Name: "1g.10gb", Slices: 1, Size: 1, At: []int{0, 1, 2, 3, 4, 5, 6}, Max: 7},
	{Name: "2g.20gb", Slices: 2, Size: 2, At: []int{0, 2, 4}, Max: 3},
	{Name: "3g.40gb", Slices: 3, Size: 4, At: []int{0, 4}, Max: 2},
	{Name: "7g.80gb", Slices: 7, Size: 8, At: []int{0}, Max: 1},
}}

// adviser is a world with a pool whose pods wait.
type adviser struct{ *world }

// pool makes a node with GPUs that are each cut and held as the text says: "off", "1g.10gb@0:team/a 3g.40gb@4". The pods that it names run there.
func (w adviser) pool(name string, gpus ...string) {
	w.T.Helper()
	s := api.Status{Phase: api.PhaseIdle, Reason: config.ReasonNotRequested, Models: []api.Model{h100}, Held: []api.Held{}}
	offers := corev1.ResourceList{corev1.ResourcePods: resource.MustParse("110"), corev1.ResourceCPU: resource.MustParse("64")}
	offer := func(of, on, pod string) {
		n := offers[corev1.ResourceName(of)]
		n.Add(resource.MustParse("1"))
		offers[corev1.ResourceName(of)] = n
		if pod != "" {
			s.Held = append(s.Held, api.Held{Pod: types.UID(pod), On: []string{on}})
			w.pod(pod, of, func(p *corev1.Pod) {
				p.Spec.NodeName, p.Status.Phase = name, corev1.PodRunning
				p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "set", Controller: new(true)}}
			})
		}
	}
	for index, gpu := range gpus {
		g := api.StatusGPU{Index: index, UUID: "GPU-x", Slices: 8}
		s.Models[0].GPUs = append(s.Models[0].GPUs, index)
		if mode, pod, _ := strings.Cut(gpu, ":"); mode == "off" {
			offer("nvidia.com/gpu", fmt.Sprint(index), pod)
		} else {
			g.MIG = true
			for word := range strings.FieldsSeq(gpu) {
				place, pod, _ := strings.Cut(word, ":")
				profile, start, _ := strings.Cut(place, "@")
				i := api.StatusInstance{Is: place, At: int(start[0] - '0')}
				for _, p := range h100.Profiles {
					if p.Name == profile {
						i.Size = p.Size
					}
				}
				g.Instances = append(g.Instances, i)
				g.Geometry = strings.TrimSpace(g.Geometry + " " + place)
				offer("nvidia.com/mig-"+profile, fmt.Sprintf("%d/%s", index, start), pod)
			}
		}
		s.GPUs = append(s.GPUs, g)
	}
	n := agenttest.GPUNode(name)
	agenttest.Says(n, s, "no config is asked for")
	n.Status.Allocatable = offers
	n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue})
	w.Create(n)
}

// pod makes a pod that requests one of the resource, and waits for a node.
func (w adviser) pod(name, asks string, change ...func(p *corev1.Pod)) {
	w.T.Helper()
	namespace, short, _ := strings.Cut(name, "/")
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: short, UID: types.UID(name), Labels: map[string]string{"app": short}, CreationTimestamp: metav1.NewTime(time.Now().Add(-3 * time.Minute))},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceName(asks): resource.MustParse("1")}},
		}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/2 nodes are available: 2 Insufficient " + asks + ".",
		}}},
	}
	for _, c := range change {
		c(p)
	}
	if _, err := w.Client.CoreV1().Pods(namespace).Create(w.T.Context(), p, metav1.CreateOptions{}); err != nil {
		w.T.Fatal(err)
	}
}

// inPool runs a test of advise. The command may write nothing.
func inPool(t *testing.T, test func(w adviser)) {
	t.Helper()
	inWorld(t, func(w *world) { test(adviser{w}) })
}

// advises runs the command, and fails the test if that writes.
func (w adviser) advises(args ...string) (said string, code int) {
	w.T.Helper()
	w.Client.ClearActions()
	said, code = w.Run(append([]string{"advise"}, args...)...)
	for _, a := range w.Client.Actions() {
		if verb := a.GetVerb(); verb != "get" && verb != "list" {
			w.T.Errorf("advise %q: %s of %s", args, verb, a.GetResource().Resource)
		}
	}
	return said, code
}

const mig3 = "nvidia.com/mig-3g.40gb"

// Each pod counts on the changes for those before it.
func TestAdviceForPendingPods(t *testing.T) {
	inPool(t, func(w adviser) {
		w.pool("gpu-1", "3g.40gb@0:team-a/train 2g.20gb@4:team-b/serve 1g.10gb@6:team-b/note")
		w.pool("gpu-2", "1g.10gb@0:team-a/small 1g.10gb@1 1g.10gb@4")
		w.pod("team-a/trainer-0", mig3)
		said, code := w.advises()
		if code != 0 || !strings.Contains(said, "  $ kubectl gpuslice apply gpu-2 --mig-config gpu0_3g.40gb_2x1g.10gb\n") {
			t.Errorf("exit code %d:\n%s", code, said)
		}
		w.pod("team-b/huge", "nvidia.com/mig-4g.71gb")
		if said, code := w.advises(); code != 4 || !strings.Contains(said, "team-b/huge  TooLarge\n") {
			t.Errorf("exit code %d:\n%s", code, said)
		}
	})
}
