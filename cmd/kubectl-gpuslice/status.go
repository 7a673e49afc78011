package main

import (
	"cmp"
	"errors"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/cmd/cli"
	"github.com/gpuslice/gpuslice/config"
)

const (
	// mostListed blockers are named in a table; the condition has them all.
	mostListed = 2
	// longestHold is the number of characters of why a node is held, in a table.
	longestHold = 256
)

func (o *options) status() *cobra.Command {
	var nodes selection
	c := &cobra.Command{
		Use:   "status [-l SELECTOR | NODE...]",
		Short: "Show what the nodes are asked for, and how far they are",
		Long:  "Shows the selected nodes, or without a selection all on which an agent has ever run.",
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := o.client()
			if err != nil {
				return err
			}
			all := nodes.selector == "" && len(args) == 0
			var found []corev1.Node
			if all {
				found, err = fitting(cmd.Context(), client, "")
			} else {
				found, err = nodes.nodes(cmd.Context(), client, args)
			}
			if err != nil {
				return err
			}
			if all {
				found = withAgent(found)
			}
			if len(found) == 0 {
				return errors.New("no agent has ever said anything of any node; see deploy/README.md for how to install it")
			}
			out := &cli.Printer{W: cmd.OutOrStdout()}
			width, _, _ := terminal(out.W)
			out.Printf("%s\n", tabulate(found, width, time.Now()))
			return out.Err
		},
	}
	nodes.bind(c)
	return c
}

func withAgent(nodes []corev1.Node) []corev1.Node {
	var out []corev1.Node
	for _, n := range nodes {
		if !agentReportOf(&n).none() {
			out = append(out, n)
		}
	}
	return out
}

// tabulate writes a line for each node, cut to the width if there is one.
func tabulate(nodes []corev1.Node, width int, now time.Time) string {
	w := table.NewWriter()
	w.SetStyle(table.StyleLight)
	w.Style().Options = table.OptionsNoBordersAndSeparators
	w.Style().Format.Header = text.FormatUpper
	w.Style().Box.PaddingLeft, w.Style().Box.PaddingRight = "", "   "
	w.Style().Size.WidthMax = width
	w.Style().Box.UnfinishedRow = "…"
	w.AppendHeader(table.Row{"node", "asked for", "phase", "reason", "since", "capacity", "blockers"})
	for i := range nodes {
		w.AppendRow(row(&nodes[i], now))
	}
	lines := strings.Split(w.Render(), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n")
}

func row(n *corev1.Node, now time.Time) table.Row {
	t := agentReportOf(n)
	s := t.status
	phase, reason := string(s.Phase), cmp.Or(t.condition.Reason, string(s.Reason))
	if t.none() {
		phase, reason = "", "no agent"
	}
	since := ""
	if !s.Since.IsZero() && string(s.Reason) == reason {
		since = duration.HumanDuration(now.Sub(s.Since))
	}
	blockers := s.Blockers
	if more := len(blockers) - mostListed; more > 0 {
		blockers = append(blockers[:mostListed:mostListed], "and "+cli.Counted(more, "other"))
	}
	if !s.Next.IsZero() {
		blockers = append([]string{"begins at " + s.Next.UTC().Format("2006-01-02 15:04:05Z")}, blockers...)
	}
	if why, held := n.Annotations[config.AnnotationHold]; held {
		blockers = append([]string{"held: " + legible.Message(why, longestHold)}, blockers...)
	}
	return table.Row{n.Name, asks(n), phase, reason, since, s.Capacity, strings.Join(blockers, "; ")}
}

// asks is what the node's labels ask for.
func asks(n *corev1.Node) string {
	if profile := n.Labels[config.LabelProfile]; profile != "" {
		return profile
	}
	var names []string
	for _, label := range []string{config.LabelMIGConfig, config.LabelDevicePluginConfig} {
		if name := n.Labels[label]; name != "" {
			names = append(names, name)
		}
	}
	return strings.Join(names, api.DesiredSeparator)
}
