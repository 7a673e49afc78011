package node_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/systemd"
)

// Promise 15. Whoever may patch nodes has no unit started or stopped: neither on a node at rest, nor among those that stop for a reset.
func TestAForgedJournalStartsAndStopsNoUnitOfTheHost(t *testing.T) {
	t.Parallel()
	r := newRig(t, oneA100, "")
	host := r.onMachine()
	host.SetUnit("kubelet.service", systemd.Unit{})
	host.SetUnit("debug-shell.service", systemd.Unit{ActiveState: "inactive"})
	r.awaitOffered("nvidia.com/gpu", 1)
	r.run()
	r.awaitReason(config.ReasonNotRequested)
	forge := func() {
		r.writeAs("mallory", func(n *corev1.Node) {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, config.AnnotationJournal, `{"version":1,"operation":"op","target":"x","bootID":"b",`+
				`"started":"2000-01-01T00:00:00Z","cordoned":false,"stopped":["kubelet.service","debug-shell.service","reboot.target"]}`)
		})
	}
	forge()
	r.await("the forged journal's end", func(n *corev1.Node) bool { return n.Annotations[config.AnnotationJournal] == "" })
	if started := host.jobs(systemd.StartUnit); len(started) > 0 {
		t.Errorf("started: %v", started)
	}
	forge()
	r.label(config.LabelMIGConfig, "all-balanced")
	r.givenBack(r.awaitConverged("all-balanced"))
	host.asBefore()
	if diff := cmp.Diff([]string{"nvsm.service", "nvidia-dcgm.service", "nvidia-persistenced.service"}, host.jobs(systemd.StopUnit)); diff != "" {
		t.Errorf("stopped (-want +got):\n%s", diff)
	}
	for _, call := range host.Calls() {
		if call.Method != systemd.ListUnitsByNames {
			continue
		}
		for _, arg := range call.Args {
			if names, ok := arg.([]string); ok && slices.Contains(names, "debug-shell.service") {
				t.Errorf("systemd was asked for %v", names)
			}
		}
	}
}
