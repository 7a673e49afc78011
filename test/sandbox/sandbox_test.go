package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// nobody is a user without any right on Debian and most others.
const nobody = 65534

var sandboxBinary string

// printDeathSignal, in the environment, has this program print the signal by which the kernel kills it when its parent dies.
const printDeathSignal = "GPUSLICE_TEST_PRINT_DEATH_SIGNAL"

// The kernel answers for the thread that asks. While packages are initialised, that is the main thread, which has the signal.
func init() {
	if os.Getenv(printDeathSignal) == "" {
		return
	}
	var signal int32
	if err := unix.Prctl(unix.PR_GET_PDEATHSIG, uintptr(unsafe.Pointer(&signal)), 0, 0, 0); err != nil {
		log.Fatal(err)
	}
	fmt.Print(signal)
	os.Exit(0)
}

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "sandbox-test-")
		if err != nil {
			log.Print(err)
			return 1
		}
		defer os.RemoveAll(dir)
		sandboxBinary = filepath.Join(dir, "sandbox")
		build := exec.CommandContext(context.Background(), "go", "build", "-o", sandboxBinary, "./cmd/sandbox")
		if out, err := build.CombinedOutput(); err != nil {
			log.Printf("building cmd/sandbox: %v\n%s", err, out)
			return 1
		}
		if err := os.Chmod(dir, 0o755); err != nil {
			log.Print(err)
			return 1
		}
		return m.Run()
	}())
}

