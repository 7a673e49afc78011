package show

import (
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

// Client-go pauses before an error that comes too soon after the last one, by a time of the whole process: for ever, where each
// test has a time of its own.
func TestMain(m *testing.M) {
	utilruntime.ErrorHandlers = nil
	os.Exit(m.Run())
}

type world = agenttest.World

var commands = []cluster.Command{Status, Top, Explain, Advise}

// inWorld runs a test of the commands.
func inWorld(t *testing.T, test func(w *world), nodes ...func() *corev1.Node) {
	t.Helper()
	agenttest.InWorld(t, commands, test, nodes...)
}
