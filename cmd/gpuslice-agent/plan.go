package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
)

var errNoName = errors.New("name what to plan by --mig-config or --profile, as the node's label would")

func (o *options) plan() *cobra.Command {
	var name, profile, file string
	var offline bool
	c := &cobra.Command{
		Use:   "plan",
		Short: "Print what a config would do to this node, or why it cannot be; changes nothing",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			wanted := cmp.Or(profile, name)
			if wanted == "" {
				return errNoName
			}
			preview, err := o.preview(cmd, wanted, file, offline)
			if err != nil {
				return fmt.Errorf("%s cannot be: %w", wanted, err)
			}
			return show(cmd.OutOrStdout(), wanted, preview, offline)
		},
	}
	c.Flags().StringVar(&name, "mig-config", "", "name of a MIG config, as in the label "+config.LabelMIGConfig)
	c.Flags().StringVar(&profile, "profile", "", "name of a profile, as in the label "+config.LabelProfile+"; every MIG config is one")
	c.Flags().BoolVar(&offline, "offline", false, "look at the GPUs alone; no cluster is asked")
	c.Flags().StringVarP(&file, "file", "f", "", "with --offline: MIG configs in mig-parted's format, beside those of the hardware")
	return c
}

func (o *options) preview(cmd *cobra.Command, name, file string, offline bool) (agent.Preview, error) {
	if !offline {
		a, err := o.agent(zap.NewNop())
		if err != nil {
			return agent.Preview{}, err
		}
		return a.Preview(cmd.Context(), name)
	}
	gpus, err := lib.Open(lib.Options{DriverRoot: o.driverRoot, Logger: zap.NewNop()}).Snapshot(cmd.Context())
	if err != nil {
		return agent.Preview{}, err
	}
	var custom map[string]config.MIGConfig
	if file != "" {
		data, err := os.ReadFile(file)
		if err != nil {
			return agent.Preview{}, fmt.Errorf("reading the MIG configs: %w", err)
		}
		if custom, err = migparted.Parse(data); err != nil {
			return agent.Preview{}, fmt.Errorf("%s: %w", file, err)
		}
	}
	return agent.PreviewOffline(config.Merge(config.Generate(gpus), custom), name, gpus)
}

// show prints the GPUs before and after, and the steps between.
func show(w io.Writer, name string, p agent.Preview, offline bool) error {
	out := &printer{w: w}
	for i, gpu := range p.Before {
		out.printf("GPU %d  %s  %s\n", gpu.Index, gpu.Model, gpu.UUID)
		out.printf("  now   %s\n", nvml.Draw(gpu, gpu.Geometry()))
		after := p.After[i]
		if after.Enabled == gpu.Enabled && after.Geometry().String() == gpu.Geometry().String() {
			out.printf("  then  the same\n")
			continue
		}
		out.printf("  then  %s\n", nvml.Draw(after, after.Geometry()))
	}
	if len(p.Steps) == 0 {
		out.printf("\nNothing to do: the GPUs are as %s asks.\n", name)
		return out.err
	}
	out.printf("\n%d steps to %s:\n", len(p.Steps), name)
	for i, step := range p.Steps {
		out.printf("%4d  %s\n", i+1, step)
	}
	out.printf("\n%s\n", leaving(p.Steps, offline))
	return out.err
}

func leaving(steps []plan.Step, offline bool) string {
	if offline {
		return "Pods were not looked at: leave out --offline to see which have to leave."
	}
	for _, s := range steps {
		switch {
		case s.Kind == plan.Evict && len(s.Pods) == 1:
			return "1 pod has to leave."
		case s.Kind == plan.Evict:
			return fmt.Sprintf("%d pods have to leave.", len(s.Pods))
		}
	}
	return "No pod has to leave."
}

// printer keeps the first error of many writes.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) printf(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format, args...)
	}
}
