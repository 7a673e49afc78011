package plan_test

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/nvml"
)

var update = flag.Bool("update", false, "rewrite the plans in testdata")

// Each file of testdata holds what the agent has observed of a node, what it wants, and the plan.
func TestPlans(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no plans in testdata: %v", err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".txtar")
		t.Run(name, func(t *testing.T) {
			archive, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if len(archive.Files) != 3 {
				t.Fatalf("%s has %d parts, want seen, want and plan", file, len(archive.Files))
			}
			seen := parseSeen(t, string(archive.Files[0].Data))
			want := parseWant(t, string(archive.Files[1].Data))
			steps, err := plan.Make(seen, want)
			got := text(steps, err)
			if refused := plan.Refuse(plan.Observed{GPUs: seen.GPUs, Sick: seen.Sick, Reboots: seen.Reboots}, want); text(nil, refused) != text(nil, err) {
				t.Errorf("before it is known who holds what, the refusal is %v, and then %v", refused, err)
			}
			if *update {
				archive.Files[2].Data = []byte(got)
				if err := os.WriteFile(file, txtar.Format(archive), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(string(archive.Files[2].Data), got); diff != "" {
				t.Errorf("plan (-want +got):\n%s", diff)
			}
		})
	}
}

func text(steps []plan.Step, err error) string {
	if err != nil {
		return "refused: " + err.Error() + "\n"
	}
	if len(steps) == 0 {
		return "nothing to do\n"
	}
	var b strings.Builder
	for _, s := range steps {
		fmt.Fprintln(&b, s)
	}
	return b.String()
}

// parseSeen reads lines such as
//
//	gpu 0 on 1g.10gb@0 3g.40gb(1c@0,1c@2)@4
//	gpu 1 off pending-on
//	sick 0 1
//	pod web/a on 0/1g.10gb@0
//	pod web/b on anything
//	pod web/d on 0/3g.40gb@4/1c@2
//	plugin kube-system/p stale returns stays by-label outdated late ending
//	operand dcgm paused pods=gpu-operator/dcgm-1
//	client monitoring/exporter passes-cordon
//	unit nvsm.service active holds ending starting
//	reboots no-reset-0 suspected-1 in-vain delegate asked=us others=web/a,web/b
//	pod web/c on 0 as nvidia.com/gpu::2 withdrawn ending
//	pod web/e on 0 replaced
//	pod web/f on 0 passes-cordon
//	closable 0 1
//	closed gpu-0
//	config nvidia.com/gpu=4 reloaded needs-reload noted set foretold
//	config unknown
//	keys
//	cdi /var/run/cdi/nvidia.yaml
//	journal fenced cordoned by-claims closes parked agreed=2 other unverified undo startup returned breached persistent mps paused=dcgm stopped=nvsm.service orphaned
func parseSeen(t *testing.T, text string) plan.Observed {
	t.Helper()
	var seen plan.Observed
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		switch words[0] {
		case "gpu":
			seen.GPUs = append(seen.GPUs, parseGPU(t, words[1:]))
		case "sick":
			seen.Sick = parseSick(t, words[1:], seen.GPUs)
		case "pod":
			seen.Pods = append(seen.Pods, parsePod(words[1:]))
		case "plugin":
			seen.Operands = append(seen.Operands, plan.Operand{
				Pod: pod(words[1]), Stale: slices.Contains(words, "stale"), Returns: slices.Contains(words, "returns"),
				ByLabel: slices.Contains(words, "by-label"), Outdated: slices.Contains(words, "outdated"),
				Late: slices.Contains(words, "late"), Stays: slices.Contains(words, "stays"),
			})
			seen.Operands[len(seen.Operands)-1].Ending = slices.Contains(words, "ending")
		case "operand":
			seen.Pauses = append(seen.Pauses, parsePause(words[1:]))
		case "client":
			client := pod(words[1])
			client.Client, client.PassesCordon = true, slices.Contains(words, "passes-cordon")
			seen.Clients = append(seen.Clients, client)
		case "unit":
			seen.Units = append(seen.Units, plan.Unit{
				Name: words[1], Active: slices.Contains(words, "active"), Holds: slices.Contains(words, "holds"),
				Ending: slices.Contains(words, "ending"), Starting: slices.Contains(words, "starting"),
			})
		case "config":
			seen.Plugin = parsePlugin(t, words[1:])
		case "closable", "closed", "keys":
			parseNodes(words, &seen)
		case "slot":
			seen.Slot = plan.Slot{Needed: slices.Contains(words, "needed"), Spared: slices.Contains(words, "spared"), Drains: slices.Contains(words, "drains"), Has: slices.Contains(words, "has")}
		case "reboots":
			seen.Reboots = parseReboots(words[1:])
		case "cdi":
			seen.CDI = words[1:]
		default:
			parseJournal(t, words, &seen)
		}
	}
	return seen
}

