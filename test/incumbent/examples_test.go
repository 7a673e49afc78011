package incumbent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jedib0t/go-pretty/v6/table"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
	"github.com/gpuslice/gpuslice/test/incumbent"
)

// example is a file of MIG configs that NVIDIA ships.
type example struct {
	name    string // within the module
	text    []byte
	configs map[string]catalog.MIGConfig
}

// examples reads the files from the module that the programs are built from.
func examples(t *testing.T) []example {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-m", "-f={{.Dir}}", "github.com/NVIDIA/mig-parted")
	cmd.Dir = filepath.Join("..", "nvidia", "migparted")
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	module := strings.TrimSpace(string(out))
	var files []example
	for _, pattern := range []string{"deployments/container/*.yaml", "deployments/systemd/config-default.yaml", "examples/*.yaml"} {
		names, err := filepath.Glob(filepath.Join(module, pattern))
		if err != nil || len(names) == 0 {
			t.Fatalf("no %s in %s: %v", pattern, module, err)
		}
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(pattern, "container") {
				text = fromConfigMap(t, text)
			}
			configs, err := migparted.Parse(text)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			files = append(files, example{strings.TrimPrefix(name, module+"/"), text, configs})
		}
	}
	return files
}

// fromConfigMap finds the configs in a file of manifests.
func fromConfigMap(t *testing.T, manifests []byte) []byte {
	t.Helper()
	for text := range bytes.SplitSeq(manifests, []byte("\n---")) {
		var m corev1.ConfigMap
		if err := yaml.Unmarshal(text, &m); err != nil {
			t.Fatal(err)
		}
		if configs, ok := m.Data["config.yaml"]; ok && m.Kind == "ConfigMap" {
			return []byte(configs)
		}
	}
	t.Fatal("no ConfigMap with config.yaml")
	return nil
}

type start struct {
	name string
	cuts [2]string
}

// starts are the states that changes begin in: which generated config the GPUs of even and of odd index have.
var starts = []start{
	{"off", [2]string{"all-disabled", "all-disabled"}},
	{"all-1g", [2]string{"all-1g", "all-1g"}},
	{"mixed", [2]string{"all-balanced", "all-disabled"}},
}

// used are the starts that this run takes.
func used() []start {
	if testing.Short() {
		return starts[:1]
	}
	return starts
}

const mixed = 2 // in starts

// trial is one config on one model, from one state.
type trial struct {
	file   *example
	config string
	model  string
	start  int // in starts

	ours, theirs *outcome
}

// outcome is what became of the GPUs.
type outcome struct {
	err   error  // what was said
	text  string // GPUs as text, with places
	cuts  []cut  // without
	calls map[string]int
}

// cut is how a GPU is cut, without places.
type cut struct {
	MIG     bool
	Devices map[string]int
}

func (o outcome) mutations() int {
	n := 0
	for _, calls := range o.calls {
		n += calls
	}
	return n
}

func (tr trial) String() string {
	return fmt.Sprintf("%s %s on %s from %s", tr.file.name, tr.config, tr.model, starts[tr.start].name)
}

// rules are the config as it is written.
func (tr trial) rules() catalog.MIGConfig { return tr.file.configs[tr.config] }

// spec is a node that has each GPU that the config names by index, and at least as many as a start has kinds of cut.
func (tr trial) spec() gpusim.Spec {
	count := len(starts[0].cuts)
	for _, rule := range tr.rules() {
		for _, i := range rule.Indices {
			count = max(count, 8, i+1)
		}
	}
	return gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: tr.model, Count: count}}}
}

// begin gives the GPUs their first state, as if nothing had been called for it.
func (tr trial) begin(ctx context.Context, node *gpusim.Node) error {
	driver := node.Driver()
	gpus, err := driver.Snapshot(ctx)
	if err != nil {
		return err
	}
	configs := catalog.Merge(catalog.Generate(gpus), nil)
	want := plan.Targets{}
	for _, gpu := range gpus {
		name := starts[tr.start].cuts[gpu.Index%2]
		if name == "all-1g" {
			i := slices.IndexFunc(gpu.Profiles, func(p nvml.Profile) bool { return p.Slices == 1 })
			name = "all-" + gpu.Profiles[i].Name
		}
		requests, err := configs.Requests(name, gpus)
		if err != nil {
			return err
		}
		want[gpu.UUID] = plan.Target{Request: requests[gpu.UUID]}
	}
	if err := carryOut(ctx, driver, want); err != nil {
		return err
	}
	return node.ForgetCalls()
}

