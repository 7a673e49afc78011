package reboot_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/reboot"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/clientset"
)

const boot = "00000000-0000-4000-8000-000000000001"

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// machine is a host with its logind and its disk, and the API server, which notes in their order what is asked of them.
type machine struct {
	t       *testing.T
	did     []string
	refuses error // what logind answers to whether the host can be rebooted
	answers error // and to Reboot, and to Inhibit
	client  *fake.Clientset
	clock   *clocktesting.FakeClock
	proc    string
	reboots *reboot.Rebooter
	seen    *state.Observed
}

// Inhibit implements reboot.Host.
func (m *machine) Inhibit(context.Context, string) (func(), error) {
	m.did = append(m.did, "inhibit")
	return func() {}, m.answers
}

// CanReboot implements reboot.Host.
func (m *machine) CanReboot(context.Context) error { return m.refuses }

// Reboot implements reboot.Host.
func (m *machine) Reboot(context.Context) error { m.did = append(m.did, "reboot"); return m.answers }

// Read implements journal.Store.
func (*machine) Read(context.Context) (*journal.Record, error) { return &journal.Record{}, nil }

// Write implements journal.Store.
func (*machine) Write(context.Context, journal.Record) error { return nil }

// Try implements journal.Store.
func (*machine) Try(context.Context, journal.Record) error { return nil }

// SetAside implements journal.Store.
func (*machine) SetAside(context.Context) (string, error) { return "", errors.New("there is none") }

// newMachine is in the middle of a change for which MIG mode of GPU-a is pending.
func newMachine(t *testing.T, policy config.RebootPolicy) *machine {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", UID: "uid", ResourceVersion: "1"}}
	m := &machine{t: t, clock: clocktesting.NewFakeClock(now), proc: t.TempDir()}
	m.client = fake.NewClientset(node)
	m.client.PrependReactor("patch", "nodes", func(kubetesting.Action) (bool, runtime.Object, error) {
		m.did = append(m.did, "journal")
		return false, nil, nil
	})
	settings, clock := config.Default(), monotonic.New(m.clock)
	settings.Reboot.Policy = policy
	env := act.Env{
		Node: "gpu-1", Settings: settings, Events: events.Recorder{To: record.NewFakeRecorder(10)}, Clock: clock, Log: zap.NewNop(),
		Nodes: nodewrite.Writer{Client: clientset.Of(m.client), Timeout: time.Minute}, Fence: fence.Fence{Taint: state.FenceTaint(), JournalKey: config.AnnotationJournal},
	}
	m.reboots = &reboot.Rebooter{
		Env: env, Host: m, Kernel: &host.Kernel{Proc: m.proc}, Sentinel: &reboot.Sentinel{Path: filepath.Join(t.TempDir(), "reboot-required")},
		Journal: &journal.Writer{Record: &journal.Keeper{Store: m, Log: env.Log}, Nodes: env.Nodes, Fence: env.Fence, Clock: clock},
	}
	m.seen = &state.Observed{
		Node: node, Boot: state.Boot{ID: boot}, GPUs: []nvml.GPU{{UUID: "GPU-a", Pending: true}, {UUID: "GPU-b", Enabled: true, Pending: true}},
		Journal: &journal.Journal{Operation: "op", Target: "all-1g.10gb", BootID: boot, Started: now, Cordoned: true, Previous: []journal.GPULayout{{GPU: "GPU-a"}}},
	}
	return m
}

func (m *machine) in(undo bool) act.Input {
	want := state.Desired{Name: "all-1g.10gb", Fingerprint: "asked", Undo: undo, Targets: plan.Targets{"GPU-a": {}}}
	return act.Input{Seen: m.seen, Want: want, Steps: []plan.Step{{Kind: plan.Reboot}}}
}

