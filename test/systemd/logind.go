package systemd

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/godbus/dbus/v5"
)

const (
	loginPath    = "/org/freedesktop/login1"
	loginManager = "org.freedesktop.login1.Manager"

	delay     = "delay"
	block     = "block"
	blockWeak = "block-weak"
)

// Methods of logind, for Fail and for reading Calls.
const (
	Inhibit   = loginManager + ".Inhibit"
	Reboot    = loginManager + ".Reboot"
	CanReboot = loginManager + ".CanReboot"
)

// versionOfStrongLocks is the first systemd with weak locks. From it on, locks of mode "block" bind root as well.
const versionOfStrongLocks = 257

var (
	errInProgress = dbus.Error{Name: loginError("OperationInProgress"), Body: []any{"The operation inhibition has been requested for is already running"}}
	errBlocked    = dbus.Error{Name: loginError("BlockedByInhibitorLock"), Body: []any{"Operation denied due to active block inhibitor"}}
)

func loginError(name string) string { return "org.freedesktop.login1." + name }

// Inhibitor is a lock that someone holds.
type Inhibitor struct {
	What string // such as "shutdown:sleep"
	Who  string
	Why  string
	Mode string // "delay", "block" or "block-weak"
}

// logind is what the simulated logind knows. Host.mu guards all but the emitter.
type logind struct {
	emitter
	held      []*held
	canReboot string
	going     bool        // a shutdown has begun
	down      bool        // and is complete
	deadline  *time.Timer // of the locks that delay it
	reboots   int
}

// held is a lock; it is gone when the other end of its pipe is closed.
type held struct {
	Inhibitor
	end *os.File
}

// Inhibitors are the locks that are held now, in the order they were taken.
func (h *Host) Inhibitors() []Inhibitor {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]Inhibitor, len(h.logind.held))
	for i, lock := range h.logind.held {
		out[i] = lock.Inhibitor
	}
	return out
}

// Hold is another program on the host that takes a lock, until release is called. The error is logind's, a dbus.Error, or
// says what is wrong with the lock.
func (h *Host) Hold(i Inhibitor) (release func(), err error) {
	if err := h.valid(i); err != nil {
		return nil, fmt.Errorf("taking a lock: %w", err)
	}
	theirs, err := h.lock(i)
	if err != nil {
		return nil, fmt.Errorf("taking a lock: %w", err)
	}
	return func() { _ = theirs.Close() }, nil
}

// Reboots is how often the host went down. A reboot that still waits for locks does not count yet.
func (h *Host) Reboots() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.logind.reboots
}

// BeginReboot is an administrator's "systemctl reboot". The error is logind's, a dbus.Error.
func (h *Host) BeginReboot() error { return h.reboot() }

// Boot starts the host again: no shutdown is under way, and no one holds a lock. Units do not change.
func (h *Host) Boot() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.forget()
}

// SetCanReboot sets logind's answer to CanReboot, "yes" by default: "no", "na", "challenge", "inhibited",
// "inhibitor-blocked" or "challenge-inhibitor-blocked".
func (h *Host) SetCanReboot(answer string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.logind.canReboot = answer
	h.change()
}

// forget drops all locks and a shutdown that is under way. The caller holds mu.
func (h *Host) forget() {
	for _, lock := range h.logind.held {
		_ = lock.end.Close() // which ends the goroutine that watches it
	}
	h.logind.held, h.logind.going, h.logind.down = nil, false, false
	if h.logind.deadline != nil {
		h.logind.deadline.Stop()
	}
	h.change()
}

func (h *Host) logindAnswers(r request) *reply {
	switch r.method {
	case Inhibit:
		return h.inhibit(r.args)
	case CanReboot:
		h.mu.Lock()
		defer h.mu.Unlock()
		return done(h.logind.canReboot)
	case Reboot:
		if err := h.reboot(); err != nil {
			return failed(err)
		}
		return done()
	case propertyGet, propertyGetAll:
		return property(r, h.loginProperties())
	default:
		return refuse(unknownMethod, "Unknown method %s.", r.method)
	}
}

