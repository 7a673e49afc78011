package systemd_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/coreos/go-systemd/v22/dbus"
	godbus "github.com/godbus/dbus/v5"
	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/test/receive"
	"github.com/gpuslice/gpuslice/test/systemd"
	"github.com/gpuslice/gpuslice/test/systemd/systemdtest"
)

// connect is how NVIDIA's mig-manager finds systemd: go-systemd, which goes by the environment.
func connect(t *testing.T, host *systemd.Host) *dbus.Conn {
	t.Helper()
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", host.Address())
	conn, err := dbus.NewSystemConnectionContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	return conn
}

// client is one that calls methods by their names.
func client(t *testing.T, host *systemd.Host) *godbus.Conn {
	t.Helper()
	conn, err := godbus.Connect(host.Address(), godbus.WithAuth(godbus.AuthExternal(strconv.Itoa(os.Geteuid()))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func logind(conn *godbus.Conn) godbus.BusObject {
	return conn.Object("org.freedesktop.login1", "/org/freedesktop/login1")
}

// lock takes one, and returns how to give it back.
func lock(t *testing.T, conn *godbus.Conn, mode string) (release func()) {
	t.Helper()
	var fd godbus.UnixFD
	if err := logind(conn).CallWithContext(t.Context(), systemd.Inhibit, 0, "shutdown", "test", "to see", mode).Store(&fd); err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "lock")
	t.Cleanup(func() { _ = file.Close() })
	return func() { _ = file.Close() }
}

func wantError(t *testing.T, err error, name string) {
	t.Helper()
	if e, ok := errors.AsType[godbus.Error](err); !ok || e.Name != name {
		t.Errorf("error is %v, want %s", err, name)
	}
}

func TestUnitsStopAndStartAsMIGManagerDoesIt(t *testing.T) {
	host := systemdtest.Start(t, systemd.Options{Units: map[string]systemd.Unit{
		"nvidia-dcgm.service": {Description: "DCGM", Type: "simple"},
		"oneshot.service":     {Type: "oneshot", ActiveState: "inactive", UnitFileState: "disabled"},
	}})
	conn := connect(t, host)

	listed, err := conn.ListUnitsByNamesContext(t.Context(), []string{"nvidia-dcgm.service", "nvsm.service"})
	if err != nil {
		t.Fatal(err)
	}
	if len(listed) != 2 || listed[0].ActiveState != "active" || listed[1].LoadState != "not-found" {
		t.Errorf("listed are %+v, want one that is active and one that is not found", listed)
	}
	properties, err := conn.GetAllPropertiesContext(t.Context(), "oneshot.service")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"Id": "oneshot.service", "Description": "", "LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead",
		"UnitFileState": "disabled", "Type": "oneshot",
	}
	if diff := cmp.Diff(want, properties); diff != "" {
		t.Errorf("properties of oneshot.service (-want +got):\n%s", diff)
	}

	ended := make(chan string, 1)
	if _, err := conn.StopUnitContext(t.Context(), "nvidia-dcgm.service", "replace", ended); err != nil {
		t.Fatal(err)
	}
	if result := receive.From(t, ended); result != "done" || host.Unit("nvidia-dcgm.service").ActiveState != "inactive" {
		t.Errorf("stopped: %s, and it is %+v", result, host.Unit("nvidia-dcgm.service"))
	}
	if _, err := conn.StartUnitContext(t.Context(), "nvidia-dcgm.service", "replace", ended); err != nil {
		t.Fatal(err)
	}
	if result := receive.From(t, ended); result != "done" || host.Unit("nvidia-dcgm.service").SubState != "running" {
		t.Errorf("started: %s, and it is %+v", result, host.Unit("nvidia-dcgm.service"))
	}
	if err := conn.ReloadContext(t.Context()); err != nil {
		t.Error(err)
	}
	_, err = conn.StopUnitContext(t.Context(), "nvsm.service", "replace", ended)
	wantError(t, err, "org.freedesktop.systemd1.NoSuchUnit")
}

// mig-manager takes its address from where the host's root is mounted, whatever the environment says.
func TestAHostBelowARootIsFoundThere(t *testing.T) {
	root, err := os.MkdirTemp("", "root") //nolint:usetesting // t.TempDir's path is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	host := systemdtest.Start(t, systemd.Options{Dir: root + "/run/dbus"})
	if want := "unix:path=" + root + "/run/dbus/system_bus_socket"; host.Address() != want {
		t.Errorf("the address is %s, want %s", host.Address(), want)
	}
	if err := connect(t, host).ReloadContext(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestJobsEndAsTheTestSays(t *testing.T) {
	host := systemdtest.Start(t, systemd.Options{Units: map[string]systemd.Unit{
		"fails.service": {OnStart: systemd.Failed, ActiveState: "inactive"},
		"hangs.service": {OnStop: systemd.Never},
	}})
	conn := connect(t, host)

	ended := make(chan string, 1)
	if _, err := conn.StartUnitContext(t.Context(), "fails.service", "replace", ended); err != nil {
		t.Fatal(err)
	}
	if result := receive.From(t, ended); result != "failed" || host.Unit("fails.service").ActiveState != "failed" {
		t.Errorf("started: %s, and it is %+v", result, host.Unit("fails.service"))
	}
	if _, err := conn.StopUnitContext(t.Context(), "hangs.service", "replace", ended); err != nil {
		t.Fatal(err)
	}
	if state := host.Unit("hangs.service").ActiveState; state != "deactivating" {
		t.Errorf("a unit that hangs at its end is %s", state)
	}
	host.EndJobs(systemd.Timeout)
	if result := receive.From(t, ended); result != "timeout" {
		t.Errorf("the job that hung ended as %s", result)
	}
}

func TestAJobGoesOnForWhoeverAsksForTheSame(t *testing.T) {
	host := systemdtest.Start(t, systemd.Options{Units: map[string]systemd.Unit{
		"hangs.service": {OnStop: systemd.Never, Aliases: []string{"other-name.service"}},
	}})
	conn := connect(t, host)

	first, second := make(chan string, 1), make(chan string, 1)
	id, err := conn.StopUnitContext(t.Context(), "hangs.service", "replace", first)
	if err != nil {
		t.Fatal(err)
	}
	again, err := conn.StopUnitContext(t.Context(), "other-name.service", "replace", second)
	if err != nil || again != id {
		t.Errorf("jobs are %d and %d, %v; want one", id, again, err)
	}
	listed, err := conn.ListUnitsByNamesContext(t.Context(), []string{"other-name.service"})
	if err != nil || len(listed) != 1 || listed[0].Name != "hangs.service" || listed[0].JobId != uint32(id) || listed[0].JobType != "stop" {
		t.Errorf("listed is %+v, %v; want hangs.service with job %d", listed, err, id)
	}

	started := make(chan string, 1)
	if _, err := conn.StartUnitContext(t.Context(), "hangs.service", "replace", started); err != nil {
		t.Fatal(err)
	}
	if a, b, c := receive.From(t, first), receive.From(t, second), receive.From(t, started); a != "canceled" || b != "canceled" || c != "done" {
		t.Errorf("the job and its twin ended as %s and %s, and its contrary as %s", a, b, c)
	}
	if state := host.Unit("other-name.service").ActiveState; state != "active" {
		t.Errorf("started in the middle, the unit is %s", state)
	}
}

func TestAJobThatHasNothingToDoIsDone(t *testing.T) {
	host := systemdtest.Start(t, systemd.Options{Units: map[string]systemd.Unit{
		"runs.service":   {OnStart: systemd.Failed},
		"broken.service": {ActiveState: "failed", OnStop: systemd.Never},
		"waits.service":  {ActiveState: "inactive", OnStart: systemd.Dependency},
		"masked.service": {LoadState: "masked"},
	}})
	conn := connect(t, host)
	ended := make(chan string, 1)
	for _, c := range []struct{ name, verb, result, state string }{
		{"runs.service", "start", "done", "active"},
		{"broken.service", "stop", "done", "failed"},
		{"waits.service", "start", "dependency", "inactive"},
		{"masked.service", "stop", "done", "inactive"}, // it ran when it was masked
	} {
		begin := conn.StopUnitContext
		if c.verb == "start" {
			begin = conn.StartUnitContext
		}
		if _, err := begin(t.Context(), c.name, "replace", ended); err != nil {
			t.Fatal(err)
		}
		if result, state := receive.From(t, ended), host.Unit(c.name).ActiveState; result != c.result || state != c.state {
			t.Errorf("%s of %s: %s, and it is %s; want %s and %s", c.verb, c.name, result, state, c.result, c.state)
		}
	}
	_, err := conn.StartUnitContext(t.Context(), "masked.service", "replace", ended)
	wantError(t, err, "org.freedesktop.systemd1.UnitMasked")
}

func TestUnitsAreFoundByStateNameAndProcess(t *testing.T) {
	host := systemdtest.Start(t, systemd.Options{Units: map[string]systemd.Unit{
		"nvidia-dcgm.service":      {PIDs: []uint32{4711}},
		"nvidia-gridd.service":     {ActiveState: "inactive"},
		"7-starts-with-digit.path": {},
	}})
	conn := connect(t, host)
	listed, err := conn.ListUnitsByPatternsContext(t.Context(), []string{"active"}, []string{"nvidia-*"})
	if err != nil || len(listed) != 1 || listed[0].Name != "nvidia-dcgm.service" {
		t.Errorf("listed are %v, %v; want nvidia-dcgm.service", listed, err)
	}
	if name, err := conn.GetUnitNameByPID(t.Context(), 4711); err != nil || name != "nvidia-dcgm.service" {
		t.Errorf("4711 belongs to %q, %v; want nvidia-dcgm.service", name, err)
	}
	_, err = conn.GetUnitNameByPID(t.Context(), 1)
	wantError(t, err, "org.freedesktop.systemd1.NoUnitForPID")
	if p, err := conn.GetUnitPropertyContext(t.Context(), "7-starts-with-digit.path", "Id"); err != nil || p.Value.Value() != "7-starts-with-digit.path" {
		t.Errorf("its id is %v, %v", p, err)
	}
}

func TestARebootWaitsForLocksThatDelay(t *testing.T) {
	host := systemdtest.Start(t, systemd.Options{InhibitDelayMax: time.Hour})
	conn := client(t, host)
	signals := make(chan *godbus.Signal, 1)
	conn.Signal(signals)
	if err := conn.AddMatchSignalContext(t.Context(), godbus.WithMatchMember("PrepareForShutdown")); err != nil {
		t.Fatal(err)
	}
	release := lock(t, conn, "delay")
	if err := logind(conn).CallWithContext(t.Context(), systemd.Reboot, 0, false).Err; err != nil {
		t.Fatal(err)
	}
	s := receive.From(t, signals)
	for s.Name != "org.freedesktop.login1.Manager.PrepareForShutdown" {
		s = receive.From(t, signals) // the bus has some of its own
	}
	if len(s.Body) != 1 || s.Body[0] != true {
		t.Errorf("signal is %+v", s)
	}
	if n := host.Reboots(); n != 0 {
		t.Errorf("the host went down %d times while a lock delays it", n)
	}
	wantError(t, host.BeginReboot(), "org.freedesktop.login1.OperationInProgress")
	release()
	if err := host.Wait(t.Context(), func() bool { return host.Reboots() == 1 }); err != nil {
		t.Error(err)
	}
	host.Boot()
	lock(t, conn, "delay") // possible again
}

func TestADelayHasAnEnd(t *testing.T) {
	host := systemdtest.Start(t, systemd.Options{InhibitDelayMax: time.Millisecond})
	lock(t, client(t, host), "delay")
	if err := host.BeginReboot(); err != nil {
		t.Fatal(err)
	}
	if err := host.Wait(t.Context(), func() bool { return host.Reboots() == 1 }); err != nil {
		t.Error(err)
	}
}

func TestALockThatForbidsBindsRootFrom257On(t *testing.T) {
	host := systemdtest.Start(t, systemd.Options{})
	lock(t, client(t, host), "block")
	wantError(t, host.BeginReboot(), "org.freedesktop.login1.BlockedByInhibitorLock")

	older := systemdtest.Start(t, systemd.Options{Version: 256})
	lock(t, client(t, older), "block")
	if err := older.BeginReboot(); err != nil || older.Reboots() != 1 {
		t.Errorf("a reboot under systemd 256: %v, %d times", err, older.Reboots())
	}
}

func TestWhatIsLeftAwayHasNoName(t *testing.T) {
	host := systemdtest.Start(t, systemd.Options{NoLogind: true})
	err := logind(client(t, host)).CallWithContext(t.Context(), systemd.CanReboot, 0).Err
	wantError(t, err, "org.freedesktop.DBus.Error.ServiceUnknown")
	if calls := host.Calls(); len(calls) != 0 {
		t.Errorf("calls are %v, want none", calls)
	}
}

func TestABusThatCannotStartSaysWhy(t *testing.T) {
	if _, err := exec.LookPath("dbus-daemon"); err != nil && os.Getenv("CI") == "" {
		t.Skip(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := systemd.Start(ended, systemd.Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v, want that of the context", err)
	}
	if _, err := systemd.Start(t.Context(), systemd.Options{Dir: "/proc"}); err == nil {
		t.Error("a bus in /proc has started")
	}
}

func TestWhatAUnitRunsHasEndedBeforeAnybodyLearnsThatItIsStopped(t *testing.T) {
	heard := make(chan string, 4)
	host := systemdtest.Start(t, systemd.Options{
		Units:  map[string]systemd.Unit{"nvsm.service": {}},
		OnUnit: func(unit string, running bool) { heard <- fmt.Sprintf("%s %t", unit, running) },
	})
	conn := connect(t, host)
	for _, step := range []struct {
		do   func(context.Context, string, string, chan<- string) (int, error)
		want string
	}{
		{conn.StopUnitContext, "nvsm.service false"}, {conn.StartUnitContext, "nvsm.service true"},
	} {
		ended := make(chan string, 1)
		if _, err := step.do(t.Context(), "nvsm.service", "replace", ended); err != nil {
			t.Fatal(err)
		}
		receive.From(t, ended)
		select {
		case got := <-heard:
			if got != step.want {
				t.Errorf("heard %q, want %q", got, step.want)
			}
		default:
			t.Errorf("the job is over, and no one has heard %q", step.want)
		}
	}
}
