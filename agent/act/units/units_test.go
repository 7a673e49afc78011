package units_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/units"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
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

const dcgm, other = "nvidia-dcgm.service", "nvsm.service"

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// machine is a host with its systemd, its disk and its node.
type machine struct {
	t      *testing.T
	states map[string]string // of units; nil on a host without systemd
	silent error             // why systemd does not answer for the states
	refuse error             // the answer to Stop and Start
	asked  []string          // the units of which the agent has asked for the state, the last time
	did    []string
	client *fake.Clientset
	clock  *clocktesting.FakeClock
	events *record.FakeRecorder
	units  *units.Units
	seen   *state.Observed
}

// States implements units.Systemd.
func (m *machine) States(_ context.Context, names []string) (map[string]string, error) {
	m.asked = names
	if m.states == nil {
		return nil, host.ErrNoSystemd
	}
	return m.states, m.silent
}

// Stop implements units.Systemd.
func (m *machine) Stop(_ context.Context, unit string) error {
	m.did = append(m.did, "stop "+unit)
	return m.refuse
}

// Start implements units.Systemd.
func (m *machine) Start(_ context.Context, unit string) error {
	m.did = append(m.did, "start "+unit)
	return m.refuse
}

// Read implements journal.Store.
func (*machine) Read(context.Context) (*journal.Record, error) { return &journal.Record{}, nil }

// Write implements journal.Store.
func (*machine) Write(context.Context, journal.Record) error { return nil }

// Try implements journal.Store.
func (*machine) Try(context.Context, journal.Record) error { return nil }

// SetAside implements journal.Store.
func (*machine) SetAside(context.Context) (string, error) { return "", errors.New("there is none") }

// newMachine is in the middle of a change for which dcgm has to stop, or has stopped.
func newMachine(t *testing.T) *machine {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", UID: "uid", ResourceVersion: "1"}}
	m := &machine{t: t, clock: clocktesting.NewFakeClock(now), client: fake.NewClientset(node), events: record.NewFakeRecorder(10)}
	settings, clock := config.Default(), monotonic.New(m.clock)
	settings.Units = []string{dcgm, other}
	env := act.Env{
		Node: "gpu-1", Settings: settings, Events: events.Recorder{To: m.events}, Clock: clock, Log: zap.NewNop(),
		Nodes: nodewrite.Writer{Client: clientset.Of(m.client), Timeout: time.Minute},
		Fence: fence.Fence{Taint: state.FenceTaint(), JournalKey: config.AnnotationJournal},
	}
	m.units = &units.Units{
		Env: env, Systemd: m, Retries: decide.NewRetries(clock, settings),
		Journal: &journal.Writer{Record: &journal.Keeper{Store: m, Log: env.Log}, Nodes: env.Nodes, Fence: env.Fence, Clock: clock},
	}
	m.seen = &state.Observed{Node: node, Journal: &journal.Journal{Operation: "op", Target: "all-1g.10gb", BootID: "boot", Started: now, Stopped: []string{dcgm, other}}}
	return m
}

func in(m *machine, kind plan.Kind, undo bool) act.Input {
	return act.Input{Seen: m.seen, Want: state.Desired{Name: "all-1g.10gb", Fingerprint: "asked", Undo: undo}, Steps: []plan.Step{{Kind: kind, Unit: dcgm}}}
}