func (h *Host) loginProperties() map[string]map[string]any {
	h.mu.Lock()
	defer h.mu.Unlock()
	properties := map[string]any{
		"BlockInhibited":       h.inhibited(block),
		"DelayInhibited":       h.inhibited(delay),
		"InhibitDelayMaxUSec":  uint64(h.options.InhibitDelayMax.Microseconds()),
		"PreparingForShutdown": h.logind.going,
	}
	if h.options.Version >= versionOfStrongLocks {
		properties["BlockWeakInhibited"] = h.inhibited(blockWeak)
	}
	return map[string]map[string]any{loginManager: properties}
}

// inhibited joins what the locks of a mode are for. The caller holds mu.
func (h *Host) inhibited(mode string) string {
	var what []string
	for _, lock := range h.logind.held {
		if lock.Mode == mode {
			what = append(what, strings.Split(lock.What, ":")...)
		}
	}
	slices.Sort(what)
	return strings.Join(slices.Compact(what), ":")
}

func (h *Host) inhibit(args []any) *reply {
	var i Inhibitor
	if err := dbus.Store(args, &i.What, &i.Who, &i.Why, &i.Mode); err != nil {
		return refuse(invalidArgument, "%v", err)
	}
	if err := h.valid(i); err != nil {
		return refuse(invalidArgument, "%v", err)
	}
	theirs, err := h.lock(i)
	if err != nil {
		return failed(err)
	}
	return &reply{body: []any{dbus.UnixFD(theirs.Fd())}, after: func() {
		_ = theirs.Close() // the bus has its own by now
	}}
}

// lock takes a lock, which is held until what it returns is closed.
func (h *Host) lock(i Inhibitor) (*os.File, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.logind.going && i.covers("shutdown") {
		return nil, errInProgress
	}
	ours, theirs, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	lock := &held{Inhibitor: i, end: ours}
	h.logind.held = append(h.logind.held, lock)
	h.change()
	go h.watch(lock)
	return theirs, nil
}

func (h *Host) valid(i Inhibitor) error {
	modes := []string{delay, block}
	if h.options.Version >= versionOfStrongLocks {
		modes = append(modes, blockWeak)
	}
	if !slices.Contains(modes, i.Mode) {
		return fmt.Errorf("invalid mode specification %s", i.Mode)
	}
	known := []string{"shutdown", "sleep", "idle", "handle-power-key", "handle-suspend-key", "handle-hibernate-key", "handle-lid-switch"}
	for what := range strings.SplitSeq(i.What, ":") {
		if !slices.Contains(known, what) {
			return fmt.Errorf("invalid what specification %s", i.What)
		}
		if i.Mode == delay && what != "shutdown" && what != "sleep" {
			return errors.New("delay inhibitors only supported for shutdown and sleep")
		}
	}
	return nil
}

// covers reports whether the lock is for that.
func (i Inhibitor) covers(what string) bool { return slices.Contains(strings.Split(i.What, ":"), what) }

// watch waits until no one holds the lock any more.
func (h *Host) watch(lock *held) {
	_, _ = io.Copy(io.Discard, lock.end) // its end is all that counts
	h.mu.Lock()
	defer h.mu.Unlock()
	_ = lock.end.Close() // closed already if the host was booted
	h.logind.held = slices.DeleteFunc(h.logind.held, func(l *held) bool { return l == lock })
	if h.logind.going && !h.has(delay) {
		h.goDown()
	}
	h.change()
}

// has reports whether someone holds a lock of that mode for a shutdown. The caller holds mu.
func (h *Host) has(mode string) bool {
	return slices.ContainsFunc(h.logind.held, func(l *held) bool { return l.Mode == mode && l.covers("shutdown") })
}

// reboot begins a shutdown, and completes it if no lock delays it.
func (h *Host) reboot() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.logind.going {
		return errInProgress
	}
	if h.options.Version >= versionOfStrongLocks && h.has(block) {
		return errBlocked
	}
	h.logind.going = true
	h.logind.emit(loginPath, loginManager+".PrepareForShutdown", true)
	if !h.has(delay) {
		h.goDown()
		return nil
	}
	h.logind.deadline = time.AfterFunc(h.options.InhibitDelayMax, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.goDown()
	})
	h.change()
	return nil
}

// goDown completes a shutdown once. The host stays "going down" until Boot. The caller holds mu.
func (h *Host) goDown() {
	if !h.logind.going || h.logind.down {
		return
	}
	h.logind.down = true
	if h.logind.deadline != nil {
		h.logind.deadline.Stop()
	}
	h.logind.reboots++
	h.change()
}
