package systemd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/godbus/dbus/v5"
)

// inboxSize is how many messages may wait for a service. More are lost, which no test comes near.
const inboxSize = 1024

const (
	propertyGet    = "org.freedesktop.DBus.Properties.Get"
	propertyGetAll = "org.freedesktop.DBus.Properties.GetAll"
)

// request is a method call that arrived.
type request struct {
	method string // with its interface
	path   dbus.ObjectPath
	args   []any
}

// reply is what goes back. A nil reply is none: the caller waits.
type reply struct {
	body  []any
	err   *dbus.Error
	after func() // runs once it was sent
}

// service answers the calls to one name of the bus.
//
// It reads messages itself, where godbus would call exported methods: those always answer, and do not learn when the
// answer was sent, so that the descriptor in it could not be closed.
type service struct {
	conn   *dbus.Conn
	answer func(request) *reply
	owned  chan struct{} // closed when the bus has given it the name
	ended  chan struct{}
}

// serve takes the name and answers from then on.
func serve(ctx context.Context, address, name string, answer func(request) *reply) (*service, error) {
	conn, err := dbus.Connect(address, dbus.WithAuth(dbus.AuthExternal(strconv.Itoa(os.Geteuid()))))
	if err != nil {
		return nil, fmt.Errorf("serving %s: %w", name, err)
	}
	s := &service{conn: conn, answer: answer, owned: make(chan struct{}), ended: make(chan struct{})}
	inbox := make(chan *dbus.Message, inboxSize)
	conn.Eavesdrop(inbox)
	go s.run(name, inbox)
	// The reply goes to the inbox as well; that the name is ours is said by a signal.
	call := conn.BusObject().Go("org.freedesktop.DBus.RequestName", dbus.FlagNoReplyExpected, nil, name, uint32(dbus.NameFlagDoNotQueue))
	if call.Err != nil {
		s.stop()
		return nil, fmt.Errorf("taking the name %s: %w", name, call.Err)
	}
	select {
	case <-s.owned:
		return s, nil
	case <-s.ended:
		return nil, fmt.Errorf("taking the name %s: the bus has hung up", name)
	case <-ctx.Done():
		s.stop()
		return nil, fmt.Errorf("taking the name %s: %w", name, ctx.Err())
	}
}

// stop hangs up, and returns when nothing is answered any more.
func (s *service) stop() {
	s.conn.Eavesdrop(nil) // or closing would close the inbox, which a message may be on its way to (godbus 5.2.2)
	_ = s.conn.Close()    // it only says that it was closed before
	<-s.ended
}

func (s *service) run(name string, inbox <-chan *dbus.Message) {
	defer close(s.ended)
	for {
		select {
		case message, open := <-inbox:
			if !open {
				return
			}
			s.receive(name, message)
		case <-s.conn.Context().Done():
			return
		}
	}
}

func (s *service) receive(name string, message *dbus.Message) {
	switch message.Type {
	case dbus.TypeSignal:
		if header(message, dbus.FieldMember) == "NameAcquired" && len(message.Body) == 1 && message.Body[0] == name {
			close(s.owned)
		}
	case dbus.TypeMethodCall:
		path, _ := message.Headers[dbus.FieldPath].Value().(dbus.ObjectPath)
		r := s.answer(request{
			method: header(message, dbus.FieldInterface) + "." + header(message, dbus.FieldMember),
			path:   path,
			args:   message.Body,
		})
		if r != nil {
			s.send(message, r)
		}
	default: // an answer to what was asked of no one
	}
}

// send answers a call.
func (s *service) send(call *dbus.Message, r *reply) {
	message := &dbus.Message{Type: dbus.TypeMethodReply, Body: r.body, Headers: map[dbus.HeaderField]dbus.Variant{
		dbus.FieldDestination: dbus.MakeVariant(header(call, dbus.FieldSender)),
		dbus.FieldReplySerial: dbus.MakeVariant(call.Serial()),
	}}
	if r.err != nil {
		message.Type, message.Body = dbus.TypeError, r.err.Body
		message.Headers[dbus.FieldErrorName] = dbus.MakeVariant(r.err.Name)
	}
	if len(message.Body) > 0 {
		message.Headers[dbus.FieldSignature] = dbus.MakeVariant(dbus.SignatureOf(message.Body...))
	}
	if call.Flags&dbus.FlagNoReplyExpected == 0 {
		s.conn.Send(message, nil) // to a bus that is gone: the caller learns it from the bus
	}
	if r.after != nil {
		r.after()
	}
}

// emit sends a signal to everybody who listens.
func (s *service) emit(path dbus.ObjectPath, name string, args ...any) {
	if s != nil {
		_ = s.conn.Emit(path, name, args...) // a bus that is gone has no listeners
	}
}

func header(m *dbus.Message, field dbus.HeaderField) string {
	text, _ := m.Headers[field].Value().(string)
	return text
}

func done(body ...any) *reply { return &reply{body: body} }

func refuse(name, format string, args ...any) *reply {
	return &reply{err: dbus.NewError(name, []any{fmt.Sprintf(format, args...)})}
}

// property answers a question for one property, or for all, of an object that has these by interface.
func property(r request, has map[string]map[string]any) *reply {
	text := func(i int) string {
		if i >= len(r.args) {
			return ""
		}
		s, _ := r.args[i].(string)
		return s
	}
	if r.method == propertyGet {
		value, ok := has[text(0)][text(1)]
		if !ok {
			return refuse("org.freedesktop.DBus.Error.UnknownProperty", "Unknown interface %s or property %s.", text(0), text(1))
		}
		return done(dbus.MakeVariant(value))
	}
	all := map[string]dbus.Variant{}
	for name, properties := range has {
		if text(0) != "" && text(0) != name {
			continue
		}
		for key, value := range properties {
			all[key] = dbus.MakeVariant(value)
		}
	}
	return done(all)
}

// failed answers with an error of ours.
func failed(err error) *reply {
	e, ok := errors.AsType[dbus.Error](err)
	if !ok {
		e = *dbus.MakeFailedError(err)
	}
	return &reply{err: &e}
}
