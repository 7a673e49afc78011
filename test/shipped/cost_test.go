package shipped_test

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	sigsyaml "sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/render"
	"github.com/gpuslice/gpuslice/test/agenttest"
	"github.com/gpuslice/gpuslice/test/monitoring"
)

const prices = `currency: USD
default: 1.10
models:
  - model: NVIDIA H100 80GB HBM3
    perHour: 2.49
`

// priced are the rules that are shipped, with those that are rendered of a file of prices.
func priced(t *testing.T, args ...string) monitoring.Rules {
	t.Helper()
	text := agenttest.Said(t, []cluster.Command{render.Command}, prices, append([]string{"render", "prices", "-f", "-"}, args...)...)
	var rendered struct{ Spec monitoring.Rules }
	if err := sigsyaml.Unmarshal([]byte(text), &rendered); err != nil || len(rendered.Spec.Groups) == 0 {
		t.Fatalf("%v:\n%s", err, text)
	}
	out := shippedRules(t)
	out.Groups = slices.Concat(rendered.Spec.Groups, out.Groups)
	return out
}

// day has the series of a day with a sample for each minute from 0 to 1440.
type day struct {
	values map[string][]string
}

// set gives a series a value from a minute on, until another is set or it ends. Prometheus marks the first scrape without a series.
func (d day) set(series string, from, to int, value float64) {
	if d.values[series] == nil {
		d.values[series] = slices.Repeat([]string{"_"}, 1441)
	}
	for minute := from; minute < to; minute++ {
		d.values[series][minute] = fmt.Sprint(value)
	}
	if to <= 1440 && d.values[series][to] == "_" {
		d.values[series][to] = "stale"
	}
}

func (d day) series() (out []monitoring.Series) {
	for _, name := range slices.Sorted(maps.Keys(d.values)) {
		out = append(out, monitoring.Series{Series: name, Values: strings.Join(d.values[name], " ")})
	}
	return out
}

// twentyCuts is a day in which the two GPUs of a node are cut again each 72 minutes, an H100 and one without a price of its own. It returns what each namespace
// costs, and what all does.
func twentyCuts(pod, namespace string) (d day, costs map[string]float64) {
	d, costs = day{map[string][]string{}}, map[string]float64{}
	random := rand.New(rand.NewPCG(20, 2))
	const target = `job="gpuslice/gpuslice-agent", node="n", pod="agent", namespace="gpuslice"`
	prices := map[string]float64{"NVIDIA H100 80GB HBM3": 2.49, "NVIDIA H200": 1.10}
	for _, model := range slices.Sorted(maps.Keys(prices)) {
		price := prices[model]
		for cut := range 20 {
			from, to := 72*cut+1, 72*cut+73
			if cut == 0 {
				from = 0 // the price of a model that is not listed begins an evaluation after its first GPU
			}
			used, lost := 0, 0
			for n := range 1 + random.IntN(3) {
				size := 1 + random.IntN(2)
				used += size
				team := fmt.Sprintf("team-%d", random.IntN(3))
				labels := map[string]string{"job": "gpuslice/gpuslice-agent", "node": "n", "pod": "agent", "namespace": "gpuslice"}
				maps.Copy(labels, map[string]string{
					pod: fmt.Sprintf("pod-%d-%d", cut, n), namespace: team, "model": model, "gpu": model, "device": fmt.Sprint("MIG-", n),
					"resource": fmt.Sprintf("nvidia.com/mig-%dg.%d0gb", size, size),
				})
				var text []string
				for _, name := range slices.Sorted(maps.Keys(labels)) {
					text = append(text, fmt.Sprintf("%s=%q", name, labels[name]))
				}
				d.set("gpuslice_pod_gpu_share{"+strings.Join(text, ",")+"}", from, to, float64(size)/8)
				costs[team] += price * 1.2 * float64(size) / 8
			}
			lost = random.IntN(9 - used)
			for state, share := range map[string]int{"used": used, "lost": lost, "idle": 8 - used - lost} {
				d.set(fmt.Sprintf("gpuslice_gpu_share{%s, gpu=%q, model=%q, state=%q}", target, model, model, state), from, to, float64(share)/8)
				costs[state] += price * 1.2 * float64(share) / 8
			}
		}
	}
	return d, costs
}

