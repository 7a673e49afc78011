package stalledfs_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/test/receive"
	"github.com/gpuslice/gpuslice/test/stalledfs"
)

// Any program of the machine may ask for a mount. A test that took that for the call it waits for would let go of one that has not begun.
func TestOnlyACallOfTheTestsOwnProcessIsReported(t *testing.T) {
	mounted := stalledfs.Mount(t, "file")
	path := filepath.Join(mounted.Dir, "file")
	asked := mounted.Stall()
	other := exec.CommandContext(t.Context(), "stat", path)
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	for end := time.After(5 * time.Minute); ; {
		var pid int
		select {
		case pid = <-mounted.Others():
		case <-asked:
			t.Fatal("the call of another process is taken for ours")
		case <-end:
			t.Fatal("the other process asks for nothing")
		}
		if pid == other.Process.Pid {
			break
		}
	}
	done := make(chan error, 1)
	go func() {
		_, err := os.Stat(path)
		done <- err
	}()
	<-asked
	select {
	case err := <-done:
		t.Errorf("the server is silent, and ours was answered: %v", err)
	default:
	}
	mounted.Answer()
	if err := receive.From(t, done); err != nil {
		t.Error(err)
	}
	if err := other.Wait(); err != nil {
		t.Errorf("the other process: %v", err)
	}
}
