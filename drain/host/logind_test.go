package host_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/test/receive"
	"github.com/gpuslice/gpuslice/test/systemd"
	"github.com/gpuslice/gpuslice/test/systemd/systemdtest"
)

// logindOf is a bus with a logind, and the Logind that asks it. The test fails if that leaves a connection behind.
func logindOf(t *testing.T, o systemd.Options) (*systemd.Host, *host.Logind) {
	t.Helper()
	h := systemdtest.Start(t, o)
	noConnectionStays(t)
	return h, &host.Logind{Address: h.Address()}
}

// noConnectionStays waits at the end of the test until no more goroutines talk D-Bus than do now. One that stays keeps it
// waiting until the tests' time is up; the stacks that are printed then show it.
func noConnectionStays(t *testing.T) {
	t.Helper()
	talking := func() int {
		stacks := make([]byte, 1<<20)
		text := string(stacks[:runtime.Stack(stacks, true)])
		return strings.Count(text, "created by github.com/godbus/dbus/v5.") + strings.Count(text, "created by github.com/coreos/go-systemd/v22/dbus.")
	}
	before := talking()
	t.Cleanup(func() {
		for talking() > before {
			runtime.Gosched()
		}
	})
}

// givenUp is a context that ends when the host receives a call of the method.
func givenUp(t *testing.T, h *systemd.Host, method string) context.Context {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	before := received(h, method)
	go func() {
		_ = h.Wait(t.Context(), func() bool { return received(h, method) > before }) // or the test is over
		cancel()
	}()
	return ctx
}

func received(h *systemd.Host, method string) (n int) {
	for _, call := range h.Calls() {
		if call.Method == method {
			n++
		}
	}
	return n
}

func wantLocks(t *testing.T, h *systemd.Host, n int) {
	t.Helper()
	if err := h.Wait(t.Context(), func() bool { return len(h.Inhibitors()) == n }); err != nil {
		t.Fatal(err)
	}
}

func wantIs(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("error is %v, want one that matches %q", err, want)
	}
}

func TestLogindDelaysAShutdownUntilItIsReleased(t *testing.T) {
	h, logind := logindOf(t, systemd.Options{InhibitDelayMax: time.Hour})
	release, err := logind.Inhibit(t.Context(), "cutting GPU 0")
	if err != nil {
		t.Fatal(err)
	}
	want := []systemd.Inhibitor{{What: "shutdown", Who: "gpuslice-agent", Why: "cutting GPU 0", Mode: "delay"}}
	if diff := cmp.Diff(want, h.Inhibitors()); diff != "" {
		t.Errorf("locks (-want +got):\n%s", diff)
	}
	if err := h.BeginReboot(); err != nil { // by an administrator
		t.Fatal(err)
	}
	if n := h.Reboots(); n != 0 {
		t.Errorf("the host went down %d times while it is kept", n)
	}
	release()
	if err := h.Wait(t.Context(), func() bool { return h.Reboots() == 1 }); err != nil {
		t.Error(err)
	}
	wantLocks(t, h, 0)
}

func TestLogindReleasesALockOnce(t *testing.T) {
	_, logind := logindOf(t, systemd.Options{})
	release, err := logind.Inhibit(t.Context(), "once")
	if err != nil {
		t.Fatal(err)
	}
	release()
	// One of these gets the number that the lock's descriptor had: the kernel gives the lowest.
	var files []*os.File
	for range 64 {
		file, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		files = append(files, file)
	}
	release()
	for _, file := range files {
		if _, err := file.Stat(); err != nil {
			t.Errorf("a descriptor that is not the lock's is closed: %v", err)
		}
	}
}

