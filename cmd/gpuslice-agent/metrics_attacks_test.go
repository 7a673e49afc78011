package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/report"
)

// scrape asks for the metrics from that address, as Prometheus does, and returns the status of the answer.
func scrape(ctx context.Context, ip, address string) (int, error) {
	client := &http.Client{Transport: &http.Transport{DialContext: from(ip).DialContext}, Timeout: time.Minute}
	defer client.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	response, err := client.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode == http.StatusOK && !strings.Contains(string(text), "process_resident_memory_bytes") {
		err = errors.New("the answer has no metrics")
	}
	return response.StatusCode, err
}

// intrude connects from that address.
func intrude(t *testing.T, ip, address string) net.Conn {
	t.Helper()
	c, err := from(ip).DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TestPromise16NoRequestKeepsAConnection: a client that can reach the port sends requests that never end. The server ends each connection, and
// answers Prometheus in the meantime.
func TestPromise16NoRequestKeepsAConnection(t *testing.T) {
	t.Parallel()
	endless := func(piece string) func(net.Conn) {
		return func(c net.Conn) {
			for tick := time.NewTicker(10 * time.Millisecond); ; <-tick.C {
				if _, err := io.WriteString(c, piece); err != nil {
					return
				}
			}
		}
	}
	once := func(text string) func(net.Conn) { return func(c net.Conn) { _, _ = io.WriteString(c, text) } }
	const get = "GET /metrics HTTP/1.1\r\nHost: agent\r\n"
	for name, attack := range map[string]struct {
		opening string
		goOn    func(net.Conn)
	}{
		"a byte of a request at a time":       {"", endless("G")},
		"a byte of a header at a time":        {get + "X: ", endless("x")},
		"a header at a time":                  {get, endless("X: x\r\n")},
		"a header without an end":             {get + "X: ", once(strings.Repeat("x", 16<<20))},
		"headers without an end":              {get, once(strings.Repeat("X: x\r\n", 1<<20))},
		"a long path":                         {"GET /" + strings.Repeat("x", 1<<20), endless("x")},
		"a body that does not come":           {get + "Content-Length: 1000000000\r\n\r\n", once("")},
		"a body in pieces without an end":     {get + "Transfer-Encoding: chunked\r\n\r\n", endless("1\r\nx\r\n")},
		"a body that no one has asked for":    {"POST /metrics HTTP/1.1\r\nHost: agent\r\nContent-Length: 1000000000\r\n\r\n", endless("x")},
		"requests one after the other":        {"", endless(get + "\r\n")},
		"another protocol":                    {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", endless("\x00\x00\x00\x04\x00\x00\x00\x00\x00")},
		"a change of protocol":                {get + "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n", endless("x")},
		"the handshake of a secure one":       {"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", endless("\x00")},
		"an answer that is not read, no more": {get + "\r\n", once("")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := served(t)
			var work sync.WaitGroup
			for range maxOfPeer {
				c := intrude(t, "127.0.0.2", address)
				work.Go(func() { // a client whose connection is ended gets an error
					if _, err := io.WriteString(c, attack.opening); err == nil {
						attack.goOn(c)
					}
				})
				work.Go(func() {
					if err := c.SetReadDeadline(time.Now().Add(5 * time.Minute)); err != nil {
						t.Error(err)
					}
					if _, err := io.Copy(io.Discard, c); isTimeout(err) {
						t.Errorf("the connection is open: %v", err)
					}
					c.Close()
				})
			}
			if status, err := scrape(t.Context(), "127.0.0.3", address); err != nil || status != http.StatusOK {
				t.Errorf("Prometheus gets %d, %v", status, err)
			}
			work.Wait()
			if status, err := scrape(t.Context(), "127.0.0.2", address); err != nil || status != http.StatusOK {
				t.Errorf("after that the peer gets %d, %v", status, err)
			}
		})
	}
}

func isTimeout(err error) bool {
	n, is := errors.AsType[net.Error](err)
	return is && n.Timeout()
}

// TestPromise16ManyRequestsAtOnceAreFewInFlight: as many peers as there may be connections ask at once, again and again. Each is answered or
// refused, by its connection or by the handler's status 503 for a peer that has waited too long, and afterwards everybody is answered.
func TestPromise16ManyRequestsAtOnceAreFewInFlight(t *testing.T) {
	t.Parallel()
	address := served(t)
	var mu sync.Mutex
	answers := map[string]int{}
	var work sync.WaitGroup
	for n := range 2 * maxOfAll {
		work.Go(func() {
			for range 10 {
				status, err := scrape(t.Context(), fmt.Sprintf("127.0.4.%d", n%(maxOfAll/2)+1), address)
				what := fmt.Sprint(status)
				if err != nil {
					what = "refused"
					if isTimeout(err) {
						t.Error(err)
					}
				}
				mu.Lock()
				answers[what]++
				mu.Unlock()
			}
		})
	}
	work.Wait()
	t.Logf("%v", answers)
	for what := range answers {
		if what != "200" && what != "503" && what != "refused" {
			t.Errorf("%d got %s", answers[what], what)
		}
	}
	if status, err := scrape(t.Context(), "127.0.0.3", address); err != nil || status != http.StatusOK || answers["200"] == 0 {
		t.Errorf("after that Prometheus gets %d, %v; in the meantime %v", status, err, answers)
	}
}

// TestPromise16ProbesAreAnsweredBesideThousandsWhoAsk: only a program in the agent's own pod reaches the address of the probes, as one in a
// container that was broken into.
func TestPromise16ProbesAreAnsweredBesideThousandsWhoAsk(t *testing.T) {
	t.Parallel()
	o := options{lockFile: filepath.Join(t.TempDir(), "agent.lock")}
	o.answerHealth(t.Context(), func() report.LoopState {
		return report.LoopState{Alive: true, Ready: true, Says: "the last pass ended 3s ago"}
	}, zap.NewNop())
	var last net.Conn
	for n := range 5_000 {
		c, err := new(net.Dialer).DialContext(t.Context(), "unix", o.healthSocket())
		if err != nil {
			t.Fatalf("connection %d: %v", n, err)
		}
		defer c.Close()
		last = c
	}
	// The last of the line is answered although none before it reads its answer, and before the third of kubelet's probes, with which kubelet
	// would end the agent. How long that takes depends on the machine: with the race detector, on a busy one, longer than a probe waits.
	const third = 2 * time.Minute
	if err := last.SetReadDeadline(time.Now().Add(third)); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(last).ReadString('\n'); err != nil || !strings.Contains(line, "3s ago") {
		t.Fatalf("the last of the line gets %q, %v", line, err)
	}
	// All of them are connected still.
	if s, err := o.askHealth(t.Context()); err != nil || !s.Ready {
		t.Errorf("the probe gets %+v, %v", s, err)
	}
	c, err := new(net.Dialer).DialContext(t.Context(), "unix", o.healthSocket())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(line, "3s ago") {
		t.Errorf("one who asks by hand gets %q, %v", line, err)
	}
}
