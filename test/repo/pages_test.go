package repo_test

import (
	"go/parser"
	"go/token"
	"maps"
	"os"
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

func TestEachMetricIsNamedOnceByItsConstant(t *testing.T) {
	metric := regexp.MustCompile(`"gpuslice_[a-z_]+"`)
	for _, path := range files(t) {
		path, err := filepath.Rel(root, path)
		if err != nil {
			t.Fatal(err)
		}
		if filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") || !strings.HasPrefix(path, "agent/") {
			continue
		}
		for _, name := range metric.FindAllString(read(t, path), -1) {
			t.Errorf("%s names the metric %s: it takes a constant of config/metrics.go, whose comment says what it is, and described.Desc", path, name)
		}
	}
	made := map[string]bool{}
	for _, g := range metricsOfTheCode(t) {
		for _, m := range g.metrics {
			if made[m.name] {
				t.Errorf("config/metrics.go has %s twice", m.name)
			}
			made[m.name] = true
		}
	}
	for _, page := range pages(t) {
		for _, name := range regexp.MustCompile("`(gpuslice_[a-z_]+)`").FindAllStringSubmatch(read(t, page), -1) {
			if !made[name[1]] {
				t.Errorf("%s tells of the metric %s, which is not there", page, name[1])
			}
		}
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

// What is told twice is mended once.
func TestNoTwoPagesTellTheSame(t *testing.T) {
	const long = 60 // of what is told by chance in the same words, most is shorter
	first := map[string]string{}
	for _, page := range pages(t) {
		for _, said := range sentences(read(t, page)) {
			if len(said) < long {
				continue
			}
			if other, told := first[said]; told && other != page {
				t.Errorf("%s and %s both tell: %s", other, page, said)
			}
			first[said] = page
		}
	}
	if len(first) < 500 {
		t.Errorf("the pages have %d long sentences", len(first))
	}
}

// sentences are those of a page, its cells of tables, and its lines of code.
func sentences(page string) []string {
	var all []string
	prose := fences.ReplaceAllStringFunc(page, func(block string) string {
		for line := range strings.Lines(block) {
			all = append(all, strings.TrimSpace(line))
		}
		return "\n"
	})
	end := regexp.MustCompile(`[.:;|] |\n\n|\n(?:[|#]|- )`)
	for _, sentence := range end.Split(prose, -1) {
		all = append(all, strings.Trim(strings.Join(strings.Fields(sentence), " "), " |"))
	}
	return all
}

func TestThePageOfTheTestsNamesTheirFolders(t *testing.T) {
	page := read(t, "test/README.md")
	entries, err := os.ReadDir(root + "/test")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		name := entry.Name()
		if entry.IsDir() && !strings.Contains(page, "["+name+"]("+name+"/README.md)") && !strings.Contains(page, "`"+name+"`") && !strings.Contains(page, "`test/"+name+"`") {
			t.Errorf("test/README.md says nothing of the folder test/%s", name)
		}
	}
}
