package plan_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/plan"
)

// Promises 2 and 3: which pods leave, and no others. TestPlans has the same plans with all their steps; what is here holds whatever -update writes
// there.
func TestOnlyPodsThatHoldWhatGoesLeave(t *testing.T) {
	t.Parallel()
	const cut = "gpu 0 on 1g.10gb@0 1g.10gb@1 3g.40gb@4\ngpu 1 on 7g.80gb@0\n" +
		"pod web/one on 0/1g.10gb@0\npod web/three on 0/3g.40gb@4\npod web/seven on 1/7g.80gb@0\n"
	const shared = "gpu 0 off\npod web/first on 0 as nvidia.com/gpu::0\npod web/last on 0 as nvidia.com/gpu::3\n"
	const twoKinds = "gpu 0 off\ngpu 1 on 1g.10gb@0\npod web/gpu on 0 as nvidia.com/gpu\npod web/slice on 1/1g.10gb@0 as nvidia.com/mig-1g.10gb\n"
	const byMPS = "config nvidia.com/gpu=4 mps reloaded needs-reload\n"
	const carriedOut = "gpu 0 off\npod web/former on 0 as nvidia.com/gpu.shared::0 withdrawn\npod web/present on 0 as nvidia.com/gpu\nconfig set reloaded\n"
	const foretold = "config set reloaded foretold\n"
	for name, row := range map[string]struct {
		seen, want string
		leave      []string
	}{
		"an instance goes beside others of its GPU": {cut, "gpu 0 on 1g.10gb=2 2g.20gb=1\n", []string{"three"}},
		"an instance comes in a free place":         {cut, "gpu 0 on 1g.10gb=3 3g.40gb=1\n", nil},
		"the whole GPU is turned off":               {cut, "gpu 0 off\n", []string{"one", "three"}},
		"all of another GPU goes":                   {cut, "gpu 1 on 3g.40gb=2\n", []string{"seven"}},
		"a pod whose devices are not known":         {cut + "pod web/unknown on anything\n", "gpu 1 on 3g.40gb=2\n", []string{"seven", "unknown"}},
		"a pod whose devices are not known, where nothing goes": {
			cut + "pod web/unknown on anything\n", "gpu 0 on 1g.10gb=3 3g.40gb=1\n", nil,
		},
		"a pod that was given the GPU as a whole": {cut + "pod web/whole on 0\n", "gpu 0 on 1g.10gb=2 2g.20gb=1\n", []string{"three", "whole"}},
		"fewer replicas":               {shared + "config nvidia.com/gpu=4 reloaded needs-reload\n", "sharing nvidia.com/gpu=3\n", []string{"last"}},
		"more replicas":                {shared + "config nvidia.com/gpu=4 reloaded needs-reload\n", "sharing nvidia.com/gpu=8\n", nil},
		"the sharing ends":             {shared + "config nvidia.com/gpu=4 reloaded needs-reload\n", "sharing none\n", []string{"first", "last"}},
		"another name of the resource": {shared + "config nvidia.com/gpu=4 reloaded needs-reload\n", "sharing nvidia.com/gpu=4 rename\n", []string{"first", "last"}},
		"another resource is shared":   {twoKinds + "config none reloaded needs-reload\n", "sharing nvidia.com/gpu=2\n", []string{"gpu"}},
		"MPS begins":                   {shared + "config nvidia.com/gpu=4 reloaded needs-reload\n", "sharing nvidia.com/gpu=4 mps\n", []string{"first", "last"}},
		"MPS ends":                     {shared + byMPS, "sharing nvidia.com/gpu=4\n", []string{"first", "last"}},
		"MPS ends for more replicas":   {shared + byMPS, "sharing nvidia.com/gpu=8\n", []string{"first", "last"}},
		"MPS has other numbers":        {shared + byMPS, "sharing nvidia.com/gpu=8 mps\n", []string{"first", "last"}},
		"a GPU in MIG mode that was given as a whole, where its instances are offered by their profiles": {
			"gpu 0 on\ngpu 1 off\npod web/cut on 0 as nvidia.com/gpu\npod web/whole on 1 as nvidia.com/gpu\nconfig mig=none reloaded needs-reload\n", "sharing mig=mixed\n", []string{"cut"},
		},
		"a GPU in MIG mode that was given as a whole, where its instances are offered as GPUs": {
			"gpu 0 on\npod web/cut on 0 as nvidia.com/gpu\nconfig mig=none reloaded needs-reload\n", "sharing mig=single\n", []string{"cut"},
		},
		"a GPU in MIG mode that was given as a whole, and is so still": {
			"gpu 0 on\npod web/cut on 0 as nvidia.com/gpu\nconfig mig=none reloaded needs-reload\n", "sharing nvidia.com/mig-1g.10gb=2 mig=none\n", nil,
		},
		// Promise 19: what the plugin's config manager has carried out before the agent observed it.
		"what was withdrawn already":                              {carriedOut, "sharing none\n", []string{"former"}},
		"what was withdrawn by a config that is not known":        {carriedOut, "gpu 0 off\n", []string{"former"}},
		"what was withdrawn, where nothing is asked for":          {carriedOut, "", nil},
		"what was withdrawn from a pod that ends":                 {"gpu 0 off\npod web/former on 0 withdrawn ending\nconfig set reloaded\n", "sharing none\n", nil},
		"what was withdrawn from one that ends, and from another": {carriedOut + "pod web/ends on 0 withdrawn ending\n", "sharing none\n", []string{"ends", "former"}},
		"what was withdrawn, and is offered again by a config that the agent writes": {
			"gpu 0 off\npod web/former on 0 as nvidia.com/gpu::1 withdrawn\nconfig reloaded needs-reload\n", "sharing nvidia.com/gpu=2\n", nil,
		},
		"what the config manager will withdraw":                    {shared + foretold, "sharing nvidia.com/gpu=2\n", []string{"last"}},
		"what the plugin does not offer, and no one else is given": {shared + "config set reloaded\n", "sharing nvidia.com/gpu=2\n", nil},
		"what the config manager will withdraw from no one":        {shared + foretold, "sharing nvidia.com/gpu=4\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			steps, err := plan.Make(parseSeen(t, row.seen+"agreed=2\n"), parseWant(t, row.want))
			if err != nil {
				t.Fatal(err)
			}
			leave := map[string]bool{}
			for _, s := range steps {
				for _, p := range s.Pods {
					leave[p.Name] = s.Kind == plan.Evict
				}
			}
			if diff := cmp.Diff(row.leave, slices.Sorted(maps.Keys(leave))); diff != "" {
				t.Errorf("pods that leave (-want +got):\n%s", diff)
			}
		})
	}
}
