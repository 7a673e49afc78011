package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	labelvalues "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/agent/report/preview"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
	"github.com/gpuslice/gpuslice/cmd/internal/show"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/nvml/picture"
)

var (
	errNoName  = errors.New("name what to plan by --profile, or by --mig-config, --device-plugin-config or both, as the node's labels would")
	errBothAsk = errors.New("--profile alone counts, as the node's label does: leave out --mig-config and --device-plugin-config")
)

// planRequest has the values of the labels to plan for, and the files of configs that they may name.
type planRequest struct {
	preview.Ask

	files   []string
	offline bool
}

func (o *options) plan() *cobra.Command {
	var w planRequest
	var profiles []string
	c := &cobra.Command{
		Use:   "plan",
		Short: "Print what a config would do to this node, or why it cannot be; changes nothing",
		Long: `Prints what a config would do to this node: first whether the agent would begin it at once, by its own gates, then the GPUs before and after
and the steps between them. It changes nothing. It looks at this node alone: kubectl gpuslice plan also checks whether the pods that leave have a
place on other nodes.

Exit codes: 0 it would begin at once, or there is nothing to do; 4 it would be refused or held up; 5 it would begin, and this node shows that it
may not end; 1 anything else. With --offline nothing is asked, and there is no verdict.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			w.files = append(w.files, profiles...)
			if err := checkAsk(w.Ask); err != nil {
				return err
			}
			if w.offline && cmd.Flags().Changed("settings") { // a plan of the GPUs alone does not depend on them, but a file that was named is read
				if _, err := o.load(); err != nil {
					return err
				}
			}
			known, err := manifest.ReadConfigs(w.files, cmd.InOrStdin())
			if err != nil {
				return err
			}
			_, name := w.Label()
			preview, err := o.preview(cmd, w, known)
			if err != nil {
				return unplanned(name, err, w.offline)
			}
			return o.say(cmd.OutOrStdout(), name, preview, w.offline)
		},
	}
	c.Flags().StringVar(&w.MIGConfig, "mig-config", "", "name of a MIG config, as in the label "+config.LabelMIGConfig)
	c.Flags().StringVar(&w.PluginConfig, "device-plugin-config", "", "key of a config of the device plugin, as in the label "+config.LabelDevicePluginConfig)
	c.Flags().StringVar(&w.Profile, "profile", "", "name of a profile, as in the label "+config.LabelProfile+"; every MIG config is one")
	c.Flags().BoolVar(&w.offline, "offline", false, "read the GPUs alone; no cluster is asked")
	c.Flags().StringArrayVarP(&w.files, "file", "f", nil,
		"with --offline: file or folder of MIG configs, profiles or configs of the device plugin, bare or in manifests; several by several flags; - for standard input")
	c.Flags().StringArrayVar(&profiles, "profiles", nil, "the same as --file")
	return c
}

// checkAsk says what is wrong with the names to plan for, before any is printed: no label can have a name with a line feed.
func checkAsk(a preview.Ask) error {
	switch {
	case a == preview.Ask{}:
		return errNoName
	case a.Profile != "" && (a.MIGConfig != "" || a.PluginConfig != ""):
		return errBothAsk
	}
	for label, name := range map[string]string{
		config.LabelProfile: a.Profile, config.LabelMIGConfig: a.MIGConfig, config.LabelDevicePluginConfig: a.PluginConfig,
	} {
		if wrong := labelvalues.IsValidLabelValue(name); len(wrong) > 0 {
			return fmt.Errorf("%q can be no value of label %s: %s", name, label, strings.Join(wrong, "; "))
		}
	}
	return nil
}

// unplanned is why there is no plan. Only what the agent itself would not try again is its verdict on the config: the rest kept the command from asking.
func unplanned(name string, err error, offline bool) error {
	switch {
	case errors.Is(err, nvml.ErrNoDriver):
		return fmt.Errorf("the GPUs cannot be seen, so nothing is known of %s: %w", name, err)
	case offline:
		return fmt.Errorf("%s cannot be: %w", name, err)
	}
	_, stalled := errors.AsType[*outcome.Stalled](err)
	_, refused := errors.AsType[*plan.Refused](err)
	_, failed := errors.AsType[*api.Failure](err)
	if !stalled && !refused && !failed {
		return err
	}
	return &cli.ExitError{Code: cli.ExitHeldUp, Err: fmt.Errorf("%s would be refused: %w", name, err)}
}

// say prints the plan, and before it, on a node, the agent's verdict.
func (o *options) say(w io.Writer, name string, p preview.Result, offline bool) error {
	if offline {
		return printPlan(w, name, p, true, o.processName)
	}
	var said api.Answer
	p.AddTo(&said)
	verdict := show.Judge(&said, "", "")
	out := &cli.Printer{W: w}
	if verdict.Ruling != show.NothingToDo {
		out.Printf("%s: %s\n", o.node, verdict)
	}
	if out.Err == nil && (verdict.Ruling != show.HeldUp || len(p.Steps) > 0) { // what cannot be seen yet has no plan
		out.Err = printPlan(w, name, p, false, o.processName)
	}
	code := verdict.Ruling.ExitCode()
	switch {
	case out.Err != nil || code == 0:
		return out.Err
	case verdict.Ruling == show.BeginsUnsure:
		return &cli.ExitError{Code: code, Err: fmt.Errorf("%s would begin, and perhaps not end", name)}
	default:
		return &cli.ExitError{Code: code, Err: fmt.Errorf("%s would be held up", name)}
	}
}

func (o *options) preview(cmd *cobra.Command, w planRequest, known manifest.Configs) (preview.Result, error) {
	label, name := w.Label()
	if !w.offline {
		a, err := o.agent(cmd.Context(), zap.NewNop(), metrics.New(clock.RealClock{}))
		if err != nil {
			return preview.Result{}, err
		}
		return a.Preview(cmd.Context(), label, name)
	}
	gpus, err := lib.Open(lib.Options{DriverRoot: o.driverRoot, Logger: zap.NewNop()}).Snapshot(cmd.Context())
	if err != nil {
		return preview.Result{}, err
	}
	configs := catalog.Merge(catalog.Generate(gpus), known.MIG).WithProfiles(known.Profiles)
	return preview.Offline{GPUs: gpus, Catalog: configs, Plugin: known.Plugin}.Plan(label, name)
}

// processName gives the name of a process of the host, fit for a terminal; empty if it cannot be read.
func (o *options) processName(pid int) string {
	text, err := os.ReadFile(filepath.Join(o.procRoot, strconv.Itoa(pid), "comm"))
	if err != nil {
		return ""
	}
	return sanitize.Name(strings.TrimSpace(string(text)))
}

// printPlan prints the GPUs before and after, the steps between, and the processes that hold what goes, by name.
func printPlan(w io.Writer, name string, p preview.Result, offline bool, processName func(pid int) string) error {
	out := &cli.Printer{W: w}
	for i, gpu := range p.Before {
		out.Printf("GPU %d  %s  %s\n", gpu.Index, gpu.Model, gpu.UUID)
		out.Printf("  now   %s\n", picture.GPU(gpu, gpu.Geometry()))
		after := p.After[i]
		waits := slices.ContainsFunc(p.AtReboot, func(g nvml.GPU) bool { return g.UUID == gpu.UUID })
		switch {
		case waits:
			out.Printf("  then  the same, until the node's next reboot\n")
		case after.Enabled == gpu.Enabled && after.Geometry().String() == gpu.Geometry().String():
			out.Printf("  then  the same\n")
		default:
			out.Printf("  then  %s\n", picture.GPU(after, after.Geometry()))
		}
	}
	waiting := rebootNote(name, p)
	switch {
	case len(p.Steps) == 0 && waiting != "":
		out.Printf("\nNothing to do before that reboot. %s\n", waiting)
	case len(p.Steps) == 0:
		out.Printf("\nNothing to do: the GPUs are as %s asks.\n", name)
	default:
		out.Printf("\n%s to %s:\n", cli.Counted(len(p.Steps), "step"), name)
		for i, step := range p.Steps {
			out.Printf("%4d  %s\n", i+1, step)
		}
		out.Printf("\n%s\n", podsToEvict(p.Steps, offline))
		for _, line := range slices.Concat(holderNotes(p.Holders, processName), resetNotes(p), assumptions(p, offline)) {
			out.Printf("%s\n", line)
		}
		if len(p.Lost) > 0 {
			out.Printf("Lost for good: %s.\n", strings.Join(p.Lost, "; "))
		}
		for _, asked := range p.Asked {
			out.Printf("%s.\n", asked)
		}
		for _, note := range p.Notes {
			out.Printf("%s.\n", note)
		}
		if waiting != "" {
			out.Printf("%s\n", waiting)
		}
	}
	if len(p.Beyond) > 0 {
		out.Printf("The config names positions that this node does not have, which are passed over: %s.\n", joinPositions(p.Beyond))
	}
	return out.Err
}

// assumptions says what an offline plan assumes about the device plugin.
func assumptions(p preview.Result, offline bool) []string {
	var out []string
	if offline && p.MIGStrategy != "" {
		out = append(out, fmt.Sprintf("The MIG strategy of the device plugin is taken to be %s.", p.MIGStrategy))
	}
	if offline && p.Handover != "" {
		out = append(out, fmt.Sprintf("The device plugin is taken to read its config from a file of the host, by devicePlugin.handover: %s; "+
			"where NVIDIA's config manager brings it, by label %s, the steps are others.", p.Handover, config.LabelDevicePluginConfig))
	}
	return out
}

// joinPositions lists as many positions as fit in a line.
func joinPositions(all []int) string {
	const most = 8
	var texts []string
	for _, n := range all[:min(len(all), most)] {
		texts = append(texts, strconv.Itoa(n))
	}
	text := strings.Join(texts, ", ")
	if more := len(all) - most; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// holderNotes names the processes on GPUs and instances that the change takes away.
func holderNotes(holders []preview.Holder, processName func(pid int) string) []string {
	var out []string
	for _, h := range holders {
		var names []string
		for _, pid := range h.PIDs {
			name := strconv.Itoa(pid)
			if called := processName(pid); called != "" {
				name += " (" + called + ")"
			}
			names = append(names, name)
		}
		out = append(out, fmt.Sprintf("GPU %d: NVML shows %s on what the change takes away; the change waits until it is free.", h.Index, processes(names)))
	}
	return out
}

func processes(names []string) string {
	const most = 8
	switch {
	case len(names) == 1:
		return "process " + names[0]
	case len(names) > most:
		return fmt.Sprintf("processes %s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	default:
		return "processes " + strings.Join(names, ", ")
	}
}

// resetNotes names the GPUs that need a reset to change their MIG mode: those before Hopper. The hardware itself shows that only once the mode
// is pending.
func resetNotes(p preview.Result) []string {
	var out []string
	for _, step := range p.Steps {
		at := slices.IndexFunc(p.Before, func(g nvml.GPU) bool { return g.UUID == step.GPU })
		if step.Kind != plan.SetMode || at < 0 || p.Before[at].Enabled == step.On { // to take back a mode that is pending needs none
			continue
		}
		gpu := p.Before[at]
		if !gpu.ComputeCapability.AtLeast(8, 0) || gpu.SwitchesAlone() {
			continue
		}
		note := fmt.Sprintf("GPU %d: its MIG mode changes by a reset: no process may have the GPU open.", gpu.Index)
		if gpu.Virtualization == nvml.PassedThrough {
			note = fmt.Sprintf("Plan for a reboot of the node: GPU %d is passed through to this virtual machine, and its MIG mode changes by a reset, which most such "+
				"machines do not let the driver do; see reboot.policy of the settings.", gpu.Index)
		}
		out = append(out, note)
	}
	return out
}

// rebootNote names the GPUs that wait for a reboot of the node; empty if there is none.
func rebootNote(name string, p preview.Result) string {
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

// podsToEvict says how many pods have to leave, those of a drain for a reboot among them.
func podsToEvict(steps []plan.Step, offline bool) string {
	if offline {
		return "Pods were not read: leave out --offline to see which have to leave."
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
