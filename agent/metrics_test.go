package agent_test

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// measured gives the next agent metrics.
func (p *pressure) measured() *metrics.Metrics {
	o := p.optionsFor(&p.host)
	p.agent = agent.New(o)
	return o.Metrics
}

func expectMetrics(t *testing.T, m *metrics.Metrics, want string, names ...string) {
	t.Helper()
	if err := testutil.GatherAndCompare(m.Gatherer(), strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
}

func TestMetricsOfMemoryAreThoseOfTheLastObservation(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, "seed: 1\ngpus: [{model: T4}]")
		m, gpu := p.measured(), p.gpus.UUIDs()[0]
		names := []string{
			"gpuslice_gpu_memory_total_bytes", "gpuslice_gpu_memory_used_bytes", "gpuslice_gpu_memory_pressure", "gpuslice_pod_gpu_memory_used_bytes",
		}
		expectMetrics(t, m, "", names...)
		p.takes("small", gpu+"::0", 4096)
		p.takes("large", gpu+"::1", 10240)
		p.poll(time.Minute)
		head := strings.ReplaceAll(`
# HELP gpuslice_gpu_memory_pressure 1 if a GPU or an instance that several pods share is nearly full.
# TYPE gpuslice_gpu_memory_pressure gauge
gpuslice_gpu_memory_pressure{device="GPU",gpu="GPU"} 1
# HELP gpuslice_gpu_memory_total_bytes The memory of a GPU, or of one of its instances; device is the UUID of the GPU, or of the instance's first MIG device.
# TYPE gpuslice_gpu_memory_total_bytes gauge
gpuslice_gpu_memory_total_bytes{device="GPU",gpu="GPU"} 1.610612736e+10
# HELP gpuslice_gpu_memory_used_bytes The memory in use on a GPU, or on one of its instances.
# TYPE gpuslice_gpu_memory_used_bytes gauge
gpuslice_gpu_memory_used_bytes{device="GPU",gpu="GPU"} 1.5032385536e+10
# HELP gpuslice_pod_gpu_memory_used_bytes The memory that the processes of a pod use on a GPU, or on one of its instances.
# TYPE gpuslice_pod_gpu_memory_used_bytes gauge
gpuslice_pod_gpu_memory_used_bytes{device="GPU",gpu="GPU",namespace="team",pod="large"} 1.073741824e+10
gpuslice_pod_gpu_memory_used_bytes{device="GPU",gpu="GPU",namespace="team",pod="small"} 4.294967296e+09
`, `"GPU"`, `"`+gpu+`"`)
		expectMetrics(t, m, head, names...)

		p.removePod("small")
		p.poll(0)
		gone := strings.ReplaceAll(head, `gpuslice_pod_gpu_memory_used_bytes{device="`+gpu+`",gpu="`+gpu+`",namespace="team",pod="small"} 4.294967296e+09`+"\n", "")
		gone = strings.ReplaceAll(strings.ReplaceAll(gone, "1.5032385536e+10", "1.073741824e+10"), `gpuslice_gpu_memory_pressure{device="`+gpu+`",gpu="`+gpu+`"} 1`,
			`gpuslice_gpu_memory_pressure{device="`+gpu+`",gpu="`+gpu+`"} 0`)
		expectMetrics(t, m, gone, names...)

		p.wrapDriver = func(d nvml.Driver) nvml.Driver { return unloaded{d} }
		m = p.measured()
		p.poll(0)
		expectMetrics(t, m, "", names...)
	})
}

func TestMetricsShowHowAChangeGoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, "gpus: [{model: A100-40GB}]")
		m := p.measured()
		expectMetrics(t, m, "", "gpuslice_partition_ready", "gpuslice_converged", "gpuslice_steps_total")
		p.poll(0)
		const at = `
# HELP gpuslice_converged 1 if hardware and capacity are as the labels request, and nothing is left to do.
# TYPE gpuslice_converged gauge
gpuslice_converged %d
# HELP gpuslice_partition_ready 1 if the condition GPUPartitionReady is True.
# TYPE gpuslice_partition_ready gauge
gpuslice_partition_ready{reason=%q} 1
`
		expectMetrics(t, m, fmt.Sprintf(at, 0, config.ReasonNotRequested), "gpuslice_partition_ready", "gpuslice_converged")

		<-time.After(time.Minute)
		p.converge("all-3g.20gb")
		<-time.After(time.Hour)
		expectMetrics(t, m, fmt.Sprintf(at, 1, config.ReasonConverged), "gpuslice_partition_ready", "gpuslice_converged")
		got := counters(t, m)
		for name, want := range map[string]float64{
			"gpuslice_steps_total SetMode done": 1, "gpuslice_steps_total Create done": 2, "gpuslice_steps_total Release done": 1,
		} {
			if got[name] != want {
				t.Errorf("%s is %v, want %v", name, got[name], want)
			}
		}
		if waits := got["gpuslice_steps_total VerifyCapacity waiting"]; waits < 1 {
			t.Error("the wait for capacity is not counted")
		}
		// A minute before the change, an hour after it, and until the loop observed again.
		least := time.Hour + time.Minute
		most := least + p.settings.NodeHeartbeat
		if idle := time.Duration(got["gpuslice_phase_seconds_total Idle"] * float64(time.Second)); idle < least || idle > most {
			t.Errorf("%v were spent idle, want %v to %v", idle, least, most)
		}
		if got["gpuslice_phase_seconds_total Verifying"] == 0 {
			t.Error("no time was spent verifying")
		}
	})
}

func TestStepsThatFailAreCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, "gpus: [{model: H100-80GB, mig: true}]")
		m := p.measured()
		p.setFault(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{Return: gpusim.Unknown})
		p.converge("all-3g.40gb")
		got := counters(t, m)
		if failed, done := got["gpuslice_steps_total Create failed"], got["gpuslice_steps_total Create done"]; failed != 1 || done != 2 {
			t.Errorf("%v instances could not be made and %v were, want 1 and 2", failed, done)
		}
	})
}

// counters returns the counters and gauges of the agent, by name and the values of their labels.
func counters(t *testing.T, m *metrics.Metrics) map[string]float64 {
	t.Helper()
	families, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, s := range f.GetMetric() {
			name := f.GetName()
			for _, l := range s.GetLabel() {
				name += " " + l.GetValue()
			}
			out[name] = s.GetCounter().GetValue() + s.GetGauge().GetValue()
		}
	}
	return out
}

// series counts the series of each metric.
func series(t *testing.T, m *metrics.Metrics) map[string]int {
	t.Helper()
	families, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]int{}
	for _, f := range families {
		out[f.GetName()] = len(f.GetMetric())
	}
	return out
}

func TestMetricsShowWhatIsRequestedAndWhatThereIs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, "seed: 1\ngpus: [{model: A100-40GB, mig: true}]")
		m := p.measured()
		p.poll(0)
		if problems, err := testutil.GatherAndLint(m.Gatherer()); err != nil || len(problems) > 0 {
			t.Errorf("promlint: %v, %v", problems, err)
		}
		if got := series(t, m)["gpuslice_request_info"]; got != 0 {
			t.Errorf("no label asks for anything, and gpuslice_request_info is exported %d times", got)
		}
		p.converge("all-3g.20gb")
		got := series(t, m)
		for name, want := range map[string]int{
			"gpuslice_request_info": 1, "gpuslice_instance_info": 2, "gpuslice_instances": 1, "gpuslice_phase_info": 1,
			"gpuslice_capacity_expected": 1, "gpuslice_capacity_kubelet": 1, "gpuslice_capacity_allocatable": 1,
		} {
			if got[name] != want {
				t.Errorf("%s has %d series, want %d", name, got[name], want)
			}
		}
		expectMetrics(t, m, `
# HELP gpuslice_capacity_expected How many devices of a resource the GPUs have in their present geometry and sharing.
# TYPE gpuslice_capacity_expected gauge
gpuslice_capacity_expected{resource="nvidia.com/mig-3g.20gb"} 2
# HELP gpuslice_capacity_kubelet How many devices of a resource kubelet can allocate, as it says on the node. Where NVIDIA's DRA driver advertises the GPUs, it is the number in its ResourceSlices.
# TYPE gpuslice_capacity_kubelet gauge
gpuslice_capacity_kubelet{resource="nvidia.com/mig-3g.20gb"} 2
`, "gpuslice_capacity_expected", "gpuslice_capacity_kubelet")
		if problems, err := testutil.GatherAndLint(m.Gatherer()); err != nil || len(problems) > 0 {
			t.Errorf("promlint: %v, %v", problems, err)
		}
		if counters(t, m)["gpuslice_last_successful_pass_timestamp_seconds"] == 0 {
			t.Error("a change was done, and no pass counts as successful")
		}
	})
}

func TestMetricsShowWhatKeepsAChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, "gpus: [{model: A100-40GB, mig: true}]")
		m := p.measured()
		p.annotate(config.AnnotationHold, "ask team-a")
		p.label("all-3g.20gb")
		p.poll(0)
		<-time.After(time.Minute)
		p.poll(0)
		got := counters(t, m)
		if held := got["gpuslice_blocked_seconds_total "+string(config.ReasonHeld)]; held < 60 {
			t.Errorf("a change that was held for a minute was blocked for %v s: %v", held, got)
		}
		p.poll(0)
		if got := counters(t, m)["gpuslice_blocks_total "+string(config.ReasonHeld)]; got != 1 {
			t.Errorf("it was held %v times, want 1", got)
		}
	})
}

// The mean wait for a slot, which the two metrics give, is of those that had to wait.
func TestASlotThatIsTakenAtOnceKeepsNoChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.pool()
		o := w.optionsFor(&w.host)
		w.agent = agent.New(o)
		w.label("all-1g.10gb")
		w.reach("all-1g.10gb")
		got := counters(t, o.Metrics)
		for name, n := range got {
			if strings.HasPrefix(name, "gpuslice_blocks_total ") && n > 0 {
				t.Errorf("nothing kept the change, and %s is %v", name, n)
			}
		}
		if n := got["gpuslice_steps_total AcquireSlot done"]; n != 1 {
			t.Errorf("the slot was taken %v times", n)
		}
	})
}

func TestMetricsCountWhatAnAgentTakesOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, "gpus: [{model: A100-40GB, mig: true}]")
		p.label("all-3g.20gb")
		p.passes("the journal", func() bool { return p.node().Annotations[config.AnnotationJournal] != "" })
		m := p.measured() // the agent before is dead
		p.converge("all-3g.20gb")
		if got := counters(t, m)["gpuslice_recoveries_total interrupted"]; got != 1 {
			t.Errorf("a change was taken over %v times, want 1", got)
		}
	})
}

func TestMetricsShowWhetherTheNodeIsKeptFromPods(t *testing.T) {
	t.Parallel()
	for name, byClaims := range map[string]bool{"by the taint": false, "by the cordon": true} {
		t.Run(name, func(t *testing.T) { testNodeFenced(t, byClaims) })
	}
}

func testNodeFenced(t *testing.T, byClaims bool) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		p := &pressure{world: newWorld(t, "gpus: [{model: A100-40GB}]")}
		p.noPlugin, p.draDriver = byClaims, byClaims
		p.again()
		p.poll(0)
		relent, m := p.budgetKeepsTeam(), p.measured()
		fenced := func() string {
			p.poll(0)
			return fmt.Sprint(series(t, m)["gpuslice_node_fenced"], " of ", counters(t, m)["gpuslice_node_fenced"])
		}
		if got := fenced(); got != "1 of 0" {
			t.Errorf("at rest gpuslice_node_fenced is %s", got)
		}
		if byClaims {
			p.podWithClaim("train", "gpu-0")
		} else {
			p.pod("train", p.gpus.UUIDs()[0])
		}
		p.label("all-3g.20gb")
		if got := fenced(); got != "1 of 1" {
			t.Errorf("while a pod does not leave gpuslice_node_fenced is %s", got)
		}
		through := p.wrapDriver
		p.wrapDriver = func(d nvml.Driver) nvml.Driver { return unloaded{d} }
		m = p.measured()
		if got := fenced(); got != "1 of 1" {
			t.Errorf("after a restart without a driver gpuslice_node_fenced is %s", got)
		}
		p.wrapDriver = through
		m = p.measured()
		relent()
		p.converge("all-3g.20gb")
		if got := fenced(); got != "1 of 0" {
			t.Errorf("after the change gpuslice_node_fenced is %s", got)
		}
	})
}

