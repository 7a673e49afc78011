package realkubelet

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// daemon is a program of the node. It ends with the machine, if not before.
type daemon struct {
	name  string
	log   string
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has
}

// start runs a program; its output is added to the log. The directory of the program comes first on its PATH.
func start(log, path string, args ...string) (*daemon, error) {
	name := filepath.Base(path)
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	defer out.Close()
	cmd := exec.Command(path, args...)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(path)+":"+os.Getenv("PATH"))
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	d := &daemon{name: name, log: log, cmd: cmd, ended: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // whoever waits for the daemon sees that it is gone
		close(d.ended)
	}()
	return d, nil
}

// stop kills the program; it need not run.
func (d *daemon) stop() error {
	if d == nil {
		return nil
	}
	if err := d.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stopping %s: %w", d.name, err)
	}
	<-d.ended
	return nil
}

func (d *daemon) hasEnded() bool {
	select {
	case <-d.ended:
		return true
	default:
		return false
	}
}
