package main

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
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config"
)

func apply(more ...string) []string {
	return append([]string{"apply", "-l", "pool=research", "--profile", "research"}, more...)
}

func TestARollOutIsFollowedToItsEnd(t *testing.T) {
	inWorld(t, func(w *world) {
		w.start(apply("--wait")...)
		w.says("gpu-1", research(api.PhaseWaiting, config.ReasonAwaitingWindow, 20), "research: the next window opens at 2000-01-01 22:00:00Z")
		w.says("gpu-2", research(api.PhaseWaiting, config.ReasonAwaitingSlot, 20), "research: 1 of 1 nodes of pool research is unavailable: gpu-1")
		w.says("gpu-1", research(api.PhaseDraining, config.ReasonEvicting, 18), "research: waiting for pods: team/trainer")
		w.says("gpu-1", research(api.PhaseDraining, config.ReasonEvicting, 17), "research: waiting for pods: team/other") // no line
		w.says("gpu-1", research(api.PhaseVerifying, config.ReasonAwaitingCapacity, 1), "research: 1 step left; done: uncordon")
		w.says("gpu-1", done(), "research: nvidia.com/gpu 24 = 8 x 3 time-slicing")
		w.says("gpu-2", done(), "research: nvidia.com/gpu 24 = 8 x 3 time-slicing")
		w.is(`
gpu-1  labelled gpuslice.io/profile=research
gpu-2  labelled gpuslice.io/profile=research
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
			if label := w.node(name).Labels[config.LabelProfile]; label != "research" {
				t.Errorf("%s has the label %q", name, label)
			}
		}
		if label := w.node("other").Labels[config.LabelProfile]; label != "" {
			t.Errorf("a node that was not selected has the label %q", label)
		}
	}, gpu("gpu-2"), gpu("gpu-1"), bare("other"))
}

func TestARollOutThatFailsSomewhereSaysWhere(t *testing.T) {
	inWorld(t, func(w *world) {
		w.start(apply("--wait")...)
		w.says("gpu-1", research(api.PhaseStalled, config.ReasonImpossibleGeometry, 0), "research: GPU 0: none fits")
		if !w.runs() {
			t.Fatal("one failed node ends the wait for the other")
		}
		w.says("gpu-2", research(api.PhaseRollingBack, config.ReasonRollingBack, 4), "going back")
		w.says("gpu-2", done(), "research: as asked")
		w.is(`
gpu-1  labelled gpuslice.io/profile=research
gpu-2  labelled gpuslice.io/profile=research
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
	}, gpu("gpu-1"), gpu("gpu-2"))
}

func TestANodeThatHasTheConfigIsDoneAtOnce(t *testing.T) {
	n := func() *corev1.Node {
		n := says(gpuNode("gpu-1"), done(), "research: as asked")
		n.Labels[config.LabelProfile] = "research"
		return n
	}
	inWorld(t, func(w *world) {
		w.start(apply("--wait")...)
		w.is(`
gpu-1  has label gpuslice.io/profile=research already
00:00:00Z  gpu-1  Converged  research: as asked
profile research: 1 of 1 node converged
`, 0)
		for _, a := range w.client.Actions() {
			if a.GetVerb() == "patch" {
				t.Errorf("the node was written to: %v", a)
			}
		}
	}, n)
}

// Who labels a node whose agent does not run has to read so at once; and the former answer would be taken for one to the new label.
func TestALabelOnANodeWhoseAgentIsSilent(t *testing.T) {
	inWorld(t, func(w *world) {
		w.edit("gpu-1", func(n *corev1.Node) { n.Labels[config.LabelMIGConfigState] = string(config.StateSuccess) })
		<-time.After(20 * time.Minute)
		w.edit("gpu-2", func(n *corev1.Node) {
			says(n, api.Status{Phase: api.PhaseIdle, Reason: config.ReasonNotRequested}, "no config is asked for")
		})
		w.start(apply()...)
		w.is(`
gpu-1  labelled gpuslice.io/profile=research
gpu-2  labelled gpuslice.io/profile=research
warning: the agent of gpu-1 has said nothing for 20m: kubectl get pods -A -l app.kubernetes.io/name=gpuslice --field-selector spec.nodeName=gpu-1
the agents do the rest; to see it:
  kubectl gpuslice apply -l pool=research --profile research --wait
`, 0)
		if state, there := w.node("gpu-1").Labels[config.LabelMIGConfigState]; there {
			t.Errorf("the former answer is left: %s", state)
		}
	}, gpu("gpu-1"), gpu("gpu-2"))
}

// A status that the agent wrote before it saw the label does not count, whatever its name.
func TestAStatusFromBeforeTheLabelIsNotBelieved(t *testing.T) {
	former := func(s api.Status, message string) func() *corev1.Node {
		return func() *corev1.Node { return says(gpuNode("gpu-1"), s, message) }
	}
	for name, n := range map[string]func() *corev1.Node{
		"of another config": former(api.Status{
			Desired: "training", Label: config.LabelProfile, Phase: api.PhaseIdle, Reason: config.ReasonConverged,
		}, "training: as asked"),
		"of the same name, by another label": former(api.Status{
			Desired: "research", Label: config.LabelMIGConfig, Phase: api.PhaseIdle, Reason: config.ReasonConverged,
		}, "research: as asked"),
		"of the same profile, which was taken away and set again": former(done(), "research: as asked"),
		"of the same profile, that failed":                        former(research(api.PhaseStalled, config.ReasonHardwareFailure, 0), "it failed"),
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.start(apply("--wait")...)
				<-time.After(time.Minute)
				if !w.runs() {
					t.Fatalf("it is taken for done: %s", w.said)
				}
				w.says("gpu-1", research(api.PhaseApplying, config.ReasonRepartitioning, 3), "at work")
				w.says("gpu-1", done(), "research: as asked")
				if said, code := w.ended(); code != 0 {
					t.Errorf("exit code %d: %s", code, said)
				}
			}, n)
		})
	}
	t.Run("until the agent has looked again", func(t *testing.T) {
		inWorld(t, func(w *world) {
			w.start(apply("--wait")...)
			<-time.After(time.Minute)
			w.edit("gpu-1", func(n *corev1.Node) { concludes(n, done(), "research: as asked") }) // a heartbeat
			if said, code := w.ended(); code != 0 {
				t.Errorf("exit code %d: %s", code, said)
			}
		}, former(done(), "research: as asked"))
	})
}

