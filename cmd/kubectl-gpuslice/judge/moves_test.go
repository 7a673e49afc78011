package judge

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// h100 is what an agent reports of the model.
var h100 = api.Model{Name: "NVIDIA H100 80GB HBM3", Profiles: []api.Profile{
	{Name: "1g.10gb", Slices: 1, Size: 1, At: []int{0, 1, 2, 3, 4, 5, 6}, Max: 7},
	{Name: "1g.10gb+me", Slices: 1, Size: 1, At: []int{0, 1, 2, 3, 4, 5, 6}, Max: 1},
	{Name: "2g.20gb", Slices: 2, Size: 2, At: []int{0, 2, 4}, Max: 3},
	{Name: "3g.40gb", Slices: 3, Size: 4, At: []int{0, 4}, Max: 2},
	{Name: "4g.40gb", Slices: 4, Size: 4, At: []int{0}, Max: 1},
	{Name: "7g.80gb", Slices: 7, Size: 8, At: []int{0}, Max: 1},
}}

var now = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

// pool is a cluster that grows GPU by GPU.
type pool struct {
	t testing.TB
	Cluster
	status map[string]*api.Status
}

// node adds a node with GPUs that are each cut and held as the text says: "off", "off:team/a", "1g.10gb@0:team/a 3g.40gb@4". Pods that it names run there,
// and are of a StatefulSet.
func (c *pool) node(name string, gpus ...string) *corev1.Node {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
		Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		Allocatable: corev1.ResourceList{corev1.ResourcePods: resource.MustParse("110"), corev1.ResourceCPU: resource.MustParse("64")},
	}}
	s := &api.Status{Models: []api.Model{h100}, Held: []api.Held{}}
	offer := func(resourceName string) {
		have := n.Status.Allocatable[corev1.ResourceName(resourceName)]
		have.Add(resource.MustParse("1"))
		n.Status.Allocatable[corev1.ResourceName(resourceName)] = have
	}
	hold := func(pods, resourceName, on string) {
		for pod := range strings.SplitSeq(pods, ",") {
			if pod == "" {
				continue
			}
			namespace, short, _ := strings.Cut(pod, "/")
			c.Pods = append(c.Pods, *running1(namespace, short, name, resourceName))
			s.Held = append(s.Held, api.Held{Pod: types.UID("uid-" + pod), On: []string{on}})
		}
	}
	for index, text := range gpus {
		g := api.StatusGPU{Index: index, UUID: "GPU-x", Slices: 8}
		s.Models[0].GPUs = append(s.Models[0].GPUs, index)
		if mode, pods, _ := strings.Cut(text, ":"); mode == "off" {
			offer("nvidia.com/gpu")
			hold(pods, "nvidia.com/gpu", fmt.Sprint(index))
		} else {
			g.MIG = true
			for word := range strings.FieldsSeq(text) {
				place, pods, _ := strings.Cut(word, ":")
				profile, start, _ := strings.Cut(place, "@")
				size := 0
				for _, p := range h100.Profiles {
					if p.Name == profile {
						size = p.Size
					}
				}
				g.Instances = append(g.Instances, api.StatusInstance{Is: place, At: int(start[0] - '0'), Size: size})
				g.Geometry += place + " "
				name := "nvidia.com/mig-" + strings.ReplaceAll(profile, "+", ".")
				offer(name)
				hold(pods, name, fmt.Sprintf("%d/%s", index, start))
			}
		}
		s.GPUs = append(s.GPUs, g)
	}
	c.Nodes = append(c.Nodes, n)
	c.status[name] = s
	return &c.Nodes[len(c.Nodes)-1]
}

// l4 adds a node with GPUs that cannot be cut.
func (c *pool) l4(name string, gpus ...string) *corev1.Node {
	n := c.node(name, gpus...)
	s := c.status[name]
	s.Models = []api.Model{{Name: "NVIDIA L4", GPUs: s.Models[0].GPUs, Profiles: []api.Profile{}}}
	for i := range s.GPUs {
		s.GPUs[i].Slices = 0
	}
	return n
}

