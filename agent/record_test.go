package agent_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

const dcgm = "nvidia-dcgm.service"

// withPendingRestores returns a world of one A100 in persistence mode with a unit that has to stop for its reset: a change has to restore something of
// each sort.
func withPendingRestores(t *testing.T) *world {
	t.Helper()
	w := monitored(t)
	gpu := w.snapshot()[0]
	if err := w.gpus.Driver().SetPersistence(t.Context(), gpu.UUID, true); err != nil {
		t.Fatal(err)
	}
	w.fillManagedFields()
	return w
}

// expectHostGivenBack fails the test if the host is not as it was.
func (w *world) expectHostGivenBack() {
	w.t.Helper()
	if state := w.units.states[dcgm]; state != "active" {
		w.t.Errorf("%s is %s", dcgm, state)
	}
	if !w.snapshot()[0].Persistent {
		w.t.Error("persistence mode is off")
	}
}

// unitStopped begins a change of a world with pending restores, and lets turns pass until the unit is stopped.
func unitStopped(t *testing.T) *world {
	t.Helper()
	w := withPendingRestores(t)
	w.label("all-balanced")
	w.passes("stop of the unit", func() bool { return w.units.states[dcgm] == "inactive" })
	return w
}

// recreateNode deletes the node object, and kubelet registers it again.
func (w *world) recreateNode() {
	w.t.Helper()
	n := w.node()
	if err := w.client.CoreV1().Nodes().Delete(w.t.Context(), n.Name, metav1.DeleteOptions{}); err != nil {
		w.t.Fatal(err)
	}
	fresh := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID + "-again", ResourceVersion: "1"},
		Status:     corev1.NodeStatus{NodeInfo: n.Status.NodeInfo, Capacity: n.Status.Capacity},
	}
	if _, err := w.client.CoreV1().Nodes().Create(w.t.Context(), fresh, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// Promise 15. By a journal that this host's agent did not write, the agent restores only what the marks on the node show.
func TestAForgedJournalGivesBackOurMarksAndNothingElse(t *testing.T) {
	const head = `{"version":1,"operation":"op","target":"x","bootID":"00000000-0000-4000-8000-000000000001","started":"2000-01-01T00:00:00Z",`
	for name, journal := range map[string]string{
		"units that are started":    head + `"cordoned":false,"stopped":["debug-shell.service","modprobe@evil.service","reboot.target"]}`,
		"another GPU's cut":         head + `"cordoned":true,"previous":[{"gpu":"GPU","mig":true,"instances":[{"profile":"7g.80gb","start":0,"size":8}]}],"undo":{"fingerprint":"x","reason":"y","message":"z"}}`,
		"a reboot that was refused": head + `"noReset":{"boot":"00000000-0000-4000-8000-000000000001","gpus":["GPU"]},"reboots":[]}`,
		"no JSON":                   "\x1b[2J",
		"an unknown field":          `{"version":1,"units":["sshd.service"]}`,
		"another version":           `{"version":99,"stopped":["sshd.service"]}`,
		"endless":                   `{"version":1,"target":"` + strings.Repeat("a", 200_000) + `"}`,
	} {
		for _, known := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, with a record %t", name, known), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := withPendingRestores(t)
					if known {
						w.converge("all-disabled")
					}
					before := w.gpus.String()
					w.annotate(config.AnnotationJournal, strings.ReplaceAll(journal, `"GPU"`, `"`+string(w.snapshot()[0].UUID)+`"`))
					w.spend(time.Hour)
					w.expectGivenBack()
					w.expectHostGivenBack()
					w.expectGPUs(before)
					if len(w.units.did) > 0 || w.host.reboots > 0 {
						t.Errorf("units: %v; reboots: %d", w.units.did, w.host.reboots)
					}
					for unit := range w.units.asked {
						if !slices.Contains(w.settings.Units, unit) {
							t.Errorf("systemd was asked for %s", unit)
						}
					}
				})
			})
		}
	}
}

