package report_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/config"
)

type step string

func (s step) String() string { return string(s) }

func TestPromise14APassThatDoesNotEndIsNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logged := observer.New(zapcore.InfoLevel)
		l := report.NewLiveness(10*time.Minute, zap.New(core))
		<-time.After(time.Hour)
		if s := l.State(); !s.Alive || s.Ready {
			t.Errorf("before the first pass, which may wait for another agent to end: %+v", s)
		}
		l.Begin()
		if s := l.State(); !s.Alive || s.Ready {
			t.Errorf("in the first pass: %+v", s)
		}
		l.Saw(&corev1.Node{})
		l.End(24 * time.Hour)
		<-time.After(24*time.Hour + 9*time.Minute)
		if s := l.State(); !s.Alive || !s.Ready {
			t.Errorf("in a long rest: %+v", s)
		}
		l.Begin()
		l.At(step("Reset GPU-1"))
		<-time.After(9 * time.Minute)
		if s := l.State(); !s.Alive || !strings.Contains(s.Says, `"Reset GPU-1" for 9m0s`) {
			t.Errorf("in a long pass: %+v", s)
		}
		<-time.After(2 * time.Minute)
		if s := l.State(); s.Alive || s.Ready {
			t.Errorf("in one that does not end: %+v", s)
		}
		<-time.After(time.Hour)
		lines := logged.FilterMessage("a pass does not end").All()
		if len(lines) != 1 || lines[0].ContextMap()["at"] != "Reset GPU-1" {
			t.Errorf("logged: %v", lines)
		}
		l.End(time.Minute)
		if s := l.State(); !s.Alive {
			t.Errorf("once it has ended: %+v", s)
		}
		<-time.After(12 * time.Minute)
		if s := l.State(); s.Alive {
			t.Errorf("in a rest that does not end: %+v", s)
		}
	})
}

// A release that breaks the access to the API server must not come to the next node.
func TestAnAgentThatHasNeverSeenItsNodeIsNotReady(t *testing.T) {
	l := report.NewLiveness(10*time.Minute, zap.NewNop())
	l.Begin()
	l.Saw(nil)
	l.End(time.Second)
	if s := l.State(); !s.Alive || s.Ready || !strings.Contains(s.Says, "no pass has seen the node") {
		t.Errorf("without: %+v", s)
	}
	l.Begin()
	l.Saw(&corev1.Node{})
	l.End(time.Second)
	l.Begin()
	l.Saw(nil)
	l.End(time.Second)
	if s := l.State(); !s.Ready {
		t.Errorf("once it has: %+v", s)
	}
}

func TestPatienceIsThatOfTheLongestLegalPass(t *testing.T) {
	s := config.Default()
	if got := report.Patience(s); got < 10*time.Minute || got > 15*time.Minute {
		t.Errorf("by default %s", got)
	}
	s.Timeouts.DriverCall, s.Timeouts.Unit = 10*time.Minute, time.Hour
	if got := report.Patience(s); got < 2*time.Hour {
		t.Errorf("with slow calls %s", got)
	}
}
