package host_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	godbus "github.com/godbus/dbus/v5"
	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/test/receive"
	"github.com/gpuslice/gpuslice/test/systemd"
	"github.com/gpuslice/gpuslice/test/systemd/systemdtest"
)

// unitsOf is a host with these units, and the Units that asks it. The test fails if that leaves a connection behind.
func unitsOf(t *testing.T, units map[string]systemd.Unit) (*systemd.Host, *host.Units) {
	t.Helper()
	h := systemdtest.Start(t, systemd.Options{Units: units})
	noConnectionStays(t)
	noSocketStays(t, h.Address())
	return h, &host.Units{Address: h.Address()}
}

// noSocketStays waits at the end of the test until the bus has no more connections than it has now.
func noSocketStays(t *testing.T, address string) {
	t.Helper()
	path := []byte(strings.TrimPrefix(address, "unix:path=") + "\n")
	connections := func() int {
		sockets, err := os.ReadFile("/proc/net/unix")
		if err != nil {
			t.Error(err)
		}
		return bytes.Count(sockets, path)
	}
	before := connections()
	if before == 0 {
		t.Fatalf("no one listens on %s", address)
	}
	t.Cleanup(func() {
		for connections() > before {
			runtime.Gosched()
		}
	})
}

func wantStates(t *testing.T, units *host.Units, want map[string]string) {
	t.Helper()
	var names []string
	for name := range want {
		names = append(names, name)
	}
	got, err := units.States(t.Context(), names)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v; states (-want +got):\n%s", err, diff)
	}
}

func TestUnitsReportTheirStates(t *testing.T) {
	_, units := unitsOf(t, map[string]systemd.Unit{
		"nvidia-dcgm.service": {Aliases: []string{"dcgm.service"}},
		"nvsm.service":        {ActiveState: "inactive"},
		"nvsm-core.service":   {ActiveState: "failed"},
		"nv_peer_mem.service": {ActiveState: "activating"},
		"masked.service":      {LoadState: "masked", ActiveState: "active"},
		"removed.service":     {LoadState: "not-found", ActiveState: "active"},
		"broken.service":      {LoadState: "bad-setting", ActiveState: "inactive"},
	})
	got, err := units.States(t.Context(), []string{
		"dcgm.service", "nvsm-gateway.service", "nvsm.service", "masked.service", "nvsm-core.service", "nv_peer_mem.service",
		"removed.service", "broken.service", "nvidia-dcgm.service",
	})
	want := map[string]string{
		"dcgm.service": "active", "nvidia-dcgm.service": "active",
		"nvsm.service": "inactive", "nvsm-core.service": "failed", "nv_peer_mem.service": "activating",
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v; states (-want +got):\n%s", err, diff)
	}
}

func TestUnitsThatTheCallerDoesNotNameAreNotAskedFor(t *testing.T) {
	states, err := (&host.Units{Address: "unix:path=/nowhere"}).States(t.Context(), nil)
	if err != nil || len(states) != 0 {
		t.Errorf("states are %v, %v", states, err)
	}
}

func TestUnitsAreNotTakenForOneAnother(t *testing.T) {
	_, units := unitsOf(t, map[string]systemd.Unit{"nvsm.service": {}})
	states, err := units.States(t.Context(), []string{"what is that", "nvsm.service"})
	if err == nil || !strings.Contains(err.Error(), "what is that") {
		t.Errorf("states are %v, %v; want an error that has the name in it", states, err)
	}
}

func TestUnitsStopAndStart(t *testing.T) {
	h, units := unitsOf(t, map[string]systemd.Unit{"nvidia-dcgm.service": {Aliases: []string{"dcgm.service"}}})
	if err := units.Stop(t.Context(), "dcgm.service"); err != nil {
		t.Error(err)
	}
	wantStates(t, units, map[string]string{"nvidia-dcgm.service": "inactive"})
	if err := units.Start(t.Context(), "dcgm.service"); err != nil {
		t.Error(err)
	}
	wantStates(t, units, map[string]string{"nvidia-dcgm.service": "active"})
	var jobs []string
	for _, call := range h.Calls() {
		if call.Method != systemd.ListUnitsByNames {
			jobs = append(jobs, call.String())
		}
	}
	want := []string{systemd.StopUnit + `("dcgm.service", "replace")`, systemd.StartUnit + `("dcgm.service", "replace")`}
	if diff := cmp.Diff(want, jobs); diff != "" {
		t.Errorf("jobs (-want +got):\n%s", diff)
	}
}