// running1 is a pod of a StatefulSet that requests one of the resource; pending without a node.
func running1(namespace, name, node, resourceName string) *corev1.Pod {
	p := pod(name, func(p *corev1.Pod) {
		p.Namespace, p.UID, p.Spec.NodeName = namespace, types.UID("uid-"+namespace+"/"+name), node
		p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceName(resourceName): resource.MustParse("1")}
	})
	if node == "" {
		p.Status = corev1.PodStatus{Phase: corev1.PodPending}
	}
	return &p
}

// ofDaemonSet makes a DaemonSet the owner of a pod.
func (c *pool) ofDaemonSet(name string) {
	for i := range c.Pods {
		if c.Pods[i].Name == name {
			c.Pods[i].OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", Controller: new(true)}}
		}
	}
}

// moves are what the pending pods need, in lines.
func (c *pool) moves(begins func(*corev1.Node) Beginning, pending ...*corev1.Pod) []Move {
	c.t.Helper()
	q := c.question(begins, pending...)
	before := texts(c.t, &c.Cluster)
	out := Moves(c.t.Context(), q)
	if diff := cmp.Diff(before, texts(c.t, &c.Cluster)); diff != "" {
		c.t.Errorf("the advice has changed the cluster (-before +after):\n%s", diff)
	}
	return out
}

func (c *pool) question(begins func(*corev1.Node) Beginning, pending ...*corev1.Pod) Question {
	q := Question{Cluster: &c.Cluster, All: true, Now: now, Begins: begins, Status: func(n *corev1.Node) (api.Status, string) { return *c.status[n.Name], "" }}
	for _, p := range pending {
		q.Pending = append(q.Pending, *p)
	}
	return q
}

func line(m Move) string {
	out := fmt.Sprintf("%s %s", m.Verdict, m.Node)
	for _, c := range m.Cuts {
		var after []string
		for _, i := range c.After {
			after = append(after, i.Is)
		}
		if c.After == nil {
			after = []string{"off"}
		}
		out += fmt.Sprintf(" %d:%s", c.GPU, strings.Join(after, "+"))
	}
	if len(m.Leave) > 0 {
		out += fmt.Sprintf(" leave %s (%d)", strings.Join(m.Leave, ","), m.Lost)
	}
	return strings.TrimSpace(out)
}