// Promise 15.
func TestAForgedJournalAddsNoUnitToThoseThatStopForAReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := withPendingRestores(t)
		w.units.states["kubelet.service"], w.units.states["sshd.service"] = "active", "active"
		w.annotate(config.AnnotationJournal, `{"version":1,"operation":"op","target":"all-balanced","bootID":"00000000-0000-4000-8000-000000000001","started":"2000-01-01T00:00:00Z",`+
			`"cordoned":true,"verified":true,"stopped":["kubelet.service","sshd.service"]}`)
		w.converge("all-balanced")
		if diff := cmp.Diff([]string{"stop " + dcgm, "start " + dcgm}, w.units.did); diff != "" {
			t.Errorf("units (-want +got):\n%s", diff)
		}
	})
}

// Promise 15: the agent reports a unit that is not in the settings any more, and leaves it alone, even if the journal is its own.
func TestAUnitThatLeavesTheSettingsInTheMiddleIsReportedAndLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := unitStopped(t)
		w.settings.Units = []string{"nvsm.service"}
		w.restart()
		reported := false
		w.passes("the end", func() bool {
			reported = reported || strings.Contains(w.condition().Message, dcgm+" of this host was stopped for a change and is not started")
			return w.done("all-balanced")() && !w.hasJournal()
		})
		if !reported {
			t.Error("the condition has never said so")
		}
		if slices.Contains(w.units.did, "start "+dcgm) {
			t.Error("it was started")
		}
	})
}

// Promise 15: the agent writes no ConfigMap and no label other than the plugin's.
func TestAForgedJournalWritesNoConfigMapAndNoLabel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := withPendingRestores(t)
		data := map[string]string{"entrypoint.sh": "theirs"}
		if _, err := w.client.CoreV1().ConfigMaps("gpu-operator").Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: "entrypoint", Namespace: "gpu-operator"}, Data: data,
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		const label = "node-restriction.kubernetes.io/tier"
		w.annotate(config.AnnotationJournal, `{"version":1,"operation":"op","target":"x","bootID":"00000000-0000-4000-8000-000000000001","started":"2000-01-01T00:00:00Z","cordoned":true,`+
			`"plugin":{"way":"configmap","label":"`+label+`","namespace":"gpu-operator","configMap":"entrypoint","text":"entrypoint.sh","body":"evil"},`+
			`"undo":{"fingerprint":"x","reason":"y","message":"z"}}`)
		w.spend(time.Hour)
		cm, err := w.client.CoreV1().ConfigMaps("gpu-operator").Get(t.Context(), "entrypoint", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(data, cm.Data); diff != "" {
			t.Errorf("the ConfigMap (-before +after):\n%s", diff)
		}
		if value, is := w.node().Labels[label]; is {
			t.Errorf("the node has label %s=%s", label, value)
		}
		w.expectGivenBack()
	})
}

const frozen = "freezes: [{from: '1999-12-31T00:00:00Z', to: '2040-01-01T00:00:00Z', reason: the audit}]\n"

// Promises 11 and 15: an undo needs no window, so the agent must have written it.
func TestAForgedUndoPassesNoFreeze(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.fillManagedFields()
		w.setMaintenance(frozen)
		before := w.gpus.String()
		w.annotate(config.AnnotationJournal, fmt.Sprintf(`{"version":1,"operation":"op","target":"x","bootID":"00000000-0000-4000-8000-000000000001","started":"2000-01-01T00:00:00Z",`+
			`"cordoned":true,"verified":true,"previous":[{"gpu":%q,"mig":true}],"undo":{"fingerprint":"x","reason":"y","message":"z"}}`, w.gpus.UUIDs()[0]))
		w.spend(time.Hour)
		if diff := cmp.Diff(before, w.gpus.String()); diff != "" || !w.runs("holder") {
			t.Errorf("the pod runs: %t; GPUs (-before +after):\n%s", w.runs("holder"), diff)
		}
		w.expectGivenBack()
	})
}