func TestUnitsThatAreAsAskedNeedNothing(t *testing.T) {
	h, units := unitsOf(t, map[string]systemd.Unit{
		"runs.service":   {OnStart: systemd.Failed},
		"rests.service":  {OnStop: systemd.Failed, ActiveState: "inactive"},
		"failed.service": {OnStop: systemd.Failed, ActiveState: "failed"},
	})
	for _, name := range []string{"rests.service", "failed.service", "nowhere.service"} {
		if err := units.Stop(t.Context(), name); err != nil {
			t.Error(err)
		}
	}
	if err := units.Start(t.Context(), "runs.service"); err != nil {
		t.Error(err)
	}
	wantStates(t, units, map[string]string{"runs.service": "active", "rests.service": "inactive", "failed.service": "failed"})
	if n := received(h, systemd.StopUnit); n != 3 {
		t.Errorf("systemd was asked to stop %d times, want 3", n)
	}
}

func TestUnitsSayHowAJobEnded(t *testing.T) {
	h, units := unitsOf(t, nil)
	for result, says := range map[systemd.Result]string{
		systemd.Canceled:   "an opposite job",
		systemd.Timeout:    "JobTimeoutSec",
		systemd.Failed:     `says "failed"`,
		systemd.Dependency: "a unit that it needs",
		systemd.Skipped:    "did not fit",
	} {
		for verb, change := range map[string]func(context.Context, string) error{"stop": units.Stop, "start": units.Start} {
			state := map[string]string{"stop": "active", "start": "inactive"}[verb]
			h.SetUnit("nvsm.service", systemd.Unit{ActiveState: state, OnStop: result, OnStart: result})
			err := change(t.Context(), "nvsm.service")
			ended, _ := errors.AsType[*host.JobError](err)
			want := &host.JobError{Unit: "nvsm.service", Verb: verb, Result: string(result)}
			if diff := cmp.Diff(want, ended); diff != "" {
				t.Errorf("%v (-want +got):\n%s", err, diff)
				continue
			}
			for _, part := range []string{map[string]string{"stop": "stopping", "start": "starting"}[verb] + " nvsm.service: ", says, "systemctl status nvsm.service"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error is %q, without %q", err, part)
				}
			}
		}
	}
}

// The signal of a job's end may be lost: the unit shows it all the same.
func TestUnitsSeeTheEndOfAJobWithoutASignal(t *testing.T) {
	h := systemdtest.Start(t, systemd.Options{Mute: true, Units: map[string]systemd.Unit{
		"nvsm.service": {}, "stays.service": {OnStop: systemd.Failed}, "fails.service": {ActiveState: "inactive", OnStart: systemd.Failed},
		"slow.service": {OnStop: systemd.Never},
	}})
	noConnectionStays(t)
	noSocketStays(t, h.Address())
	units := &host.Units{Address: h.Address(), Pause: time.Millisecond}
	if err := units.Stop(t.Context(), "nvsm.service"); err != nil {
		t.Error(err)
	}
	wantUnit(t, h, "nvsm.service", "inactive")
	if err := units.Start(t.Context(), "nvsm.service"); err != nil {
		t.Error(err)
	}
	wantUnit(t, h, "nvsm.service", "active")
	if err := units.Stop(t.Context(), "stays.service"); err != nil { // it is down, if not as it should
		t.Error(err)
	}
	ended, _ := errors.AsType[*host.JobError](units.Start(t.Context(), "fails.service"))
	if diff := cmp.Diff(&host.JobError{Unit: "fails.service", Verb: "start", Result: "failed"}, ended); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	stopInVain(t, units, "slow.service")
}

