package shipped_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/utils/clock"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/agent/monitor/health"
	"github.com/gpuslice/gpuslice/agent/monitor/idle"
	"github.com/gpuslice/gpuslice/agent/monitor/memory"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/access"
	"github.com/gpuslice/gpuslice/test/monitoring"
)

var prometheusComponent = monitoring.Of(root)

// prometheusTool runs promtool, or the project's reader of expressions.
func prometheusTool(t *testing.T, dir, name, stdin string, args ...string) {
	t.Helper()
	atFullLength(t, "promtool")
	if _, err := monitoring.Run(t.Context(), dir, name, stdin, args...); err != nil {
		t.Fatal(err)
	}
}

func shippedRules(t *testing.T) monitoring.Rules {
	t.Helper()
	rules, err := prometheusComponent.Rules()
	if err != nil {
		t.Fatal(err)
	}
	return rules
}

// Each alert has a case in which it fires, and one in which it does not; promtool says that they come true.
func TestEachAlertFiresWhenItShouldAndElseDoesNot(t *testing.T) {
	dir := t.TempDir()
	cases, err := os.ReadFile(root + "/test/alerts/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	rules := shippedRules(t)
	groups, err := sigsyaml.Marshal(rules)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{"alerts.yaml": cases, "rules.yaml": groups} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	prometheusTool(t, dir, "promtool", "", "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml")
	prometheusTool(t, dir, "promtool", "", "test", "rules", "alerts.yaml")

	fires, not := alertsIn(t, cases)
	for _, group := range rules.Groups {
		for _, rule := range group.Rules {
			if rule.Alert != "" && (!fires[rule.Alert] || !not[rule.Alert]) {
				t.Errorf("%s: fires in a case: %t; never fires in a case: %t", rule.Alert, fires[rule.Alert], not[rule.Alert])
			}
		}
	}
}

// alertsIn are the alerts that fire in some case, and those that never do in one.
func alertsIn(t *testing.T, cases []byte) (fires, not map[string]bool) {
	t.Helper()
	var read struct {
		Tests []struct {
			Checks []struct {
				Alert    string `json:"alertname"`
				Expected []any  `json:"exp_alerts"`
			} `json:"alert_rule_test"`
		} `json:"tests"`
	}
	if err := sigsyaml.Unmarshal(cases, &read); err != nil {
		t.Fatal(err)
	}
	fires, not = map[string]bool{}, map[string]bool{}
	for _, test := range read.Tests {
		quiet := map[string]bool{}
		for _, check := range test.Checks {
			if len(check.Expected) > 0 {
				fires[check.Alert], quiet[check.Alert] = true, false
			} else if _, silent := quiet[check.Alert]; !silent {
				quiet[check.Alert] = true
			}
		}
		for alert, is := range quiet {
			not[alert] = not[alert] || is
		}
	}
	return fires, not
}

// A query of what no agent reports finds nothing, and no one notices.
func TestEachQueryAsksForWhatTheAgentReports(t *testing.T) {
	atFullLength(t, "Prometheus' parser")
	metrics := descriptors()
	metrics["up"] = nil
	maps.Copy(metrics, monitoring.KubeStateMetrics())
	maps.Copy(metrics, map[string][]string{
		"DCGM_FI_PROF_GR_ENGINE_ACTIVE": {"UUID", "GPU_I_ID", "namespace", "pod"}, "DCGM_FI_DEV_POWER_USAGE": {"UUID", "GPU_I_ID"},
	})
	maps.Copy(metrics, monitoring.Kueue())
	maps.Copy(metrics, shippedRules(t).Records())
	queries := map[string]string{} // by expression, where it is
	for _, group := range shippedRules(t).Groups {
		for _, rule := range group.Rules {
			queries[rule.Expr] = rule.Alert + rule.Record
		}
	}
	dashboards(t, queries)
	for _, join := range joins(t) {
		queries[join] = "README.md"
	}
	if len(queries) < 40 {
		t.Fatalf("found %d queries", len(queries))
	}
	values := map[string]*regexp.Regexp{
		"reason": constants(t, "config/keys.go", `Reason = "(\w+)"`), "phase": constants(t, "agent/api/status.go", `Phase = "(\w+)"`),
		"severity": constants(t, "agent/monitor/health", `Severity = "(\w+)"`), "result": constants(t, "agent/report/metrics", `result\w+ += "(\w+)"`),
	}
	all, err := monitoring.Read(t.Context(), slices.Sorted(maps.Keys(queries)))
	if err != nil {
		t.Fatal(err)
	}
	for expression, asked := range all {
		for _, wrong := range wrong(asked, metrics, values) {
			t.Errorf("%s %s:\n%s", queries[expression], wrong, expression)
		}
	}
}

// A counter of the agent's begins with the first thing that it counts, as the one Xid of a GPU that has fallen off the bus: the increase of such a
// series is 0, and a panel that asks for it alone does not show what has happened.
func TestPanelsShowTheFirstThingThatIsCounted(t *testing.T) {
	atFullLength(t, "promtool")
	queries := map[string]string{}
	dashboards(t, queries)
	counted := regexp.MustCompile(`^sum by \(([\w, ]+)\) \(.*increase\((\w+)`)
	var input []monitoring.Series
	var checks []monitoring.Check
	metrics := descriptors()
	for expression := range queries {
		found := counted.FindStringSubmatch(expression)
		if found == nil {
			continue
		}
		labels := func(names []string) string {
			var out []string
			for _, name := range names {
				out = append(out, fmt.Sprintf("%s=%q", strings.TrimSpace(name), "x"))
			}
			return "{" + strings.Join(out, ",") + "}"
		}
		input = append(input, monitoring.Series{Series: found[2] + labels(append([]string{"node"}, metrics[found[2]]...)), Values: "_x10 1x20 3x10"})
		expression = strings.NewReplacer("$__rate_interval", "4m", "$node", "x").Replace(expression)
		for at, want := range map[string]int{"11m": 1, "25m": 0} {
			checks = append(checks, monitoring.Check{Expr: expression, At: at, Expected: []monitoring.Sample{{Labels: labels(strings.Split(found[1], ",")), Value: want}}})
		}
	}
	if len(checks) < 8 {
		t.Fatalf("%d checks", len(checks))
	}
	slices.SortFunc(input, func(a, b monitoring.Series) int { return strings.Compare(a.Series, b.Series) })
	if err := monitoring.Evaluate(t.Context(), t.TempDir(), shippedRules(t), slices.Compact(input), checks); err != nil {
		t.Error(err)
	}
}

// joins are the expressions of the component's page, which join the agent's metrics with those of DCGM's exporter.
func joins(t *testing.T) (out []string) {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(string(prometheusComponent), "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, found := range regexp.MustCompile("(?ms)^```promql\n(.*?)^```").FindAllStringSubmatch(string(page), -1) {
		out = append(out, found[1])
	}
	if len(out) != 3 {
		t.Fatalf("the page has %d expressions", len(out))
	}
	return out
}

// A is a GPU of two instances, B one without MIG. The series are those of dcgm-exporter v4 by its usual ServiceMonitor. An agent's pod has been replaced, so
// that its node has each series twice for a while; an instance of two compute instances has two MIG devices.
func TestTheAgentsMetricsJoinThoseOfDCGM(t *testing.T) {
	atFullLength(t, "promtool")
	var input []monitoring.Series
	add := func(value int, series ...string) {
		for _, one := range series {
			input = append(input, monitoring.Series{Series: one, Values: fmt.Sprintf("%dx10", value)})
		}
	}
	add(
		1, `DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="A", GPU_I_ID="7", GPU_I_PROFILE="1g.10gb", gpu="0", hostname="h", job="dcgm", pod="exporter", exported_namespace="team", exported_pod="a"}`,
		`DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="B", gpu="1", hostname="h", job="dcgm", pod="exporter"}`,
	)
	add(0, `DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="A", GPU_I_ID="2", GPU_I_PROFILE="3g.40gb", gpu="0", hostname="h", job="dcgm", pod="exporter"}`)
	add(300, `DCGM_FI_DEV_POWER_USAGE{UUID="A", GPU_I_ID="7", hostname="h"}`, `DCGM_FI_DEV_POWER_USAGE{UUID="A", GPU_I_ID="2", hostname="h"}`, `DCGM_FI_DEV_POWER_USAGE{UUID="B", hostname="h"}`)
	for _, agent := range []string{"gpuslice-agent-1", "gpuslice-agent-2"} {
		of := `node="gpu-1", job="gpuslice/gpuslice-agent", pod="` + agent + `"`
		add(
			1, `gpuslice_instance_info{gpu="A", device="MIG-1", gpu_instance_id="7", profile="1g.10gb", resource="nvidia.com/mig-1g.10gb", `+of+`}`,
			`gpuslice_instance_info{gpu="A", device="MIG-2", gpu_instance_id="2", profile="3g.40gb", resource="nvidia.com/mig-3g.40gb", `+of+`}`,
			`gpuslice_instance_info{gpu="A", device="MIG-3", gpu_instance_id="2", profile="3g.40gb", resource="nvidia.com/mig-3g.40gb", `+of+`}`,
			`gpuslice_gpu_healthy{gpu="A", `+of+`}`, `gpuslice_request_info{label="gpuslice.io/profile", name="research", fingerprint="f", `+of+`}`,
		)
		add(0, `gpuslice_gpu_healthy{gpu="B", `+of+`}`) // its power counts all the same
	}
	const exporter = `gpu="0", hostname="h", job="dcgm", pod="exporter"`
	want := [][]monitoring.Sample{
		{
			{Labels: `{UUID="A", GPU_I_ID="7", GPU_I_PROFILE="1g.10gb", exported_namespace="team", exported_pod="a", node="gpu-1", profile="1g.10gb", resource="nvidia.com/mig-1g.10gb", ` + exporter + `}`, Value: 1},
			{Labels: `{UUID="A", GPU_I_ID="2", GPU_I_PROFILE="3g.40gb", node="gpu-1", profile="3g.40gb", resource="nvidia.com/mig-3g.40gb", ` + exporter + `}`},
		},
		{{Labels: `{exported_namespace="team", resource="nvidia.com/mig-1g.10gb"}`, Value: 1}, {Labels: `{resource="nvidia.com/mig-3g.40gb"}`}},
		{{Labels: `{label="gpuslice.io/profile", name="research"}`, Value: 600}},
	}
	var checks []monitoring.Check
	for i, join := range joins(t) {
		checks = append(checks, monitoring.Check{Expr: join, At: "5m", Expected: want[i]})
	}
	if err := monitoring.Evaluate(t.Context(), t.TempDir(), shippedRules(t), input, checks); err != nil {
		t.Error(err)
	}
}

// Each query of the dashboard of demand has a case with what it shows; promtool says that they come true.
func TestPanelsOfDemandShowWhoWaits(t *testing.T) {
	atFullLength(t, "promtool")
	cases, err := os.ReadFile(root + "/test/alerts/demand.yaml")
	if err != nil {
		t.Fatal(err)
	}
	boards, err := prometheusComponent.Dashboards()
	if err != nil {
		t.Fatal(err)
	}
	const demand = "gpuslice-demand.json"
	for _, p := range boards[demand].Panels {
		for _, target := range p.Targets {
			name := []byte(fmt.Sprintf("- expr: '%s: %s, %s'\n", demand, p.Title, target.RefID))
			if !bytes.Contains(cases, name) {
				t.Errorf("no case has %s", name)
			}
			cases = bytes.ReplaceAll(cases, name, fmt.Appendf(nil, "- expr: '%s'\n", strings.ReplaceAll(target.Expr, "'", "''")))
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "demand.yaml"), cases, 0o600); err != nil {
		t.Fatal(err)
	}
	prometheusTool(t, dir, "promtool", "", "test", "rules", "demand.yaml")
}

// target are the labels that Prometheus gives each series of a pod. A label of the agent's that has such a name is reported with "exported_" before
// it.
var target = []string{"job", "instance", "namespace", "pod", "container", "endpoint", "node"}

// wrong says what an expression asks for that is not reported.
func wrong(a monitoring.Asked, metrics map[string][]string, values map[string]*regexp.Regexp) (out []string) {
	known := slices.Clone(target)
	for _, s := range a.Series {
		labels, is := metrics[s.Metric]
		if !is {
			out = append(out, fmt.Sprintf("asks for %q, which the agent does not report", s.Metric))
		}
		for _, label := range labels {
			if slices.Contains(target, label) {
				label = "exported_" + label
			}
			known = append(known, label)
		}
		for label, pattern := range s.Labels {
			if !slices.Contains(known, label) {
				out = append(out, fmt.Sprintf("asks for %s with label %s, which it does not have", s.Metric, label))
			}
			for value := range strings.SplitSeq(pattern, "|") {
				if of := values[label]; of != nil && strings.HasPrefix(s.Metric, "gpuslice_") && !of.MatchString(value) {
					out = append(out, fmt.Sprintf("asks for %s=%q, which there is not", label, value))
				}
			}
		}
	}
	for _, label := range a.Labels {
		if !slices.Contains(known, label) {
			out = append(out, fmt.Sprintf("groups by %s, which nothing has that it asks for", label))
		}
	}
	return out
}

// descriptors are the metrics that the agent may export, with their labels.
func descriptors() map[string][]string {
	all := make(chan *prometheus.Desc, 1000)
	own, _ := metrics.New(clock.RealClock{}).Gatherer().(prometheus.Collector) // a registry is one
	for _, c := range []prometheus.Collector{own, new(health.Monitor), new(memory.Monitor), new(idle.Monitor), new(access.Checker)} {
		c.Describe(all)
	}
	close(all)
	out := map[string][]string{}
	parts := regexp.MustCompile(`fqName: "(\w+)".*variableLabels: \{([\w,]*)\}`)
	for d := range all {
		if found := parts.FindStringSubmatch(d.String()); found != nil {
			out[found[1]] = strings.Split(found[2], ",")
		}
	}
	return out
}

// constants match the values that the code below a folder has.
func constants(t *testing.T, folder, pattern string) *regexp.Regexp {
	t.Helper()
	var values []string
	err := filepath.WalkDir(filepath.Join(root, folder), func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" {
			return err
		}
		text, err := os.ReadFile(path)
		for _, found := range regexp.MustCompile(pattern).FindAllStringSubmatch(string(text), -1) {
			values = append(values, found[1])
		}
		return err
	})
	if err != nil || len(values) < 2 {
		t.Fatalf("%s has no %s: %v", folder, pattern, err)
	}
	return regexp.MustCompile("^(" + strings.Join(values, "|") + ")$")
}