// Promise 10: a unit that does not stop in its time ends the change, and not its undo.
func TestAUnitIsAwaitedUntilItsTimeIsOver(t *testing.T) {
	t.Parallel()
	broken := &host.JobError{Unit: dcgm, Verb: "stop", Result: "failed"}
	for name, row := range map[string]struct {
		refuse error
		late   bool // its time is over
		undo   bool
		reason config.Reason // of the wait or the failure
		fails  bool
		err    error
	}{
		"it stops":            {nil, false, false, "", false, nil},
		"it stops late":       {nil, true, false, "", false, nil},
		"it is stopping":      {host.ErrJobRunning, false, false, config.ReasonStoppingUnits, false, nil},
		"it never stops":      {host.ErrJobRunning, true, false, config.ReasonUnitFailed, true, nil},
		"nor in an undo":      {host.ErrJobRunning, true, true, config.ReasonStoppingUnits, false, nil},
		"its job fails":       {broken, false, false, "", false, broken},
		"there is no systemd": {host.ErrNoSystemd, false, false, "", false, host.ErrNoSystemd},
	} {
		m := newMachine(t)
		m.refuse = row.refuse
		m.units.Retries.Began(in(m, plan.StopUnits, false).Step())
		if row.late {
			m.clock.Step(m.units.Settings.Timeouts.Unit + time.Second)
		}
		err := m.units.Stop(t.Context(), in(m, plan.StopUnits, row.undo))
		var wait *outcome.Waiting
		var failure *api.Failure
		got := config.Reason("")
		switch {
		case errors.As(err, &wait):
			got = wait.Reason
		case errors.As(err, &failure):
			got = failure.Reason
		case !errors.Is(err, row.err) || err == nil && row.err != nil:
			t.Errorf("%s: %v, want %v", name, err, row.err)
		}
		if got != row.reason || (failure != nil) != row.fails {
			t.Errorf("%s: %v, want %s", name, err, row.reason)
		}
	}
}

// Promise 10: GPUs work without the unit, so the agent keeps no node for one that does not start. The journal names it no more, and users read of it.
func TestAUnitThatDoesNotStartIsGivenUp(t *testing.T) {
	t.Parallel()
	broken := &host.JobError{Unit: dcgm, Verb: "start", Result: "failed"}
	for name, row := range map[string]struct {
		refuse   error
		late     bool
		starts   int // before, each of which has ended
		failures int // of the step before
		waits    bool
		err      error
		givenUp  bool
		started  int // by this process
	}{
		"it starts":                       {nil, false, 0, 0, false, nil, false, 1},
		"it is starting":                  {host.ErrJobRunning, false, 0, 0, true, nil, false, 1},
		"it never starts":                 {host.ErrJobRunning, true, 0, 0, false, outcome.ErrPlanAgain, true, 1},
		"its job fails":                   {broken, false, 0, 0, false, broken, false, 1},
		"its job fails for the last time": {broken, false, 0, config.Default().Retry.Failures - 1, false, outcome.ErrPlanAgain, true, 1},
		"it ends":                         {nil, false, config.DefaultNoEffect - 1, 0, false, nil, false, config.DefaultNoEffect},
		"it ends each time":               {nil, false, config.DefaultNoEffect, 0, false, outcome.ErrPlanAgain, true, config.DefaultNoEffect},
	} {
		m := newMachine(t)
		step := m.startedBefore(row.starts, row.failures)
		m.refuse = row.refuse
		if row.late {
			m.clock.Step(m.units.Settings.Timeouts.Unit)
		}
		err := m.units.Start(t.Context(), step)
		if wait := (*outcome.Waiting)(nil); errors.As(err, &wait) != row.waits || !row.waits && !errors.Is(err, row.err) {
			t.Errorf("%s: %v, want %v", name, err, row.err)
		}
		text := m.journal()
		if givenUp := text != ""; givenUp != row.givenUp || givenUp && (strings.Contains(text, `"`+dcgm) || !strings.Contains(text, `"`+other)) {
			t.Errorf("%s: the journal is %s", name, text)
		}
		if len(m.events.Events) > 0 != row.givenUp || strings.Contains(m.units.Down(), dcgm) != row.givenUp || len(m.did) != row.started {
			t.Errorf("%s: %d Events, the condition says %q, and systemd was asked for %v", name, len(m.events.Events), m.units.Down(), m.did)
		}
	}
}

// startedBefore starts the unit so often, each of which succeeds and ends, and fails so often to start it.
func (m *machine) startedBefore(starts, failures int) act.Input {
	m.t.Helper()
	step := in(m, plan.StartUnits, false)
	for range starts {
		if err := m.units.Start(m.t.Context(), step); err != nil {
			m.t.Fatal(err)
		}
	}
	for range failures {
		m.units.Retries.CountFailure(step.Step())
	}
	m.units.Retries.Began(step.Step())
	return step
}

