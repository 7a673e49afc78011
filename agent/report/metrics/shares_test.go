package metrics

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	testclock "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// have gives pods devices, as "a=GPU-0::1,GPU-0::2 b=MIG-1/4": by kubelet, or as a claim or a variable does where the id has a "*" before it.
func have(seen *state.Observed, text string) {
	if seen.Kubelet.Assigned == nil {
		seen.Kubelet.Assigned = holders.Assignments{}
	}
	for one := range strings.FieldsSeq(text) {
		name, ids, _ := strings.Cut(one, "=")
		p := holders.Pod{Namespace: "team", Name: name, UID: types.UID(name), Sources: []holders.Source{holders.SourceKubelet}, DevicesKnown: true}
		given := map[string][]string{}
		for id := range strings.SplitSeq(ids, ",") {
			device, other := strings.CutPrefix(id, "*")
			if !other {
				given[nvml.ResourceGPU] = append(given[nvml.ResourceGPU], id)
			}
			p.Devices = append(p.Devices, capacity.DeviceOf(device))
		}
		seen.Kubelet.Assigned[types.NamespacedName{Namespace: "team", Name: name}] = given
		seen.Holders.Pods = append(seen.Holders.Pods, p)
	}
}

// shared has kubelet offer each device of a resource as often.
func shared(seen *state.Observed, replicas map[string]int) {
	seen.Kubelet.Offered = capacity.Shared(capacity.Expected(seen.GPUs, config.MIGStrategySingle), catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: replicas})
}

func TestWhatPodsHaveOfAGPUAndWhatTheyLeave(t *testing.T) {
	t.Parallel()
	timeSliced := func(seen *state.Observed) { shared(seen, map[string]int{nvml.ResourceGPU: 4}) }
	for name, row := range map[string]struct {
		cut    []string
		held   string
		change func(*state.Observed)
		want   string // used, idle and lost of the GPU 0, and what each pod has; empty if there are no figures
	}{
		"no pods":                               {want: "0 1 0"},
		"no pods, cut":                          {cut: []string{sevenSmall}, want: "0 1 0"},
		"a whole GPU":                           {held: "a=GPU-0", want: "1 0 0 a=1"},
		"an instance":                           {cut: []string{"3g.40gb@4"}, held: "a=MIG-0/4", want: "0.5 0.5 0 a=0.5"},
		"an instance in the way of larger ones": {cut: []string{sevenSmall}, held: "a=MIG-0/0", want: "0.125 0.5 0.375 a=0.125"},
		"seven that leave a slice which no instance can have": {
			cut: []string{sevenSmall}, held: "a=MIG-0/0,MIG-0/1,MIG-0/2,MIG-0/3 b=MIG-0/4,MIG-0/5,MIG-0/6", want: "0.875 0 0.125 a=0.5 b=0.375",
		},
		"replicas of a GPU":                     {held: "a=GPU-0::0 b=GPU-0::1,GPU-0::3", change: timeSliced, want: "0.75 0.25 0 a=0.25 b=0.5"},
		"replicas of an instance":               {cut: []string{"3g.40gb@4"}, held: "a=MIG-0/4::2", change: timeSliced, want: "0.125 0.875 0 a=0.125"},
		"replicas of a GPU that is kept back":   {held: "a=GPU-0::0", change: func(seen *state.Observed) { timeSliced(seen); keep(seen, "GPU-0") }, want: "0.25 0.75 0 a=0.25"},
		"replicas of all that is kept back":     {held: "a=GPU-0::1", want: "0.5 0.5 0 a=0.5"},
		"two pods on one claim":                 {held: "a=*GPU-0 b=*GPU-0", want: "1 0 0 a=0.5 b=0.5"},
		"a replica, and a pod without one":      {held: "a=GPU-0::0 b=*GPU-0", change: timeSliced, want: "0.5 0.5 0 a=0.25 b=0.25"},
		"all replicas, and a pod without one":   {held: "a=GPU-0::0,GPU-0::1,GPU-0::2,GPU-0::3 b=*GPU-0", change: timeSliced, want: "1 0 0 a=0.8 b=0.2"},
		"an instance, and the GPU all the same": {cut: []string{"3g.40gb@4"}, held: "a=MIG-0/4 b=*GPU-0", want: "1 0 0 a=0.5 b=0.5"},
		"a GPU that is lost":                    {change: func(seen *state.Observed) { seen.GPUs[0].Lost = true }, want: "0 0 1"},
		"a GPU that is lost with its pod":       {held: "a=GPU-0", change: func(seen *state.Observed) { seen.GPUs[0].Lost = true }, want: "1 0 0 a=1"},
		"a GPU that cannot be cut":              {change: func(seen *state.Observed) { seen.GPUs = seen.GPUs[2:] }, want: "0 1 0"},
		"GPUs that are lost without a name":     {change: func(seen *state.Observed) { seen.GPUs = []nvml.GPU{{Lost: true}, {Lost: true, Index: 1}} }, want: "0 0 1"},
		"compute instances": {cut: []string{"3g.40gb@4"}, held: "a=MIG-one b=MIG-two", change: func(seen *state.Observed) {
			seen.GPUs[0].Instances[0].Devices = []nvml.Device{{UUID: "MIG-one", Part: nvml.Part{Span: nvml.Span{Size: 1}}}, {UUID: "MIG-two", Part: nvml.Part{Span: nvml.Span{Size: 2}}}}
		}, want: "0.5 0.5 0 a=0.167 b=0.333"},
		"one of two compute instances": {cut: []string{"2g.20gb@4"}, held: "a=MIG-one", change: func(seen *state.Observed) {
			seen.GPUs[0].Instances[0].Devices = []nvml.Device{{UUID: "MIG-one"}, {UUID: "MIG-two"}}
		}, want: "0.125 0.625 0.25 a=0.125"},
		"a pod that may have any":             {held: "a=GPU-unknown"},
		"kubelet does not answer":             {held: "a=GPU-0", change: func(seen *state.Observed) { seen.Kubelet.Err = errors.New("no answer") }},
		"an observation that has ended early": {change: func(seen *state.Observed) { seen.Complete = false }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seen := &state.Observed{Complete: true, Node: &corev1.Node{}, GPUs: simulated(t, row.cut...)}
			have(seen, row.held)
			if row.change != nil {
				row.change(seen)
			}
			m := New(testclock.NewFakePassiveClock(time.Now()))
			m.Observed(seen, state.Desired{})
			if got := divided(m.observed); got != row.want {
				t.Errorf("got %q, want %q", got, row.want)
			}
			count, err := testutil.GatherAndCount(m.Gatherer(), config.MetricGPUShare, config.MetricPodGPUShare)
			if err != nil || (count > 0) != (row.want != "") {
				t.Errorf("%d series, error %v", count, err)
			}
		})
	}
}

