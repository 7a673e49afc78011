package node_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/access"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// What each version of Kubernetes gets stands in deploy/README.md, and an agent says it at its start. test/skew runs this with earlier versions.
func TestAnAgentSaysAtItsStartWhatItsKubernetesLacks(t *testing.T) {
	t.Parallel()
	minor, err := clustertest.Start(t).Minor()
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, oneA100, "")
	r.awaitOffered("nvidia.com/gpu", 1)
	r.run()
	r.awaitReason(config.ReasonNotRequested)
	want := config.PodAccessImpersonation
	if minor < cluster.ImpersonatesNodes {
		want = config.PodAccessPolicy
	}
	var status api.Status
	r.await("the status says what confines the agent", func(n *corev1.Node) bool {
		status = api.Status{}
		return json.Unmarshal([]byte(n.Annotations[config.AnnotationStatus]), &status) == nil && status.PodAccess != ""
	})
	if status.PodAccess != want {
		t.Errorf("podAccess is %q, want %q", status.PodAccess, want)
	}
	said := r.saidAtTheStart()
	var lacks []string
	for _, l := range access.Lacks {
		if minor < l.From && !l.Kubelet { // the stand-in kubelet is of the newest version
			lacks = append(lacks, l.What)
		}
	}
	for _, want := range append(lacks, fmt.Sprintf("v1.%d.", minor), "podAccess="+string(want), "admission policies confine this agent to its own node") {
		if !slices.ContainsFunc(said, func(line string) bool { return strings.Contains(line, want) }) {
			t.Errorf("it is not said %q: %q", want, said)
		}
	}
	lines := 0
	for _, line := range said {
		t.Logf("said: %s", line)
		if strings.Contains(line, "lacks") {
			lines++
		}
		if strings.HasPrefix(line, "WARN") {
			t.Errorf("a warning: %s", line)
		}
	}
	if lines != len(lacks) {
		t.Errorf("%d lines of what is missing, want %d", lines, len(lacks))
	}
}

// saidAtTheStart are the lines of the agent's log that say by what rights it works.
func (r *rig) saidAtTheStart() (said []string) {
	r.t.Helper()
	log, err := os.Open(filepath.Join(r.Dir, "agent.log"))
	if err != nil {
		r.t.Fatal(err)
	}
	defer log.Close()
	lines := bufio.NewScanner(log)
	for lines.Scan() {
		var entry map[string]any
		if json.Unmarshal(lines.Bytes(), &entry) != nil {
			continue
		}
		logger, _ := entry["logger"].(string)
		if !strings.HasSuffix(logger, "access") && !strings.HasSuffix(logger, "pods") {
			continue
		}
		line := fmt.Sprintf("%v: %v", strings.ToUpper(fmt.Sprint(entry["level"])), entry["msg"])
		for _, key := range slices.Sorted(maps.Keys(entry)) {
			if !slices.Contains([]string{"level", "msg", "ts", "time", "logger", "caller", "version", "node"}, key) {
				line += fmt.Sprintf(" %s=%v", key, entry[key])
			}
		}
		said = append(said, line)
	}
	if err := lines.Err(); err != nil {
		r.t.Fatal(err)
	}
	return said
}
