package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	systemd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"

	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Errors of asking systemd.
var (
	// ErrNoSystemd means that there is no systemd to ask: no system bus, or no systemd on it. That is normal on Talos and
	// on machines that do not boot by systemd, and no fault: such a host has no units.
	ErrNoSystemd = errors.New("this host has no systemd")
	// ErrSystemdSilent means that the bus or systemd did not answer in time. Systemd may still have begun the job.
	ErrSystemdSilent = errors.New("systemd does not answer")
	// ErrSystemdRefuses means that the host's security policy does not allow this process's request.
	ErrSystemdRefuses = errors.New("systemd refuses")
	// ErrJobRunning means that a job has begun, and that Stop or Start waits for its end no longer: the time was up, or the bus hung up. The job
	// continues, and States has its result later.
	ErrJobRunning = errors.New("systemd's job still runs")
)

// JobError is a job that did not stop or start its unit.
type JobError struct {
	Unit string
	Verb string // "stop" or "start"
	// Result is systemd's word for the end of the job, such as "failed". If the agent did not get it, it is the unit's state after the job. If the
	// job did not begin, it is systemd's message.
	Result string
}

func (e *JobError) Error() string {
	because := map[string]string{
		"canceled":   ": an opposite job replaced it",
		"timeout":    ": it took longer than its JobTimeoutSec allows",
		"dependency": ": a unit that it needs did not start",
		"skipped":    ": it did not fit the unit's state",
	}[e.Result]
	return fmt.Sprintf(`%s %s: systemd says %q%s; "systemctl status %s" on the host says more`,
		gerunds[e.Verb], e.Unit, e.Result, because, e.Unit)
}

var gerunds = map[string]string{"stop": "stopping", "start": "starting"}

var systemd1 = peer{
	name: "systemd", bus: "org.freedesktop.systemd1", none: ErrNoSystemd, silent: ErrSystemdSilent, refuses: ErrSystemdRefuses,
}

// Units are the units of the host's systemd, over the system bus. The zero value is ready for use, by several goroutines
// at a time.
//
// Like Logind it keeps no connection: each call makes its own and closes it. They are go-systemd's, over this package's lines: its own
// dialers do not bound what the bus does with them.
type Units struct {
	// Address of the system bus, as Logind has it.
	Address string
	// Patience bounds each answer, in addition to the context, but not the resulting job. 0 means 25 s, as with systemd's own tools.
	Patience time.Duration
	// Pause between two observations whether a job has ended, which systemd reports besides. 0 means a second.
	Pause time.Duration

	connecting aside.Lane
}

// States gives the state of each unit: "active", "reloading", "inactive", "failed", "activating" or "deactivating". It leaves out units
// that the host does not have, and those that systemd would not start again, being masked or broken: the agent must not stop these.
// The error matches ErrNoSystemd, ErrSystemdSilent or ErrSystemdRefuses.
func (u *Units) States(ctx context.Context, names []string) (map[string]string, error) {
	if len(names) == 0 {
		return map[string]string{}, nil
	}
	states, err := u.states(ctx, names)
	if err != nil {
		return nil, fmt.Errorf("querying %s: %w", strings.Join(names, ", "), err)
	}
	return states, nil
}

func (u *Units) states(ctx context.Context, names []string) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, u.patience())
	defer cancel()
	address := busAddress(u.Address)
	bus, err := u.connect(ctx, address)
	if err != nil {
		return nil, systemd1.failure(ctx, address, err)
	}
	defer bus.hangUp()
	units, err := bus.ListUnitsByNamesContext(context.WithoutCancel(ctx), names) // the end of ctx ends the lines
	if err != nil {
		return nil, systemd1.failure(ctx, address, err)
	}
	// In the order of the question, each under the first of its names, if it has several. Systemd leaves out texts that cannot be
	// names (method_list_units_by_names in its src/core/dbus-manager.c).
	if len(units) != len(names) {
		return nil, fmt.Errorf("systemd knows only %d of these as names of units", len(units))
	}
	states := map[string]string{}
	for i, unit := range units {
		if unit.LoadState == "loaded" {
			states[names[i]] = unit.ActiveState
		}
	}
	return states, nil
}

