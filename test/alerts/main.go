// Command alerts has Prometheus' own parser and engine say what an expression asks for, and what it gives over series of samples. It also says whether an
// object of the Prometheus operator has only fields that its type has. The module pins promtool, which runs alerts.yaml.
//
// It is a separate module so that Prometheus' requirements never decide the versions that this project is built with.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"sigs.k8s.io/yaml"
)

func main() {
	do := map[string]func() error{"expressions": expressions, "objects": objects, "values": values}[last(os.Args)]
	if do == nil {
		do = func() error { return errors.New("say what is on standard input: expressions, objects, or values") }
	}
	if err := do(); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func last(of []string) string { return of[len(of)-1] }

// asked is what an expression asks for.
type asked struct {
	Series []series `json:"series"`
	Labels []string `json:"labels"` // that it groups and joins by
}

// series are those that a selector takes.
type series struct {
	Metric string            `json:"metric"`
	Labels map[string]string `json:"labels"` // values, or patterns of them
}

// expressions reads a list of expressions as JSON, and prints what each asks for.
func expressions() error {
	var all []string
	if err := json.NewDecoder(os.Stdin).Decode(&all); err != nil {
		return fmt.Errorf("reading a list of expressions: %w", err)
	}
	out := []asked{}
	for _, text := range all {
		expression, err := parser.NewParser(parser.Options{}).ParseExpr(text)
		if err != nil {
			return fmt.Errorf("%s: %w", text, err)
		}
		out = append(out, of(expression))
	}
	if err := json.NewEncoder(os.Stdout).Encode(out); err != nil {
		return fmt.Errorf("writing: %w", err)
	}
	return nil
}

func of(expression parser.Expr) asked {
	var a asked
	parser.Inspect(expression, func(node parser.Node, _ []parser.Node) error {
		switch n := node.(type) {
		case *parser.VectorSelector:
			s := series{Metric: n.Name, Labels: map[string]string{}}
			for _, m := range n.LabelMatchers {
				if m.Name != labels.MetricName {
					s.Labels[m.Name] = m.Value
				}
			}
			a.Series = append(a.Series, s)
		case *parser.AggregateExpr:
			a.Labels = append(a.Labels, n.Grouping...)
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				a.Labels = append(append(a.Labels, n.VectorMatching.MatchingLabels...), n.VectorMatching.Include...)
			}
		}
		return nil
	})
	return a
}

// objects reads objects as a list in JSON, and fails at the first that has what its type has not.
func objects() error {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		return fmt.Errorf("reading: %w", err)
	}
	var all []json.RawMessage
	if err := json.Unmarshal(text, &all); err != nil {
		return fmt.Errorf("reading a list of objects: %w", err)
	}
	for _, one := range all {
		var its struct{ Kind string }
		if err := json.Unmarshal(one, &its); err != nil {
			return fmt.Errorf("reading the kind: %w", err)
		}
		into := map[string]any{"PodMonitor": new(monitoringv1.PodMonitor), "PrometheusRule": new(monitoringv1.PrometheusRule)}[its.Kind]
		if into == nil {
			return fmt.Errorf("%q is no kind that is known here", its.Kind)
		}
		if err := yaml.UnmarshalStrict(one, into); err != nil {
			return fmt.Errorf("%s: %w", its.Kind, err)
		}
	}
	return nil
}
