package rollout

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

func apply(more ...string) []string {
	return append([]string{"apply", "-l", "pool=research", "--profile", "research"}, more...)
}

func TestARollOutIsFollowedToItsEnd(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start(apply("--wait")...)
		w.Says("gpu-1", agenttest.Research(api.PhaseWaiting, config.ReasonAwaitingWindow, 20), "research: the next window opens at 2000-01-01 22:00:00Z")
		w.Says("gpu-2", agenttest.Research(api.PhaseWaiting, config.ReasonAwaitingSlot, 20), "research: 1 of 1 nodes of pool research is unavailable: gpu-1")
		w.Says("gpu-1", agenttest.Research(api.PhaseDraining, config.ReasonEvicting, 18), "research: waiting for pods: team/trainer")
		w.Says("gpu-1", agenttest.Research(api.PhaseDraining, config.ReasonEvicting, 17), "research: waiting for pods: team/other") // no line
		w.Says("gpu-1", agenttest.Research(api.PhaseVerifying, config.ReasonAwaitingCapacity, 1), "research: 1 step left; done: uncordon")
		w.Says("gpu-1", agenttest.Done(), "research: nvidia.com/gpu 24 = 8 x 3 time-slicing")
		w.Says("gpu-2", agenttest.Done(), "research: nvidia.com/gpu 24 = 8 x 3 time-slicing")
		w.Is(`
gpu-1, gpu-2  labelled gpuslice.io/profile=research: begins at once
00:00:00Z  gpu-1  Asked  waiting for its agent to see the label
00:00:00Z  gpu-2  Asked  waiting for its agent to see the label
00:00:01Z  gpu-1  Waiting  AwaitingWindow: research: the next window opens at 2000-01-01 22:00:00Z
00:00:02Z  gpu-2  Waiting  AwaitingSlot: research: 1 of 1 nodes of pool research is unavailable: gpu-1
00:00:03Z  gpu-1  Draining  Evicting: research: waiting for pods: team/trainer
00:00:05Z  gpu-1  Verifying  AwaitingCapacity: research: 1 step left; done: uncordon
00:00:06Z  gpu-1  Converged  research: nvidia.com/gpu 24 = 8 x 3 time-slicing
00:00:07Z  gpu-2  Converged  research: nvidia.com/gpu 24 = 8 x 3 time-slicing
profile research: 2 of 2 nodes converged
`, 0)
		for _, name := range []string{"gpu-1", "gpu-2"} {
			if label := w.Node(name).Labels[config.LabelProfile]; label != "research" {
				t.Errorf("%s has the label %q", name, label)
			}
		}
		if label := w.Node("other").Labels[config.LabelProfile]; label != "" {
			t.Errorf("a node that was not selected has the label %q", label)
		}
	}, agenttest.GPU("gpu-2"), agenttest.GPU("gpu-1"), agenttest.Bare("other"))
}

func TestARollOutThatFailsSomewhereSaysWhere(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start(apply("--wait")...)
		w.Says("gpu-1", agenttest.Research(api.PhaseStalled, config.ReasonImpossibleGeometry, 0), "research: GPU 0: none fits")
		if !w.Runs() {
			t.Fatal("one failed node ends the wait for the other")
		}
		w.Says("gpu-2", agenttest.Research(api.PhaseRollingBack, config.ReasonRollingBack, 4), "going back")
		w.Says("gpu-2", agenttest.Done(), "research: as asked")
		w.Is(`
gpu-1, gpu-2  labelled gpuslice.io/profile=research: begins at once
00:00:00Z  gpu-1  Asked  waiting for its agent to see the label
00:00:00Z  gpu-2  Asked  waiting for its agent to see the label
00:00:01Z  gpu-1  Failed  ImpossibleGeometry: research: GPU 0: none fits
00:00:02Z  gpu-2  RollingBack  going back
00:00:03Z  gpu-2  Converged  research: as asked
gpu-1: Failed: ImpossibleGeometry: research: GPU 0: none fits
profile research: 1 of 2 nodes converged, 1 failed
error: profile research failed on 1 node; to take the label back:
  kubectl gpuslice apply gpu-1 --none
`, 1)
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
}

