package output

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A command that a text has is pasted as it stands there.
func TestACommandIsNotBrokenByTheText(t *testing.T) {
	for name, row := range map[string]struct {
		text string
		want []string
	}{
		"fits":            {"to go on: kubectl uncordon gpu-1", []string{"to go on: kubectl uncordon gpu-1"}},
		"fits in a line":  {"the node is closed for pods, to go on: kubectl uncordon gpu-1", []string{"the node is closed for pods, to go on:", "  kubectl uncordon gpu-1"}},
		"would be broken": {"label is older than the agent: kubectl uncordon gpu-1, or wait", []string{"label is older than the agent:", "  kubectl uncordon gpu-1", "  or wait"}},
		"longer than a line": {
			"to let it: kubectl gpuslice apply gpu-1 --profile research --force-unmanaged; or wait",
			[]string{"to let it:", `  kubectl gpuslice apply gpu-1 \`, `  --profile research --force-unmanaged`, "  or wait"},
		},
		"a quoted word": {
			"to let it: kubectl gpuslice apply -l 'pool in (research, inference)' --none",
			[]string{"to let it:", `  kubectl gpuslice apply -l 'pool in (research, inference)' \`, "  --none"},
		},
		"in brackets": {
			"remove the label first (kubectl label node gpu-1 gpuslice.io/profile-), and go on",
			[]string{"remove the label first:", `  kubectl label node gpu-1 \`, "  gpuslice.io/profile-", "  and go on"},
		},
		"no command": {"a long text that says kubectl uncordon cancels it, and no more", []string{"a long text that says kubectl uncordon", "  cancels it, and no more"}},
	} {
		if diff := cmp.Diff(row.want, Paper{Width: 40}.Hanging(row.text)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
