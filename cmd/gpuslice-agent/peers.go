package main

import (
	"net"
	"net/netip"
	"sync"
)

// Bounds of connections. Prometheus needs one, and there may be two of it; a tenant's pod has one address.
const (
	maxOfPeer = 4
	maxOfAll  = 64
)

// peers bounds the connections of one peer and of all peers, and closes further ones at once. If these waited instead, they would keep out
// later peers.
type peers struct {
	net.Listener

	mu  sync.Mutex
	all int
	of  map[netip.Addr]int
}

func limitConnections(l net.Listener) *peers { return &peers{Listener: l, of: map[netip.Addr]int{}} }

// Accept implements net.Listener.
func (p *peers) Accept() (net.Conn, error) {
	for {
		c, err := p.Listener.Accept()
		if err != nil {
			return nil, err
		}
		peer := netip.Addr{} // of a socket without addresses: all of them are one peer
		if at, err := netip.ParseAddrPort(c.RemoteAddr().String()); err == nil {
			peer = at.Addr().Unmap()
		}
		if p.take(peer) {
			return &connection{Conn: c, release: sync.OnceFunc(func() { p.release(peer) })}, nil
		}
		_ = c.Close() // the peer has sent nothing yet that could be lost
	}
}

func (p *peers) take(peer netip.Addr) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.all >= maxOfAll || p.of[peer] >= maxOfPeer {
		return false
	}
	p.all++
	p.of[peer]++
	return true
}

func (p *peers) release(peer netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all--
	if p.of[peer]--; p.of[peer] == 0 {
		delete(p.of, peer)
	}
}

// connection is a connection that makes room when it is closed.
type connection struct {
	net.Conn
	release func()
}

// Close implements net.Conn.
func (c *connection) Close() error {
	c.release()
	return c.Conn.Close()
}
