package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/nvml/aside"
)

const (
	// systemBus is where the specification of D-Bus has the system bus. /var/run, which it still writes, need not exist
	// in a container.
	systemBus = "unix:path=/run/dbus/system_bus_socket"
	// busPatience is what libdbus and systemd's own tools wait for an answer.
	busPatience = 25 * time.Second
)

// peer is a service on the system bus, with the errors that it may answer with.
type peer struct {
	name, bus             string // its name in messages, and on the bus
	none, silent, refuses error
	means                 map[string]error // this package's errors, by the names of its own
	advice                map[error]string // an administrator's remedy for each
}

// busAddress returns the address of the system bus: from the setting, the environment, or the default.
func busAddress(set string) string {
	if set != "" {
		return set
	}
	if address := os.Getenv("DBUS_SYSTEM_BUS_ADDRESS"); address != "" {
		return address
	}
	return systemBus
}

// line is a connection to the bus, for one conversation.
type line struct {
	*dbus.Conn
	socket *net.UnixConn
	// takeTime keeps the line from ending with its context.
	takeTime func() bool
}

// dial connects to the bus and says hello. When ctx ends, so does every call that is under way, and the connection; the
// caller hangs up in any case.
//
// When a context ends, godbus (v5.2.2) forgets the call, or closes the socket in the middle of a message. It then loses an inhibitor's descriptor
// that is just arriving, and this process cannot release that inhibitor before it ends. So the end of ctx only ends reading: godbus still reads the
// data that the kernel has received by then, and then ends every call, once. Nor does a bus that has stopped to read hold up the caller.
//
// It connects in the lane: the kernel resolves the socket's path, and does not return before the file system has answered.
func dial(ctx context.Context, lane *aside.Lane, address string, options ...dbus.ConnOption) (*line, error) {
	path, err := socketPath(address)
	if err != nil {
		return nil, err
	}
	socket, err := aside.Do(ctx, lane, "connecting to "+path, func(ctx context.Context, _ aside.At) (*net.UnixConn, error) {
		socket, err := new(net.Dialer).DialUnix(ctx, "unix", nil, &net.UnixAddr{Net: "unix", Name: path})
		if err == nil && ctx.Err() != nil { // the caller has given up
			return nil, errors.Join(ctx.Err(), socket.Close())
		}
		return socket, err
	})
	if err != nil {
		return nil, err
	}
	l := &line{socket: socket}
	l.takeTime = context.AfterFunc(ctx, l.end)
	// By number: godbus would look up a user's name in files that the image does not have.
	identity := dbus.AuthExternal(strconv.Itoa(os.Geteuid()))
	if l.Conn, err = dbus.ConnectUnix(socket, append(options, dbus.WithAuth(identity))...); err != nil {
		l.takeTime()
		return nil, err
	}
	return l, nil
}

// end ends every call that is under way.
func (l *line) end() {
	_ = l.socket.CloseRead() // its error means that the socket is closed already
	_ = l.socket.SetWriteDeadline(time.Unix(1, 0))
}

// endWith makes the line end with ctx instead of the context that it was dialled with.
func (l *line) endWith(ctx context.Context) {
	l.takeTime()
	l.takeTime = context.AfterFunc(ctx, l.end)
}

// hangUp ends the connection. It lets godbus read to the end. A Close while godbus reads the head of a message makes it panic (v5.2.2: the Read of
// its oobReader returns -1, which bytes.Buffer does not accept).
func (l *line) hangUp() {
	l.takeTime()
	_ = l.socket.CloseRead() // its error means that the socket is closed already
	<-l.Context().Done()
	_ = l.Close() // the same
}

// socketPath gives the path in a bus address such as "unix:path=/run/dbus/system_bus_socket,guid=4b1d".
func socketPath(address string) (string, error) {
	keys, isUnix := strings.CutPrefix(address, "unix:")
	for key := range strings.SplitSeq(keys, ",") {
		if value, ok := strings.CutPrefix(key, "path="); ok && isUnix && !strings.Contains(value, ";") {
			return dbus.UnescapeBusAddressValue(value)
		}
	}
	return "", errors.New(`only addresses of the form "unix:path=…" are known`)
}

// failure gives this package's error for one of a call under ctx.
func (p *peer) failure(ctx context.Context, address string, err error) error {
	said, isAnswer := errors.AsType[dbus.Error](err)
	switch {
	case isAnswer:
		return p.explain(p.meaning(said.Name), fmt.Errorf("%s: %w", said.Name, said))
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Errorf("%w on %s: %w", p.silent, address, ctx.Err())
	case ctx.Err() == nil && aside.Hangs(err):
		return fmt.Errorf("%w on %s: %w", p.silent, address, err)
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("%w: %w", p.none, err)
	case errors.Is(err, fs.ErrPermission):
		return p.explain(p.refuses, err)
	default:
		return fmt.Errorf("talking to %s on %s: %w", p.name, address, err)
	}
}

// meaning gives this package's error for the name of one that the bus or a service on it answers with; nil for other names.
func (p *peer) meaning(name string) error {
	switch name {
	case "org.freedesktop.DBus.Error.ServiceUnknown", "org.freedesktop.DBus.Error.NameHasNoOwner":
		return p.none
	case "org.freedesktop.DBus.Error.AccessDenied", "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired":
		return p.refuses
	case "org.freedesktop.DBus.Error.NoReply", // it died over the call
		"org.freedesktop.DBus.Error.TimedOut": // the bus gave up on starting it
		return p.silent
	default:
		return p.means[name]
	}
}

// explain joins the answer, this package's error for it, and the advice.
func (p *peer) explain(meaning, answer error) error {
	advice := p.advice[meaning]
	if errors.Is(meaning, p.refuses) {
		advice = "run the agent as root without a user namespace of its own, and let polkit, SELinux and the bus's policy allow " + p.bus
	}
	switch {
	case meaning == nil:
		return fmt.Errorf("%s answers %w", p.name, answer)
	case advice != "":
		return fmt.Errorf("%w (%w): %s", meaning, answer, advice)
	default:
		return fmt.Errorf("%w (%w)", meaning, answer)
	}
}
