// Command fleet measures what a fleet of agents costs the API server: real agents' loops in this process, each with its own token, on simulated
// GPUs, against a real control plane. Kubelets and device plugins are stand-ins of this process.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/test/program"
)

func main() { program.Main(command()) }

// options say how much is measured.
type options struct {
	nodes    []int
	idle     time.Duration
	updates  int // of a pod on each node
	limit    string
	patience time.Duration // of each wait
	flags    []string      // of the API server
	lasts    time.Duration // the storm; 0 for none
	share    bool          // the agents have a share of the API server
	log      io.Writer
}

func command() *cobra.Command {
	o := options{log: os.Stderr}
	c := program.New("fleet", "Measure what fleets of agents cost the API server", func(ctx context.Context) error { return o.all(ctx) })
	c.Flags().IntSliceVar(&o.nodes, "nodes", []int{30, 100}, "sizes of the fleets, one after the other")
	c.Flags().DurationVar(&o.idle, "idle", time.Minute, "how long nothing happens")
	c.Flags().IntVar(&o.updates, "updates", 100, "updates of a pod on each node")
	c.Flags().StringVar(&o.limit, "max-unavailable", "10%", "limit of the pool, a number or a percentage")
	c.Flags().DurationVar(&o.patience, "patience", 15*time.Minute, "how long each wait may take")
	c.Flags().StringSliceVar(&o.flags, "api-server", nil, "flags of the API server")
	c.Flags().DurationVar(&o.lasts, "storm", 0, "instead, measure how long others wait for the API server for so long after all agents have restarted and all nodes are changed")
	return c
}

// all measures all sizes, and prints a table.
func (o options) all(ctx context.Context) error {
	if err := o.check(); err != nil {
		return err
	}
	if o.lasts > 0 {
		return o.storms(ctx)
	}
	var results []result
	for _, n := range o.nodes {
		r, err := o.run(ctx, n)
		if err != nil {
			return fmt.Errorf("measuring %d nodes: %w", n, err)
		}
		results = append(results, r)
	}
	_, err := fmt.Fprint(os.Stdout, table(results))
	return err
}

// check refuses what cannot be measured, before anything starts.
func (o options) check() error {
	refuse := func(flag string, value any, must string) error {
		return fmt.Errorf("--%s %v: it must be %s", flag, value, must)
	}
	for _, n := range o.nodes {
		if n < 1 {
			return refuse("nodes", n, "1 or more")
		}
	}
	switch {
	case o.idle < 0:
		return refuse("idle", o.idle, "0s or longer")
	case o.updates < 0:
		return refuse("updates", o.updates, "0 or more")
	case o.patience <= 0:
		return refuse("patience", o.patience, "longer than 0s")
	case o.lasts < 0:
		return refuse("storm", o.lasts, "longer than 0s, or 0s for none")
	}
	// The agents' own check judges it: if they refuse a limit, no node begins, and the run would wait for the change in vain.
	file, err := maintenance.Parse([]byte((*fleet)(nil).maintenance(o.limit)))
	if err != nil || len(file.Pools) != 1 || file.Pools[0].MaxUnavailable == nil || file.Pools[0].MaxUnavailable.Of(1) < 1 {
		return refuse("max-unavailable", o.limit, `a number of nodes from 1, or a percentage from "1%" to "100%"`)
	}
	return nil
}

// storms measures what others notice of a fleet, without and with its own share of the API server.
func (o options) storms(ctx context.Context) error {
	for _, n := range o.nodes {
		var all []weather
		for _, o.share = range []bool{false, true} {
			w, err := o.storm(ctx, n, o.lasts)
			if err != nil {
				return fmt.Errorf("measuring the storm of %d nodes: %w", n, err)
			}
			all = append(all, w)
		}
		if _, err := fmt.Fprintf(os.Stdout, "%d nodes\n\n%s", n, forecast(all)); err != nil {
			return err
		}
	}
	return nil
}

// run measures a fleet of n nodes on its own control plane.
func (o options) run(ctx context.Context, n int) (r result, err error) {
	fmt.Fprintf(o.log, "%d nodes\n", n)
	f, err := start(ctx, o, n)
	if err != nil {
		return result{}, err
	}
	defer func() { err = errors.Join(err, f.stop()) }()
	return f.measure(ctx)
}
