package taints_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/taints"
	"github.com/gpuslice/gpuslice/config"
)

func taint(key, value string, effect corev1.TaintEffect) corev1.Taint {
	return corev1.Taint{Key: key, Value: value, Effect: effect}
}

// keys are those of the taints, in their order.
func keys(all []corev1.Taint) []string {
	var out []string
	for _, t := range all {
		out = append(out, t.Key)
	}
	return out
}

// A taint closes a node if nothing takes it away by itself and the pod does not tolerate it; a startup taint closes it for the driver's pods alone.
func TestWhatClosesANode(t *testing.T) {
	t.Parallel()
	startup := config.Settings{StartupTaint: "example.com/fresh"}.StartupTaints()
	const closes, forTheDriver, never = 2, 1, 0
	for name, row := range map[string]struct {
		taint       corev1.Taint
		tolerations []corev1.Toleration
		want        int
	}{
		"of people":                         {taint("team", "a", corev1.TaintEffectNoSchedule), nil, closes},
		"that evicts":                       {taint("team", "a", corev1.TaintEffectNoExecute), nil, closes},
		"that only prefers":                 {taint("team", "a", corev1.TaintEffectPreferNoSchedule), nil, never},
		"that is tolerated":                 {taint("team", "a", corev1.TaintEffectNoSchedule), []corev1.Toleration{{Key: "team", Operator: corev1.TolerationOpExists}}, never},
		"that is tolerated with its value":  {taint("team", "a", corev1.TaintEffectNoSchedule), []corev1.Toleration{{Key: "team", Value: "a"}}, never},
		"that is tolerated by another":      {taint("team", "a", corev1.TaintEffectNoSchedule), []corev1.Toleration{{Key: "team", Value: "b"}}, closes},
		"that is tolerated for less":        {taint("team", "a", corev1.TaintEffectNoExecute), []corev1.Toleration{{Key: "team", Value: "a", Effect: corev1.TaintEffectNoSchedule}}, closes},
		"of a cordon":                       {taint(corev1.TaintNodeUnschedulable, "", corev1.TaintEffectNoSchedule), nil, never},
		"of a cloud":                        {taint("node.cloudprovider.kubernetes.io/uninitialized", "true", corev1.TaintEffectNoSchedule), nil, never},
		"of an autoscaler":                  {taint("ToBeDeletedByClusterAutoscaler", "1", corev1.TaintEffectNoSchedule), nil, never},
		"of Karpenter":                      {taint("karpenter.sh/disrupted", "", corev1.TaintEffectNoSchedule), nil, never},
		"with which Karpenter registers":    {taint("karpenter.sh/unregistered", "", corev1.TaintEffectNoExecute), nil, closes},
		"of a change":                       {taint(config.TaintRepartitioning, "", corev1.TaintEffectNoSchedule), nil, never},
		"of a GPU that is not well":         {taint(config.TaintGPUUnhealthy, "", corev1.TaintEffectNoSchedule), nil, never},
		"of the settings, at the start":     {taint("example.com/fresh", "", corev1.TaintEffectNoSchedule), nil, forTheDriver},
		"of the autoscaler's, at the start": {taint(config.AutoscalerStartupDomain+"/gpu", "", corev1.TaintEffectNoSchedule), nil, forTheDriver},
		"whose key only begins so":          {taint(config.AutoscalerStartupDomain+".example.com/gpu", "", corev1.TaintEffectNoSchedule), nil, closes},
	} {
		all := []corev1.Taint{row.taint}
		got := len(taints.Closing(all, row.tolerations)) + len(taints.KeepingOut(all, row.tolerations, startup))
		if got != row.want || all[0] != row.taint {
			t.Errorf("a taint %s closes %d, want %d", name, got, row.want)
		}
	}
}

// What all of the nodes have is the pool's; of a value that is another on each node nothing can be said.
func TestWhatNodesShare(t *testing.T) {
	t.Parallel()
	const no, out = corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute
	a, b := taint("team", "a", no), taint("team", "b", no)
	for name, row := range map[string]struct {
		nodes [][]corev1.Taint
		want  []corev1.Taint
	}{
		"no node":                    {nil, nil},
		"one node":                   {[][]corev1.Taint{{taint("z", "", no), a}}, []corev1.Taint{a, taint("z", "", no)}},
		"the same":                   {[][]corev1.Taint{{a}, {a}, {a}}, []corev1.Taint{a}},
		"not on each":                {[][]corev1.Taint{{a}, {}, {a}}, nil},
		"twice on one, none another": {[][]corev1.Taint{{a, b}, {}}, nil},
		"another value":              {[][]corev1.Taint{{a}, {b}}, []corev1.Taint{taint("team", "", no)}},
		"another value, and back":    {[][]corev1.Taint{{a}, {b}, {a}}, []corev1.Taint{taint("team", "", no)}},
		"another effect":             {[][]corev1.Taint{{a}, {taint("team", "a", out)}}, nil},
		"two effects":                {[][]corev1.Taint{{a, taint("team", "a", out)}, {taint("team", "a", out), a}}, []corev1.Taint{taint("team", "a", out), a}},
	} {
		if diff := cmp.Diff(row.want, taints.Shared(row.nodes)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// The texts are for kubectl and for a manifest, and bounded: anybody who may write a node chooses its taints.
func TestATaintInWords(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		taint            corev1.Taint
		text, toleration string
	}{
		{taint("team", "", corev1.TaintEffectNoSchedule), "team:NoSchedule", "{key: team, operator: Exists, effect: NoSchedule}"},
		{taint("team", "a", corev1.TaintEffectNoExecute), "team=a:NoExecute", "{key: team, operator: Exists, effect: NoExecute}"},
	} {
		if text, toleration := taints.Text(row.taint), taints.Toleration(row.taint); text != row.text || toleration != row.toleration {
			t.Errorf("%s, %s", text, toleration)
		}
	}
	long := taint(strings.Repeat("k", 1000), strings.Repeat("v", 1000), corev1.TaintEffectNoSchedule)
	for _, text := range []string{taints.Text(long), taints.Toleration(long)} {
		if len(text) > 250 {
			t.Errorf("%d bytes of text", len(text))
		}
	}
	two := []corev1.Taint{taint("b", "", corev1.TaintEffectNoSchedule), taint("a", "", corev1.TaintEffectNoSchedule)}
	if got := keys(taints.KeepingOut(two, nil, config.StartupTaints{})); cmp.Diff([]string{"b", "a"}, got) != "" {
		t.Errorf("they are in another order: %v", got)
	}
}