// To the hundredth of a cent, whether Prometheus renames the agents' labels or not.
func TestADayOfTwentyCutsCostsWhatItsGPUsDo(t *testing.T) {
	atFullLength(t, "promtool")
	for name, labels := range map[string][2]string{"labels are renamed": {"exported_pod", "exported_namespace"}, "labels are honored": {"pod", "namespace"}} {
		t.Run(name, func(t *testing.T) {
			d, costs := twentyCuts(labels[0], labels[1])
			exactly := func(expression string, want float64, by string) monitoring.Check {
				return monitoring.Check{Expr: fmt.Sprintf("round(10000 * (%s))", expression), At: "1440m", Expected: []monitoring.Sample{{Labels: by, Value: int(math.Round(10000 * want))}}}
			}
			all := 24 * (2.49 + 1.10)
			checks := []monitoring.Check{
				// promtool has room for ten thousand samples in a query.
				exactly("sum(sum_over_time(gpuslice:gpu_cost:per_hour[1d:2m])) / 30", all, "{}"),
				exactly("min_over_time(sum(gpuslice:gpu_cost:per_hour)[1439m:1m])", all/24, "{}"),
				exactly("max_over_time(sum(gpuslice:gpu_cost:per_hour)[1439m:1m])", all/24, "{}"),
				exactly(`sum(sum_over_time(gpuslice:pod_gpu_cost:per_hour[1d:2m])) / 30`, costs["used"], "{}"),
				exactly(`sum(sum_over_time(gpuslice:resource_gpu_cost:per_hour[1d:2m])) / 30`, costs["used"], "{}"),
			}
			for who, cost := range costs {
				expression, label := fmt.Sprintf(`sum by (namespace, currency) (sum_over_time(gpuslice:namespace_gpu_cost:per_hour{namespace=%q}[1d:1m])) / 60`, who), "namespace"
				if !strings.HasPrefix(who, "team-") {
					expression, label = fmt.Sprintf(`sum by (state, currency) (sum_over_time(gpuslice:gpu_cost:per_hour{state=%q}[1d:1m])) / 60`, who), "state"
				}
				checks = append(checks, exactly(expression, cost, fmt.Sprintf(`{currency="USD", %s=%q}`, label, who)))
			}
			if err := monitoring.Evaluate(t.Context(), t.TempDir(), priced(t), d.series(), checks); err != nil {
				t.Error(err)
			}
		})
	}
}

// No rule chooses between two prices of a model, of whatever currency: it fails, for Prometheus' metrics and alerts of rules to show.
func TestTwoObjectsOfPricesStopTheCosts(t *testing.T) {
	atFullLength(t, "promtool")
	rules := priced(t)
	rules.Groups = slices.Concat(priced(t, "--name", "second").Groups[:1], rules.Groups)
	rules.Groups[0].Name = "second"
	input := []monitoring.Series{{Series: `gpuslice_gpu_share{node="n", gpu="a", model="NVIDIA H100 80GB HBM3", state="idle"}`, Values: "1x10"}}
	// promtool evaluates until the last check, the groups in any order.
	checks := []monitoring.Check{{Expr: "count(gpuslice:gpu_price:per_hour)", At: "5m", Expected: []monitoring.Sample{{Labels: "{}", Value: 2}}}}
	err := monitoring.Evaluate(t.Context(), t.TempDir(), rules, input, checks)
	if err == nil || !strings.Contains(err.Error(), "rule: gpuslice:gpu_cost:per_hour") || !strings.Contains(err.Error(), "found duplicate series") {
		t.Error(err)
	}
}