// host makes a directory that everybody can read, with the files named by their paths in it.
func host(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{filepath.Dir(dir), dir} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func requireSandbox(t *testing.T) {
	t.Helper()
	binaries.KeepOutOfTestCache()
	if err := sandbox.Possible(); err != nil {
		t.Skip(err)
	}
}

// simulated is a host as the simulator of GPUs renders it.
func simulated(t *testing.T) sandbox.Options {
	t.Helper()
	dir := host(t, map[string]string{
		"proc/driver/nvidia-caps/mig-minors":                  "config 1\nmonitor 2\n",
		"proc/modules":                                        "nvidia 16384 0 - Live 0x0000000000000000\n",
		"sys/bus/pci/devices/0000:17:00.0/vendor":             "0x10de\n",
		"var/lib/kubelet/device-plugins/kubelet_internal.txt": "checkpoint\n",
	})
	return sandbox.Options{
		Tmpfs: []string{"/var/lib/kubelet"},
		Mounts: []sandbox.Mount{
			{Source: filepath.Join(dir, "proc/driver"), Target: "/proc/driver"},
			{Source: filepath.Join(dir, "proc/modules"), Target: "/proc/modules"},
			{Source: filepath.Join(dir, "sys/bus/pci"), Target: "/sys/bus/pci"},
			{Source: filepath.Join(dir, "var/lib/kubelet/device-plugins"), Target: "/var/lib/kubelet/device-plugins"},
			{Source: filepath.Join(dir, "proc/modules"), Target: "/run/secrets/nowhere/else/token"},
			{Source: filepath.Join(dir, "proc/driver"), Target: "/nowhere-at-all/driver"},
		},
	}
}

const readAll = `cat /proc/driver/nvidia-caps/mig-minors /proc/modules /sys/bus/pci/devices/0000:17:00.0/vendor \
	/var/lib/kubelet/device-plugins/kubelet_internal.txt /run/secrets/nowhere/else/token \
	/nowhere-at-all/driver/nvidia-caps/mig-minors
echo written > /var/lib/kubelet/new && cat /var/lib/kubelet/new
cat /proc/self/comm /proc/$$/comm`

const wantAll = `config 1
monitor 2
nvidia 16384 0 - Live 0x0000000000000000
0x10de
checkpoint
nvidia 16384 0 - Live 0x0000000000000000
config 1
monitor 2
written
cat
sh
`

// Where the main goroutine of the sandbox may change threads, one program in forty loses the signal.
func TestAProgramKeepsTheSignalOfItsParentsDeath(t *testing.T) {
	requireSandbox(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	options := sandbox.Options{Tmpfs: []string{"/mnt"}}
	var starting sync.WaitGroup
	for range 12 {
		starting.Go(func() {
			runtime.LockOSThread() // the kernel takes the end of this thread for the death of the parent
			for range 10 {
				c := sandbox.Command(t.Context(), sandboxBinary, options, self)
				c.Env = append(os.Environ(), printDeathSignal+"=1")
				c.SysProcAttr.Pdeathsig = syscall.SIGKILL
				if out, err := c.Output(); err != nil || string(out) != "9" {
					t.Errorf("the program is to be killed by signal %q, %v", out, err)
				}
			}
		})
	}
	starting.Wait()
}

func TestASimulatedHostIsSeenAtTheSystemsOwnPaths(t *testing.T) {
	requireSandbox(t)
	out, err := sandbox.Command(t.Context(), sandboxBinary, simulated(t), "sh", "-ec", readAll).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if diff := cmp.Diff(wantAll, string(out)); diff != "" {
		t.Errorf("what the program read (-want +got):\n%s", diff)
	}
}

func TestAnUnprivilegedUserSeesTheSame(t *testing.T) {
	requireSandbox(t)
	if os.Geteuid() != 0 {
		t.Skip("this is what the test before this one ran as; becoming nobody takes root")
	}
	o := simulated(t)
	args := []string{"--tmpfs=" + o.Tmpfs[0]}
	for _, m := range o.Mounts {
		args = append(args, "--bind="+m.Source+"="+m.Target)
	}
	cmd := exec.CommandContext(t.Context(), sandboxBinary, append(args, "--", "sh", "-ec", readAll)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	if err != nil && strings.Contains(string(out), "no mount namespace") {
		t.Skipf("%s", out)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if diff := cmp.Diff(wantAll, string(out)); diff != "" {
		t.Errorf("what the program read (-want +got):\n%s", diff)
	}
}

func TestNothingIsLeftOutside(t *testing.T) {
	requireSandbox(t)
	before, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	_, missingBefore := os.Stat("/var/lib/kubelet")
	cmd := sandbox.Command(t.Context(), sandboxBinary, simulated(t), "sh", "-c", "echo x > /run/secrets/nowhere/y")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	after, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(before), string(after)); diff != "" {
		t.Errorf("mounts of this process changed (-before +after):\n%s", diff)
	}
	if _, err := os.Stat("/run/secrets/nowhere"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("/run/secrets/nowhere of the machine: %v, want that it does not exist", err)
	}
	if _, err := os.Stat("/var/lib/kubelet"); (err == nil) != (missingBefore == nil) {
		t.Errorf("/var/lib/kubelet of the machine came or went: before %v, after %v", missingBefore, err)
	}
}

func TestARebuiltDirectoryKeepsWhatItHeld(t *testing.T) {
	requireSandbox(t)
	dir := host(t, map[string]string{"real/file": "kept\n", "real/sub/deep": "deep\n", "shown": "shown\n"})
	if err := os.Symlink("file", filepath.Join(dir, "real/link")); err != nil {
		t.Fatal(err)
	}
	o := sandbox.Options{Mounts: []sandbox.Mount{{
		Source: filepath.Join(dir, "shown"), Target: filepath.Join(dir, "real/not/yet/there"),
	}}}
	const read = `cd "$0"; cat file link sub/deep not/yet/there; echo changed > file`
	out, err := sandbox.Command(t.Context(), sandboxBinary, o, "sh", "-ec", read, filepath.Join(dir, "real")).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if diff := cmp.Diff("kept\nkept\ndeep\nshown\n", string(out)); diff != "" {
		t.Errorf("what the program read (-want +got):\n%s", diff)
	}
	kept, err := os.ReadFile(filepath.Join(dir, "real/file"))
	if err != nil || string(kept) != "changed\n" {
		t.Errorf("the file behind the rebuilt directory holds %q, %v; want what the program wrote to it", kept, err)
	}
}
