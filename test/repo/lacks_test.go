package repo_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/agent/access"
)

// What an agent says that an older Kubernetes lacks stands on the page, in the same words.
func TestWhatOlderVersionsLackIsToldAsTheAgentSaysIt(t *testing.T) {
	_, section, found := strings.Cut(read(t, "deploy/README.md"), "### What older versions lack\n")
	if !found {
		t.Fatal("deploy/README.md has no section What older versions lack")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	for _, l := range access.Lacks {
		from := fmt.Sprintf("1.%d", l.From)
		if l.Kubelet {
			from += ", kubelet"
		}
		if row := "| " + from + " | " + l.What + " | " + l.Instead; !strings.Contains(section, row) {
			t.Errorf("deploy/README.md has no row %q", row)
		}
	}
	if rows := strings.Count(section, "\n| 1."); rows != len(access.Lacks) {
		t.Errorf("deploy/README.md has %d rows, the agent knows of %d", rows, len(access.Lacks))
	}
}