// Promises 8 and 15: a journal that the agent itself wrote once, word by word.
func TestAnOldJournalOfOursIsNotBelievedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := unitStopped(t)
		old := w.node().Annotations[config.AnnotationJournal]
		w.reach("all-balanced")
		w.converge("all-1g.10gb")
		w.setMaintenance(frozen)
		w.unset(config.LabelMIGConfig) // the agent undoes a journal's change that no label asks for
		w.settle(config.ReasonNotRequested)
		before := w.gpus.String()
		w.units.did = nil
		w.annotate(config.AnnotationJournal, old)
		w.spend(time.Hour)
		w.expectGivenBack()
		w.expectHostGivenBack()
		if diff := cmp.Diff(before, w.gpus.String()); diff != "" || len(w.units.did) > 0 {
			t.Errorf("units: %v; GPUs (-before +after):\n%s", w.units.did, diff)
		}
	})
}

// Promises 11 and 15: the agent believes nothing of the status.
func TestAForgedStatusDecidesNothing(t *testing.T) {
	t.Run("reboots", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := withPendingRestores(t)
			w.settings.Reboot.Policy = config.RebootSelf
			w.restart()
			w.annotate(config.AnnotationStatus, fmt.Sprintf(`{"phase":"Idle","reason":"NotRequested","noReset":{"boot":"00000000-0000-4000-8000-000000000001","gpus":[%q]}}`, w.snapshot()[0].UUID))
			w.converge("all-balanced")
			if w.host.reboots > 0 {
				t.Errorf("%d reboots of a host whose GPU resets", w.host.reboots)
			}
		})
	})
	t.Run("windows", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.converge("all-balanced")
			verified := w.node().Annotations[config.AnnotationStatus]
			w.converge("all-1g.10gb")
			w.setMaintenance(frozen)
			before := w.gpus.String()
			w.label("all-balanced")
			w.annotate(config.AnnotationStatus, verified)
			w.spend(time.Hour)
			w.expectGPUs(before)
		})
	})
	t.Run("failures", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.converge("all-balanced")
			requested := w.disk.record(t).Learnt.Verified
			w.converge("all-1g.10gb")
			w.annotate(config.AnnotationStatus, fmt.Sprintf(`{"phase":"Idle","reason":"NotRequested","failed":{"fingerprint":%q,"reason":"HardwareFailure","message":"call 0900-EVIL"}}`, requested))
			w.converge("all-balanced")
		})
	})
}

// Promise 15. Since when a reason is so, and the phase, are the record's as well: the agent writes the status, and reads nothing of it.
func TestAForgedStatusIsWrittenOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-balanced")
		before := w.node().Annotations[config.AnnotationStatus]
		since := w.status().Since
		for name, forged := range map[string]string{
			"another time": strings.Replace(before, since.Format(time.RFC3339), "1999-01-01T00:00:00Z", 1),
			"no status":    "\x1b[2J",
		} {
			if forged == before {
				t.Fatalf("%s: the status does not say since when its reason is so: %s", name, before)
			}
			w.annotate(config.AnnotationStatus, forged)
			w.restart()
			w.spend(time.Hour)
			if diff := cmp.Diff(before, w.node().Annotations[config.AnnotationStatus]); diff != "" {
				t.Errorf("%s: the status (-before +after):\n%s", name, diff)
			}
		}
	})
}