// Any program on the bus can send the signal that a job has ended.
func TestUnitsBelieveTheEndOfAJobOnlyIfTheUnitShowsIt(t *testing.T) {
	h, units := unitsOf(t, map[string]systemd.Unit{"nvsm.service": {OnStop: systemd.Never}})
	stopInVain(t, units, "nvsm.service")
	units.Pause = time.Millisecond
	liar, err := godbus.Connect(h.Address(), godbus.WithAuth(godbus.AuthExternal(strconv.Itoa(os.Geteuid()))))
	if err != nil {
		t.Fatal(err)
	}
	defer liar.Close()
	before := received(h, systemd.StopUnit)
	stopped := make(chan error, 1)
	go func() { stopped <- units.Stop(t.Context(), "nvsm.service") }()
	if err := h.Wait(t.Context(), func() bool { return received(h, systemd.StopUnit) > before }); err != nil {
		t.Fatal(err)
	}
	err = liar.Emit("/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager.JobRemoved",
		uint32(1), godbus.ObjectPath("/org/freedesktop/systemd1/job/1"), "nvsm.service", "done")
	if err != nil {
		t.Fatal(err)
	}
	if err := liar.BusObject().Call("org.freedesktop.DBus.GetId", 0).Err; err != nil { // the bus has sent it on
		t.Fatal(err)
	}
	reads := received(h, systemd.ListUnitsByNames)
	if err := h.Wait(t.Context(), func() bool { return received(h, systemd.ListUnitsByNames) > reads+2 || len(stopped) > 0 }); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-stopped:
		t.Fatalf("a job that hangs has ended by a lie: %v", err)
	default:
	}
	h.EndJobs(systemd.Failed)
	if err := receive.From(t, stopped); err != nil {
		t.Error(err)
	}
	wantUnit(t, h, "nvsm.service", "failed")
}

func TestUnitsThatCannotBeStartedSayWhy(t *testing.T) {
	h, units := unitsOf(t, map[string]systemd.Unit{"nvsm.service": {}, "masked.service": {LoadState: "masked", ActiveState: "inactive"}})
	if err := units.Stop(t.Context(), "nvsm.service"); err != nil {
		t.Fatal(err)
	}
	h.RemoveUnit("nvsm.service")
	for name, says := range map[string]string{
		"nvsm.service":   "Unit nvsm.service not found.",
		"masked.service": "Unit masked.service is masked.",
	} {
		err := units.Start(t.Context(), name)
		ended, _ := errors.AsType[*host.JobError](err)
		if diff := cmp.Diff(&host.JobError{Unit: name, Verb: "start", Result: says}, ended); diff != "" {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
	}
}

func TestUnitsThatRefuseSayWhatToDo(t *testing.T) {
	h, units := unitsOf(t, map[string]systemd.Unit{"nvsm.service": {}})
	h.Fail(systemd.StopUnit, systemd.Fault{Error: systemd.PasswordNeeded, Message: "Interactive authentication required."})
	h.Fail(systemd.ListUnitsByNames, systemd.Fault{Error: systemd.AccessDenied, Message: "SELinux policy denies access."})
	err := units.Stop(t.Context(), "nvsm.service")
	_, statesErr := units.States(t.Context(), []string{"nvsm.service"})
	for _, err := range []error{err, statesErr} {
		wantIs(t, err, host.ErrSystemdRefuses)
		for _, part := range []string{"nvsm.service", "polkit", "org.freedesktop.systemd1"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("error is %q, without %q", err, part)
			}
		}
	}
	wantUnit(t, h, "nvsm.service", "active")
}

func wantUnit(t *testing.T, h *systemd.Host, name, state string) {
	t.Helper()
	if got := h.Unit(name).ActiveState; got != state {
		t.Errorf("%s is %s, want %s", name, got, state)
	}
}

// stopInVain stops a unit whose job does not end, and returns when the job has begun.
func stopInVain(t *testing.T, units *host.Units, name string) {
	t.Helper()
	for patience := 10 * time.Millisecond; ; patience *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		err := units.Stop(ctx, name)
		cancel()
		wantIs(t, err, context.DeadlineExceeded)
		if errors.Is(err, host.ErrJobRunning) {
			return
		}
		wantIs(t, err, host.ErrSystemdSilent)
	}
}

