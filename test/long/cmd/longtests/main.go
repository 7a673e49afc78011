// Command longtests prints what makes "go test" run what "make test" shortens or leaves out: "longtests tests" the pattern of the tests' names
// for -run, "longtests packages" their packages, those first that it is given, in that order. With -whole both have all tests of these
// folders, too. "longtests left-out" prints the pattern of those alone that test/long/more has "make test" leave out. It is run at the top of
// the repository.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/test/long/more"
	"github.com/gpuslice/gpuslice/test/long/uses"
)

func main() {
	if err := run(os.Stdout, ".", os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "longtests:", err)
		os.Exit(1)
	}
}

// run prints what the first argument says of the tests below root.
func run(out io.Writer, root string, args []string) error {
	shortened, err := uses.Tests(root)
	if err != nil {
		return fmt.Errorf("reading the tests: %w", err)
	}
	if len(shortened) == 0 {
		return errors.New("no test here asks test/long: run this at the top of the repository")
	}
	flags := flag.NewFlagSet("longtests", flag.ContinueOnError)
	flags.SetOutput(out)
	whole := flags.String("whole", "", "folders whose tests are all run, with \"|\" between them")
	if err := flags.Parse(args); err != nil {
		return err
	}
	args = flags.Args()
	leftOut, tests := pairs(more.Tests), map[pair]bool{}
	add := func(folder string, names []string) {
		for _, name := range names {
			tests[pair{folder, name}] = true
		}
	}
	for folder, names := range shortened {
		add(folder, names)
	}
	maps.Copy(tests, leftOut)
	if *whole != "" {
		all, err := uses.All(root)
		if err != nil {
			return fmt.Errorf("reading the tests: %w", err)
		}
		for folder := range strings.SplitSeq(*whole, "|") {
			if len(all[folder]) == 0 {
				return fmt.Errorf("-whole: folder %q has no tests", folder)
			}
			add(folder, all[folder])
		}
	}
	switch {
	case slices.Equal(args, []string{"tests"}):
		_, err = fmt.Fprintln(out, pattern(tests))
	case slices.Equal(args, []string{"left-out"}):
		_, err = fmt.Fprintln(out, pattern(leftOut))
	case len(args) > 0 && args[0] == "packages":
		_, err = fmt.Fprintln(out, strings.Join(packages(tests, args[1:]), " "))
	default:
		err = fmt.Errorf("%q: say tests, left-out, or packages and which of them come first", strings.Join(args, " "))
	}
	return err
}

// pair is a test, by the folder of its package and its name.
type pair struct{ folder, name string }

func pairs(tests map[string]string) map[pair]bool {
	out := map[pair]bool{}
	for test := range tests {
		folder, name, _ := strings.Cut(test, ": ")
		out[pair{folder, name}] = true
	}
	return out
}

// pattern matches the names of the tests.
func pattern(tests map[pair]bool) string {
	var names []string
	for test := range tests {
		names = append(names, test.name)
	}
	slices.Sort(names)
	return "^(" + strings.Join(slices.Compact(names), "|") + ")$"
}

// packages are those of the tests: first those that are also in first, in its order.
func packages(tests map[pair]bool, first []string) []string {
	of := map[string]bool{}
	for test := range tests {
		of["./"+test.folder] = true
	}
	var out []string
	for _, pkg := range slices.Concat(first, slices.Sorted(maps.Keys(of))) {
		if of[pkg] && !slices.Contains(out, pkg) {
			out = append(out, pkg)
		}
	}
	return out
}
