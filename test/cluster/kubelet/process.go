package kubelet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/test/sandbox"
)

// runProcess runs the container's process once and returns its exit code, or false if it could not start: why not is
// reported as the container's state.
func (w *worker) runProcess(kill context.Context, c *container) (code int32, ran bool) {
	if isClosed(w.stopping) {
		return 0, false
	}
	// Its own context: a liveness probe may kill this run of the container and no other.
	life, end := context.WithCancel(kill)
	defer end()
	cmd, err := w.entrypoint(life, c)
	if err == nil {
		err = w.k.devices.startable(w.latest(), &c.spec)
	}
	if err != nil {
		w.set(c, func(s *corev1.ContainerStatus) { s.State = waiting("CreateContainerConfigError", err.Error()) })
		return 0, false
	}
	logFile, err := w.openLog(c)
	if err != nil {
		w.set(c, func(s *corev1.ContainerStatus) { s.State = waiting("CreateContainerError", err.Error()) })
		return 0, false
	}
	defer logFile.Close() // the process has written into it, not we
	cmd.Stdout, cmd.Stderr = logFile, logFile
	ended, err := launch(cmd)
	if err != nil {
		w.set(c, func(s *corev1.ContainerStatus) { s.State = waiting("RunContainerError", err.Error()) })
		return 0, false
	}
	w.set(c, func(s *corev1.ContainerStatus) {
		if s.ContainerID != "" && s.State.Running == nil {
			s.RestartCount++
		}
		w.started(s)
	})
	w.log.Info("process started", zap.String("container", c.spec.Name), zap.Int("pid", cmd.Process.Pid))
	w.processes.add(cmd.Process.Pid)
	if w.k.OnStart != nil {
		w.k.OnStart(w.latest(), &c.spec, cmd.Process.Pid)
	}
	code = w.await(life, end, c, cmd, ended)
	w.processes.remove(cmd.Process.Pid)
	if w.k.OnEnd != nil {
		w.k.OnEnd(cmd.Process.Pid)
	}
	w.log.Info("process ended", zap.String("container", c.spec.Name), zap.Int32("code", code))
	return code, true
}

// await watches over a running process until it has ended.
func (w *worker) await(life context.Context, end func(), c *container, cmd *exec.Cmd, ended <-chan error) int32 {
	probing, stopProbing := context.WithCancel(life)
	defer stopProbing()
	stop, unhealthy := (<-chan struct{})(w.stopping), w.probe(probing, c)
	var grace <-chan time.Time
	for {
		select {
		case err := <-ended:
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // its children die with it, as in a container; there may be none
			code := exitCode(cmd, err)
			w.set(c, func(s *corev1.ContainerStatus) { w.terminated(s, code) })
			return code
		case <-stop:
			stop, unhealthy = nil, nil
			_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended just now
		case why := <-unhealthy:
			w.log.Warn("liveness probe failed", zap.String("container", c.spec.Name), zap.Error(why))
			unhealthy = nil
			_ = cmd.Process.Signal(syscall.SIGTERM) // as above
			timer := w.k.Clock.NewTimer(w.grace())
			defer timer.Stop()
			grace = timer.C()
		case <-grace:
			end()
		}
	}
}

// entrypoint is the container's process, not yet started.
func (w *worker) entrypoint(ctx context.Context, c *container) (*exec.Cmd, error) {
	argv0 := ""
	if len(c.spec.Command) > 0 {
		argv0 = c.spec.Command[0]
	}
	return w.command(ctx, c, argv0, c.image.Path, slices.Concat(afterFirst(c.spec.Command), c.spec.Args, c.image.Args))
}

// command is a process in the container, not yet started. It is killed with its children when ctx ends, or this process does.
func (w *worker) command(ctx context.Context, c *container, argv0, path string, args []string) (*exec.Cmd, error) {
	env, err := w.environment(c)
	if err != nil {
		return nil, err
	}
	mounts, err := w.mounts(c)
	if err != nil {
		return nil, err
	}
	cmd := sandbox.Command(ctx, w.k.SandboxBinary, sandbox.Options{Mounts: mounts, Argv0: argv0}, path, args...)
	cmd.Env = env.list() // nothing of the environment that the kubelet runs in
	cmd.Dir = "/"
	cmd.SysProcAttr.Setpgid = true
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return cmd, nil
}

// afterFirst drops the program: Image.Path replaces it.
func afterFirst(command []string) []string {
	if len(command) == 0 {
		return nil
	}
	return append([]string(nil), command[1:]...)
}

// mounts are what the container sees: the image's own mounts, what device plugins gave, and the pod's volumes.
func (w *worker) mounts(c *container) ([]sandbox.Mount, error) {
	all, err := w.processes.mounts(c.image.Mounts)
	if err != nil {
		return nil, err
	}
	all = append(all, c.image.Mounts...)
	for _, given := range w.k.devices.given(w.uid, c.spec.Name) {
		for _, m := range given.Mounts {
			all = append(all, sandbox.Mount{Source: w.k.onHost(m.Host), Target: m.Container})
		}
	}
	for _, m := range c.spec.VolumeMounts {
		source, err := w.volumes.source(m)
		if err != nil {
			return nil, err
		}
		all = append(all, sandbox.Mount{Source: source, Target: m.MountPath})
	}
	return append(all, c.image.Over...), nil
}

// logPath is the file that all runs of a container write into.
func (w *worker) logPath(c *container) string {
	pod := w.latest()
	return filepath.Join(w.k.Dir, "logs", fmt.Sprintf("%s_%s_%s.log", pod.Namespace, pod.Name, c.spec.Name))
}

func (w *worker) openLog(c *container) (*os.File, error) {
	file := w.logPath(c)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return nil, fmt.Errorf("making the directory of logs: %w", err)
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening the log of %s: %w", c.spec.Name, err)
	}
	return f, nil
}

// launch starts the command and returns a channel that reports its end. The kernel mistakes the death of the starting
// thread for that of the parent, so the thread stays until the process has ended.
func launch(cmd *exec.Cmd) (<-chan error, error) {
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this function
		err := cmd.Start()
		started <- err
		if err == nil {
			ended <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	return ended, nil
}

// exitCode is the code that a container runtime reports: 128 and the signal for a process that a signal killed.
func exitCode(cmd *exec.Cmd, err error) int32 {
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) && cmd.ProcessState == nil {
		return exitKilled
	}
	if status, isUnix := cmd.ProcessState.Sys().(syscall.WaitStatus); isUnix && status.Signaled() {
		return 128 + int32(status.Signal())
	}
	return int32(cmd.ProcessState.ExitCode())
}