func TestUnitsWhoseJobDoesNotEndAreLeftToIt(t *testing.T) {
	h, units := unitsOf(t, map[string]systemd.Unit{"nvsm.service": {OnStop: systemd.Never}})
	stopInVain(t, units, "nvsm.service")
	wantStates(t, units, map[string]string{"nvsm.service": "deactivating"})

	// Asked again, it waits for the same job.
	before := received(h, systemd.StopUnit)
	again := make(chan error, 1)
	go func() { again <- units.Stop(t.Context(), "nvsm.service") }()
	if err := h.Wait(t.Context(), func() bool { return received(h, systemd.StopUnit) > before }); err != nil {
		t.Fatal(err)
	}
	h.EndJobs(systemd.Done)
	if err := receive.From(t, again); err != nil {
		t.Error(err)
	}
	wantStates(t, units, map[string]string{"nvsm.service": "inactive"})
}

func TestUnitsThatAreStartedWhileTheyStopComeBack(t *testing.T) {
	_, units := unitsOf(t, map[string]systemd.Unit{"nvsm.service": {OnStop: systemd.Never}})
	stopInVain(t, units, "nvsm.service")
	if err := units.Start(t.Context(), "nvsm.service"); err != nil {
		t.Error(err)
	}
	wantStates(t, units, map[string]string{"nvsm.service": "active"})
}

// A stop may take minutes; only an answer is due at once.
func TestUnitsWaitForAJobLongerThanForAnAnswer(t *testing.T) {
	h, units := unitsOf(t, map[string]systemd.Unit{"nvsm.service": {OnStop: systemd.Never}})
	for units.Patience = 20 * time.Millisecond; ; units.Patience *= 2 {
		stopped := make(chan error, 1)
		go func() { stopped <- units.Stop(t.Context(), "nvsm.service") }()
		select {
		case err := <-stopped:
			stopped <- err
		case <-time.After(2 * units.Patience):
		}
		h.EndJobs(systemd.Done)
		err := receive.From(t, stopped)
		if errors.Is(err, host.ErrSystemdSilent) {
			continue // this machine is slow
		}
		if err != nil {
			t.Error(err)
		}
		return
	}
}

func TestUnitsOfASystemdThatNeverAnswersAreLeft(t *testing.T) {
	h, units := unitsOf(t, map[string]systemd.Unit{"nvsm.service": {}})
	for method, ask := range map[string]func(context.Context) error{
		systemd.StopUnit:  func(ctx context.Context) error { return units.Stop(ctx, "nvsm.service") },
		systemd.StartUnit: func(ctx context.Context) error { return units.Start(ctx, "nvsm.service") },
		systemd.ListUnitsByNames: func(ctx context.Context) error {
			_, err := units.States(ctx, []string{"nvsm.service"})
			return err
		},
	} {
		h.Fail(method, systemd.Fault{Silent: true})
		// Whatever was reached when the time is up, the error is the same; but the call has to be reached once.
		for units.Patience = 10 * time.Millisecond; received(h, method) == 0; units.Patience *= 2 {
			err := ask(t.Context())
			wantIs(t, err, host.ErrSystemdSilent)
			wantIs(t, err, context.DeadlineExceeded)
		}
		units.Patience = 0
		err := ask(givenUp(t, h, method))
		wantIs(t, err, context.Canceled)
		if errors.Is(err, host.ErrSystemdSilent) || errors.Is(err, host.ErrJobRunning) {
			t.Errorf("no one asks any more, and the error is %v", err)
		}
	}
	h.Mend()
	wantStates(t, units, map[string]string{"nvsm.service": "active"})
}