// carryOut changes the hardware as the agent does: it plans, performs one step, looks afresh, and plans again.
func carryOut(ctx context.Context, driver nvml.Driver, want plan.Targets) error {
	for {
		gpus, err := driver.Snapshot(ctx)
		if err != nil {
			return err
		}
		steps, err := plan.Make(plan.Observed{GPUs: gpus}, plan.Desired{GPUs: want})
		if err != nil {
			return err
		}
		i := slices.IndexFunc(steps, func(s plan.Step) bool { return s.Traits().TouchesGPU() })
		if i < 0 {
			return nil
		}
		switch s := steps[i]; {
		case s.Kind == plan.SetMode:
			err = driver.SetMode(ctx, s.GPU, s.On)
		case s.Kind == plan.Reset:
			err = driver.Reset(ctx, s.GPU)
		case s.Kind == plan.Destroy && s.OnPart():
			err = driver.DestroyPart(ctx, s.GPU, s.Instance, s.Part)
		case s.Kind == plan.Destroy:
			err = driver.Destroy(ctx, s.GPU, s.Instance)
		case s.Kind == plan.Create && s.OnPart():
			err = driver.CreatePart(ctx, s.GPU, s.Instance, s.Part)
		case s.Kind == plan.Create:
			err = driver.Create(ctx, s.GPU, s.Instance)
		default:
			err = fmt.Errorf("no way to perform %s", s)
		}
		if err != nil {
			return err
		}
	}
}

// runOurs does what the agent does, through go-nvml and the simulated library, which shows the node in dir.
func (tr trial) runOurs(ctx context.Context, dir, library string) (out outcome, err error) {
	node, err := gpusim.Create(dir, tr.spec())
	if err != nil {
		return out, err
	}
	defer node.Close()
	if err := tr.begin(ctx, node); err != nil {
		return out, err
	}
	refused, err := tr.ask(ctx, lib.Open(lib.Options{Library: library}))
	if err != nil {
		return out, err
	}
	return observe(ctx, node, refused)
}

// ask carries out the config, or says why not.
func (tr trial) ask(ctx context.Context, driver nvml.Driver) (refused, err error) {
	gpus, err := driver.Snapshot(ctx)
	if err != nil {
		return nil, err
	}
	want := plan.Targets{}
	requests, refused := catalog.Merge(nil, tr.file.configs).Requests(tr.config, gpus)
	for gpu, request := range requests {
		want[gpu] = plan.Target{Request: request}
	}
	if refused != nil {
		return refused, nil
	}
	return carryOut(ctx, driver, want), nil
}

// runTheirs applies the config by nvidia-mig-parted.
func (tr trial) runTheirs(ctx context.Context, dir string, p incumbent.Programs) (out outcome, err error) {
	host, err := incumbent.NewHost(dir, tr.spec(), p)
	if err != nil {
		return out, err
	}
	defer host.Close()
	if err := errors.Join(host.NamePCIDevices(), tr.begin(ctx, host.GPUs)); err != nil {
		return out, err
	}
	file := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(file, tr.file.text, 0o600); err != nil {
		return out, err
	}
	_, refused := host.MIGParted(ctx, "apply", "-f", file, "-c", tr.config)
	return observe(ctx, host.GPUs, refused)
}

func observe(ctx context.Context, node *gpusim.Node, said error) (outcome, error) {
	out := outcome{err: said, text: node.String(), calls: node.Calls()}
	gpus, err := node.Driver().Snapshot(ctx)
	for _, gpu := range gpus {
		c := cut{MIG: gpu.Enabled, Devices: map[string]int{}}
		for _, instance := range gpu.Geometry() {
			for _, device := range instance.Devices() {
				c.Devices[device]++
			}
		}
		out.cuts = append(out.cuts, c)
	}
	return out, err
}

// meant reports whether the config is for the model: it names at least one of the GPUs, and each profile that it asks of
// one is on it, as often as it is asked for.
func (tr trial) meant(gpus []nvml.GPU) bool {
	named := false
	for _, gpu := range gpus {
		asked, ok := asked(tr.rules(), gpu)
		named = named || ok
		for name, n := range asked.Devices {
			if profile, ok := gpu.Profile(name); !ok || n > profile.Max {
				return false
			}
		}
	}
	return named
}

