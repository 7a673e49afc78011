package report

import (
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
)

// leastPatience: a pass takes seconds, and a shorter hang does less harm than a restart.
const leastPatience = 10 * time.Minute

// Patience is how long one pass may take by the deadlines of the settings, and at least 10 minutes. Everything in a pass has a deadline: even a pass
// with twice the usual calls is over by then.
func Patience(s config.Settings) time.Duration {
	const (
		driverCalls = 8  // an observation, its release, the specs, and the step
		apiCalls    = 20 // node, three files, pods, their DaemonSets, kubelet's two answers, slot, step with an observation of its own, and the reports
		evictions   = time.Minute
	)
	return max(leastPatience, driverCalls*s.Timeouts.DriverCall+apiCalls*s.Timeouts.APICall+s.Timeouts.Unit+evictions)
}

// Liveness watches an agent's loop. Any goroutine may call its methods at any time.
type Liveness struct {
	patience time.Duration
	log      *zap.Logger

	mu     sync.Mutex
	ended  time.Time   // when a pass last ended; zero before the first
	seen   bool        // a pass has seen the node
	due    time.Time   // when the present or the next pass must have ended; zero before the first
	at     string      // the pass's present action; empty between passes
	since  time.Time   // since when
	overdo *time.Timer // logs that the pass takes too long
}

// NewLiveness makes the Liveness of an agent that has not begun.
func NewLiveness(patience time.Duration, log *zap.Logger) *Liveness {
	return &Liveness{patience: patience, log: log}
}

// Begin says that a pass begins.
func (l *Liveness) Begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.due = time.Now().Add(l.patience)
	l.at, l.since = "observing the node", time.Now()
	l.overdo = time.AfterFunc(l.patience, func() {
		l.mu.Lock()
		at, since := l.at, l.since
		l.mu.Unlock()
		if at != "" {
			l.log.Error("a pass does not end", zap.String("at", at), zap.Duration("for", time.Since(since)), zap.Duration("patience", l.patience))
		}
	})
}

// At says what the pass does now.
func (l *Liveness) At(what fmt.Stringer) {
	text := what.String()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.at, l.since = text, time.Now()
}

// Saw says which node the pass has read; nil for none.
func (l *Liveness) Saw(node *corev1.Node) {
	if node == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen = true
}

// End says that the pass has ended, and that the next one begins after the rest.
func (l *Liveness) End(rest time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	l.overdo.Stop()
	l.at, l.ended, l.due = "", now, now.Add(rest+l.patience)
}

// LoopState is the answer to kubelet about the loop.
type LoopState struct {
	Alive bool   `json:"alive"` // it goes on, or has not begun
	Ready bool   `json:"ready"` // it is alive, and a pass has seen the node and ended
	Says  string `json:"says"`
}

// State returns the present state of the loop.
func (l *Liveness) State() LoopState {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	s := LoopState{Alive: l.due.IsZero() || now.Before(l.due)}
	s.Ready = s.Alive && !l.ended.IsZero() && l.seen
	switch {
	case l.due.IsZero():
		s.Says = "no pass has begun: another agent of this machine may still be ending"
	case l.at != "":
		s.Says = fmt.Sprintf("a pass has been at %q for %s", l.at, now.Sub(l.since).Round(time.Second))
	case !l.seen:
		s.Says = "no pass has seen the node yet; the agent's log says why"
	default:
		s.Says = fmt.Sprintf("the last pass ended %s ago", now.Sub(l.ended).Round(time.Second))
	}
	return s
}
