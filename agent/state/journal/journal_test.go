package journal_test

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

func TestTheSummaryOfAJournalSaysWhatIsToBeRestored(t *testing.T) {
	t.Parallel()
	j, err := journal.Parse(`{"version":1,"operation":"a","target":"all-1g.10gb","bootID":"b","started":"2000-01-01T00:00:00Z","cordoned":true,` +
		`"previous":[{"gpu":"GPU","mig":false}],"paused":{"nvidia.com/gpu.deploy.dcgm":"true"},"stopped":["nvidia-dcgm.service"]}`)
	if err != nil {
		t.Fatal(err)
	}
	const want = "change to all-1g.10gb since 2000-01-01T00:00:00Z; to restore: cordon, and taint gpuslice.io/repartitioning if it is there; " +
		"label nvidia.com/gpu.deploy.dcgm=true; start of nvidia-dcgm.service; geometry of 1 GPU if it fails"
	if got := j.Describe(); got != want {
		t.Errorf("summary:\n%s\nwant\n%s", got, want)
	}
	j.Cordoned, j.Closed = false, []string{"gpu-0", "gpu-1"}
	if got, want := j.Describe(), "claims of the devices gpu-0, gpu-1; label"; !strings.Contains(got, want) || strings.Contains(got, "cordon") {
		t.Errorf("summary before the fence:\n%s\nwant %s", got, want)
	}
}

func TestAJournalHoldsEveryStartupTaintOfTheNode(t *testing.T) {
	t.Parallel()
	const second = "startup-taint.cluster-autoscaler.kubernetes.io/gpuslice"
	own := corev1.Taint{Key: config.TaintNotReady, Value: "pool-a", Effect: corev1.TaintEffectNoExecute}
	ownToo := corev1.Taint{Key: config.TaintNotReady, Effect: corev1.TaintEffectNoSchedule}
	other := corev1.Taint{Key: second, Value: "gpu", Effect: corev1.TaintEffectPreferNoSchedule}
	for name, observed := range map[string][][]corev1.Taint{
		"the agent's own": {{own}},
		"both":            {{own, other}},
		"another alone":   {{other}},
		"two of one key":  {{own, ownToo}},
		"one after another, of which the agent has taken the first away": {{own}, {other}, nil},
		"none": {nil},
	} {
		var j journal.Journal
		var want []corev1.Taint
		for _, seen := range observed {
			if changed := j.RecordStartup(seen); changed != (len(seen) > 0) {
				t.Errorf("%s: recording %v: the journal has changed is %t", name, seen, changed)
			}
			want = append(want, seen...)
		}
		if j.RecordStartup(observed[len(observed)-1]) {
			t.Errorf("%s: recorded again it has changed", name)
		}
		text, err := j.Encode()
		if err != nil {
			t.Fatal(err)
		}
		read, err := journal.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, read.Startup()); diff != "" {
			t.Errorf("%s: %s (-want +read):\n%s", name, text, diff)
		}
		if len(want) > 0 && !read.TakesMore(&journal.Journal{}) {
			t.Errorf("%s: the journal takes no more than one without", name)
		}
	}
	var j journal.Journal
	j.RecordStartup([]corev1.Taint{own, other})
	own.Value = "pool-b"
	if !j.RecordStartup([]corev1.Taint{own}) || len(j.Startup()) != 2 || !slices.Contains(j.Startup(), own) {
		t.Errorf("after another value: %v", j.Startup())
	}
}

