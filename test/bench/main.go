// Command bench holds gpuslice against NVIDIA's own tools, on the same simulated GPUs with the same latencies, in one run:
// nvidia-mig-parted by itself, the same after kubectl drain as an administrator does it, NVIDIA's k8s-mig-manager and
// config-manager, and the agent. It prints a table.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/term"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/incumbent"
	"github.com/gpuslice/gpuslice/test/node"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

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
	c := &cobra.Command{
		Use:           "bench",
		Short:         "Measure gpuslice beside mig-parted, mig-manager and a drain of the whole node",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return o.bench(cmd.Context()) },
	}
	c.Flags().IntVar(&o.repeat, "repeat", 3, "runs of each program in each scenario")
	c.Flags().IntVar(&o.parallel, "parallel", 6, "runs at the same time, each on a node of its own; they mostly wait")
	c.Flags().StringVar(&o.scenario, "scenario", "", "only scenarios whose name matches this regular expression")
	c.Flags().StringVar(&o.program, "program", "", "only programs whose name matches this regular expression")
	c.Flags().BoolVar(&o.markdown, "markdown", false, "print the table as Markdown")
	c.Flags().BoolVar(&o.keep, "keep", false, "keep the directory with the logs of all runs")
	return c
}

func (o options) bench(ctx context.Context) (err error) {
	if err := sandbox.Possible(); err != nil {
		return err
	}
	if _, err := os.Stat("test/bench"); err != nil {
		return fmt.Errorf("run the bench from the root of the checkout: %w", err)
	}
	rows, sick, still, err := o.rows()
	if err != nil {
		return err
	}
	builder := binaries.Builder{Log: os.Stderr}
	if term.IsTerminal(int(os.Stderr.Fd())) {
		builder.Terminal = os.Stderr
	}
	parts, err := node.Build(ctx, builder)
	if err != nil {
		return err
	}
	nvidia, err := buildNVIDIA(ctx, builder, len(rows)+len(still) > 0)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "bench-") // short: Unix sockets are in it
	if err != nil {
		return fmt.Errorf("making a directory for the bench: %w", err)
	}
	defer func() {
		if err == nil && !o.keep {
			err = os.RemoveAll(dir)
		} else {
			fmt.Fprintln(os.Stderr, "the logs are in", dir)
		}
	}()
	st, err := setUp(ctx, dir, parts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.cluster.Stop()) }()
	began := time.Now()
	if err := errors.Join(o.runAll(ctx, dir, rows, st, nvidia), o.runFaults(ctx, dir, sick, st), o.runIdle(ctx, dir, still, st, nvidia)); err != nil {
		return err
	}
	if len(rows) > 0 {
		fmt.Println(tabulate(rows, o.markdown))
		fmt.Println(tabulateSpent(rows, o.markdown))
		fmt.Println(tabulateRequests(rows, o.markdown))
	}
	if len(sick) > 0 {
		fmt.Println(tabulateFaults(sick, o.markdown))
	}
	if len(still) > 0 {
		fmt.Println(tabulateIdle(still, o.markdown))
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

// program is something that can be measured, in the order of the table.
type program struct {
	name    string
	on      func(*stage, incumbent.Programs) contender // in scenarios about MIG; nil if it has no part in them
	sharing func(*stage) contender                     // in those about sharing, likewise
	watches bool                                       // it runs as long as its node, and so takes memory
}

var programs = []program{
	{name: "mig-parted", on: func(_ *stage, p incumbent.Programs) contender { return tool{p} }},
	{name: "mig-manager", on: migManager, watches: true},
	{name: "full drain", on: fullDrain},
	{name: "config-manager", sharing: configManager},
	{name: "gpuslice", on: func(st *stage, _ incumbent.Programs) contender { return gpuslice(st) }, sharing: gpusliceSharing, watches: true},
}

// takesPart reports whether there is anything to measure of the program.
func (p program) takesPart(s scenario) bool {
	if s.sharing() {
		return p.sharing != nil
	}
	return p.on != nil
}

func (p program) contender(st *stage, n incumbent.Programs, s scenario) contender {
	if s.sharing() {
		return p.sharing(st)
	}
	return p.on(st, n)
}

// rows are those that are asked for, still without results.
func (o options) rows() (rows []row, sick []faultRow, still []idleRow, err error) {
	scenarioMatch, err := regexp.Compile(o.scenario)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("reading --scenario: %w", err)
	}
	programMatch, err := regexp.Compile(o.program)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("reading --program: %w", err)
	}
	for _, s := range scenarios {
		for _, p := range programs {
			if p.takesPart(s) && scenarioMatch.MatchString(s.name) && programMatch.MatchString(p.name) {
				rows = append(rows, row{scenario: s, program: p, runs: make([]result, o.repeat)})
			}
		}
	}
	sick, still = o.faultRows(scenarioMatch, programMatch), o.idleRows(scenarioMatch, programMatch)
	if len(rows)+len(sick)+len(still) == 0 || o.repeat < 1 {
		return nil, nil, nil, errors.New("nothing to run: no scenario and program match, or --repeat is less than 1")
	}
	return rows, sick, still, nil
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

