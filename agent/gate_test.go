package agent_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Synctest's bubbles begin at midnight of Saturday, the first of January 2000.

// A node with one GPU.
const (
	oneH100 = "gpus:\n- model: H100-80GB\n"
	oneA100 = "gpus:\n- model: A100-40GB\n"
)

// nights is open from 22:00 to 04:00.
const nights = "windows: [{days: [Mon, Tue, Wed, Thu, Fri, Sat, Sun], start: '22:00', duration: 6h}]\nestimate: 10m\njitter: 0s\n"

// twoHours is open from 00:00 to 01:00 and from 04:00 to 05:00. Tests in which the agent observes the node every few seconds use it: from night to
// night there are thousands of observations.
const twoHours = "windows: [{days: [Sat], start: '00:00', duration: 1h}, {days: [Sat], start: '04:00', duration: 1h}]\nestimate: 10m\njitter: 0s\n"

// until returns a file with one window, which was open all the year before.
func until(end time.Time) string {
	return fmt.Sprintf("windows: [{notBefore: '1999-01-01T00:00:00Z', notAfter: '%s'}]\nestimate: 10m\njitter: 0s\n", end.Format(time.RFC3339))
}

// setMaintenance gives the cluster a maintenance file, in place of the former. It adds apiVersion and kind.
func (w *world) setMaintenance(text string) {
	w.t.Helper()
	w.setFile("maintenance", "apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\n"+text)
	key := config.ConfigMapKey{Namespace: "gpuslice", Name: "maintenance", Key: "config.yaml"}
	if w.settings.Maintenance != key {
		w.settings.Maintenance = key
		w.restart()
	}
}

// profiles gives the cluster a catalog of profiles.
func (w *world) profiles(text string) {
	w.t.Helper()
	w.setFile("profiles", text)
	w.settings.Profiles = config.ConfigMapKey{Namespace: "gpuslice", Name: "profiles", Key: "config.yaml"}
	w.restart()
}

// setFile writes a ConfigMap with one file.
func (w *world) setFile(name, text string) {
	w.t.Helper()
	maps := w.client.CoreV1().ConfigMaps("gpuslice")
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "gpuslice"}, Data: map[string]string{"config.yaml": text}}
	_, err := maps.Update(w.t.Context(), object, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = maps.Create(w.t.Context(), object, metav1.CreateOptions{})
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// budgetKeepsTeam keeps all pods of the team until relent is called, as a budget does that is used up only after the cordon.
func (w *world) budgetKeepsTeam() (relent func()) {
	stays := true
	w.client.PrependReactor("create", "pods", func(action k8stesting.Action) (bool, runtime.Object, error) {
		if action.GetSubresource() != "eviction" || action.GetNamespace() != "team" || !stays {
			return false, nil, nil
		}
		if e, ok := action.(k8stesting.CreateAction).GetObject().(*policyv1.Eviction); ok && e.DeleteOptions != nil && len(e.DeleteOptions.DryRun) > 0 {
			return false, nil, nil
		}
		return true, nil, apierrors.NewTooManyRequests("the budget is used up", 1)
	})
	return func() { stays = false }
}

// changes is a driver that calls its functions around the calls which change something.
type changes struct{ around }

// Snapshot implements nvml.Driver.
func (c changes) Snapshot(ctx context.Context) ([]nvml.GPU, error) { return c.Driver.Snapshot(ctx) }

// countChanges starts the agent again with a driver that counts the calls which change something, and calls before ahead of each.
func (w *world) countChanges(before func(call int)) (calls *int) {
	calls = new(int)
	w.wrapDriver = func(d nvml.Driver) nvml.Driver {
		return changes{around{d, func() {
			if before != nil {
				before(*calls)
			}
			*calls++
		}, func() {}}}
	}
	w.restart()
	return calls
}

func (w *world) planned() corev1.NodeCondition {
	w.t.Helper()
	for _, c := range w.node().Status.Conditions {
		if c.Type == config.ConditionMaintenancePlanned {
			return c
		}
	}
	return corev1.NodeCondition{}
}

func (w *world) status() api.Status {
	w.t.Helper()
	var s api.Status
	if err := json.Unmarshal([]byte(w.node().Annotations[config.AnnotationStatus]), &s); err != nil {
		w.t.Fatal(err)
	}
	return s
}

// busy returns a world of one GPU that a pod has.
func busy(t *testing.T) *world {
	t.Helper()
	w := newWorld(t, oneH100)
	w.turn()
	w.pod("holder", w.gpus.UUIDs()[0])
	return w
}

// Promise 11.
func TestNothingIsDisturbedOutsideOfTheWindow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.setMaintenance(nights)
		opens := time.Date(2000, 1, 1, 22, 0, 0, 0, time.UTC)
		calls := w.countChanges(nil)
		w.spend(5 * time.Hour) // it begins in the night of Friday
		w.label("all-1g.10gb")
		c := w.untilReason(config.ReasonAwaitingWindow)
		if !strings.Contains(c.Message, "Sat 2000-01-01 22:00:00Z") {
			t.Errorf("the node does not say when the window opens: %s", c.Message)
		}
		if p := w.planned(); p.Status != corev1.ConditionTrue || p.Reason != "MaintenanceWindow" || !strings.Contains(p.Message, "Sat 2000-01-01 22:00:00Z") {
			t.Errorf("MaintenancePlanned is %s, %s: %s", p.Status, p.Reason, p.Message)
		}
		if next := w.status().Next; !next.Equal(opens) {
			t.Errorf("tools read %v", next)
		}
		w.passes("the fence", func() bool { return w.node().Spec.Unschedulable || !w.runs("holder") || *calls > 0 })
		if now := time.Now(); now.Before(opens) || now.Sub(opens) > time.Second {
			t.Errorf("the change began at %v", now)
		}
		w.reach("all-1g.10gb")
		if p := w.planned(); p.Status != corev1.ConditionFalse {
			t.Errorf("MaintenancePlanned is %s, %s: %s", p.Status, p.Reason, p.Message)
		}
	})
}

