package main

import (
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Bounds of connections. Prometheus needs one, and there may be two of it; a tenant's pod has one address.
const (
	maxOfPeer = 4
	maxOfAll  = 64
	// maxOfStrangers leaves the rest for known peers: those that were admitted within knownFor.
	maxOfStrangers = maxOfAll - 16
	knownFor       = time.Hour
	mostKnown      = 16
)

// peers bounds the connections of one peer and of all peers, and closes further ones at once. If these waited instead, they would keep out
// later peers. Where there are too many, the oldest of a stranger that has sent nothing makes room.
type peers struct {
	net.Listener

	mu    sync.Mutex
	open  []*connection // in the order in which they came
	known map[netip.Addr]time.Time
}

func limitConnections(l net.Listener) *peers {
	return &peers{Listener: l, known: map[netip.Addr]time.Time{}}
}

// addressOf is the address of host and port. A socket without addresses has none: all of those are one peer.
func addressOf(hostPort string) netip.Addr {
	at, err := netip.ParseAddrPort(hostPort)
	if err != nil {
		return netip.Addr{}
	}
	return at.Addr().Unmap()
}

// Accept implements net.Listener.
func (p *peers) Accept() (net.Conn, error) {
	for {
		c, err := p.Listener.Accept()
		if err != nil {
			return nil, err
		}
		taken := &connection{Conn: c, of: p, peer: addressOf(c.RemoteAddr().String())}
		is, instead := p.take(taken)
		if instead != nil {
			_ = instead.Conn.Close()
		}
		if is {
			return taken, nil
		}
		_ = c.Close() // the peer has sent nothing yet that could be lost
	}
}

// admitted notes that a client of that host and port had a good token.
func (p *peers) admitted(hostPort string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[addressOf(hostPort)] = time.Now()
	if len(p.known) <= mostKnown {
		return
	}
	var oldest netip.Addr
	for peer, at := range p.known {
		if !oldest.IsValid() || at.Before(p.known[oldest]) {
			oldest = peer
		}
	}
	delete(p.known, oldest)
}

func (p *peers) knows(peer netip.Addr) bool {
	at, has := p.known[peer]
	return has && time.Since(at) < knownFor
}

// take reports whether there is room for the connection, and returns the one that makes it, if one has to.
func (p *peers) take(c *connection) (is bool, instead *connection) {
	p.mu.Lock()
	defer p.mu.Unlock()
	ofPeer, strangers := 0, 0
	for _, o := range p.open {
		if o.peer == c.peer {
			ofPeer++
		}
		if !p.knows(o.peer) {
			strangers++
		}
	}
	if ofPeer >= maxOfPeer {
		return false, nil
	}
	if len(p.open) >= maxOfAll || strangers >= maxOfStrangers && !p.knows(c.peer) {
		at := slices.IndexFunc(p.open, func(o *connection) bool { return !o.spoke && !p.knows(o.peer) })
		if at < 0 {
			return false, nil
		}
		instead = p.open[at]
		p.open = slices.Delete(p.open, at, at+1)
	}
	p.open = append(p.open, c)
	return true, instead
}

// connection is a connection that makes room when it is closed.
type connection struct {
	net.Conn

	of    *peers
	peer  netip.Addr
	spoke bool // it has sent something; of's lock guards it
}

// Read implements net.Conn.
func (c *connection) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.of.mu.Lock()
		c.spoke = true
		c.of.mu.Unlock()
	}
	return n, err
}

// Close implements net.Conn.
func (c *connection) Close() error {
	c.of.mu.Lock()
	c.of.open = slices.DeleteFunc(c.of.open, func(o *connection) bool { return o == c })
	c.of.mu.Unlock()
	return c.Conn.Close()
}
