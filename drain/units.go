package drain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	systemd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"
)

// What may come of asking systemd.
var (
	// ErrNoSystemd means that there is no systemd to ask: no system bus, or no systemd on it. That is normal on Talos and
	// on machines that do not boot by systemd, and no fault: such a host has no units.
	ErrNoSystemd = errors.New("this host has no systemd")
	// ErrSystemdSilent means that the bus or systemd did not answer in time. A job that was asked for may have begun.
	ErrSystemdSilent = errors.New("systemd does not answer")
	// ErrSystemdRefuses means that the host's security policy does not let this process do what it asked for.
	ErrSystemdRefuses = errors.New("systemd refuses")
	// ErrJobRunning means that a job has begun, and that nobody waits for its end any more: the time was up, or the bus
	// hung up. It goes on all the same, and States tells later what came of it.
	ErrJobRunning = errors.New("the job of systemd still runs")
)

// JobError is a job that did not do what it was to do.
type JobError struct {
	Unit string
	Verb string // "stop" or "start"
	// Result is systemd's word for how the job ended, such as "failed"; or, if it did not even begin, the sentence by
	// which systemd turned it down.
	Result string
}

func (e *JobError) Error() string {
	because := map[string]string{
		"canceled":   ": a job for the contrary took its place",
		"timeout":    ": it took longer than its JobTimeoutSec allows",
		"dependency": ": a unit that it needs did not come up",
		"skipped":    ": it did not fit the state of the unit",
	}[e.Result]
	return fmt.Sprintf(`%s %s: systemd says %q%s; "systemctl status %s" on the host tells more`,
		gerunds[e.Verb], e.Unit, e.Result, because, e.Unit)
}

const (
	systemdPath    = dbus.ObjectPath("/org/freedesktop/systemd1")
	systemdManager = "org.freedesktop.systemd1.Manager"
	jobRemoved     = "JobRemoved"
)

var gerunds = map[string]string{"stop": "stopping", "start": "starting"}

var systemd1 = peer{
	name: "systemd", bus: "org.freedesktop.systemd1", none: ErrNoSystemd, silent: ErrSystemdSilent, refuses: ErrSystemdRefuses,
}

// Units are the units of the host's systemd, over the system bus. The zero value is ready for use, by several goroutines
// at a time.
//
// Like Logind it keeps no connection: each call makes its own and closes it. Of go-systemd (v22.7.0) it takes the form of
// the answers, and not Conn: NewConnection asks the bus for its signals without a context, so a bus that falls silent
// there holds the caller for ever; one that hangs up there leaves a goroutine behind for ever; and nobody learns of an
// error there, so that no job ever seems to end. Nor does Conn tell that the bus has hung up while a job runs.
type Units struct {
	// Address of the system bus, as Logind has it.
	Address string
	// Patience bounds each answer, beside the context, but not the job that comes of it. 0 means 25 s, as with systemd's
	// own tools.
	Patience time.Duration
}

// States tells how each unit is: "active", "reloading", "inactive", "failed", "activating" or "deactivating". Units that
// the host does not have are left out, and so are those that it may not start, being masked or broken: what cannot be
// started again is not to be stopped. The error matches ErrNoSystemd, ErrSystemdSilent or ErrSystemdRefuses.
func (u *Units) States(ctx context.Context, names []string) (map[string]string, error) {
	if len(names) == 0 {
		return map[string]string{}, nil
	}
	states, err := u.states(ctx, names)
	if err != nil {
		return nil, fmt.Errorf("asking how %s are: %w", strings.Join(names, ", "), err)
	}
	return states, nil
}

func (u *Units) states(ctx context.Context, names []string) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(u.Patience, busPatience))
	defer cancel()
	address := busAddress(u.Address)
	bus, err := dial(ctx, address)
	if err != nil {
		return nil, systemd1.failure(ctx, address, err)
	}
	defer bus.hangUp()
	var units []systemd.UnitStatus
	if err := ask(bus, "ListUnitsByNames", names).Store(&units); err != nil {
		return nil, systemd1.failure(ctx, address, err)
	}
	// In the order of the question, each under the first of its names, if it has several. What cannot be a name is passed
	// over (method_list_units_by_names in systemd's src/core/dbus-manager.c).
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

