package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// mpsControlName is the name under which this command replaces NVIDIA's, which is part of its driver.
const mpsControlName = "nvidia-cuda-mps-control"

// mpsParent names an environment variable with a process; the daemon ends when that process ends.
const mpsParent = "GPUSIM_MPS_PARENT"

// mpsControl is the part of nvidia-cuda-mps-control that NVIDIA's MPS control daemon for Kubernetes and its device
// plugin run. With -d it starts a daemon; without it, it sends commands from stdin to the daemon and prints the
// answers. Both use the folders CUDA_MPS_PIPE_DIRECTORY and CUDA_MPS_LOG_DIRECTORY.
//
// The daemon ends with the process that started it, as it does when a container ends.
func mpsControl() *cobra.Command {
	pipes := mpsDirectory("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
	logs := mpsDirectory("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps")
	var background, foreground bool
	cmd := &cobra.Command{
		Use:          mpsControlName,
		Short:        "Start a simulated control daemon of MPS, or talk to the one that runs",
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case background:
				return startMPS(cmd.Context(), pipes)
			case foreground:
				return runMPS(cmd.Context(), pipes, logs)
			default:
				return sendMPS(pipes, cmd.InOrStdin(), cmd.OutOrStdout())
			}
		},
	}
	cmd.Flags().BoolVarP(&background, "daemon", "d", false, "start the daemon in the background")
	cmd.Flags().BoolVarP(&foreground, "foreground", "f", false, "start the daemon in the foreground")
	return cmd
}

func mpsDirectory(variable, otherwise string) string {
	if dir := os.Getenv(variable); dir != "" {
		return dir
	}
	return otherwise
}

func mpsSocket(pipes string) string { return filepath.Join(pipes, "control") }

// mpsPatience is how long a daemon may take to start.
const mpsPatience = 10 * time.Second

var errMPSRuns = errors.New("an instance of this daemon is already running")

// startMPS runs the daemon in another process, and returns when the daemon answers.
func startMPS(ctx context.Context, pipes string) error {
	if mpsAnswers(pipes) {
		return errMPSRuns
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	started, said, err := os.Pipe()
	if err != nil {
		return err
	}
	defer started.Close()
	daemon := exec.CommandContext(context.WithoutCancel(ctx), self, "-f")
	daemon.Args[0] = mpsControlName
	daemon.Env = append(os.Environ(), mpsParent+"="+strconv.Itoa(os.Getppid()))
	daemon.Stdout = said // closed when it listens, or ends
	daemon.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = errors.Join(daemon.Start(), said.Close())
	if err != nil {
		return fmt.Errorf("starting the daemon: %w", err)
	}
	if err := started.SetReadDeadline(time.Now().Add(mpsPatience)); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, started); err != nil {
		return fmt.Errorf("waiting for the daemon: %w", err)
	}
	if !mpsAnswers(pipes) {
		return fmt.Errorf("the daemon does not answer at %s", mpsSocket(pipes))
	}
	return nil
}

func mpsAnswers(pipes string) bool {
	conn, err := net.Dial("unix", mpsSocket(pipes))
	if err != nil {
		return false
	}
	return conn.Close() == nil
}