// Promises 8, 12 and 15. An agent without its record, as on a new disk, knows no more than a new one, whatever the annotations say: it disturbs
// nothing that is as asked for, tries a failed change once more, and takes labels of a profile for a user's.
func TestALostRecordIsLikeAFreshInstall(t *testing.T) {
	lose := func(w *world) {
		w.disk.text = nil
		w.restart()
	}
	t.Run("a node at rest", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := busy(t)
			w.converge("all-balanced")
			w.spend(time.Minute)
			before := w.gpus.String()
			lose(w)
			fences := 0
			w.patched(func(patch string) error {
				if strings.Contains(patch, `"unschedulable":true`) {
					fences++
				}
				return nil
			})
			w.spend(time.Minute)
			w.expectGPUs(before)
			if heard, since := w.condition().LastHeartbeatTime.Time, w.status().Since; fences > 0 || heard.Before(since.Truncate(time.Second)) {
				t.Errorf("the node was fenced %d times; the condition is of %s, and the status since %s", fences, heard, since)
			}
		})
	})
	t.Run("a failed change", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.converge("all-enabled")
			w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
			w.label("all-1g.10gb")
			w.settle(config.ReasonHardwareFailure)
			calls := w.gpus.Calls()[gpusim.CreateGpuInstanceWithPlacement]
			lose(w)
			w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
			w.passes("another attempt", func() bool { return w.gpus.Calls()[gpusim.CreateGpuInstanceWithPlacement] > calls })
			w.settle(config.ReasonHardwareFailure)
			w.expectGivenBack()
			calls = w.gpus.Calls()[gpusim.CreateGpuInstanceWithPlacement]
			w.spend(time.Hour)
			if again := w.gpus.Calls()[gpusim.CreateGpuInstanceWithPlacement]; again != calls {
				t.Errorf("it was tried a third time, with %d calls", again-calls)
			}
		})
	})
	t.Run("a profile's labels and taints", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.profiles("apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\nprofiles: {whole: {mig: [{gpus: {all: true}, enabled: false}], labels: {size: whole}, " +
				"taints: [{key: team, value: a, effect: PreferNoSchedule}]}, cut: {mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}], labels: {size: cut}}}\n")
			w.profile("whole")
			w.untilReason(config.ReasonConverged)
			lose(w)
			w.spend(time.Minute)
			w.untilReason(config.ReasonConverged)
			w.profile("cut")
			w.untilReason(config.ReasonNodeKeyConflict)
			if n := w.node(); n.Labels["size"] != "whole" || len(n.Spec.Taints) != 1 {
				t.Errorf("labels %v, taints %v", n.Labels, n.Spec.Taints)
			}
			w.edit(func(n *corev1.Node) { delete(n.Labels, "size") }) // as the message says
			w.untilReason(config.ReasonConverged)
			if n := w.node(); n.Labels["size"] != "cut" || len(n.Spec.Taints) != 1 || n.Annotations[config.AnnotationPublished] != `{"labels":{"size":"cut"}}` {
				t.Errorf("labels %v, taints %v, note %s", n.Labels, n.Spec.Taints, n.Annotations[config.AnnotationPublished])
			}
		})
	})
}

// Promises 13 and 15: by such a note a kubelet, which may not change its own node's taints, could have them changed.
// The keys are those of a profile, since the agent takes no others for its own.
func TestAForgedNoteOfPublishedKeysTakesNothingAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.profiles("apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\nprofiles: {team: {mig: [{gpus: {all: true}, enabled: false}], " +
			"labels: {team: a}, taints: [{key: team, value: a, effect: NoSchedule}]}}\n")
		taint := corev1.Taint{Key: "team", Value: "a", Effect: corev1.TaintEffectNoSchedule}
		w.tolerations = []corev1.Toleration{{Key: taint.Key, Operator: corev1.TolerationOpExists}}
		w.converge("all-balanced")
		w.edit(func(n *corev1.Node) {
			n.Labels["team"] = "a"
			n.Spec.Taints = append(n.Spec.Taints, taint)
			n.Annotations[config.AnnotationPublished] = `{"labels":{"team":"a"},"taints":[{"key":"team","value":"a","effect":"NoSchedule"}]}`
		})
		w.converge("all-1g.10gb")
		if n := w.node(); n.Labels["team"] != "a" || !slices.Contains(n.Spec.Taints, taint) {
			t.Errorf("labels %v, taints %v", n.Labels, n.Spec.Taints)
		}
	})
}