func TestANodeThatHasTheConfigIsDoneAtOnce(t *testing.T) {
	n := func() *corev1.Node {
		n := agenttest.Says(agenttest.GPUNode("gpu-1"), agenttest.Done(), "research: as asked")
		n.Labels[config.LabelProfile] = "research"
		return n
	}
	inWorld(t, func(w *world) {
		w.Start(apply("--wait")...)
		w.Is(`
gpu-1  has label gpuslice.io/profile=research already: Converged: research: as asked
00:00:00Z  gpu-1  Converged  research: as asked
profile research: 1 of 1 node converged
`, 0)
		for _, a := range w.Client.Actions() {
			if a.GetVerb() == "patch" {
				t.Errorf("the node was written to: %v", a)
			}
		}
	}, n)
}

// Who labels a node whose agent does not run has to read so at once; and the former answer would be taken for one to the new label.
func TestALabelOnANodeWhoseAgentIsSilent(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Edit("gpu-1", func(n *corev1.Node) { n.Labels[config.LabelMIGConfigState] = string(config.StateSuccess) })
		<-time.After(20 * time.Minute)
		w.Edit("gpu-2", func(n *corev1.Node) {
			agenttest.Says(n, api.Status{Phase: api.PhaseIdle, Reason: config.ReasonNotRequested}, "no config is asked for")
		})
		w.Start(apply()...)
		w.Is(`
gpu-1  labelled gpuslice.io/profile=research: not known: its agent is silent
gpu-2  labelled gpuslice.io/profile=research: begins at once
warning: the agent of gpu-1 has said nothing for 20m: kubectl get pods -A -l app.kubernetes.io/name=gpuslice --field-selector spec.nodeName=gpu-1
to see what the agents do:
  kubectl gpuslice apply -l pool=research --profile research --wait
`, 0)
		if state, there := w.Node("gpu-1").Labels[config.LabelMIGConfigState]; there {
			t.Errorf("the former answer is left: %s", state)
		}
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
}

// A status that the agent wrote before it saw the label does not count, whatever its name.
func TestAStatusFromBeforeTheLabelIsNotBelieved(t *testing.T) {
	former := func(s api.Status, message string) func() *corev1.Node {
		return func() *corev1.Node { return agenttest.Says(agenttest.GPUNode("gpu-1"), s, message) }
	}
	for name, n := range map[string]func() *corev1.Node{
		"of another config": former(api.Status{
			Desired: "training", Label: config.LabelProfile, Phase: api.PhaseIdle, Reason: config.ReasonConverged,
		}, "training: as asked"),
		"of the same name, by another label": former(api.Status{
			Desired: "research", Label: config.LabelMIGConfig, Phase: api.PhaseIdle, Reason: config.ReasonConverged,
		}, "research: as asked"),
		"of the same profile, which was taken away and set again": former(agenttest.Done(), "research: as asked"),
		"of the same profile, that failed":                        former(agenttest.Research(api.PhaseStalled, config.ReasonHardwareFailure, 0), "it failed"),
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.Start(apply("--wait")...)
				<-time.After(time.Minute)
				if !w.Runs() {
					t.Fatalf("it is taken for done: %s", w.Said)
				}
				w.Says("gpu-1", agenttest.Research(api.PhaseApplying, config.ReasonRepartitioning, 3), "at work")
				w.Says("gpu-1", agenttest.Done(), "research: as asked")
				if said, code := w.Ended(); code != 0 {
					t.Errorf("exit code %d: %s", code, said)
				}
			}, n)
		})
	}
	t.Run("until the agent has looked again", func(t *testing.T) {
		inWorld(t, func(w *world) {
			w.Start(apply("--wait")...)
			<-time.After(time.Minute)
			w.Edit("gpu-1", func(n *corev1.Node) { agenttest.Concludes(n, agenttest.Done(), "research: as asked") }) // a heartbeat
			if said, code := w.Ended(); code != 0 {
				t.Errorf("exit code %d: %s", code, said)
			}
		}, former(agenttest.Done(), "research: as asked"))
	})
}

