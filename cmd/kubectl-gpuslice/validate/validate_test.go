package validate

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/drift"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

var update = flag.Bool("update", false, "write what is said into testdata again")

// Each file of testdata is one run: the files that are checked, then what is said about them.
func TestValidate(t *testing.T) {
	runs, err := filepath.Glob(filepath.Join("testdata", "*.txtar"))
	if err != nil || len(runs) == 0 {
		t.Fatalf("%d runs, error %v", len(runs), err)
	}
	for _, run := range runs {
		t.Run(strings.TrimSuffix(filepath.Base(run), ".txtar"), func(t *testing.T) {
			archive, err := txtar.ParseFile(run)
			if err != nil {
				t.Fatal(err)
			}
			args, golden := []string{"validate", "--at", "2026-11-27T12:00:00Z"}, &archive.Files[len(archive.Files)-1]
			if golden.Name != "said" {
				t.Fatalf("the last file is %s, not said", golden.Name)
			}
			dir := t.TempDir()
			for _, f := range archive.Files[:len(archive.Files)-1] {
				path := filepath.Join(dir, f.Name)
				if err := os.WriteFile(path, f.Data, 0o600); err != nil {
					t.Fatal(err)
				}
				args = append(args, "-f", path)
			}
			got := validated(t, "", args...)
			got = strings.ReplaceAll(got, dir+string(filepath.Separator), "")
			if *update {
				golden.Data = []byte(got)
				if err := os.WriteFile(run, txtar.Format(archive), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(string(golden.Data), got); diff != "" {
				t.Errorf("what is said (-want +got):\n%s", diff)
			}
		})
	}
}

// validated is what the command says, and its error.
func validated(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	return agenttest.Said(t, []cluster.Command{Command}, stdin, args...)
}

func TestValidateReadsStandardInputAndWhatAShellMakesOfPatterns(t *testing.T) {
	example := filepath.Join("..", "..", "..", "deploy", "examples", "configmap-profiles.yaml")
	got := validated(t, "version: v1\n", "validate", "-f", "-", example)
	want := "-: device plugin config without sharing\n" + example + ", ConfigMap gpuslice/gpuslice-profiles, profiles.yaml: 4 profiles\n"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what is said (-want +got):\n%s", diff)
	}
}

func TestValidateReadsTextsOfOtherEditors(t *testing.T) {
	const right, wrong = "-: device plugin config without sharing\n", "-: a device plugin config, wrong\n"
	const mistake = "line %d, column 1: version: \"v2\" must be v1, the only version\n"
	for text, want := range map[string]string{
		"version: v1":                              right, // without an end of its last line
		"version: v1\r\n---\r\nversion: v1\r\n":    right + right,
		"---\nversion: v1\n---\n---\nversion: v2":  right + wrong + "  " + fmt.Sprintf(mistake, 5),
		"version: v1\r\n--- # two\r\nversion: v2":  right + wrong + "  " + fmt.Sprintf(mistake, 3),
		"--- {version: v1}\n--- {version: v1}":     right + right,
		"kind: List\nitems:\n- version: v2\n":      wrong + "  " + "version: \"v2\" must be v1, the only version\n",
		"version: v1\nflags:\n  a: |\n    ---\n b": "-: wrong\n  reading YAML: line 4: did not find expected key\n",
	} {
		got, _, _ := strings.Cut(validated(t, text, "validate", "-f", "-"), "error: ")
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q: what is said (-want +got):\n%s", text, diff)
		}
	}
}

