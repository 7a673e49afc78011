// Package systemdtest gives a test a system bus of its own.
package systemdtest

import (
	"errors"
	"os"
	"testing"

	"github.com/gpuslice/gpuslice/test/systemd"
)

// Start runs a host until the test ends. Where there is no dbus-daemon the test is skipped, but not when everything has
// to be tested, which the environment variable CI says.
func Start(t testing.TB, o systemd.Options) *systemd.Host {
	t.Helper()
	host, err := systemd.Start(t.Context(), o)
	if errors.Is(err, systemd.ErrNoDaemon) && os.Getenv("CI") == "" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := host.Close(); err != nil {
			t.Error(err)
		}
	})
	return host
}
