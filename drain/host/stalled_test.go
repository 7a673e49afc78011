package host_test

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/test/stalledfs"
)

// Promise 14. The kernel looks a socket's path up before it connects, and a file system that does not answer keeps the thread that asks. So
// not even the end of the context brings the call back.
func TestABusBehindAMountThatDoesNotAnswerIsLeft(t *testing.T) {
	for name, of := range map[string]struct {
		silent error
		ask    func(address string) func(context.Context) error
	}{
		"systemd": {host.ErrSystemdSilent, func(address string) func(context.Context) error {
			units := &host.Units{Address: address}
			return func(ctx context.Context) error {
				_, err := units.States(ctx, []string{"nvsm.service"})
				return err
			}
		}},
		"logind": {host.ErrLogindSilent, func(address string) func(context.Context) error {
			logind := &host.Logind{Address: address}
			return func(ctx context.Context) error { return logind.CanReboot(ctx) }
		}},
	} {
		t.Run(name, func(t *testing.T) {
			mounted := stalledfs.Mount(t, "system_bus_socket")
			path := filepath.Join(mounted.Dir, "system_bus_socket")
			ask := of.ask("unix:path=" + path)
			asked := mounted.Stall()
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- ask(ctx) }()
			<-asked
			cancel()
			select {
			case err := <-ended:
				wantIs(t, err, context.Canceled)
			case <-time.After(30 * time.Second):
				t.Error("the call does not end with its context")
				mounted.Answer()
				t.Log(<-ended)
			}
			// It returns only because the call before is still out: its own context does not end.
			if err := ask(t.Context()); !errors.Is(err, of.silent) || !strings.Contains(err.Error(), path) {
				t.Errorf("the next call: %v", err)
			}
			mounted.Answer()
			for err := ask(t.Context()); errors.Is(err, of.silent); err = ask(t.Context()) { // until the call that hung has ended
				<-time.After(time.Millisecond)
			}
		})
	}
}
