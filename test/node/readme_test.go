package node_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// documented are the commands of a file that begin so, as they are written there for node gpu-1.
func documented(t *testing.T, file string, beginnings ...string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var commands []string
	for line := range strings.Lines(string(text)) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "$ ")
		if len(commands) < len(beginnings) && strings.HasPrefix(line, beginnings[len(commands)]) {
			commands = append(commands, line)
		}
	}
	if len(commands) != len(beginnings) {
		t.Fatalf("%s has the commands %q, want those that begin by %q", file, commands, beginnings)
	}
	return commands
}

// Whoever follows the README sees the wait end when the node is as asked, also where it is so already, and not by what was asked before.
func TestTheFirstCommandsOfTheREADMEsWaitForWhatWasAsked(t *testing.T) {
	t.Parallel()
	const node = "gpu-1"
	commands := documented(t, "../../README.md", "kubectl label node "+node, "kubectl wait node")
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.run()
	for _, request := range []string{
		"nvidia.com/mig.config=all-balanced", "nvidia.com/mig.config=all-balanced", "nvidia.com/mig.config=all-disabled",
		// A label that the profile overrides would have no success.
		"gpuslice.io/profile=all-balanced nvidia.com/mig.config-", "gpuslice.io/profile=all-balanced", "gpuslice.io/profile=all-disabled",
	} {
		_, name, _ := strings.Cut(strings.TrimSuffix(request, " nvidia.com/mig.config-"), "=")
		for _, command := range commands {
			line := strings.ReplaceAll(strings.ReplaceAll(command, node, r.Name), "nvidia.com/mig.config=all-balanced", request)
			cmd := exec.CommandContext(t.Context(), "sh", "-c", `kubectl() { "`+r.cluster.Kubectl()+`" --kubeconfig "`+r.cluster.AdminKubeconfig()+`" "$@"; }; `+line)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", line, err, out)
			}
		}
		for _, gpu := range r.snapshot() {
			if gpu.Enabled != (name == "all-balanced") || gpu.Enabled && len(gpu.Instances) != 4 {
				t.Errorf("after the wait for %s GPU %d has MIG mode %v and %d instances", name, gpu.Index, gpu.Enabled, len(gpu.Instances))
			}
		}
		r.awaitConverged(name)
	}
}
