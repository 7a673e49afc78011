// Package monitoring reads the alerts and dashboards of deploy/components/prometheus for the tests, and has Prometheus' own programs judge them.
package monitoring

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// Component is the folder of a checkout's manifests for Prometheus.
type Component string

// Of is the component of the checkout at root.
func Of(root string) Component {
	return Component(filepath.Join(root, "deploy", "components", "prometheus"))
}

// Object reads a file that has one object.
func (c Component) Object(file string, into any) error {
	text, err := os.ReadFile(filepath.Join(string(c), filepath.Clean(file)))
	if err != nil {
		return err
	}
	if err := yaml.Unmarshal(text, into); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

// Rules are the groups of the rules, as Prometheus itself reads them.
type Rules struct {
	Groups []struct {
		Name  string `json:"name"`
		Rules []struct {
			Alert       string            `json:"alert,omitempty"`
			Record      string            `json:"record,omitempty"`
			Expr        string            `json:"expr"`
			For         string            `json:"for,omitempty"`
			Labels      map[string]string `json:"labels,omitempty"`
			Annotations map[string]string `json:"annotations,omitempty"`
		} `json:"rules"`
	} `json:"groups"`
}

// Records are the metrics that the rules record, and their labels. Prices are among them, which a user renders.
func (r Rules) Records() map[string][]string {
	out := map[string][]string{"gpuslice:gpu_price:per_hour": {"model", "currency", "prices"}}
	for _, group := range r.Groups {
		for _, rule := range group.Rules {
			if by := groupedBy.FindStringSubmatch(rule.Expr); rule.Record != "" && by != nil {
				out[rule.Record] = strings.Split(by[1], ", ")
			}
		}
	}
	return out
}

var groupedBy = regexp.MustCompile(`^sum by \(([\w, ]+)\)`)

// Rules reads the alerts, and what is recorded.
func (c Component) Rules() (Rules, error) {
	var object struct{ Spec Rules }
	err := c.Object("prometheusrule.yaml", &object)
	return object.Spec, err
}

// Dashboard is what is read of one.
type Dashboard struct {
	UID, Title string
	Panels     []Panel
	Templating struct {
		List []struct{ Name, Type, Definition string }
	}
}

// Panel is a part of a dashboard.
type Panel struct {
	ID          int
	Type, Title string
	Description string
	Datasource  struct{ UID string }
	GridPos     struct{ X, Y, W, H int }
	FieldConfig struct{ Defaults struct{ Unit string } }
	Targets     []struct{ RefID, Expr, LegendFormat string }
}

// Dashboards reads the dashboards, by file.
func (c Component) Dashboards() (map[string]Dashboard, error) {
	var object corev1.ConfigMap
	if err := c.Object("dashboards.yaml", &object); err != nil {
		return nil, err
	}
	out := map[string]Dashboard{}
	for file, text := range object.Data {
		var board Dashboard
		if err := json.Unmarshal([]byte(text), &board); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		out[file] = board
	}
	return out, nil
}

// Run runs promtool, or alerts, the project's reader of expressions, in a folder, and returns what it prints.
func Run(ctx context.Context, dir, name, stdin string, args ...string) (string, error) {
	tools, err := binaries.Builder{Log: os.Stderr}.Alerts(ctx)
	if err != nil {
		return "", err
	}
	run := exec.CommandContext(ctx, filepath.Join(tools, name), args...)
	run.Dir, run.Stdin = dir, strings.NewReader(stdin)
	var said bytes.Buffer
	run.Stderr = &said
	out, err := run.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, out, said.String())
	}
	return string(out), nil
}

// Asked is what an expression asks for.
type Asked struct {
	Series []struct {
		Metric string            `json:"metric"`
		Labels map[string]string `json:"labels"` // values, or patterns of them
	} `json:"series"`
	Labels []string `json:"labels"` // that it groups and joins by
}

// Read finds what each of the expressions asks for, by Prometheus' own parser.
func Read(ctx context.Context, expressions []string) (map[string]Asked, error) {
	var plain []string
	for _, e := range expressions {
		plain = append(plain, strings.ReplaceAll(e, "$__rate_interval", "5m"))
	}
	in, err := json.Marshal(plain)
	if err != nil {
		return nil, err
	}
	printed, err := Run(ctx, "", "alerts", string(in), "expressions")
	if err != nil {
		return nil, err
	}
	var all []Asked
	if err := json.Unmarshal([]byte(printed), &all); err != nil {
		return nil, err
	}
	out := map[string]Asked{}
	for i, one := range all {
		out[expressions[i]] = one
	}
	return out, nil
}

// Series is a series of samples.
type Series struct {
	Series string `json:"series"` // its name and labels
	Values string `json:"values"` // a minute apart, in the notation of promtool's tests: "_" is none
}

// KubeStateMetrics are the metrics of kube-state-metrics that the alerts and dashboards ask for, with their labels besides those of a target.
func KubeStateMetrics() map[string][]string {
	return map[string][]string{
		"kube_pod_status_unschedulable":        {"uid"},
		"kube_pod_completion_time":             {"uid"},
		"kube_pod_container_resource_requests": {"uid", "resource", "unit"},
		"kube_node_status_allocatable":         {"resource", "unit"},
		"kube_pod_status_phase":                {"uid", "phase"},
		"kube_pod_created":                     {"uid"},
		"kube_pod_status_scheduled_time":       {"uid"},
	}
}

