package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strings"
	"time"

	"github.com/prometheus/common/promslog"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
)

// question is what values reads.
type question struct {
	Series []struct {
		Series string `json:"series"`
		Values string `json:"values"` // a minute apart, in promtool's notation
	} `json:"series"`
	Rules       []string `json:"rules"` // files, evaluated each minute before the expressions
	Expressions []string `json:"expressions"`
	End         int      `json:"end"`  // minutes
	Step        int      `json:"step"` // minutes
}

// line is one of the series that an expression gives.
type line struct {
	Labels map[string]string `json:"labels"`
	Points [][2]float64      `json:"points"` // seconds and values; those that are no numbers are left out
}

// mostSamples bounds what an expression may load. Prometheus' own default is the same.
const mostSamples = 50_000_000

// values reads series and expressions, and prints a list of lines for each expression.
func values() error {
	var q question
	if err := json.NewDecoder(os.Stdin).Decode(&q); err != nil {
		return fmt.Errorf("reading series and expressions: %w", err)
	}
	if q.Step < 1 || q.End < q.Step {
		return fmt.Errorf("step %d and end %d: a step is a minute at least, and the end is no earlier", q.Step, q.End)
	}
	var load strings.Builder
	load.WriteString("load 1m\n")
	for _, s := range q.Series {
		fmt.Fprintf(&load, "  %s %s\n", s.Series, s.Values)
	}
	suite, err := promqltest.NewLazyLoader(load.String(), promqltest.LazyLoaderOpts{EnableAtModifier: true, EnableNegativeOffset: true})
	if err != nil {
		return fmt.Errorf("reading the series: %w", err)
	}
	defer suite.Close()
	end := time.Unix(0, 0).UTC().Add(time.Duration(q.End) * time.Minute)
	if err := record(suite, q.Rules, end); err != nil {
		return err
	}
	engine := promql.NewEngine(promql.EngineOpts{MaxSamples: mostSamples, Timeout: 5 * time.Minute, EnableAtModifier: true, EnableNegativeOffset: true})
	defer engine.Close()
	out := [][]line{}
	for _, expression := range q.Expressions {
		lines, err := evaluate(suite, engine, expression, end, time.Duration(q.Step)*time.Minute)
		if err != nil {
			return fmt.Errorf("%s: %w", expression, err)
		}
		out = append(out, lines)
	}
	return json.NewEncoder(os.Stdout).Encode(out)
}

// record loads the samples minute by minute, and evaluates the rules after each.
func record(suite *promqltest.LazyLoader, files []string, end time.Time) error {
	manager := rules.NewManager(&rules.ManagerOptions{
		QueryFunc: rules.EngineQueryFunc(suite.QueryEngine(), suite.Storage()), AppendableV2: suite.Storage(),
		Context: context.Background(), NotifyFunc: func(context.Context, string, ...*rules.Alert) {}, Logger: promslog.NewNopLogger(),
		Parser: parser.NewParser(parser.Options{}),
	})
	groups, errs := manager.LoadGroups(time.Minute, labels.EmptyLabels(), "", nil, false, files...)
	if len(errs) > 0 {
		return fmt.Errorf("reading rules: %w", errs[0])
	}
	var failed error
	for at := time.Unix(0, 0).UTC(); !at.After(end) && failed == nil; at = at.Add(time.Minute) {
		suite.WithSamplesTill(at, func(err error) {
			if failed = err; err != nil {
				return
			}
			for _, g := range groups {
				g.Eval(suite.Context(), at)
				for _, r := range g.Rules() {
					if err := r.LastError(); err != nil {
						failed = fmt.Errorf("rule %s: %w", r.Name(), err)
					}
				}
			}
		})
	}
	return failed
}

func evaluate(suite *promqltest.LazyLoader, engine *promql.Engine, expression string, end time.Time, step time.Duration) ([]line, error) {
	query, err := engine.NewRangeQuery(suite.Context(), suite.Queryable(), nil, expression, time.Unix(0, 0).UTC(), end, step)
	if err != nil {
		return nil, err
	}
	defer query.Close()
	matrix, err := query.Exec(suite.Context()).Matrix()
	if err != nil {
		return nil, err
	}
	lines := []line{}
	for _, s := range matrix {
		l := line{Labels: s.Metric.Map(), Points: [][2]float64{}}
		for _, p := range s.Floats {
			if !math.IsNaN(p.F) && !math.IsInf(p.F, 0) {
				l.Points = append(l.Points, [2]float64{float64(p.T) / 1000, p.F})
			}
		}
		lines = append(lines, l)
	}
	return lines, nil
}
