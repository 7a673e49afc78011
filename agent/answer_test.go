package agent_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
)

// ask asks for a preview and returns the agent's answer, after as many passes as it takes.
func (w *world) ask(request string) api.Answer {
	w.t.Helper()
	w.annotate(config.AnnotationPreview, request)
	var given api.Answer
	w.passes("an answer to "+request, func() bool {
		text, answered := w.node().Annotations[config.AnnotationPlan]
		if !answered {
			return false
		}
		given = api.Answer{}
		if err := json.Unmarshal([]byte(text), &given); err != nil {
			w.t.Fatal(err)
		}
		return given.For == request
	})
	return given
}

// removeRequest removes the request, as a user who has asked does at the end.
func (w *world) removeRequest() {
	w.t.Helper()
	w.unannotate(config.AnnotationPreview)
	w.passes("an end of the answer", func() bool {
		_, answered := w.node().Annotations[config.AnnotationPlan]
		return !answered
	})
}

func TestARequestIsAnsweredByThePlan(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-disabled")
		w.pod("trainer", w.gpus.UUIDs()[0])
		before := w.gpus.String()

		given := w.ask(config.LabelMIGConfig + "=all-1g.10gb")
		if !strings.HasPrefix(strings.Join(given.Steps, "\n"), "take a slot of the pool\nfence: journal, cordon, taint\nevict team/trainer") {
			t.Errorf("the steps are %q", given.Steps)
		}
		if diff := cmp.Diff([]string{"team/trainer"}, given.Pods); diff != "" || given.Refused != "" || given.At.IsZero() {
			t.Errorf("refused %q, at %s, pods (-want +got):\n%s", given.Refused, given.At, diff)
		}
		hasDrawing(t, given)
		if w.gpus.String() != before || w.hasJournal() || !w.runs("trainer") {
			t.Error("to answer, the agent has changed something")
		}
		if done := w.ask(config.LabelProfile + "=all-disabled"); len(done.Steps) > 0 || done.Refused != "" {
			t.Errorf("to what is there already: %+v", done)
		}
		w.removeRequest()
	})
}

// hasDrawing fails the test unless an answer has the GPUs before and after all-1g.10gb, and what they offer then.
func hasDrawing(t *testing.T, given api.Answer) {
	t.Helper()
	if len(given.GPUs) == 0 || given.GPUs[0].Before.MIG || len(given.GPUs[0].After.Instances) != 7 || given.GPUs[0].Slices != 8 {
		t.Errorf("the GPUs before and after are %+v", given.GPUs)
	}
	if given.Offers != "nvidia.com/mig-1g.10gb 14" || given.Measured {
		t.Errorf("it offers %q then, by a measured time: %t", given.Offers, given.Measured)
	}
}

func TestAnAgentReportsWhichProcessHoldsWhichInstance(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-1g.10gb")
		instance := w.snapshot()[0].Instances[0]
		w.pod("notebook", instance.Devices[0].UUID)
		d := w.ask(config.RequestDiagnosis).Diagnosis
		if d == nil || !d.Agent.Runs || d.Agent.Reason != config.ReasonConverged {
			t.Fatalf("the diagnosis is %+v", d)
		}
		held := "GPU 0 " + instance.Placed.String()
		if len(d.Pods) != 1 || d.Pods[0].Name != "notebook" || !slices.Equal(d.Pods[0].Devices, []string{held}) {
			t.Errorf("the pods are %+v, want notebook on %s", d.Pods, held)
		}
		var named []string
		for _, i := range d.GPUs.Now[0].Instances {
			named = append(named, fmt.Sprintf("%s %d", i.Is, i.ID))
		}
		if first := fmt.Sprintf("%s %d", instance.Placed, instance.ID); !slices.Contains(named, first) || len(named) != 7 {
			t.Errorf("the instances are %q, want 7 with %s", named, first)
		}
		w.removeRequest()
		w.runs("notebook")
	})
}

func TestAnAgentReportsWhichPodUsesHowMuchOfWhat(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-1g.10gb")
		instances := w.snapshot()[0].Instances
		w.pod("notebook", instances[0].Devices[0].UUID)
		w.pod("trainer", instances[1].Devices[0].UUID)
		w.startGPUProcess(instances[1].Devices[0].UUID, 5000, "python", podCgroup("trainer"))
		w.spend(time.Minute) // an answer has what the last observation has seen
		var got []string
		for _, u := range w.ask(config.RequestTop).Uses {
			got = append(got, fmt.Sprintf("%s/%s GPU %d %s %d of %d MiB, %d pods", u.Namespace, u.Pod, u.GPU, u.Instance, u.MemoryMiB, u.TotalMiB, u.Pods))
		}
		want := []string{
			fmt.Sprintf("team/trainer GPU 0 %s 512 of 9984 MiB, 1 pods", instances[1].Placed),
			fmt.Sprintf("team/notebook GPU 0 %s 0 of 9984 MiB, 1 pods", instances[0].Placed),
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("uses (-want +got):\n%s", diff)
		}
		w.removeRequest()
	})
}

func TestARequestThatCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settle(config.ReasonNotRequested)
		for request, want := range map[string]string{
			config.LabelMIGConfig + "=all-9g.999gb": "all-9g.999gb",
			config.LabelMIGConfig:                   "it must be gpuslice.io/profile=NAME, nvidia.com/mig.config=NAME or nvidia.com/device-plugin.config=NAME, followed by unmanagedPods or emptyDir if the change may evict such pods, by again",
			config.LabelMIGConfig + "=":             "it must be",
			"example.com/other=all-disabled":        "it must be",
			"research":                              "it must be",
			config.LabelProfile + "=none-such":      "none-such",
		} {
			given := w.ask(request)
			if !strings.Contains(given.Refused, want) || len(given.Steps) > 0 {
				t.Errorf("%s is answered by %+v, want a refusal with %q", request, given, want)
			}
		}
		w.upgrade(true) // so that the observation of the node ends early, and nothing can be planned
		if given := w.ask(config.LabelMIGConfig + "=all-disabled"); !strings.Contains(given.HeldUp, "the driver is being upgraded") || given.Refused != "" {
			t.Errorf("while the driver is upgraded the answer is %+v", given)
		}
	})
}

// The agent answers a request once even if the answer would be longer than an annotation, and not again and again.
func TestARequestOfAnyLengthIsAnsweredOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settle(config.ReasonNotRequested)
		w.annotate(config.AnnotationPreview, strings.Repeat("ü", 100_000)+"\xff")
		w.turn()
		if n := w.countWrites(10 * time.Minute); n > 5 { // one answer, and the heartbeats
			t.Errorf("%d writes in 10 minutes", n)
		}
		if size := len(w.node().Annotations[config.AnnotationPlan]); size == 0 || size > 10_000 {
			t.Errorf("the answer has %d bytes", size)
		}
	})
}

// The answer neither holds up the running change nor proves its capacity.
func TestAnAnswerInTheMiddleOfAChangeLeavesItAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-disabled")
		w.startChange("all-1g.10gb")
		w.annotate(config.AnnotationPreview, config.LabelMIGConfig+"=all-disabled")
		given := w.ask(config.LabelMIGConfig + "=all-disabled")
		destroys := func(step string) bool { return strings.Contains(step, "destroy 1g.10gb") }
		if !slices.ContainsFunc(given.Steps, destroys) {
			t.Errorf("nothing that stands is taken away again: %q", given.Steps)
		}
		w.reach("all-1g.10gb")
		w.removeRequest()
	})
}

func TestTheStepsAndPodsOfAnAnswerAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-disabled")
		for i := range 300 {
			w.pod(fmt.Sprintf("trainer-%03d", i), w.gpus.UUIDs()[0])
		}
		given := w.ask(config.LabelMIGConfig + "=all-1g.10gb")
		if len(given.Pods) != 100 || given.MorePods != 200 {
			t.Errorf("%d pods are named and %d counted", len(given.Pods), given.MorePods)
		}
		if size := len(w.node().Annotations[config.AnnotationPlan]); size > 20_000 {
			t.Errorf("the answer has %d bytes", size)
		}
	})
}

// Tools read in the status which config it is about, how many steps are left, and since when the reason holds.
func TestTheStatusSaysWhatItIsAboutAndHowMuchIsLeft(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-disabled")
		w.label("all-1g.10gb")
		var lefts []int
		w.passes("the end", func() bool {
			s := w.status()
			if n := len(lefts); s.Desired == "all-1g.10gb" && (n == 0 || lefts[n-1] != s.Left) {
				lefts = append(lefts, s.Left)
			}
			return s.Desired == "all-1g.10gb" && s.Reason == config.ReasonConverged
		})
		if !slices.IsSortedFunc(lefts, func(a, b int) int { return b - a }) || len(lefts) < 3 || lefts[len(lefts)-1] != 0 {
			t.Errorf("the steps that are left are reported as %v", lefts)
		}
		if label := w.status().Label; label != config.LabelMIGConfig {
			t.Errorf("it is about label %q", label)
		}
		for _, name := range []string{"all-9g.9gb", "all-8g.8gb"} {
			w.label(name)
			asked := time.Now().Truncate(time.Second)
			w.passes("a refusal of "+name, func() bool { return w.status().Desired == name })
			if s := w.status(); s.Reason != config.ReasonUnknownConfig || s.Since.Before(asked) {
				t.Errorf("%s: reason %s since %s, asked for at %s", name, s.Reason, s.Since, asked)
			}
			<-time.After(time.Minute)
		}
	})
}

