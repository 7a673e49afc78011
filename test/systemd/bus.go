package systemd

import (
	"bufio"
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"github.com/godbus/dbus/v5"
)

// ErrNoDaemon means that this machine has no dbus-daemon.
var ErrNoDaemon = errors.New("dbus-daemon is not installed: on Debian it is in the package dbus")

// maxSocket is what the kernel takes as the path of a Unix socket, in bytes.
const maxSocket = 107

// config lets everyone say everything. It names no user, so dbus-daemon keeps the user that started it.
const config = `<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <listen>%s</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <allow own="*"/>
    <allow send_destination="*"/>
    <allow receive_sender="*"/>
  </policy>
</busconfig>
`

// bus is a dbus-daemon that runs.
type bus struct {
	process *os.Process
	ended   chan struct{} // closed once it is gone, and waited for
}

// address is the address of the bus with its socket in dir, as D-Bus writes it.
func address(dir string) string {
	return "unix:path=" + dbus.EscapeBusAddressValue(socket(dir))
}

func socket(dir string) string { return filepath.Join(dir, "system_bus_socket") }

// startBus runs a dbus-daemon with its socket, settings and log in dir, and returns when it listens.
func startBus(ctx context.Context, dir string) (*bus, error) {
	program, err := exec.LookPath("dbus-daemon")
	if err != nil {
		return nil, ErrNoDaemon
	}
	if len(socket(dir)) > maxSocket {
		return nil, fmt.Errorf("starting dbus-daemon: the path of its socket, %s, is longer than %d bytes: choose a shorter directory",
			socket(dir), maxSocket)
	}
	settings := filepath.Join(dir, "dbus.conf")
	var escaped bytes.Buffer
	if err := xml.EscapeText(&escaped, []byte(address(dir))); err != nil {
		return nil, fmt.Errorf("starting dbus-daemon: %w", err)
	}
	if err := os.WriteFile(settings, fmt.Appendf(nil, config, &escaped), 0o600); err != nil {
		return nil, fmt.Errorf("starting dbus-daemon: %w", err)
	}
	// A killed daemon has left it behind.
	if err := os.Remove(socket(dir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("starting dbus-daemon: %w", err)
	}
	b, err := run(ctx, program, settings, filepath.Join(dir, "dbus.log"))
	if err != nil {
		return nil, fmt.Errorf("starting dbus-daemon: %w", err)
	}
	return b, nil
}

// run starts the program and waits for the line that says it is listening.
func run(ctx context.Context, program, settings, log string) (*bus, error) {
	out, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	says, said, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer says.Close()
	cmd := exec.Command(program, "--config-file="+settings, "--nofork", "--nopidfile", "--print-address=3")
	cmd.Env = []string{} // variables of the user are settings too
	cmd.Stdout, cmd.Stderr = out, out
	cmd.ExtraFiles = []*os.File{said} // its descriptor 3
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig: syscall.SIGKILL,
		Setpgid:   true, // Ctrl-C is for the parent, which stops it
	}
	b := &bus{ended: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The kernel sends Pdeathsig when the thread that started it ends: this goroutine keeps one until then.
		runtime.LockOSThread()
		err := cmd.Start()
		b.process = cmd.Process
		started <- err
		if err == nil {
			_ = cmd.Wait() // that it was killed
			close(b.ended)
		}
	}()
	err = <-started
	said.Close()
	if err != nil {
		return nil, err
	}
	cancelled := context.AfterFunc(ctx, func() { _ = b.process.Kill() }) // gone already: the line does not come either
	defer cancelled()
	line, err := bufio.NewReader(says).ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "unix:") || ctx.Err() != nil {
		b.stop()
		text, _ := os.ReadFile(log) // no log, no text
		return nil, fmt.Errorf("it does not listen: %w", errors.Join(ctx.Err(), errors.New(strings.TrimSpace(string(text)))))
	}
	return b, nil
}

// stop kills it, and returns when it is gone.
func (b *bus) stop() {
	_ = b.process.Kill() // gone already is as good
	<-b.ended
}