func parseSick(t *testing.T, indices []string, gpus []nvml.GPU) plan.Sick {
	t.Helper()
	sick := plan.Sick{}
	for _, index := range indices {
		sick[gpus[number(t, index)].UUID] = true
	}
	return sick
}

func parseReboots(words []string) plan.Reboots {
	reboots := plan.Reboots{
		Policy: plan.RebootNever, NoReset: map[nvml.UUID]bool{},
		Suspected: map[nvml.UUID]bool{}, InVain: slices.Contains(words, "in-vain"),
	}
	for _, w := range words {
		switch policy := plan.RebootPolicy(w); policy {
		case plan.RebootNever, plan.RebootDelegate, plan.RebootSelf:
			reboots.Policy = policy
		}
		if gpu, ok := strings.CutPrefix(w, "no-reset-"); ok {
			reboots.NoReset[nvml.UUID("GPU-"+gpu)] = true
		}
		if gpu, ok := strings.CutPrefix(w, "suspected-"); ok {
			reboots.Suspected[nvml.UUID("GPU-"+gpu)] = true
		}
		if by, ok := strings.CutPrefix(w, "asked="); ok {
			reboots.Asked = plan.Asked(by)
		}
		if names, ok := strings.CutPrefix(w, "others="); ok {
			for _, name := range strings.Split(names, ",") {
				reboots.Others = append(reboots.Others, pod(name))
			}
		}
	}
	return reboots
}

func pod(name string) plan.Pod {
	namespace, name, _ := strings.Cut(name, "/")
	return plan.Pod{Namespace: namespace, Name: name, UID: name}
}

// device names the whole GPU "GPU-0", the MIG device "MIG-0/1g.10gb@0" or a part "MIG-0/3g.40gb@4/1c@2".
func device(at string) string {
	if strings.Contains(at, "/") {
		return "MIG-" + at
	}
	return "GPU-" + at
}

func parseGPU(t *testing.T, words []string) nvml.GPU {
	t.Helper()
	gpu := nvml.GPU{
		Index: number(t, words[0]), UUID: nvml.UUID("GPU-" + words[0]), Model: "NVIDIA H100 80GB HBM3",
		Capable: words[1] != "plain", Lost: words[1] == "lost", Enabled: words[1] == "on", Pending: words[1] == "on",
	}
	if !gpu.Capable {
		return gpu
	}
	gpu.Profiles = h100()
	for _, w := range words[2:] {
		switch w {
		case "pending-on":
			gpu.Pending = true
		case "pending-off":
			gpu.Pending = false
		case "persistent":
			gpu.Persistent = true
		case "exclusive":
			gpu.ComputeMode = nvml.ComputeExclusiveProcess
		case "switches-alone":
			gpu.ComputeCapability = nvml.ComputeCapability{Major: 9}
		default:
			gpu.Instances = append(gpu.Instances, parseInstance(t, gpu, w))
		}
	}
	return gpu
}

// parseInstance reads "3g.40gb@4", "3g.40gb@4?", which is half made, and "3g.40gb(1c@0,1c@2)@4", which says where its parts stand.
func parseInstance(t *testing.T, gpu nvml.GPU, text string) nvml.Instance {
	t.Helper()
	whole, half := strings.CutSuffix(text, "?")
	name, rest, divided := strings.Cut(whole, "(")
	if !divided {
		placed := parsePlaced(t, gpu, whole)
		if half {
			return nvml.Instance{Placed: placed}
		}
		return made(gpu, placed)
	}
	parts, behind, _ := strings.Cut(rest, ")")
	i := nvml.Instance{Placed: parsePlaced(t, gpu, name+behind)}
	var devices []nvml.Device
	for part := range strings.SplitSeq(parts, ",") {
		size, start, _ := strings.Cut(part, "c@")
		p := nvml.Part{Name: size + "c", Span: nvml.Span{Start: number(t, start), Size: number(t, size)}}
		devices = append(devices, nvml.Device{UUID: device(fmt.Sprintf("%d/%v/%v", gpu.Index, i.Placed, p)), Part: p})
	}
	profile, _ := gpu.Profile(i.Profile)
	return i.Divided(profile, devices)
}