func TestUnitsOfAHostWithoutSystemd(t *testing.T) {
	dir := t.TempDir()
	unserved := filepath.Join(dir, "unserved")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: unserved})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	left.Close()
	h := systemdtest.Start(t, systemd.Options{NoSystemd: true})
	noConnectionStays(t)
	noSocketStays(t, h.Address())
	for name, units := range map[string]*host.Units{
		"no socket":                {Address: "unix:path=" + dir + "/missing"},
		"no program on the socket": {Address: "unix:path=" + unserved},
		"no systemd on the bus":    {Address: h.Address()},
		"by the environment":       {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", h.Address())
			_, err := units.States(t.Context(), []string{"nvsm.service"})
			wantIs(t, err, host.ErrNoSystemd)
			wantIs(t, units.Stop(t.Context(), "nvsm.service"), host.ErrNoSystemd)
			wantIs(t, units.Start(t.Context(), "nvsm.service"), host.ErrNoSystemd)
		})
	}
}

func TestUnitsAreFoundAgainAfterTheBus(t *testing.T) {
	h, units := unitsOf(t, map[string]systemd.Unit{"nvsm.service": {}})
	wantStates(t, units, map[string]string{"nvsm.service": "active"})
	if err := h.RestartBus(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := units.Stop(t.Context(), "nvsm.service"); err != nil {
		t.Error(err)
	}
	h.StopBus()
	wantIs(t, units.Start(t.Context(), "nvsm.service"), host.ErrNoSystemd)
	if err := h.RestartBus(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := units.Start(t.Context(), "nvsm.service"); err != nil {
		t.Error(err)
	}
	wantStates(t, units, map[string]string{"nvsm.service": "active"})
}

func TestUnitsAreNotWaitedForOnABusThatIsGone(t *testing.T) {
	h, units := unitsOf(t, map[string]systemd.Unit{"nvsm.service": {OnStop: systemd.Never}})
	stopInVain(t, units, "nvsm.service") // so that the answer to the next is all that is under way

	before := received(h, systemd.StopUnit)
	stopped := make(chan error, 1)
	go func() { stopped <- units.Stop(t.Context(), "nvsm.service") }()
	if err := h.Wait(t.Context(), func() bool { return received(h, systemd.StopUnit) > before }); err != nil {
		t.Fatal(err)
	}
	if err := h.RestartBus(t.Context()); err != nil {
		t.Fatal(err)
	}
	// It may be gone before the answer was there: then nothing is known of a job.
	if err := receive.From(t, stopped); err == nil || errors.Is(err, host.ErrNoSystemd) {
		t.Errorf("error is %v", err)
	}
	wantStates(t, units, map[string]string{"nvsm.service": "deactivating"})
	h.EndJobs(systemd.Done)
	wantStates(t, units, map[string]string{"nvsm.service": "inactive"})
}

func TestUnitsByTheDozenAndAllAtOnce(t *testing.T) {
	const many = 40
	all, active, inactive := map[string]systemd.Unit{}, map[string]string{}, map[string]string{}
	for i := range many {
		name := fmt.Sprintf("unit-%d.service", i)
		all[name], active[name], inactive[name] = systemd.Unit{}, "active", "inactive"
	}
	all["hangs.service"] = systemd.Unit{OnStop: systemd.Never}
	h, units := unitsOf(t, all)
	wantStates(t, units, active)

	// Each waits for its own job, and hears of all.
	hanging := make(chan error, 1)
	go func() { hanging <- units.Stop(t.Context(), "hangs.service") }()
	if err := h.Wait(t.Context(), func() bool { return h.Unit("hangs.service").ActiveState == "deactivating" }); err != nil {
		t.Fatal(err)
	}
	var stopping sync.WaitGroup
	for name := range active {
		stopping.Go(func() {
			if err := units.Stop(t.Context(), name); err != nil {
				t.Error(err)
			}
		})
	}
	stopping.Wait()
	select {
	case err := <-hanging:
		t.Errorf("a job that hangs has ended with those of other units: %v", err)
	default:
	}
	h.EndJobs(systemd.Canceled)
	if ended, _ := errors.AsType[*host.JobError](receive.From(t, hanging)); ended == nil || ended.Result != "canceled" {
		t.Errorf("the job that hung has come to %v", ended)
	}
	wantStates(t, units, inactive)
}

// relay is a way to a bus by which it sends only so many bytes, and receives only so many. Then it hangs up, or is silent.
type relay struct {
	sends, receives int64
	hangsUp         bool
}

const unlimited = 1 << 40

// to starts the relay, and is the address of its near end.
func (r relay) to(t *testing.T, address string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "relay")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			near, err := listener.AcceptUnix()
			if err != nil {
				return // the test is over
			}
			far, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: strings.TrimPrefix(address, "unix:path=")})
			if err != nil {
				t.Error(err)
				near.Close()
				return
			}
			hangUp := sync.OnceFunc(func() {
				near.Close()
				far.Close()
			})
			t.Cleanup(hangUp)
			pass := func(to, from *net.UnixConn, limit int64) {
				n, _ := io.CopyN(to, from, limit) // what comes of it is seen at the near end
				switch {
				case n < limit:
					hangUp()
				case r.hangsUp:
					_ = to.CloseWrite()
				}
			}
			go pass(near, far, r.sends)
			go pass(far, near, r.receives)
		}
	}()
	return "unix:path=" + path
}