// runMPS is the daemon. It ends on a quit command, on a signal, and with the process that it follows.
func runMPS(ctx context.Context, pipes, logs string) error {
	if mpsAnswers(pipes) {
		return errMPSRuns
	}
	ending, end := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer end()
	if err := endWith(os.Getenv(mpsParent), end); err != nil {
		return err
	}
	// A killed daemon has left its socket behind.
	if err := os.Remove(mpsSocket(pipes)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", mpsSocket(pipes))
	if err != nil {
		return fmt.Errorf("listening at the pipe directory: %w", err)
	}
	defer context.AfterFunc(ending, func() { _ = listener.Close() })() // it is closed already if a command has ended the daemon
	log, err := os.OpenFile(filepath.Join(logs, "control.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	defer log.Close()
	fmt.Fprintf(log, "[%s Control %d] Starting control daemon using socket %s\n", time.Now().Format(time.DateTime), os.Getpid(), mpsSocket(pipes))
	if os.Getenv(mpsParent) != "" {
		if err := os.Stdout.Close(); err != nil {
			return err
		}
	}
	d := mpsDaemon{log: log, quit: listener.Close, pinned: map[string]string{}}
	for {
		conn, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		d.serve(conn)
	}
}

// endWith calls end when the process has ended; an empty number is none.
func endWith(pid string, end func()) error {
	if pid == "" {
		return nil
	}
	n, err := strconv.Atoi(pid)
	if err != nil {
		return fmt.Errorf("%s is %q: use a process id", mpsParent, pid)
	}
	fd, err := unix.PidfdOpen(n, 0)
	if err != nil {
		return fmt.Errorf("looking after process %d: %w", n, err)
	}
	go func() {
		defer end()
		for {
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
			if !errors.Is(err, unix.EINTR) {
				return
			}
		}
	}()
	return nil
}

// mpsDaemon is the state of the daemon.
type mpsDaemon struct {
	log  io.Writer
	quit func() error

	threads string            // percentage of the threads that a client may have
	pinned  map[string]string // memory that a client may have, by the index of the GPU
}

// serve answers the commands of one connection, each a line.
func (d *mpsDaemon) serve(conn net.Conn) {
	defer conn.Close()
	lines := bufio.NewScanner(conn)
	for lines.Scan() {
		answer := d.answer(strings.Fields(lines.Text()))
		fmt.Fprintf(d.log, "[%s Control %d] NEW UI: %s: %s\n", time.Now().Format(time.DateTime), os.Getpid(), lines.Text(), answer)
		if _, err := fmt.Fprint(conn, answer); err != nil {
			return
		}
	}
}

func (d *mpsDaemon) answer(command []string) string {
	known := map[string]struct {
		arguments int
		do        func(arguments []string) string
	}{
		"get_default_active_thread_percentage": {0, func([]string) string { return cmp.Or(d.threads, "100.0") + "\n" }},
		"set_default_active_thread_percentage": {1, d.setThreads},
		"get_default_device_pinned_mem_limit":  {1, func(of []string) string { return d.pinned[of[0]] + "\n" }},
		"set_default_device_pinned_mem_limit": {2, func(to []string) string {
			d.pinned[to[0]] = to[1]
			return ""
		}},
		"quit": {0, func([]string) string {
			_ = d.quit() // it is closed already if it is asked to end by other means, too
			return ""
		}},
	}
	if len(command) == 0 {
		return ""
	}
	if c, ok := known[command[0]]; ok && c.arguments == len(command)-1 {
		return c.do(command[1:])
	}
	return "Unknown command\n"
}

func (d *mpsDaemon) setThreads(to []string) string {
	percentage, err := strconv.ParseFloat(to[0], 64)
	if err != nil || percentage <= 0 || percentage > 100 {
		return "Invalid argument\n"
	}
	d.threads = strconv.FormatFloat(percentage, 'f', 1, 64)
	return d.threads + "\n"
}

// sendMPS sends commands to the daemon. After a quit command the daemon is gone when sendMPS returns.
func sendMPS(pipes string, commands io.Reader, out io.Writer) error {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: mpsSocket(pipes)})
	if err != nil {
		return errors.New("cannot find MPS control daemon process")
	}
	defer conn.Close()
	if _, err := io.Copy(conn, commands); err != nil {
		return fmt.Errorf("commanding the daemon: %w", err)
	}
	if err := conn.CloseWrite(); err != nil {
		return fmt.Errorf("commanding the daemon: %w", err)
	}
	if _, err := io.Copy(out, conn); err != nil {
		return fmt.Errorf("hearing the daemon: %w", err)
	}
	return nil
}
