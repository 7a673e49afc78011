package repo_test

import (
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
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
	"agent": {
		"agent/alive", "agent/api", "agent/budget", "agent/deviceplugin", "agent/diagnosis", "agent/draining", "agent/events",
		"agent/fencing", "agent/files", "agent/fleet", "agent/gate", "agent/hardware", "agent/health", "agent/hostrecord", "agent/idle",
		"agent/ledger", "agent/leftovers", "agent/legible", "agent/measure", "agent/memory", "agent/metrics", "agent/nodekeys", "agent/nodewrite",
		"agent/occupants", "agent/outcome", "agent/part", "agent/plan", "agent/pluginfile", "agent/preview", "agent/processes", "agent/proving", "agent/publish",
		"agent/reboot", "agent/remedy", "agent/report", "agent/resolve", "agent/retried", "agent/sentinel", "agent/slot", "agent/state", "agent/steady",
		"agent/tell", "agent/units", "agent/upgrade", "agent/wake", "agent/watched", "config", "drain", "drain/fence", "drain/holders", "drain/host",
		"drain/kube", "nvml",
	},
	"agent/access": {"agent/api", "agent/described", "config", "drain/kube"},
	"agent/admit":  {"drain/kube"},
	"agent/alive":  {"config"},
	"agent/api":    {"config", "nvml"},
	"agent/asnode": {"config"},
	"agent/budget": {
		"agent/api", "agent/legible", "agent/outcome", "agent/plan", "agent/report", "agent/retried", "agent/state", "agent/steady", "config",
	},
	"agent/capacity":  {"config", "drain/holders", "nvml"},
	"agent/condition": {"agent/legible", "config"},
	"agent/described": {"config/metrics"},
	"agent/cleanup":   {"agent/legible", "agent/nodekeys", "agent/nodewrite", "agent/pluginfile", "agent/remedy", "config", "drain/kube"},
	"agent/deviceplugin": {
		"agent/api", "agent/budget", "agent/capacity", "agent/draining", "agent/journal", "agent/legible", "agent/nodewrite", "agent/outcome",
		"agent/plan", "agent/pluginfile", "agent/retried", "agent/state", "agent/steady", "agent/watched", "config", "drain/fence", "drain/holders", "drain/kube", "nvml",
		"nvml/aside",
	},
	"agent/diagnosis": {
		"agent/api", "agent/drainpolicy", "agent/legible", "agent/outcome", "agent/plan", "agent/report", "agent/state", "config", "drain",
		"drain/fence", "drain/holders", "nvml",
	},
	"agent/draining": {
		"agent/api", "agent/budget", "agent/drainpolicy", "agent/events", "agent/legible", "agent/metrics", "agent/nodewrite",
		"agent/outcome", "agent/plan", "agent/state", "agent/steady", "agent/wake", "config", "drain", "drain/fence",
	},
	"agent/drainpolicy": {"config", "drain"},
	"agent/events":      {"agent/legible", "config"},
	"agent/fencing": {
		"agent/api", "agent/budget", "agent/capacity", "agent/deviceplugin", "agent/draining", "agent/events", "agent/hostrecord", "agent/journal",
		"agent/ledger", "agent/legible", "agent/measure", "agent/nodewrite", "agent/outcome", "agent/plan", "agent/processes", "agent/slot",
		"agent/state", "agent/steady", "config", "drain/fence",
	},
	"agent/files": {"agent/resolve", "agent/slot", "agent/state", "agent/watched", "config"},
	"agent/fleet": {"agent/legible", "agent/retried", "config", "drain/fence", "drain/kube"},
	"agent/gate":  {"agent/outcome", "agent/plan", "agent/state", "agent/steady", "config"},
	"agent/hardware": {
		"agent/budget", "agent/draining", "agent/ledger", "agent/plan", "agent/processes", "agent/reboot", "agent/state",
		"config", "nvml",
	},
	"agent/health": {
		"agent/api", "agent/condition", "agent/described", "agent/health/kernellog", "agent/health/verdict", "agent/hostfile", "agent/legible", "config",
		"drain/fence", "drain/holders", "nvml",
	},
	"agent/health/kernellog": {"nvml"},
	"agent/health/verdict":   {"agent/legible", "config", "nvml"},
	"agent/idle":             {"agent/api", "agent/described", "agent/legible", "agent/occupants", "config", "drain/holders", "nvml"},

	"agent/hostfile":   nil,
	"agent/hostrecord": {"agent/api", "agent/hostfile", "agent/journal", "agent/legible", "agent/nodekeys", "config", "nvml"},
	"agent/journal":    {"agent/api", "agent/legible", "agent/plan", "config", "nvml"},
	"agent/ledger": {
		"agent/api", "agent/hostrecord", "agent/journal", "agent/legible", "agent/nodewrite", "agent/outcome", "agent/plan", "agent/state",
		"agent/steady", "config", "drain/fence",
	},
	"agent/leftovers": {"agent/hostrecord", "agent/nodewrite", "agent/state", "agent/steady", "config", "drain/fence"},
	"agent/legible":   nil,
	"agent/measure":   {"agent/api"},
	"agent/memory":    {"agent/api", "agent/condition", "agent/described", "agent/occupants", "config", "drain/holders", "nvml"},
	"agent/metrics": {
		"agent/api", "agent/capacity", "agent/described", "agent/legible", "agent/outcome", "agent/plan", "agent/state", "config", "drain",
		"drain/holders", "nvml",
	},
	"agent/nodekeys":   {"config"},
	"agent/nodewrite":  {"agent/legible", "agent/retried", "config", "drain/fence", "drain/kube"},
	"agent/occupants":  {"drain/holders", "nvml"},
	"agent/outcome":    {"agent/legible", "config"},
	"agent/part":       {"agent/api", "drain/holders", "nvml"},
	"agent/plan":       {"nvml"},
	"agent/pluginfile": {"nvml/aside"},
	"agent/podlist":    {"agent/retried", "drain/kube"},
	"agent/preview":    {"agent/api", "agent/capacity", "agent/plan", "agent/state", "config", "nvml"},
	"agent/processes":  {"agent/outcome", "agent/plan", "agent/state", "agent/steady", "config", "drain/holders", "nvml"},
	"agent/proving": {
		"agent/api", "agent/capacity", "agent/deviceplugin", "agent/events", "agent/nodewrite", "agent/outcome", "agent/plan", "agent/state",
		"agent/steady", "config", "nvml",
	},
	"agent/publish": {"agent/hostrecord", "agent/ledger", "agent/nodekeys", "agent/nodewrite", "agent/plan", "agent/state", "agent/steady"},
	"agent/reboot": {
		"agent/api", "agent/events", "agent/journal", "agent/ledger", "agent/outcome", "agent/plan", "agent/sentinel", "agent/state",
		"agent/steady", "config", "drain/holders", "drain/host", "nvml",
	},
	"agent/remedy": {
		"agent/api", "agent/nodewrite", "agent/outcome", "agent/part", "agent/plan", "agent/steady", "config", "drain/fence",
	},
	"agent/report": {
		"agent/api", "agent/capacity", "agent/condition", "agent/legible", "agent/outcome", "agent/plan", "agent/state", "config",
		"drain/fence", "nvml",
	},
	"agent/resolve":  {"agent/api", "agent/deviceplugin", "agent/nodekeys", "agent/outcome", "agent/state", "config", "drain/holders", "nvml"},
	"agent/retried":  {"drain/kube"},
	"agent/sentinel": {"agent/nodewrite", "agent/outcome", "agent/plan", "nvml/aside"},
	"agent/slot":     {"agent/api", "agent/fleet", "agent/outcome", "agent/plan", "agent/state", "agent/steady", "config"},
	"agent/state": {
		"agent/api", "agent/capacity", "agent/fleet", "agent/hostrecord", "agent/journal", "agent/legible", "agent/nodekeys",
		"agent/nodewrite", "agent/outcome", "agent/plan", "config", "config/window", "drain/fence", "drain/holders", "nvml",
	},
	"agent/steady": nil,
	"agent/tell": {
		"agent/api", "agent/capacity", "agent/condition", "agent/events", "agent/hostrecord", "agent/ledger", "agent/legible",
		"agent/metrics", "agent/nodewrite", "agent/outcome", "agent/report", "agent/state", "agent/steady", "config",
	},
	"agent/units": {
		"agent/api", "agent/budget", "agent/events", "agent/ledger", "agent/legible", "agent/outcome", "agent/plan", "agent/state",
		"agent/steady", "config", "drain/host",
	},
	"agent/upgrade": {
		"agent/events", "agent/fencing", "agent/ledger", "agent/nodewrite", "agent/outcome", "agent/state", "agent/steady", "config",
		"drain/fence", "nvml",
	},
	"agent/wake":    {"drain", "drain/kube", "nvml"},
	"agent/watched": {"agent/podlist", "agent/retried", "config", "drain/kube"},

	"cmd/cli": {"agent/legible", "drain/kube"},
	"cmd/gpuslice-agent": {
		"agent", "agent/access", "agent/admit", "agent/alive", "agent/api", "agent/asnode", "agent/cleanup", "agent/deviceplugin", "agent/health",
		"agent/health/kernellog", "agent/hostrecord", "agent/legible", "agent/metrics", "agent/nodekeys", "agent/nodewrite", "agent/plan", "agent/pluginfile",
		"agent/podlist", "agent/preview", "agent/tell", "cmd/cli", "cmd/drift", "cmd/features", "cmd/kinds", "cmd/migrate", "cmd/render", "cmd/show", "cmd/taints",
		"config", "config/deviceplugin", "config/document", "config/migparted", "drain/holders", "drain/host", "drain/kube", "nvml", "nvml/cdi", "nvml/lib",
	},
	"cmd/kubectl-gpuslice": {"agent/api", "agent/legible", "cmd/cli", "cmd/show", "config", "config/metrics", "config/reasons", "drain/kube", "nvml"},
	"cmd/drift":            {"agent/legible", "cmd/kinds", "cmd/taints", "config", "drain/kube"},
	"cmd/features":         nil,
	"cmd/kinds":            {"config", "config/document", "nvml"},
	"cmd/migrate":          {"agent/legible", "cmd/features", "cmd/taints", "config", "drain/fence", "nvml"},
	"cmd/render":           {"agent/capacity", "agent/legible", "agent/state", "cmd/kinds", "cmd/taints", "config", "nvml"},
	"cmd/show":             {"agent/api", "agent/legible", "nvml"},
	"cmd/taints":           {"agent/legible", "config"},

	"config":                   {"config/document", "config/window", "nvml"},
	"config/deviceplugin":      {"config", "config/document"},
	"config/document":          nil,
	"config/metrics":           {"config"},
	"config/migparted":         {"config", "config/document", "nvml"},
	"config/reasons":           {"config"},
	"config/schema":            nil,
	"config/schema/cmd/schema": {"config/schema"},
	"config/window":            nil,

	"drain":                   {"drain/holders", "drain/kube"},
	"drain/fence":             {"drain/holders", "drain/plain"},
	"drain/holders":           {"drain/holders/openfiles", "drain/kube", "drain/plain", "nvml", "nvml/aside"},
	"drain/holders/openfiles": {"drain/plain"},
	"drain/kube":              nil,
	"drain/host":              {"nvml/aside"},
	"drain/plain":             nil,

	"nvml":            nil,
	"nvml/aside":      nil,
	"nvml/cdi":        {"nvml", "nvml/aside", "nvml/driverroot"},
	"nvml/driverroot": {"nvml/aside"},
	"nvml/lib":        {"nvml", "nvml/aside", "nvml/driverroot", "nvml/smi"},
	"nvml/smi":        {"nvml"},
}