// keep has kubelet offer no device of the GPU, as of one that its plugin has found unhealthy.
func keep(seen *state.Observed, gpu string) {
	for name, ids := range seen.Kubelet.Offered {
		seen.Kubelet.Offered[name] = slices.DeleteFunc(ids, func(id string) bool { return capacity.DeviceOf(id) == gpu })
	}
}

// divided says how the first GPU is divided.
func divided(o *observation) string {
	if o == nil || len(o.shares.gpus) == 0 {
		return ""
	}
	g := o.shares.gpus[0]
	short := func(value float64) float64 { return math.Round(1000*value) / 1000 }
	out := fmt.Sprint(short(g.used), short(g.idle), short(g.lost))
	of := map[string]float64{}
	for p, value := range o.shares.pods {
		if p.gpu == g.gpu {
			of[p.pod] += value
		}
	}
	for _, pod := range slices.Sorted(maps.Keys(of)) {
		out += fmt.Sprintf(" %s=%v", pod, short(of[pod]))
	}
	return out
}

// What a pod had is not reported for ever while the driver is silent, and not left out while a GPU is reset.
func TestSharesOutliveFiveMinutesInWhichNothingIsObserved(t *testing.T) {
	t.Parallel()
	clock := testclock.NewFakePassiveClock(time.Now())
	m := New(clock)
	seen := &state.Observed{Complete: true, Node: &corev1.Node{}, GPUs: simulated(t)}
	have(seen, "a=GPU-0")
	m.Observed(seen, state.Desired{})
	for _, row := range []struct {
		after time.Duration
		want  string
	}{{4 * time.Minute, "1 0 0 a=1"}, {2 * time.Minute, ""}} {
		clock.SetTime(clock.Now().Add(row.after))
		m.Observed(&state.Observed{}, state.Desired{})
		if got := divided(m.observed); got != row.want {
			t.Errorf("%s later: got %q, want %q", row.after, got, row.want)
		}
	}
}

