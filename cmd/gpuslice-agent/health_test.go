package main

import (
	"bytes"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"go.uber.org/zap/zaptest"

	"github.com/gpuslice/gpuslice/agent/alive"
)

func TestHealthSaysWhatTheAgentSays(t *testing.T) {
	o := options{lockFile: filepath.Join(t.TempDir(), "agent.lock")}
	ask := func(args ...string) (string, error) {
		c := command()
		var out bytes.Buffer
		c.SetOut(&out)
		c.SetArgs(append([]string{"health", "--lock", o.lockFile}, args...))
		err := c.ExecuteContext(t.Context())
		return out.String(), err
	}
	if _, err := ask(); err == nil {
		t.Error("without an agent it is well")
	}
	var state atomic.Pointer[alive.State]
	o.answerHealth(t.Context(), func() alive.State { return *state.Load() }, zaptest.NewLogger(t))
	for _, c := range []struct {
		state       alive.State
		well, ready bool
	}{
		{alive.State{Alive: true, Says: "no pass has begun"}, true, false},
		{alive.State{Alive: true, Ready: true, Says: "the last pass ended 3s ago"}, true, true},
		{alive.State{Says: `a pass stands at "Reset" for 11m0s`}, false, false},
	} {
		state.Store(&c.state)
		said, err := ask()
		if (err == nil) != c.well {
			t.Errorf("%+v: %v", c.state, err)
		}
		if err != nil {
			said = err.Error()
		}
		if !strings.Contains(said, c.state.Says) {
			t.Errorf("%+v: said %q", c.state, said)
		}
		if _, err := ask("--ready"); (err == nil) != c.ready {
			t.Errorf("%+v: ready: %v", c.state, err)
		}
	}
}
