package binaries

import "time"

// SetAskFor makes programs say their version within d, until the returned function is called.
func SetAskFor(d time.Duration) (undo func()) {
	before := askFor
	askFor = d
	return func() { askFor = before }
}

// Progress returns what people read of a build that may have to compile the packages of list, when the Go command has written
// said to its standard error, and what of that is left for an error. The writes come in pieces.
func Progress(list, said string) (shown, left string) {
	s := &status{}
	if list != "" {
		s.expect(list)
	}
	l := &lines{saw: s.saw}
	for i := range said {
		_, _ = l.Write([]byte{said[i]})
	}
	return s.String(), l.String()
}
