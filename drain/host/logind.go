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

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Errors of asking logind.
var (
	// ErrNoLogind means that there is no logind to ask: no system bus, or no logind on it. That is normal on Talos and on
	// machines that do not boot by systemd, and no fault.
	ErrNoLogind = errors.New("this host has no logind")
	// ErrShuttingDown means that the host is going down already, so that nothing can delay it any more.
	ErrShuttingDown = errors.New("the host is shutting down")
	// ErrLogindSilent means that the bus or logind did not answer in time. Whether logind has performed the call is not known then; an inhibitor that
	// it may still hand out is closed.
	ErrLogindSilent = errors.New("logind does not answer")
	// ErrLogindRefuses means that the host's security policy does not allow this process's request.
	ErrLogindRefuses = errors.New("logind refuses")
	// ErrRebootInhibited means that another program holds a lock that forbids to shut the host down.
	ErrRebootInhibited = errors.New("another program blocks the host's shutdown")
)

const (
	// inhibitor names the lock's holder for "systemd-inhibit --list".
	inhibitor = "gpuslice-agent"

	loginManager = "org.freedesktop.login1.Manager"
	getProperty  = "org.freedesktop.DBus.Properties.Get"
)

var login1 = peer{
	name: "logind", bus: "org.freedesktop.login1", none: ErrNoLogind, silent: ErrLogindSilent, refuses: ErrLogindRefuses,
	means: map[string]error{
		"org.freedesktop.systemd1.NoSuchUnit":           ErrNoLogind, // the bus asked systemd to start it
		"org.freedesktop.systemd1.UnitMasked":           ErrNoLogind,
		"org.freedesktop.login1.OperationInProgress":    ErrShuttingDown, // for Reboot, a suspended host too
		"org.freedesktop.login1.BlockedByInhibitorLock": ErrRebootInhibited,
	},
	advice: map[error]string{ErrRebootInhibited: "systemd-inhibit --list on the host names it"},
}

// Logind asks the host's logind, over the system bus. The zero value is ready for use, by several goroutines at a time.
//
// It keeps no connection: each call makes its own and closes it. Calls are few, a restart of the bus between two of them does no
// harm, and an inhibitor outlives its connection, since logind ties it to a file descriptor.
type Logind struct {
	// Address of the system bus, in D-Bus's own form: "unix:path=/run/dbus/system_bus_socket", no other kind. Empty means
	// DBUS_SYSTEM_BUS_ADDRESS, or that path where the variable is not set.
	Address string
	// Patience bounds each call, in addition to its context. 0 means 25 s, as with systemd's own tools.
	Patience time.Duration

	connecting aside.Lane
}

// Inhibit keeps the host from going down until release is called, or this process ends; logind shows why to users who ask
// what keeps the host. The error matches ErrNoLogind, ErrShuttingDown, ErrLogindSilent or ErrLogindRefuses.
//
// It is a delay, bounded by InhibitDelayMaxSec of logind.conf (5 s unless the administrator, or kubelet for its own graceful shutdown, sets more). It
// holds for everyone, also for root's "systemctl reboot": logind applies delays whoever requests the shutdown (manager_dispatch_delayed in systemd's
// src/login/logind-dbus.c). A lock of mode "block" does not do that before systemd 257. Its NEWS: "systemd-logind now always obeys block inhibitor
// locks, where previously it ignored locks taken by the caller or when the caller was root". And it would let a hung agent keep a host up. Neither
// holds up "systemctl reboot --force", nor a host that loses power.
//
// The function release may be called more than once and from any goroutine, with or without a bus.
func (l *Logind) Inhibit(ctx context.Context, why string) (release func(), err error) {
	var lock dbus.UnixFD
	if err := l.call(ctx, loginManager+".Inhibit", []any{"shutdown", inhibitor, why, "delay"}, &lock); err != nil {
		return nil, fmt.Errorf("delaying a shutdown of the host: %w", err)
	}
	return sync.OnceFunc(func() {
		_ = unix.Close(int(lock)) // of a pipe that no program writes to: no data can be lost
	}), nil
}

// CanReboot asks logind whether it would accept Reboot, and changes nothing. It returns nil if logind would, as far as that is known
// before; an error matches those of Reboot.
func (l *Logind) CanReboot(ctx context.Context) error {
	if err := l.canReboot(ctx); err != nil {
		return fmt.Errorf("asking whether the host may be rebooted: %w", err)
	}
	return nil
}

func (l *Logind) canReboot(ctx context.Context) error {
	var answer string
	if err := l.call(ctx, loginManager+".CanReboot", nil, &answer); err != nil {
		return err
	}
	switch answer {
	case "yes":
	case "inhibited", "inhibitor-blocked", "challenge-inhibitor-blocked": // since systemd 260, and not shown to root
		return login1.explain(ErrRebootInhibited, errors.New("CanReboot: "+answer))
	default: // "no"; "challenge", which means to ask a person for a password; "na"
		return login1.explain(ErrLogindRefuses, errors.New("CanReboot: "+answer))
	}
	// Logind answers root "yes" even if a lock of mode "block" will stop it (method_can_shutdown_or_sleep), so find one.
	// Before systemd 257 it would not: that logind has no weak locks, and so no such property.
	var blocked dbus.Variant
	err := l.call(ctx, getProperty, []any{loginManager, "BlockWeakInhibited"}, &blocked)
	if said, ok := errors.AsType[dbus.Error](err); ok && said.Name == "org.freedesktop.DBus.Error.UnknownProperty" {
		return nil
	}
	if err != nil {
		return err
	}
	if err := l.call(ctx, getProperty, []any{loginManager, "BlockInhibited"}, &blocked); err != nil {
		return err
	}
	if what, ok := blocked.Value().(string); ok && slices.Contains(strings.Split(what, ":"), "shutdown") {
		return login1.explain(ErrRebootInhibited, errors.New("BlockInhibited: "+what))
	}
	return nil
}

// Reboot has logind reboot the host. Nil means that it has begun to: units are stopped next, this process among them.
// The error matches ErrNoLogind, ErrShuttingDown (another program asked first), ErrLogindSilent, ErrLogindRefuses or
// ErrRebootInhibited.
//
// After any other error the host may still be going down: the bus is among the first to end.
//
// Logind waits for every inhibitor of mode "delay" first, and makes no exception for those of the caller: release them
// before, or the reboot comes only when their time is up.
func (l *Logind) Reboot(ctx context.Context) error {
	const interactive = false // there is no user to type a password
	if err := l.call(ctx, loginManager+".Reboot", []any{interactive}); err != nil {
		return fmt.Errorf("rebooting the host: %w", err)
	}
	return nil
}

// call calls a method of logind's manager, and stores its answer.
//
// It is not go-systemd's login1 that asks: its Inhibit and Reboot take no context (v22.7.0), so a logind that does not
// answer would hold the agent for ever.
func (l *Logind) call(ctx context.Context, method string, args []any, answer ...any) error {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(l.Patience, busPatience))
	defer cancel()
	address := busAddress(l.Address)
	bus, err := dial(ctx, &l.connecting, address)
	if err != nil {
		return login1.failure(ctx, address, err)
	}
	defer bus.hangUp()
	manager := bus.Object(login1.bus, "/org/freedesktop/login1")
	if err := (<-manager.Go(method, 0, nil, args...).Done).Store(answer...); err != nil {
		return login1.failure(ctx, address, err)
	}
	return nil
}