// Promise 7. Facts of this host are not lost with the node object.
func TestTheHostIsGivenBackWithoutTheJournal(t *testing.T) {
	for name, lose := range map[string]func(w *world){
		"the node object is deleted": func(w *world) { w.recreateNode() },
		"the journal is taken away, and the label": func(w *world) {
			w.unannotate(config.AnnotationJournal)
			w.unset(config.LabelMIGConfig)
		},
		"the journal is replaced": func(w *world) {
			w.annotate(config.AnnotationJournal, `{"version":1}`)
			w.unset(config.LabelMIGConfig)
		},
	} {
		for _, killed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, killed %t", name, killed), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := unitStopped(t)
					lose(w)
					if killed {
						w.restart()
					}
					w.settle(config.ReasonNotRequested)
					w.expectHostGivenBack()
					w.expectGivenBack()
					if r := w.disk.record(t); len(r.ToRestore) > 0 || r.Journal != "" {
						t.Errorf("the record still holds %v", r.ToRestore)
					}
				})
			})
		}
	}
}

// Promise 8. A reboot starts units by itself, and the agent does not start those that the reboot has not.
func TestWhatARebootGivesBackIsNotRestoredAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := unitStopped(t)
		w.recreateNode()
		w.nextBoot()
		w.restart()
		w.units.did = nil
		w.settle(config.ReasonNotRequested)
		w.spend(time.Hour)
		if len(w.units.did) > 0 {
			t.Errorf("units: %v", w.units.did)
		}
	})
}

// forgeBootID writes another boot into the node's status, as any user may who can patch it.
func (w *world) forgeBootID(id string) {
	w.t.Helper()
	n := w.node()
	n.Status.NodeInfo.BootID = id
	if _, err := w.client.CoreV1().Nodes().UpdateStatus(w.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// Promise 15. The agent reads the boot id from the host's kernel: by the node's status any user could make it forget what it must restore on the host.
func TestABootOfTheNodesStatusIsNoReboot(t *testing.T) {
	for name, claim := range map[string]func(w *world){
		"another":        func(w *world) { w.forgeBootID(bootID(2)) },
		"none":           func(w *world) { w.forgeBootID("") },
		"no boot at all": func(w *world) { w.forgeBootID("\x1b[2J") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := unitStopped(t)
				w.recreateNode()
				claim(w)
				w.restart()
				w.settle(config.ReasonNotRequested)
				w.expectHostGivenBack()
			})
		})
	}
}

// Promise 15. If the agent cannot read the boot id, it takes that for no reboot, and reports it.
func TestABootThatCannotBeReadIsNoReboot(t *testing.T) {
	for name, spoil := range map[string]func(w *world){
		"it is gone":      func(w *world) { w.hidesBoot(); w.restart() },
		"it is no boot":   func(w *world) { w.setKernelBootID("none\n"); w.restart() },
		"it was readable": (*world).hidesBoot,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := unitStopped(t)
				w.recreateNode()
				spoil(w)
				w.settle(config.ReasonNotRequested)
				w.expectHostGivenBack()
				reported := strings.Contains(w.condition().Message, "the agent would not notice a reboot of this host: reading which boot of the host this is")
				if known := name == "it was readable"; reported == known {
					t.Errorf("it is reported: %t; %s", reported, w.condition().Message)
				}
			})
		})
	}
}

func (w *world) hidesBoot() {
	w.t.Helper()
	if err := os.Remove(w.bootFile()); err != nil {
		w.t.Fatal(err)
	}
}

// Promise 8. Either half may be lost, or be of another host.
func TestWithoutARecordOurMarksAreGivenBack(t *testing.T) {
	for name, lose := range map[string]func(w *world){
		"the record is lost": func(w *world) { w.disk.text = nil },
		"both are lost":      func(w *world) { w.disk.text = nil; w.unannotate(config.AnnotationJournal) },
		"it is of another host": func(w *world) {
			r := *w.disk.record(w.t)
			r.Node, r.UID, r.Host.Boot = "gpu-2", "other", "boot-of-gpu-2"
			text, err := json.Marshal(r)
			if err != nil {
				w.t.Fatal(err)
			}
			w.disk.text = text
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := withPendingRestores(t)
				w.label("all-balanced")
				w.untilCordoned()
				lose(w)
				w.restart()
				w.unset(config.LabelMIGConfig)
				w.settle(config.ReasonNotRequested)
				w.expectGivenBack()
				w.expectHostGivenBack() // the change has taken nothing yet
			})
		})
	}
}

