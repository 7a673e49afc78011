package rollout

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
)

// Plan is the command.
func Plan(o *cluster.Options) *cobra.Command {
	var a application
	c := &cobra.Command{
		Use:   "plan (-l SELECTOR | NODE...) [--profile NAME | --mig-config NAME | --device-plugin-config NAME]",
		Short: "Say what the nodes would do for a config, or have left to do; nothing is labelled",
		Long: `Asks the agent of each node for its plan: its steps, which pods would have to leave and when, whether they fit on other nodes, and which
budgets stand in the way. Without a name, the plan is for what the node's labels request already. It is apply --dry-run by another name.

The first line for a node is the verdict of its agent and of the rest of the cluster: begins at once, begins and may not end, would be held up, would
give up after a time, or would be refused.

Exit codes: 0 each node would begin at once, or has nothing to do; 4 one would refuse, be held up or give up; 5 one would begin, and it is not known
whether it ends; 1 an agent does not answer, or something else went wrong; 130 interrupted.`,
		ValidArgsFunction: o.CompleteNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := o.Client()
			if err != nil {
				return err
			}
			nodes, err := a.nodes.Nodes(cmd.Context(), client, args)
			if err != nil {
				return err
			}
			out := &cli.Printer{W: cmd.OutOrStdout()}
			if a.profile+a.migConfig+a.pluginConfig != "" {
				w, err := a.target()
				if err != nil {
					return err
				}
				if err := checkLabelPrecedence(nodes, w); err != nil {
					return err
				}
				return a.preview(cmd.Context(), client, nodes, w, out)
			}
			groups, err := byTarget(nodes)
			if err != nil {
				return err
			}
			var all []error
			code := 0
			for _, g := range groups {
				err := a.preview(cmd.Context(), client, g.nodes, g.target, out)
				verdict, is := errors.AsType[*cli.ExitError](err)
				switch {
				case err == nil:
					continue
				case !is || verdict.Code == cli.ExitInterrupted:
					return err
				}
				all, code = append(all, err), worse(code, verdict.Code)
			}
			if code == 0 || out.Err != nil {
				return out.Err
			}
			return &cli.ExitError{Code: code, Err: errors.Join(all...)}
		},
	}
	a.bind(c, o)
	return c
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