// The agent writes the status first, and the condition after.
func TestTheMessageOfAFormerRequestIsNotTakenForThatOfThisOne(t *testing.T) {
	n := func() *corev1.Node {
		s := api.Status{Desired: "reserch", Label: config.LabelProfile, Phase: api.PhaseStalled, Reason: config.ReasonUnknownConfig}
		return agenttest.Says(agenttest.GPUNode("gpu-1"), s, "there is no reserch")
	}
	inWorld(t, func(w *world) {
		w.Start(apply("--wait")...)
		<-time.After(time.Second)
		w.Edit("gpu-1", func(n *corev1.Node) {
			agenttest.States(n, agenttest.Research(api.PhaseStalled, config.ReasonUnknownConfig, 0))
		})
		if !w.Runs() {
			t.Fatal("it ends by half of what is said")
		}
		w.Edit("gpu-1", func(n *corev1.Node) {
			agenttest.Concludes(n, agenttest.Research(api.PhaseStalled, config.ReasonUnknownConfig, 0), "there is no research")
		})
		said, code := w.Ended()
		if code != 1 || !strings.Contains(said, "there is no research") || strings.Contains(said, "there is no reserch") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, n)
}

func TestAMIGConfigMayBeJoinedWithOneOfTheDevicePlugin(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start("apply", "gpu-1", "--mig-config", "all-1g.10gb", "--wait")
		s := api.Status{Desired: "all-1g.10gb + slices", Label: config.LabelMIGConfig, Phase: api.PhaseIdle, Reason: config.ReasonConverged}
		w.Edit("gpu-1", func(n *corev1.Node) { n.Labels[config.LabelDevicePluginConfig] = "other" })
		w.Says("gpu-1", s, "all-1g.10gb + slices: as asked")
		if !w.Runs() {
			t.Fatal("a status with another config of the device plugin is believed")
		}
		w.Edit("gpu-1", func(n *corev1.Node) { n.Labels[config.LabelDevicePluginConfig] = "slices" })
		w.Says("gpu-1", s, "all-1g.10gb + slices: as asked")
		if said, code := w.Ended(); code != 0 {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"))
}

// The agent takes both for one request, by the label of the MIG config.
func TestAConfigOfTheDevicePluginIsAskedForAloneOrBesideAMIGConfig(t *testing.T) {
	for desired, label := range map[string]string{
		"slices":               config.LabelDevicePluginConfig,
		"all-1g.10gb + slices": config.LabelMIGConfig,
	} {
		t.Run(desired, func(t *testing.T) {
			inWorld(t, func(w *world) {
				if label == config.LabelMIGConfig {
					w.Edit("gpu-1", func(n *corev1.Node) { n.Labels[label] = "all-1g.10gb" })
				}
				w.Start("apply", "gpu-1", "--device-plugin-config", "slices", "--wait")
				s := api.Status{Desired: desired, Label: label, Phase: api.PhaseIdle, Reason: config.ReasonConverged}
				w.Says("gpu-1", api.Status{Desired: "all-1g.10gb + other", Label: config.LabelMIGConfig, Phase: api.PhaseIdle, Reason: config.ReasonConverged}, "as before")
				if !w.Runs() {
					t.Fatal("a status about another config is believed")
				}
				w.Says("gpu-1", s, desired+": as asked")
				said, code := w.Ended()
				if code != 0 || !strings.Contains(said, "device plugin config slices: 1 of 1 node converged") {
					t.Errorf("exit code %d: %s", code, said)
				}
				if key := w.Node("gpu-1").Labels[config.LabelDevicePluginConfig]; key != "slices" {
					t.Errorf("the label is %q", key)
				}
			}, agenttest.GPU("gpu-1"))
		})
	}
}

// A label that is there already may be older than the agent, which then waits for a user: apply is that user.
func TestApplyAsksAgainForALabelThatIsOlderThanTheAgent(t *testing.T) {
	for reason, want := range map[config.Reason]string{config.ReasonOlderRequest: "gpuslice.io/profile=research", config.ReasonAwaitingWindow: ""} {
		t.Run(string(reason), func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.Edit("gpu-1", func(n *corev1.Node) { n.Labels[config.LabelProfile] = "research" })
				w.Says("gpu-1", agenttest.Research(api.PhaseWaiting, reason, 20), "research: it waits")
				w.Names["gpu-1"] = api.Answer{HeldUp: "to have it applied: kubectl gpuslice apply …", Reason: config.ReasonOlderRequest}
				w.Start(apply("--wait")...)
				if said := w.Said.String(); strings.Contains(said, "held up: OlderRequest") || want != "" && !strings.Contains(said, "begins at once\n") {
					t.Errorf("it says %s", said)
				}
				if got := w.Node("gpu-1").Annotations[config.AnnotationAllowEviction]; got != want {
					t.Errorf("annotation %s is %q, want %q", config.AnnotationAllowEviction, got, want)
				}
				w.Says("gpu-1", agenttest.Done(), "research: as asked")
				if said, code := w.Ended(); code != 0 {
					t.Errorf("exit code %d: %s", code, said)
				}
			}, agenttest.GPU("gpu-1"))
		})
	}
}

