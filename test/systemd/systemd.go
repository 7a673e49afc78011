// Package systemd is a host's system bus for tests: a real dbus-daemon, with a simulated logind and systemd that tests
// control. It needs no root.
//
// The two follow systemd's documentation of org.freedesktop.login1(5) and org.freedesktop.systemd1(5) as far as this
// repository's programs and NVIDIA's mig-manager use them; other methods are answered as unknown. Nothing is rebooted and
// no unit runs: both are noted.
package systemd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
)

// current is the version of systemd that is simulated where Options do not say otherwise.
const current = 257

// Options of a host. The zero value has a logind and a systemd without units.
type Options struct {
	// Dir is where the bus keeps its socket, settings and log; it is made where it is missing. Its path must be short.
	// The socket has the name it has on a host, so "<root>/run/dbus" is a bus for programs that look for the host
	// below a root, such as mig-manager by HOST_ROOT_MOUNT. Empty means a temporary one, which Close removes.
	Dir string
	// Version of systemd, which is what its answers differ by: 0 is 257. From 257 on, locks of mode "block" stop
	// root's reboot too.
	Version int
	// NoLogind and NoSystemd omit one of them: no one owns its name.
	NoLogind, NoSystemd bool
	// InhibitDelayMax is how long a reboot waits for locks of mode "delay". 0 is 5 s, logind's own default.
	InhibitDelayMax time.Duration
	// Units by name, such as "kubelet.service".
	Units map[string]Unit
	// OnUnit is called when a unit's processes have started or ended by a job, before anybody learns of the job's end. It must
	// not call the Host.
	OnUnit func(unit string, running bool)
	// Mute keeps the systemd from reporting that a job has ended.
	Mute bool
}

// Call is a method call that the logind or the systemd received.
type Call struct {
	Method string // with its interface: Inhibit, StopUnit and the like
	Args   []any
}

// String is for messages of tests: "org.freedesktop.login1.Manager.Reboot(false)".
func (c Call) String() string {
	args := make([]string, len(c.Args))
	for i, arg := range c.Args {
		args[i] = fmt.Sprintf("%#v", arg)
	}
	return c.Method + "(" + strings.Join(args, ", ") + ")"
}

// Fault is what a method does instead of its work.
type Fault struct {
	Error   string // name of a D-Bus error, such as AccessDenied
	Message string
	Silent  bool // no answer at all
}

// Errors of polkit, for Fault.
const (
	AccessDenied    = "org.freedesktop.DBus.Error.AccessDenied"
	PasswordNeeded  = "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired"
	unknownMethod   = "org.freedesktop.DBus.Error.UnknownMethod"
	invalidArgument = "org.freedesktop.DBus.Error.InvalidArgs"
)

// Host is a system bus that runs. Its methods may be called from several goroutines.
type Host struct {
	options   Options
	dir       string
	temporary bool

	running  sync.Mutex // held while the bus is started or stopped
	bus      *bus
	services []*service

	mu      sync.Mutex
	changed chan struct{} // closed and replaced with every change of what follows
	calls   []Call
	faults  map[string]Fault
	logind  logind
	systemd units
}

// Start runs a host until Close. The error matches ErrNoDaemon if this machine has no dbus-daemon.
func Start(ctx context.Context, o Options) (*Host, error) {
	if o.Version == 0 {
		o.Version = current
	}
	if o.InhibitDelayMax == 0 {
		o.InhibitDelayMax = 5 * time.Second
	}
	h := &Host{options: o, dir: o.Dir, changed: make(chan struct{}), faults: map[string]Fault{}}
	h.logind.canReboot = "yes"
	h.systemd.jobs = map[uint32]job{}
	h.systemd.units = map[string]Unit{}
	for name, unit := range o.Units {
		h.systemd.units[name] = unit.complete()
	}
	if h.dir == "" {
		dir, err := os.MkdirTemp("", "systemd-")
		if err != nil {
			return nil, fmt.Errorf("starting a system bus: %w", err)
		}
		h.dir, h.temporary = dir, true
	} else if err := os.MkdirAll(h.dir, 0o750); err != nil {
		return nil, fmt.Errorf("starting a system bus: %w", err)
	}
	if err := h.start(ctx); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return h, nil
}