// killed is the panic by which a process ends in the middle of a write.
type killed struct{}

// passesReviving lets turns pass as passes does; when the agent is killed, it calls then, and starts another.
func (w *world) passesReviving(what string, then func(), stop func() bool) {
	w.t.Helper()
	for began := time.Now(); !stop(); {
		if time.Since(began) > 24*time.Hour {
			w.t.Fatalf("no %s in a day; the node says %s", what, w.condition().Message)
		}
		if w.diesInTurn() {
			w.disk.refuses, w.disk.after = nil, nil
			w.restart()
			then()
		}
	}
}

// diesInTurn lets one turn pass, and reports whether the agent was killed in it.
func (w *world) diesInTurn() (dead bool) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case killed:
			dead = true
		default:
			panic(r)
		}
	}()
	w.turn()
	<-time.After(w.agent.Pass(w.t.Context()))
	return false
}

// Promise 9. An agent that is killed after each of its steps, before it has reported, cuts no GPU of a node that says that nothing is under way; the
// first death alone comes before any report.
func TestAnAgentThatIsKilledAfterEachStepReportsWhatItDoes(t *testing.T) {
	t.Parallel()
	for name, begin := range map[string]func(w *world){
		"of a node as desired": func(w *world) { w.converge("all-balanced") },
		"of a node that is asked for nothing": func(w *world) {
			w.converge("all-balanced")
			w.unset(config.LabelMIGConfig)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				begin(w)
				w.settle(config.ReasonNotRequested, config.ReasonConverged)
				mortal := func() {
					o := w.optionsFor(&w.host)
					o.Log = o.Log.WithOptions(zap.Hooks(func(e zapcore.Entry) error {
						if e.Message == "step done" && w.hasJournal() {
							panic(killed{})
						}
						return nil
					}))
					w.agent = agent.New(o)
				}
				mortal()
				w.label("all-1g.10gb")
				deaths := 0
				for began := time.Now(); !w.done("all-1g.10gb")(); {
					if time.Since(began) > 24*time.Hour {
						t.Fatalf("no end in a day; the node says %s", w.condition().Message)
					}
					if !w.diesInTurn() {
						continue
					}
					if deaths++; deaths > 1 && w.hasJournal() && w.condition().Status == corev1.ConditionTrue {
						t.Errorf("after the death %d, in a change, the node says %s: %s", deaths, w.reason(), w.condition().Message)
					}
					mortal()
				}
				w.expectGivenBack()
				if deaths < 5 {
					t.Errorf("the agent has died %d times", deaths)
				}
			})
		})
	}
}

// killAtWrite has the agent killed at the n-th write of its record, before or after it, and then sets done; passesReviving takes that back once the agent is dead.
func (w *world) killAtWrite(n int, after bool, done *bool) {
	die := func(journal.Record) error {
		if w.disk.writes == n-1 && !after || w.disk.writes == n && after {
			*done = true
			panic(killed{})
		}
		return nil
	}
	if after {
		w.disk.after = die
	} else {
		w.disk.refuses = die
	}
}

// Promise 8: before the record, between the record and the node, after the node; with the journal, without it, and without the node object.
func TestAnAgentThatIsKilledAtAWriteOfItsRecordIsFollowedByOneThatEndsTheSame(t *testing.T) {
	nothing := func(*world) {}
	for name, row := range map[string]struct {
		then func(w *world)
		end  config.Reason
	}{
		"and nothing else":              {nothing, config.ReasonConverged},
		"and the journal is taken away": {func(w *world) { w.unannotate(config.AnnotationJournal) }, config.ReasonConverged},
		"and the request goes with the journal": {func(w *world) {
			w.unannotate(config.AnnotationJournal)
			w.unset(config.LabelMIGConfig)
		}, config.ReasonNotRequested},
		"and the node is registered again": {(*world).recreateNode, config.ReasonNotRequested},
	} {
		t.Run(name, func(t *testing.T) {
			for _, after := range []bool{false, true} {
				for n, more := 1, true; more; n++ {
					synctest.Test(t, func(t *testing.T) {
						w := withPendingRestores(t)
						w.turn()
						more = false
						w.killAtWrite(n, after, &more)
						w.label("all-balanced")
						w.passesReviving("the end", func() { row.then(w) }, func() bool {
							reason := config.Reason(w.condition().Reason)
							return !w.hasJournal() && (reason == row.end || !more && reason == config.ReasonConverged)
						})
						w.expectGivenBack()
						w.expectHostGivenBack()
						if r := w.disk.record(t); r != nil && len(r.ToRestore) > 0 {
							t.Errorf("killed at write %d, the record still holds %v", n, r.ToRestore)
						}
					})
				}
			}
		})
	}
}