// Promise 15: what a journal restores is the agent's own, whoever has written it.
func TestAJournalThatNoAgentWritesIsNotRead(t *testing.T) {
	t.Parallel()
	cut := func(piece string) string {
		return `"previous":[{"gpu":"GPU-1","mig":true,"instances":[` + piece + `]}]`
	}
	for text, want := range map[string]string{
		`"paused":{"example.com/label":"true"}`:                                            `label "example.com/label" is not an operand's`,
		`"kept":["example.com/annotation"]`:                                                `annotation "example.com/annotation" is not one that the fence sets`,
		`"closed":["gpu-0","../nodes"]`:                                                    `device "../nodes", closed to claims, is not the name of a device`,
		`"plugin":{"way":"by hand"}`:                                                       `gives the device plugin no config by "by hand"`,
		`"plugin":{"way":"label","label":"example.com/label"}`:                             `the config manager does not read label "example.com/label"`,
		`"plugin":{"way":"configmap","text":"another-key","body":"version: v1"}`:           `key "another-key" of a ConfigMap is not ours to write`,
		`"previous":[{"gpu":"","mig":true}]`:                                               `it cuts GPU ""`,
		`"previous":[{"gpu":"GPU-1","mig":true},{"gpu":"GPU-1","mig":false}]`:              `it cuts GPU "GPU-1" twice`,
		cut(`{"profile":"","start":0,"size":1}`):                                           `no instance "" of 1 slices at 0`,
		cut(`{"profile":"1g.10gb","start":-1,"size":1}`):                                   `no instance "1g.10gb" of 1 slices at -1`,
		cut(`{"profile":"1g.10gb","start":0,"size":0}`):                                    `no instance "1g.10gb" of 0 slices at 0`,
		cut(`{"profile":"1g.10gb","start":64,"size":1}`):                                   `no instance "1g.10gb" of 1 slices at 64`,
		cut(strings.Repeat(`{"profile":"a","start":0,"size":1},`, 64) + `{"profile":"a"}`): `into 65 instances`,
		`"startups":[{"key":"node.kubernetes.io/unreachable","effect":"NoExecute"}]`:       `"node.kubernetes.io/unreachable" is not a startup taint`,
		`"startups":[{"key":"gpuslice.io/repartitioning","effect":"NoSchedule"}]`:          `is not a startup taint`,
		`"startups":[{"key":"example.com/a","effect":"Never"}]`:                            `cannot have the effect "Never"`,
		`"startups":[{"key":"example.com/a","value":"a b","effect":"NoSchedule"}]`:         `cannot have the value "a b"`,
		`"startups":[{"key":"gpuslice.io/not-ready","effect":""}]`:                         `cannot have the effect ""`,
		`"startups":[{"effect":"NoSchedule"}]`:                                             `"" is not a startup taint`,
		`"startup":{"effect":"NoSchedule"}`:                                                `unknown field "startup"`,
		`"startups":[` + strings.Repeat(`{"key":"example.com/a","effect":"NoSchedule"},`, 256) + `{"key":"example.com/a","effect":"NoSchedule"}]`: "256 entries",
	} {
		if _, err := journal.Parse(`{"version":1,` + text + `}`); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: error %v, want %q", text, err, want)
		}
	}
}

// The agent amends the journal on the node before it takes what the journal does not hold yet.
func TestAJournalTakesMoreByWhatTheOtherDoesNotHold(t *testing.T) {
	t.Parallel()
	made := func(change func(*journal.Journal)) *journal.Journal {
		j := &journal.Journal{
			Target: "all-1g.10gb", Previous: []journal.GPULayout{{GPU: "GPU-1"}}, Paused: map[string]string{"nvidia.com/gpu.deploy.dcgm": "true"},
			Stopped: []string{"dcgm.service"}, Kept: []string{config.AnnotationDoNotDisrupt}, Operands: []string{"uid"}, Reboots: []string{"boot"},
			Startups: []journal.StartupTaint{{Key: "example.com/not-ready", Effect: "NoSchedule"}},
		}
		change(j)
		return j
	}
	than := made(func(*journal.Journal) {})
	for name, row := range map[string]struct {
		change func(*journal.Journal)
		want   bool
	}{
		"the same":                {func(*journal.Journal) {}, false},
		"less":                    {func(j *journal.Journal) { *j = journal.Journal{Target: j.Target} }, false},
		"another target":          {func(j *journal.Journal) { j.Target = "all-disabled" }, true},
		"the cordon":              {func(j *journal.Journal) { j.Cordoned = true }, true},
		"the plugin's config":     {func(j *journal.Journal) { j.Plugin = &journal.FormerPlugin{Way: config.HandoverFile} }, true},
		"a config that stays":     {func(j *journal.Journal) { j.Plugin = &journal.FormerPlugin{Way: config.HandoverFile, Stays: true} }, false},
		"another operand":         {func(j *journal.Journal) { j.Paused["nvidia.com/gpu.deploy.client"] = "true" }, true},
		"another unit":            {func(j *journal.Journal) { j.Stopped = []string{"nvsm.service"} }, true},
		"another annotation":      {func(j *journal.Journal) { j.Kept = append(j.Kept, "example.com/annotation") }, true},
		"a device":                {func(j *journal.Journal) { j.Closed = []string{"gpu-0"} }, true},
		"another pod":             {func(j *journal.Journal) { j.Operands = []string{"another"} }, true},
		"another reboot":          {func(j *journal.Journal) { j.Reboots = append(j.Reboots, "next") }, true},
		"another startup taint":   {func(j *journal.Journal) { j.Startups[0].Effect = "NoExecute" }, true},
		"another GPU":             {func(j *journal.Journal) { j.Previous[0].GPU = "GPU-2" }, true},
		"a GPU's persistence":     {func(j *journal.Journal) { j.Previous[0].Persistent = true }, true},
		"a GPU's other instances": {func(j *journal.Journal) { j.Previous[0].MIG = true }, false}, // the first record counts
	} {
		if got := made(row.change).TakesMore(than); got != row.want {
			t.Errorf("%s: takes more is %t, want %t", name, got, row.want)
		}
	}
	if !than.TakesMore(nil) {
		t.Error("the journal takes no more than none")
	}
}