// A folder is read as kubectl reads it, and named as a whole if it has nothing for gpuslice.
func TestValidateReadsAFolder(t *testing.T) {
	folder, other := t.TempDir(), t.TempDir()
	for name, text := range map[string]string{
		filepath.Join(folder, "a.yml"): "version: v1\n", filepath.Join(folder, "b.json"): `{"kind": "Service", "apiVersion": "v1"}`, filepath.Join(folder, "c.txt"): "version: v2\n",
		filepath.Join(other, "d.yaml"): "a: b\n",
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := filepath.Join(folder, "a.yml") + ": device plugin config without sharing\n" + filepath.Join(folder, "b.json") + ": Service, passed over\n"
	if diff := cmp.Diff(want, validated(t, "", "validate", "-f", folder)); diff != "" {
		t.Errorf("what is said (-want +got):\n%s", diff)
	}
	got := validated(t, "", "validate", "-f", folder, "-f", other)
	if !strings.HasSuffix(got, "error: there is nothing that gpuslice reads in "+other+": leave it out, or say --ignore-foreign\n") {
		t.Errorf("it says %s", got)
	}
}

func TestValidateTakesForeignManifestsForNoErrorIfItsFlagSaysSo(t *testing.T) {
	namespace := filepath.Join("..", "..", "..", "deploy", "base", "namespace.yaml")
	got := validated(t, "", "validate", "--ignore-foreign", "-f", namespace)
	if want := namespace + ": Namespace, passed over\n"; got != want {
		t.Errorf("it says %q, want %q", got, want)
	}
	got = validated(t, "version: v1\nflags: {a: b}", "validate", "--ignore-foreign", "-f", namespace, "-")
	if !strings.HasSuffix(got, "error: 1 of 1 files and keys cannot be used\n") {
		t.Errorf("it says %q, and no error", got)
	}
}

// A folder has ConfigMaps of all kinds of programs, whose texts have fields of the same names.
func TestValidateTakesTextsOfOthersForNoneOfOurs(t *testing.T) {
	for name, row := range map[string]struct{ text, wrong string }{ // wrong is what is said of it; empty for passed over
		"a dashboard":                     {`{"title": "a", "version": 1, "panels": []}`, ""},
		"a file of containers":            {`{version: "3", services: {a: {image: b}}}`, ""},
		"another of them":                 {`{version: v1, services: {a: {image: b}}}`, ""},
		"a list of packages":              {`{"name": "a", "version": "1.0.0"}`, ""},
		"flags of a program":              {`flags: [a, b]`, ""},
		"flags of a program, version one": {`{version: v1, flags: [a, b]}`, ""},
		"features":                        {`flags: {a: true}`, ""},
		"settings of a program":           {`{kind: Settings, theme: dark}`, ""},
		"settings of another version":     {`{apiVersion: a/v1, kind: Settings, theme: dark}`, ""},
		"profiles of a scheduler":         {`{apiVersion: kubescheduler.config.k8s.io/v1, kind: KubeSchedulerConfiguration, profiles: []}`, ""},
		"profiles of a build":             {`profiles: [{name: dev}]`, ""},
		"pools of addresses":              {`pools: [a]`, ""},
		"a template":                      {`a: {{ b }}: c`, ""},
		"rules in a list":                 {`- a`, ""},

		"a plugin's config":            {`{version: v1, flags: {a: b}}`, "flags.a: is unknown here"},
		"with a field too many":        {`{version: v1, sharing: {}, flag: {}}`, "flag: is unknown here"},
		"without its version":          {`sharing: {timeSlicing: {resources: []}}`, "sharing.timeSlicing.resources"},
		"our settings":                 {`{apiVersion: gpuslice.io/v1alpha1, kind: Settings, theme: dark}`, "theme"},
		"profiles without apiVersion":  {`{kind: Profiles, profiles: {}}`, "apiVersion"},
		"our settings, which are none": {"apiVersion: gpuslice.io/v1alpha1\nkind: [", "reading YAML"},
	} {
		data, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "a"}, "data": map[string]any{"a.yaml": row.text}})
		if err != nil {
			t.Fatal(err)
		}
		texts := map[string]string{"in a ConfigMap": string(data), "in a file": row.text}
		if strings.HasPrefix(name, "a template") || strings.Contains(row.text, "kind: [") {
			delete(texts, "in a file") // what is no YAML is no manifest
		}
		for where, text := range texts {
			got := validated(t, text, "validate", "--ignore-foreign", "-f", "-")
			switch {
			case row.wrong == "" && strings.Contains(got, "error"):
				t.Errorf("%s, %s: it says\n%s", name, where, got)
			case row.wrong != "" && !strings.Contains(got, row.wrong):
				t.Errorf("%s, %s: it says\n%s\nand not %s", name, where, got, row.wrong)
			}
		}
	}
	// Who names one file, and does not say that there are others', has it judged by any field.
	if got := validated(t, "flags: [a, b]", "validate", "-f", "-"); !strings.Contains(got, "flags: ") {
		t.Errorf("of flags alone it says\n%s", got)
	}
}