// journal returns the text of the journal on the node; empty if none was written.
func (m *machine) journal() string {
	m.t.Helper()
	node, err := m.client.CoreV1().Nodes().Get(m.t.Context(), "gpu-1", metav1.GetOptions{})
	if err != nil {
		m.t.Fatal(err)
	}
	return node.Annotations[config.AnnotationJournal]
}

// A job of systemd is done when the unit's process has begun. If that ends then, users read it, once, until the unit runs.
func TestAUnitIsFollowedAfterItWasStarted(t *testing.T) {
	t.Parallel()
	type at struct {
		after time.Duration
		state string
		down  bool // the condition says that it does not run
	}
	for name, row := range map[string]struct {
		states []at
		events int
	}{
		"it runs":                                 {[]at{{units.Retry, "active", false}, {10 * time.Minute, "active", false}, {time.Hour, "failed", false}}, 0},
		"it fails at once":                        {[]at{{units.Retry, "failed", true}, {time.Hour, "failed", true}}, 1},
		"systemd starts it again and again":       {[]at{{units.Retry, "activating", false}, {time.Hour, "activating", true}}, 1},
		"a user mends it":                         {[]at{{units.Retry, "failed", true}, {time.Hour, "active", false}}, 1},
		"it fails in the time that units have":    {[]at{{units.Retry, "active", false}, {units.Retry, "failed", true}}, 1},
		"it is starting, and runs in the end":     {[]at{{units.Retry, "activating", false}, {units.Retry, "active", false}}, 0},
		"the agent asks again after a while only": {[]at{{units.Retry, "failed", true}, {time.Second, "active", true}}, 1},
	} {
		m := newMachine(t)
		if err := m.units.Start(t.Context(), in(m, plan.StartUnits, false)); err != nil {
			t.Fatal(err)
		}
		m.seen.Journal = nil
		for _, s := range row.states {
			m.clock.Step(s.after)
			m.states = map[string]string{dcgm: s.state}
			m.seen.Started = m.units.ObserveStarted(t.Context(), m.seen)
			m.units.ReportNotRunning(m.seen)
			if down := m.units.Down(); strings.Contains(down, dcgm) != s.down {
				t.Errorf("%s: %s at %s, and the condition says %q", name, s.state, m.clock.Since(now), down)
			}
		}
		if n := len(m.events.Events); n != row.events {
			t.Errorf("%s: %d Events, want %d", name, n, row.events)
		}
	}
}

