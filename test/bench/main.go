// Command bench compares gpuslice with NVIDIA's own tools, on the same simulated GPUs with the same latencies, in one run.
// The tools are nvidia-mig-parted by itself, nvidia-mig-parted after kubectl drain as an administrator does it, and
// NVIDIA's k8s-mig-manager and config-manager. It prints a table.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/incumbent"
	"github.com/gpuslice/gpuslice/test/node"
	"github.com/gpuslice/gpuslice/test/program"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

func main() { program.Main(command()) }

// contender is a program that is ready to be measured.
type contender interface {
	// run takes a fresh machine in dir, which is short, through the scenario. The error is one of the bench, not of the
	// program that is measured.
	run(ctx context.Context, dir string, s scenario) (result, error)
}

type options struct {
	repeat   int
	parallel int
	scenario string
	program  string
	markdown bool
	keep     bool
}

func command() *cobra.Command {
	var o options
	c := program.New("bench", "Measure gpuslice beside mig-parted, mig-manager and a drain of the whole node",
		func(ctx context.Context) error { return o.bench(ctx) })
	c.Flags().IntVar(&o.repeat, "repeat", 3, "runs of each program in each scenario")
	c.Flags().IntVar(&o.parallel, "parallel", 6, "runs at the same time, each on a node of its own; they mostly wait")
	c.Flags().StringVar(&o.scenario, "scenario", "", "only scenarios whose name matches this regular expression")
	c.Flags().StringVar(&o.program, "program", "", "only programs whose name matches this regular expression")
	c.Flags().BoolVar(&o.markdown, "markdown", false, "print the table as Markdown")
	c.Flags().BoolVar(&o.keep, "keep", false, "keep the directory with the logs of all runs")
	return c
}

func (o options) bench(ctx context.Context) error {
	if err := sandbox.Possible(); err != nil {
		return err
	}
	if err := program.AtRoot(); err != nil {
		return err
	}
	t, err := o.tables()
	if err != nil {
		return err
	}
	builder := program.Builder(os.Stderr, os.Stderr)
	parts, err := node.Build(ctx, builder)
	if err != nil {
		return err
	}
	if t.dra() {
		if err := parts.BuildDRADriver(ctx, builder); err != nil {
			return err
		}
	}
	nvidia, err := buildNVIDIA(ctx, builder, len(t.rows)+len(t.profiled)+len(t.still) > 0)
	if err != nil {
		return err
	}
	return program.InDir("bench", o.keep, os.Stderr, func(dir string) error { return o.measure(ctx, dir, parts, nvidia, t) })
}

// measure fills in the tables, and prints them.
func (o options) measure(ctx context.Context, dir string, parts node.Parts, nvidia incumbent.Programs, t tables) (err error) {
	st, err := setUp(ctx, dir, parts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.cluster.Stop()) }()
	if t.dra() {
		if err := st.deployDRA(ctx); err != nil {
			return err
		}
	}
	began := time.Now()
	if err := errors.Join(o.runAll(ctx, dir, "n", t.rows, st, nvidia), o.runAll(ctx, dir, "p", t.profiled, st, nvidia), o.runFaults(ctx, dir, t.sick, st), o.runIdle(ctx, dir, t.still, st, nvidia)); err != nil {
		return err
	}
	if len(t.rows) > 0 {
		fmt.Println(tabulate(t.rows, o.markdown))
		fmt.Println(tabulateSpent(t.rows, o.markdown))
		fmt.Println(tabulateRequests(t.rows, o.markdown))
	}
	if len(t.profiled) > 0 {
		fmt.Println(tabulateProfiles(t.profiled, o.markdown))
		fmt.Println(tabulateSpent(t.profiled, o.markdown))
	}
	if len(t.sick) > 0 {
		fmt.Println(tabulateFaults(t.sick, o.markdown))
	}
	if len(t.still) > 0 {
		fmt.Println(tabulateIdle(t.still, o.markdown))
	}
	fmt.Printf("%s, %d CPUs, %d runs each, %d at the same time; all of it took %s.\n",
		time.Now().Format(time.DateOnly), runtime.NumCPU(), o.repeat, o.parallel, time.Since(began).Round(time.Second))
	return nil
}

// buildNVIDIA builds NVIDIA's programs, if they are needed.
func buildNVIDIA(ctx context.Context, builder binaries.Builder, needed bool) (incumbent.Programs, error) {
	if !needed {
		return incumbent.Programs{}, nil
	}
	return incumbent.Build(ctx, builder)
}

// measured is a program that can be measured, in the order of the table.
type measured struct {
	name    string
	on      func(*stage, incumbent.Programs) contender // in scenarios about MIG; nil if it has no part in them
	sharing func(*stage, incumbent.Programs) contender // in those about sharing, likewise
	dra     func(*stage, incumbent.Programs) contender // in those about MIG on a node of NVIDIA's DRA driver, likewise
	watches bool                                       // it runs as long as its node, and so takes memory
}

var programs = []measured{
	{name: "mig-parted", on: func(_ *stage, p incumbent.Programs) contender { return tool{p} }},
	{name: "mig-manager", on: migManager, watches: true},
	{name: "full drain", on: fullDrain},
	{name: "config-manager", sharing: configManager},
	{name: "by hand", dra: byHand},
	{
		name: "gpuslice", sharing: gpusliceSharing, watches: true,
		on:  func(st *stage, _ incumbent.Programs) contender { return gpuslice(st, operators) },
		dra: func(st *stage, _ incumbent.Programs) contender { return gpuslice(st, draDriver) },
	},
}