// Stop begins to stop the unit, and waits for its end as long as ctx lasts; stopping what is not active is not an error.
// The error is a JobError, or matches ErrJobRunning or those of States.
//
// It may be called again while the job runs: systemd has one job for both then.
func (u *Units) Stop(ctx context.Context, name string) error {
	return u.run(ctx, "stop", "StopUnit", name)
}

// Start is the contrary of Stop; starting what is active is not an error, and what is about to stop comes back. A unit
// that the host does not have is a JobError.
func (u *Units) Start(ctx context.Context, name string) error {
	return u.run(ctx, "start", "StartUnit", name)
}

func (u *Units) run(ctx context.Context, verb, method, name string) error {
	err := u.job(ctx, verb, method, name)
	if turnedDown, ok := errors.AsType[*JobError](err); ok {
		return turnedDown // which says itself what was to be done
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", gerunds[verb], name, err)
	}
	return nil
}

// job has systemd begin a job and waits for its end. Patience is for the beginning only.
func (u *Units) job(ctx context.Context, verb, method, name string) error {
	beginning, cancel := context.WithTimeout(ctx, cmp.Or(u.Patience, busPatience))
	defer cancel()
	address := busAddress(u.Address)
	bus, err := dial(beginning, address)
	if err != nil {
		return systemd1.failure(beginning, address, err)
	}
	defer bus.hangUp()
	// Systemd tells whoever asked for a job how it ended, and that may come right behind its answer.
	ended := make(chan *dbus.Signal, 16) // more of them wait in godbus
	bus.Signal(ended)
	err = bus.AddMatchSignal(dbus.WithMatchSender(systemd1.bus), dbus.WithMatchObjectPath(systemdPath),
		dbus.WithMatchInterface(systemdManager), dbus.WithMatchMember(jobRemoved))
	if err != nil {
		return systemd1.failure(beginning, address, err)
	}
	var job dbus.ObjectPath
	err = ask(bus, method, name, "replace").Store(&job)
	said, isAnswer := errors.AsType[dbus.Error](err)
	switch {
	case isAnswer && verb == "stop" && said.Name == "org.freedesktop.systemd1.NoSuchUnit":
		return nil // what is not there is not active
	case isAnswer && systemd1.meaning(said.Name) == nil:
		return &JobError{Unit: name, Verb: verb, Result: said.Error()}
	case err != nil:
		return systemd1.failure(beginning, address, err)
	}
	bus.takeTime()
	result, err := endOf(ctx, job, ended)
	if err != nil {
		return err
	}
	if result != "done" {
		return &JobError{Unit: name, Verb: verb, Result: result}
	}
	return nil
}

// ask calls a method of systemd's manager. The end of the context that was dialled with ends it.
func ask(bus *line, method string, args ...any) *dbus.Call {
	manager := bus.Object(systemd1.bus, systemdPath)
	// Nobody but the kernel starts systemd, whatever the bus has been told.
	return <-manager.Go(systemdManager+"."+method, dbus.FlagNoAutoStart, nil, args...).Done
}

// endOf waits until a job has ended, and is systemd's word for how. The channel is closed when the bus has hung up.
func endOf(ctx context.Context, job dbus.ObjectPath, ended <-chan *dbus.Signal) (result string, err error) {
	for {
		select {
		case signal, ok := <-ended:
			if !ok {
				return "", fmt.Errorf(`%w, but the bus has hung up: "systemctl list-jobs" on the host shows it`, ErrJobRunning)
			}
			var id uint32
			var path dbus.ObjectPath
			var unit string
			err := dbus.Store(signal.Body, &id, &path, &unit, &result)
			if err == nil && signal.Name == systemdManager+"."+jobRemoved && path == job {
				return result, nil
			}
		case <-ctx.Done():
			return "", fmt.Errorf(`%w (%w): "systemctl list-jobs" on the host shows it`, ErrJobRunning, ctx.Err())
		}
	}
}