// Case 15: the agent does not miss a window that is shorter than the time between two observations, either.
func TestAChangeBeginsInAWindowThatIsLongEnough(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.settings.NodeHeartbeat = time.Hour
		w.setMaintenance("windows: [{days: [Sat], start: '09:17', duration: 1m}]\nestimate: 50s\njitter: 0s\n")
		cordons := w.recordCordons()
		w.label("all-1g.10gb")
		w.untilCordoned()
		if len(*cordons) != 1 { // a change that began too late is put off in the same pass
			t.Errorf("the node was cordoned %d times, want once", len(*cordons))
		}
		begins := time.Date(2000, 1, 1, 9, 17, 0, 0, time.UTC)
		if d := time.Since(begins); d < 0 || d > time.Second {
			t.Errorf("the change began at %v, want %v", time.Now(), begins)
		}
		w.reach("all-1g.10gb")
	})
}

// Case 18 of what keeps nodes: the window closes in the middle. If the agent has not touched a GPU yet, it gives the node back.
func TestADrainThatOutlastsItsWindowIsPutOff(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.settings.Timeouts.Drain = 24 * time.Hour
		w.setMaintenance(twoHours)
		relent, calls := w.budgetKeepsTeam(), w.countChanges(nil)
		w.label("all-1g.10gb")
		w.untilCordoned()
		late := time.Date(2000, 1, 1, 0, 50, 0, 0, time.UTC) // the change takes ten minutes more
		w.passes("the end of it", func() bool { return !w.node().Spec.Unschedulable || time.Since(late) > time.Minute })
		if now := time.Now(); now.Before(late) || now.Sub(late) > time.Minute {
			t.Fatalf("the node is not given back, or was at another time than %v: at %v", late, now)
		}
		c := w.settle(config.ReasonAwaitingWindow)
		w.expectGivenBack()
		if *calls > 0 || !w.runs("holder") {
			t.Errorf("%d calls into the driver; the pod runs: %t", *calls, w.runs("holder"))
		}
		if !strings.Contains(c.Message, "Sat 2000-01-01 04:00:00Z") || w.status().Failed != nil {
			t.Errorf("it counts as failed (%v), or the node does not say when it is tried again: %s", w.status().Failed, c.Message)
		}
		relent()
		w.reach("all-1g.10gb")
		if time.Now().Before(time.Date(2000, 1, 1, 4, 0, 0, 0, time.UTC)) {
			t.Errorf("the next attempt was at %v", time.Now())
		}
	})
}

