package repo_test

import (
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A key that stands on a node and on no page is looked up in vain.
func TestEveryKeyIsToldOnAPage(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), root+"/config/keys.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, page := range pages(t) {
		all.WriteString(read(t, page))
	}
	told := all.String()
	values := valuesOf(t, file)
	for _, name := range slices.Sorted(maps.Keys(values)) {
		kind := regexp.MustCompile(`^(Annotation|Condition|Label|Taint|State)[A-Z]`)
		// The pages that tell several keys of one domain leave it out after the first.
		_, short, _ := strings.Cut(values[name], "/")
		if kind.MatchString(name) && !strings.Contains(told, values[name]) && (short == "" || !strings.Contains(told, "`"+short+"`")) {
			t.Errorf("no page tells of %s (config.%s)", values[name], name)
		}
	}
	if len(values) < 60 {
		t.Errorf("found %d constants in config/keys.go", len(values))
	}
}

func TestTheAgentsPageHasTheMetricsOfTheCode(t *testing.T) {
	metric := regexp.MustCompile(`"(gpuslice_[a-z_]+)"`)
	made := map[string]bool{}
	for _, path := range files(t) {
		path, err := filepath.Rel(root, path)
		if err != nil {
			t.Fatal(err)
		}
		if filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") || !strings.HasPrefix(path, "agent/") {
			continue
		}
		for _, name := range metric.FindAllStringSubmatch(read(t, path), -1) {
			made[name[1]] = true
		}
	}
	told := map[string]bool{}
	for _, name := range regexp.MustCompile("`(gpuslice_[a-z_]+)`").FindAllStringSubmatch(read(t, agentsPage), -1) {
		told[name[1]] = true
	}
	for name := range made {
		if !told[name] {
			t.Errorf("%s does not tell of the metric %s", agentsPage, name)
		}
	}
	for name := range told {
		if !made[name] {
			t.Errorf("%s tells of the metric %s, which is not there", agentsPage, name)
		}
	}
	if len(made) < 10 {
		t.Errorf("found %d metrics", len(made))
	}
}

func TestEveryMakeTargetOfAPageIsThere(t *testing.T) {
	targets := map[string]bool{}
	for _, target := range regexp.MustCompile(`(?m)^([a-z0-9 -]+):`).FindAllStringSubmatch(read(t, "Makefile"), -1) {
		for name := range strings.FieldsSeq(target[1]) {
			targets[name] = true
		}
	}
	named := 0
	for _, page := range pages(t) {
		for _, command := range regexp.MustCompile("(?m)(?:`|^\\$ )make ([a-z0-9-]+)").FindAllStringSubmatch(read(t, page), -1) {
			if named++; !targets[command[1]] {
				t.Errorf("%s has the command make %s, and Makefile no such target", page, command[1])
			}
		}
	}
	if named < 15 {
		t.Errorf("the pages name %d targets", named)
	}
}