// The exit code 0 says that all nodes are as asked.
func TestNodesThatGoAreNotWaitedFor(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start(apply("--wait")...)
		w.Remove("gpu-1")
		again := agenttest.GPUNode("gpu-1") // an autoscaler takes the name again
		again.UID = types.UID("another")
		w.Create(agenttest.Says(again, agenttest.Done(), "research: as asked"))
		w.Says("gpu-2", agenttest.Done(), "research: as asked")
		w.Is(`
gpu-1, gpu-2  labelled gpuslice.io/profile=research: begins at once
00:00:00Z  gpu-1  Asked  waiting for its agent to see the label
00:00:00Z  gpu-2  Asked  waiting for its agent to see the label
00:00:00Z  gpu-1  Deleted  the node was deleted, and is not waited for
00:00:01Z  gpu-2  Converged  research: as asked
profile research: 1 of 2 nodes converged, 1 deleted
error: profile research is not on 1 node: deleted in between
`, 1)
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
	t.Run("before the label", func(t *testing.T) {
		inWorld(t, func(w *world) {
			w.Client.PrependReactor("patch", "nodes", func(k8stesting.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewNotFound(schema.GroupResource{Resource: "nodes"}, "gpu-1")
			})
			w.Start(apply("--wait")...)
			w.Is(`
gpu-1  was deleted
profile research: 0 of 1 node converged, 1 deleted
error: profile research is not on 1 node: deleted in between
`, 1)
		}, agenttest.GPU("gpu-1"))
	})
}

