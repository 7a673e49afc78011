// Command draw draws the dashboards of deploy/components/prometheus as one page for a browser. The series are those of a file in the format of "promtool
// test rules". Prometheus' own engine evaluates the queries of each panel over them, with the component's rules.
//
//	go run ./test/monitoring/draw test/alerts/demand.yaml > page.html
package main

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"html/template"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/test/monitoring"
)

func main() {
	if err := run(context.Background(), os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// run draws the first test of the file that the arguments name.
func run(ctx context.Context, args []string, w io.Writer) error {
	if len(args) < 1 || len(args) > 2 {
		return errors.New("name a file of promtool's tests, and if you like a node for the dashboard of a node")
	}
	text, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	var file struct {
		Tests []struct {
			Input []monitoring.Series `json:"input_series"`
		} `json:"tests"`
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		return fmt.Errorf("%s: %w", args[0], err)
	}
	if len(file.Tests) == 0 {
		return fmt.Errorf("%s has no test", args[0])
	}
	component := monitoring.Of(".")
	boards, err := component.Dashboards()
	if err != nil {
		return err
	}
	node := "gpu-1"
	if len(args) == 2 {
		node = args[1]
	}
	var all []board
	var expressions []string
	for _, name := range slices.Sorted(maps.Keys(boards)) {
		b := board{Title: boards[name].Title}
		for _, p := range boards[name].Panels {
			b.Panels = append(b.Panels, panel{Panel: p, first: len(expressions)})
			for _, target := range p.Targets {
				expressions = append(expressions, strings.NewReplacer("$__rate_interval", "5m", "$node", node).Replace(target.Expr))
			}
		}
		all = append(all, b)
	}
	values, err := component.Values(ctx, file.Tests[0].Input, expressions, day, step)
	if err != nil {
		return err
	}
	for b := range all {
		for p := range all[b].Panels {
			all[b].Panels[p].take(values)
		}
	}
	return page.Execute(w, struct {
		File   string
		Boards []board
	}{filepath.Base(args[0]), all})
}

// In minutes.
const (
	day  = 24 * 60
	step = 5
)

type board struct {
	Title  string
	Panels []panel
}

type panel struct {
	monitoring.Panel

	first int // of the expressions, that of its first query
	Lines []drawn
	Top   string // of the axis
}

// drawn is a line of a chart, or a row of a table.
type drawn struct {
	Name, Last, Colour string
	Path               string // of the chart's SVG
	Gone               bool   // it has ended before the day does
}

// The chart's size in the units of its SVG.
const (
	wide = 600.0
	high = 150.0
)

var colours = []string{"#3274d9", "#e0752d", "#299c46", "#a352cc", "#c4162a", "#8f8f00", "#00a3a3", "#806eb7"}

// take takes what the panel's queries give.
func (p *panel) take(values [][]monitoring.Line) {
	top := 0.0
	for t := range p.Targets {
		for _, line := range values[p.first+t] {
			for _, point := range line.Points {
				top = max(top, point[1])
			}
		}
	}
	p.Top = p.said(top)
	for t, target := range p.Targets {
		for _, line := range values[p.first+t] {
			if len(line.Points) == 0 {
				continue
			}
			last := line.Points[len(line.Points)-1]
			d := drawn{
				Name: named(target.LegendFormat, line.Labels), Last: p.said(last[1]), Gone: last[0] < day*60,
				Path: path(line.Points, cmp.Or(top, 1)), Colour: colours[len(p.Lines)%len(colours)],
			}
			if p.Type == "timeseries" || !d.Gone {
				p.Lines = append(p.Lines, d)
			}
		}
	}
}

// named is the legend of a series; without one its labels.
func named(legend string, labels map[string]string) string {
	if legend == "" {
		var all []string
		for _, name := range slices.Sorted(maps.Keys(labels)) {
			all = append(all, labels[name])
		}
		return strings.Join(all, "  ")
	}
	for name, value := range labels {
		legend = strings.ReplaceAll(legend, "{{"+name+"}}", value)
	}
	return legend
}

// said is a value in the panel's unit.
func (p *panel) said(value float64) string {
	switch unit := p.FieldConfig.Defaults.Unit; {
	case unit == "percentunit":
		return fmt.Sprintf("%.0f%%", 100*value)
	case unit == "s" && value >= 5400:
		return fmt.Sprintf("%.1f h", value/3600)
	case unit == "s" && value >= 90:
		return fmt.Sprintf("%.0f min", value/60)
	case unit == "s":
		return fmt.Sprintf("%.0f s", value)
	case strings.Contains(unit, "bytes"):
		return fmt.Sprintf("%.1f GiB", value/(1<<30))
	default:
		return fmt.Sprintf("%.4g", value)
	}
}

// path goes from point to point, and begins again behind a gap.
func path(points [][2]float64, top float64) string {
	var b strings.Builder
	before := math.Inf(-1)
	for _, p := range points {
		word := "L"
		if p[0]-before > step*60 {
			word = "M"
		}
		before = p[0]
		x, y := p[0]/(day*60)*wide, high-p[1]/top*high
		fmt.Fprintf(&b, "%s%.1f %.1f", word, x, y)
		if word == "M" {
			fmt.Fprintf(&b, "h%.1f", 0.5) // a single point shows, too
		}
	}
	return b.String()
}

//go:embed page.html
var text string

var page = template.Must(template.New("page").Parse(text))
