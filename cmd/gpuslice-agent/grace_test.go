package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// TestPromise14ACommandThatDoesNotComeBackIsEnded: what reads, or computes, knows of no context.
func TestPromise14ACommandThatDoesNotComeBackIsEnded(t *testing.T) {
	if fifo := os.Getenv(aloneKey); fifo != "" {
		os.Args = []string{"gpuslice-agent", "plan", "--offline", "--mig-config", "mine", "-f", fifo}
		main()
		return
	}
	fifo := filepath.Join(t.TempDir(), "configs.yaml")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.timeout=2m")
	c.Env = append(os.Environ(), aloneKey+"="+fifo)
	var said bytes.Buffer
	c.Stdout, c.Stderr = &said, &said
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	silent, err := os.OpenFile(fifo, os.O_WRONLY, 0) // when this comes back, the command has begun to read
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	err = c.Wait()
	if failed, ok := errors.AsType[*exec.ExitError](err); !ok || failed.ExitCode() != exitKilled {
		t.Errorf("%v: %s", err, said.String())
	}
}

func TestOnlyCommandsThatChangeSomethingHaveGrace(t *testing.T) {
	for name, want := range map[string]string{"run": "1m50s", "recover": "1m50s", "plan": "2s", "health": "2s", "none": "2s"} {
		if got := graceOf(command(), []string{name}).String(); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}