// Address of the bus, as D-Bus writes it: the value of DBUS_SYSTEM_BUS_ADDRESS for programs that are to use it.
func (h *Host) Address() string { return address(h.dir) }

// Close ends everything. It may be called more than once.
func (h *Host) Close() error {
	h.stop()
	h.mu.Lock()
	h.forget()
	h.mu.Unlock()
	if !h.temporary {
		return nil
	}
	return os.RemoveAll(h.dir)
}

// RestartBus ends the bus with all connections to it, and starts it again at the same address. What logind and systemd
// know stays.
func (h *Host) RestartBus(ctx context.Context) error {
	h.stop()
	return h.start(ctx)
}

// StopBus ends the bus with all connections to it. Its socket stays, and no one listens on it.
func (h *Host) StopBus() { h.stop() }

func (h *Host) start(ctx context.Context) error {
	h.running.Lock()
	defer h.running.Unlock()
	b, err := startBus(ctx, h.dir)
	if err != nil {
		return err
	}
	h.bus = b
	for _, s := range []struct {
		name   string
		away   bool
		answer func(request) *reply
		emits  *emitter
	}{
		{"org.freedesktop.login1", h.options.NoLogind, h.logindAnswers, &h.logind.emitter},
		{"org.freedesktop.systemd1", h.options.NoSystemd, h.systemdAnswers, &h.systemd.emitter},
	} {
		if s.away {
			continue
		}
		running, err := serve(ctx, h.Address(), s.name, func(r request) *reply { return h.answer(r, s.answer) })
		if err != nil {
			return err
		}
		h.services = append(h.services, running)
		s.emits.to(running)
	}
	return nil
}

func (h *Host) stop() {
	h.running.Lock()
	defer h.running.Unlock()
	h.logind.to(nil)
	h.systemd.to(nil)
	for _, s := range h.services {
		s.stop()
	}
	h.services = nil
	if h.bus != nil {
		h.bus.stop()
		h.bus = nil
	}
}

// answer notes a call, and has it answered unless it is to fail.
func (h *Host) answer(r request, answer func(request) *reply) *reply {
	h.mu.Lock()
	h.calls = append(h.calls, Call{Method: r.method, Args: r.args})
	fault, faulty := h.faults[r.method]
	h.change()
	h.mu.Unlock()
	switch {
	case !faulty:
		return answer(r)
	case fault.Silent:
		return nil
	default:
		return &reply{err: dbus.NewError(fault.Error, []any{fault.Message})}
	}
}

// Calls are all that were received, in order.
func (h *Host) Calls() []Call {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.calls)
}

// Fail gives a method, named with its interface, a fault.
func (h *Host) Fail(method string, f Fault) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults[method] = f
	h.change()
}

// Mend removes all faults.
func (h *Host) Mend() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.faults)
	h.change()
}

// Wait returns when holds is true. It calls holds now and after each change: a call, a lock, a reboot, a unit, a fault.
// The error is ctx's, with the calls so far.
func (h *Host) Wait(ctx context.Context, holds func() bool) error {
	for {
		h.mu.Lock()
		changed := h.changed
		h.mu.Unlock()
		if holds() {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("waiting for the host after %v: %w", h.Calls(), ctx.Err())
		}
	}
}

// change wakes all waiters. The caller holds mu.
func (h *Host) change() {
	close(h.changed)
	h.changed = make(chan struct{})
}

// emitter sends signals by the service of the moment, or nowhere. The zero value sends nowhere.
type emitter struct {
	mu sync.Mutex
	by *service
}

func (e *emitter) to(s *service) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.by = s
}

func (e *emitter) emit(path dbus.ObjectPath, name string, args ...any) {
	e.mu.Lock()
	by := e.by
	e.mu.Unlock()
	by.emit(path, name, args...)
}