// Stop begins to stop the unit, and waits for its end as long as ctx lasts. It is no error if the unit is not active.
// The error is a JobError, or matches ErrJobRunning or those of States.
//
// It may be called again while the job runs: systemd has one job for both then.
func (u *Units) Stop(ctx context.Context, name string) error {
	return u.run(ctx, "stop", name, (*systemd.Conn).StopUnitContext)
}

// Start is the opposite of Stop. It is no error if the unit is active; one that is about to stop comes back. A unit that the host does not have is a
// JobError.
func (u *Units) Start(ctx context.Context, name string) error {
	return u.run(ctx, "start", name, (*systemd.Conn).StartUnitContext)
}

func (u *Units) patience() time.Duration { return cmp.Or(u.Patience, busPatience) }

func (u *Units) run(ctx context.Context, verb, name string, begin beginning) error {
	err := u.job(ctx, verb, name, begin)
	if turnedDown, ok := errors.AsType[*JobError](err); ok {
		return turnedDown // its message names the job
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", gerunds[verb], name, err)
	}
	return nil
}

// beginning is a method of go-systemd that makes systemd begin a job. It gives the job's number, and later systemd's word for its end.
type beginning func(c *systemd.Conn, ctx context.Context, name, mode string, word chan<- string) (int, error)

// job makes systemd begin a job and waits for its end. Patience is for each answer.
func (u *Units) job(ctx context.Context, verb, name string, begin beginning) error {
	starting, cancel := context.WithTimeout(ctx, u.patience())
	defer cancel()
	address := busAddress(u.Address)
	bus, err := u.connect(starting, address)
	if err != nil {
		return systemd1.failure(starting, address, err)
	}
	defer bus.hangUp()
	words := make(chan string, 1)
	number, err := begin(bus.Conn, context.WithoutCancel(ctx), name, "replace", words) // the end of starting ends the lines
	said, isAnswer := errors.AsType[dbus.Error](err)
	switch {
	case isAnswer && verb == "stop" && said.Name == "org.freedesktop.systemd1.NoSuchUnit":
		return nil // a unit that does not exist is not active
	case isAnswer && systemd1.meaning(said.Name) == nil:
		return &JobError{Unit: name, Verb: verb, Result: said.Error()}
	case err != nil:
		return systemd1.failure(starting, address, err)
	}
	bus.endWith(ctx)
	e, err := u.awaitJob(ctx, bus, name, number, words)
	switch {
	case err != nil:
		return err
	case e.word == "done", e.word == "" && e.reached(verb):
		return nil
	default:
		return &JobError{Unit: name, Verb: verb, Result: cmp.Or(e.word, e.state)}
	}
}

// jobEnd is the end of a job.
type jobEnd struct {
	word  string // systemd's for it; empty if the agent did not get it
	state string // of the unit
}

// reached reports whether the unit has the state that the job was for.
func (e jobEnd) reached(verb string) bool {
	switch e.state {
	case "active", "reloading":
		return verb == "start"
	case "inactive", "failed":
		return verb == "stop"
	default:
		return false
	}
}

const jobPause = time.Second

// awaitJob waits until systemd has the job no more, which the unit's state shows. The signal of the job's end may be lost, and any program on the bus
// can send one. So the signal only says when to read the state, and has the word for the end.
func (u *Units) awaitJob(ctx context.Context, bus *unitBus, name string, number int, words <-chan string) (jobEnd, error) {
	tick := time.NewTicker(cmp.Or(u.Pause, jobPause))
	defer tick.Stop()
	var e jobEnd
	gone, signalsLost := bus.calls.Context().Done(), bus.signals.Context().Done()
	for over := false; ; {
		select {
		case e.word = <-words:
			words = nil
		case <-signalsLost: // only polls find the end now
			signalsLost = nil
			tick.Reset(min(cmp.Or(u.Pause, jobPause), 50*time.Millisecond))
		case <-tick.C:
		case <-ctx.Done():
			return e, stillRunning(ctx)
		case <-gone:
			return e, stillRunning(ctx)
		}
		unit, err := u.read(ctx, bus, name)
		if err != nil { // the cases above say the cause
			continue
		}
		if int(unit.JobId) == number {
			e.word = "" // another program sent it
			continue
		}
		if e.state = unit.ActiveState; e.word != "" || over || signalsLost == nil {
			return e, nil
		}
		over = true // the signal with its word may be on the way
	}
}