// dashboards adds the queries of the dashboards, and looks at what Grafana needs of a dashboard.
func dashboards(t *testing.T, queries map[string]string) {
	t.Helper()
	boards, err := prometheusComponent.Dashboards()
	if err != nil {
		t.Fatal(err)
	}
	for file, board := range boards {
		variables := map[string]bool{"__rate_interval": true}
		for _, v := range board.Templating.List {
			variables[v.Name] = true
			if found := regexp.MustCompile(`^label_values\((\w+), (\w+)\)$`).FindStringSubmatch(v.Definition); found != nil {
				queries[fmt.Sprintf("count by (%s) (%s)", found[2], found[1])] = file + ", variable " + v.Name
			}
		}
		ids, taken := map[int]bool{}, map[[2]int]bool{}
		for _, p := range board.Panels {
			where := file + ", panel " + p.Title
			if ids[p.ID] || p.Title == "" || p.Datasource.UID != "${datasource}" || len(p.Targets) == 0 {
				t.Errorf("%s: its number is another's, or it lacks a title, the data source or a query", where)
			}
			ids[p.ID] = true
			if !fits(p, taken) {
				t.Errorf("%s lies over another, or beyond the edge", where)
			}
			ask(t, p, where, variables, queries)
		}
		if board.UID == "" || board.Title == "" || len(board.Panels) < 10 {
			t.Errorf("%s has %d panels, title %q", file, len(board.Panels), board.Title)
		}
	}
}