func TestALabelThatOthersChangeIsAFailure(t *testing.T) {
	for name, test := range map[string]struct {
		change func(labels map[string]string)
		want   string
	}{
		"to another name": {func(l map[string]string) { l[config.LabelProfile] = "training" }, `label gpuslice.io/profile is "training" now: another user or tool has changed it`},
		"by removing it":  {func(l map[string]string) { delete(l, config.LabelProfile) }, "label gpuslice.io/profile was removed by another user or tool"},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.Start(apply("--wait")...)
				w.Edit("gpu-1", func(n *corev1.Node) { test.change(n.Labels) })
				if said, code := w.Ended(); code != 1 || !strings.Contains(said, "gpu-1  Failed  "+test.want) {
					t.Errorf("exit code %d: %s", code, said)
				}
			}, agenttest.GPU("gpu-1"))
		})
	}
	t.Run("by the label that wins", func(t *testing.T) {
		inWorld(t, func(w *world) {
			w.Start("apply", "gpu-1", "--mig-config", "all-1g.10gb", "--wait")
			w.Edit("gpu-1", func(n *corev1.Node) { n.Labels[config.LabelProfile] = "training" })
			if said, code := w.Ended(); code != 1 || !strings.Contains(said, "gpuslice.io/profile=training, which wins") {
				t.Errorf("exit code %d: %s", code, said)
			}
			said, code := w.Run("apply", "gpu-1", "--mig-config", "all-3g.40gb")
			if code != 1 || !strings.Contains(said, "gpu-1 has label gpuslice.io/profile, which wins over nvidia.com/mig.config, and nothing was labelled") {
				t.Errorf("exit code %d: %s", code, said)
			}
			if label := w.Node("gpu-1").Labels[config.LabelMIGConfig]; label != "all-1g.10gb" {
				t.Errorf("the label is %q", label)
			}
			said, code = w.Run("apply", "gpu-1", "--device-plugin-config", "slices")
			if code != 1 || !strings.Contains(said, "which wins over nvidia.com/device-plugin.config") || strings.Contains(said, "--profile") {
				t.Errorf("exit code %d: %s", code, said)
			}
		}, agenttest.GPU("gpu-1"))
	})
}

func TestCtrlCLeavesTheRollOutRunning(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start("apply", "-l", "pool in (research)", "--profile", "research", "--wait")
		w.Says("gpu-1", agenttest.Research(api.PhaseWaiting, config.ReasonAwaitingWindow, 20), "the window opens at noon")
		w.Stop()
		w.Is(`
gpu-1  labelled gpuslice.io/profile=research: begins at once
00:00:00Z  gpu-1  Asked  waiting for its agent to see the label
00:00:01Z  gpu-1  Waiting  AwaitingWindow: the window opens at noon
gpu-1: Waiting: AwaitingWindow: the window opens at noon
profile research: 0 of 1 node converged, 1 under way
error: interrupted; the roll-out of profile research goes on without this command, on 1 node; to see it again:
  kubectl gpuslice apply -l 'pool in (research)' --profile research --wait
`, 130)
		if label := w.Node("gpu-1").Labels[config.LabelProfile]; label != "research" {
			t.Errorf("the label is %q", label)
		}
	}, agenttest.GPU("gpu-1"))
}