// Promise 10: one reboot for a change and one more for its undo, and none by an agent that could not notice it.
func TestWhichRebootsAreAllowed(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		policy  config.RebootPolicy
		reboots []string
		undo    bool
		refuses error
		unknown error  // why the boot is not known
		says    string // of the failure; empty if it is allowed
	}{
		"the first":                       {config.RebootSelf, nil, false, nil, nil, ""},
		"the first by another tool":       {config.RebootDelegate, nil, false, errors.New("no logind"), nil, ""},
		"never":                           {config.RebootNever, nil, false, nil, nil, plan.ErrNeedsReboot.Error()},
		"logind refuses":                  {config.RebootSelf, nil, false, errors.New("no logind"), nil, "no logind"},
		"the one that is asked for":       {config.RebootSelf, []string{boot}, false, nil, nil, ""},
		"after one that has not helped":   {config.RebootSelf, []string{"former"}, false, nil, nil, plan.ErrStillPending.Error()},
		"the first of an undo":            {config.RebootSelf, []string{"former"}, true, nil, nil, ""},
		"after one of the undo":           {config.RebootSelf, []string{"former", "later"}, true, nil, nil, plan.ErrStillPending.Error()},
		"a reboot that would not be seen": {config.RebootSelf, nil, false, nil, errors.New("no boot id"), "not rebooting the host: no boot id"},
	} {
		m := newMachine(t, row.policy)
		m.seen.Journal.Reboots, m.refuses = row.reboots, row.refuses
		if m.seen.Boot.Err = row.unknown; row.unknown != nil {
			m.seen.Boot.ID = ""
		}
		got, err := "", m.reboots.Allowed(t.Context(), m.in(row.undo))
		if failure := (*api.Failure)(nil); errors.As(err, &failure) && failure.Reason == config.ReasonNeedsReboot {
			got = failure.Message
		} else if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got != row.says || len(m.did) > 0 {
			t.Errorf("%s: %q after %v, want %q", name, got, m.did, row.says)
		}
	}
}

