package binaries

import "time"

// SetAskFor makes programs say their version within d, until the returned function is called.
func SetAskFor(d time.Duration) (undo func()) {
	before := askFor
	askFor = d
	return func() { askFor = before }
}
