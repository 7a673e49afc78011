// Command longtests prints what makes "go test" run the tests that are shorter in short runs, and no others: "longtests tests"
// the pattern of their names for -run, "longtests packages" their packages. "longtests more" and "longtests more-packages" print the same of the
// tests that "make test" leaves to "make test-more". It is run at the top of the repository.
package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/test/long/more"
	"github.com/gpuslice/gpuslice/test/long/uses"
)

func main() {
	what := strings.Join(os.Args[1:], " ")
	if of, is := strings.CutPrefix(what, "more"); is {
		write(strings.TrimPrefix(of, "-"), moreTests())
		return
	}
	tests, err := uses.Tests(".")
	if err != nil {
		fmt.Fprintln(os.Stderr, "longtests: reading the tests:", err)
		os.Exit(1)
	}
	if len(tests) == 0 {
		fmt.Fprintln(os.Stderr, "longtests: no test here asks test/long: run this at the top of the repository")
		os.Exit(1)
	}
	write(what, tests)
}

// write prints the pattern of the tests' names, or their packages.
func write(what string, tests map[string][]string) {
	var names, packages []string
	for _, folder := range slices.Sorted(maps.Keys(tests)) {
		packages = append(packages, "./"+folder)
		names = append(names, tests[folder]...)
	}
	switch what {
	case "tests", "":
		fmt.Printf("^(%s)$\n", strings.Join(names, "|"))
	case "packages":
		fmt.Println(strings.Join(packages, " "))
	default:
		fmt.Fprintf(os.Stderr, "longtests: %q: say tests, packages, more or more-packages\n", what)
		os.Exit(2)
	}
}

// moreTests are the tests of "make test-more", by the folder of their package.
func moreTests() map[string][]string {
	out := map[string][]string{}
	for _, test := range slices.Sorted(maps.Keys(more.Tests)) {
		folder, name, _ := strings.Cut(test, ": ")
		out[folder] = append(out[folder], name)
	}
	return out
}