// in is how the program takes part in a scenario; nil if it does not.
func (p measured) in(s scenario) func(*stage, incumbent.Programs) contender {
	switch {
	case s.sharing():
		return p.sharing
	case s.dra:
		return p.dra
	default:
		return p.on
	}
}

// tables are the requested rows.
type tables struct {
	rows     []row
	profiled []row // by latency profile
	sick     []faultRow
	still    []idleRow
}

// dra reports whether a row needs NVIDIA's DRA driver.
func (t tables) dra() bool {
	return slices.ContainsFunc(t.rows, func(r row) bool { return r.scenario.dra })
}

// tables returns the requested rows, still without results.
func (o options) tables() (t tables, err error) {
	scenarioMatch, err := regexp.Compile(o.scenario)
	if err != nil {
		return t, fmt.Errorf("reading --scenario: %w", err)
	}
	programMatch, err := regexp.Compile(o.program)
	if err != nil {
		return t, fmt.Errorf("reading --program: %w", err)
	}
	t.rows, t.profiled = o.rowsOf(scenarios, scenarioMatch, programMatch), o.rowsOf(profiled, scenarioMatch, programMatch)
	t.sick, t.still = o.faultRows(scenarioMatch, programMatch), o.idleRows(scenarioMatch, programMatch)
	if len(t.rows)+len(t.profiled)+len(t.sick)+len(t.still) == 0 || o.repeat < 1 {
		return t, errors.New("nothing to run: no scenario and program match, or --repeat is less than 1")
	}
	return t, nil
}

func (o options) rowsOf(all []scenario, scenario, program *regexp.Regexp) (out []row) {
	for _, s := range all {
		for _, p := range programs {
			if p.in(s) != nil && scenario.MatchString(s.name) && program.MatchString(p.name) {
				out = append(out, row{scenario: s, program: p, runs: make([]result, o.repeat)})
			}
		}
	}
	return out
}

func (o options) faultRows(scenario, program *regexp.Regexp) (out []faultRow) {
	for _, f := range faults {
		for _, w := range watchers {
			if scenario.MatchString(f.name) && program.MatchString(w.name) {
				out = append(out, faultRow{fault: f, by: w.name, agent: w.agent, runs: make([]course, o.repeat)})
			}
		}
	}
	return out
}

func (o options) idleRows(scenario, program *regexp.Regexp) (out []idleRow) {
	for _, p := range programs {
		if p.watches && scenario.MatchString(idleScenario.name) && program.MatchString(p.name) {
			out = append(out, idleRow{program: p, runs: make([]kept, o.repeat)})
		}
	}
	return out
}

// each calls do for each run of each of so many rows, with the run's own directory. The rows take turns, so that the machine is equally busy for all
// of them.
func (o options) each(ctx context.Context, dir, table string, rows, parallel int, do func(ctx context.Context, row, run int, dir string) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	for run := range o.repeat {
		for row := range rows {
			group.Go(func() error {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				at := filepath.Join(dir, fmt.Sprintf("%s%d-%d", table, row, run))
				if err := os.MkdirAll(at, 0o755); err != nil {
					return fmt.Errorf("making a directory for a run: %w", err)
				}
				if err := do(ctx, row, run, at); err != nil {
					return fmt.Errorf("%w (%s)", err, at)
				}
				return nil
			})
		}
	}
	return group.Wait()
}

// runAll fills in rows of changes.
func (o options) runAll(ctx context.Context, dir, table string, rows []row, st *stage, p incumbent.Programs) error {
	return o.each(ctx, dir, table, len(rows), o.parallel, func(ctx context.Context, j, i int, at string) error {
		r := rows[j]
		s := r.scenario
		s.config = filepath.Base(at)
		one, err := r.program.in(s)(st, p).run(ctx, at, s)
		if err != nil {
			return fmt.Errorf("%s, %s: %w", r.scenario.name, r.program.name, err)
		}
		r.runs[i] = one
		fmt.Fprintf(os.Stderr, "%s: %s: %s, %s\n", r.scenario.name, r.program.name, seconds(one.said), one.outcome)
		return nil
	})
}

// runFaults fills in the courses of the second table.
func (o options) runFaults(ctx context.Context, dir string, sick []faultRow, st *stage) error {
	return o.each(ctx, dir, "f", len(sick), o.parallel, func(ctx context.Context, j, i int, at string) error {
		r := sick[j]
		one, err := st.runFault(ctx, at, r)
		if err != nil {
			return fmt.Errorf("%s, %s: %w", r.fault.name, r.by, err)
		}
		r.runs[i] = one
		fmt.Fprintf(os.Stderr, "%s: %s: %v\n", r.fault.name, r.by, one)
		return nil
	})
}

// runIdle fills in the third table, one run after the other: a program that gets no processor collects its garbage late.
func (o options) runIdle(ctx context.Context, dir string, still []idleRow, st *stage, p incumbent.Programs) error {
	return o.each(ctx, dir, "i", len(still), 1, func(ctx context.Context, j, i int, at string) error {
		r := still[j]
		one, err := st.runIdle(ctx, at, r, p)
		if err != nil {
			return fmt.Errorf("%s, %s: %w", idleScenario.name, r.program.name, err)
		}
		r.runs[i] = one
		fmt.Fprintf(os.Stderr, "%s: %s: %d KiB, %d KiB, %d KiB\n", idleScenario.name, r.program.name, one.idle, one.churn, one.after)
		return nil
	})
}
