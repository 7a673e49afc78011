package judge

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
)

func TestFreeSlicesAreExplained(t *testing.T) {
	c := &pool{t: t, status: map[string]*api.Status{}}
	// The free slices 1, 4 and 5 are apart, so that nothing larger than 2g.20gb fits; GPU 1 has free ones that no 4g.40gb can use, GPU 2 none.
	c.node("gpu-1", "1g.10gb@0:team/a 1g.10gb@1 2g.20gb@2:team/b 1g.10gb@4 1g.10gb@6:team/c", "1g.10gb@0:team/d 3g.40gb@4", "off:team/e")
	c.node("gpu-2")
	pending := running1("team", "waits", "", "nvidia.com/mig-4g.40gb")
	got := Explain(c.question(nil, pending), []*corev1.Node{&c.Nodes[0], &c.Nodes[1]})
	var b strings.Builder
	for _, f := range got {
		fmt.Fprintf(&b, "%s %s\n", f.Node, f.Unknown)
		for _, g := range f.GPUs {
			fmt.Fprintf(&b, "  GPU %d: %d of %d free, largest %q, %d lost, %d fragments, pods %v\n", g.GPU, g.Free, g.Slices, g.Largest, g.Lost, g.Fragments, g.Pods)
		}
		for _, p := range f.Profiles {
			fmt.Fprintf(&b, "  %s: %d idle, %d possible", p.Profile, p.Idle, p.Possible)
			if len(p.Leave) > 0 {
				fmt.Fprintf(&b, ", %v leave", p.Leave)
			}
			for _, cut := range p.Cuts {
				fmt.Fprintf(&b, ", GPU %d:", cut.GPU)
				for _, i := range cut.After {
					fmt.Fprintf(&b, " %s", i.Is)
				}
			}
			b.WriteString("\n")
		}
	}
	// Requests are 3 for 1g.10gb, and one each for 2g.20gb, 4g.40gb and a whole GPU: of GPU 0 these cannot use 3x 1, 2, 4 and 4 of the free slices.
	want := `gpu-1 
  GPU 0: 4 of 8 free, largest "2g.20gb", 2 lost, 13 fragments, pods []
  GPU 1: 7 of 8 free, largest "3g.40gb", 3 lost, 20 fragments, pods []
  GPU 2: 0 of 8 free, largest "", 0 lost, 0 fragments, pods [team/e]
  7g.80gb: 0 idle, 0 possible, [team/d] leave, GPU 1: 7g.80gb@0
  4g.40gb: 0 idle, 0 possible, [team/d] leave, GPU 1: 4g.40gb@0 3g.40gb@4
  3g.40gb: 1 idle, 1 possible
  2g.20gb: 0 idle, 3 possible, GPU 1: 1g.10gb@0 2g.20gb@2 3g.40gb@4
  1g.10gb: 2 idle, 9 possible
  1g.10gb+me: 0 idle, 2 possible, GPU 1: 1g.10gb@0 1g.10gb+me@1 3g.40gb@4
  gpu: 0 idle, 0 possible, [team/d] leave, GPU 1:
gpu-2 no agent has reported its GPUs
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
