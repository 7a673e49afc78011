package agent_test

import (
	"testing"
	"testing/synctest"
)

// A part that is not among the forgetters would go by times from before the clock was set.
func TestEachPartForgetsWhenTheClockIsSet(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.restart()
		if left := w.agent.Unforgotten(); len(left) > 0 {
			t.Errorf("not among the forgetters: %v", left)
		}
	})
}