var errFull = fmt.Errorf("writing: %w", syscall.ENOSPC)

// Promises 7 and 10: if the agent cannot write the record, it takes nothing, and restores what it has taken.
func TestADiskThatIsFullFromAWriteOnKeepsNothing(t *testing.T) {
	for n, more := 1, true; more; n++ {
		for _, lost := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				w := withPendingRestores(t)
				w.turn()
				more = false
				w.disk.refuses = func(journal.Record) error {
					if w.disk.writes >= n-1 {
						more = true
						return errFull
					}
					return nil
				}
				w.label("all-balanced")
				w.spend(time.Hour)
				if w.units.states[dcgm] != "active" || w.node().Spec.Unschedulable {
					t.Errorf("full from write %d on: the unit is %s, the node cordoned %t; %s", n, w.units.states[dcgm], w.node().Spec.Unschedulable, w.condition().Message)
				}
				if c := w.condition(); more && c.Reason != string(config.ReasonConverged) &&
					(c.Reason != string(config.ReasonHostRecordUnavailable) || !strings.Contains(c.Message, "make room")) {
					t.Errorf("full from write %d on: the node says %s: %s", n, c.Reason, c.Message)
				}
				w.disk.refuses = nil
				if lost {
					w.unannotate(config.AnnotationJournal)
					w.restart()
				}
				w.reach("all-balanced")
				w.expectHostGivenBack()
			})
		}
	}
}

// Promise 7: the disk takes the record before the unit is stopped, and nothing after that; then the agent is killed and the journal lost.
func TestAUnitComesBackByTheOneWriteThatTheDiskHasTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := withPendingRestores(t)
		full := false
		w.disk.refuses = func(r journal.Record) error {
			if full {
				return errFull
			}
			full = slices.ContainsFunc(r.Next, func(journal string) bool { return strings.Contains(journal, `"stopped"`) })
			return nil
		}
		w.label("all-balanced")
		w.passes("stop of the unit", func() bool { return w.units.states[dcgm] == "inactive" })
		w.disk.refuses = nil
		w.unannotate(config.AnnotationJournal)
		w.unset(config.LabelMIGConfig)
		w.restart()
		w.settle(config.ReasonNotRequested)
		w.expectHostGivenBack()
	})
}

// Promises 14 and 15: each message says what a user can do, and the agent touches nothing until then.
func TestARecordThatCannotBeReadIsReported(t *testing.T) {
	for name, row := range map[string]struct {
		spoil func(d *disk)
		says  string
		not   string
	}{
		"of a newer agent": {func(d *disk) { d.text = []byte(`{"version":9,"toRestore":["start of ` + dcgm + `"]}`) }, "it has to restore: start of " + dcgm, "kernel log"},
		"corrupt":          {func(d *disk) { d.text = []byte(`{"version":1`) }, "Remove the file", "kernel log"},
		"unsafe":           {func(d *disk) { d.reads = journal.ErrUnsafe }, "modes 0600 and 0700", "kernel log"},
		"a silent disk":    {func(d *disk) { d.silent = true }, "kernel log", "emove the file"},
		"a broken disk":    {func(d *disk) { d.reads = syscall.EIO }, "input/output error", "emove the file"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := withPendingRestores(t)
				row.spoil(&w.disk)
				before := w.gpus.String()
				w.label("all-balanced")
				w.untilReason(config.ReasonHostRecordUnavailable)
				w.spend(10 * time.Minute)
				c := w.condition()
				if !strings.Contains(c.Message, row.says) || strings.Contains(c.Message, row.not) {
					t.Errorf("the condition says: %s", c.Message)
				}
				if after := w.gpus.String(); after != before || w.hasJournal() || len(w.units.did) > 0 {
					t.Errorf("a journal %t, units %v, GPUs\n%s", w.hasJournal(), w.units.did, after)
				}
				w.disk = disk{}
				w.reach("all-balanced")
			})
		})
	}
}

