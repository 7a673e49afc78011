package agent_test

import (
	"testing"
	"testing/synctest"
)

// A part that forgets and is not asked to would go by times of the clock of before.
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
