package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
)

var errNoName = errors.New("name what to plan by --mig-config or --profile, as the node's label would")

// wanted is what the plan is for: what a label would ask for, and the files of configs to look in.
type wanted struct {
	name, profile          string
	migConfigs, ownCatalog string
	offline                bool
}

func (w wanted) label() (label, name string) {
	if w.profile != "" {
		return config.LabelProfile, w.profile
	}
	return config.LabelMIGConfig, w.name
}

func (o *options) plan() *cobra.Command {
	var w wanted
	c := &cobra.Command{
		Use:   "plan",
		Short: "Print what a config would do to this node, or why it cannot be; changes nothing",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, name := w.label()
			if name == "" {
				return errNoName
			}
			preview, err := o.preview(cmd, w)
			if err != nil {
				return fmt.Errorf("%s cannot be: %w", name, err)
			}
			return show(cmd.OutOrStdout(), name, preview, w.offline)
		},
	}
	c.Flags().StringVar(&w.name, "mig-config", "", "name of a MIG config, as in the label "+config.LabelMIGConfig)
	c.Flags().StringVar(&w.profile, "profile", "", "name of a profile, as in the label "+config.LabelProfile+"; every MIG config is one")
	c.Flags().BoolVar(&w.offline, "offline", false, "look at the GPUs alone; no cluster is asked")
	c.Flags().StringVarP(&w.migConfigs, "file", "f", "", "with --offline: MIG configs in mig-parted's format, beside those of the hardware")
	c.Flags().StringVar(&w.ownCatalog, "profiles", "", "with --offline: profiles in gpuslice's format")
	return c
}

func (o *options) preview(cmd *cobra.Command, w wanted) (agent.Preview, error) {
	label, name := w.label()
	if !w.offline {
		a, err := o.agent(zap.NewNop(), nil)
		if err != nil {
			return agent.Preview{}, err
		}
		return a.Preview(cmd.Context(), label, name)
	}
	gpus, err := lib.Open(lib.Options{DriverRoot: o.driverRoot, Logger: zap.NewNop()}).Snapshot(cmd.Context())
	if err != nil {
		return agent.Preview{}, err
	}
	custom, err := read(w.migConfigs, migparted.Parse)
	if err != nil {
		return agent.Preview{}, err
	}
	profiles, err := read(w.ownCatalog, config.ParseProfiles)
	if err != nil {
		return agent.Preview{}, err
	}
	catalog := config.Merge(config.Generate(gpus), custom).WithProfiles(w.ownCatalog, profiles)
	return agent.PreviewOffline(catalog, label, name, gpus)
}

// read parses a file, if one is named.
func read[T any](path string, parse func([]byte) (T, error)) (T, error) {
	var none T
	if path == "" {
		return none, nil
	}
	data, err := document.ReadFile(path)
	if err != nil {
		return none, fmt.Errorf("reading configs: %w", err)
	}
	parsed, err := parse(data)
	if err != nil {
		return none, fmt.Errorf("%s: %w", path, err)
	}
	return parsed, nil
}

// show prints the GPUs before and after, and the steps between.
func show(w io.Writer, name string, p agent.Preview, offline bool) error {
	out := &printer{w: w}
	for i, gpu := range p.Before {
		out.printf("GPU %d  %s  %s\n", gpu.Index, gpu.Model, gpu.UUID)
		out.printf("  now   %s\n", nvml.Draw(gpu, gpu.Geometry()))
		after := p.After[i]
		waits := slices.ContainsFunc(p.AtReboot, func(g nvml.GPU) bool { return g.UUID == gpu.UUID })
		switch {
		case waits:
			out.printf("  then  the same, until the node's next reboot\n")
		case after.Enabled == gpu.Enabled && after.Geometry().String() == gpu.Geometry().String():
			out.printf("  then  the same\n")
		default:
			out.printf("  then  %s\n", nvml.Draw(after, after.Geometry()))
		}
	}
	waiting := atReboot(name, p)
	switch {
	case len(p.Steps) == 0 && waiting != "":
		out.printf("\nNothing to do before that reboot. %s\n", waiting)
		return out.err
	case len(p.Steps) == 0:
		out.printf("\nNothing to do: the GPUs are as %s asks.\n", name)
		return out.err
	}
	out.printf("\n%d steps to %s:\n", len(p.Steps), name)
	for i, step := range p.Steps {
		out.printf("%4d  %s\n", i+1, step)
	}
	out.printf("\n%s\n", leaving(p.Steps, offline))
	if p.Runs != "" {
		out.printf("It would begin %s.\n", p.Runs)
	}
	if waiting != "" {
		out.printf("%s\n", waiting)
	}
	return out.err
}

// atReboot says what waits for a reboot of the node; empty if nothing does.
func atReboot(name string, p agent.Preview) string {
	var indices []string
	for _, gpu := range p.AtReboot {
		indices = append(indices, strconv.Itoa(gpu.Index))
	}
	switch {
	case len(indices) == 1:
		return fmt.Sprintf("GPU %s turns MIG on at the node's next reboot; the change to %s goes on by itself after it.", indices[0], name)
	case len(indices) > 1:
		return fmt.Sprintf("GPUs %s turn MIG on at the node's next reboot; the change to %s goes on by itself after it.",
			strings.Join(indices, ", "), name)
	case p.Reboot:
		return "The change takes a reboot of the node."
	default:
		return ""
	}
}

// leaving counts the pods that have to leave, those of a drain for a reboot among them.
func leaving(steps []plan.Step, offline bool) string {
	if offline {
		return "Pods were not looked at: leave out --offline to see which have to leave."
	}
	type key struct{ namespace, name, uid string }
	pods := map[key]bool{}
	for _, s := range steps {
		if s.Kind != plan.Evict {
			continue
		}
		for _, p := range s.Pods {
			pods[key{p.Namespace, p.Name, p.UID}] = true
		}
	}
	switch len(pods) {
	case 0:
		return "No pod has to leave."
	case 1:
		return "1 pod has to leave."
	default:
		return fmt.Sprintf("%d pods have to leave.", len(pods))
	}
}

// printer keeps the first error of many writes.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) printf(format string, args ...any) {
	if p.err == nil {
		_, p.err = io.WriteString(p.w, legible.Lines(fmt.Sprintf(format, args...)))
	}
}
