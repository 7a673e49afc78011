package rollout

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// Plan is the command.
func Plan(o *cluster.Options) *cobra.Command {
	var a application
	var off offline
	var format string
	c := &cobra.Command{
		Use:   "plan (-l SELECTOR | NODE... | --gpus COUNTxMODEL [-f FILE]) [--profile NAME | --mig-config NAME | --device-plugin-config NAME] [-o json|yaml|html]",
		Short: "Say what the nodes would do for a config, or have left to do; nothing is labelled",
		Long: `Asks the agent of each node for its plan: the GPUs before and after, what the node
offers then, which pods would have to leave, whether they fit on other nodes, and
which budgets stand in the way. Without a name, the plan is for what the node's
labels request already. It is apply --dry-run by another name.

The first line for a node is the verdict of its agent and of the rest of the
cluster: begins at once, begins and may not end, would be held up, would give up
after a time, or would be refused. With -v the single steps are listed, too. With
-o html it is a page for a browser, which loads nothing else.

Exit codes: 0 each node would begin at once, or has nothing to do; 4 one would
refuse, be held up or give up; 5 one would begin, and it is not known whether it
ends; 1 an agent does not answer, or something else went wrong; 130 interrupted.`,
		ValidArgsFunction: o.CompleteNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains([]string{"", output.JSON, output.YAML, output.HTML}, format) {
				return fmt.Errorf("flag --output is %q: it must be %s, %s or %s", format, output.JSON, output.YAML, output.HTML)
			}
			switch {
			case off.gpus != "" && len(args) > 0:
				return fmt.Errorf("--gpus asks no node: leave out %s", strings.Join(args, ", "))
			case off.gpus != "":
				return off.plan(cmd, &a, format)
			case len(off.files) > 0:
				return errors.New("--file goes with --gpus: on a node, its agent has the configs")
			}
			client, err := o.Client()
			if err != nil {
				return err
			}
			nodes, err := a.nodes.Nodes(cmd.Context(), client, args)
			if err != nil {
				return err
			}
			groups, err := a.groups(nodes)
			if err != nil {
				return err
			}
			return a.plan(cmd, client, groups, format)
		},
	}
	a.bind(c, o)
	c.Flags().StringVar(&off.gpus, "gpus", "", "plan for GPUs that are not there, COUNTxMODEL, as 8xH100-80GB; asks no cluster")
	c.Flags().StringArrayVarP(&off.files, "file", "f", nil, "with --gpus: file or folder of MIG configs, profiles or configs of the device plugin; several by several flags; - for standard input")
	c.MarkFlagsMutuallyExclusive("gpus", "selector")
	c.Flags().StringVarP(&format, "output", "o", "", output.JSON+", "+output.YAML+" or "+output.HTML+", a page for a browser")
	cluster.CompleteFlag(c, "output", output.JSON, output.YAML, output.HTML)
	return c
}

// groups are the nodes by the config to plan for: the one of the flags, or else the one that their labels request.
func (a *application) groups(nodes []corev1.Node) ([]sameTarget, error) {
	if a.profile+a.migConfig+a.pluginConfig == "" {
		return byTarget(nodes)
	}
	w, err := a.target()
	if err != nil {
		return nil, err
	}
	return []sameTarget{{w, nodes}}, checkLabelPrecedence(nodes, w)
}

// plan writes the plans of all groups. An agent that keeps silent, or would not begin, hides no other group.
func (a *application) plan(cmd *cobra.Command, client kube.Interface, groups []sameTarget, format string) error {
	out := &cli.Printer{W: cmd.OutOrStdout()}
	said := out
	if format != "" {
		said = &cli.Printer{W: cmd.ErrOrStderr()}
	}
	var all forecasts
	var verdicts []error
	code := 0
	for _, g := range groups {
		p, err := a.forecast(cmd.Context(), client, g.nodes, g.target, said)
		if err != nil {
			return err
		}
		if err := p.verdicts(); err != nil {
			verdicts, code = append(verdicts, err), worse(code, cli.ExitCode(err))
		}
		if all.add(p); format == "" {
			p.print(out, a.verbose)
		}
	}
	if format != "" {
		text, err := all.text(format, output.PaperOf(out.W))
		if err != nil {
			return err
		}
		_, out.Err = io.WriteString(out.W, text)
	}
	if code == 0 || out.Err != nil {
		return out.Err
	}
	return &cli.ExitError{Code: code, Err: errors.Join(verdicts...)}
}

// worse returns the exit code of the worse verdict.
func worse(a, b int) int {
	from := []int{0, cli.ExitUnknown, cli.ExitHeldUp, 1}
	return from[max(slices.Index(from, a), slices.Index(from, b))]
}

// sameTarget are nodes with labels that request the same.
type sameTarget struct {
	target cluster.Target
	nodes  []corev1.Node
}

// byTarget groups nodes by what their labels request.
func byTarget(nodes []corev1.Node) ([]sameTarget, error) {
	var out []sameTarget
	var none []string
next:
	for _, n := range nodes {
		w, asks := cluster.TargetOf(&n)
		if !asks {
			none = append(none, n.Name)
			continue
		}
		for i := range out {
			if out[i].target == w {
				out[i].nodes = append(out[i].nodes, n)
				continue next
			}
		}
		out = append(out, sameTarget{w, []corev1.Node{n}})
	}
	if len(none) > 0 {
		return nil, fmt.Errorf("the labels of %s request nothing: say what to plan for, by --profile, --mig-config or --device-plugin-config", strings.Join(none, ", "))
	}
	return out, nil
}
