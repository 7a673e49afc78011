// Package receive receives from channels in tests that run by the machine's clock. When a fault of the product keeps a value from coming, the test
// fails by name and the package does not hang. A bubble of testing/synctest does not need it: there the runtime says what waits for good.
package receive

import (
	"testing"
	"time"
)

// patience is generous: a busy machine takes minutes.
const patience = 5 * time.Minute

// From returns what comes from the channel next, or the zero value of one that is closed. If nothing comes, it ends the test: so the test's goroutine must
// call it.
func From[T any](t testing.TB, from <-chan T) T {
	t.Helper()
	select {
	case value := <-from:
		return value
	case <-time.After(patience):
		t.Fatalf("nothing has come for %s", patience)
		panic("unreachable")
	}
}
