package repo_test

import (
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// arrows are the packages of this module that each package imports, its tests aside. A new arrow is a decision: add it here and see
// that it points down. The linter's depguard says why some are forbidden.
var arrows = map[string][]string{
	"drain":                   {"drain/holders"},
	"drain/fence":             {"drain/holders", "drain/plain"},
	"drain/holders":           {"drain/holders/openfiles", "drain/plain", "nvml/aside"},
	"drain/holders/openfiles": {"drain/plain"},
	"drain/host":              {"nvml/aside"},
	"drain/plain":             nil,

	"nvml":            nil,
	"nvml/aside":      nil,
	"nvml/cdi":        {"nvml", "nvml/aside", "nvml/driverroot"},
	"nvml/driverroot": {"nvml/aside"},
	"nvml/lib":        {"nvml", "nvml/driverroot"},
}

func TestPackagesImportNoMoreThanTheirArrows(t *testing.T) {
	for _, top := range []string{"drain", "nvml"} {
		got := map[string][]string{}
		want := maps.Clone(arrows)
		maps.DeleteFunc(want, func(folder string, _ []string) bool { return folder != top && !strings.HasPrefix(folder, top+"/") })
		for folder, imported := range imports(t, top) {
			got[folder] = slices.Sorted(maps.Keys(imported))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("imports below %s (-arrows +code):\n%s", top, diff)
		}
	}
}

// imports are the packages of this module that the packages below a folder import, their tests aside.
func imports(t *testing.T, below string) map[string]map[string]bool {
	t.Helper()
	out := map[string]map[string]bool{}
	for _, path := range files(t) {
		within, err := filepath.Rel(root, path)
		if err != nil {
			t.Fatal(err)
		}
		folder := filepath.Dir(within)
		if folder != below && !strings.HasPrefix(folder, below+"/") || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		if out[folder] == nil {
			out[folder] = map[string]bool{}
		}
		for _, spec := range file.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if ours, is := strings.CutPrefix(imported, module); is {
				out[folder][ours] = true
			}
		}
	}
	return out
}