func TestValidateListsNoResourcesWhereThereAreNone(t *testing.T) {
	const queue = "{apiVersion: kueue.x-k8s.io/v1beta2, kind: ClusterQueue, metadata: {name: a}, spec: {namespaceSelector: {}, resourceGroups: [" +
		"{flavors: [{name: a, resources: [{name: nvidia.com/gpu, nominalQuota: 1}]}]}]}}"
	got := validated(t, queue, "validate", "-f", "-")
	if strings.Contains(got, "in their order") || !strings.Contains(got, "spec.resourceGroups[0]: needs at least one of coveredResources") {
		t.Errorf("it says\n%s", got)
	}
}

// What is shipped is a folder of all kinds of manifests.
func TestValidateFindsNothingWrongInWhatIsShipped(t *testing.T) {
	args := []string{"validate", "--ignore-foreign"}
	for _, dir := range []string{"base", "components", "overlays"} {
		err := filepath.WalkDir(filepath.Join("..", "..", "..", "deploy", dir), func(path string, _ os.DirEntry, err error) error {
			if strings.HasSuffix(path, ".yaml") {
				args = append(args, "-f", path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if got := validated(t, "", args...); strings.Contains(got, "wrong") || !strings.Contains(got, ": settings\n") {
		t.Errorf("it says\n%s", got)
	}
}

// To write out and read again each list in a list would take quadratic time in their depth.
func TestValidateReadsNestedListsInLinearTime(t *testing.T) {
	nested := func(depth int) string {
		const head = `{"apiVersion":"v1","kind":"List","items":[`
		return strings.Repeat(head, depth) + `{"apiVersion":"v1","kind":"Secret"}` + strings.Repeat("]}", depth)
	}
	// Memory is what shows it on a busy machine too: reading what is within again at each depth allocates it again.
	took := func(depth int) uint64 {
		text := nested(depth)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if got := validated(t, text, "validate", "--ignore-foreign", "-f", "-"); !strings.HasPrefix(got, "-: Secret, passed over") {
			t.Errorf("%d deep: it says %.200q", depth, got)
		}
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	took(10) // what is made once
	if few, many := took(400), took(4000); many > 20*few {
		t.Errorf("400 lists take %d bytes, 4000 take %d", few, many)
	}
}

func TestValidateWantsFiles(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"that are named":        {nil, "error: name files to check with -f, or say --against-cluster\n"},
		"that there are":        {[]string{"-f", "absent.yaml"}, "error: open absent.yaml: no such file or directory\n"},
		"at a time that is one": {[]string{"--at", "noon", "-f", "a"}, `error: flag --at is "noon": write a date with its time and zone, like 2026-12-20T22:00:00Z` + "\n"},
		"with what we read":     {[]string{"-f", filepath.Join("..", "..", "..", "deploy", "base", "namespace.yaml")}, "error: " + errNothingToCheck.Error() + "\n"},
	} {
		t.Run(name, func(t *testing.T) {
			got := validated(t, "", append([]string{"validate"}, test.args...)...)
			if !strings.HasSuffix(got, test.want) {
				t.Errorf("it says %q, want the end %q", got, test.want)
			}
		})
	}
}

func TestValidateSaysOfAHugeFileAsMuchAsIsRead(t *testing.T) {
	const pool = "- {name: p%d, selector: 'a=b%d'}\n"
	var pools strings.Builder
	for i := range 300 {
		fmt.Fprintf(&pools, pool, i, i)
	}
	for name, test := range map[string]struct {
		text string
		most int    // lines
		want string // in one of the last
	}{
		"foreign documents":  {strings.Repeat("apiVersion: v1\nkind: Service\n---\n", 31_775), 102, "-: and 31675 more, passed over\n"},
		"right documents":    {strings.Repeat("version: v1\n---\n", 5000), 101, "-: and 4900 more, right\n"},
		"what is no YAML":    {strings.Repeat("a: [\n---\n", 5000), 202, "-: and 4900 more, wrong\n"},
		"mistakes":           {"version: v1\nmig-configs:\n  a:\n" + strings.Repeat("  - {devices: [-1], mig-enabled: x}\n", 3000), 103, "\n  and 5900 more\n"},
		"documents of those": {strings.Repeat("version: v1\nmig-configs:\n  a:\n"+strings.Repeat("  - {devices: [-1], mig-enabled: x}\n", 40)+"---\n", 200), 1192, "-: and 100 more, wrong\n"},
		"pools":              {"apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\npools:\n" + pools.String(), 102, "\n  and 201 more\n"},
		"a kind":             {"apiVersion: v1\nkind: " + strings.Repeat("x", 10_000), 2, "x…, passed over\n"},
		"a key":              {"apiVersion: v1\nkind: ConfigMap\ndata:\n  " + strings.Repeat("x", 900) + ": 'version: v1'", 1, "x…: device plugin config without sharing\n"},
	} {
		t.Run(name, func(t *testing.T) {
			got := validated(t, test.text, "validate", "-f", "-")
			if lines := strings.Count(got, "\n"); lines > test.most || !strings.Contains(got, test.want) {
				t.Errorf("it says %d lines, want at most %d with %q: %.200s … %s", lines, test.most, test.want, got, got[max(0, len(got)-300):])
			}
			for line := range strings.Lines(got) {
				if len(line) > 3000 {
					t.Errorf("a line has %d bytes: %.100s…", len(line), line)
				}
			}
		})
	}
}

// live watches what the heap holds while lines are written.
type live struct{ lines, most int }

func (l *live) Write(text []byte) (int, error) {
	if l.lines++; l.lines == 100 || l.lines%10_000 == 0 || bytes.Contains(text, []byte(" more, ")) {
		l.most = max(l.most, heap())
	}
	return len(text), nil
}

// heap is what this process has in use, in bytes.
func heap() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// A process of this program has 43 MiB before it reads anything, and is to stay below 64.
func TestValidateKeepsNoDocumentInMemory(t *testing.T) {
	for name, text := range map[string]string{
		"foreign documents": strings.Repeat("apiVersion: v1\nkind: Service\n---\n", 31_775),
		"right documents":   strings.Repeat("version: v1\n---\n", 65_536),
	} {
		t.Run(name, func(t *testing.T) {
			var l live
			c := (&cluster.Options{}).Root(Command)
			c.SetIn(strings.NewReader(text))
			c.SetOut(&l)
			c.SetArgs([]string{"validate", "--ignore-foreign", "-f", "-"})
			before := heap()
			if err := c.ExecuteContext(t.Context()); err != nil || l.most == 0 {
				t.Fatalf("%d lines, error %v", l.lines, err)
			}
			if took := l.most - before; took > 8<<20 {
				t.Errorf("it holds %d MiB, want at most 8", took>>20)
			}
		})
	}
}

func TestWhatIsSaidOfFindings(t *testing.T) {
	t.Parallel()
	idle, broken, mixed := drift.Finding{About: "a", Text: "x", Idle: true}, drift.Finding{About: "b", Text: "y"}, drift.Finding{About: "c", Text: "z", Mixed: true}
	const promises, mixes, see = "the cluster promises GPUs that its nodes do not offer, ", "queues or hardware profiles mix classes of isolation, ", ": see above, and kubectl gpuslice render"
	for name, row := range map[string]struct {
		found     []drift.Finding
		said, err string
	}{
		"nothing":         {nil, "no quota, queue or hardware profile promises more than the nodes offer\n", ""},
		"less":            {[]drift.Finding{idle}, "idle   a: x\nno quota, queue or hardware profile promises more than the nodes offer\n", ""},
		"more, and less":  {[]drift.Finding{broken, idle}, "drift  b: y\nidle   a: x\n", promises + "once" + see},
		"mixed":           {[]drift.Finding{mixed, mixed}, "mixed  c: z\nmixed  c: z\n", mixes + "2 times" + see},
		"mixed, and more": {[]drift.Finding{mixed, broken}, "mixed  c: z\ndrift  b: y\n", promises + "once; " + mixes + "once" + see},
	} {
		var said strings.Builder
		err := printDrift(&cli.Printer{W: &said}, drift.Report{Findings: row.found})
		if got := strings.TrimPrefix(said.String(), "read: nothing that promises GPUs\n"); got != row.said || err == nil && row.err != "" || err != nil && err.Error() != row.err {
			t.Errorf("%s: it says %q, error %v, want %q and %q", name, got, err, row.said, row.err)
		}
	}
}
