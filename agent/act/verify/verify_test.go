package verify_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/verify"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// change is one that shares a GPU by two, and waits for its capacity.
type change struct {
	t        *testing.T
	verifier *verify.Verifier
	clock    *clocktesting.FakeClock
	want     state.Desired
}

func newChange(t *testing.T) *change {
	t.Helper()
	clock := clocktesting.NewFakeClock(time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC))
	settings := config.Default()
	settings.MIGStrategy = config.MIGStrategyNone
	return &change{
		t: t, clock: clock,
		want: state.Desired{
			Plugin: &state.DesiredPlugin{Known: true, Sharing: catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{nvml.ResourceGPU: 2}}},
		},
		verifier: &verify.Verifier{
			Env: act.Env{Settings: settings, Clock: monotonic.New(clock), Log: zap.NewNop()}, DevicePlugin: &deviceplugin.Plugin{Settings: settings},
		},
	}
}

// observe observes a node of which GPU feature discovery says so many replicas. It returns how many observations count, and for how long the agent rests.
func (c *change) observe(replicas string, ids ...string) (agreed int, rest time.Duration) {
	c.t.Helper()
	seen := c.seen(ids...)
	seen.Node.Labels = map[string]string{nvml.ResourceGPU + ".replicas": replicas}
	c.verifier.Compare(seen, c.want)
	c.verifier.Follow(seen, c.want)
	if err := c.verifier.Await(c.t.Context(), act.Input{Seen: seen, Want: c.want}); err == nil {
		c.t.Error("the wait is over without a word")
	}
	return seen.Capacity.Agreement.Agreed, c.verifier.Rest(5 * time.Second)
}

// seen is a node in the middle of the change, of whose GPU kubelet and node offer these ids.
func (c *change) seen(ids ...string) *state.Observed {
	return &state.Observed{
		Node: &corev1.Node{Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{nvml.ResourceGPU: *resource.NewQuantity(int64(len(ids)), resource.DecimalSI)}}},
		GPUs: []nvml.GPU{{UUID: "GPU-a"}}, Journal: &journal.Journal{},
		Kubelet: state.Kubelet{Offered: capacity.Resources{nvml.ResourceGPU: ids}},
	}
}

var (
	whole  = []string{"GPU-a"}
	shared = []string{"GPU-a::0", "GPU-a::1"}
)

// Two observations prove the capacity, two seconds apart; the agent makes the second as soon as it counts, and knows that it may be the last.
func TestObservationsThatProve(t *testing.T) {
	t.Parallel()
	type observation struct {
		what     string
		after    time.Duration
		replicas string // by the labels of GPU feature discovery
		ids      []string

		agreed int
		rest   time.Duration
		last   bool // it may be the last one
	}
	for name, observations := range map[string][]observation{
		"the second is two seconds after the first": {
			{"before the plugin has registered", 0, "2", whole, 0, 5 * time.Second, false},
			{"when it has", time.Second, "2", shared, 1, 2 * time.Second, false},
			{"for another cause", 500 * time.Millisecond, "2", shared, 1, 1500 * time.Millisecond, false},
			{"two seconds after the first", 1500 * time.Millisecond, "2", shared, 2, 5 * time.Second, true},
		},
		"a disagreement begins again": {
			{"when it has registered", 0, "2", shared, 1, 2 * time.Second, false},
			{"when it offers nothing", time.Second, "2", nil, 0, 5 * time.Second, false},
			{"when it has registered again", 500 * time.Millisecond, "2", shared, 1, 2 * time.Second, false},
			{"two seconds after the first of all", 500 * time.Millisecond, "2", shared, 1, 1500 * time.Millisecond, false},
		},
		// The labels prove nothing: they may be late for the first observation, and must be right at the last.
		"the first counts without the labels": {
			{"when the plugin has registered", 0, "1", shared, 1, 2 * time.Second, false},
			{"two seconds later", 2 * time.Second, "1", shared, 1, 5 * time.Second, false},
			{"when the plugin offers nothing", time.Second, "1", nil, 0, 5 * time.Second, false},
			{"when it does again", time.Second, "1", shared, 1, 2 * time.Second, false},
			{"when the labels are right, too early", time.Second, "2", shared, 1, time.Second, false},
			{"two seconds after the first", time.Second, "2", shared, 2, 5 * time.Second, true},
		},
		"labels that come late end the proof at once": {
			{"when the plugin has registered", 0, "1", shared, 1, 2 * time.Second, false},
			{"after half a minute", 30 * time.Second, "1", shared, 1, 5 * time.Second, false},
			{"with the labels", time.Second, "2", shared, 2, 5 * time.Second, false},
		},
		"labels that stay wrong are awaited no longer": {
			{"when the plugin has registered", 0, "1", shared, 1, 2 * time.Second, false},
			{"before the patience ends", 90*time.Second - 1, "1", shared, 1, 5 * time.Second, false},
			{"when it ends", 1, "1", shared, 2, 5 * time.Second, false},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newChange(t)
			for _, o := range observations {
				if c.verifier.LastObservationDue() {
					t.Errorf("%s: the last observation is due at once", o.what)
				}
				c.clock.Step(o.after)
				if last := c.verifier.LastObservationDue(); last != o.last {
					t.Errorf("%s: the last observation is due: %t", o.what, last)
				}
				if agreed, rest := c.observe(o.replicas, o.ids...); agreed != o.agreed || rest != o.rest {
					t.Errorf("%s: %d observations count, and the agent rests for %s; want %d and %s", o.what, agreed, rest, o.agreed, o.rest)
				}
			}
		})
	}
}

