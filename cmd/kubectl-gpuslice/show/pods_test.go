package show

import (
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

// cut says how the GPU of a node is cut.
func cut(n *corev1.Node) {
	s := agenttest.Done()
	s.Desired, s.GPUs = "", []api.StatusGPU{balanced(0)}
	agenttest.Says(n, s, "as asked")
}

func TestANodeThatIsNamedIsDrawnWithItsPods(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Edit("gpu-1", cut)
		w.Start("status", "gpu-1")
		w.Diagnoses("gpu-1", api.Diagnosis{
			GPUs: api.GPUsSeen{Now: []api.StatusGPU{balanced(0)}},
			Pods: []api.PodSeen{{Namespace: "team", Name: "notebook", Devices: []string{"GPU 0 2g.20gb@2"}}},
			Processes: []api.ProcessSeen{
				{Name: "pid 4711 python", Holds: []string{"GPU 0 3g.40gb@4"}, FoundBy: []string{"NVML"}},
				{Name: "pid 812 nvidia-persiste", Holds: []string{"GPU 0"}, FoundBy: []string{"device file /dev/nvidia0"}}, // uses nothing
			},
		})
		w.Is(`
NODE    ASKED FOR   PHASE   REASON      SINCE   CAPACITY   BLOCKERS
gpu-1               Idle    Converged   0s

gpu-1
GPU 0 GPU-5d1c7f00-1111-2222-3333-444455556666 MIG, 2 of 4 free
  │1g.10gb │1g.10gb │ 2g.20gb         │ 3g.40gb                           │
  │ #9     │ #10    │ #5              │ #2                                │
  #9   1g.10gb@0  free
  #10  1g.10gb@1  free
  #5   2g.20gb@2  team/notebook
  #2   3g.40gb@4  pid 4711 python
`, 0)
		w.Untouched("gpu-1")
	}, agenttest.GPU("gpu-1"))
}

// Where NVIDIA's DRA driver makes the instances for claims, none is free.
func TestInstancesThatNoClaimHasAreLeftOver(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Edit("gpu-1", cut)
		w.Start("status", "gpu-1")
		now := seven(0)
		now.Instances = now.Instances[:2]
		now.Geometry, now.Instances[1].Left, now.Fits = "1g.10gb@0 1g.10gb@1", true, "4g.40gb"
		w.Diagnoses("gpu-1", api.Diagnosis{
			GPUs: api.GPUsSeen{Now: []api.StatusGPU{now}}, Pods: []api.PodSeen{{Namespace: "team", Name: "notebook", Devices: []string{"GPU 0 1g.10gb@0"}}},
		})
		w.Is(`
NODE    ASKED FOR   PHASE   REASON      SINCE   CAPACITY   BLOCKERS
gpu-1               Idle    Converged   0s

gpu-1
GPU 0 GPU-5d1c7f00-1111-2222-3333-444455556666 MIG, 0 of 2 free
  │1g.10gb │1g.10gb │    ·        ·        ·        ·        ·        ·   │
  │ #7     │ #8     │    ·        ·        ·        ·        ·        ·   │
  #7   1g.10gb@0  team/notebook
  #8   1g.10gb@1  left over: no claim has it; the driver destroys it when it starts again
  room: 6 of 8 memory slices are free; the largest instance that fits: 4g.40gb
`, 0)
	}, agenttest.GPU("gpu-1"))
}

// refuseIn takes the right from the user where a request is of that namespace; of all namespaces if it is empty.
func refuseIn(w *world, verb, resource, namespace string) {
	w.Client.PrependReactor(verb, resource, func(a k8stesting.Action) (bool, runtime.Object, error) {
		if a.GetNamespace() != namespace {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("no"))
	})
}

// refuse takes a right from the user.
func refuse(w *world, verb, resource string) {
	w.Client.PrependReactor(verb, resource, func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("no"))
	})
}

func TestWithoutTheRightToAskTheAgentTheDrawingSaysSo(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Edit("gpu-1", cut)
		w.RunsOn("gpu-1", "notebook")
		refuse(w, "patch", "nodes")
		for _, args := range [][]string{{"status", "gpu-1"}, {"status", "gpu-1", "--ask=false"}} {
			said, code := w.Run(args...)
			if code != 0 || !strings.Contains(said, "cannot tell who uses which instance: ") || !strings.Contains(said, "  #5   2g.20gb@2  ?\n") ||
				!strings.Contains(said, "pods that request GPUs: team/notebook (nvidia.com/mig-1g.10gb 1)") {
				t.Errorf("%q: exit code %d: %s", args, code, said)
			}
		}
		refuseIn(w, "list", "pods", "")
		const own = "team/notebook (nvidia.com/mig-1g.10gb 1), perhaps more in namespaces that you may not see"
		if said, code := w.Run("status", "gpu-1", "-n", "team"); code != 0 || !strings.Contains(said, own) {
			t.Errorf("without the right to list all pods: exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"))
}