// The agent writes the status first, and the condition after.
func TestTheMessageOfAFormerRequestIsNotTakenForThatOfThisOne(t *testing.T) {
	n := func() *corev1.Node {
		s := api.Status{Desired: "reserch", Label: config.LabelProfile, Phase: api.PhaseStalled, Reason: config.ReasonUnknownConfig}
		return says(gpuNode("gpu-1"), s, "there is no reserch")
	}
	inWorld(t, func(w *world) {
		w.start(apply("--wait")...)
		<-time.After(time.Second)
		w.edit("gpu-1", func(n *corev1.Node) { states(n, research(api.PhaseStalled, config.ReasonUnknownConfig, 0)) })
		if !w.runs() {
			t.Fatal("it ends by half of what is said")
		}
		w.edit("gpu-1", func(n *corev1.Node) {
			concludes(n, research(api.PhaseStalled, config.ReasonUnknownConfig, 0), "there is no research")
		})
		said, code := w.ended()
		if code != 1 || !strings.Contains(said, "there is no research") || strings.Contains(said, "there is no reserch") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, n)
}

func TestAMIGConfigMayBeJoinedWithOneOfTheDevicePlugin(t *testing.T) {
	inWorld(t, func(w *world) {
		w.start("apply", "gpu-1", "--mig-config", "all-1g.10gb", "--wait")
		s := api.Status{Desired: "all-1g.10gb + slices", Label: config.LabelMIGConfig, Phase: api.PhaseIdle, Reason: config.ReasonConverged}
		w.edit("gpu-1", func(n *corev1.Node) { n.Labels[config.LabelDevicePluginConfig] = "other" })
		w.says("gpu-1", s, "all-1g.10gb + slices: as asked")
		if !w.runs() {
			t.Fatal("a status with another config of the device plugin is believed")
		}
		w.edit("gpu-1", func(n *corev1.Node) { n.Labels[config.LabelDevicePluginConfig] = "slices" })
		w.says("gpu-1", s, "all-1g.10gb + slices: as asked")
		if said, code := w.ended(); code != 0 {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, gpu("gpu-1"))
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
					w.edit("gpu-1", func(n *corev1.Node) { n.Labels[label] = "all-1g.10gb" })
				}
				w.start("apply", "gpu-1", "--device-plugin-config", "slices", "--wait")
				s := api.Status{Desired: desired, Label: label, Phase: api.PhaseIdle, Reason: config.ReasonConverged}
				w.says("gpu-1", api.Status{Desired: "all-1g.10gb + other", Label: config.LabelMIGConfig, Phase: api.PhaseIdle, Reason: config.ReasonConverged}, "as before")
				if !w.runs() {
					t.Fatal("a status about another config is believed")
				}
				w.says("gpu-1", s, desired+": as asked")
				said, code := w.ended()
				if code != 0 || !strings.Contains(said, "device plugin config slices: 1 of 1 node converged") {
					t.Errorf("exit code %d: %s", code, said)
				}
				if key := w.node("gpu-1").Labels[config.LabelDevicePluginConfig]; key != "slices" {
					t.Errorf("the label is %q", key)
				}
			}, gpu("gpu-1"))
		})
	}
}