// While an agent is down, what its pods have is not known: it is neither charged nor idle. Prometheus ends the series at the first scrape that fails.
func TestWhatIsNotKnownCostsNothing(t *testing.T) {
	atFullLength(t, "promtool")
	const gpu = `node="n", gpu="a", model="NVIDIA H100 80GB HBM3"`
	input := []monitoring.Series{
		{Series: "gpuslice_gpu_share{" + gpu + `, state="used"}`, Values: "1x10 stale _x10 1x10"},
		{Series: "gpuslice_pod_gpu_share{" + gpu + `, namespace="team", pod="p", device="a", resource="gpu"}`, Values: "1x10 stale _x10 1x10"},
	}
	var checks []monitoring.Check
	for _, record := range []string{"gpuslice:gpu_cost:per_hour", "gpuslice:namespace_gpu_cost:per_hour"} {
		for at, want := range map[string][]monitoring.Sample{"10m": {{Labels: "{}", Value: 249}}, "11m": {}, "20m": {}, "23m": {{Labels: "{}", Value: 249}}} {
			checks = append(checks, monitoring.Check{Expr: "round(100 * sum(" + record + "))", At: at, Expected: want})
		}
	}
	if err := monitoring.Evaluate(t.Context(), t.TempDir(), priced(t), input, checks); err != nil {
		t.Error(err)
	}
}

// An agent is replaced: for a while there are its series and those of the next, which knows of a change in what pods have. A ruler has the series of two
// replicas of Prometheus.
func TestAGPUWithSeveralSeriesCostsWhatOneDoes(t *testing.T) {
	atFullLength(t, "promtool")
	for name, row := range map[string]struct{ targets, labels [2]string }{
		"two agents, labels are renamed": {[2]string{`pod="agent-1", namespace="gpuslice"`, `pod="agent-2", namespace="gpuslice"`}, [2]string{"exported_pod", "exported_namespace"}},
		"two agents, labels are honored": {[2]string{`instance="10.0.0.1:9400"`, `instance="10.0.0.2:9400"`}, [2]string{"pod", "namespace"}},
		"two replicas of Prometheus": {
			[2]string{`prometheus_replica="a", pod="agent", namespace="gpuslice"`, `prometheus_replica="b", pod="agent", namespace="gpuslice"`},
			[2]string{"exported_pod", "exported_namespace"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			const gpu = `, node="n", gpu="a", model="NVIDIA H100 80GB HBM3"`
			var input []monitoring.Series
			add := func(format, value string, args ...any) {
				input = append(input, monitoring.Series{Series: fmt.Sprintf(format, args...), Values: value + "x10"})
			}
			for i, target := range row.targets {
				for state, share := range map[string][2]string{"used": {"0.5", "0.25"}, "idle": {"0.25", "0.5"}, "lost": {"0.25", "0.25"}} {
					add(`gpuslice_gpu_share{%s%s, state=%q}`, share[i], target, gpu, state)
				}
				for j, value := range []string{"0.25", "0.125"} { // two slices of a resource
					add(`gpuslice_pod_gpu_share{%s%s, %s="p", %s="team", device="MIG-%d", resource="nvidia.com/mig-1g.20gb"}`, value, target, gpu, row.labels[0], row.labels[1], j)
				}
			}
			input = append(input, monitoring.Series{Series: `node_cpu_hourly_cost{instance="n", node="n"}`, Values: "1x10"})
			in := func(expression, labels string, want int) monitoring.Check {
				return monitoring.Check{Expr: "round(1000 * " + expression + ")", At: "5m", Expected: []monitoring.Sample{{Labels: labels, Value: want}}}
			}
			checks := []monitoring.Check{
				in("sum(gpuslice:gpu_cost:per_hour)", "{}", 2490),
				in("gpuslice:pod_gpu_cost:per_hour", `{currency="USD", namespace="team", node="n", pod="p", resource="nvidia.com/mig-1g.20gb"}`, 934),
				in("gpuslice:namespace_gpu_cost:per_hour", `{currency="USD", namespace="team"}`, 934),
				in("gpuslice:resource_gpu_cost:per_hour", `{currency="USD", resource="nvidia.com/mig-1g.20gb"}`, 934),
				in("node_gpu_hourly_cost", `{instance="n", node="n"}`, 2490),
				in("node_gpu_count", `{instance="n", node="n"}`, 1000),
			}
			if err := monitoring.Evaluate(t.Context(), t.TempDir(), priced(t, "--opencost"), input, checks); err != nil {
				t.Error(err)
			}
		})
	}
}