// made returns an undivided instance, as the driver has made it.
func made(gpu nvml.GPU, placed nvml.Placed) nvml.Instance {
	p, _ := gpu.Profile(placed.Profile)
	whole := nvml.Part{Name: fmt.Sprintf("%dc", p.Slices), Span: nvml.Span{Size: p.Slices}}
	return nvml.Instance{Placed: placed, Devices: []nvml.Device{
		{UUID: device(fmt.Sprintf("%d/%v", gpu.Index, placed)), Profile: placed.Profile, Part: whole},
	}}
}

// parsePlaced reads "3g.40gb@4" and "3g.40gb(1c+1c)@4".
func parsePlaced(t *testing.T, gpu nvml.GPU, text string) nvml.Placed {
	t.Helper()
	name, start, _ := strings.Cut(text, "@")
	name, compute, _ := strings.Cut(name, "(")
	p, ok := gpu.Profile(name)
	if !ok {
		t.Fatalf("no profile %q", name)
	}
	return nvml.Placed{
		Profile: name, Span: nvml.Span{Start: number(t, start), Size: p.Placements[0].Size}, Compute: strings.TrimSuffix(compute, ")"),
	}
}

// parseSharing reads "none", "nvidia.com/gpu=4 nvidia.com/mig-1g.10gb=2 mps rename", and how MIG devices are offered: "mig=single".
func parseSharing(t *testing.T, words []string) *plan.Sharing {
	t.Helper()
	s := &plan.Sharing{MPS: slices.Contains(words, "mps"), Rename: slices.Contains(words, "rename"), Replicas: map[string]int{}}
	for _, w := range words {
		if name, n, ok := strings.Cut(w, "="); ok && name == "mig" {
			s.MIG = n
		} else if ok {
			s.Replicas[name] = number(t, n)
		}
	}
	return s
}

// parsePlugin reads the observed config of the plugin: "unknown", or a sharing; and "set", "reloaded", "needs-reload", "noted", "early", "foretold".
func parsePlugin(t *testing.T, words []string) plan.Plugin {
	t.Helper()
	p := plan.Plugin{
		Set: slices.Contains(words, "set"), Reloaded: slices.Contains(words, "reloaded"), NeedsReload: slices.Contains(words, "needs-reload"),
		Journaled: slices.Contains(words, "noted"), Early: slices.Contains(words, "early"),
		Foretold: slices.Contains(words, "foretold"),
	}
	if !slices.Contains(words, "unknown") {
		p.Now = parseSharing(t, words)
	}
	return p
}

// parseWant reads lines such as "gpu 0 on 1g.10gb=7", "gpu 1 off", "gpu 2 exactly on 3g.40gb@0", "sharing nvidia.com/gpu=4" and "later".
func parseWant(t *testing.T, text string) plan.Desired {
	t.Helper()
	want := plan.Desired{GPUs: plan.Targets{}}
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if words[0] == "later" {
			want.Later = true
			continue
		}
		if words[0] == "sharing" {
			want.Sharing, want.Config = parseSharing(t, words[1:]), strings.Join(words[1:], " ")
			continue
		}
		gpu := nvml.UUID("GPU-" + words[1])
		if words[2] == "exactly" {
			target := plan.Target{Request: nvml.Request{MIG: words[3] == "on"}, Undo: true}
			for _, w := range words[4:] {
				target.Exact = append(target.Exact, parsePlaced(t, nvml.GPU{Profiles: h100()}, w))
			}
			want.GPUs[gpu] = target
			continue
		}
		requested := nvml.Request{MIG: words[2] == "on", Devices: map[string]int{}}
		if slices.Contains(words, "mode-only") {
			want.GPUs[gpu] = plan.Target{Request: requested, ModeOnly: true}
			continue
		}
		for _, w := range words[3:] {
			name, n, _ := strings.Cut(w, "=")
			requested.Devices[name] = number(t, n)
		}
		want.GPUs[gpu] = plan.Target{Request: requested}
	}
	return want
}

