package main

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/test/agenttest"
)

type world = agenttest.World

// inWorld runs a test of the commands.
func inWorld(t *testing.T, test func(w *world), nodes ...func() *corev1.Node) {
	t.Helper()
	agenttest.InWorld(t, commands, test, nodes...)
}