// Promises 8 and 10: the node has the journal with this boot before logind is asked, once in each process, and only another boot ends the wait.
func TestTheOrderInWhichARebootIsAskedFor(t *testing.T) {
	t.Parallel()
	noted := func(m *machine) {
		m.seen.Journal.Reboots, m.seen.Journal.RebootAsked = []string{boot}, now.Add(-time.Minute)
	}
	late := func(m *machine) { noted(m); m.clock.Step(m.reboots.Settings.Timeouts.Reboot) }
	unknown := func(m *machine) { noted(m); m.seen.Boot = state.Boot{Err: errors.New("no boot id")} }
	answers := func(err error) func(*machine) { return func(m *machine) { m.answers = err } }
	both := []string{"journal", "reboot"}
	for name, row := range map[string]struct {
		policy config.RebootPolicy
		change func(*machine)
		did    []string
		fails  bool // it is given up; otherwise it is awaited
	}{
		"at first":                             {config.RebootSelf, func(*machine) {}, both, false},
		"by another tool":                      {config.RebootDelegate, func(*machine) {}, []string{"journal"}, false},
		"by another tool, which is awaited":    {config.RebootDelegate, noted, nil, false},
		"by another tool in vain":              {config.RebootDelegate, late, nil, true},
		"the agent was killed before it asked": {config.RebootSelf, noted, []string{"reboot"}, false},
		"in vain":                              {config.RebootSelf, late, nil, true},
		"the boot is not known any more":       {config.RebootSelf, unknown, nil, false},
		"never":                                {config.RebootNever, func(*machine) {}, nil, true},
		"logind refuses":                       {config.RebootSelf, func(m *machine) { m.refuses = host.ErrNoLogind }, nil, true},
		"logind is gone by then":               {config.RebootSelf, answers(host.ErrNoLogind), both, true},
		"logind refuses by then":               {config.RebootSelf, answers(host.ErrLogindRefuses), both, true},
		"a program inhibits it":                {config.RebootSelf, answers(host.ErrRebootInhibited), both, true},
		"the host goes down already":           {config.RebootSelf, answers(host.ErrShuttingDown), both, false},
		"the bus went away during the answer":  {config.RebootSelf, answers(host.ErrLogindSilent), both, false},
	} {
		m := newMachine(t, row.policy)
		row.change(m)
		err := m.reboots.Reboot(t.Context(), m.in(false))
		var failure *api.Failure
		var wait *outcome.Waiting
		if errors.As(err, &failure) != row.fails || errors.As(err, &wait) == row.fails || wait != nil && wait.For != outcome.ForReboot {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(row.did, m.did); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	m := newMachine(t, config.RebootSelf)
	_ = m.reboots.Reboot(t.Context(), m.in(false))
	noted(m)
	_ = m.reboots.Reboot(t.Context(), m.in(false))
	if diff := cmp.Diff(both, m.did); diff != "" {
		t.Errorf("in the next pass (-want +got):\n%s", diff)
	}
}

// The reboot takes the instances of all GPUs: the journal has the layout of those that the label does not name, to give it back.
func TestTheJournalHasTheGPUsThatTheRebootTakes(t *testing.T) {
	t.Parallel()
	m := newMachine(t, config.RebootSelf)
	if wait := (*outcome.Waiting)(nil); !errors.As(m.reboots.Reboot(t.Context(), m.in(false)), &wait) {
		t.Fatal("the agent does not await the reboot")
	}
	node, err := m.client.CoreV1().Nodes().Get(t.Context(), "gpu-1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	j, err := journal.Parse(node.Annotations[config.AnnotationJournal])
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]journal.GPULayout{{GPU: "GPU-a"}, {GPU: "GPU-b", MIG: true, Foreign: true}}, j.Previous); diff != "" {
		t.Errorf("layouts (-want +got):\n%s", diff)
	}
	if !slices.Equal(j.Reboots, []string{boot}) || !j.RebootAsked.Equal(now) {
		t.Errorf("the journal notes boots %v, at %s", j.Reboots, j.RebootAsked)
	}
}

// Promise 15. What cannot be read is no reboot, and the last boot that this process has read holds until it can be read again.
func TestTheBootThatCannotBeReadIsTheLastOne(t *testing.T) {
	t.Parallel()
	m := newMachine(t, config.RebootSelf)
	const another = "00000000-0000-4000-8000-000000000002"
	file := filepath.Join(m.proc, "sys", "kernel", "random", "boot_id")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct{ text, id string }{{"none\n", ""}, {boot + "\n", boot}, {"none\n", boot}, {another + "\n", another}} {
		if err := os.WriteFile(file, []byte(row.text), 0o600); err != nil {
			t.Fatal(err)
		}
		m.seen.Boot = state.Boot{}
		m.reboots.ObserveBoot(t.Context(), m.seen)
		if m.seen.Boot.ID != row.id || (m.seen.Boot.Err != nil) != (row.id == "") {
			t.Errorf("by %q: %+v, want %q", row.text, m.seen.Boot, row.id)
		}
	}
}

// Only a refusal in this boot counts, and the mode that is still pending in the boot after it is so in vain. Pods that came behind the fence tolerate
// everything: who evicted them before the reboot would do so for ever.
func TestWhatIsObservedForAReboot(t *testing.T) {
	t.Parallel()
	pod := func(name string, after time.Duration) corev1.Pod {
		return corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "team", Name: name, CreationTimestamp: metav1.NewTime(now.Add(after)),
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "r", UID: "r", Controller: new(true)}},
		}}
	}
	pods := []corev1.Pod{pod("before", -time.Second), pod("behind", time.Second)}
	refused := &journal.NoReset{Boot: boot, GPUs: []nvml.UUID{"GPU-a"}}
	for name, row := range map[string]struct {
		refused *journal.NoReset
		boot    string
		open    bool // the change has no fence
		noReset bool
		inVain  bool
		leave   []string
	}{
		"nothing is refused":      {nil, boot, false, false, false, []string{"before"}},
		"refused in this boot":    {refused, boot, false, true, false, []string{"before"}},
		"refused in an earlier":   {refused, "later", false, false, true, []string{"before"}},
		"in a boot without an id": {refused, "", false, false, false, []string{"before"}},
		"before the fence":        {nil, boot, true, false, false, []string{"before", "behind"}},
	} {
		m := newMachine(t, config.RebootSelf)
		m.seen.Boot.ID, m.seen.Journal.NoReset, m.seen.Journal.Cordoned = row.boot, row.refused, !row.open
		m.reboots.Observe(t.Context(), m.seen, pods)
		r := m.seen.Reboots
		if r.NoReset["GPU-a"] != row.noReset || r.Suspected["GPU-a"] != (row.refused != nil) || r.InVain != row.inVain || r.Asked != plan.NotAsked {
			t.Errorf("%s: %+v", name, r)
		}
		var leave []string
		for _, p := range r.Others {
			leave = append(leave, p.Name)
		}
		if diff := cmp.Diff(row.leave, leave); diff != "" {
			t.Errorf("%s: pods that leave (-want +got):\n%s", name, diff)
		}
	}
}