func TestPackagesImportNoMoreThanTheirArrows(t *testing.T) {
	for _, top := range []string{"agent", "cmd", "config", "drain", "nvml"} {
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

const client = module + "drain/kube"

// client-go's own client has the types of every API group, a quarter of a program.
func TestNoProgramLinksTheTypesOfAllAPIGroups(t *testing.T) {
	t.Parallel()
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "./cmd/...")
	list.Dir = root
	out, err := list.Output()
	if err != nil {
		t.Fatalf("listing what the programs link: %v", err)
	}
	linked := strings.Fields(string(out))
	if !slices.Contains(linked, client) {
		t.Fatalf("the list has no client of Kubernetes, so this shows nothing:\n%s", out)
	}
	for _, path := range linked {
		if path == "k8s.io/client-go/kubernetes" || strings.HasPrefix(path, "k8s.io/client-go/kubernetes/") {
			t.Errorf("the programs link %s: add the kind that is missing to drain/kube", path)
		}
	}
}

// The plugin runs on people's own machines, whatever their system.
func TestThePluginLinksNothingOfTheDaemon(t *testing.T) {
	for _, system := range []string{"linux", "darwin", "windows"} {
		list := exec.CommandContext(t.Context(), "go", "list", "-deps", "./cmd/kubectl-gpuslice")
		list.Dir, list.Env = root, append(os.Environ(), "CGO_ENABLED=0", "GOOS="+system)
		out, err := list.Output()
		if err != nil {
			t.Fatalf("listing what the plugin links on %s: %v", system, err)
		}
		linked := strings.Fields(string(out))
		if !slices.Contains(linked, client) {
			t.Fatalf("the list for %s has no client of Kubernetes, so this shows nothing:\n%s", system, out)
		}
		for _, forbidden := range []string{
			module + "agent", module + "drain", "google.golang.org/grpc", "github.com/godbus", "github.com/coreos/go-systemd", "github.com/prometheus",
		} {
			for _, path := range linked {
				if path == forbidden || strings.HasPrefix(path, forbidden+"/") && !slices.Contains([]string{module + "agent/api", module + "agent/legible", client}, path) {
					t.Errorf("on %s the plugin links %s: take what it needs to agent/api", system, path)
				}
			}
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

// Each package of the agent has one subject, and is short enough to be read at one sitting.
func TestPackagesOfTheAgentAreShort(t *testing.T) {
	t.Parallel()
	lines := map[string]int{} // that are not blank, of the product
	for _, path := range files(t) {
		within, err := filepath.Rel(root, path)
		if err != nil {
			t.Fatal(err)
		}
		folder := filepath.ToSlash(filepath.Dir(within))
		if filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") || folder != "agent" && !strings.HasPrefix(folder, "agent/") {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.TrimSpace(line) != "" {
				lines[folder]++
			}
		}
	}
	if lines["agent"] == 0 {
		t.Fatal("no line of agent/ was counted")
	}
	for folder, n := range lines {
		most := 1800
		if folder == "agent" {
			most = 1500
		}
		if n > most {
			t.Errorf("%s has %d lines that are not blank, and may have %d: give one of its subjects a package of its own", folder, n, most)
		}
	}
}

// Who opens agent/ for the first time finds each of its packages by its subject.
func TestEachPackageOfTheAgentIsOnTheMap(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join(root, ".github", "CONTRIBUTING.md"))
	if err != nil {
		t.Fatal(err)
	}
	for folder := range arrows {
		if name, below := strings.CutPrefix(folder, "agent/"); below && !strings.Contains(string(page), "`"+name+"`") {
			t.Errorf("agent/%s is not in the table of packages in .github/CONTRIBUTING.md", name)
		}
	}
}