// A layout is recorded once: what the GPU is like in the middle of the change is nothing to go back to.
func TestTheFirstLayoutOfAGPUIsTheOneToGoBackTo(t *testing.T) {
	t.Parallel()
	whole := nvml.Instance{Placed: nvml.Placed{Profile: "1g.10gb", Span: nvml.Span{Start: 2, Size: 1}}, Devices: []nvml.Device{{UUID: "MIG-1"}}}
	halfMade := nvml.Instance{Placed: nvml.Placed{Profile: "3g.40gb", Span: nvml.Span{Start: 4, Size: 4}}}
	gpu := nvml.GPU{UUID: "GPU-1", Enabled: true, Instances: []nvml.Instance{whole, halfMade}}
	var j journal.Journal
	j.RecordLayout(gpu)
	j.RecordLayout(nvml.GPU{UUID: "GPU-1", Persistent: true})
	want := []journal.GPULayout{{GPU: "GPU-1", MIG: true, Persistent: true, Instances: []journal.InstanceRecord{{Profile: "1g.10gb", Start: 2, Size: 1}}}}
	if diff := cmp.Diff(want, j.Previous); diff != "" {
		t.Errorf("recorded (-want +got):\n%s", diff)
	}
	if !j.Previous[0].Matches(gpu) {
		t.Error("a GPU does not match its own layout")
	}
	for name, other := range map[string]nvml.GPU{
		"with MIG off": {UUID: "GPU-1"}, "without its instance": {UUID: "GPU-1", Enabled: true},
		"with it at another place": {UUID: "GPU-1", Enabled: true, Instances: []nvml.Instance{{
			Placed: nvml.Placed{Profile: "1g.10gb", Span: nvml.Span{Start: 3, Size: 1}}, Devices: whole.Devices,
		}}},
	} {
		if j.Previous[0].Matches(other) {
			t.Errorf("%s it matches", name)
		}
	}
	if targets := j.Targets([]nvml.GPU{{UUID: "GPU-1", Lost: true}}); len(targets) > 0 {
		t.Errorf("a GPU that is lost is to go back: %v", targets)
	}
}

// An agent that cannot read the journal begins nothing and restores nothing, so it writes no journal that it could not read.
func TestAJournalThatCouldNotBeReadAgainIsNotWritten(t *testing.T) {
	t.Parallel()
	j := &journal.Journal{Operation: "a", Target: "all-1g.10gb", Operands: make([]string, 257)}
	for i := range j.Operands {
		j.Operands[i] = strconv.Itoa(i)
	}
	if text, err := j.Encode(); err == nil || !strings.Contains(err.Error(), "256 entries") {
		t.Errorf("got %.80q, %v, want that it has too many entries", text, err)
	}
	j.Operands = j.Operands[1:]
	if _, err := j.Encode(); err != nil {
		t.Error(err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(`{"version":1,"operation":"a","target":"all-balanced","previous":[{"gpu":"GPU-1","mig":true}]}`)
	f.Add(`{"version":1,"previous":[{"gpu":"GPU-1","mig":true,"instances":[{"profile":"1g.10gb","start":-1,"size":1}]}]}`)
	f.Add(`null`)
	for _, text := range []string{
		`{"version":1,"operation":"a","target":"t","fingerprint":"w","strategy":"mixed","bootID":"b","started":"2000-01-01T00:00:00Z","cordoned":true,` +
			`"paused":{"nvidia.com/gpu.deploy.dcgm":"true"},"stopped":["a.service"],"persistent":["GPU-1"],"verified":true,` +
			`"startups":[{"key":"gpuslice.io/not-ready","value":"v","effect":"NoSchedule"}],"noReset":{"boot":"b","gpus":["GPU-1"]},"reboots":["b"],"rebootAsked":"2000-01-01T00:00:00Z",` +
			`"plugin":{"way":"configmap","namespace":"n","configMap":"c","key":"k","label":"nvidia.com/device-plugin.config"},` +
			`"undo":{"fingerprint":"w","reason":"HardwareFailure","message":"m"}}`,
		`{"version":1,"startups":[{"key":"example.com/a","value":"v","effect":"NoExecute"},{"key":"gpuslice.io/not-ready","effect":"NoSchedule"}]}`, `{"version":1,"version":2}`, `{"version":1}{"version":1}`, `{"VERSION":1}`, `{"version":1e3}`, `{"version":9223372036854775808}`, `[]`, `1`, ` `,
		`{"version":1,"previous":[{"gpu":"GPU-1","mig":true,"instances":[{"profile":"1g.10gb","start":9223372036854775807,"size":1}]}]}`,
		`{"version":1,"started":"9999999-01-01T00:00:00Z"}`, "{\"version\":1,\"target\":\"\x1b[2J\u202e\"}",
		`{"version":1,"previous":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`,
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		j, err := journal.Parse(text)
		if err == nil && j == nil && text != "" {
			t.Errorf("a journal that is there reads as none: %q", text)
		}
		if err != nil && len(err.Error()) > 4<<10 {
			t.Errorf("an error of %d bytes", len(err.Error()))
		}
	})
}
