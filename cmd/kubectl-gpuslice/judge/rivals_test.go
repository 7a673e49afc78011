package judge

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/nvml"
)

// A pod is certain to run only where the scheduler cannot give all that it could have to others.
func TestPodsThatMayRunInThePlaceOfAnother(t *testing.T) {
	const mig3, mig1 = "nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb"
	asks := func(name, of string, change ...func(p *corev1.Pod)) *corev1.Pod {
		p := running1("team", name, "", of)
		for _, do := range change {
			do(p)
		}
		return p
	}
	tolerates := func(p *corev1.Pod) { p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}} }
	priority := func(n int32) func(p *corev1.Pod) { return func(p *corev1.Pod) { p.Spec.Priority = &n } }
	with1 := func(of corev1.ResourceName) func(p *corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests[of] = resource.MustParse("1") }
	}
	never := func(p *corev1.Pod) { p.Spec.PreemptionPolicy = new(corev1.PreemptNever) }
	for name, row := range map[string]struct {
		build func(c *pool) []*corev1.Pod
		want  map[string][]string
	}{
		"one instance for two": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "3g.40gb@0 3g.40gb@4:team/r")
				return []*corev1.Pod{asks("a", mig3), asks("b", mig3)}
			},
			map[string][]string{"team/a": {"team/b"}},
		},
		"one for each": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "3g.40gb@0")
				c.node("gpu-2", "1g.10gb@0:team/r 1g.10gb@4")
				return []*corev1.Pod{asks("a", mig3), asks("b", mig3)}
			},
			nil,
		},
		"one that can never run": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "3g.40gb@0 3g.40gb@4:team/r")
				gated := func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/wait"}} }
				return []*corev1.Pod{asks("a", mig3), asks("b", mig3, gated)}
			},
			nil,
		},
		"one for each, and one may have either": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "3g.40gb@0 3g.40gb@4:team/r")
				c.node("gpu-2", "3g.40gb@0").Spec.Taints = []corev1.Taint{{Key: "dedicated", Effect: corev1.TaintEffectNoSchedule}}
				return []*corev1.Pod{asks("a", mig3), asks("b", mig3, tolerates)}
			},
			map[string][]string{"team/a": {"team/b"}},
		},
		"one of lower priority, which would be preempted": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "3g.40gb@0 3g.40gb@4:team/r")
				return []*corev1.Pod{asks("a", mig3, priority(9)), asks("b", mig3)}
			},
			nil,
		},
		"one of lower priority, which would not": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "3g.40gb@0 3g.40gb@4:team/r")
				return []*corev1.Pod{asks("a", mig3, priority(9), never), asks("b", mig3)}
			},
			map[string][]string{"team/a": {"team/b"}},
		},
		"two instances of one node for one pod": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "3g.40gb@0 3g.40gb@4")
				two := func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests[mig3] = resource.MustParse("2") }
				return []*corev1.Pod{asks("a", mig3, two), asks("b", mig3)}
			},
			map[string][]string{"team/a": {"team/b"}},
		},
		"the successor of a pod that has to leave": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "1g.10gb@0:team/r", "3g.40gb@0:team/s 1g.10gb@4")
				return []*corev1.Pod{asks("a", "nvidia.com/mig-7g.80gb"), asks("b", mig1)}
			},
			map[string][]string{"team/b": {"team/r"}},
		},
		"a change that no label spells comes later": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "3g.40gb@0 3g.40gb@4:team/r")
				c.node("gpu-2", "1g.10gb@0:team/s")
				return []*corev1.Pod{asks("a", mig3), asks("b", mig3)}
			},
			map[string][]string{"team/a": {"team/b"}},
		},
		"a change that no label spells before the next": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-2", "3g.40gb@0", "1g.10gb@0:team/s 1g.10gb@1:team/t")
				return []*corev1.Pod{asks("a", mig3), asks("b", mig3), asks("c", mig1)}
			},
			nil,
		},
		"one that the change for another pod bars": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "3g.40gb@0 3g.40gb@4:team/r").Labels = map[string]string{config.LabelProfile: "research"}
				selects := func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{config.LabelProfile: "research"} }
				return []*corev1.Pod{asks("a", mig3), asks("b", mig3, selects)}
			},
			map[string][]string{"team/a": {"team/b"}},
		},
		"one that the change lets in": {
			func(c *pool) []*corev1.Pod {
				n := c.node("gpu-1", "1g.10gb@0:team/r 1g.10gb@1:team/s 1g.10gb@4")
				n.Labels, n.Spec.Taints = map[string]string{config.LabelProfile: "research"}, []corev1.Taint{{Key: "dedicated", Effect: corev1.TaintEffectNoSchedule}}
				published, err := json.Marshal(nodekeys.Keys{Taints: n.Spec.Taints})
				if err != nil {
					c.t.Fatal(err)
				}
				n.Annotations = map[string]string{config.AnnotationPublished: string(published)}
				return []*corev1.Pod{asks("a", mig3, tolerates), asks("b", mig3)}
			},
			map[string][]string{"team/a": {"team/b"}},
		},
		"one that lacks cpu after it": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "3g.40gb@0 3g.40gb@4:team/r")
				cpu := func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests["cpu"] = resource.MustParse("40") }
				return []*corev1.Pod{asks("a", mig3, cpu), asks("b", mig3, cpu)}
			},
			map[string][]string{"team/a": {"team/b"}},
		},
		"two kinds, of which another node has one": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "3g.40gb@0 1g.10gb@4 1g.10gb@5 1g.10gb@6")
				c.node("gpu-2", "3g.40gb@0 3g.40gb@4")
				return []*corev1.Pod{asks("a", mig3, with1(mig1)), asks("b", mig3)}
			},
			map[string][]string{"team/a": {"team/b"}},
		},
		"two kinds, each short on one node": {
			func(c *pool) []*corev1.Pod {
				c.node("gpu-1", "3g.40gb@0 1g.10gb@4 1g.10gb@5 1g.10gb@6")
				c.node("gpu-2", "3g.40gb@0 3g.40gb@4", "3g.40gb@0 3g.40gb@4", "1g.10gb@0 2g.20gb@2:team/r 3g.40gb@4:team/s")
				return []*corev1.Pod{asks("a", mig3, with1(mig1)), asks("b", mig3), asks("c", mig1)}
			},
			map[string][]string{"team/a": {"team/b", "team/c"}},
		},
		"claims on a node whose agent is silent": {
			func(c *pool) []*corev1.Pod {
				c.Classes = []resourcev1.DeviceClass{class()}
				c.dra("gpu-1", "3g.40gb@0 3g.40gb@4:team/r")
				c.status["gpu-1"] = &api.Status{}
				a, b := asks("a", "cpu"), asks("b", "cpu")
				c.claims(a, migClass, ofProfile("3g.40gb"))
				c.claims(b, migClass, "")
				return []*corev1.Pod{a, b}
			},
			map[string][]string{"team/a": {"team/b"}},
		},
		"a claim that any MIG device is enough for": {
			func(c *pool) []*corev1.Pod {
				c.Classes = []resourcev1.DeviceClass{class()}
				c.dra("gpu-1", "3g.40gb@0 3g.40gb@4:team/r")
				a, b := asks("a", "cpu"), asks("b", "cpu")
				c.claims(a, migClass, ofProfile("3g.40gb"))
				c.claims(b, migClass, "")
				return []*corev1.Pod{a, b}
			},
			map[string][]string{"team/a": {"team/b"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := &pool{t: t, status: map[string]*api.Status{}}
			got := map[string][]string{}
			q := c.question(nil, row.build(c)...)
			q.Spells = func(n *corev1.Node, requests map[int]nvml.Request) bool {
				return n.Name != "gpu-2" || !strings.Contains(name, "no label spells") || strings.Contains(name, "before the next") && requests[1].Devices["1g.10gb"] > 2
			}
			for _, m := range Moves(t.Context(), q) {
				t.Log(line(m), m.Notes)
				if len(m.Rivals) > 0 {
					got[m.Pod] = m.Rivals
				}
			}
			if len(got)+len(row.want) > 0 && !cmp.Equal(row.want, got) {
				t.Errorf("-want +got:\n%s", cmp.Diff(row.want, got))
			}
		})
	}
}
