package main

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
)

// helpWidth is the number of columns of a help page on any terminal.
const helpWidth = output.PaperWidth

// narrow has all commands below the root write their help in so many columns. Cobra's templates would link text/template, and with that every method of every
// type.
func narrow(root *cobra.Command) {
	root.SetHelpFunc(func(c *cobra.Command, _ []string) {
		_, _ = fmt.Fprintf(c.OutOrStdout(), "%s\n%s", paragraphs(cmp.Or(c.Long, c.Short)), usage(c)) // a help page has no exit code for a full disk
	})
	root.SetUsageFunc(func(c *cobra.Command) error {
		_, err := fmt.Fprint(c.OutOrStderr(), usage(c))
		return err
	})
}

// paragraphs writes a text in lines of the width. Empty lines stay, and indented ones.
func paragraphs(text string) string {
	var out strings.Builder
	var words []string
	end := func() {
		if len(words) > 0 {
			out.WriteString(output.Wrapped("", strings.Join(words, " "), helpWidth) + "\n")
		}
		words = nil
	}
	for line := range strings.SplitSeq(strings.TrimSpace(text), "\n") {
		if line != "" && !strings.HasPrefix(line, " ") {
			words = append(words, line)
			continue
		}
		end()
		out.WriteString(line + "\n")
	}
	end()
	return out.String()
}

// usage is a help page without its introduction.
func usage(c *cobra.Command) string {
	var b strings.Builder
	section := func(name, text string) {
		if text != "" {
			fmt.Fprintf(&b, "%s:\n%s\n\n", name, strings.Trim(text, "\n"))
		}
	}
	var lines []string
	if c.Runnable() {
		lines = append(lines, output.Wrapped("  "+c.CommandPath()+" ", strings.TrimPrefix(c.UseLine(), c.CommandPath()), helpWidth))
	}
	if c.HasAvailableSubCommands() {
		lines = append(lines, "  "+c.CommandPath()+" [command]")
	}
	section("Usage", strings.Join(lines, "\n"))
	section("Examples", c.Example)
	section("Available Commands", subcommands(c))
	section("Flags", c.LocalFlags().FlagUsagesWrapped(helpWidth))
	section("Global Flags", c.InheritedFlags().FlagUsagesWrapped(helpWidth))
	if c.HasAvailableSubCommands() {
		fmt.Fprintf(&b, "Use \"%s [command] --help\" for more about a command.\n", c.CommandPath())
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

func subcommands(c *cobra.Command) string {
	var lines []string
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() || sub.Name() == "help" {
			lines = append(lines, output.Wrapped(fmt.Sprintf("  %-*s ", sub.NamePadding(), sub.Name()), sub.Short, helpWidth))
		}
	}
	return strings.Join(lines, "\n")
}