// A reader of nodes sees who has what, and the names of the pods that the reader may list.
func TestWithoutTheRightToAskTheLastReportIsShown(t *testing.T) {
	held := func(n *corev1.Node) {
		s := agenttest.Done()
		s.Desired, s.GPUs = "", []api.StatusGPU{balanced(0), {Index: 1, UUID: "GPU-1"}}
		s.Held = []api.Held{{Pod: "team/notebook", On: []string{"0/2"}}, {Pod: "other", On: []string{"1", "0/4"}}, {Pod: "third"}, {Pod: "forged", On: []string{"7", "0/1/2", "x"}}}
		agenttest.Says(n, s, "as asked")
	}
	for name, row := range map[string]struct {
		change    func(w *world)
		args      []string
		want, top string
		code      int
	}{
		"who may list pods": {
			want: "pods: as its agent last reported, without processes outside of pods: asking the agent needs the verb patch on nodes, which you lack",
			top: `
POD                                       NODE    GPU
team/notebook                             gpu-1   0 2g.20gb@2
a pod that the API server does not list   gpu-1   0 3g.40gb@4
a pod that the API server does not list   gpu-1   1
how much they use is not known: asking the agents needs the verb patch on nodes, which you lack
a pod that the API server does not list has devices of gpu-1, and it is not known which
`,
		},
		"who may not": {
			change: func(w *world) { refuse(w, "list", "pods") },
			want:   "#5   2g.20gb@2  a pod that you may not list",
			top: `
POD                           NODE    GPU
a pod that you may not list   gpu-1   0 2g.20gb@2
a pod that you may not list   gpu-1   0 3g.40gb@4
a pod that you may not list   gpu-1   1
how much they use is not known: asking the agents needs the verb patch on nodes, which you lack
a pod that you may not list has devices of gpu-1, and it is not known which
`,
		},
		"who may list those of the own namespace": {
			change: func(w *world) { refuseIn(w, "list", "pods", "") },
			args:   []string{"-n", "team"},
			want:   "#5   2g.20gb@2  team/notebook",
			top: `
POD                           NODE    GPU
team/notebook                 gpu-1   0 2g.20gb@2
a pod that you may not list   gpu-1   0 3g.40gb@4
a pod that you may not list   gpu-1   1
how much they use is not known: asking the agents needs the verb patch on nodes, which you lack
a pod that you may not list has devices of gpu-1, and it is not known which
`,
		},
		"who asks for those of another namespace": {
			args: []string{"-n", "research"},
			want: "#5   2g.20gb@2  team/notebook",
			top: `
POD                                       NODE    GPU
a pod that the API server does not list   gpu-1   0 3g.40gb@4
a pod that the API server does not list   gpu-1   1
how much they use is not known: asking the agents needs the verb patch on nodes, which you lack
a pod that the API server does not list has devices of gpu-1, and it is not known which
`,
		},
		"whose agent last reported none": {
			change: func(w *world) {
				w.Edit("gpu-1", func(n *corev1.Node) {
					s := agenttest.Done()
					s.Held = []api.Held{}
					agenttest.Says(n, s, "as asked")
				})
			},
			want: "pods: as its agent last reported",
			top: `
no pod has a GPU, as the agents last reported: a pod that has just started is not in it
how much they use is not known: asking the agents needs the verb patch on nodes, which you lack
`,
		},
		"where listing them fails": {
			change: func(w *world) {
				w.Client.PrependReactor("list", "pods", func(k8stesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("etcd is gone") })
			},
			want: "#5   2g.20gb@2  a pod that could not be listed",
			top: `
POD                              NODE    GPU
a pod that could not be listed   gpu-1   0 2g.20gb@2
a pod that could not be listed   gpu-1   0 3g.40gb@4
a pod that could not be listed   gpu-1   1
how much they use is not known: asking the agents needs the verb patch on nodes, which you lack
a pod that could not be listed has devices of gpu-1, and it is not known which
`,
		},
		"an agent that is silent": {
			change: func(w *world) {
				w.Edit("gpu-1", func(n *corev1.Node) {
					for i := range n.Status.Conditions {
						n.Status.Conditions[i].LastHeartbeatTime = metav1.NewTime(time.Now().Add(-time.Hour))
					}
				})
			},
			want: "pods: cannot tell who uses which instance",
			top: `
how much they use is not known: asking the agents needs the verb patch on nodes, which you lack
gpu-1: its agent has not reported which pods have its GPUs
error: no agent of 1 node has answered
`, code: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.Edit("gpu-1", held)
				w.RunsOn("gpu-1", "notebook")
				refuse(w, "patch", "nodes")
				if row.change != nil {
					row.change(w)
				}
				said, code := w.Run(append([]string{"status", "gpu-1"}, row.args...)...)
				if code != 0 || !strings.Contains(said, row.want) {
					t.Errorf("exit code %d: %s", code, said)
				}
				w.Start(append([]string{"top", "gpu-1"}, row.args...)...)
				w.Is(row.top, row.code)
				const unknown = `"how much they use is not known: asking the agents needs the verb patch on nodes, which you lack"`
				if said, _ := w.Run(append([]string{"top", "gpu-1", "-o", "json"}, row.args...)...); !strings.Contains(said, "\"notes\": [\n    "+unknown) {
					t.Errorf("the JSON has no note of it: %s", said)
				}
			}, agenttest.GPU("gpu-1"))
		})
	}
}

func TestAWatchShowsWhatChanges(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start("status", "--watch", "gpu-1", "gpu-2")
		w.Says("gpu-1", agenttest.Research(api.PhaseDraining, config.ReasonEvicting, 9), "not asked for any more, as its agent has yet to see")
		w.Says("gpu-1", api.Status{Phase: api.PhaseDraining, Reason: config.ReasonEvicting, Left: 9}, "on its way")
		w.Says("gpu-3", agenttest.Done(), "not meant")
		w.Says("gpu-1", api.Status{Phase: api.PhaseDraining, Reason: config.ReasonEvicting, Left: 8}, "on its way")
		w.Remove("gpu-2")
		w.Stop()
		w.Is(`
00:00:00Z  gpu-1    Idle  NotRequested    
00:00:00Z  gpu-2    Idle  NotRequested    
00:00:01Z  gpu-1    Draining  NotSeenYet    
00:00:02Z  gpu-1    Draining  Evicting    
00:00:04Z  gpu-2  was deleted
`, 0)
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"), agenttest.GPU("gpu-3"))
}