// asked is the last rule that is about the GPU.
func asked(rules catalog.MIGConfig, gpu nvml.GPU) (catalog.MIGRule, bool) {
	for _, rule := range slices.Backward(rules) {
		named := rule.All || slices.Contains(rule.Indices, gpu.Index)
		passes := len(rule.DeviceFilter) == 0 || slices.ContainsFunc(rule.DeviceFilter, func(filter string) bool {
			parsed, err := catalog.ParseDeviceFilter(filter)
			return err == nil && parsed.DeviceID == gpu.DeviceID && (!parsed.Subsystem || parsed.SubsystemID == gpu.SubsystemID)
		})
		if named && passes {
			return rule, true
		}
	}
	return catalog.MIGRule{}, false
}

// trials are all configs of all files on all models that can do MIG, split by whether they are meant for the model: from
// every start for one that is, and from the mixed one for the others.
func trials(t *testing.T) (forIt, forAnother []*trial) {
	t.Helper()
	files := examples(t)
	gpus := map[string][]nvml.GPU{}
	for _, model := range gpusim.Models() {
		for i := range files {
			for _, name := range slices.Sorted(maps.Keys(files[i].configs)) {
				tr := trial{file: &files[i], config: name, model: model}
				node := fmt.Sprint(tr.spec())
				if gpus[node] == nil {
					gpus[node] = newGPUs(t, tr.spec())
				}
				if !gpus[node][0].Capable {
					continue
				}
				if !tr.meant(gpus[node]) {
					tr.start = mixed
					forAnother = append(forAnother, &tr)
					continue
				}
				for tr.start = range used() {
					from := tr
					forIt = append(forIt, &from)
				}
			}
		}
	}
	return forIt, forAnother
}

