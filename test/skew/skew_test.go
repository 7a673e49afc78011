package main

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

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/test/binaries"
)

const root = "../.."

// go test passes over a name that no test has, and says nothing about it.
func TestEachScenarioIsOfTestsThatThereAre(t *testing.T) {
	t.Parallel()
	for _, s := range scenarios {
		for _, test := range s.tests {
			folder, name, _ := strings.Cut(test, ": ")
			if !slices.Contains(testsOf(t, folder), name) {
				t.Errorf("%s: there is no %s", s.name, test)
			}
		}
	}
}

func testsOf(t *testing.T, folder string) (names []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(root, folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") {
				names = append(names, f.Name.Name)
			}
		}
	}
	return names
}

func TestThePageHasEachVersionAndEachScenario(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	kube, plugins, err := binaries.Builder{}.Versions()
	if err != nil {
		t.Fatal(err)
	}
	for _, version := range slices.Concat(kube, plugins) {
		if !strings.Contains(string(text), version) {
			t.Errorf("README.md does not name %s", version)
		}
	}
	for _, s := range scenarios {
		if !regexp.MustCompile(`(?m)^\| ` + regexp.QuoteMeta(s.name) + ` +\|`).Match(text) {
			t.Errorf("README.md has no row %q", s.name)
		}
	}
}

func TestTheTableSaysWhatPassedAndWhatDidNot(t *testing.T) {
	t.Parallel()
	const events = `{"Action":"output","Package":"github.com/gpuslice/gpuslice/test/node","Test":"TestA","Output":"    a_test.go:1: said: podAccess=policy\n"}
{"Action":"output","Package":"github.com/gpuslice/gpuslice/test/node","Test":"TestB/sub","Output":"    b_test.go:1: the reason\n"}
no event
{"Action":"fail","Package":"github.com/gpuslice/gpuslice/test/node","Test":"TestB/sub","Elapsed":5}
{"Action":"fail","Package":"github.com/gpuslice/gpuslice/test/node","Test":"TestB","Elapsed":3}
{"Action":"pass","Package":"github.com/gpuslice/gpuslice/test/node","Test":"TestA","Elapsed":4.2}
{"Action":"fail","Package":"github.com/gpuslice/gpuslice/test/node","Elapsed":9}
`
	var log strings.Builder
	r, err := read(strings.NewReader(events), &log)
	if err != nil {
		t.Fatal(err)
	}
	for name, row := range map[string]struct {
		tests  []string
		text   string
		passed bool
	}{
		"all":     {[]string{"test/node: TestA"}, "passed, 4 s", true},
		"one":     {[]string{"test/node: TestA", "test/node: TestB"}, "FAILED: TestB", false},
		"not run": {[]string{"test/node: TestC"}, "FAILED: TestC", false},
	} {
		if text, passed := r.cell(scenario{tests: row.tests}); text != row.text || passed != row.passed {
			t.Errorf("%s: %q, passed %t", name, text, passed)
		}
	}
	if diff := cmp.Diff([]string{"podAccess=policy"}, r.said); diff != "" {
		t.Errorf("said (-want +got):\n%s", diff)
	}
	for _, want := range []string{"no event", "the reason", "fail test/node: TestB (5 s)"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("it does not print %q:\n%s", want, log.String())
		}
	}
	var out strings.Builder
	if write(&out, []column{{title: "kubernetes v1.30.14", results: r}}) {
		t.Error("all has passed, it says")
	}
	if !strings.Contains(out.String(), "said with kubernetes v1.30.14:\n  podAccess=policy\n") {
		t.Errorf("the table is\n%s", out.String())
	}
}

func TestOneRunTakesOneVersionThatIsNotTheNewest(t *testing.T) {
	t.Parallel()
	all, err := options{}.versions(binaries.Builder{})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 5 {
		t.Fatalf("runs %+v", all)
	}
	for _, v := range all {
		if v.kube != "" && v.plugin != "" {
			t.Errorf("%+v takes two", v)
		}
	}
	one, err := options{only: []string{"plugin v0.17.4"}}.versions(binaries.Builder{})
	if err != nil || len(one) != 1 || one[0].plugin != "v0.17.4" {
		t.Errorf("one run: %+v, %v", one, err)
	}
	if none, err := (options{only: []string{"kubernetes v1.1"}}).versions(binaries.Builder{}); err == nil {
		t.Errorf("a version that there is not: %+v", none)
	}
}