func TestWhatAPendingPodNeeds(t *testing.T) {
	const mig3 = "nvidia.com/mig-3g.40gb"
	requests := func(name, n string) func(p *corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceName(name): resource.MustParse(n)}
		}
	}
	later := func(*corev1.Node) Beginning { return Beginning{At: now.Add(time.Hour)} }
	paused := func(*corev1.Node) Beginning { return Beginning{Not: "pool a is paused"} }
	for name, row := range map[string]struct {
		build  func(c *pool)
		change func(p *corev1.Pod)
		asks   string // one of the resource; empty for mig3
		begins func(*corev1.Node) Beginning
		want   string
		says   string // a part of the reason, the budgets or the notes
	}{
		"an idle instance": {build: func(c *pool) { c.node("gpu-1", "3g.40gb@0") }, want: "WillFit gpu-1", says: "node gpu-1 has what it requests"},
		"idle slices": {
			build: func(c *pool) { c.node("gpu-1", "1g.10gb@0:team/a 1g.10gb@4 1g.10gb@5") },
			want:  "NeedsRecut gpu-1 0:1g.10gb@0+3g.40gb@4", says: "no pod has to leave",
		},
		"the node on which no pod leaves": {
			build: func(c *pool) { c.node("gpu-1", "7g.80gb@0:team/a"); c.node("gpu-2", "1g.10gb@0:team/b") },
			want:  "NeedsRecut gpu-2 0:1g.10gb@0+3g.40gb@4",
		},
		"a pod has to leave": {
			build: func(c *pool) { c.node("gpu-1", "3g.40gb@0:team/a 2g.20gb@4:team/b 1g.10gb@6:team/c") },
			want:  "NeedsDrain gpu-1 0:3g.40gb@0+3g.40gb@4 leave team/b,team/c (3)", says: "2 pods have to leave, with 3 memory slices",
		},
		"its budget lets it go behind the cordon alone": {
			build: func(c *pool) {
				c.node("gpu-1", "3g.40gb@0:team/a 2g.20gb@4:team/b")
				c.Budgets = append(c.Budgets, budget("b", "x", 0))
			},
			want: "NeedsCordon gpu-1 0:3g.40gb@0+3g.40gb@4 leave team/b (2)", says: "lets none of 1 pod go now",
		},
		"its budget never lets it go, and another's does": {
			build: func(c *pool) {
				c.node("gpu-1", "3g.40gb@0:team/a 2g.20gb@4:team/b 1g.10gb@6:team/b2")
				c.node("gpu-2", "3g.40gb@0:team/c 2g.20gb@4:other/d 1g.10gb@6:other/e")
				c.Budgets = append(c.Budgets, budget("b", "x", 1))
			},
			want: "NeedsDrain gpu-2 0:3g.40gb@0+3g.40gb@4 leave other/d,other/e (3)",
		},
		"a later window": {
			build: func(c *pool) { c.node("gpu-1", "off") }, begins: later,
			want: "NeedsWindow gpu-1 0:3g.40gb@0",
		},
		"a pool that is paused": {
			build: func(c *pool) { c.node("gpu-1", "off") }, begins: paused,
			want: "NeedsWindow gpu-1 0:3g.40gb@0",
		},
		"a later window, and free places": {
			build: func(c *pool) { c.node("gpu-1", "1g.10gb@0") }, begins: later,
			want: "NeedsRecut gpu-1 0:1g.10gb@0+3g.40gb@4",
		},
		"a whole GPU": {
			build: func(c *pool) { c.node("gpu-1", "off:team/a", "1g.10gb@0") }, asks: "nvidia.com/gpu",
			want: "NeedsRecut gpu-1 1:off",
		},
		"a profile with an attribute": {
			build: func(c *pool) { c.node("gpu-1", "1g.10gb@0") }, asks: "nvidia.com/mig-1g.10gb.me",
			want: "NeedsRecut gpu-1 0:1g.10gb@0+1g.10gb+me@1",
		},
		"a pod of a DaemonSet gets an instance elsewhere on the GPU": {
			build: func(c *pool) {
				c.node("gpu-1", "2g.20gb@0:team/a 1g.10gb@4:team/daemon")
				c.ofDaemonSet("daemon")
			},
			want: "NeedsDrain gpu-1 0:2g.20gb@0+1g.10gb@2+3g.40gb@4 leave team/daemon (1)",
		},
		"a profile with an attribute, which the plugin leaves out": {
			build: func(c *pool) {
				n := c.node("gpu-1", "1g.10gb@0 1g.10gb+me@1:team/a")
				n.Status.Allocatable["nvidia.com/mig-1g.10gb"] = resource.MustParse("2")
				delete(n.Status.Allocatable, "nvidia.com/mig-1g.10gb.me")
			},
			asks: "nvidia.com/mig-1g.10gb.me", want: "NotGPU", says: "leaves the attributes of profiles out of names",
		},
		"larger than any node": {build: func(c *pool) { c.node("gpu-1", "off") }, asks: "nvidia.com/mig-3g.71gb", want: "TooLarge", says: "NVIDIA H100 80GB HBM3 7g.80gb"},
		"more than any node": {
			build:  func(c *pool) { c.node("gpu-1", "off"); c.node("gpu-2", "off") },
			change: func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests[mig3] = resource.MustParse("3") },
			want:   "TooLarge",
		},
		"all in use": {
			build: func(c *pool) { c.node("gpu-1", "7g.80gb@0:team/a") }, asks: "nvidia.com/mig-7g.80gb",
			want: "NeedsDrain", says: "one has to end",
		},
		"gated by Kueue": {
			build: func(c *pool) { c.node("gpu-1", "3g.40gb@0") },
			change: func(p *corev1.Pod) {
				p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
			},
			want: "Gated", says: "quota",
		},
		"gated": {
			build:  func(c *pool) { c.node("gpu-1", "3g.40gb@0") },
			change: func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/wait"}} },
			want:   "Gated", says: "example.com/wait",
		},
		"no GPU": {build: func(c *pool) { c.node("gpu-1", "off") }, asks: "cpu", want: "NotGPU", says: "requests no GPU"},
		"cpu": {
			build:  func(c *pool) { c.node("gpu-1", "3g.40gb@0") },
			change: func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests["cpu"] = resource.MustParse("100") },
			want:   "NotGPU", says: "1 node: too little free cpu",
		},
		"a taint": {
			build: func(c *pool) {
				c.node("gpu-1", "3g.40gb@0").Spec.Taints = []corev1.Taint{{Key: "dedicated", Effect: corev1.TaintEffectNoSchedule}}
			},
			want: "NotGPU", says: "1 node: taint dedicated",
		},
		"cordoned": {
			build: func(c *pool) { c.node("gpu-1", "off").Spec.Unschedulable = true },
			want:  "NotGPU", says: "1 node: cordoned",
		},
		"another scheduler": {
			build:  func(c *pool) { c.node("gpu-1", "3g.40gb@0") },
			change: func(p *corev1.Pod) { p.Spec.SchedulerName = "kai-scheduler" },
			want:   "WillFit gpu-1", says: "kai-scheduler, decides",
		},
		"a status with places without end": {
			build: func(c *pool) {
				c.node("gpu-1", "off")
				m := h100
				m.Profiles = []api.Profile{{Name: "3g.40gb", Slices: 1, Size: 1, At: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, Max: 8}}
				c.status["gpu-1"].Models = []api.Model{m}
			},
			want: "NotKnown", says: "a model that cannot be",
		},
		"more than 512 GPUs": {
			build: func(c *pool) { c.node("gpu-1", "off") }, change: requests("nvidia.com/gpu", "1001"), want: "TooLarge", says: "more than 512 devices",
		},
		"many devices of several kinds": {
			build: func(c *pool) { c.node("gpu-1", "off", "off") }, change: func(p *corev1.Pod) {
				for _, name := range []corev1.ResourceName{"1g.10gb", "2g.20gb", "3g.40gb"} {
					p.Spec.Containers[0].Resources.Requests["nvidia.com/mig-"+name] = resource.MustParse("15")
				}
			},
			want: "NotKnown", says: "several kinds",
		},
		"a shared resource that no sharing offers": {
			build: func(c *pool) { c.node("gpu-1", "1g.10gb@0") }, asks: "nvidia.com/gpu.shared", want: "NotGPU", says: "under the name nvidia.com/gpu.shared",
		},
		"a resource of the plugin that a DeviceClass stands for on other nodes": {
			build: func(c *pool) {
				c.node("gpu-1", "1g.10gb@0")
				c.Classes = []resourcev1.DeviceClass{classFor(mig3)}
			},
			want: "NeedsRecut gpu-1 0:1g.10gb@0+3g.40gb@4",
		},
		"a resource of the plugin on a node of the DRA driver": {
			build: func(c *pool) { c.dra("gpu-1", "1g.10gb@0") }, want: "NotGPU", says: "no DeviceClass has the resource " + mig3,
		},
		"the strategy none": {
			build: func(c *pool) {
				c.node("gpu-1", "off").Labels = map[string]string{config.LabelMIGStrategy: "none"}
			},
			want: "NotGPU", says: "MIG strategy",
		},
		"a node on hold": {
			build: func(c *pool) {
				c.node("gpu-1", "1g.10gb@0").Annotations = map[string]string{config.AnnotationHold: "audit"}
			},
			want: "NeedsWindow gpu-1 0:1g.10gb@0+3g.40gb@4", says: "on hold, and no change begins before that ends: audit",
		},
		"a pod without a controller has to leave": {
			build: func(c *pool) {
				c.node("gpu-1", "7g.80gb@0:team/bare")
				c.Pods[0].OwnerReferences = nil
			},
			want: "NeedsDrain gpu-1 0:3g.40gb@0 leave team/bare (8)", says: "team/bare has no controller",
		},
		"a pod with files on an emptyDir has to leave": {
			build: func(c *pool) {
				c.node("gpu-1", "7g.80gb@0:team/a")
				c.Pods[0].Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			},
			want: "NeedsDrain gpu-1 0:3g.40gb@0 leave team/a (8)", says: "emptyDir",
		},
		"a static pod has to leave": {
			build: func(c *pool) {
				c.node("gpu-1", "7g.80gb@0:team/a")
				c.Pods[0].Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
				c.Pods[0].OwnerReferences = []metav1.OwnerReference{{Kind: "Node", Name: "gpu-1", Controller: new(true)}}
			},
			want: "NeedsDrain gpu-1 0:3g.40gb@0 leave team/a (8)", says: "static",
		},
		"one node in use, and one of a silent agent": {
			build: func(c *pool) {
				c.node("gpu-1", "3g.40gb@0:team/a 3g.40gb@4:team/b")
				c.node("gpu-2", "off")
				c.status["gpu-2"] = &api.Status{}
			},
			want: "NotKnown", says: "gpu-2",
		},
		"a cordoned node of a silent agent": {
			build: func(c *pool) {
				c.node("gpu-1", "1g.10gb@0").Spec.Unschedulable = true
				c.status["gpu-1"] = &api.Status{}
			},
			want: "NotGPU", says: "cordoned",
		},
		"a selector of the profile that the command takes away": {
			build: func(c *pool) {
				c.node("gpu-1", "1g.10gb@0").Labels = map[string]string{config.LabelProfile: "research"}
			},
			change: func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{config.LabelProfile: "research"} },
			want:   "NotGPU", says: "labels of profile research",
		},
		"a selector of a label that the profile has published": {
			build: func(c *pool) {
				n := c.node("gpu-1", "1g.10gb@0")
				n.Labels = map[string]string{config.LabelProfile: "research", "workload-type": "research"}
				n.Annotations = map[string]string{config.AnnotationPublished: `{"labels":{"workload-type":"research"}}`}
			},
			change: func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"workload-type": "research"} },
			want:   "NotGPU", says: "labels of profile research",
		},
		"no agent": {
			build: func(c *pool) { c.node("gpu-1", "off"); c.status["gpu-1"] = &api.Status{} },
			want:  "NotKnown", says: "no agent has reported its GPUs",
		},
		"an agent of an earlier version": {
			build: func(c *pool) { c.node("gpu-1", "off"); c.status["gpu-1"].Held = nil },
			want:  "NotKnown", says: "does not report how its GPUs can be cut",
		},
		"a pod that the agent has not seen yet": {
			build: func(c *pool) {
				c.node("gpu-1", "1g.10gb@0:team/a 1g.10gb@4")
				c.status["gpu-1"].Held = []api.Held{}
			},
			want: "NotKnown", says: "which devices team/a has",
		},
		"a pod with any device": {
			build: func(c *pool) {
				c.node("gpu-1", "1g.10gb@0:team/a 1g.10gb@4")
				c.status["gpu-1"].Held[0].On = nil
			},
			want: "NeedsDrain gpu-1 0:1g.10gb@0+3g.40gb@4 leave team/a (0)",
		},
		"a pod with any device, and free places": {
			build: func(c *pool) {
				c.node("gpu-1", "1g.10gb@0:team/a")
				c.status["gpu-1"].Held[0].On = nil
			},
			want: "NeedsRecut gpu-1 0:1g.10gb@0+3g.40gb@4",
		},
		"the strategy single": {
			build: func(c *pool) {
				c.node("gpu-1", "off").Labels = map[string]string{config.LabelMIGStrategy: "single"}
			},
			want: "NotKnown", says: "single",
		},
		"GPUs that cannot be cut": {
			build: func(c *pool) { c.l4("l4-1", "off") }, want: "TooLarge", says: "no node could have what it requests",
		},
		"GPUs that cannot be cut, under the strategy single": {
			build: func(c *pool) { c.l4("l4-1", "off").Labels = map[string]string{config.LabelMIGStrategy: "single"} },
			want:  "TooLarge", says: "no node could have what it requests",
		},
		"GPUs that cannot be cut, beside one that can": {
			build: func(c *pool) { c.l4("l4-1", "off"); c.node("gpu-1", "off") }, want: "NeedsRecut gpu-1 0:3g.40gb@0",
		},
		"a whole GPU that cannot be cut, of another pod": {
			build: func(c *pool) { c.l4("l4-1", "off:team/a") }, asks: "nvidia.com/gpu", want: "NeedsDrain",
		},
		"a node that is being changed": {
			build: func(c *pool) {
				n := c.node("gpu-1", "3g.40gb@0")
				n.Annotations, n.Spec.Unschedulable = map[string]string{config.AnnotationJournal: "{}"}, true
			},
			want: "NotKnown", says: "gpu-1 is being changed",
		},
		"a GPU that is not well": {
			build: func(c *pool) {
				c.node("gpu-1", "off")
				c.status["gpu-1"].GPUs[0].Health = &api.GPUHealth{Reason: config.ReasonGPULost}
			},
			want: "TooLarge",
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := &pool{t: t, status: map[string]*api.Status{}}
			row.build(c)
			if row.asks == "" {
				row.asks = mig3
			}
			p := running1("team", "waits", "", row.asks)
			if row.change != nil {
				row.change(p)
			}
			c.Pods = append(c.Pods, *p)
			got := c.moves(row.begins, p)[0]
			if line(got) != row.want {
				t.Errorf("got %q, want %q: %s", line(got), row.want, got.Reason)
			}
			if all := strings.Join(append(append([]string{got.Reason}, got.Budgets...), got.Notes...), "\n"); !strings.Contains(all, row.says) {
				t.Errorf("%q lacks %q", all, row.says)
			}
		})
	}
}