// runFaults fills in the courses of the second table.
func (o options) runFaults(ctx context.Context, dir string, sick []faultRow, st *stage) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(o.parallel)
	for i := range o.repeat {
		for j, r := range sick {
			group.Go(func() error {
				at := filepath.Join(dir, fmt.Sprintf("f%d-%d", j, i))
				if err := os.MkdirAll(at, 0o755); err != nil {
					return fmt.Errorf("making a directory for a run: %w", err)
				}
				one, err := st.runFault(ctx, at, r)
				if err != nil {
					return fmt.Errorf("%s, %s: %w (%s)", r.fault.name, r.by, err, at)
				}
				r.runs[i] = one
				fmt.Fprintf(os.Stderr, "%s: %s: %v\n", r.fault.name, r.by, one)
				return nil
			})
		}
	}
	return group.Wait()
}

// runIdle fills in the third table, one run after the other: a program that gets no processor collects its garbage late.
func (o options) runIdle(ctx context.Context, dir string, still []idleRow, st *stage, p incumbent.Programs) error {
	for i := range o.repeat {
		for j, r := range still {
			at := filepath.Join(dir, fmt.Sprintf("i%d-%d", j, i))
			if err := os.MkdirAll(at, 0o755); err != nil {
				return fmt.Errorf("making a directory for a run: %w", err)
			}
			one, err := st.runIdle(ctx, at, r, p)
			if err != nil {
				return fmt.Errorf("%s, %s: %w (%s)", idleScenario.name, r.program.name, err, at)
			}
			r.runs[i] = one
			fmt.Fprintf(os.Stderr, "%s: %s: %d KiB, %d KiB, %d KiB\n", idleScenario.name, r.program.name, one.idle, one.churn, one.after)
		}
	}
	return nil
}

// runAll fills in the results. The programs take turns, so that all of them see the machine as busy as it is.
func (o options) runAll(ctx context.Context, dir string, rows []row, st *stage, p incumbent.Programs) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(o.parallel)
	for i := range o.repeat {
		for j, r := range rows {
			group.Go(func() error {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				at := filepath.Join(dir, fmt.Sprintf("n%d-%d", j, i))
				if err := os.MkdirAll(at, 0o755); err != nil {
					return fmt.Errorf("making a directory for a run: %w", err)
				}
				one, err := r.program.contender(st, p, r.scenario).run(ctx, at, r.scenario)
				if err != nil {
					return fmt.Errorf("%s, %s: %w (%s)", r.scenario.name, r.program.name, err, at)
				}
				r.runs[i] = one
				fmt.Fprintf(os.Stderr, "%s: %s: %s, %s\n", r.scenario.name, r.program.name, seconds(one.said), one.outcome)
				return nil
			})
		}
	}
	return group.Wait()
}
