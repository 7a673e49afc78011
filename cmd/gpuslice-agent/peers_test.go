package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/report/metrics"
)

// served serves metrics, and returns where.
func served(t *testing.T) string {
	t.Helper()
	core, logged := observer.New(zapcore.InfoLevel)
	o := options{metricsAddress: "127.0.0.1:0"}
	o.serve(t.Context(), metrics.New(clock.RealClock{}).Handler(), zap.New(core))
	address, ok := logged.All()[0].ContextMap()["address"].(string)
	if !ok {
		t.Fatalf("logged: %v", logged.All())
	}
	return address
}

// from is a client with that address.
func from(ip string) *net.Dialer {
	return &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}, Timeout: time.Minute}
}

// TestPromise16IdleConnectionsTakeNoMemory: a client that can reach the port opens as many connections as it likes, and sends nothing more.
func TestPromise16IdleConnectionsTakeNoMemory(t *testing.T) {
	idle := 12_000
	if testing.Short() {
		idle = 2_000
	}
	address := served(t)
	before := resident(t)
	open := make([]net.Conn, 0, idle)
	defer func() {
		for _, c := range open {
			c.Close()
		}
	}()
	for range idle {
		c, err := from("127.0.0.2").DialContext(t.Context(), "tcp", address)
		if err != nil {
			t.Fatalf("connection %d: %v", len(open), err)
		}
		open = append(open, c)
		_, _ = c.Write([]byte("GET /none HTTP/1.1\r\nHost: agent\r\n\r\n")) // fails if the server has ended the connection already
	}
	// Another peer is answered in the meantime, as Prometheus has to be.
	client := &http.Client{Transport: &http.Transport{DialContext: from("127.0.0.3").DialContext}, Timeout: time.Minute}
	defer client.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if text, err := io.ReadAll(response.Body); err != nil || !strings.Contains(string(text), "process_resident_memory_bytes") {
		t.Errorf("%s, %v", response.Status, err)
	}
	t.Logf("%d idle connections: %d MiB resident before, %d with them, both ends in this process", idle, before>>20, resident(t)>>20)
	for i, c := range open { // each is ended by the server, the four that it took after a while
		if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); os.IsTimeout(err) {
			t.Fatalf("connection %d is open: %v", i, err)
		}
	}
}

func TestAPeerHasFewConnectionsAndAllOfThemHaveNotMany(t *testing.T) {
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	taken := make(chan net.Conn, 2*maxOfAll)
	go func() {
		for l := limitConnections(listener); ; {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if _, err := c.Read(make([]byte, 1)); err != nil { // whoever sends nothing makes room for others
				t.Error(err)
			}
			if _, err := c.Write([]byte("x")); err != nil {
				t.Error(err)
			}
			taken <- c
		}
	}()
	isTaken := func(ip string) bool {
		c, err := from(ip).DialContext(context.WithoutCancel(t.Context()), "tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		_, _ = c.Write([]byte("x"))
		_, err = c.Read(make([]byte, 1))
		return err == nil
	}
	for peer := range maxOfStrangers / maxOfPeer {
		ip := fmt.Sprintf("127.0.1.%d", peer+1)
		for i := range maxOfPeer {
			if !isTaken(ip) {
				t.Fatalf("connection %d of peer %s is refused", i, ip)
			}
		}
		if isTaken(ip) {
			t.Fatalf("peer %s has one more", ip)
		}
	}
	if isTaken("127.0.2.1") {
		t.Error("all have one more")
	}
	(<-taken).Close()
	if !isTaken("127.0.2.1") {
		t.Error("one was closed, and makes no room")
	}
}

// Whoever has many addresses, and sends nothing, keeps out neither a peer that is known nor one that is not.
func TestSilentConnectionsKeepNoPeerOut(t *testing.T) {
	for _, addresses := range []int{16, 32} {
		t.Run(fmt.Sprintf("%d addresses", addresses), func(t *testing.T) {
			open, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			l := limitConnections(open)
			server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "metrics") })}
			go func() { _ = server.Serve(l) }()
			defer server.Close()
			l.admitted("127.0.4.1:9")
			scrapes := func(ip string) bool {
				client := &http.Client{Transport: &http.Transport{DialContext: from(ip).DialContext, DisableKeepAlives: true}, Timeout: time.Minute}
				request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+open.Addr().String(), http.NoBody)
				if err != nil {
					t.Fatal(err)
				}
				response, err := client.Do(request)
				if err != nil {
					return false
				}
				defer response.Body.Close()
				text, err := io.ReadAll(response.Body)
				return err == nil && string(text) == "metrics"
			}
			good := map[string]int{}
			for range 12 {
				for i := range 4 * addresses { // those that were closed in the meantime come again
					c, err := from(fmt.Sprintf("127.0.3.%d", i/4+1)).DialContext(t.Context(), "tcp", open.Addr().String())
					if err != nil {
						t.Fatal(err)
					}
					defer c.Close()
				}
				for _, ip := range []string{"127.0.4.1", "127.0.4.2"} {
					if scrapes(ip) {
						good[ip]++
					}
				}
			}
			if good["127.0.4.1"] != 12 || good["127.0.4.2"] != 12 {
				t.Errorf("scrapes of a known peer %d, of an unknown one %d, want 12 of 12", good["127.0.4.1"], good["127.0.4.2"])
			}
		})
	}
}

// resident is the memory that this process has.
func resident(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	var size, pages int
	if _, err := fmt.Sscan(string(text), &size, &pages); err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize()
}