// A day of twenty changes: whatever stands and whoever has it, also in the middle of a change, what is used, idle and lost is all of each GPU.
func TestTwentyCutsOfADayAddUp(t *testing.T) {
	t.Parallel()
	for _, model := range []string{"A30", "A100-40GB", "H100-80GB", "H200", "B200", "RTX-PRO-6000"} {
		t.Run(model, func(t *testing.T) {
			t.Parallel()
			n, err := gpusim.Create(t.TempDir(), gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: model}, {Model: model}}})
			if err != nil {
				t.Fatal(err)
			}
			defer n.Close()
			random := rand.New(rand.NewPCG(20, 1))
			driver := n.Driver()
			look := func() []nvml.GPU {
				gpus, err := driver.Snapshot(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				return gpus
			}
			m := New(testclock.NewFakePassiveClock(time.Now()))
			for range 20 {
				uuid := look()[random.IntN(2)].UUID
				cut := func(gpu nvml.GPU) {
					for _, i := range gpu.Instances { // in the middle of the change some stand
						if err := driver.Destroy(t.Context(), gpu.UUID, i.Placed); err != nil {
							t.Fatal(err)
						}
						addsUp(t, m, look(), random)
					}
					if err := driver.SetMode(t.Context(), gpu.UUID, true); err != nil {
						t.Fatal(err)
					}
					if err := driver.Reset(t.Context(), gpu.UUID); err != nil {
						t.Fatal(err)
					}
				}
				for _, gpu := range look() {
					if gpu.UUID == uuid {
						cut(gpu)
					}
				}
				for range 12 {
					gpus := look()
					gpu := gpus[slices.IndexFunc(gpus, func(g nvml.GPU) bool { return g.UUID == uuid })]
					p := gpu.Profiles[random.IntN(len(gpu.Profiles))]
					at := p.Placements[random.IntN(len(p.Placements))]
					// What has no room is refused.
					_ = driver.Create(t.Context(), uuid, nvml.Placed{Profile: p.Name, Span: at})
				}
				for range 10 {
					addsUp(t, m, look(), random)
				}
			}
		})
	}
}

// given gives devices of the GPUs to pods at random.
func given(gpus []nvml.GPU, random *rand.Rand) *state.Observed {
	seen := &state.Observed{Complete: true, Node: &corev1.Node{}, GPUs: gpus}
	replicas := map[string]int{}
	if n := 1 + random.IntN(4); n > 1 {
		replicas[nvml.ResourceGPU] = n
	}
	shared(seen, replicas)
	for _, name := range slices.Sorted(maps.Keys(seen.Kubelet.Offered)) {
		for _, id := range seen.Kubelet.Offered[name] {
			switch random.IntN(4) {
			case 0:
				have(seen, fmt.Sprintf("pod-%d=%s", len(seen.Holders.Pods), id))
			case 1:
				have(seen, fmt.Sprintf("pod-%d=*%s", len(seen.Holders.Pods), capacity.DeviceOf(id)))
			}
		}
	}
	return seen
}

// addsUp gives devices to pods at random, and compares.
func addsUp(t *testing.T, m *Metrics, gpus []nvml.GPU, random *rand.Rand) {
	t.Helper()
	m.Observed(given(gpus, random), state.Desired{})
	if len(m.observed.shares.gpus) != len(gpus) {
		t.Fatalf("%d GPUs have shares", len(m.observed.shares.gpus))
	}
	same := func(a, b float64) bool { return math.Abs(a-b) < 1e-9 }
	for at, g := range m.observed.shares.gpus {
		pods := 0.0
		held := map[string]bool{}
		for p, value := range m.observed.shares.pods {
			if p.gpu == g.gpu {
				pods += value
				held[p.device] = true
			}
		}
		if !same(g.used+g.idle+g.lost, 1) || !same(g.used, pods) || g.idle < 0 || g.lost < 0 {
			t.Fatalf("%s: used %v, idle %v, lost %v; pods have %v", gpus[at].Geometry(), g.used, g.idle, g.lost, pods)
		}
		// What is lost is what the fragmentation says of the free slices, and the slices that no instance can have.
		all, alone := gpus[at].MemorySlices(), gpus[at]
		alone.Instances = slices.DeleteFunc(slices.Clone(alone.Instances), func(i nvml.Instance) bool { return !held[i.Devices[0].UUID] })
		taken := 0
		for _, i := range alone.Instances {
			taken += i.Size
		}
		free := alone.FreeSlices()
		lost := float64(all-taken-free) + float64(free)*m.observed.room.fragmentation[gpus[at].UUID]
		if held[g.gpu] {
			lost = 0
		}
		if !same(lost, g.lost*float64(all)) {
			t.Fatalf("%s: lost are %v of %d slices, by the fragmentation %v", alone.Geometry(), g.lost*float64(all), all, lost)
		}
	}
}
