package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gofrs/flock"
	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/receive"
)

// aloneKey says that the test has a process of its own, in which nothing else has loaded the library.
const aloneKey = "GPUSLICE_TEST_ALONE"

// The loop ends with its context, and a call that hangs in the driver does not.
func TestTheNextAgentIsKeptOutWhileACallIsInTheLibrary(t *testing.T) {
	if os.Getenv(aloneKey) == "" {
		alone(t)
		return
	}
	dir, gpus := simulated(t, "usr/lib64")
	if err := gpus.Fail(gpusim.Init, gpusim.Fault{Hang: true}); err != nil {
		t.Fatal(err)
	}
	kubeconfig, lockFile := nobodysKubeconfig(t), filepath.Join(dir, "agent.lock")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		c := command() //nolint:contextcheck // ExecuteContext gives it
		c.SetArgs([]string{"run", "--node", "n", "--kubeconfig", kubeconfig, "--driver-root", dir, "--lock", lockFile, "--state-dir", dir})
		ended <- c.ExecuteContext(ctx)
	}()
	for !inLibrary(t) {
		select {
		case err := <-ended:
			t.Fatal("the agent has ended before a call hung:", err)
		case <-time.After(10 * time.Millisecond): // the library does not show that a call waits in it
		}
	}
	cancel()
	if err := receive.From(t, ended); err != nil {
		t.Fatal(err)
	}
	runtime.GC() // closes files that the program does not refer to any more
	runtime.GC()
	if !inLibrary(t) {
		t.Fatal("the call has come back")
	}
	next := flock.New(lockFile)
	defer next.Close()
	if free, err := next.TryLock(); err != nil || free {
		t.Errorf("the next agent may act: %t, %v", free, err)
	}
}

// Two agents of one machine do not act at once: the second waits for as long as the first has the lock, and then has it.
func TestASecondAgentWaitsForTheLock(t *testing.T) {
	o := options{lockFile: filepath.Join(t.TempDir(), "agent.lock")}
	first := flock.New(o.lockFile)
	if locked, err := first.TryLock(); err != nil || !locked {
		t.Fatal(locked, err)
	}
	synctest.Test(t, func(t *testing.T) {
		ended := make(chan error, 1)
		go func() { ended <- o.lock(t.Context(), zap.NewNop()) }()
		select {
		case err := <-ended:
			t.Fatalf("the second agent goes on beside the first: %v", err)
		case <-time.After(time.Hour):
		}
		if err := first.Unlock(); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	if free, err := first.TryLock(); err != nil || free {
		t.Errorf("the second agent goes on without the lock: %t, %v", free, err)
	}
	if err := processLock.Close(); err != nil {
		t.Error(err)
	}
}

// alone runs the test in a process of its own.
func alone(t *testing.T) {
	t.Helper()
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.timeout=2m")
	c.Env = append(os.Environ(), aloneKey+"=yes")
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// nobodysKubeconfig is the kubeconfig of an API server that does not answer.
func nobodysKubeconfig(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	config := `{"apiVersion":"v1","kind":"Config","clusters":[{"name":"c","cluster":{"server":"http://127.0.0.1:1"}}],` +
		`"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],"users":[{"name":"u","user":{}}],"current-context":"c"}`
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// inLibrary reports whether a call of this process is in NVIDIA's library.
func inLibrary(t *testing.T) bool {
	t.Helper()
	var stacks bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&stacks, 2); err != nil {
		t.Fatal(err)
	}
	return strings.Contains(stacks.String(), "lib.(*Driver).runExclusively.func")
}
