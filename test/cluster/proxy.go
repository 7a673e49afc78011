package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"
)

// Cut is what a Proxy lets through.
type Cut int

const (
	// Mended lets everything through.
	Mended Cut = iota
	// Refused is an API server that has ended: connections break, and new ones are refused.
	Refused
	// Silent is a lost network: connections stay, and nothing passes in either direction. Data sent then arrives after
	// mending, like retransmitted packets.
	Silent
	// Deaf is a network that is lost in one direction: the API server receives and obeys, and no answer comes back.
	Deaf
)

// String is for names of tests.
func (c Cut) String() string {
	switch c {
	case Refused:
		return "refused"
	case Silent:
		return "silent"
	case Deaf:
		return "deaf"
	case Mended:
	}
	return "mended"
}

// asks and answers say whether the two directions pass.
func (c Cut) asks() bool    { return c == Mended || c == Deaf }
func (c Cut) answers() bool { return c == Mended }

// Proxy stands between one client and the API server, so that a test can cut the API server off from this client alone.
type Proxy struct {
	server, address string

	mu       sync.Mutex
	cut      Cut
	late     time.Duration
	changed  chan struct{} // closed and replaced with every change of cut
	listener net.Listener  // nil while connections are refused
	links    map[*link]bool
	work     sync.WaitGroup
}

// link is one connection of the client, and the one to the API server that it goes on by.
type link struct {
	client, server net.Conn
	once           sync.Once
	broken         chan struct{}
}

// Proxy starts one, which lets everything through, until Close.
func (c *Cluster) Proxy(ctx context.Context) (*Proxy, error) {
	port, err := c.supervisor.reservePort()
	if err != nil {
		return nil, err
	}
	p := &Proxy{
		server: fmt.Sprintf("127.0.0.1:%d", c.port), address: fmt.Sprintf("127.0.0.1:%d", port),
		changed: make(chan struct{}), links: map[*link]bool{},
	}
	if err := p.Cut(ctx, Mended); err != nil {
		return nil, err
	}
	return p, nil
}

// ServiceAddress is where pods find the API server, as on each cluster: the address of service default/kubernetes.
const ServiceAddress = serviceIP

// Service starts a Proxy at ServiceAddress, as kube-proxy does for pods. The address must be the machine's.
func (c *Cluster) Service(ctx context.Context) (*Proxy, error) {
	p := &Proxy{
		server: fmt.Sprintf("127.0.0.1:%d", c.port), address: net.JoinHostPort(ServiceAddress, "443"),
		changed: make(chan struct{}), links: map[*link]bool{},
	}
	if err := p.Cut(ctx, Mended); err != nil {
		return nil, err
	}
	return p, nil
}

// Config is the same client, by way of the proxy.
func (p *Proxy) Config(direct *rest.Config) *rest.Config {
	config := rest.CopyConfig(direct)
	config.Host = "https://" + p.address
	return config
}

// Cut changes what is let through, from this moment on.
func (p *Proxy) Cut(ctx context.Context, cut Cut) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = cut
	close(p.changed)
	p.changed = make(chan struct{})
	switch {
	case cut == Refused:
		p.refuse()
		return nil
	case p.listener == nil:
		return p.listen(ctx)
	default:
		return nil
	}
}

// Slow has the API server answer that much later, from this moment on: each piece of an answer waits so long, behind the one before it.
func (p *Proxy) Slow(by time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.late = by
}

// Close ends the proxy and all connections through it.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.refuse()
	p.mu.Unlock()
	p.work.Wait()
}

// refuse needs mu.
func (p *Proxy) refuse() {
	if p.listener != nil {
		_ = p.listener.Close() // no one has closed it before
		p.listener = nil
	}
	for l := range p.links {
		l.end()
	}
}

// listen needs mu. The port is ours while no one listens on it too: the cluster holds it, and shares it.
func (p *Proxy) listen(ctx context.Context) error {
	shared := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var failed error
		err := raw.Control(func(fd uintptr) {
			failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
		})
		return errors.Join(err, failed)
	}}
	listener, err := shared.Listen(ctx, "tcp", p.address)
	if err != nil {
		return fmt.Errorf("standing in for the API server: %w", err)
	}
	p.listener = listener
	p.work.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return // closed
			}
			p.work.Go(func() { p.connect(client) })
		}
	})
	return nil
}

// connect carries one connection until it breaks.
func (p *Proxy) connect(client net.Conn) {
	server, err := net.Dial("tcp", p.server) // on loopback it is there at once, or not at all
	if err != nil {
		_ = client.Close() // which says as much to the client as an error would
		return
	}
	l := &link{client: client, server: server, broken: make(chan struct{})}
	p.mu.Lock()
	if p.listener == nil { // it was accepted just before
		l.end()
	}
	p.links[l] = true
	p.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() { p.carry(l, server, client, Cut.asks, func() time.Duration { return 0 }) })
	both.Go(func() { p.carry(l, client, server, Cut.answers, p.lateness) })
	both.Wait()
	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
}

func (p *Proxy) lateness() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.late
}

// carry takes what comes from one end to the other, as long as the proxy lets it.
func (p *Proxy) carry(l *link, to, from net.Conn, passes func(Cut) bool, late func() time.Duration) {
	defer l.end()
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 && !(l.wait(late()) && p.await(l, passes)) {
			return
		}
		if _, failed := to.Write(buffer[:n]); err != nil || failed != nil {
			return
		}
	}
}

// await returns when the direction is open, or false when the connection has broken in the meantime.
func (p *Proxy) await(l *link, passes func(Cut) bool) bool {
	for {
		p.mu.Lock()
		cut, changed := p.cut, p.changed
		p.mu.Unlock()
		if passes(cut) {
			return true
		}
		select {
		case <-changed:
		case <-l.broken:
			return false
		}
	}
}

// wait returns when the time is over, or false when the connection has broken before.
func (l *link) wait(d time.Duration) bool {
	if d == 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-l.broken:
		return false
	}
}

// end breaks the connection at both ends.
func (l *link) end() {
	l.once.Do(func() {
		close(l.broken)
		_ = l.client.Close() // closed already is as good
		_ = l.server.Close()
	})
}
