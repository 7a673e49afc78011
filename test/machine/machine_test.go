package machine_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/test/machine"
)

// asProgram makes the test binary a program on a machine, which does what the variable names.
const asProgram = "MACHINE_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) == "" {
		os.Exit(m.Run())
	}
	if err := machine.Enter(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(program(os.Getenv(asProgram)))
}

func program(what string) int {
	switch what {
	case "looks":
		names, err := filepath.Glob("/run/*")
		fmt.Println("in /run:", names, err)
		address, err := net.Listen("tcp", machine.Address+":0")
		fmt.Println("listens:", address != nil, err)
		processes, err := filepath.Glob("/proc/[0-9]*")
		fmt.Println("processes:", len(processes), err)
		return 7
	case "leaves":
		cgroup := filepath.Join("/sys/fs/cgroup", machine.Cgroup(), "below")
		if _, err := os.Stat("/sys/fs/cgroup/pids"); err == nil { // v1
			cgroup = filepath.Join("/sys/fs/cgroup/pids", machine.Cgroup(), "below")
		}
		fmt.Println(cgroup)
		orphan := exec.Command("sleep", "1000")
		for _, err := range []error{
			os.Mkdir(cgroup, 0o755), orphan.Start(),
			os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte(fmt.Sprint(orphan.Process.Pid)), 0o644),
		} {
			if err != nil {
				fmt.Println(err)
				return 1
			}
		}
		return 0
	}
	return 2
}

func run(t *testing.T, what string) (output string, code int) {
	t.Helper()
	if err := machine.Possible(); err != nil {
		t.Skip(err)
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), asProgram+"="+what)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

func TestAProgramHasAMachineToItself(t *testing.T) {
	out, code := run(t, "looks")
	const want = "in /run: [] <nil>\nlistens: true <nil>\nprocesses: 2 <nil>\n"
	if out != want || code != 7 {
		t.Errorf("it ended with code %d, want 7, and printed:\n%swant:\n%s", code, out, want)
	}
	if l, err := net.Listen("tcp", machine.Address+":0"); err == nil {
		t.Errorf("outside, %v can be listened on", l.Addr())
		_ = l.Close() // nothing was accepted
	}
}

func TestNothingIsLeftOfAMachine(t *testing.T) {
	out, code := run(t, "leaves")
	if code != 0 {
		t.Fatalf("it ended with code %d: %s", code, out)
	}
	if _, err := os.Stat(filepath.Dir(strings.TrimSpace(out))); !os.IsNotExist(err) {
		t.Errorf("its cgroup is still there (%v)", err)
	}
}