func TestLogindHoldsALockThatOutlivesItsBus(t *testing.T) {
	h, logind := logindOf(t, systemd.Options{})
	first, err := logind.Inhibit(t.Context(), "first")
	if err != nil {
		t.Fatal(err)
	}
	if err := h.RestartBus(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantLocks(t, h, 1)
	second, err := logind.Inhibit(t.Context(), "second") // over the new bus
	if err != nil {
		t.Fatal(err)
	}
	wantLocks(t, h, 2)
	h.StopBus()
	first()
	second()
	wantLocks(t, h, 0)
}

func TestLogindReboots(t *testing.T) {
	h, logind := logindOf(t, systemd.Options{})
	if err := logind.CanReboot(t.Context()); err != nil || h.Reboots() != 0 {
		t.Errorf("CanReboot: %v, and the host went down %d times", err, h.Reboots())
	}
	if err := logind.Reboot(t.Context()); err != nil || h.Reboots() != 1 {
		t.Errorf("Reboot: %v, and the host went down %d times", err, h.Reboots())
	}
}

func TestLogindMakesItsOwnLocksWaitToo(t *testing.T) {
	h, logind := logindOf(t, systemd.Options{InhibitDelayMax: time.Hour})
	release, err := logind.Inhibit(t.Context(), "forgotten")
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if err := logind.Reboot(t.Context()); err != nil || h.Reboots() != 0 {
		t.Errorf("Reboot: %v, and the host went down %d times in spite of a lock", err, h.Reboots())
	}
}

func TestLogindThatShutsDownCannotBeDelayed(t *testing.T) {
	h, logind := logindOf(t, systemd.Options{})
	if err := h.BeginReboot(); err != nil {
		t.Fatal(err)
	}
	release, err := logind.Inhibit(t.Context(), "too late")
	wantIs(t, err, host.ErrShuttingDown)
	if release != nil {
		t.Error("there is something to release")
	}
	wantIs(t, logind.Reboot(t.Context()), host.ErrShuttingDown)
}

func TestLogindThatRefusesSaysWhatToDo(t *testing.T) {
	h, logind := logindOf(t, systemd.Options{})
	h.Fail(systemd.Inhibit, systemd.Fault{Error: systemd.AccessDenied, Message: "Permission denied"})
	h.Fail(systemd.Reboot, systemd.Fault{Error: systemd.PasswordNeeded, Message: "Interactive authentication required."})
	_, err := logind.Inhibit(t.Context(), "not allowed")
	wantIs(t, err, host.ErrLogindRefuses)
	err = logind.Reboot(t.Context())
	wantIs(t, err, host.ErrLogindRefuses)
	for _, part := range []string{"rebooting the host", "Interactive authentication required.", "polkit"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error is %q, without %q", err, part)
		}
	}
	if n := h.Reboots(); n != 0 {
		t.Errorf("the host went down %d times", n)
	}
}

func TestLogindAnswersByNamesOfErrors(t *testing.T) {
	h, logind := logindOf(t, systemd.Options{})
	for name, want := range map[string]error{
		"org.freedesktop.DBus.Error.NoReply":            host.ErrLogindSilent, // it died over the call
		"org.freedesktop.DBus.Error.TimedOut":           host.ErrLogindSilent,
		"org.freedesktop.systemd1.NoSuchUnit":           host.ErrNoLogind,
		"org.freedesktop.login1.OperationInProgress":    host.ErrShuttingDown,
		"org.freedesktop.login1.BlockedByInhibitorLock": host.ErrRebootInhibited,
	} {
		h.Fail(systemd.Reboot, systemd.Fault{Error: name, Message: "the reason"})
		wantIs(t, logind.Reboot(t.Context()), want)
	}
	h.Fail(systemd.Reboot, systemd.Fault{Error: "org.freedesktop.DBus.Error.LimitsExceeded", Message: "too many calls"})
	err := logind.Reboot(t.Context())
	if err == nil || !strings.Contains(err.Error(), "LimitsExceeded: too many calls") {
		t.Errorf("error is %v, want what the bus said", err)
	}
}

func TestLogindSaysBeforeThatItWouldNotReboot(t *testing.T) {
	for answer, want := range map[string]error{
		"no": host.ErrLogindRefuses, "na": host.ErrLogindRefuses, "challenge": host.ErrLogindRefuses,
		"inhibited": host.ErrRebootInhibited, "inhibitor-blocked": host.ErrRebootInhibited,
		"challenge-inhibitor-blocked": host.ErrRebootInhibited,
	} {
		t.Run(answer, func(t *testing.T) {
			h, logind := logindOf(t, systemd.Options{})
			h.SetCanReboot(answer)
			wantIs(t, logind.CanReboot(t.Context()), want)
		})
	}
}

func TestLogindThatIsForbiddenToRebootSaysSoBefore(t *testing.T) {
	for name, c := range map[string]struct {
		version int
		mode    string
		want    error
	}{
		"a lock of today":     {257, "block", host.ErrRebootInhibited},
		"a weak lock":         {257, "block-weak", nil},
		"a lock before 257":   {256, "block", nil},
		"a lock that expires": {257, "delay", nil},
	} {
		t.Run(name, func(t *testing.T) {
			h, logind := logindOf(t, systemd.Options{Version: c.version, InhibitDelayMax: time.Nanosecond})
			release, err := h.Hold(systemd.Inhibitor{What: "sleep:shutdown", Who: "apt", Why: "upgrading", Mode: c.mode})
			if err != nil {
				t.Fatal(err)
			}
			defer release()
			wantIs(t, logind.CanReboot(t.Context()), c.want)
			wantIs(t, logind.Reboot(t.Context()), c.want)
		})
	}
}

func TestLogindThatDoesNotExist(t *testing.T) {
	dir := t.TempDir()
	unserved := filepath.Join(dir, "unserved")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: unserved})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	left.Close()
	h := systemdtest.Start(t, systemd.Options{NoLogind: true})
	masked := systemdtest.Start(t, systemd.Options{})
	noConnectionStays(t)
	masked.Fail(systemd.Inhibit, systemd.Fault{Error: "org.freedesktop.systemd1.UnitMasked", Message: "Unit is masked."})
	for name, l := range map[string]*host.Logind{
		"no socket":                  {Address: "unix:path=" + dir + "/missing"},
		"no program on the socket":   {Address: "unix:path=" + unserved},
		"no logind on the bus":       {Address: h.Address()},
		"a masked logind":            {Address: masked.Address()},
		"by the environment":         {},
		"an address that has a name": {Address: "unix:path=" + dir + "/missing,guid=4b1d"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", h.Address())
			_, err := l.Inhibit(t.Context(), "no one to ask")
			wantIs(t, err, host.ErrNoLogind)
		})
	}
}

