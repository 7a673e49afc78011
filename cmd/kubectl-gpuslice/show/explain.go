package show

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/mattn/go-runewidth"
	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config/glossary"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

const (
	// longestName is the number of characters of a mistyped name in an error.
	longestName = 64
)

// Explain is the command. It needs no cluster.
func Explain(*cluster.Options) *cobra.Command {
	return &cobra.Command{
		Use:   "explain [REASON | METRIC]",
		Short: "Explain a reason that a node shows, and what you can do; or a metric",
		Long: "Explains a reason of a condition, an Event or a metric, as in `kubectl describe node`: when it is given, and what you can do.\n" +
			"Of a metric, it says what it is, and its labels. Without an argument, it lists all. It asks no cluster.",
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			var out []cobra.Completion
			for _, g := range vocabulary() {
				for _, w := range g.Entries {
					out = append(out, cobra.CompletionWithDesc(w.Name, w.Means))
				}
			}
			return out, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			out := &cli.Printer{W: cmd.OutOrStdout()}
			width, _, is := cli.Terminal(out.W)
			width = cmp.Or(width, output.PaperWidth)
			if len(args) == 0 {
				list(out, width, is)
				return out.Err
			}
			if reason, known := glossary.Reasons().Find(args[0]); known {
				out.Printf("%s\n", reason.Name)
				out.Printf("%s\n", output.Wrapped("  is given: ", reason.Means, width))
				out.Printf("%s\n", output.Wrapped("  you can:  ", reason.YouCan, width))
				return out.Err
			}
			metric, known := glossary.Metrics().Find(args[0])
			if !known {
				return unknownWord(args[0])
			}
			out.Printf("%s\n", metric.Name)
			out.Printf("%s\n", output.Wrapped("  is:     ", metric.Means, width))
			if len(metric.Labels) > 0 {
				out.Printf("%s\n", output.Wrapped("  labels: ", strings.Join(metric.Labels, ", "), width))
			}
			return out.Err
		},
	}
}

// vocabulary returns all words that explain knows.
func vocabulary() glossary.Groups { return slices.Concat(glossary.Reasons(), glossary.Metrics()) }

func unknownWord(name string) error {
	kind, near := "reason", glossary.Reasons().Closest(name)
	if strings.HasPrefix(name, "gpuslice_") {
		kind, near = "metric", glossary.Metrics().Closest(name)
	}
	instead := "kubectl gpuslice explain lists them all"
	if len(near) > 0 {
		instead = "did you mean " + strings.Join(near, ", ") + "? " + instead
	}
	return fmt.Errorf("there is no %s \"%s\"; %s", kind, sanitize.Cut(name, longestName), instead)
}

// list writes a line for each word, on a terminal cut to the width: the whole text is one call away.
func list(out *cli.Printer, width int, cut bool) {
	for i, g := range vocabulary() {
		longest := 0
		for _, w := range g.Entries {
			longest = max(longest, len(w.Name))
		}
		if i > 0 {
			out.Printf("\n")
		}
		out.Printf("%s\n", output.Wrapped("", g.Title, width))
		for _, w := range g.Entries {
			name := fmt.Sprintf("  %-*s  ", longest, w.Name)
			line := output.Wrapped(name, w.Means, width)
			if cut {
				line = runewidth.Truncate(name+w.Means, width, "…")
			}
			out.Printf("%s\n", line)
		}
	}
}