// A comparison counts nothing before the pass follows it, as that of a preview, and may be made again.
func TestAComparisonThatIsNotFollowedCountsNothing(t *testing.T) {
	t.Parallel()
	c := newChange(t)
	for range 3 {
		seen := c.seen(shared...)
		c.verifier.Compare(seen, c.want)
		c.verifier.Compare(seen, c.want)
		if agreed := seen.Capacity.Agreement.Agreed; agreed != 1 {
			t.Errorf("%d observations count, want that of this pass alone", agreed)
		}
		c.clock.Step(capacity.VerifyInterval)
	}
}

// Kubelet then keeps giving out what the plugin offered before, as many devices or not.
func TestAPluginThatDoesNotServeKubeletProvesNothing(t *testing.T) {
	for name, ids := range map[string][]string{"what is wanted": shared, "what was there before": whole} {
		c := newChange(t)
		seen := c.seen(ids...)
		seen.DevicePlugin.Unconnected = "kubelet has lost it"
		c.verifier.Compare(seen, c.want)
		first := c.verifier.Await(t.Context(), act.Input{Seen: seen, Want: c.want})
		c.clock.Step(c.verifier.Settings.Timeouts.Capacity + time.Second)
		failure, is := errors.AsType[*api.Failure](c.verifier.Await(t.Context(), act.Input{Seen: seen, Want: c.want}))
		text := "restart kubelet on this node, if the log"
		if seen.Capacity.Agreement.Agreed != 0 || first == nil || !is || failure.Reason != config.ReasonCapacityMismatch || !strings.HasPrefix(failure.Message, text) ||
			!strings.HasSuffix(failure.Message, "kubelet has lost it") {
			t.Errorf("kubelet gives out %s: %d looks count, first %v, at last %v", name, seen.Capacity.Agreement.Agreed, first, failure)
		}
	}
}

// Who reads that capacity is missing looks where the message points.
func TestASilentKubeletIsNamedAndNotTheDevicePlugin(t *testing.T) {
	for name, change := range map[string]*journal.Journal{"no change is under way": nil, "a change is under way": {}} {
		c := newChange(t)
		seen := state.Observed{Node: &corev1.Node{}, Journal: change, Kubelet: state.Kubelet{Err: errors.New("kubelet is silent")}}
		c.verifier.Compare(&seen, c.want)
		err := c.verifier.Await(t.Context(), act.Input{Seen: &seen, Want: c.want})
		var reason config.Reason
		if waiting, is := errors.AsType[*outcome.Waiting](err); is && change == nil {
			reason = waiting.Reason
		}
		if change != nil {
			c.clock.Step(c.verifier.Settings.Timeouts.Capacity + time.Second)
			err = c.verifier.Await(t.Context(), act.Input{Seen: &seen, Want: c.want})
			if failure, is := errors.AsType[*api.Failure](err); is {
				reason = failure.Reason
			}
		}
		if text := fmt.Sprint(err); reason != config.ReasonKubeletUnavailable || !strings.Contains(text, "see the node's kubelet") || !strings.Contains(text, "kubelet is silent") || strings.Contains(text, "device plugin's log") {
			t.Errorf("%s: %s: %s", name, reason, text)
		}
	}
}
