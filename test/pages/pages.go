// Package pages holds the pages of the repository to a command: what they print is what a person can run. It knows the repository's
// layout, and runs nothing.
package pages

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// root is the top of the repository, as seen from the package of a command.
const root = "../.."

// HoldTo fails where README.md beside the command has no row for one of its subcommands, or where any page of the repository prints a line
// of the command that it would not take. People call the command by name.
func HoldTo(t *testing.T, name string, command func() *cobra.Command) {
	t.Helper()
	own, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, sub := range command().Commands() {
		if !regexp.MustCompile("(?m)^\\| `" + sub.Name() + `\b`).Match(own) {
			t.Errorf("README.md has no row for %s %s", name, sub.Name())
		}
	}
	seen := 0
	for _, line := range printed(t, name) {
		seen++
		if err := takes(command(), strings.Fields(line)); err != nil {
			t.Errorf("a page prints %s %s: %v", name, line, err)
		}
	}
	if seen < 3 {
		t.Errorf("the pages print %d lines of %s", seen, name)
	}
}

// takes says whether the command would run by the arguments, which it does not.
func takes(command *cobra.Command, args []string) error {
	sub, rest, err := command.Find(args)
	if err != nil {
		return err
	}
	return sub.ParseFlags(rest)
}

// printed are the arguments of the command's lines in all pages. A line whose first argument is in capitals, as NAME, shows a form and cannot be
// run.
func printed(t *testing.T, name string) []string {
	t.Helper()
	line := regexp.MustCompile(`\b` + name + ` ([a-z][^` + "`#\n]*)")
	inCode := regexp.MustCompile("(?m)`[^`\n]+`|^\\$ .*$")
	var lines []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && strings.HasPrefix(entry.Name(), ".") && path != root:
			return fs.SkipDir
		case filepath.Ext(path) != ".md":
			return nil
		}
		text, err := os.ReadFile(filepath.Clean(path))
		if err != nil {
			return err
		}
		for _, code := range inCode.FindAllString(string(text), -1) {
			if found := line.FindStringSubmatch(code); found != nil && !slices.Contains(lines, strings.TrimSpace(found[1])) {
				lines = append(lines, strings.TrimSpace(found[1]))
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}