// What a move says has to come with all of them, which the node's one label asks for at once.
func TestMovesOfANodeComeTogether(t *testing.T) {
	for name, row := range map[string]struct {
		gpus []string
		asks []string // "2 nvidia.com/gpu"
		want []string
	}{
		// A pod of a DaemonSet is back before the pods that wait.
		"a pod of a DaemonSet would have the GPU that is made whole": {
			[]string{"off:team/daemon", "1g.10gb@0:team/a"},
			[]string{"1 gpu", "1 mig-7g.80gb"},
			[]string{"NeedsDrain gpu-1 1:off leave team/a (1)", "NeedsDrain"},
		},
		"a pod of a DaemonSet that has left would have it": {
			[]string{"off:team/daemon", "7g.80gb@0:team/a"},
			[]string{"1 mig-1g.10gb", "1 gpu"},
			[]string{"NeedsDrain gpu-1 0:1g.10gb@0 leave team/daemon (8)", "NeedsDrain"},
		},
		// The agent would leave team/a what it has, and make the third instance beside it.
		"a pod would stay in the place of another": {
			[]string{"2g.20gb@0:team/a 3g.40gb@4:team/b"},
			[]string{"1 mig-2g.20gb", "1 mig-1g.10gb"},
			[]string{"NeedsRecut gpu-1 0:2g.20gb@0+2g.20gb@2+3g.40gb@4", "NeedsDrain gpu-1 0:2g.20gb@0+2g.20gb@2+1g.10gb@4 leave team/b (4)"},
		},
		"GPUs that are cut for others are not offered several times": {
			[]string{"off", "off"},
			[]string{"1 mig-7g.80gb", "3 gpu"},
			[]string{"NeedsRecut gpu-1 0:7g.80gb@0", "TooLarge"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := &pool{t: t, status: map[string]*api.Status{}}
			c.node("gpu-1", row.gpus...)
			c.ofDaemonSet("daemon")
			var pending []*corev1.Pod
			for i, asks := range row.asks {
				count, of, _ := strings.Cut(asks, " ")
				p := running1("team", fmt.Sprint("p", i), "", "nvidia.com/"+of)
				p.Spec.Containers[0].Resources.Requests[corev1.ResourceName("nvidia.com/"+of)] = resource.MustParse(count)
				pending = append(pending, p)
			}
			var got []string
			for _, m := range c.moves(nil, pending...) {
				got = append(got, line(m))
			}
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// A GPU that a move has cut is no whole one any more.
func TestAGPUThatAMoveCutsIsGivenOnce(t *testing.T) {
	c := &pool{t: t, status: map[string]*api.Status{}}
	c.node("gpu-1", "off")
	moves := c.moves(nil, running1("team", "a", "", "nvidia.com/mig-3g.40gb"), running1("team", "b", "", "nvidia.com/gpu"))
	if got, want := []string{line(moves[0]), line(moves[1])}, []string{"NeedsRecut gpu-1 0:3g.40gb@0", "NeedsDrain"}; !cmp.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Each pod counts on those before it.
func TestMovesFollowEachOther(t *testing.T) {
	c := &pool{t: t, status: map[string]*api.Status{}}
	c.node("gpu-1", "1g.10gb@0:team/a 3g.40gb@4", "off")
	var pending []*corev1.Pod
	for i, asks := range []string{"3g.40gb", "3g.40gb", "2g.20gb", "3g.40gb", "7g.80gb"} {
		p := running1("team", fmt.Sprint("p", i), "", "nvidia.com/mig-"+asks)
		p.CreationTimestamp = metav1.NewTime(now.Add(time.Duration(i) * time.Minute))
		pending = append(pending, p)
	}
	var got []string
	moves := c.moves(nil, pending...)
	for _, m := range moves {
		got = append(got, line(m))
	}
	want := []string{
		"WillFit gpu-1",
		"NeedsRecut gpu-1 1:3g.40gb@0",
		"NeedsRecut gpu-1 0:1g.10gb@0+2g.20gb@2+3g.40gb@4",
		"NeedsRecut gpu-1 1:3g.40gb@0+3g.40gb@4",
		"NeedsDrain",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	text, err := json.Marshal(moves[3].Request)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"0":{"MIG":true,"Devices":{"1g.10gb":1,"2g.20gb":1,"3g.40gb":1}},"1":{"MIG":true,"Devices":{"3g.40gb":2}}}`; string(text) != want {
		t.Errorf("the node's request is %s, want %s", text, want)
	}
}

// What a move gives a pod, no later one gives to another or cuts away.
func TestWhatAMoveGivesStays(t *testing.T) {
	for name, row := range map[string]struct {
		build func(c *pool) []*corev1.Pod
		want  []string
	}{
		"an idle instance with an attribute is given, and cut away": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "1g.10gb+me@0")
				return []*corev1.Pod{running1("team", "p0", "", "nvidia.com/mig-1g.10gb.me"), running1("team", "p1", "", "nvidia.com/mig-7g.80gb")}
			},
			[]string{"WillFit", "NeedsDrain"},
		},
		"an idle instance with an attribute is given twice": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "1g.10gb+me@0")
				return []*corev1.Pod{
					running1("team", "p0", "", "nvidia.com/mig-1g.10gb.me"), running1("team", "p1", "", "nvidia.com/mig-3g.40gb"), running1("team", "p2", "", "nvidia.com/mig-1g.10gb.me"),
				}
			},
			[]string{"WillFit", "NeedsRecut", "NeedsDrain"},
		},
		"a GPU that a DeviceClass stands for on other nodes is given by the plugin, and cut": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "off")
				c.Classes = []resourcev1.DeviceClass{classFor("nvidia.com/gpu")}
				return []*corev1.Pod{running1("team", "p0", "", "nvidia.com/gpu"), running1("team", "p1", "", "nvidia.com/mig-3g.40gb")}
			},
			[]string{"WillFit", "NeedsDrain"},
		},
		"an instance that a DeviceClass stands for on other nodes is made for two, and given to three": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "off")
				c.Classes = []resourcev1.DeviceClass{classFor("nvidia.com/mig-3g.40gb")}
				return []*corev1.Pod{
					running1("team", "p0", "", "nvidia.com/mig-3g.40gb"), running1("team", "p1", "", "nvidia.com/mig-3g.40gb"), running1("team", "p2", "", "nvidia.com/mig-3g.40gb"),
				}
			},
			[]string{"NeedsRecut", "NeedsRecut", "NeedsDrain"},
		},
		"of two instances one is idle, and given twice": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "3g.40gb@0 3g.40gb@4:team/r", "3g.40gb@0:team/s 1g.10gb@4")
				p := running1("team", "p0", "", "nvidia.com/mig-3g.40gb")
				p.Spec.Containers[0].Resources.Requests["nvidia.com/mig-3g.40gb"] = resource.MustParse("2")
				return []*corev1.Pod{p, running1("team", "p1", "", "nvidia.com/mig-3g.40gb")}
			},
			[]string{"NeedsRecut", "NeedsDrain"},
		},
		"a node of the DRA driver is cut, and would give a resource of the plugin": {
			func(c *pool) []*corev1.Pod {
				c.Classes = []resourcev1.DeviceClass{class()}
				c.dra("gpu-1", "off", "1g.10gb@0")
				p := running1("team", "p0", "", "cpu")
				c.claims(p, migClass, ofProfile("3g.40gb"))
				return []*corev1.Pod{p, running1("team", "p1", "", "nvidia.com/mig-1g.10gb")}
			},
			[]string{"NeedsRecut", "NotGPU"},
		},
		"a node of the device plugin is cut, and would give to a claim": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "off")
				c.Classes = []resourcev1.DeviceClass{class()}
				p := running1("team", "p1", "", "cpu")
				c.claims(p, migClass, ofProfile("3g.40gb"))
				return []*corev1.Pod{running1("team", "p0", "", "nvidia.com/mig-3g.40gb"), p}
			},
			[]string{"NeedsRecut", "NotGPU"},
		},
		"an idle device is given to a claim, and cut away": {
			func(c *pool) []*corev1.Pod {
				c.Classes = []resourcev1.DeviceClass{class()}
				c.dra("gpu-1", "3g.40gb@0")
				p0, p1 := running1("team", "p0", "", "cpu"), running1("team", "p1", "", "cpu")
				c.claims(p0, migClass, ofProfile("3g.40gb"))
				c.claims(p1, migClass, ofProfile("7g.80gb"))
				return []*corev1.Pod{p0, p1}
			},
			[]string{"WillFit", "NeedsDrain"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := &pool{t: t, status: map[string]*api.Status{}}
			var got []string
			for _, m := range c.moves(nil, row.build(c)...) {
				t.Log(line(m), m.Reason)
				got = append(got, string(m.Verdict))
			}
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// One node's status may say that a model has other profiles. That changes nothing of what is said of other nodes.
func TestAStatusSpeaksForItsNodeAlone(t *testing.T) {
	for _, profiles := range [][]api.Profile{h100.Profiles[:1], {{Name: "3g.40gb", Slices: 3, Size: 4, At: []int{0}, Max: 1}}} {
		c := &pool{t: t, status: map[string]*api.Status{}}
		c.node("a-stolen", "off:team/x")
		c.status["a-stolen"].Models[0].Profiles = profiles
		c.node("gpu-1", "off:team/y")
		c.node("gpu-2", "off")
		c.status["gpu-2"].GPUs[0].UUID = "GPU-y"
		c.node("b-stolen", "off")
		c.Nodes[0], c.Nodes[3] = c.Nodes[3], c.Nodes[0]
		c.status["b-stolen"].Models[0].Profiles = profiles
		c.Nodes[0].Spec.Taints = nil
		got := line(c.moves(nil, running1("team", "p", "", "nvidia.com/mig-7g.80gb"))[0])
		if want := "NeedsRecut gpu-2 0:7g.80gb@0"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// Of changes that cost pods the same, one comes first that a label can ask for together with those before it.
func TestAChangeThatALabelSpellsComesFirst(t *testing.T) {
	for name, row := range map[string]struct{ other, want string }{
		"and costs the same":     {"1g.10gb@0:team/a 1g.10gb@4", "NeedsRecut gpu-2 0:1g.10gb@0+3g.40gb@4"},
		"and a pod has to leave": {"1g.10gb@0:team/a 1g.10gb@4:team/b", "NeedsRecut gpu-1 0:1g.10gb@0+3g.40gb@4"},
	} {
		t.Run(name, func(t *testing.T) {
			c := &pool{t: t, status: map[string]*api.Status{}}
			c.node("gpu-1", "1g.10gb@0:team/c")
			c.node("gpu-2", row.other)
			q := c.question(nil, running1("team", "p", "", "nvidia.com/mig-3g.40gb"))
			q.Spells = func(n *corev1.Node, _ map[int]nvml.Request) bool { return n.Name != "gpu-1" }
			if got := line(Moves(t.Context(), q)[0]); got != row.want {
				t.Errorf("got %q, want %q", got, row.want)
			}
		})
	}
}