func TestNodesThatGoAreNotWaitedFor(t *testing.T) {
	inWorld(t, func(w *world) {
		w.start(apply("--wait")...)
		w.remove("gpu-1")
		again := gpuNode("gpu-1") // an autoscaler takes the name again
		again.UID = types.UID("another")
		w.create(says(again, done(), "research: as asked"))
		w.says("gpu-2", done(), "research: as asked")
		w.is(`
gpu-1  labelled gpuslice.io/profile=research
gpu-2  labelled gpuslice.io/profile=research
00:00:00Z  gpu-1  Asked  waiting for its agent to see the label
00:00:00Z  gpu-2  Asked  waiting for its agent to see the label
00:00:00Z  gpu-1  Deleted  the node was deleted, and is not waited for
00:00:01Z  gpu-2  Converged  research: as asked
profile research: 1 of 2 nodes converged, 1 deleted
`, 0)
	}, gpu("gpu-1"), gpu("gpu-2"))
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
				w.start(apply("--wait")...)
				w.edit("gpu-1", func(n *corev1.Node) { test.change(n.Labels) })
				if said, code := w.ended(); code != 1 || !strings.Contains(said, "gpu-1  Failed  "+test.want) {
					t.Errorf("exit code %d: %s", code, said)
				}
			}, gpu("gpu-1"))
		})
	}
	t.Run("by the label that wins", func(t *testing.T) {
		inWorld(t, func(w *world) {
			w.start("apply", "gpu-1", "--mig-config", "all-1g.10gb", "--wait")
			w.edit("gpu-1", func(n *corev1.Node) { n.Labels[config.LabelProfile] = "training" })
			if said, code := w.ended(); code != 1 || !strings.Contains(said, "gpuslice.io/profile=training, which wins") {
				t.Errorf("exit code %d: %s", code, said)
			}
			said, code := w.run("apply", "gpu-1", "--mig-config", "all-3g.40gb")
			if code != 1 || !strings.Contains(said, "gpu-1 has label gpuslice.io/profile, which wins over nvidia.com/mig.config, and nothing was labelled") {
				t.Errorf("exit code %d: %s", code, said)
			}
			if label := w.node("gpu-1").Labels[config.LabelMIGConfig]; label != "all-1g.10gb" {
				t.Errorf("the label is %q", label)
			}
			said, code = w.run("apply", "gpu-1", "--device-plugin-config", "slices")
			if code != 1 || !strings.Contains(said, "which wins over nvidia.com/device-plugin.config") || strings.Contains(said, "--profile") {
				t.Errorf("exit code %d: %s", code, said)
			}
		}, gpu("gpu-1"))
	})
}