func TestATimeoutHasAnExitCodeOfItsOwn(t *testing.T) {
	inWorld(t, func(w *world) {
		said, code := w.Run(apply("--wait", "--timeout", "90s")...)
		if code != 3 || !strings.Contains(said, "is not on 1 node after 1m30s; the roll-out goes on; to see it again:\n  kubectl gpuslice apply") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"))
	t.Run("but a failure counts for more", func(t *testing.T) {
		inWorld(t, func(w *world) {
			w.Start(apply("--wait", "--timeout", "90s")...)
			w.Says("gpu-1", agenttest.Research(api.PhaseStalled, config.ReasonUnknownConfig, 0), "there is no research")
			if said, code := w.Ended(); code != 1 || !strings.Contains(said, "1 failed, 1 under way") {
				t.Errorf("exit code %d: %s", code, said)
			}
		}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
	})
}

func TestASilentAgentIsNamed(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start(apply("--wait")...)
		<-time.After(3 * time.Minute)
		if said := w.Said.String(); strings.Count(said, "no agent has answered for 2m") != 1 || !w.Runs() {
			t.Errorf("after 3 minutes: %s", said)
		}
		w.Says("gpu-1", agenttest.Research(api.PhaseDraining, config.ReasonEvicting, 20), "at work")
		<-time.After(6 * time.Minute)
		if said := w.Said.String(); strings.Contains(said, "no agent has answered for 7m") {
			t.Errorf("it may say nothing for the time of a heartbeat: %s", said)
		}
		<-time.After(2 * time.Minute)
		if !w.Runs() {
			t.Errorf("an agent that has been there is waited for: %s", w.Said)
		}
		w.Says("gpu-1", agenttest.Done(), "research: as asked")
		if said, code := w.Ended(); code != 0 {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"))
}

func TestANodeWithoutAnAgentIsNamedAndNotWaitedForForEver(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start(apply("--wait")...)
		w.Says("gpu-1", agenttest.Done(), "research: as asked")
		said, code := w.Ended()
		if code != 1 || !strings.Contains(said, "warning: no agent has ever reported on cpu-1:") ||
			!strings.Contains(said, "00:02:00Z  cpu-1  Failed  no agent has answered for 2m0s; see whether its pod runs: kubectl get pods -A") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"), agenttest.Bare("cpu-1", "pool", "research"))
}

// An agent that cannot look at its node, as without a driver, writes no status.
func TestWhatTheConditionAloneSaysIsShown(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start(apply("--wait")...)
		away := api.Status{Reason: config.ReasonDriverNotLoaded}
		w.Edit("gpu-1", func(n *corev1.Node) { agenttest.Concludes(n, away, "the driver is not loaded") })
		w.Says("gpu-1", agenttest.Research(api.PhaseApplying, config.ReasonRepartitioning, 5), "at work")
		<-time.After(time.Second)
		w.Edit("gpu-1", func(n *corev1.Node) { agenttest.Concludes(n, away, "the driver is away again") })
		w.Edit("gpu-1", func(n *corev1.Node) {
			agenttest.Concludes(n, api.Status{Reason: config.ReasonJournalUnreadable}, "the journal is of version 9")
		})
		w.Is(`
gpu-1  labelled gpuslice.io/profile=research: begins at once
00:00:00Z  gpu-1  Asked  waiting for its agent to see the label
00:00:00Z  gpu-1  Waiting  DriverNotLoaded: the driver is not loaded
00:00:01Z  gpu-1  Applying  Repartitioning: at work
00:00:02Z  gpu-1  Waiting  DriverNotLoaded: the driver is away again
00:00:02Z  gpu-1  Failed  JournalUnreadable: the journal is of version 9
gpu-1: Failed: JournalUnreadable: the journal is of version 9
profile research: 0 of 1 node converged, 1 failed
error: profile research failed on 1 node; to take the label back:
  kubectl gpuslice apply -l pool=research --none
`, 1)
	}, agenttest.GPU("gpu-1"))
}

// The agent writes condition and status one after the other. The command does not report a condition before its status, unless that never comes.
func TestAConditionWaitsForItsStatus(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start(apply("--wait")...)
		evicting := agenttest.Research(api.PhaseDraining, config.ReasonEvicting, 20)
		w.Edit("gpu-1", func(n *corev1.Node) { agenttest.Concludes(n, evicting, "waiting for pods") })
		w.Says("gpu-1", evicting, "waiting for pods")
		<-time.After(5 * time.Second)
		w.Edit("gpu-1", func(n *corev1.Node) {
			agenttest.Concludes(n, api.Status{Reason: config.ReasonHostRecordUnavailable}, "the disk does not answer")
		})
		<-time.After(5 * time.Second)
		w.Says("gpu-1", agenttest.Done(), "research: as asked")
		w.Is(`
gpu-1  labelled gpuslice.io/profile=research: begins at once
00:00:00Z  gpu-1  Asked  waiting for its agent to see the label
00:00:01Z  gpu-1  Draining  Evicting: waiting for pods
00:00:08Z  gpu-1  Waiting  HostRecordUnavailable: the disk does not answer
00:00:12Z  gpu-1  Converged  research: as asked
profile research: 1 of 1 node converged
`, 0)
	}, agenttest.GPU("gpu-1"))
}