// stillRunning gives the error of a wait for a job that ctx has ended.
func stillRunning(ctx context.Context) error {
	if ctx.Err() != nil {
		return fmt.Errorf(`%w (%w): "systemctl list-jobs" on the host shows it`, ErrJobRunning, ctx.Err())
	}
	return fmt.Errorf(`%w, but the bus has hung up: "systemctl list-jobs" on the host shows it`, ErrJobRunning)
}

// read reads the unit's state.
func (u *Units) read(ctx context.Context, bus *unitBus, name string) (systemd.UnitStatus, error) {
	call, cancel := context.WithTimeout(ctx, u.patience())
	defer cancel()
	units, err := bus.ListUnitsByNamesContext(call, []string{name})
	if err != nil {
		return systemd.UnitStatus{}, err
	}
	if len(units) != 1 {
		return systemd.UnitStatus{}, fmt.Errorf("systemd reports %d units", len(units))
	}
	return units[0], nil
}

// unitBus is a connection of go-systemd's, over two lines.
type unitBus struct {
	*systemd.Conn
	calls, signals *line
}

// connect dials, and ends as dial does when ctx ends.
func (u *Units) connect(ctx context.Context, address string) (*unitBus, error) {
	// The kernel starts systemd. The bus must not try to, whatever its service files say.
	noAutoStart := dbus.WithOutgoingInterceptor(func(m *dbus.Message) { m.Flags |= dbus.FlagNoAutoStart })
	calls, err := dial(ctx, &u.connecting, address, noAutoStart)
	if err != nil {
		return nil, err
	}
	signals, err := dial(ctx, &u.connecting, address, noAutoStart, dbus.WithSignalHandler(&listeners{}))
	if err != nil {
		calls.hangUp()
		return nil, err
	}
	lines := []*line{calls, signals}
	conn, err := systemd.NewConnection(func() (*dbus.Conn, error) {
		next := lines[0]
		lines = lines[1:]
		return next.Conn, nil
	})
	if err != nil {
		calls.hangUp()
		signals.hangUp()
		return nil, err
	}
	return &unitBus{Conn: conn, calls: calls, signals: signals}, nil
}

// hangUp replaces Close, which may end in the middle of a message.
func (b *unitBus) hangUp() {
	b.calls.hangUp()
	b.signals.hangUp()
}

// endWith makes it end with ctx instead of its first context.
func (b *unitBus) endWith(ctx context.Context) {
	b.calls.endWith(ctx)
	b.signals.endWith(ctx)
}

// listeners receive signals as long as the line stands. With godbus's own (v5.2.2), a caller after the line's end waits for ever: one goroutine of
// go-systemd for each bus that hangs up early. And they keep all signals that no caller reads.
type listeners struct {
	mu          sync.Mutex
	over        bool
	subscribers []chan<- *dbus.Signal
}

// DeliverSignal implements dbus.SignalHandler.
func (l *listeners) DeliverSignal(_, _ string, signal *dbus.Signal) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, ch := range l.subscribers {
		select {
		case ch <- signal:
		default: // a job's end is seen without
		}
	}
}

// AddSignal implements dbus.SignalRegistrar.
func (l *listeners) AddSignal(ch chan<- *dbus.Signal) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		close(ch)
		return
	}
	l.subscribers = append(l.subscribers, ch)
}

// RemoveSignal implements dbus.SignalRegistrar.
func (l *listeners) RemoveSignal(ch chan<- *dbus.Signal) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.subscribers = slices.DeleteFunc(l.subscribers, func(c chan<- *dbus.Signal) bool { return c == ch })
}

// Terminate implements dbus.Terminator.
func (l *listeners) Terminate() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, ch := range l.subscribers {
		close(ch)
	}
	l.over, l.subscribers = true, nil
}
