// Command slowest prints where the time of a test run went: the ten slowest packages and the ten slowest tests of what
// "go test -json" has written into the files that it is given, and the sum of each package's tests.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
)

// shown is how many packages, and how many tests, are printed.
const shown = 10

// event is a line of "go test -json" (go doc test2json).
type event struct {
	Action  string
	Package string
	Test    string
	Elapsed float64 // in seconds
}

// taken is what a package or a test took.
type taken struct {
	name    string
	seconds float64
}

func main() {
	if err := run(os.Stdout, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "slowest:", err)
		os.Exit(1)
	}
}

func run(out io.Writer, files []string) error {
	if len(files) == 0 {
		return errors.New("which files that go test -json has written?")
	}
	var packages, tests []taken
	for _, name := range files {
		file, err := os.Open(name)
		if err != nil {
			return err
		}
		p, t, err := read(file)
		if closeErr := file.Close(); err == nil {
			err = closeErr
		}
		if err != nil {
			return fmt.Errorf("reading %s: %w", name, err)
		}
		packages, tests = append(packages, p...), append(tests, t...)
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	write(table, "slowest packages", packages)
	write(table, "slowest tests", tests)
	return table.Flush()
}

// read returns what each package took, and each test; the time of a subtest is its test's too, so it is left out.
func read(in io.Reader) (packages, tests []taken, err error) {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			// A program that the tests start can write to the same file: what is no event is passed over.
			if json.Unmarshal(line, &e) == nil && (e.Action == "pass" || e.Action == "fail") {
				switch {
				case e.Test == "":
					packages = append(packages, taken{short(e.Package), e.Elapsed})
				case !strings.Contains(e.Test, "/"):
					tests = append(tests, taken{short(e.Package) + ": " + e.Test, e.Elapsed})
				}
			}
		}
		if errors.Is(err, io.EOF) {
			return packages, tests, nil
		}
		if err != nil {
			return nil, nil, err
		}
	}
}

// short is the name of a package below the module.
func short(pkg string) string {
	if _, below, found := strings.Cut(pkg, "gpuslice/gpuslice/"); found {
		return below
	}
	return pkg
}

func write(table io.Writer, title string, all []taken) {
	slices.SortStableFunc(all, func(a, b taken) int { return cmp.Compare(b.seconds, a.seconds) })
	fmt.Fprintf(table, "\n%s\n", title)
	for _, one := range all[:min(len(all), shown)] {
		fmt.Fprintf(table, "  %.1f s\t%s\n", one.seconds, one.name)
	}
}
