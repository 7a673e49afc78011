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

// peer is who is asked over the system bus, and what may come of it.
type peer struct {
	name, bus             string // as people know it, and as the bus does
	none, silent, refuses error
	means                 map[string]error // what its own errors mean, by their names
	advice                map[error]string // what a person can do about them
}

// busAddress is where the system bus is, if a setting says so or not.
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
	// takeTime has the end of the context that the line ends with change nothing any more.
	takeTime func() bool
}

// dial connects to the bus and says hello. When ctx ends, so does every call that is under way, and the connection; the
// caller hangs up in any case.
//
// When a context ends, godbus (v5.2.2) forgets the call, or closes the socket in the middle of a message; a descriptor
// that is just coming in is lost then, and what it stands for cannot be given back before this process ends. So the end
// of ctx only ends reading: what the kernel has received by then is still read, and after it every call is answered,
// once. A bus that has stopped to read is not waited for either.
//
// It connects in the lane: the kernel looks the socket's path up, and lets nobody go before the file system has answered.
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
	// By number: names of users would be looked up in files that the image does not have.
	identity := dbus.AuthExternal(strconv.Itoa(os.Geteuid()))
	if l.Conn, err = dbus.ConnectUnix(socket, append(options, dbus.WithAuth(identity))...); err != nil {
		l.takeTime()
		return nil, err
	}
	return l, nil
}

// end has every call end that is under way.
func (l *line) end() {
	_ = l.socket.CloseRead() // a socket that is closed is as good
	_ = l.socket.SetWriteDeadline(time.Unix(1, 0))
}

// endWith has the end of ctx end the line, and no more that of the context that it was dialled with.
func (l *line) endWith(ctx context.Context) {
	l.takeTime()
	l.takeTime = context.AfterFunc(ctx, l.end)
}

// hangUp ends the connection. It has godbus come to the end of what there is to read; to be closed while it reads the
// head of a message makes it panic (v5.2.2: the Read of its oobReader returns -1, which bytes.Buffer does not bear).
func (l *line) hangUp() {
	l.takeTime()
	_ = l.socket.CloseRead() // closed already is as good
	<-l.Context().Done()
	_ = l.Close() // the same
}

// socketPath is that of a bus address such as "unix:path=/run/dbus/system_bus_socket,guid=4b1d".
func socketPath(address string) (string, error) {
	keys, isUnix := strings.CutPrefix(address, "unix:")
	for key := range strings.SplitSeq(keys, ",") {
		if value, ok := strings.CutPrefix(key, "path="); ok && isUnix && !strings.Contains(value, ";") {
			return dbus.UnescapeBusAddressValue(value)
		}
	}
	return "", errors.New(`only addresses of the form "unix:path=…" are known`)
}

// failure says what an error means that came of asking under ctx.
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

// meaning translates the name of an error that the bus or anybody on it answers with; nil is one that is not known here.
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

// explain joins what was answered, what it means, and what a person can do.
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