func TestAChangeThatHasTouchedAGPUIsFinishedBeyondItsWindow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.setMaintenance(until(time.Now().Add(time.Hour)))
		w.countChanges(func(call int) {
			if call == 2 { // MIG is on, and one instance is there
				<-time.After(2 * time.Hour)
			}
		})
		w.settings.Timeouts.DriverCall = 3 * time.Hour
		w.restart()
		w.label("all-1g.10gb")
		said := ""
		w.passes("the end", func() bool {
			if c := w.condition(); strings.Contains(c.Message, string(config.ReasonWindowOverrun)) {
				said = c.Message
			}
			return w.reason() == config.ReasonConverged && strings.HasPrefix(w.condition().Message, "all-1g.10gb")
		})
		w.expectGivenBack()
		if said == "" {
			t.Error("nothing says that the window was overrun")
		}
		if c := w.condition(); strings.Contains(c.Message, string(config.ReasonWindowOverrun)) {
			t.Errorf("the node goes on saying so: %s", c.Message)
		}
	})
}

// The same if the agent dies at every step.
func TestAnAgentThatForgetsEverythingFinishesBeyondItsWindow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.setMaintenance(until(time.Now().Add(time.Hour)))
		w.startChange("all-1g.10gb")
		w.setMaintenance(until(time.Now()))
		for range 100 {
			w.turn()
			w.agent.Pass(t.Context())
			w.restartUnlessVerifying()
		}
		w.reach("all-1g.10gb")
	})
}

// An undo needs no window. A change that a user asks for when the window has closed already is not made beyond it.
func TestAChangeThatIsNoLongerAskedForIsUndoneBeyondItsWindow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.setMaintenance(until(time.Now().Add(time.Hour)))
		w.startChange("all-1g.10gb")
		w.setMaintenance(until(time.Now()))
		w.label("all-7g.80gb")
		w.settle(config.ReasonAwaitingWindow)
		w.expectGivenBack()
		if gpu := w.snapshot()[0]; gpu.Enabled {
			t.Errorf("the GPU is left with %v", gpu.Geometry())
		}
	})
}

// Case 17: the file changes while the window is open. The windows go by the host's clock, whatever it says.
func TestADrainThatMayNotGoOnIsPutOff(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		file string        // that a user writes then
		step time.Duration // by which the clock is set then
		says config.Reason
	}{
		"by a file that says nothing": {"windows: [{days: [Caturday], start: '22:00', duration: 6h}]\n", 0, config.ReasonInvalidMaintenance},
		"by a clock that is set":      {nights, 9 * time.Hour, config.ReasonAwaitingWindow},
		"by a clock that is set back": {nights, -7 * time.Hour, config.ReasonAwaitingWindow},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := busy(t)
				c := &hostClock{readings: map[time.Time]time.Time{}}
				w.clock = c
				w.settings.Timeouts.Drain = 24 * time.Hour
				w.setMaintenance(nights)
				relent := w.budgetKeepsTeam()
				w.label("all-1g.10gb")
				w.untilCordoned()
				w.setMaintenance(row.file)
				c.ahead = row.step
				w.settle(row.says)
				w.expectGivenBack()
				if row.says == config.ReasonInvalidMaintenance {
					w.setMaintenance(nights)
				} else if next := w.status().Next; next.Hour() != 22 {
					t.Errorf("the next window is at %v", next)
				}
				relent()
				w.reach("all-1g.10gb")
				if hour := c.Now().UTC().Hour(); hour >= 4 && hour < 22 {
					t.Errorf("the change was made at %v by the host's clock", c.Now().UTC())
				}
			})
		})
	}
}

