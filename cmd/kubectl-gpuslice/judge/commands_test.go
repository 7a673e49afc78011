package judge

import (
	"math/rand/v2"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/nvml"
)

// carriedOut is what the agent makes of a node by a command: the pods that leave, and the devices that no pod has then.
func carriedOut(t *testing.T, h *hardware, requests map[int]nvml.Request) (leave []string, free map[string]int) {
	t.Helper()
	free = map[string]int{}
	for i := range h.gpus {
		request, is := requests[h.gpus[i].Index]
		if !is {
			request = nvml.Request{MIG: h.gpus[i].Enabled, Devices: devicesOfGPU(&h.gpus[i])}
		}
		out, left := solved(t, &h.gpus[i], request, is)
		leave = append(leave, out...)
		for _, kind := range left {
			free[kind]++
		}
	}
	slices.Sort(leave)
	return slices.Compact(leave), free
}

func devicesOfGPU(g *demand.GPU) map[string]int {
	out := map[string]int{}
	for _, i := range g.Instances {
		for _, d := range i.Placed.Devices() {
			out[d]++
		}
	}
	return out
}

// solved is carriedOut of one GPU. Pods on all of it leave if something is asked of it in MIG mode.
func solved(t *testing.T, g *demand.GPU, request nvml.Request, asked bool) (leave, free []string) {
	t.Helper()
	if !request.MIG {
		for _, i := range g.Instances {
			leave = append(leave, g.On[i.Start]...)
		}
		if len(g.All) == 0 {
			free = append(free, demand.Whole)
		}
		return leave, free
	}
	if asked {
		leave = append(leave, g.All...)
	}
	s, err := nvml.Solve(g.GPU, request.Devices)
	if err != nil {
		t.Fatalf("the agent refuses %v: %v", request, err)
	}
	for _, p := range s.Destroy {
		leave = append(leave, g.On[p.Start]...)
	}
	for _, p := range s.Target {
		if !slices.Contains(s.Keep, p) || len(g.On[p.Start]) == 0 {
			free = append(free, p.Profile)
		}
	}
	return leave, free
}

// commands are what the moves of a node come to.
type commands struct {
	last  Move
	leave []string
	needs demand.Want // of all pods that are to run there
}

func commandsOf(moves []Move, waiting []*corev1.Pod) map[string]*commands {
	wants := map[string]demand.Want{}
	for _, p := range waiting {
		wants[p.Namespace+"/"+p.Name] = wantOf(p)
	}
	out := map[string]*commands{}
	for _, m := range moves {
		if m.Node == "" {
			continue
		}
		c := out[m.Node]
		if c == nil {
			c = &commands{needs: demand.Want{}}
			out[m.Node] = c
		}
		c.leave = append(c.leave, m.Leave...)
		for kind, n := range wants[m.Pod] {
			c.needs[kind] += n
		}
		if len(m.Request) > 0 {
			c.last = m
		}
	}
	return out
}

// compare counts the commands, those by which others leave than the moves name, and those after which a pod that they serve has no device.
func compare(t *testing.T, c *pool, waiting []*corev1.Pod) (all, others, short int) {
	t.Helper()
	q := c.question(nil, waiting...)
	before := movesOf(q)
	for node, of := range commandsOf(Moves(t.Context(), q), waiting) {
		if len(of.last.Request) == 0 {
			continue
		}
		all++
		leave, free := carriedOut(t, before.hardware[node], of.last.Request)
		if slices.ContainsFunc(leave, func(p string) bool { return !slices.Contains(of.leave, p) }) {
			others++
		}
		for kind, n := range of.needs {
			if free[kind] < n {
				short++
				break
			}
		}
	}
	return all, others, short
}

// The agent carries out the last command of a node in one go, from what is there: no pod leaves by it that the moves do not name, and in 99 of 100 each pod that
// it serves finds a free device.
func TestTheLastCommandOfANodeDoesWhatItsMovesSay(t *testing.T) {
	c := &pool{t: t, status: map[string]*api.Status{}}
	c.node("gpu-1", "2g.20gb@0:team/a 2g.20gb@2:team/b 2g.20gb@4:team/c 1g.10gb@6:team/d")
	first, second := running1("team", "p0", "", "nvidia.com/mig-3g.40gb"), running1("team", "p1", "", "nvidia.com/mig-1g.10gb")
	second.CreationTimestamp = metav1.NewTime(now)
	if _, others, short := compare(t, c, []*corev1.Pod{first, second}); others+short > 0 {
		t.Error("on one GPU another pod leaves, or a pod that the command serves has no device")
	}
	all, others, short := 0, 0, 0
	for seed := range uint64(60) {
		c, waiting := randomCluster(t, rand.New(rand.NewPCG(seed, 7)), 3, 10)
		a, b, d := compare(t, c, waiting)
		all, others, short = all+a, others+b, short+d
	}
	if others > 0 || 100*short > all {
		t.Errorf("of %d commands, by %d others leave than are named, and after %d a pod that they serve has no device", all, others, short)
	}
}

// What an explanation draws is what the agent makes of its command.
func TestTheCommandsOfAnExplanationDoWhatIsDrawn(t *testing.T) {
	for seed := range uint64(100) {
		c, _ := randomCluster(t, rand.New(rand.NewPCG(seed, 9)), 1, 0)
		c.status["gpu-000"].GPUs = c.status["gpu-000"].GPUs[:2]
		q := c.question(nil)
		before := movesOf(q).hardware["gpu-000"]
		for _, p := range Explain(q, []*corev1.Node{&c.Nodes[0]})[0].Profiles {
			if len(p.Request) == 0 {
				continue
			}
			leave, free := carriedOut(t, before, p.Request)
			if !slices.Equal(leave, p.Leave) || free[p.Profile] == 0 {
				t.Errorf("seed %d: %s: %v has to leave, by the agent %v; %d are free then", seed, p.Profile, p.Leave, leave, free[p.Profile])
			}
		}
	}
}
