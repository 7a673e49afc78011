package main

import (
	"bytes"
	"context"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"

	"github.com/gpuslice/gpuslice/agent/report"
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
	var state atomic.Pointer[report.LoopState]
	o.answerHealth(t.Context(), func() report.LoopState { return *state.Load() }, zaptest.NewLogger(t))
	for _, c := range []struct {
		state       report.LoopState
		well, ready bool
	}{
		{report.LoopState{Alive: true, Says: "no pass has begun"}, true, false},
		{report.LoopState{Alive: true, Ready: true, Says: "the last pass ended 3s ago"}, true, true},
		{report.LoopState{Says: `a pass has been at "Reset" for 11m0s`}, false, false},
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

// A cleanup begins while the agent that it waits for still answers, and a new agent while the old one ends.
func TestHealthIsAnsweredOnceTheAgentBeforeHasEnded(t *testing.T) {
	o := options{lockFile: filepath.Join(t.TempDir(), "agent.lock")}
	says := func(words string) func() report.LoopState {
		return func() report.LoopState { return report.LoopState{Alive: true, Says: words} }
	}
	before, end := context.WithCancel(t.Context())
	o.answerHealth(before, says("the one before"), zaptest.NewLogger(t))
	o.answerHealth(t.Context(), says("its successor"), zaptest.NewLogger(t))
	if s, err := o.askHealth(t.Context()); err != nil || s.Says != "the one before" {
		t.Fatalf("while both run, a probe hears %q, %v", s.Says, err)
	}
	end()
	deadline := time.Now().Add(time.Minute)
	for {
		s, err := o.askHealth(t.Context())
		if err == nil && s.Says == "its successor" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("once the one before has ended, a probe hears %q, %v", s.Says, err)
		}
	}
}