// newGPUs is what a node of the spec answers at first.
func newGPUs(t *testing.T, spec gpusim.Spec) []nvml.GPU {
	t.Helper()
	node, err := gpusim.Create(t.TempDir(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	gpus, err := node.Driver().Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return gpus
}

// alike puts the trials of the same key together, in the order of their first.
func alike(all []*trial, key func(*trial) string) [][]*trial {
	var groups [][]*trial
	index := map[string]int{}
	for _, tr := range all {
		i, ok := index[key(tr)]
		if !ok {
			i = len(groups)
			index[key(tr)] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], tr)
	}
	return groups
}

// applyTheirs fills in what nvidia-mig-parted does, for the first trial of each group by running it.
func applyTheirs(t *testing.T, groups [][]*trial) {
	t.Helper()
	programs := build(t)
	dir := t.TempDir()
	group, ctx := errgroup.WithContext(t.Context())
	group.SetLimit(4)
	for _, same := range groups {
		group.Go(func() error {
			host, err := os.MkdirTemp(dir, "") //nolint:usetesting // one for each trial, within the test's own
			if err != nil {
				return err
			}
			out, err := same[0].runTheirs(ctx, host, programs)
			if err != nil {
				return fmt.Errorf("%s, nvidia-mig-parted: %w", same[0], err)
			}
			for _, tr := range same {
				tr.theirs = &out
			}
			return os.RemoveAll(host)
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
}

// applyOurs fills in what gpuslice does, for the first trial of each group by running it.
func applyOurs(t *testing.T, groups [][]*trial) {
	t.Helper()
	for _, same := range groups {
		out, err := same[0].runOurs(t.Context(), gpusimtest.Dir(t), gpusimtest.Library(t))
		if err != nil {
			t.Fatalf("%s, gpuslice: %v", same[0], err)
		}
		for _, tr := range same {
			tr.ours = &out
		}
	}
}

// Each config that NVIDIA ships as an example, on each model that it is for: the same instances, by no more calls.
func TestEveryExampleIsMetAsNVIDIAMeetsItWithNoMoreCalls(t *testing.T) {
	all, _ := trials(t)
	different := alike(all, func(tr *trial) string { return fmt.Sprintf("%s %d %v", tr.model, tr.start, tr.rules()) })
	t.Logf("%d trials, of which %d are different", len(all), len(different))
	applyTheirs(t, different)
	applyOurs(t, different)
	var ours, theirs int
	models := map[string]int{}
	for _, tr := range all {
		models[tr.model]++
		ours, theirs = ours+tr.ours.mutations(), theirs+tr.theirs.mutations()
		if tr.ours.err != nil || tr.theirs.err != nil {
			t.Errorf("%s: gpuslice says %v, nvidia-mig-parted says %v", tr, tr.ours.err, tr.theirs.err)
			continue
		}
		if diff := cmp.Diff(tr.theirs.cuts, tr.ours.cuts); diff != "" {
			t.Errorf("%s (-nvidia-mig-parted +gpuslice):\n%s", tr, diff)
		}
		if tr.ours.mutations() > tr.theirs.mutations() {
			t.Errorf("%s: %d calls, nvidia-mig-parted makes %d: %v, %v",
				tr, tr.ours.mutations(), tr.theirs.mutations(), tr.ours.calls, tr.theirs.calls)
		}
	}
	for _, model := range gpusim.Models() {
		if n, common := models[model], 2*len(used()); slices.Contains(gpusim.ModelsWithMIG(), model) && n <= common { // all-disabled and all-enabled are for all
			t.Errorf("%d trials of %s: the files have no config of its own", n, model)
		}
	}
	t.Logf("calls that change something, nvidia-mig-parted / gpuslice: %d / %d\n%s", theirs, ours, render(all))
}

// render lists the calls that each made, from each start.
func render(all []*trial) string {
	w := table.NewWriter()
	header := table.Row{"file", "config", "model"}
	for _, s := range used() {
		header = append(header, "from "+s.name)
	}
	w.AppendHeader(header)
	for chunk := range slices.Chunk(all, len(used())) {
		row := table.Row{chunk[0].file.name, chunk[0].config, chunk[0].model}
		for _, tr := range chunk {
			row = append(row, fmt.Sprintf("%d / %d", tr.theirs.mutations(), tr.ours.mutations()))
		}
		w.AppendRow(row)
	}
	return w.Render()
}

// Each config on each model that it is not for: refused with the reason, and nothing is touched.
func TestAnExampleForAnotherModelIsRefused(t *testing.T) {
	_, all := trials(t)
	slices.SortStableFunc(all, func(a, b *trial) int { return strings.Compare(fmt.Sprint(a.spec()), fmt.Sprint(b.spec())) })
	var node *gpusim.Node
	var driver nvml.Driver
	var before string
	for i, tr := range all {
		if i == 0 || fmt.Sprint(tr.spec()) != fmt.Sprint(all[i-1].spec()) {
			node = newNode(t, tr.spec())
			if err := tr.begin(t.Context(), node); err != nil {
				t.Fatal(err)
			}
			before = node.String()
			driver = lib.Open(lib.Options{Library: gpusimtest.Library(t)}) // it remembers GPUs by their UUIDs, which are the same again
		}
		refused, err := tr.ask(t.Context(), driver)
		switch {
		case err != nil:
			t.Fatal(err)
		case refused == nil:
			t.Errorf("%s is done", tr)
		case !tr.explains(refused):
			t.Errorf("%s is refused without a reason: %v", tr, refused)
		}
		if after := node.String(); after != before || len(node.Calls()) > 0 {
			t.Fatalf("%s: the GPUs were touched, by %v; before:\n%safter:\n%s", tr, node.Calls(), before, after)
		}
		t.Logf("%s: %v", tr, refused)
	}
	t.Logf("%d configs refused", len(all))
}

// newNode makes the node that the library shows to this process, in place of the one before.
func newNode(t *testing.T, spec gpusim.Spec) *gpusim.Node {
	t.Helper()
	node, err := gpusim.Create(gpusimtest.Dir(t), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := node.Close(); err != nil {
			t.Error(err)
		}
	})
	return node
}

// explains reports whether the refusal names what is wrong: a profile that the config asks for, or a filter of its.
func (tr trial) explains(refused error) bool {
	for _, rule := range tr.rules() {
		for profile := range rule.Devices {
			if strings.Contains(refused.Error(), profile) {
				return true
			}
		}
		for _, filter := range rule.DeviceFilter {
			if strings.Contains(refused.Error(), filter) {
				return true
			}
		}
	}
	return false
}