// parseNodes reads the GPUs whose devices can be closed to claims, each with one device, the devices that are, and whether the node's keys differ.
func parseNodes(words []string, seen *plan.Observed) {
	switch words[0] {
	case "keys":
		seen.Keys = true
	case "closed":
		seen.Closed = words[1:]
	default:
		seen.Closable = map[nvml.UUID][]string{}
		for _, gpu := range words[1:] {
			seen.Closable[nvml.UUID("GPU-"+gpu)] = []string{"gpu-" + gpu}
		}
	}
}

// parsePod reads "web/a on 0/1g.10gb@0", "web/b on anything" and "web/c on 0 as nvidia.com/gpu::2".
func parsePod(words []string) plan.Pod {
	p := pod(words[0])
	p.Known = words[2] != "anything"
	p.Withdrawn, p.Ending, p.Replaced = slices.Contains(words, "withdrawn"), slices.Contains(words, "ending"), slices.Contains(words, "replaced")
	p.PassesCordon = slices.Contains(words, "passes-cordon")
	if p.Known {
		p.Devices = []string{device(words[2])}
	}
	for _, w := range words[3:] {
		if resource, n, ok := strings.Cut(w, "::"); ok {
			p.Replicas = append(p.Replicas, plan.Replica{Resource: resource, ID: device(words[2]) + "::" + n})
		} else if strings.HasPrefix(w, "nvidia.com/") {
			p.Replicas = append(p.Replicas, plan.Replica{Resource: w, ID: device(words[2])})
		}
	}
	return p
}

// parseJournal reads the words about the journal, and about how far the node is.
func parseJournal(t *testing.T, words []string, seen *plan.Observed) {
	t.Helper()
	seen.Journal = plan.Journal{
		Pending: slices.Contains(words, "journal"), Other: slices.Contains(words, "other"),
		Verified: !slices.Contains(words, "unverified"), MPS: slices.Contains(words, "mps"), Cuts: map[nvml.UUID]bool{}, Persistent: map[nvml.UUID]bool{},
		Closes: slices.Contains(words, "closes"),
	}
	seen.Journal.Cordoned = seen.Journal.Pending && !seen.Journal.Closes && !slices.Contains(words, "parked")
	for _, gpu := range seen.GPUs {
		seen.Journal.Cuts[gpu.UUID] = !slices.Contains(words, "without-"+string(gpu.UUID))
		seen.Journal.Persistent[gpu.UUID] = slices.Contains(words, "persistent")
	}
	seen.Journal.Paused, seen.Journal.Stopped = journaled(words, "paused="), journaled(words, "stopped=")
	seen.Orphaned = slices.Contains(words, "orphaned")
	seen.Undo = slices.Contains(words, "undo")
	seen.ByClaims = slices.Contains(words, "by-claims")
	for i := range seen.Operands {
		seen.Operands[i].Pod.Driver = seen.ByClaims
	}
	seen.Fenced, seen.Cordoned = slices.Contains(words, "fenced"), slices.Contains(words, "cordoned")
	seen.Startup = slices.Contains(words, "startup")
	seen.Returned = slices.Contains(words, "returned")
	seen.Breached = slices.Contains(words, "breached")
	for _, w := range words {
		if n, ok := strings.CutPrefix(w, "agreed="); ok {
			seen.Capacity.Agreed = number(t, n)
		}
	}
}

// parsePause reads an operand by the last part of its label; that of the device plugin is "device-plugin".
func parsePause(words []string) plan.Pause {
	p := plan.Pause{Label: words[0], Plugin: words[0] == "device-plugin", Paused: slices.Contains(words, "paused")}
	for _, w := range words {
		if list, ok := strings.CutPrefix(w, "pods="); ok {
			for name := range strings.SplitSeq(list, ",") {
				p.Pods = append(p.Pods, pod(name))
			}
		}
	}
	return p
}

// journaled reads a list of names in the journal.
func journaled(words []string, prefix string) map[string]bool {
	out := map[string]bool{}
	for _, w := range words {
		if list, ok := strings.CutPrefix(w, prefix); ok {
			for name := range strings.SplitSeq(list, ",") {
				out[name] = true
			}
		}
	}
	return out
}

