// Command longtests prints what makes "go test" run the tests that are shorter in short runs, and no others: "longtests tests"
// the pattern of their names for -run, "longtests packages" their packages. It is run at the top of the repository.
package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/test/long/uses"
)

func main() {
	tests, err := uses.Tests(".")
	if err != nil {
		fmt.Fprintln(os.Stderr, "longtests: reading the tests:", err)
		os.Exit(1)
	}
	if len(tests) == 0 {
		fmt.Fprintln(os.Stderr, "longtests: no test here asks test/long: run this at the top of the repository")
		os.Exit(1)
	}
	var names, packages []string
	for _, folder := range slices.Sorted(maps.Keys(tests)) {
		packages = append(packages, "./"+folder)
		names = append(names, tests[folder]...)
	}
	switch what := strings.Join(os.Args[1:], " "); what {
	case "tests":
		fmt.Printf("^(%s)$\n", strings.Join(names, "|"))
	case "packages":
		fmt.Println(strings.Join(packages, " "))
	default:
		fmt.Fprintf(os.Stderr, "longtests: %q: say tests or packages\n", what)
		os.Exit(2)
	}
}
