package agenttest

import (
	"os"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

// Golden fails the test unless the file has this text. On request it writes the file first.
func Golden(t *testing.T, file, got string, write bool) {
	t.Helper()
	if write {
		if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
}