func TestALostWatchIsTakenUpAgain(t *testing.T) {
	inWorld(t, func(w *world) {
		var mended, given atomic.Bool
		lost := watch.NewRaceFreeFake()
		w.Client.PrependWatchReactor("nodes", func(k8stesting.Action) (bool, watch.Interface, error) {
			switch {
			case mended.Load():
				return false, nil, nil
			case given.Swap(true):
				return true, nil, agenttest.ErrRefused
			default:
				return true, lost, nil
			}
		})
		w.Start(apply("--wait")...)
		lost.Stop()
		<-time.After(time.Minute) // client-go tries again after half of that
		w.Says("gpu-1", agenttest.Done(), "research: as asked")
		mended.Store(true)
		said, code := w.Ended()
		if code != 0 || !strings.Contains(said, "watching nodes: connection refused; trying again") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"))
}

func TestAUserWhoMayNotWatchGetsAnError(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Client.PrependWatchReactor("nodes", func(k8stesting.Action) (bool, watch.Interface, error) {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", nil)
		})
		said, code := w.Run(apply("--wait")...)
		if code != 1 || !strings.Contains(said, "error: watching nodes: nodes is forbidden") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"))
}

func TestAWriteThatFailsSaysHowManyNodesAreLabelled(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Client.PrependReactor("patch", "nodes", func(a k8stesting.Action) (bool, runtime.Object, error) {
			switch p, _ := a.(k8stesting.PatchAction); p.GetName() {
			case "gpu-2":
				return true, nil, apierrors.NewNotFound(schema.GroupResource{Resource: "nodes"}, "gpu-2")
			case "gpu-3":
				return true, nil, agenttest.ErrRefused
			default:
				return false, nil, nil
			}
		})
		w.Start(apply()...)
		w.Is(`
warning: writing to node gpu-3: connection refused; to remove the request: kubectl annotate node gpu-3 gpuslice.io/preview-
gpu-1  labelled gpuslice.io/profile=research: begins at once
gpu-2  was deleted
error: writing to node gpu-3: connection refused; 1 of 3 nodes have the label; run the same command to go on
`, 1)
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"), agenttest.GPU("gpu-3"))
}

func TestWithoutWaitItSaysHowToSeeTheRollOut(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start(apply()...)
		w.Is(`
gpu-1  labelled gpuslice.io/profile=research: begins at once
to see what the agents do:
  kubectl gpuslice apply -l pool=research --profile research --wait
`, 0)
	}, agenttest.GPU("gpu-1"))
}

func TestWhatCannotBeMeantIsRefused(t *testing.T) {
	for want, args := range map[string][]string{
		`no node fits the selector "pool=none"; see the nodes' labels by: kubectl get nodes --show-labels`: {"apply", "-l", "pool=none", "--profile", "research"},
		`reading the selector "pool in research"`:                                                          {"apply", "-l", "pool in research", "--profile", "research"},
		"name nodes, or select them with -l":                                                               {"apply", "--profile", "research"},
		"name nodes or select them with -l, not both":                                                      {"apply", "gpu-1", "-l", "a=b", "--profile", "research"},
		"there is no node gpu-8, gpu-9; see kubectl get nodes":                                             {"apply", "gpu-8", "gpu-1", "node/gpu-9", "--profile", "research"},
		"say what to ask for: --profile NAME, --mig-config NAME, --device-plugin-config NAME or --none":    {"apply", "gpu-1"},
		`"my profile" can be no value of label gpuslice.io/profile: `:                                      {"apply", "gpu-1", "--profile", "my profile"},
		"none of the others can be":                                                                        {"apply", "gpu-1", "--profile", "a", "--mig-config", "b"},
	} {
		inWorld(t, func(w *world) {
			said, code := w.Run(args...)
			if code != 1 || !strings.Contains(said, "error: ") || !strings.Contains(said, want) {
				t.Errorf("%v: exit code %d: %s, want %q", args, code, said, want)
			}
			if label := w.Node("gpu-1").Labels[config.LabelProfile]; label != "" {
				t.Errorf("%v: the node is labelled %q", args, label)
			}
		}, agenttest.GPU("gpu-1"))
	}
}