// Who reads an answer that stands on the node takes it for what the agent would do now.
func TestAStandingAnswerFollowsTheNode(t *testing.T) {
	t.Parallel()
	request := config.LabelMIGConfig + "=all-1g.10gb"
	for name, row := range map[string]struct {
		then func(w *world)
		want string
	}{
		"a hold": {func(w *world) { w.annotate(config.AnnotationHold, "x") }, "held up: Held"},
		"a budget, which no watch shows": {func(w *world) {
			w.pod("holder", w.gpus.UUIDs()[0], controlled)
			w.budgetKeepsAll("The disruption budget train needs 2 healthy pods and has 2 currently")
		}, "held up: EvictionBlocked"},
		"the config itself": {func(w *world) { w.label("all-1g.10gb") }, "nothing to do"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, oneH100)
				w.settle(config.ReasonNotRequested)
				first := w.ask(request)
				row.then(w)
				w.spend(5 * time.Minute)
				later := w.ask(request)
				if got := verdictOf(later); got != row.want || !later.At.After(first.At) {
					t.Errorf("the answer says %q as of %s, want %q; the first was of %s", got, later.At, row.want, first.At)
				}
				if n := w.countWrites(time.Hour); n > int(time.Hour/w.settings.NodeHeartbeat)+2 {
					t.Errorf("%d writes in an hour", n)
				}
			})
		})
	}
}

// A window opens by the clock alone.
func TestAStandingAnswerSaysWhenAWindowHasOpened(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.setMaintenance(noon)
		request := config.Allowance(config.LabelMIGConfig, "all-1g.10gb", config.FieldUnmanagedPods)
		if got := verdictOf(w.ask(request)); got != "held up: AwaitingWindow" {
			t.Fatalf("before the window the answer says %q", got)
		}
		for time.Now().UTC().Hour() < 12 {
			<-time.After(w.agent.Pass(t.Context()))
		}
		<-time.After(w.agent.Pass(t.Context()))
		w.agent.Pass(t.Context())
		if at, given := time.Now(), w.ask(request); verdictOf(given) != atOnce || given.At.Minute() > 1 {
			t.Errorf("at %s the answer says %q", at, verdictOf(given))
		}
	})
}

// holding runs a pod on the first GPU.
func holding(change func(*corev1.Pod)) func(w *world) {
	return func(w *world) { w.pod("a", string(w.snapshot()[0].UUID), change) }
}

func tolerating(key string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Tolerations = []corev1.Toleration{{Key: key, Operator: corev1.TolerationOpExists}}
	}
}

// ending takes so long to end.
func ending(seconds int64) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = &seconds }
}

// endingAt has begun to end, and may take so long from now on.
func endingAt(in time.Duration) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		ending(7200)(p)
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &metav1.Time{Time: time.Now().Add(in)}, p.Spec.TerminationGracePeriodSeconds
		p.Finalizers = []string{"example.com/keeps"}
	}
}

// What a change touches may be about to fail, and a node that stays closed takes no pods after it.
func TestAPlanNamesGPUsThatAreNotWellAndACordonThatStays(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		prepare func(w *world)
		config  string
		note    string // or why it is not known whether the change ends; empty for none
	}{
		"all is well":                         {func(*world) {}, "all-1g.10gb", ""},
		"a GPU that the change touches":       {func(w *world) { w.setRecoveryAction(1, 2) }, "all-1g.10gb", "GPU 1, which the change touches, has RebootRequired: GPU 1 ("},
		"a GPU that the change does not":      {func(w *world) { w.setConfigs(firstOnly); w.setRecoveryAction(1, 2) }, "first-1g", ""},
		"a pod that tolerates the fence":      {holding(tolerating("")), "all-1g.10gb", "the successor of pod team/a may start on this node at once"},
		"one that tolerates the cordon alone": {holding(tolerating(corev1.TaintNodeUnschedulable)), "all-1g.10gb", ""},
		"one that tolerates the taint alone":  {holding(tolerating(config.TaintRepartitioning)), "all-1g.10gb", ""},
		"a pod that may take longer":          {holding(ending(3601)), "all-1g.10gb", "pod team/a may take 1h0m1s to end, and the change is given up after 1h"},
		"one that may take as long":           {holding(ending(3600)), "all-1g.10gb", ""},
		"one that ends, and may take longer":  {holding(endingAt(90 * time.Minute)), "all-1g.10gb", "pod team/a may take 1h25m to end, and the change is given up after 1h"},
		"one that ends in time":               {holding(endingAt(30 * time.Minute)), "all-1g.10gb", ""},
		"one that may stay":                   {holding(tolerating("")), "all-disabled", ""},
		"a cordon":                            {func(w *world) { w.cordon(true) }, "all-1g.10gb", "the node is cordoned"},
		"a cordon, and nothing is left to do": {func(w *world) { w.cordon(true) }, "all-disabled", "the node is cordoned"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newSickWorld(t, h100, config.HealthResetNever)
				w.watch()
				row.prepare(w)
				w.spend(time.Minute)
				given := w.ask(config.LabelMIGConfig + "=" + row.config)
				if said := given.Unsure + strings.Join(given.Notes, "\n"); given.Refused != "" || given.HeldUp != "" || !strings.HasPrefix(said, row.note) || (said == "") != (row.note == "") {
					t.Errorf("refused %q, held up %q, notes %q; want %q", given.Refused, given.HeldUp, said, row.note)
				}
				w.removeRequest()
			})
		})
	}
}
