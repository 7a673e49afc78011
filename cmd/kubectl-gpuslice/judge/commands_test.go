package judge

import (
	"math/rand/v2"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/nvml"
)

// The agent carries out the last command of a node in one go, from what is there: no pod leaves by it that the moves do not name, and in 99 of 100 each pod that
// it serves finds a free device.
func TestTheLastCommandOfANodeDoesWhatItsMovesSay(t *testing.T) {
	check := func(t *testing.T, c *pool, waiting []*corev1.Pod) (commands, others, short int) {
		q := c.question(nil, waiting...)
		moves := Moves(t.Context(), q)
		wants := map[string]map[string]int{}
		for _, p := range waiting {
			wants[p.Namespace+"/"+p.Name] = wantOf(p)
		}
		fresh := movesOf(q)
		leave, last, need := map[string][]string{}, map[string]Move{}, map[string]map[string]int{}
		for _, m := range moves {
			if m.Node == "" {
				continue
			}
			leave[m.Node] = append(leave[m.Node], m.Leave...)
			if need[m.Node] == nil {
				need[m.Node] = map[string]int{}
			}
			for kind, n := range wants[m.Pod] { // also of those that need no change
				need[m.Node][kind] += n
			}
			if len(m.Request) > 0 {
				last[m.Node] = m
			}
		}
		for node, m := range last {
			commands++
			h := fresh.hardware[node]
			free, out := map[string]int{}, []string{}
			for i := range h.gpus {
				g := &h.gpus[i]
				request, is := m.Request[g.Index]
				switch {
				case !is && !g.Enabled && len(g.All) == 0, is && !request.MIG:
					free["gpu"]++
					for _, in := range g.Instances {
						out = append(out, g.On[in.Start]...)
					}
				case !is:
					for _, in := range g.Instances {
						if len(g.On[in.Start]) == 0 {
							free[in.Profile]++
						}
					}
				default:
					out = append(out, g.All...)
					s, err := nvml.Solve(g.GPU, request.Devices)
					if err != nil {
						t.Errorf("the agent refuses %v: %v", request, err)
					}
					for _, p := range s.Destroy {
						out = append(out, g.On[p.Start]...)
					}
					for _, p := range s.Create {
						free[p.Profile]++
					}
					for _, p := range s.Keep {
						if len(g.On[p.Start]) == 0 {
							free[p.Profile]++
						}
					}
				}
			}
			lacks := false
			for kind, n := range need[node] {
				lacks = lacks || free[kind] < n
			}
			if lacks {
				short++
			}
			if slices.ContainsFunc(out, func(p string) bool { return !slices.Contains(leave[node], p) }) {
				others++
			}
			if (lacks || len(out) > 0) && len(waiting) < 4 {
				t.Logf("%s: leave by the moves %v, by the agent %v; needed %v, free then %v", node, leave[node], out, need[node], free)
			}
		}
		return commands, others, short
	}
	t.Run("one GPU", func(t *testing.T) {
		c := &pool{t: t, status: map[string]*api.Status{}}
		c.node("gpu-1", "2g.20gb@0:team/a 2g.20gb@2:team/b 2g.20gb@4:team/c 1g.10gb@6:team/d")
		first, second := running1("team", "p0", "", "nvidia.com/mig-3g.40gb"), running1("team", "p1", "", "nvidia.com/mig-1g.10gb")
		second.CreationTimestamp = metav1.NewTime(now)
		if _, others, short := check(t, c, []*corev1.Pod{first, second}); others+short > 0 {
			t.Error("another pod leaves, or a pod that the command serves has no device")
		}
	})
	t.Run("random", func(t *testing.T) {
		commands, others, short := 0, 0, 0
		for seed := range uint64(60) {
			c, waiting := randomCluster(t, rand.New(rand.NewPCG(seed, 7)), 3, 10)
			a, b, d := check(t, c, waiting)
			commands, others, short = commands+a, others+b, short+d
		}
		if others > 0 || 100*short > commands {
			t.Errorf("of %d commands, by %d others leave than are named, and after %d a pod that they serve has no device", commands, others, short)
		}
	})
}

// What an explanation draws is what the agent makes of its command.
func TestTheCommandsOfAnExplanationDoWhatIsDrawn(t *testing.T) {
	commands, others, none := 0, 0, 0
	for seed := range uint64(100) {
		c, _ := randomCluster(t, rand.New(rand.NewPCG(seed, 9)), 1, 0)
		c.status["gpu-000"].GPUs = c.status["gpu-000"].GPUs[:2]
		q := c.question(nil)
		of := Explain(q, []*corev1.Node{&c.Nodes[0]})[0]
		h := movesOf(q).hardware["gpu-000"]
		for _, p := range of.Profiles {
			var out []string
			gets := len(p.Request) == 0
			for i := range h.gpus {
				g := &h.gpus[i]
				request, is := p.Request[g.Index]
				if !is {
					continue
				}
				commands++
				if !request.MIG {
					gets = true
					for _, in := range g.Instances {
						out = append(out, g.On[in.Start]...)
					}
					continue
				}
				out = append(out, g.All...)
				s, err := nvml.Solve(g.GPU, request.Devices)
				if err != nil {
					t.Errorf("the agent refuses %v: %v", request, err)
				}
				for _, d := range s.Destroy {
					out = append(out, g.On[d.Start]...)
				}
				for _, d := range s.Target {
					idle := !slices.Contains(s.Keep, d) || len(g.On[d.Start]) == 0
					gets = gets || idle && d.Profile == p.Profile
				}
			}
			slices.Sort(out)
			out = slices.Compact(out)
			if len(p.Request) > 0 && !slices.Equal(out, p.Leave) {
				if others++; others < 3 {
					t.Logf("seed %d: %s: %v has to leave, by the agent %v; %v; %v", seed, p.Profile, p.Leave, out, p.Request, c.status["gpu-000"].GPUs)
				}
			}
			if !gets {
				if none++; none < 3 {
					t.Logf("seed %d: %s: none is free by the agent; %v has to leave, by the agent %v; %v; %v", seed, p.Profile, p.Leave, out, p.Request, c.status["gpu-000"].GPUs)
				}
			}
		}
	}
	if others+none > 0 {
		t.Errorf("of %d commands, by %d other pods leave than are named, and %d make no free device", commands, others, none)
	}
}