// The rules for OpenCost have the labels of its own metrics. A pod's parts go to the containers that request devices, or else to all.
func TestOpenCostFindsWhatPodsHaveUnderItsOwnNames(t *testing.T) {
	atFullLength(t, "promtool")
	const target = `job="gpuslice/gpuslice-agent", node="n", pod="agent", namespace="gpuslice"`
	const opencost = `instance="n", node="n"`
	var input []monitoring.Series
	for series, value := range map[string]string{
		`gpuslice_gpu_share{` + target + `, gpu="a", model="NVIDIA H100 80GB HBM3", state="used"}`:                                                                                     "0.75",
		`gpuslice_gpu_share{` + target + `, gpu="a", model="NVIDIA H100 80GB HBM3", state="idle"}`:                                                                                     "0.25",
		`gpuslice_gpu_share{` + target + `, gpu="a", model="NVIDIA H100 80GB HBM3", state="lost"}`:                                                                                     "0",
		`gpuslice_pod_gpu_share{` + target + `, exported_namespace="team", exported_pod="one", gpu="a", device="m", resource="nvidia.com/mig-3g.40gb", model="NVIDIA H100 80GB HBM3"}`: "0.5",
		`gpuslice_pod_gpu_share{` + target + `, exported_namespace="team", exported_pod="by-claim", gpu="a", device="o", resource="gpu", model="NVIDIA H100 80GB HBM3"}`:               "0.25",
		`kube_pod_container_resource_requests{namespace="team", pod="one", uid="1", container="work", node="n", resource="nvidia_com_mig_3g_40gb", unit="integer"}`:                    "1",
		`container_cpu_allocation{namespace="team", pod="one", container="work", uid="1", ` + opencost + `}`:                                                                           "2",
		`container_cpu_allocation{namespace="team", pod="one", container="sidecar", uid="1", ` + opencost + `}`:                                                                        "0.1",
		`container_cpu_allocation{namespace="team", pod="by-claim", container="x", uid="2", ` + opencost + `}`:                                                                         "0",
		`container_cpu_allocation{namespace="team", pod="by-claim", container="y", uid="2", ` + opencost + `}`:                                                                         "3",
		// It moves from n to m, and the series of n have not ended.
		`gpuslice_pod_gpu_share{` + target + `, exported_namespace="team", exported_pod="moves-0", gpu="a", device="w", resource="gpu", model="NVIDIA H100 80GB HBM3"}`:                                   "2",
		`gpuslice_pod_gpu_share{job="gpuslice/gpuslice-agent", node="m", pod="b", exported_namespace="team", exported_pod="moves-0", gpu="b", device="w", resource="gpu", model="NVIDIA H100 80GB HBM3"}`: "1",
		`kube_pod_container_resource_requests{namespace="team", pod="moves-0", uid="4", container="work", node="n", resource="nvidia_com_gpu", unit="integer"}`:                                           "2",
		`kube_pod_container_resource_requests{namespace="team", pod="moves-0", uid="5", container="work", node="m", resource="nvidia_com_gpu", unit="integer"}`:                                           "1",
		`container_cpu_allocation{namespace="team", pod="moves-0", container="work", uid="4", ` + opencost + `}`:                                                                                          "1",
		`container_cpu_allocation{namespace="team", pod="moves-0", container="work", uid="5", instance="m", node="m"}`:                                                                                    "1",
		// The sidecar of pod one requests none of what it lists, and so does the one container of pod none.
		`kube_pod_container_resource_requests{namespace="team", pod="one", uid="1", container="sidecar", node="n", resource="nvidia_com_gpu", unit="integer"}`:       "0",
		`gpuslice_pod_gpu_share{` + target + `, exported_namespace="team", exported_pod="none", gpu="a", device="v", resource="gpu", model="NVIDIA H100 80GB HBM3"}`: "0.125",
		`kube_pod_container_resource_requests{namespace="team", pod="none", uid="6", container="work", node="n", resource="nvidia_com_gpu", unit="integer"}`:         "0",
		`container_cpu_allocation{namespace="team", pod="none", container="work", uid="6", ` + opencost + `}`:                                                        "1",
		`container_cpu_allocation{namespace="team", pod="no-gpu", container="z", uid="3", ` + opencost + `}`:                                                         "3",
		`node_cpu_hourly_cost{uid="u", instance_type="p5", region="here", provider_id="p", arch="amd64", ` + opencost + `}`:                                          "0.03",
	} {
		input = append(input, monitoring.Series{Series: series, Values: value + "x10"})
	}
	const ofNode = `, arch="amd64", instance="n", instance_type="p5", node="n", provider_id="p", region="here", uid="u"}`
	container := func(pod, name, uid string, value int) monitoring.Sample {
		return monitoring.Sample{Labels: fmt.Sprintf(`{container=%q, instance="n", namespace="team", node="n", pod=%q, uid=%q}`, name, pod, uid), Value: value}
	}
	checks := []monitoring.Check{
		{Expr: "label_replace(round(100 * node_gpu_hourly_cost), \"x\", \"y\", \"\", \"\")", At: "5m", Expected: []monitoring.Sample{{Labels: `{x="y"` + ofNode, Value: 249}}},
		{Expr: "node_gpu_count", At: "5m", Expected: []monitoring.Sample{{Labels: `{__name__="node_gpu_count"` + ofNode, Value: 1}}},
		{Expr: "1000 * container_gpu_allocation", At: "5m", Expected: []monitoring.Sample{
			container("one", "work", "1", 500), container("by-claim", "x", "2", 125), container("by-claim", "y", "2", 125),
			container("moves-0", "work", "4", 2000),
			{Labels: `{container="work", instance="m", namespace="team", node="m", pod="moves-0", uid="5"}`, Value: 1000},
			container("none", "work", "6", 125),
		}},
	}
	if err := monitoring.Evaluate(t.Context(), t.TempDir(), priced(t, "--opencost"), input, checks); err != nil {
		t.Error(err)
	}
}

