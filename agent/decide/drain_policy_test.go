package decide_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
)

func TestTheSettingsAreThePolicyOfEvictions(t *testing.T) {
	t.Parallel()
	settings, err := config.Parse([]byte(`
apiVersion: gpuslice.io/v1alpha1
kind: Settings
timeouts: {drain: 2h}
devicePlugin: {namespaces: [gpus]}
drain:
  mode: gradual
  gradualFor: 36h
  afterDeadline: delete
  deleteGrace: 10s
  unmanagedPods: refuse
  emptyDir: refuse
  rules:
    - {namespaces: [team], selector: app=train, action: wait, for: 8h}
    - {namespaces: [kube-system], action: refuse}
    - {selector: app=web, action: evict}
    - {selector: app=vm, action: ask}
    - {selector: app=kafka, action: ask, for: 2h}
`))
	if err != nil {
		t.Fatal(err)
	}
	fence := corev1.Taint{Key: "gpuslice.io/repartitioning", Effect: corev1.TaintEffectNoSchedule}
	daemons := []string{"gpu-operator", "kube-system", "nvidia-device-plugin", "nvidia-gpu-operator"}
	app := func(name string) labels.Selector { return labels.SelectorFromSet(labels.Set{"app": name}) }
	unmanaged := drain.Choice{Refuse: true, Field: "drain.unmanagedPods", Flag: "--force-unmanaged"}
	emptyDir := drain.Choice{Refuse: true, Field: "drain.emptyDir", Flag: "--delete-emptydir-data"}
	evicts := config.Default()
	evicts.Drain.UnmanagedPods, evicts.Drain.EmptyDir = config.DrainEvict, config.DrainEvict
	for _, c := range []struct {
		settings config.Settings
		want     drain.Policy
	}{
		{config.Default(), drain.Policy{
			Unmanaged: unmanaged, EmptyDir: emptyDir,
			AskFor: 8 * time.Hour, AskField: decide.AskField, Deadline: time.Hour, DeleteGrace: 30 * time.Second, Fence: fence, Daemons: daemons,
		}},
		{evicts, drain.Policy{
			Unmanaged: drain.Choice{Field: unmanaged.Field, Flag: unmanaged.Flag}, EmptyDir: drain.Choice{Field: emptyDir.Field, Flag: emptyDir.Flag},
			AskFor: 8 * time.Hour, AskField: decide.AskField, Deadline: time.Hour, DeleteGrace: 30 * time.Second, Fence: fence, Daemons: daemons,
		}},
		{settings, drain.Policy{
			Unmanaged: unmanaged, EmptyDir: emptyDir,
			Rules: []drain.Rule{
				{Field: "drain.rules[0]", Namespaces: []string{"team"}, Selector: app("train"), Action: drain.Wait, For: 8 * time.Hour},
				{Field: "drain.rules[1]", Namespaces: []string{"kube-system"}, Selector: labels.Everything(), Action: drain.Refuse},
				{Field: "drain.rules[2]", Selector: app("web"), Action: drain.Evict},
				{Field: "drain.rules[3]", Selector: app("vm"), Action: drain.Ask},
				{Field: "drain.rules[4]", Selector: app("kafka"), Action: drain.Ask, For: 2 * time.Hour},
			},
			EndFor: 36 * time.Hour, EndField: "drain.mode",
			AskFor: 36 * time.Hour, AskField: "drain.gradualFor",
			Deadline: 2 * time.Hour, Delete: true, DeleteGrace: 10 * time.Second, Fence: fence, Daemons: []string{"gpus", "kube-system"},
		}},
	} {
		bySelectorText := cmp.Comparer(func(a, b labels.Selector) bool { return a.String() == b.String() })
		if diff := cmp.Diff(c.want, decide.From(c.settings), bySelectorText); diff != "" {
			t.Errorf("policy (-want +got):\n%s", diff)
		}
	}
}
