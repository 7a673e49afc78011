package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// event is a line of "go test -json" (go doc test2json).
type event struct {
	Action  string
	Package string
	Test    string
	Output  string
	Elapsed float64 // in seconds
}

// results are what became of the tests of one run, by "package: test".
type results struct {
	passed  map[string]bool
	seconds map[string]float64
	said    []string // what tests quote of the agent
}

// module begins the import paths of packages.
const module = "github.com/gpuslice/gpuslice/"

// quote begins what a test logs of what an agent has said.
const quote = "said: "

// read takes the events of a run and hands on what does not belong to a test that passes: to is written what people look for when it fails.
func read(in io.Reader, to io.Writer) (results, error) {
	r := results{passed: map[string]bool{}, seconds: map[string]float64{}}
	said := map[string][]string{}  // output by test, until it is known whether it failed
	pieces := map[string][]event{} // the same
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil {
				fmt.Fprintf(to, "%s", line) // of the compiler
			} else {
				r.take(e, said, pieces, to)
			}
		}
		if errors.Is(err, io.EOF) {
			return r, nil
		}
		if err != nil {
			return r, err
		}
	}
}

func (r *results) take(e event, said map[string][]string, pieces map[string][]event, to io.Writer) {
	folder := strings.TrimPrefix(e.Package, module)
	top, _, below := strings.Cut(e.Test, "/")
	name := folder + ": " + top
	switch e.Action {
	case "output":
		if _, text, found := strings.Cut(e.Output, quote); found {
			said[name] = append(said[name], strings.TrimSpace(text))
		}
		pieces[name] = append(pieces[name], e)
	case "pass", "fail", "skip":
		if e.Test != "" { // the time of a test does not have that of its parallel parts, of which the longest counts
			r.seconds[name] = max(r.seconds[name], e.Elapsed)
		}
		if below {
			return
		}
		if e.Test != "" {
			r.passed[name] = e.Action == "pass"
			r.said = append(r.said, said[name]...)
			fmt.Fprintf(to, "  %s %s (%.0f s)\n", e.Action, name, r.seconds[name])
		}
		if e.Action == "fail" {
			for _, p := range pieces[name] {
				fmt.Fprint(to, p.Output)
			}
		}
		delete(pieces, name)
	}
}

// cell says what became of a scenario, and whether all its tests have passed.
func (r results) cell(s scenario) (text string, passed bool) {
	var seconds float64
	var failed []string
	for _, test := range s.tests {
		if seconds += r.seconds[test]; !r.passed[test] {
			_, name, _ := strings.Cut(test, ": ")
			failed = append(failed, name)
		}
	}
	if len(failed) > 0 {
		return "FAILED: " + strings.Join(failed, ", "), false
	}
	return fmt.Sprintf("passed, %.0f s", seconds), true
}

// column is one version, and what became of the scenarios with it.
type column struct {
	title  string
	plugin bool // it is another version of the plugin: scenarios without one are not run
	results
}

// write prints a table in Markdown, and below what was said with each version. It returns whether all has passed.
func write(out io.Writer, columns []column) bool {
	all := true
	table := tabwriter.NewWriter(out, 0, 0, 1, ' ', 0)
	row := func(cells ...string) { fmt.Fprintf(table, "| %s |\n", strings.Join(cells, "\t| ")) }
	titles, rule := []string{"scenario"}, []string{"---"}
	for _, c := range columns {
		titles, rule = append(titles, c.title), append(rule, "---")
	}
	row(titles...)
	row(rule...)
	for _, s := range scenarios {
		cells := []string{s.name}
		for _, c := range columns {
			if s.kube && c.plugin {
				cells = append(cells, "no plugin in it")
				continue
			}
			text, passed := c.cell(s)
			cells, all = append(cells, text), all && passed
		}
		row(cells...)
	}
	_ = table.Flush() // what cannot be written is not seen
	for _, c := range columns {
		if len(c.said) > 0 {
			fmt.Fprintf(out, "\nsaid with %s:\n", c.title)
		}
		for _, text := range slices.Compact(c.said) {
			fmt.Fprintf(out, "  %s\n", text)
		}
	}
	return all
}
