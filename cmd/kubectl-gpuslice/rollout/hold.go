package rollout

import (
	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Hold is the command.
func Hold(o *cluster.Options) *cobra.Command {
	var nodes cluster.Selection
	var release bool
	var reason string
	c := &cobra.Command{
		Use:   "hold (-l SELECTOR | NODE...) [--reason TEXT | --release]",
		Short: "Keep the selected nodes from beginning any change, or let them again",
		Long: "Sets the annotation " + config.AnnotationHold + ": the agent begins no change on the node, whatever its labels request, until --release removes it.\n" +
			"It finishes or undoes a change that has begun.",
		ValidArgsFunction: o.CompleteNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := o.Client()
			if err != nil {
				return err
			}
			selected, err := nodes.Nodes(cmd.Context(), client, args)
			if err != nil {
				return err
			}
			out := &cli.Printer{W: cmd.OutOrStdout()}
			value, said := &reason, "held: "+sanitize.Message(reason, cluster.LongestWord)
			if release {
				value, said = nil, "released"
			}
			for i := range selected {
				n := &selected[i]
				now, held := n.Annotations[config.AnnotationHold]
				if held == (value != nil) && (!held || now == reason) {
					out.Printf("%s  was %s already\n", n.Name, said)
					continue
				}
				if _, err := cluster.Write(cmd.Context(), client, n, cluster.Change{Annotations: map[string]*string{config.AnnotationHold: value}}); err != nil {
					return err
				}
				out.Printf("%s  %s\n", n.Name, said)
			}
			return out.Err
		},
	}
	nodes.Bind(c)
	c.Flags().StringVar(&reason, "reason", "by hand", "why, which the node's condition says")
	c.Flags().BoolVar(&release, "release", false, "let the nodes change again")
	c.MarkFlagsMutuallyExclusive("reason", "release")
	return c
}