func TestForceLetsOneChangeBeginOutsideOfItsWindow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.setMaintenance(until(time.Now()))
		w.label("all-1g.10gb")
		w.annotate(config.AnnotationForce, config.ForceNow)
		w.reach("all-1g.10gb")
		if v, there := w.node().Annotations[config.AnnotationForce]; there {
			t.Errorf("the annotation is left: %q", v)
		}
		w.pod("next", w.snapshot()[0].Instances[0].Devices[0].UUID)
		w.label("all-balanced")
		w.untilReason(config.ReasonAwaitingWindow)
		if w.node().Spec.Unschedulable {
			t.Error("the next change was forced too")
		}
	})
	synctest.Test(t, func(t *testing.T) { // one that is under way
		w := busy(t)
		w.settings.Timeouts.Drain = 24 * time.Hour
		w.setMaintenance(until(time.Now().Add(time.Hour)))
		relent := w.budgetKeepsTeam()
		w.label("all-1g.10gb")
		w.untilCordoned()
		j, err := journal.Parse(w.node().Annotations[config.AnnotationJournal])
		if err != nil {
			t.Fatal(err)
		}
		w.annotate(config.AnnotationForce, j.Operation)
		w.spend(90 * time.Minute)
		if !w.node().Spec.Unschedulable {
			t.Error("it was put off all the same")
		}
		relent()
		w.reach("all-1g.10gb")
	})
	synctest.Test(t, func(t *testing.T) { // a node that is as asked
		w := busy(t)
		w.converge("all-disabled")
		w.annotate(config.AnnotationForce, config.ForceNow)
		w.passes("an end of it", func() bool { _, there := w.node().Annotations[config.AnnotationForce]; return !there })
	})
}

func TestAHoldKeepsTheNodeFromWhatIsNotBegun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.annotate(config.AnnotationHold, "the auditors are here")
		w.annotate(config.AnnotationForce, config.ForceNow) // which is about windows
		w.label("all-1g.10gb")
		if c := w.untilReason(config.ReasonHeld); !strings.Contains(c.Message, "the auditors are here") {
			t.Errorf("the node says: %s", c.Message)
		}
		w.spend(time.Hour)
		w.expectGivenBack()
		w.unannotate(config.AnnotationHold)
		w.reach("all-1g.10gb")
	})
}

func TestWhatIsLostIsRestoredAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, oneH100)
		w.converge("all-1g.10gb")
		w.setMaintenance(until(time.Now()))
		if err := w.gpus.Reboot(); err != nil { // a Hopper's MIG mode goes too
			t.Fatal(err)
		}
		w.nextBoot()
		w.offered = w.devices()
		w.restart()
		w.passes("the restored node", func() bool { return len(w.snapshot()[0].Instances) == 7 && !w.hasJournal() })
		w.settle(config.ReasonConverged)
		w.expectGivenBack()
	})
}

// The agent learns from former changes how long they take.
func TestTheEstimateIsWhatEarlierChangesTook(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.countChanges(func(int) { <-time.After(time.Minute) })
		w.settings.Timeouts.DriverCall = 2 * time.Minute
		w.setMaintenance("windows: [{notBefore: '1999-01-01T00:00:00Z', notAfter: '2000-01-01T06:00:00Z'}]\nestimate: 1s\njitter: 0s\n")
		w.converge("all-1g.10gb") // eight calls
		took := w.disk.record(t).Learnt.Took
		if len(took) != 1 || took[0].Rest < 480 || took[0].Rest > 600 || took[0].Whole < took[0].Rest {
			t.Fatalf("the change took %v", took)
		}
		w.pod("next", w.snapshot()[0].Instances[0].Devices[0].UUID)
		w.spend(6*time.Hour - time.Minute - time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)))
		w.label("all-balanced")
		if c := w.untilReason(config.ReasonAwaitingWindow); !strings.Contains(c.Message, "is as long as the change takes") {
			t.Errorf("the node says: %s", c.Message)
		}
		w.expectGivenBack()
	})
}

// hostClock is the host's clock, which a test sets. Since is right for times that it has returned, whatever it is set to, as for times
// of Go, which have a monotonic reading.
type hostClock struct {
	clock.RealClock
	ahead    time.Duration
	readings map[time.Time]time.Time
}

// Now implements clock.PassiveClock.
func (c *hostClock) Now() time.Time {
	now := time.Now()
	shown := now.Add(c.ahead).Round(0)
	c.readings[shown] = now
	return shown
}