// A bus may go away between any two bytes: before it speaks, in its greeting, with half an answer.
func TestUnitsOnABusThatHangsUpAreLeft(t *testing.T) {
	h, _ := unitsOf(t, map[string]systemd.Unit{"nvsm.service": {}})
	for name, ask := range conversations() {
		for n := int64(0); ; n += 8 {
			units := &host.Units{Address: relay{sends: n, receives: unlimited, hangsUp: true}.to(t, h.Address())}
			err := ask(t.Context(), units)
			if err == nil {
				break
			}
			if errors.Is(err, host.ErrNoSystemd) || errors.Is(err, host.ErrSystemdSilent) || !strings.Contains(err.Error(), "nvsm.service") {
				t.Errorf("%s on a bus that hangs up after %d bytes: %v", name, n, err)
			}
		}
	}
}

func TestUnitsOnABusThatFallsSilentAreLeft(t *testing.T) {
	h, _ := unitsOf(t, map[string]systemd.Unit{"nvsm.service": {}})
	for name, ask := range conversations() {
		for n := int64(0); ; n += 32 {
			units := &host.Units{Address: relay{sends: n, receives: unlimited}.to(t, h.Address())}
			// The longer the more is let through, or a slow machine would never come to the end.
			units.Patience = 5*time.Millisecond + time.Duration(n)*20*time.Microsecond
			ctx, cancel := context.WithTimeout(t.Context(), 2*units.Patience)
			err := ask(ctx, units)
			cancel()
			if err == nil {
				break
			}
			if !errors.Is(err, host.ErrSystemdSilent) && !errors.Is(err, host.ErrJobRunning) {
				t.Errorf("%s on a bus that falls silent after %d bytes: %v", name, n, err)
			}
		}
	}
}

// conversations are all that there are.
func conversations() map[string]func(context.Context, *host.Units) error {
	const name = "nvsm.service"
	return map[string]func(context.Context, *host.Units) error{
		"States": func(ctx context.Context, u *host.Units) error {
			_, err := u.States(ctx, []string{name})
			return err
		},
		"Stop":  func(ctx context.Context, u *host.Units) error { return u.Stop(ctx, name) },
		"Start": func(ctx context.Context, u *host.Units) error { return u.Start(ctx, name) },
	}
}

// A bus that was stopped by a signal still takes what fits into the kernel's buffers.
func TestUnitsOnABusThatStopsReadingAreLeft(t *testing.T) {
	h, _ := unitsOf(t, nil)
	const handshake = 256 // with a part of what follows
	names := slices.Repeat([]string{strings.Repeat("x", 247) + ".service"}, 1<<13)
	units := &host.Units{Address: relay{sends: unlimited, receives: handshake}.to(t, h.Address()), Patience: time.Second / 4}
	_, err := units.States(t.Context(), names)
	wantIs(t, err, host.ErrSystemdSilent)
}

func TestUnitsOnABusThatNeverSpeaksAreLeft(t *testing.T) {
	noConnectionStays(t)
	path := filepath.Join(t.TempDir(), "silent")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close() // no process accepts: only the kernel has taken the connection
	units := &host.Units{Address: "unix:path=" + path}
	for name, ask := range conversations() {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		err := ask(ctx, units)
		cancel()
		if !errors.Is(err, host.ErrSystemdSilent) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
