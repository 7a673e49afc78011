package agent_test

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
)

// Journals of agents that kept no record of their host, word by word. An agent that replaces such a one in the middle of a change
// restores what the marks on the node show, and starts the units of the settings.
var journals = map[string]string{
	"version 1": `{"version":1,"operation":"a0e0c3b4-6a3c-4b1e-9f53-0d5d0a5e8a11","target":"all-1g.10gb","bootID":"boot-1",` +
		`"started":"2000-01-01T00:00:00Z","cordoned":true,"wasUnschedulable":false,"proven":true,` +
		`"previous":[{"gpu":"GPU","mig":false}],"operands":["plugin-1"]}`,
	"version 2": `{"version":2,"summary":"change to all-1g.10gb since 2000-01-01T00:00:00Z; to be given back: cordon and taint gpuslice.io/repartitioning",` +
		`"operation":"a0e0c3b4-6a3c-4b1e-9f53-0d5d0a5e8a11","target":"all-1g.10gb","bootID":"boot-1",` +
		`"started":"2000-01-01T00:00:00Z","cordoned":true,"wasUnschedulable":false,"proven":true,` +
		`"previous":[{"gpu":"GPU","mig":false}],"operands":["plugin-1"],` +
		`"paused":{"nvidia.com/gpu.deploy.dcgm":"true"},"stopped":["nvidia-dcgm.service"]}`,
}

// Promise 7: a change survives the upgrade of an agent that kept no record.
func TestAChangeGoesOnAfterTheUpgradeOfAnAgentWithoutARecord(t *testing.T) {
	t.Parallel()
	for name, journal := range journals {
		for _, wanted := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, h100)
					w.units.states = map[string]string{"nvidia-dcgm.service": "active"}
					if name == "version 2" {
						w.operator(map[string]string{labelDCGM: "paused-for-gpuslice"})
						w.units.states["nvidia-dcgm.service"] = "inactive"
					}
					w.attribute()
					n := w.node()
					n.Spec.Unschedulable = true
					n.Spec.Taints = []corev1.Taint{{Key: config.TaintRepartitioning, Effect: corev1.TaintEffectNoSchedule}}
					n.Annotations = map[string]string{config.AnnotationJournal: journal}
					if _, err := w.client.CoreV1().Nodes().Update(t.Context(), n, metav1.UpdateOptions{FieldManager: config.FieldManager}); err != nil {
						t.Fatal(err)
					}
					if wanted {
						w.converge("all-1g.10gb")
					} else {
						w.settle(config.ReasonNotRequested)
					}
					w.givenBack()
					if w.units.states["nvidia-dcgm.service"] != "active" {
						t.Error("the unit is not started")
					}
					if value, ok := w.node().Labels[labelDCGM]; ok && value != "true" {
						t.Errorf("the operand's label is %s", value)
					}
				})
			})
		}
	}
}

// The journal names the plugin's pods that have read the GPUs as they were. Each pod that comes while the agent waits for others is one
// more, and no agent reads a journal with too many of them: the node would stay cordoned.
func TestDevicePluginsThatComeAndGoMakeNoJournalTooLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.grace, w.settings.Timeouts.Drain = 2*time.Hour, 24*time.Hour
		w.restart()
		w.pod("train", "0")
		w.label("all-1g.10gb")
		for range 300 {
			w.replacePlugin()
			w.turn()
			if pause := w.agent.Pass(t.Context()); pause > 0 {
				<-time.After(pause)
			}
		}
		if c := w.condition(); c.Reason == string(config.ReasonJournalUnreadable) {
			t.Errorf("after %d device plugins: %s", w.started, c.Message)
		}
		w.reach("all-1g.10gb")
	})
}