// Promise 15: systemd is asked for the units of the settings alone, whatever a journal names, and not again and again while it does not answer.
func TestWhichUnitsOfTheHostAreObserved(t *testing.T) {
	t.Parallel()
	taken := []plan.Taken{{}}
	running := plan.Unit{Name: dcgm, Active: true}
	for name, row := range map[string]struct {
		states  map[string]string
		silent  error
		stopped []string
		taken   []plan.Taken
		units   []plan.Unit
		dropped []string
	}{
		"nothing is taken":                     {map[string]string{dcgm: "active"}, nil, nil, nil, nil, nil},
		"one runs":                             {map[string]string{dcgm: "active", "ssh.service": "active"}, nil, nil, taken, []plan.Unit{running}, nil},
		"one is ending, and one starting":      {map[string]string{dcgm: "deactivating", other: "activating"}, nil, nil, taken, []plan.Unit{{Name: dcgm, Active: true, Ending: true}, {Name: other, Active: true, Starting: true}}, nil},
		"one has failed":                       {map[string]string{dcgm: "failed"}, nil, nil, taken, []plan.Unit{{Name: dcgm}}, nil},
		"without systemd":                      {nil, nil, nil, taken, nil, nil},
		"stopped":                              {map[string]string{dcgm: "inactive"}, nil, []string{dcgm}, nil, []plan.Unit{{Name: dcgm}}, nil},
		"stopped, and systemd does not answer": {map[string]string{}, errors.New("silent"), []string{dcgm}, nil, []plan.Unit{{Name: dcgm}}, nil},
		"stopped, and masked since":            {map[string]string{}, nil, []string{dcgm}, nil, nil, []string{dcgm}},
		"stopped, and not of the settings":     {map[string]string{"ssh.service": "inactive"}, nil, []string{"ssh.service"}, nil, nil, []string{"ssh.service"}},
	} {
		m := newMachine(t)
		m.states, m.silent, m.seen.Journal.Stopped = row.states, row.silent, row.stopped
		m.units.Observe(t.Context(), m.seen, row.taken)
		if diff := cmp.Diff(row.units, m.seen.Units, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		for _, unit := range row.dropped {
			if m.seen.Record.Dropped[unit] == "" {
				t.Errorf("%s: %s is not reported as dropped", name, unit)
			}
		}
		if len(m.seen.Record.Dropped) != len(row.dropped) || len(m.asked) > 0 && !cmp.Equal(m.asked, []string{dcgm, other}) {
			t.Errorf("%s: %v are dropped; systemd was asked for %v", name, m.seen.Record.Dropped, m.asked)
		}
	}
	m := newMachine(t)
	m.states, m.silent, m.seen.Journal = map[string]string{}, errors.New("silent"), nil
	for _, row := range []struct {
		after time.Duration
		asked bool
	}{{0, true}, {time.Minute, false}, {5 * time.Minute, true}} {
		m.clock.Step(row.after)
		m.asked = nil
		if m.units.Observe(t.Context(), m.seen, taken); m.asked != nil != row.asked {
			t.Errorf("after %s a silent systemd is asked: %t", m.clock.Since(now), m.asked != nil)
		}
	}
}

// Promises 8 and 15: what the host's record says that an agent has stopped is started without a journal, as far as the settings name it and it does
// not run.
func TestWhatIsPendingOnTheHostWithoutAJournal(t *testing.T) {
	t.Parallel()
	pending := journal.Host{Stopped: []string{dcgm, "ssh.service"}, Persistent: []string{"GPU-a", "GPU-b", "GPU-c"}}
	gpus := []nvml.GPU{{UUID: "GPU-a"}, {UUID: "GPU-b", Persistent: true}, {UUID: "GPU-c", Lost: true}}
	for name, row := range map[string]struct {
		states  map[string]string
		silent  error
		journal *journal.Journal
		ends    bool // the agent was about to end the change
		strange bool // the node has a journal that is not ours
		want    state.ToRestore
	}{
		"it does not run":             {map[string]string{dcgm: "inactive"}, nil, nil, false, false, state.ToRestore{Stopped: []string{dcgm}, Persistent: []nvml.UUID{"GPU-a"}}},
		"it runs":                     {map[string]string{dcgm: "active"}, nil, nil, false, false, state.ToRestore{Persistent: []nvml.UUID{"GPU-a"}}},
		"it is masked":                {map[string]string{}, nil, nil, false, false, state.ToRestore{Persistent: []nvml.UUID{"GPU-a"}}},
		"there is no systemd":         {nil, nil, nil, false, false, state.ToRestore{Persistent: []nvml.UUID{"GPU-a"}}},
		"systemd does not answer":     {map[string]string{}, errors.New("silent"), nil, false, false, state.ToRestore{Stopped: []string{dcgm}, Persistent: []nvml.UUID{"GPU-a"}}},
		"a journal is there":          {map[string]string{dcgm: "inactive"}, nil, &journal.Journal{}, false, false, state.ToRestore{}},
		"all was given back":          {map[string]string{dcgm: "inactive"}, nil, nil, true, false, state.ToRestore{}},
		"and a strange journal stays": {map[string]string{dcgm: "inactive"}, nil, nil, true, true, state.ToRestore{Stopped: []string{dcgm}, Persistent: []nvml.UUID{"GPU-a"}}},
	} {
		m := newMachine(t)
		m.states, m.silent, m.seen.Journal, m.seen.GPUs = row.states, row.silent, row.journal, gpus
		m.seen.Record.StrangeJournal = row.strange
		m.units.Journal.Record.Keep(t.Context(), journal.Record{Host: pending, Ends: row.ends}, now)
		m.units.ObserveToRestore(t.Context(), m.seen)
		if diff := cmp.Diff(row.want, m.seen.Record.Pending); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if text := m.units.Dropped(m.seen); strings.Contains(text, "ssh.service") != (row.want.Persistent != nil) {
			t.Errorf("%s: the condition says %q", name, text)
		}
	}
}