// Kueue are the metrics of Kueue that the dashboards ask for, with their labels.
func Kueue() map[string][]string {
	return map[string][]string{
		"kueue_pending_workloads":                  {"cluster_queue", "status", "replica_role"},
		"kueue_admitted_active_workloads":          {"cluster_queue", "replica_role"},
		"kueue_admission_wait_time_seconds_bucket": {"cluster_queue", "priority_class", "replica_role", "le"},
		"kueue_cluster_queue_resource_pending":     {"cluster_queue", "resource", "replica_role"},
		"kueue_cluster_queue_resource_reservation": {"cohort", "cluster_queue", "flavor", "resource", "replica_role"},
		"kueue_cluster_queue_nominal_quota":        {"cohort", "cluster_queue", "flavor", "resource", "replica_role"},
	}
}

// PendingPod are series of kube-state-metrics for a pod that is pending for a MIG device, and for one that has ended on a node. Kueue's are those of a
// queue that has no quota left.
func PendingPod() []Series {
	var out []Series
	for _, series := range []string{
		`kube_pod_status_phase{namespace="team", pod="a", uid="1", phase="Pending"}`,
		`kube_pod_created{namespace="team", pod="a", uid="1"}`,
		`kube_pod_created{namespace="team", pod="b", uid="2"}`,
		`kube_pod_status_scheduled_time{namespace="team", pod="b", uid="2"}`,
		`kueue_pending_workloads{cluster_queue="gpus", status="active", replica_role="standalone"}`,
		`kueue_admitted_active_workloads{cluster_queue="gpus", replica_role="standalone"}`,
		`kueue_admission_wait_time_seconds_bucket{cluster_queue="gpus", priority_class="", replica_role="standalone", le="10"}`,
		`kueue_admission_wait_time_seconds_bucket{cluster_queue="gpus", priority_class="", replica_role="standalone", le="+Inf"}`,
		`kueue_cluster_queue_resource_pending{cluster_queue="gpus", resource="nvidia.com/gpu", replica_role="standalone"}`,
		`kueue_cluster_queue_resource_reservation{cohort="", cluster_queue="gpus", flavor="f", resource="nvidia.com/gpu", replica_role="standalone"}`,
		`kueue_cluster_queue_nominal_quota{cohort="", cluster_queue="gpus", flavor="f", resource="nvidia.com/gpu", replica_role="standalone"}`,
		`kube_pod_status_unschedulable{namespace="team", pod="a", uid="1"}`,
		`kube_pod_container_resource_requests{namespace="team", pod="a", uid="1", container="c", resource="nvidia_com_mig_3g_40gb", unit="integer"}`,
		`kube_pod_container_resource_requests{namespace="team", pod="b", uid="2", container="c", node="node-1", resource="nvidia_com_mig_3g_40gb", unit="integer"}`,
		`kube_pod_completion_time{namespace="team", pod="b", uid="2"}`,
		`kube_node_status_allocatable{node="node-1", resource="nvidia_com_mig_1g_10gb", unit="integer"}`,
	} {
		out = append(out, Series{Series: series, Values: "1x60"})
	}
	return out
}

// Check is what an expression has to give.
type Check struct {
	Expr     string   `json:"expr"`
	At       string   `json:"eval_time"` // as 7m
	Expected []Sample `json:"exp_samples"`
}

// Sample is one value that an expression gives.
type Sample struct {
	Labels string `json:"labels"`
	Value  int    `json:"value"`
}

// Evaluate has Prometheus evaluate the rules, and expressions, over the series. It needs an empty folder. The error names each expression that gives something
// else.
func Evaluate(ctx context.Context, dir string, rules Rules, input []Series, checks []Check) error {
	text, err := yaml.Marshal(rules)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "rules.yaml"), text, 0o600)
	}
	if err != nil {
		return fmt.Errorf("writing rules for promtool: %w", err)
	}
	file, err := yaml.Marshal(map[string]any{
		"rule_files": []string{"rules.yaml"},
		"tests":      []any{map[string]any{"interval": "1m", "input_series": input, "promql_expr_test": checks}},
	})
	if err != nil {
		return fmt.Errorf("writing a test for promtool: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "expressions.yaml"), file, 0o600); err != nil {
		return err
	}
	_, err = Run(ctx, dir, "promtool", "", "test", "rules", "expressions.yaml")
	return err
}

// Line is one of the series that an expression gives.
type Line struct {
	Labels map[string]string `json:"labels"`
	Points [][2]float64      `json:"points"` // seconds and values
}

// Values has Prometheus evaluate expressions over the series, with the component's rules, from minute 0 to the end at each step, in minutes.
func (c Component) Values(ctx context.Context, input []Series, expressions []string, end, step int) ([][]Line, error) {
	rules, err := c.Rules()
	if err != nil {
		return nil, err
	}
	groups, err := yaml.Marshal(rules)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "gpuslice-values-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "rules.yaml"), groups, 0o600); err != nil {
		return nil, err
	}
	in, err := json.Marshal(map[string]any{"series": input, "rules": []string{"rules.yaml"}, "expressions": expressions, "end": end, "step": step})
	if err != nil {
		return nil, err
	}
	printed, err := Run(ctx, dir, "alerts", string(in), "values")
	if err != nil {
		return nil, err
	}
	var out [][]Line
	if err := json.Unmarshal([]byte(printed), &out); err != nil {
		return nil, err
	}
	if len(out) != len(expressions) {
		return nil, fmt.Errorf("%d answers to %d expressions", len(out), len(expressions))
	}
	return out, nil
}
