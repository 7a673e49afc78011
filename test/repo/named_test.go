package repo_test

import (
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/test/long/uses"
)

var (
	codeSpan = regexp.MustCompile("`([^`]+)`")
	// testName is a test as pages name it, with its folder or without; "TestKilled…" is every test whose name begins so.
	testName = regexp.MustCompile(`^(?:([\w/-]+): )?(Test\w+)(…?)$`)
)

// People believe a page that names a test, and do not look.
func TestEveryTestThatAPageNamesExists(t *testing.T) {
	tests := testsByFolder(t)
	named := 0
	for _, page := range pages(t) {
		for line := range strings.Lines(fences.ReplaceAllString(read(t, page), "")) {
			for _, test := range testsNamedIn(line, tests, filepath.Dir(page)) {
				named++
				if test.folders == nil {
					t.Errorf("%s names %s, which is not there", page, test.text)
				}
			}
		}
	}
	if named < 200 {
		t.Errorf("the pages name %d tests", named)
	}
}

// A command that runs no test passes.
func TestEveryGoTestCommandOfAPageRunsATest(t *testing.T) {
	tests := testsByFolder(t)
	command := regexp.MustCompile("go test [^`\n]*")
	pattern := regexp.MustCompile(`-(run|fuzz|bench) ('[^']*'|\S+)`)
	folder := regexp.MustCompile(`\./([\w/-]+)`)
	looked := 0
	for _, page := range pages(t) {
		for _, line := range command.FindAllString(strings.ReplaceAll(read(t, page), `\|`, "|"), -1) {
			in := folder.FindStringSubmatch(line)
			if in == nil {
				continue
			}
			if tests[in[1]] == nil {
				t.Errorf("%s: %s: the folder has no tests", page, line)
			}
			for _, p := range pattern.FindAllStringSubmatch(line, -1) {
				looked++
				function, _, _ := strings.Cut(strings.Trim(p[2], "'"), "/")
				matches, err := regexp.Compile(function)
				if err != nil {
					t.Errorf("%s: %s: %v", page, line, err)
					continue
				}
				if function != "^$" && !slices.ContainsFunc(tests[in[1]], matches.MatchString) {
					t.Errorf("%s: %s: no test has such a name", page, line)
				}
			}
		}
	}
	if looked < 20 {
		t.Errorf("only %d patterns were looked at", looked)
	}
}

const promises = 18

// The table of promises has each of them, and tests that say a promise in their name are found there.
func TestEachPromiseHasItsTests(t *testing.T) {
	tests := testsByFolder(t)
	_, table, found := strings.Cut(read(t, "test/README.md"), "\n## The promises")
	if !found {
		t.Fatal("test/README.md has no table of promises")
	}
	row := regexp.MustCompile(`^\| (\d+)\. [^|]+\|([^|]+)\|([^|]*)\|$`)
	kept := map[int]map[string]bool{} // tests by promise
	for line := range strings.Lines(table) {
		cells := row.FindStringSubmatch(strings.TrimSpace(line))
		if cells == nil {
			continue
		}
		n, err := strconv.Atoi(cells[1])
		if err != nil {
			t.Fatal(err)
		}
		if n != len(kept)+1 {
			t.Errorf("promise %d comes after promise %d", n, len(kept))
		}
		kept[n] = map[string]bool{}
		for _, test := range testsNamedIn(cells[2], tests, "test") {
			for _, folder := range test.folders {
				kept[n][folder+": "+test.name] = true
			}
		}
		if len(kept[n]) == 0 {
			t.Errorf("no test is named for promise %d", n)
		}
	}
	if len(kept) != promises {
		t.Errorf("the table has %d promises, want %d", len(kept), promises)
	}
	says := regexp.MustCompile(`^TestPromise(\d+)\D`)
	for _, folder := range slices.Sorted(maps.Keys(tests)) {
		for _, name := range tests[folder] {
			if of := says.FindStringSubmatch(name); of != nil {
				if n, err := strconv.Atoi(of[1]); err != nil || !kept[n][folder+": "+name] {
					t.Errorf("%s: %s is not in the row of promise %s in test/README.md", folder, name, of[1])
				}
			}
		}
	}
}

// named is a test that a page names.
type named struct {
	text, name string
	folders    []string // that have it; none where it is not there
}

// testsNamedIn are the tests named in a line of a page. A name without a folder is of the folder named before it in the line, as code or in
// front of another name, or of the folder of the page.
func testsNamedIn(line string, tests map[string][]string, home string) []named {
	var all []named
	folder := home
	for _, span := range codeSpan.FindAllStringSubmatch(line, -1) {
		if tests[span[1]] != nil {
			folder = span[1]
			continue
		}
		parts := testName.FindStringSubmatch(span[1])
		if parts == nil {
			continue
		}
		if parts[1] != "" {
			folder = parts[1]
		}
		test := named{text: span[1], name: parts[2]}
		in := []string{folder}
		if parts[1] == "" && home != folder {
			in = append(in, home)
		}
		for _, of := range in {
			if slices.ContainsFunc(tests[of], func(name string) bool {
				return name == parts[2] || parts[3] != "" && strings.HasPrefix(name, parts[2])
			}) {
				test.folders = append(test.folders, of)
			}
		}
		all = append(all, test)
	}
	return all
}

// testsByFolder are the names of all tests, fuzz tests and examples, by their folder from the root.
func testsByFolder(t *testing.T) map[string][]string {
	t.Helper()
	all, err := uses.All(root)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 20 {
		t.Fatalf("only %d folders have tests", len(all))
	}
	return all
}