func number(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// h100 is an H100 80GB as NVML describes it, without the profiles of media engines.
func h100() []nvml.Profile {
	spans := func(size int, starts ...int) []nvml.Span {
		var out []nvml.Span
		for _, s := range starts {
			out = append(out, nvml.Span{Start: s, Size: size})
		}
		return out
	}
	compute := func(places map[int][]nvml.Span) []nvml.ComputeProfile {
		var out []nvml.ComputeProfile
		for _, n := range slices.Sorted(maps.Keys(places)) {
			out = append(out, nvml.ComputeProfile{Name: fmt.Sprintf("%dc", n), Slices: n, Max: len(places[n]), Placements: places[n]})
		}
		return out
	}
	whole := func(n int) map[int][]nvml.Span { return map[int][]nvml.Span{n: spans(n, 0)} }
	three := compute(map[int][]nvml.Span{1: spans(1, 0, 1, 2), 2: spans(2, 0), 3: spans(3, 0)})
	return []nvml.Profile{
		{Name: "1g.10gb", Slices: 1, Max: 7, Placements: spans(1, 0, 1, 2, 3, 4, 5, 6), Compute: compute(whole(1))},
		{Name: "1g.20gb", Slices: 1, Max: 4, Placements: spans(2, 0, 2, 4, 6), Compute: compute(whole(1))},
		{Name: "2g.20gb", Slices: 2, Max: 3, Placements: spans(2, 0, 2, 4), Compute: compute(whole(2))},
		{Name: "3g.40gb", Slices: 3, Max: 2, Placements: spans(4, 0, 4), Compute: three},
		{Name: "4g.40gb", Slices: 4, Max: 1, Placements: spans(4, 0), Compute: compute(whole(4))},
		{Name: "7g.80gb", Slices: 7, Max: 1, Placements: spans(8, 0), Compute: compute(whole(7))},
	}
}

// The agent performs the first step only and then plans again. So a plan from what the first step leaves must be
// the rest of the same plan.
func TestTheRestOfAPlanIsThePlanOfTheRest(t *testing.T) {
	seen := parseSeen(t, "gpu 0 on 1g.10gb@0 1g.10gb@1 2g.20gb@2 3g.40gb@4\ngpu 1 off\ngpu 2 on 7g.80gb@0\n"+
		"gpu 3 on 3g.40gb(1c@0,1c@1)@0 3g.40gb(1c@1,1c@2)@4\njournal fenced\n")
	want := parseWant(t, "gpu 0 on 2g.20gb=2 1g.10gb=3\ngpu 1 on 1g.20gb=2 3g.40gb=1\ngpu 2 off\ngpu 3 on 3g.40gb=1 1c.3g.40gb=1 2c.3g.40gb=1\n")
	steps, err := plan.Make(seen, want)
	if err != nil {
		t.Fatal(err)
	}
	for len(steps) > 0 && steps[0].Traits().TouchesGPU() {
		rest := steps[1:]
		seen.GPUs = withDevices(plan.Result(seen.GPUs, steps[:1]), steps[0])
		if steps, err = plan.Make(seen, want); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(text(rest, nil), text(steps, nil)); diff != "" {
			t.Fatalf("after one step (-rest of the plan +new plan):\n%s", diff)
		}
	}
}

// withDevices gives a new instance a device, as the driver does.
func withDevices(gpus []nvml.GPU, step plan.Step) []nvml.GPU {
	for _, gpu := range gpus {
		for i := range gpu.Instances {
			at := &gpu.Instances[i]
			if at.HalfMade() && step.Kind == plan.Create && !step.OnPart() && step.GPU == gpu.UUID && step.Instance == at.Placed {
				*at = made(gpu, at.Placed)
			}
		}
	}
	return gpus
}

func TestARefusalNamesTheGPUAndTheReason(t *testing.T) {
	_, err := plan.Make(parseSeen(t, "gpu 3 on\n"), parseWant(t, "gpu 3 on 3g.40gb=2 1g.10gb=1\n"))
	var refused *plan.Refused
	var impossible *nvml.Impossible
	if !errors.As(err, &refused) || !errors.As(err, &impossible) || refused.Index != 3 {
		t.Fatalf("got %v, want a refusal of GPU 3 for an impossible geometry", err)
	}
	for says, possible := range map[string][]string{
		"request 3g.40gb=2, or 7g.80gb=1 on GPU 3: no room": {"3g.40gb=2", "7g.80gb=1"},
		"GPU 3: no room": nil,
	} {
		refused.Err = &nvml.Impossible{Reason: "no room", Possible: possible}
		if got := refused.Error(); got != says {
			t.Errorf("it says %q, want %q", got, says)
		}
	}
}