// OpenCost multiplies what a GPU of a node costs by their number.
func TestAGPUWithoutAPriceCostsNothingInOpenCost(t *testing.T) {
	atFullLength(t, "promtool")
	rules := priced(t, "--opencost")
	rules.Groups[0].Rules = rules.Groups[0].Rules[:1] // without that of the other models
	input := []monitoring.Series{{Series: `node_cpu_hourly_cost{instance="n", node="n"}`, Values: "1x10"}}
	for gpu, model := range map[string]string{"a": "NVIDIA H100 80GB HBM3", "b": "NVIDIA T400", "c": "NVIDIA T400"} {
		input = append(input, monitoring.Series{Series: fmt.Sprintf(`gpuslice_gpu_share{node="n", gpu=%q, model=%q, state="idle"}`, gpu, model), Values: "1x10"})
	}
	want := []monitoring.Sample{{Labels: `{instance="n", node="n"}`, Value: 249}}
	checks := []monitoring.Check{{Expr: "round(100 * node_gpu_hourly_cost * node_gpu_count)", At: "5m", Expected: want}}
	if err := monitoring.Evaluate(t.Context(), t.TempDir(), rules, input, checks); err != nil {
		t.Error(err)
	}
}

// The types are the operator's own.
func TestPrometheusTakesTheRulesOfPrices(t *testing.T) {
	atFullLength(t, "promtool")
	text := agenttest.Said(t, []cluster.Command{render.Command}, prices, "render", "prices", "-f", "-", "--opencost")
	asList, err := sigsyaml.YAMLToJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	prometheusTool(t, "", "alerts", "["+string(asList)+"]", "objects")
}