// fits takes the panel's place, and reports whether it was free.
func fits(p monitoring.Panel, taken map[[2]int]bool) bool {
	free := p.GridPos.X+p.GridPos.W <= 24
	for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
		for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
			free = free && !taken[[2]int{x, y}]
			taken[[2]int{x, y}] = true
		}
	}
	return free
}

// ask adds the panel's queries, whose variables and labels have to be there.
func ask(t *testing.T, p monitoring.Panel, where string, variables map[string]bool, queries map[string]string) {
	t.Helper()
	for _, target := range p.Targets {
		queries[target.Expr] = where
		for _, v := range regexp.MustCompile(`\$(\w+)`).FindAllStringSubmatch(target.Expr, -1) {
			if !variables[v[1]] {
				t.Errorf("%s has the variable %s, which the dashboard has not", where, v[1])
			}
		}
		for _, label := range regexp.MustCompile(`\{\{(\w+)\}\}`).FindAllStringSubmatch(target.LegendFormat, -1) {
			if !regexp.MustCompile(`by \([^)]*\b` + label[1] + `\b`).MatchString(target.Expr) {
				t.Errorf("%s shows label %s, by which it does not group", where, label[1])
			}
		}
	}
}

// The types are the operator's own; a field that they do not have would be dropped without a word.
func TestObjectsOfThePrometheusOperatorHaveTheFieldsOfTheirTypes(t *testing.T) {
	var all []map[string]any
	for _, file := range []string{"podmonitor.yaml", "prometheusrule.yaml"} {
		var object map[string]any
		if err := prometheusComponent.Object(file, &object); err != nil {
			t.Fatal(err)
		}
		all = append(all, object)
	}
	in, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	prometheusTool(t, "", "alerts", string(in), "objects")
}
