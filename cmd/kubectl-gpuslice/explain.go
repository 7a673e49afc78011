package main

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/mattn/go-runewidth"
	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/cmd/cli"
	"github.com/gpuslice/gpuslice/config/reasons"
)

const (
	// longestName is the number of characters of a name that people have mistyped, in an error.
	longestName = 64
	// paperWidth is the number of columns of running text where no terminal says another.
	paperWidth = 80
)

// explain needs no cluster.
func explain() *cobra.Command {
	return &cobra.Command{
		Use:   "explain [REASON]",
		Short: "Say what a reason means that a node shows, and what you can do",
		Long: "Explains a reason of a condition, an Event or a metric, as in `kubectl describe node`: when it is given, and what you can do.\n" +
			"Without a reason, it lists all. It asks no cluster.",
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			var out []cobra.Completion
			for _, g := range reasons.All() {
				for _, t := range g.Texts {
					out = append(out, cobra.CompletionWithDesc(string(t.Reason), t.Given))
				}
			}
			return out, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			out := &cli.Printer{W: cmd.OutOrStdout()}
			width, _, _ := terminal(out.W)
			width = cmp.Or(width, paperWidth)
			if len(args) == 0 {
				listReasons(out, width)
				return out.Err
			}
			text, known := reasons.Find(args[0])
			if !known {
				return unknownReason(args[0])
			}
			out.Printf("%s\n", text.Reason)
			out.Printf("%s\n", wrapped("  is given: ", text.Given, width))
			out.Printf("%s\n", wrapped("  you can:  ", text.YouCan, width))
			return out.Err
		},
	}
}

func unknownReason(name string) error {
	instead := "kubectl gpuslice explain lists them all"
	if near := reasons.Close(name); len(near) > 0 {
		instead = "did you mean " + strings.Join(near, ", ") + "? " + instead
	}
	return fmt.Errorf("there is no reason \"%s\"; %s", legible.Cut(name, longestName), instead)
}

// listReasons writes a line for each, cut to the width: the whole text is one call away.
func listReasons(out *cli.Printer, width int) {
	longest := 0
	for _, name := range reasons.Names() {
		longest = max(longest, len(name))
	}
	for i, g := range reasons.All() {
		if i > 0 {
			out.Printf("\n")
		}
		out.Printf("%s\n", wrapped("", g.Title, width))
		for _, t := range g.Texts {
			out.Printf("%s\n", runewidth.Truncate(fmt.Sprintf("  %-*s  %s", longest, t.Reason, t.Given), width, "…"))
		}
	}
}

// wrapped writes a text in lines of the width, the first after a heading, the others below its beginning.
func wrapped(heading, text string, width int) string {
	indent := strings.Repeat(" ", runewidth.StringWidth(heading))
	var b strings.Builder
	b.WriteString(heading)
	at := len(indent)
	for i, word := range strings.Fields(text) {
		size := runewidth.StringWidth(word)
		switch {
		case i > 0 && at+1+size > width:
			b.WriteString("\n" + indent)
			at = len(indent)
		case i > 0:
			b.WriteString(" ")
			at++
		}
		b.WriteString(word)
		at += size
	}
	return b.String()
}