func TestLogindIsNotLookedForElsewhere(t *testing.T) {
	for _, address := range []string{"tcp:host=localhost,port=1", "unix:abstract=bus", "unix:path=/a;unix:path=/b", "/run/dbus"} {
		err := (&host.Logind{Address: address}).CanReboot(t.Context())
		if err == nil || !strings.Contains(err.Error(), address) || !strings.Contains(err.Error(), "unix:path=") {
			t.Errorf("with the address %s the error is %v", address, err)
		}
	}
}

func TestLogindIsFoundByTheEnvironment(t *testing.T) {
	h, _ := logindOf(t, systemd.Options{})
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", h.Address())
	if err := new(host.Logind).CanReboot(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestLogindThatNeverAnswersIsLeft(t *testing.T) {
	h, logind := logindOf(t, systemd.Options{})
	for method, ask := range map[string]func(context.Context) error{
		systemd.CanReboot: logind.CanReboot,
		systemd.Reboot:    logind.Reboot,
		systemd.Inhibit: func(ctx context.Context) error {
			_, err := logind.Inhibit(ctx, "in vain")
			return err
		},
	} {
		h.Fail(method, systemd.Fault{Silent: true})
		// Whatever was reached when the time is up, the error is the same; but the call has to be reached once.
		for logind.Patience = 10 * time.Millisecond; received(h, method) == 0; logind.Patience *= 2 {
			err := ask(t.Context())
			wantIs(t, err, host.ErrLogindSilent)
			wantIs(t, err, context.DeadlineExceeded)
		}
	}

	h.Mend()
	logind.Patience = 0
	release, err := logind.Inhibit(t.Context(), "it is back")
	if err != nil {
		t.Fatal(err)
	}
	release()
}

func TestLogindIsNotBlamedForACancelledCall(t *testing.T) {
	h, logind := logindOf(t, systemd.Options{})
	h.Fail(systemd.Reboot, systemd.Fault{Silent: true})
	err := logind.Reboot(givenUp(t, h, systemd.Reboot))
	wantIs(t, err, context.Canceled)
	if errors.Is(err, host.ErrLogindSilent) {
		t.Errorf("error is %v", err)
	}
}

// An answer that comes too late has a lock in it, which no caller would ever release.
func TestLogindThatAnswersTooLateLeavesNoLock(t *testing.T) {
	h, logind := logindOf(t, systemd.Options{})
	for range 100 { // the answer and the end of the context come at the same time, in either order
		release, err := logind.Inhibit(givenUp(t, h, systemd.Inhibit), "a race")
		switch {
		case err == nil:
			release()
		case !errors.Is(err, context.Canceled):
			t.Fatal(err)
		}
		wantLocks(t, h, 0)
	}
}

func TestLogindOnABusThatNeverSpeaksIsLeft(t *testing.T) {
	noConnectionStays(t)
	path := filepath.Join(t.TempDir(), "silent")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	logind := host.Logind{Address: "unix:path=" + path, Patience: 10 * time.Millisecond}

	// No process accepts: only the kernel has taken the connection.
	_, err = logind.Inhibit(t.Context(), "in vain")
	wantIs(t, err, host.ErrLogindSilent)

	heard := make(chan error, 1)
	go func() {
		for { // that connection, and the next
			conn, err := listener.Accept()
			if err != nil {
				heard <- nil
				return
			}
			if _, err := io.Copy(io.Discard, conn); err != nil { // until it has hung up
				heard <- err
				return
			}
			conn.Close()
		}
	}()
	_, err = logind.Inhibit(t.Context(), "in vain")
	wantIs(t, err, host.ErrLogindSilent)
	listener.Close()
	if err := receive.From(t, heard); err != nil {
		t.Error(err)
	}
}

func TestLogindOnABusThatTalksNonsense(t *testing.T) {
	noConnectionStays(t)
	path := filepath.Join(t.TempDir(), "nonsense")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // the test is over
			}
			_, _ = io.WriteString(conn, "HTTP/1.1 400 Bad Request\r\n\r\n") // what comes of it is seen at the other end
			conn.Close()
		}
	}()
	logind := host.Logind{Address: "unix:path=" + path}
	err = logind.CanReboot(t.Context())
	if err == nil || errors.Is(err, host.ErrNoLogind) || !strings.Contains(err.Error(), path) {
		t.Errorf("error is %v, want one that names the bus and does not say that there is none", err)
	}
}
