// Package long tells apart what each run of the tests does and what only a full run does: "go test" takes everything,
// "go test -short", which is "make test", takes what shows a broken change in minutes.
//
// "make test-long" runs the tests that ask this package at full length: test/long/uses finds them. A table in test/README.md says what each
// leaves out, and a test in test/repo holds it to the code.
package long

import (
	"testing"
	"time"
)

// Only skips a test, or the rest of it, in a short run. It says what short runs show the same by, so that
// nothing is shown by full runs alone without that being seen.
func Only(t testing.TB, shortRuns string) {
	t.Helper()
	if !Full() {
		t.Skip("only in full runs (without -short): " + shortRuns)
	}
}

// Full says whether this is a full run.
func Full() bool { return !testing.Short() }

// Size is how many times something is done, or for how long: full in a full run, short in a short one.
func Size[N int | time.Duration](full, short N) N {
	if Full() {
		return full
	}
	return short
}
