package judge

import (
	"fmt"
	"math/rand/v2"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
)

// cuts are ways in which the nodes of a random cluster are cut; each # is free, or a pod has it.
var randomCuts = []string{
	"off#", "1g.10gb@0# 1g.10gb@1# 1g.10gb@2# 1g.10gb@3# 1g.10gb@4# 1g.10gb@5# 1g.10gb@6#", "3g.40gb@0# 3g.40gb@4#", "7g.80gb@0#",
	"1g.10gb@0# 1g.10gb@1# 2g.20gb@2# 3g.40gb@4#", "2g.20gb@0# 2g.20gb@2# 2g.20gb@4# 1g.10gb@6#",
}

// randomCluster has so many nodes of eight GPUs, and pods that wait.
func randomCluster(t testing.TB, r *rand.Rand, nodes, pods int) (*pool, []*corev1.Pod) {
	t.Helper()
	c := &pool{t: t, status: map[string]*api.Status{}}
	running := 0
	for n := range nodes {
		var gpus []string
		for range 8 {
			text := ""
			for _, letter := range randomCuts[r.IntN(len(randomCuts))] {
				switch {
				case letter != '#':
					text += string(letter)
				case r.IntN(10) < 8:
					running++
					text += fmt.Sprintf(":team/r%d", running)
				}
			}
			gpus = append(gpus, text)
		}
		c.node(fmt.Sprintf("gpu-%03d", n), gpus...)
	}
	var waiting []*corev1.Pod
	for i := range pods {
		asks := []string{"gpu", "mig-1g.10gb", "mig-2g.20gb", "mig-3g.40gb", "mig-4g.40gb", "mig-7g.80gb"}[r.IntN(6)]
		waiting = append(waiting, running1("team", fmt.Sprintf("w%d", i), "", "nvidia.com/"+asks))
	}
	return c, waiting
}

func BenchmarkMoves(b *testing.B) {
	for _, size := range []int{100, 300, 1000} {
		b.Run(fmt.Sprintf("%d pods, %d nodes", size, size), func(b *testing.B) {
			c, waiting := randomCluster(b, rand.New(rand.NewPCG(1, 2)), size, size)
			q := c.question(nil, waiting...)
			for b.Loop() {
				Moves(b.Context(), q)
			}
		})
	}
}
