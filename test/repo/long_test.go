package repo_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/test/long/more"
	"github.com/gpuslice/gpuslice/test/long/uses"
)

// People read in test/README.md what make test leaves to make test-long. The table must name each test that asks test/long.
func TestTheTableOfLongTestsIsTrue(t *testing.T) {
	told := toldOfLongTests(t)
	asking, err := uses.Tests(root)
	if err != nil {
		t.Fatal(err)
	}
	asks := map[string]bool{} // "package: function"
	for folder, tests := range asking {
		for _, test := range tests {
			asks[folder+": "+test] = true
		}
	}
	for name := range asks {
		if _, is := told[name]; !is {
			t.Errorf("%s is shorter in make test: add a row to \"What runs where\" of test/README.md", name)
		}
	}
	for name := range told {
		if !asks[name] {
			t.Errorf("test/README.md says that %s is shorter in make test, which is not so", name)
		}
	}
	if len(asks) < 5 {
		t.Errorf("only %d tests ask test/long", len(asks))
	}
}

// make test runs nothing of a test that test/long/more lists: the row of such a test names the test that runs in its place.
func TestTheTableOfLongTestsSaysWhatMakeTestRunsNothingOf(t *testing.T) {
	nothing := 0
	for name, cell := range toldOfLongTests(t) {
		by, left := more.Tests[name]
		if !left {
			continue
		}
		nothing++
		if want := "nothing: `" + by + "`"; cell != want {
			t.Errorf("test/README.md says that make test runs %q of %s; it is left out, so say %s", cell, name, want)
		}
	}
	if nothing < 5 {
		t.Errorf("only %d tests of the table are left out of make test", nothing)
	}
}

// What a short run leaves out is found by looking for package long, so no test may go by "go test -short" in another way.
func TestNoTestAsksForShortRunsButByPackageLong(t *testing.T) {
	for _, path := range files(t) {
		if !strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if selector, ok := n.(*ast.SelectorExpr); ok && selector.Sel.Name == "Short" {
				if of, ok := selector.X.(*ast.Ident); ok && of.Name == "testing" {
					t.Errorf("%s calls testing.Short: ask test/long, so that make test-long finds the test", path)
				}
			}
			return true
		})
	}
}

// toldOfLongTests are the functions that the table in test/README.md names, each with what it says that make test runs of it.
func toldOfLongTests(t *testing.T) map[string]string {
	t.Helper()
	readme, err := os.ReadFile(filepath.Join(root, "test", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(readme), "### What runs where")
	if !found {
		t.Fatal("test/README.md has no section \"What runs where\"")
	}
	section, _, _ = strings.Cut(section, "\n##")
	told := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+: [^`]+)` \\| (.*?) \\|").FindAllStringSubmatch(section, -1) {
		told[row[1]] = row[2]
	}
	return told
}

// Each test that make test leaves to make test-more has another that make test runs. Names are matched in all packages, so each is in one.
func TestWhatMakeTestLeavesOutIsShownByAnotherTest(t *testing.T) {
	where := map[string][]string{} // folders by the name of a test
	for folder, tests := range testsByFolder(t) {
		for _, test := range tests {
			where[test] = append(where[test], folder)
		}
	}
	for test, by := range more.Tests {
		folder, name, _ := strings.Cut(test, ": ")
		if !slices.Equal(where[name], []string{folder}) {
			t.Errorf("test/long/more leaves out %s of %s, but tests of that name are in %v", name, folder, where[name])
		}
		folder, name, _ = strings.Cut(by, ": ")
		if !slices.Contains(where[name], folder) {
			t.Errorf("test/long/more: there is no %s, which is to show most of %s", by, test)
		}
		if _, left := more.Tests[by]; left {
			t.Errorf("test/long/more: %s is to show most of %s, but is left out itself", by, test)
		}
	}
}

// The Go command matches a name in all packages that it is given, so a long test has a name that no other test has.
func TestALongTestIsInOnePackage(t *testing.T) {
	where := testsByFolder(t)
	long, err := uses.Tests(root)
	if err != nil {
		t.Fatal(err)
	}
	for folder, tests := range long {
		for _, test := range tests {
			for other, names := range where {
				if other != folder && slices.Contains(names, test) {
					t.Errorf("%s is in %s, and a test of that name is in %s: make test-long would run both", test, folder, other)
				}
			}
		}
	}
}

// What "make test-all" runs is run before a change is taken, and told in test/README.md.
func TestEverythingIsRunBeforeAChangeIsTaken(t *testing.T) {
	makefile := read(t, "Makefile")
	all := regexp.MustCompile(`(?m)^ALL := ([a-z0-9 -]+)$`).FindStringSubmatch(makefile)
	if all == nil || !regexp.MustCompile(`(?m)^test-all: .*\n(\t.*\n)*\t.*\$\(MAKE\) .*\$\(ALL\)`).MatchString(makefile) {
		t.Fatal("the Makefile has no target test-all that makes ALL")
	}
	ci, page := read(t, ".ci/run"), read(t, "test/README.md")
	_, page, _ = strings.Cut(page, "### What runs where")
	targets := strings.Fields(all[1])
	for _, target := range targets {
		if !strings.Contains(ci, "run_tests "+target+"\n") {
			t.Errorf(".ci/run does not run make %s", target)
		}
		if !strings.Contains(page, "| `make "+target+"` |") {
			t.Errorf("\"What runs where\" of test/README.md does not say what make %s runs", target)
		}
	}
	if len(targets) < 3 {
		t.Errorf("make test-all runs %v alone", targets)
	}
}

// A test that is skipped with the race detector is in a package that test-long runs whole.
func TestWhatIsSkippedWithTheRaceDetectorIsRunWithoutIt(t *testing.T) {
	makefile := read(t, "Makefile")
	unraced := regexp.MustCompile(`(?m)^UNRACED := (\S+)$`).FindStringSubmatch(makefile)
	whole := regexp.MustCompile(`(?m)^WHOLE := \$\(UNRACED\)\|(\S+)$`).FindStringSubmatch(makefile)
	if unraced == nil || whole == nil || !strings.Contains(makefile, "\ntest-race: PACKAGES = $$(go list ./... | grep -v -E '/($(UNRACED))$$')\n") ||
		!strings.Contains(makefile, "\nLONGTESTS := go run ./test/long/cmd/longtests -whole '$(WHOLE)'\n") {
		t.Fatal("test-long does not run all that test-race leaves out by UNRACED")
	}
	runs := strings.Split(unraced[1]+"|"+whole[1], "|")
	for _, name := range runs {
		if len(testsByFolder(t)[name]) == 0 {
			t.Errorf("%s of the Makefile has no tests", name)
		}
	}
	constrained := 0
	for _, path := range files(t) {
		if filepath.Ext(path) != ".go" {
			continue
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			t.Fatal(err)
		}
		if regexp.MustCompile(`(?m)^//go:build .*\brace\b`).MatchString(read(t, name)) {
			constrained++
			if folder := filepath.ToSlash(filepath.Dir(name)); !slices.Contains(runs, folder) {
				t.Errorf("%s goes by the race detector: add %s to WHOLE of the Makefile", name, folder)
			}
		}
	}
	if constrained == 0 {
		t.Error("no file is found that goes by the race detector")
	}
}