func TestCtrlCLeavesTheRollOutRunning(t *testing.T) {
	inWorld(t, func(w *world) {
		w.start("apply", "-l", "pool in (research)", "--profile", "research", "--wait")
		w.says("gpu-1", research(api.PhaseWaiting, config.ReasonAwaitingWindow, 20), "the window opens at noon")
		w.stop()
		w.is(`
gpu-1  labelled gpuslice.io/profile=research
00:00:00Z  gpu-1  Asked  waiting for its agent to see the label
00:00:01Z  gpu-1  Waiting  AwaitingWindow: the window opens at noon
gpu-1: Waiting: AwaitingWindow: the window opens at noon
profile research: 0 of 1 node converged, 1 under way
error: interrupted; the roll-out of profile research goes on without this command, on 1 node; to see it again:
  kubectl gpuslice apply -l 'pool in (research)' --profile research --wait
`, 130)
		if label := w.node("gpu-1").Labels[config.LabelProfile]; label != "research" {
			t.Errorf("the label is %q", label)
		}
	}, gpu("gpu-1"))
}

func TestATimeoutHasAnExitCodeOfItsOwn(t *testing.T) {
	inWorld(t, func(w *world) {
		said, code := w.run(apply("--wait", "--timeout", "90s")...)
		if code != 3 || !strings.Contains(said, "is not on 1 node after 1m30s; the roll-out goes on; to see it again:\n  kubectl gpuslice apply") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, gpu("gpu-1"))
	t.Run("but a failure counts for more", func(t *testing.T) {
		inWorld(t, func(w *world) {
			w.start(apply("--wait", "--timeout", "90s")...)
			w.says("gpu-1", research(api.PhaseStalled, config.ReasonUnknownConfig, 0), "there is no research")
			if said, code := w.ended(); code != 1 || !strings.Contains(said, "1 failed, 1 under way") {
				t.Errorf("exit code %d: %s", code, said)
			}
		}, gpu("gpu-1"), gpu("gpu-2"))
	})
}

func TestASilentAgentIsNamed(t *testing.T) {
	inWorld(t, func(w *world) {
		w.start(apply("--wait")...)
		<-time.After(3 * time.Minute)
		if said := w.said.String(); strings.Count(said, "no agent has answered for 2m") != 1 || !w.runs() {
			t.Errorf("after 3 minutes: %s", said)
		}
		w.says("gpu-1", research(api.PhaseDraining, config.ReasonEvicting, 20), "at work")
		<-time.After(6 * time.Minute)
		if said := w.said.String(); strings.Contains(said, "no agent has answered for 7m") {
			t.Errorf("it may say nothing for the time of a heartbeat: %s", said)
		}
		<-time.After(2 * time.Minute)
		if !w.runs() {
			t.Errorf("an agent that has been there is waited for: %s", w.said)
		}
		w.says("gpu-1", done(), "research: as asked")
		if said, code := w.ended(); code != 0 {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, gpu("gpu-1"))
}

func TestANodeWithoutAnAgentIsNamedAndNotWaitedForForEver(t *testing.T) {
	inWorld(t, func(w *world) {
		w.start(apply("--wait")...)
		w.says("gpu-1", done(), "research: as asked")
		said, code := w.ended()
		if code != 1 || !strings.Contains(said, "warning: no agent has ever said anything of cpu-1:") ||
			!strings.Contains(said, "00:02:00Z  cpu-1  Failed  no agent has answered for 2m0s; see whether its pod runs: kubectl get pods -A") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, gpu("gpu-1"), bare("cpu-1", "pool", "research"))
}

// An agent that cannot look at its node, as without a driver, writes no status.
func TestWhatTheConditionAloneSaysIsShown(t *testing.T) {
	inWorld(t, func(w *world) {
		w.start(apply("--wait")...)
		away := api.Status{Reason: config.ReasonDriverNotLoaded}
		w.edit("gpu-1", func(n *corev1.Node) { concludes(n, away, "the driver is not loaded") })
		w.says("gpu-1", research(api.PhaseApplying, config.ReasonRepartitioning, 5), "at work")
		<-time.After(time.Second)
		w.edit("gpu-1", func(n *corev1.Node) { concludes(n, away, "the driver is away again") })
		w.edit("gpu-1", func(n *corev1.Node) {
			concludes(n, api.Status{Reason: config.ReasonJournalUnreadable}, "the journal is of version 9")
		})
		w.is(`
gpu-1  labelled gpuslice.io/profile=research
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
	}, gpu("gpu-1"))
}

// The agent writes condition and status one after the other. The command does not report a condition before its status, unless that never comes.
func TestAConditionWaitsForItsStatus(t *testing.T) {
	inWorld(t, func(w *world) {
		w.start(apply("--wait")...)
		evicting := research(api.PhaseDraining, config.ReasonEvicting, 20)
		w.edit("gpu-1", func(n *corev1.Node) { concludes(n, evicting, "waiting for pods") })
		w.says("gpu-1", evicting, "waiting for pods")
		<-time.After(5 * time.Second)
		w.edit("gpu-1", func(n *corev1.Node) {
			concludes(n, api.Status{Reason: config.ReasonHostRecordUnavailable}, "the disk does not answer")
		})
		<-time.After(5 * time.Second)
		w.says("gpu-1", done(), "research: as asked")
		w.is(`
gpu-1  labelled gpuslice.io/profile=research
00:00:00Z  gpu-1  Asked  waiting for its agent to see the label
00:00:01Z  gpu-1  Draining  Evicting: waiting for pods
00:00:08Z  gpu-1  Waiting  HostRecordUnavailable: the disk does not answer
00:00:12Z  gpu-1  Converged  research: as asked
profile research: 1 of 1 node converged
`, 0)
	}, gpu("gpu-1"))
}

func TestALostWatchIsTakenUpAgain(t *testing.T) {
	inWorld(t, func(w *world) {
		var mended, given atomic.Bool
		lost := watch.NewRaceFreeFake()
		w.client.PrependWatchReactor("nodes", func(k8stesting.Action) (bool, watch.Interface, error) {
			switch {
			case mended.Load():
				return false, nil, nil
			case given.Swap(true):
				return true, nil, errRefused
			default:
				return true, lost, nil
			}
		})
		w.start(apply("--wait")...)
		lost.Stop()
		<-time.After(time.Minute) // client-go tries again after half of that
		w.says("gpu-1", done(), "research: as asked")
		mended.Store(true)
		said, code := w.ended()
		if code != 0 || !strings.Contains(said, "watching nodes: connection refused; trying again") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, gpu("gpu-1"))
}

func TestAUserWhoMayNotWatchGetsAnError(t *testing.T) {
	inWorld(t, func(w *world) {
		w.client.PrependWatchReactor("nodes", func(k8stesting.Action) (bool, watch.Interface, error) {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", nil)
		})
		said, code := w.run(apply("--wait")...)
		if code != 1 || !strings.Contains(said, "error: watching nodes: nodes is forbidden") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, gpu("gpu-1"))
}

func TestAWriteThatFailsSaysHowManyNodesAreLabelled(t *testing.T) {
	inWorld(t, func(w *world) {
		w.client.PrependReactor("patch", "nodes", func(a k8stesting.Action) (bool, runtime.Object, error) {
			switch p, _ := a.(k8stesting.PatchAction); p.GetName() {
			case "gpu-2":
				return true, nil, apierrors.NewNotFound(schema.GroupResource{Resource: "nodes"}, "gpu-2")
			case "gpu-3":
				return true, nil, errRefused
			default:
				return false, nil, nil
			}
		})
		w.start(apply()...)
		w.is(`
gpu-1  labelled gpuslice.io/profile=research
gpu-2  was deleted
error: writing to node gpu-3: connection refused; 1 of 3 nodes have the label; the same command goes on from there
`, 1)
	}, gpu("gpu-1"), gpu("gpu-2"), gpu("gpu-3"))
}

func TestWithoutWaitItSaysHowToSeeTheRollOut(t *testing.T) {
	inWorld(t, func(w *world) {
		w.start(apply()...)
		w.is(`
gpu-1  labelled gpuslice.io/profile=research
the agents do the rest; to see it:
  kubectl gpuslice apply -l pool=research --profile research --wait
`, 0)
	}, gpu("gpu-1"))
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
			said, code := w.run(args...)
			if code != 1 || !strings.Contains(said, "error: ") || !strings.Contains(said, want) {
				t.Errorf("%v: exit code %d: %s, want %q", args, code, said, want)
			}
			if label := w.node("gpu-1").Labels[config.LabelProfile]; label != "" {
				t.Errorf("%v: the node is labelled %q", args, label)
			}
		}, gpu("gpu-1"))
	}
}

// The agent counts one wait to several phases, as the step has it that comes next.
func TestAWaitForTheSameIsOneLine(t *testing.T) {
	inWorld(t, func(w *world) {
		w.start(apply("--wait")...)
		w.says("gpu-1", research(api.PhaseWaiting, config.ReasonConfiguringPlugin, 9), "research: waiting for kubelet to show the key")
		w.says("gpu-1", research(api.PhaseApplying, config.ReasonConfiguringPlugin, 9), "research: waiting for kubelet to show the key")
		w.says("gpu-1", research(api.PhaseApplying, config.ReasonEvictionBlocked, 9), "research: PDB web/api")
		w.says("gpu-1", research(api.PhaseRollingBack, config.ReasonEvictionBlocked, 9), "going back: PDB web/api")
		w.says("gpu-1", done(), "research: as asked")
		w.is(`
gpu-1  labelled gpuslice.io/profile=research
00:00:00Z  gpu-1  Asked  waiting for its agent to see the label
00:00:01Z  gpu-1  Waiting  ConfiguringPlugin: research: waiting for kubelet to show the key
00:00:03Z  gpu-1  Applying  EvictionBlocked: research: PDB web/api
00:00:04Z  gpu-1  RollingBack  EvictionBlocked: going back: PDB web/api
00:00:05Z  gpu-1  Converged  research: as asked
profile research: 1 of 1 node converged
`, 0)
	}, gpu("gpu-1"))
}

// A name with a slip of the pen is labelled nowhere: the agents, who know the catalog, are asked first.
func TestWhatAllAgentsWouldRefuseIsNotLabelled(t *testing.T) {
	unknown := api.Answer{Refused: `no profile or MIG config is named "research": did you mean researcher?`, Reason: config.ReasonUnknownConfig}
	for name, c := range map[string]struct {
		names    map[string]api.Answer
		want     string
		labelled bool
	}{
		"by any of them": {map[string]api.Answer{"gpu-1": unknown, "gpu-2": unknown, "gpu-3": unknown}, `
gpu-1  UnknownConfig: no profile or MIG config is named "research": did you mean researcher?
gpu-2  UnknownConfig: no profile or MIG config is named "research": did you mean researcher?
gpu-3  UnknownConfig: no profile or MIG config is named "research": did you mean researcher?
error: profile research would be refused by 3 nodes, and nothing was labelled
`, false},
		"since the catalog is broken": {map[string]api.Answer{
			"gpu-1": {For: keepsSilent}, "gpu-2": {Refused: "line 3: a tab", Reason: config.ReasonInvalidCatalog}, "gpu-3": {For: keepsSilent},
		}, `
gpu-2  InvalidCatalog: line 3: a tab
error: profile research would be refused by 1 node, and nothing was labelled
`, false},
		"as GPUs of another model do":  {map[string]api.Answer{"gpu-2": unknown}, "\ngpu-1  labelled", true},
		"as another of the same model": {map[string]api.Answer{"gpu-1": unknown, "gpu-2": unknown}, "\ngpu-1  labelled", true},
		"but for what may pass":        {map[string]api.Answer{"gpu-1": {Refused: "the API server is away"}, "gpu-2": {HeldUp: "held", Reason: config.ReasonHeld}}, "\ngpu-1  labelled", true},
		"as far as agents answer": {map[string]api.Answer{"gpu-1": {For: keepsSilent}, "gpu-2": {For: keepsSilent}}, `
no agent has said within 5s whether it would refuse profile research; labelled all the same
gpu-1  labelled`, true},
	} {
		t.Run(name, func(t *testing.T) {
			l4 := func() *corev1.Node {
				n := gpuNode("gpu-2")
				n.Labels[features.LabelProduct] = "NVIDIA-L4"
				return n
			}
			inWorld(t, func(w *world) {
				w.names = c.names
				said, code := w.run(apply()...)
				switch {
				case c.labelled && !strings.HasPrefix(said, c.want[1:]), !c.labelled && (said != c.want[1:] || code != 1):
					t.Errorf("exit code %d: %s", code, said)
				case !c.labelled:
					w.untouched("gpu-1", "gpu-2", "gpu-3")
				}
			}, gpu("gpu-1"), l4, gpu("gpu-3"))
		})
	}
	t.Run("where the user may not ask", func(t *testing.T) {
		inWorld(t, func(w *world) {
			w.client.PrependWatchReactor("nodes", func(k8stesting.Action) (bool, watch.Interface, error) {
				return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", nil)
			})
			w.names = map[string]api.Answer{"gpu-1": {For: keepsSilent}} // an answer may come before the watch is refused
			said, code := w.run(apply()...)
			if code != 0 || !strings.Contains(said, "no agent has said whether it would refuse profile research: watching nodes: nodes is forbidden") || !strings.Contains(said, "gpu-1  labelled") {
				t.Errorf("exit code %d: %s", code, said)
			}
		}, gpu("gpu-1"))
	})
}

func TestNoneTakesBackWhatWasAskedFor(t *testing.T) {
	asked := func() *corev1.Node {
		n := gpuNode("gpu-1")
		n.Labels[config.LabelProfile], n.Labels[config.LabelDevicePluginConfig] = "reserch", config.OwnPluginKey+"1"
		n.Annotations[config.AnnotationJournal] = "{}"
		return n
	}
	shared := func() *corev1.Node {
		n := gpuNode("gpu-2")
		n.Labels[config.LabelMIGConfig], n.Labels[config.LabelDevicePluginConfig] = "all-1g.10gb", "slices"
		return n
	}
	inWorld(t, func(w *world) {
		w.start("apply", "-l", "pool=research", "--none", "--dry-run")
		w.is(`
gpu-1  would lose label gpuslice.io/profile=reserch; its agent undoes the change that is under way
gpu-2  would lose label nvidia.com/mig.config=all-1g.10gb
gpu-2  would lose label nvidia.com/device-plugin.config=slices; the device plugin takes its default config then
gpu-3  is asked for nothing
nothing was changed; without --dry-run 2 of 3 nodes lose labels, and the GPUs stay as they are
`, 0)
		if w.node("gpu-1").Labels[config.LabelProfile] != "reserch" || w.node("gpu-2").Labels[config.LabelMIGConfig] == "" {
			t.Error("a dry run takes labels away")
		}
		w.start("apply", "-l", "pool=research", "--none")
		w.is(`
gpu-1  lost label gpuslice.io/profile=reserch; its agent undoes the change that is under way
gpu-2  lost label nvidia.com/mig.config=all-1g.10gb
gpu-2  lost label nvidia.com/device-plugin.config=slices; the device plugin takes its default config then
gpu-3  is asked for nothing
`, 0)
		for node, label := range map[string]string{"gpu-1": config.LabelProfile, "gpu-2": config.LabelMIGConfig} {
			if value, there := w.node(node).Labels[label]; there {
				t.Errorf("%s has label %s=%s", node, label, value)
			}
		}
		if value, there := w.node("gpu-2").Labels[config.LabelDevicePluginConfig]; there {
			t.Errorf("gpu-2 has label %s", value)
		}
		if value := w.node("gpu-1").Labels[config.LabelDevicePluginConfig]; value != config.OwnPluginKey+"1" {
			t.Errorf("the agent's own label is %q", value)
		}
	}, asked, shared, gpu("gpu-3"))
	inWorld(t, func(w *world) {
		for _, more := range [][]string{{"--wait"}, {"--profile", "a"}} {
			if said, code := w.run(append([]string{"apply", "gpu-1", "--none"}, more...)...); code != 1 || !strings.Contains(said, "none of the others can be") {
				t.Errorf("%q: exit code %d: %s", more, code, said)
			}
		}
	}, gpu("gpu-1"))
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
			node := gpuNode("gpu-1")
			if c.label != "" {
				metav1.SetMetaDataLabel(&node.ObjectMeta, config.LabelProfile, c.label)
			}
			if c.before != "" {
				metav1.SetMetaDataAnnotation(&node.ObjectMeta, config.AnnotationAllowEviction, c.before)
			}
			inWorld(t, func(w *world) {
				if said, code := w.run(apply(c.flags...)...); code != 0 {
					t.Errorf("exit code %d: %s", code, said)
				}
				if got := w.node("gpu-1"); got.Annotations[config.AnnotationAllowEviction] != c.allowed || got.Labels[config.LabelProfile] != "research" {
					t.Errorf("the node has labels %v and annotations %v", got.Labels, got.Annotations)
				}
			}, func() *corev1.Node { return node })
		})
	}
}