// A day of twenty changes with pods that are evicted in each: whenever Prometheus asks, also while a GPU is being cut, what is used, idle and lost is all of
// each GPU, and what pods have is what is used. Where the agent does not know what pods have, there is nothing.
func TestADayOfTwentyChangesIsAccountedForAtEachMoment(t *testing.T) {
	t.Parallel()
	configs := []string{"all-1g.10gb", "all-balanced", "all-3g.40gb", "all-disabled", "all-2g.20gb"}
	for name, dra := range map[string]bool{"beside the plugin": false, "beside the DRA driver": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.noPlugin, w.draDriver = dra, dra
				o := w.optionsFor(&w.host)
				w.agent = agent.New(o)
				w.spend(time.Minute)
				began, cutting, unknown := time.Now(), 0, 0
				look := func() (used map[string]float64) {
					got := counters(t, o.Metrics)
					used, known := usedOf(t, got, w.gpus.UUIDs())
					switch {
					case !known:
						unknown++
					case got["gpuslice_node_fenced"] == 1:
						cutting++
					}
					return used
				}
				for n := range 20 {
					name := configs[n%len(configs)]
					w.label(name)
					w.passes(name, func() bool { look(); return w.done(name)() })
					w.expectGivenBack()
					w.podOnOneMore(fmt.Sprintf("pod-%d-a", n), dra)
					w.podOnOneMore(fmt.Sprintf("pod-%d-b", n), dra)
					w.spend(time.Hour)
					var run []string
					for _, p := range w.podsIn("team") {
						run = append(run, p.Name)
					}
					slices.Sort(run)
					if used := slices.Sorted(maps.Keys(look())); !slices.Equal(used, run) || len(run) == 0 {
						t.Fatalf("pods %v have devices, and %v are accounted for", run, used)
					}
				}
				if cutting < 100 || time.Since(began) < 20*time.Hour {
					t.Errorf("asked %d times during changes, in %s", cutting, time.Since(began))
				}
				t.Logf("asked %d times during changes; not known %d times", cutting, unknown)
			})
		})
	}
}

// podOnOneMore gives a pod the last device that no pod has, if there is one: by its UUID, or by the name that NVIDIA's DRA driver has for it.
func (w *world) podOnOneMore(name string, dra bool) {
	w.t.Helper()
	var devices []string
	for _, s := range w.published {
		for _, d := range s.Spec.Devices {
			devices = append(devices, d.Name)
		}
	}
	for _, ids := range w.offered {
		devices = append(devices, ids...)
	}
	for _, p := range w.podsIn("team") {
		devices = slices.DeleteFunc(devices, func(d string) bool { return d == p.Annotations["on"] })
	}
	if len(devices) == 0 {
		return
	}
	device := slices.Max(devices)
	on := func(p *corev1.Pod) { p.Annotations["on"] = device }
	if dra {
		w.podWithClaim(name, device, on)
		return
	}
	w.pod(name, device, on)
}

// usedOf is what pods have of the GPUs together. It fails the test unless the parts of each GPU are all of it. It is not known where there are none.
func usedOf(t *testing.T, got map[string]float64, gpus []string) (used map[string]float64, known bool) {
	t.Helper()
	used = map[string]float64{}
	all, byState := map[string]float64{}, map[string]float64{}
	for name, value := range got {
		switch fields := strings.Fields(name); fields[0] {
		case "gpuslice_gpu_share":
			all[fields[1]] += value
			byState[fields[len(fields)-1]] += value
		case "gpuslice_pod_gpu_share":
			pod := fields[slices.IndexFunc(fields, func(f string) bool { return strings.HasPrefix(f, "pod-") })]
			used[pod] += value
			byState["used"] -= value
		}
	}
	if len(all) == 0 && len(used) == 0 {
		return used, false
	}
	for _, gpu := range gpus {
		if math.Abs(all[gpu]-1) > 1e-9 {
			t.Fatalf("%v of GPU %s is accounted for", all[gpu], gpu)
		}
	}
	if len(all) != len(gpus) || math.Abs(byState["used"]) > 1e-9 {
		t.Fatalf("%d GPUs are accounted for; pods have %v, which differs from what is used by %v", len(all), used, byState["used"])
	}
	return used, true
}