// The agent counts one wait to several phases, as the step has it that comes next.
func TestAWaitForTheSameIsOneLine(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start(apply("--wait")...)
		w.Says("gpu-1", agenttest.Research(api.PhaseWaiting, config.ReasonConfiguringPlugin, 9), "research: waiting for kubelet to show the key")
		w.Says("gpu-1", agenttest.Research(api.PhaseApplying, config.ReasonConfiguringPlugin, 9), "research: waiting for kubelet to show the key")
		w.Says("gpu-1", agenttest.Research(api.PhaseApplying, config.ReasonEvictionBlocked, 9), "research: PDB web/api")
		w.Says("gpu-1", agenttest.Research(api.PhaseRollingBack, config.ReasonEvictionBlocked, 9), "going back: PDB web/api")
		w.Says("gpu-1", agenttest.Done(), "research: as asked")
		w.Is(`
gpu-1  labelled gpuslice.io/profile=research: begins at once
00:00:00Z  gpu-1  Asked  waiting for its agent to see the label
00:00:01Z  gpu-1  Waiting  ConfiguringPlugin: research: waiting for kubelet to show the key
00:00:03Z  gpu-1  Applying  EvictionBlocked: research: PDB web/api
00:00:04Z  gpu-1  RollingBack  EvictionBlocked: going back: PDB web/api
00:00:05Z  gpu-1  Converged  research: as asked
profile research: 1 of 1 node converged
`, 0)
	}, agenttest.GPU("gpu-1"))
}

// What is allowed is for the change that the same write asks for.
func TestWhatMayBeLostIsAllowedWithTheLabel(t *testing.T) {
	for name, c := range map[string]struct {
		flags   []string
		before  string // what the node allows already
		label   string // that it has already
		allowed string
	}{
		"nothing":                        {},
		"bare pods":                      {flags: []string{"--force-unmanaged"}, allowed: "gpuslice.io/profile=research unmanagedPods"},
		"both":                           {flags: []string{"--force-unmanaged", "--delete-emptydir-data"}, allowed: "gpuslice.io/profile=research unmanagedPods emptyDir"},
		"files, for a change that waits": {flags: []string{"--delete-emptydir-data"}, label: "research", allowed: "gpuslice.io/profile=research emptyDir"},
		"what was allowed before goes":   {before: "gpuslice.io/profile=other emptyDir"},
		"what is allowed for it stays":   {before: "gpuslice.io/profile=research emptyDir", allowed: "gpuslice.io/profile=research emptyDir"},
	} {
		t.Run(name, func(t *testing.T) {
			node := agenttest.GPUNode("gpu-1")
			if c.label != "" {
				metav1.SetMetaDataLabel(&node.ObjectMeta, config.LabelProfile, c.label)
			}
			if c.before != "" {
				metav1.SetMetaDataAnnotation(&node.ObjectMeta, config.AnnotationAllowEviction, c.before)
			}
			inWorld(t, func(w *world) {
				if said, code := w.Run(apply(c.flags...)...); code != 0 {
					t.Errorf("exit code %d: %s", code, said)
				}
				if got := w.Node("gpu-1"); got.Annotations[config.AnnotationAllowEviction] != c.allowed || got.Labels[config.LabelProfile] != "research" {
					t.Errorf("the node has labels %v and annotations %v", got.Labels, got.Annotations)
				}
			}, func() *corev1.Node { return node })
		})
	}
}