// Since implements clock.PassiveClock.
func (c *hostClock) Since(then time.Time) time.Duration {
	if real, ok := c.readings[then]; ok {
		return time.Since(real)
	}
	return time.Since(then) + c.ahead
}

// Case 13: an administrator sets the clock in the middle. No deadline passes by that, and the change comes to its end.
func TestAStepOfTheClockInAnyPhaseHarmsNoChange(t *testing.T) {
	t.Parallel()
	for _, step := range []time.Duration{3 * time.Hour, -3 * time.Hour} {
		for _, kind := range []plan.Kind{
			"", plan.Fence, plan.Evict, plan.PauseOperands, plan.SetMode, plan.Create, plan.ResumeOperands, plan.VerifyCapacity, plan.Release,
		} {
			t.Run(fmt.Sprintf("%s at %s", step, kind), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { stepsAt(t, step, kind) })
			})
		}
	}
}

// stepsAt sets the clock when the step is next, in a change in which a pod takes 20 minutes to leave, and would be deleted after 30.
func stepsAt(t *testing.T, step time.Duration, kind plan.Kind) {
	t.Helper()
	w := newWorld(t, oneA100)
	w.turn()
	w.pod("holder", w.gpus.UUIDs()[0])
	c := &hostClock{readings: map[time.Time]time.Time{}}
	w.clock = c
	w.settings.Timeouts.Drain, w.settings.Drain.AfterDeadline = 12*time.Minute, config.AfterDeadlineDelete
	w.setMaintenance("windows: [{days: [Sat], start: '00:00', duration: 24h}, {days: [Fri], start: '00:00', duration: 24h}]\nestimate: 1m\njitter: 0s\n")
	relent := w.budgetKeepsTeam()
	deleted := false
	w.client.PrependReactor("delete", "pods", func(k8stesting.Action) (bool, runtime.Object, error) { deleted = true; return false, nil, nil })
	w.label("all-1g.5gb")
	began := time.Now()
	stepped, fenced := false, time.Time{}
	w.passes("the end", func() bool {
		if !stepped && (kind == "" || kind == w.agent.NextStep(t.Context())) {
			stepped, c.ahead = true, step
		}
		if fenced.IsZero() && w.node().Spec.Unschedulable {
			fenced = time.Now()
		}
		if !fenced.IsZero() && time.Since(fenced) > 4*time.Minute {
			relent()
		}
		return w.reason() == config.ReasonConverged && strings.HasPrefix(w.condition().Message, "all-1g.5gb")
	})
	if !stepped {
		t.Fatal("the clock was never set")
	}
	if deleted {
		t.Error("a deadline passed by a step of the clock: the pod was deleted")
	}
	if took := time.Since(began); took > time.Hour {
		t.Errorf("the change took %s", took)
	}
	w.expectGivenBack()
}

func TestMetricsShowWindows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.setMaintenance(nights)
		w.spend(5 * time.Hour)
		o := w.optionsFor(&w.host)
		w.agent = agent.New(o)
		w.label("all-1g.10gb")
		w.untilReason(config.ReasonAwaitingWindow)
		names := []string{"gpuslice_window_open", "gpuslice_next_window_start_timestamp_seconds", "gpuslice_window_overrun_seconds"}
		const at = `
# HELP gpuslice_next_window_start_timestamp_seconds When the waiting change begins; if none waits, when the next window opens.
# TYPE gpuslice_next_window_start_timestamp_seconds gauge
gpuslice_next_window_start_timestamp_seconds %d
# HELP gpuslice_window_open 1 if the node may be disturbed now.
# TYPE gpuslice_window_open gauge
gpuslice_window_open %d
# HELP gpuslice_window_overrun_seconds How long a change has run past its window.
# TYPE gpuslice_window_overrun_seconds gauge
gpuslice_window_overrun_seconds 0
`
		saturday := time.Date(2000, 1, 1, 22, 0, 0, 0, time.UTC)
		expectMetrics(t, o.Metrics, fmt.Sprintf(at, saturday.Unix(), 0), names...)
		w.reach("all-1g.10gb")
		expectMetrics(t, o.Metrics, fmt.Sprintf(at, saturday.Add(24*time.Hour).Unix(), 1), names...)
	})
}