func TestAnIdleRecordOfANewerAgentIsSetAside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := withPendingRestores(t)
		newer := `{"version":9,"knows":"more"}`
		w.disk.text = []byte(newer)
		w.converge("all-balanced")
		w.expectHostGivenBack()
		if string(w.disk.aside) != newer {
			t.Errorf("set aside is %q", w.disk.aside)
		}
	})
}

// A newer agent may have written a journal that this one cannot read, and kept a record that it can.
func TestAJournalOfOursThatCannotBeReadStopsEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.label("all-balanced")
		const journal = `{"version":99}`
		w.annotate(config.AnnotationJournal, journal)
		w.disk.text = []byte(`{"version":1,"node":"` + nodeName + `","uid":"node-uid","journal":"{\"version\":99}"}`)
		before := w.gpus.String()
		w.untilReason(config.ReasonJournalUnreadable)
		w.spend(time.Minute)
		w.expectGPUs(before)
		if got := w.node().Annotations[config.AnnotationJournal]; got != journal {
			t.Errorf("the journal was changed to %s", got)
		}
		if c := w.condition(); !strings.Contains(c.Message, config.AnnotationJournal) {
			t.Errorf("the message does not say what to do: %s", c.Message)
		}
	})
}

// Promise 12.
func TestTheRecordOfANodeAtRestIsNotWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		for name, rest := range map[string]func(){
			"with nothing asked for": func() { w.settle(config.ReasonNotRequested) },
			"with what is asked for": func() { w.converge("all-balanced") },
		} {
			rest()
			w.spend(time.Minute)
			before := w.disk.writes
			w.restart()
			w.spend(time.Hour)
			if w.disk.writes != before {
				t.Errorf("%d writes of a node at rest, %s", w.disk.writes-before, name)
			}
			w.unset(config.LabelMIGConfig)
		}
	})
}

// The agent has nothing to restore by a record that the disk has refused.
func TestAChangeThatCouldNotBeRecordedLeavesNothingToRestore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := withPendingRestores(t)
		w.disk.refuses = func(journal.Record) error { return errors.New("read-only file system") }
		w.label("all-balanced")
		w.untilReason(config.ReasonHostRecordUnavailable)
		w.unset(config.LabelMIGConfig)
		w.settle(config.ReasonNotRequested)
		w.expectGivenBack()
		if len(w.units.did) > 0 {
			t.Errorf("units: %v", w.units.did)
		}
	})
}

// Promises 8 and 12. The agent dies right after it has given the node back, before it could write anything else. If it
// knows of no plugin to restart, that is the first step of the undo.
func TestAnAgentThatDiesAtTheEndOfAnUndoLeavesWordOfTheFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-enabled")
		w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
		w.label("all-1g.10gb")
		w.passes("a journal", func() bool { return w.node().Annotations[config.AnnotationJournal] != "" })
		w.settings.DevicePlugin.PodSelector = nil
		w.restart()
		died, revive := w.killAtPatch(func(patch string) bool { return strings.Contains(patch, `"`+config.AnnotationJournal+`":null`) }, true)
		w.passes("a release", died)
		calls := w.gpus.Calls()[gpusim.CreateGpuInstanceWithPlacement]
		revive()
		w.expectGivenBack()
		w.settle(config.ReasonHardwareFailure)
		w.spend(10 * time.Minute)
		if again := w.gpus.Calls()[gpusim.CreateGpuInstanceWithPlacement]; again != calls {
			t.Errorf("the failed request was tried again, with %d calls", again-calls)
		}
	})
}
