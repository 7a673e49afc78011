package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// variables are what the shell has beside the user's variables.
func (w *world) variables() [][2]string {
	return [][2]string{
		{"KUBECONFIG", w.cluster.AdminKubeconfig()},
		{"KUBECACHEDIR", filepath.Join(w.dir, "cache")},
		{"KUBERC", "off"}, // the user's defaults and aliases are for the user's clusters
		{dirVariable, w.dir},
	}
}

// exports are lines that make another shell one of the playground.
func (w *world) exports() string {
	var text strings.Builder
	for _, v := range w.variables() {
		fmt.Fprintf(&text, "export %s=%q\n", v[0], v[1])
	}
	fmt.Fprintf(&text, "export PATH=%q:\"$PATH\"\ncd %q\n", filepath.Join(w.dir, "bin"), w.tries(""))
	return text.String()
}

// environ is the environment of the shell's programs.
func (w *world) environ() []string {
	env := append(os.Environ(), "PATH="+filepath.Join(w.dir, "bin")+":"+os.Getenv("PATH"))
	for _, v := range w.variables() {
		env = append(env, v[0]+"="+v[1])
	}
	return env
}

// rc begins an interactive bash: the user's own file, and then what the playground sets.
const rc = `[ -f ~/.bashrc ] && . ~/.bashrc
unalias kubectl gpusim menu playground 2>/dev/null
. %[1]q
PS1='(playground) \$ '
`

// greet shows the nodes, and what to try.
func (w *world) greet(ctx context.Context, out io.Writer) error {
	status := exec.CommandContext(ctx, w.plugin, "status")
	status.Env, status.Stdout, status.Stderr = w.environ(), out, out
	if err := status.Run(); err != nil {
		return fmt.Errorf("showing the nodes: %w", err)
	}
	fmt.Fprintln(out)
	writeMenu(out)
	return nil
}

// leaving is how long the shell may take to end once it is asked to.
const leaving = 2 * time.Second

// shell runs the user's shell until that ends. Programs that come by standard input, and not from a terminal, run in it as well.
func (w *world) shell(ctx context.Context) error {
	runtime.LockOSThread() // the shell is ended with the thread that has started it
	defer runtime.UnlockOSThread()
	in := int(os.Stdin.Fd())
	ctx, stop := untilHangup(ctx, in)
	defer stop()
	cmd, err := w.userShell(ctx)
	if err != nil {
		return err
	}
	cmd.Dir, cmd.Env = w.tries(""), append(w.environ(), cmd.Env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGHUP}
	cmd.Cancel, cmd.WaitDelay = func() error { return cmd.Process.Signal(syscall.SIGHUP) }, leaving
	if term.IsTerminal(in) {
		// Ctrl-C is for what the user runs, and not for this program.
		cmd.SysProcAttr.Foreground, cmd.SysProcAttr.Setpgid, cmd.SysProcAttr.Ctty = true, true, in
		defer takeBack(in)
	}
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && (exit.Exited() || ctx.Err() != nil) {
		return nil // how the user's last command has ended is no error of the playground
	}
	return err
}

// hangupPoll is how often the context is looked at while the terminal is there.
const hangupPoll = time.Second

// untilHangup returns a context that ends with the terminal, too. If another program leads the terminal's session, as make in a terminal of its own, the
// kernel sends a hang-up to that program alone.
func untilHangup(ctx context.Context, terminal int) (context.Context, context.CancelFunc) {
	ctx, stop := context.WithCancel(ctx)
	if !term.IsTerminal(terminal) {
		return ctx, stop
	}
	go func() {
		defer stop()
		for ctx.Err() == nil {
			fds := []unix.PollFd{{Fd: int32(terminal)}} // a hang-up is reported in any case
			if n, err := unix.Poll(fds, int(hangupPoll.Milliseconds())); n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
				return
			}
		}
	}()
	return ctx, stop
}

// userShell is bash, or where there is none sh.
func (w *world) userShell(ctx context.Context) (*exec.Cmd, error) {
	if bash, err := exec.LookPath("bash"); err == nil {
		file := filepath.Join(w.dir, "bashrc")
		if err := os.WriteFile(file, fmt.Appendf(nil, rc, filepath.Join(w.dir, "env")), 0o600); err != nil {
			return nil, fmt.Errorf("making the shell's files: %w", err)
		}
		if !term.IsTerminal(int(os.Stdin.Fd())) {
			return exec.CommandContext(ctx, bash), nil
		}
		return exec.CommandContext(ctx, bash, "--rcfile", file, "-i"), nil
	}
	sh, err := exec.LookPath("sh")
	if err != nil {
		return nil, fmt.Errorf("looking for a shell: %w", err)
	}
	cmd := exec.CommandContext(ctx, sh)
	cmd.Env = []string{"ENV=" + filepath.Join(w.dir, "env")}
	return cmd, nil
}

// takeBack makes this program the one that the terminal's keys are for, once the shell has ended.
func takeBack(terminal int) {
	signal.Ignore(syscall.SIGTTOU)
	defer signal.Reset(syscall.SIGTTOU)
	_ = unix.IoctlSetPointerInt(terminal, unix.TIOCSPGRP, syscall.Getpgrp()) // without it Ctrl-C does nothing for a second or two
}