// A needless reboot would destroy the instances of all GPUs: the request goes as soon as no mode is pending, or this agent's policy asks for none.
func TestTheRequestGoesWithWhatItIsFor(t *testing.T) {
	t.Parallel()
	pending := []nvml.GPU{{UUID: "GPU-a", Pending: true}}
	for name, row := range map[string]struct {
		policy config.RebootPolicy
		gpus   []nvml.GPU
		asked  plan.Asked
		goes   bool
	}{
		"a mode is pending":                {config.RebootDelegate, pending, plan.AskedByUs, false},
		"a mode to be off is pending":      {config.RebootDelegate, []nvml.GPU{{UUID: "GPU-a"}, {UUID: "GPU-b", Enabled: true}}, plan.AskedByUs, false},
		"no mode is pending":               {config.RebootDelegate, []nvml.GPU{{UUID: "GPU-a", Enabled: true, Pending: true}}, plan.AskedByUs, true},
		"the GPU with the mode is lost":    {config.RebootDelegate, []nvml.GPU{{UUID: "GPU-a", Pending: true, Lost: true}}, plan.AskedByUs, true},
		"the policy has become never":      {config.RebootNever, pending, plan.AskedByUs, true},
		"the policy has become self":       {config.RebootSelf, pending, plan.AskedByUs, true},
		"another program has asked, too":   {config.RebootDelegate, nil, plan.AskedByOthers, false},
		"another has, and the policy none": {config.RebootNever, pending, plan.AskedByOthers, false},
	} {
		m := newMachine(t, row.policy)
		m.seen.GPUs, m.seen.Reboots.Asked = row.gpus, row.asked
		text := config.FieldManager + ": why\n"
		if row.asked == plan.AskedByOthers {
			text = "apt\n"
		}
		if err := os.WriteFile(m.reboots.Sentinel.Path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		m.reboots.Withdraw(t.Context(), m.seen)
		if _, err := os.Lstat(m.reboots.Sentinel.Path); (err != nil) != row.goes {
			t.Errorf("%s: the request is gone: %t, want %t", name, err != nil, row.goes)
		}
	}
}

// No step waits for a logind that does not answer, and none begins while the host goes down.
func TestAStepIsKeptFromAShutdownWhereLogindAnswers(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		answers error
		waits   bool
	}{
		"it does": {nil, false}, "there is none": {host.ErrNoLogind, false}, "the host goes down": {host.ErrShuttingDown, true},
	} {
		m := newMachine(t, config.RebootNever)
		m.answers = row.answers
		release, err := m.reboots.Inhibit(t.Context(), plan.Step{Kind: plan.SetMode})
		var wait *outcome.Waiting
		if errors.As(err, &wait) != row.waits || row.waits == (release != nil) || wait != nil && wait.Reason != config.ReasonShuttingDown {
			t.Errorf("%s: %v", name, err)
		}
	}
}
