package journal_test

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/config"
)

func TestTheSummaryOfAJournalSaysWhatIsOwed(t *testing.T) {
	t.Parallel()
	j, err := journal.Parse(`{"version":2,"operation":"a","target":"all-1g.10gb","bootID":"b","started":"2000-01-01T00:00:00Z","cordoned":true,` +
		`"previous":[{"gpu":"GPU","mig":false}],"paused":{"nvidia.com/gpu.deploy.dcgm":"true"},"stopped":["nvidia-dcgm.service"]}`)
	if err != nil {
		t.Fatal(err)
	}
	const want = "change to all-1g.10gb since 2000-01-01T00:00:00Z; to be given back: cordon and taint gpuslice.io/repartitioning; " +
		"label nvidia.com/gpu.deploy.dcgm=true; start of nvidia-dcgm.service; geometry of 1 GPU if it fails"
	if got := j.Describe(); got != want {
		t.Errorf("summary:\n%s\nwant\n%s", got, want)
	}
}

// An older agent that does not know how a change ends refuses the journal, and touches nothing of its node.
func TestAJournalThatSaysHowItEndsIsOfAVersionOfItsOwn(t *testing.T) {
	t.Parallel()
	for want, j := range map[string]*journal.Journal{
		`{"version":1,`:  {Undo: &api.Failure{Wish: "slices", Later: true}},
		`{"version":2,`:  {Stopped: []string{"dcgm.service"}},
		`{"version":5,`:  {Parked: true},
		`{"version":5, `: {Undo: &api.Failure{Wish: "slices", Cancelled: true}},
		`{"version":6,`:  {Kept: []string{config.AnnotationDoNotDisrupt}},
		`{"version":1, `: {NotReady: &journal.StartupTaint{Value: "pool-a", Effect: "NoExecute"}},
		`{"version":7,`:  {Startups: []journal.StartupTaint{{Key: "example.com/not-ready", Effect: "NoSchedule"}}},
	} {
		text, err := j.Encode()
		if err != nil || !strings.HasPrefix(text, strings.TrimSpace(want)) {
			t.Errorf("%+v is written as %s, %v", j, text, err)
		}
	}
}

func TestAJournalHoldsEveryStartupTaintOfTheNode(t *testing.T) {
	t.Parallel()
	const second = "startup-taint.cluster-autoscaler.kubernetes.io/gpuslice"
	own := corev1.Taint{Key: config.TaintNotReady, Value: "pool-a", Effect: corev1.TaintEffectNoExecute}
	ownToo := corev1.Taint{Key: config.TaintNotReady, Effect: corev1.TaintEffectNoSchedule}
	other := corev1.Taint{Key: second, Value: "gpu", Effect: corev1.TaintEffectPreferNoSchedule}
	for name, looks := range map[string][][]corev1.Taint{
		"the agent's own": {{own}},
		"both":            {{own, other}},
		"another alone":   {{other}},
		"two of one key":  {{own, ownToo}},
		"one after another, of which the agent has taken the first away": {{own}, {other}, nil},
		"none": {nil},
	} {
		var j journal.Journal
		var want []corev1.Taint
		for _, seen := range looks {
			if changed := j.RecordStartup(seen); changed != (len(seen) > 0) {
				t.Errorf("%s: recording %v: the journal has changed is %t", name, seen, changed)
			}
			want = append(want, seen...)
		}
		if j.RecordStartup(looks[len(looks)-1]) {
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

func TestAJournalWithATaintThatIsNoStartupTaintIsNotRead(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`"startups":[{"key":"node.kubernetes.io/unreachable","effect":"NoExecute"}]`: `"node.kubernetes.io/unreachable" is no startup taint`,
		`"startups":[{"key":"gpuslice.io/repartitioning","effect":"NoSchedule"}]`:    `is no startup taint`,
		`"startups":[{"key":"example.com/a","effect":"Never"}]`:                      `no effect "Never"`,
		`"startups":[{"key":"example.com/a","value":"a b","effect":"NoSchedule"}]`:   `no value "a b"`,
		`"startup":{"effect":""}`: `no effect ""`,
		`"startups":[` + strings.Repeat(`{"effect":"NoSchedule"},`, 256) + `{"effect":"NoSchedule"}]`: "256 entries",
	} {
		if _, err := journal.Parse(`{"version":7,` + text + `}`); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: error %v, want %q", text, err, want)
		}
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
		`{"version":3,"operation":"a","target":"t","wish":"w","strategy":"mixed","bootID":"b","started":"2000-01-01T00:00:00Z","cordoned":true,` +
			`"paused":{"nvidia.com/gpu.deploy.dcgm":"true"},"stopped":["a.service"],"persistent":["GPU-1"],"proven":true,` +
			`"startup":{"value":"v","effect":"NoSchedule"},"noReset":{"boot":"b","gpus":["GPU-1"]},"reboots":["b"],"rebootAsked":"2000-01-01T00:00:00Z",` +
			`"plugin":{"way":"configmap","namespace":"n","configMap":"c","key":"k","label":"nvidia.com/device-plugin.config"},` +
			`"undo":{"wish":"w","reason":"HardwareFailure","message":"m"}}`,
		`{"version":7,"startups":[{"key":"example.com/a","value":"v","effect":"NoExecute"},{"effect":"NoSchedule"}]}`, `{"version":1,"version":2}`, `{"version":1}{"version":1}`, `{"VERSION":1}`, `{"version":1e3}`, `{"version":9223372036854775808}`, `[]`, `1`, ` `,
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
