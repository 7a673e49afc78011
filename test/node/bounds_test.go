package node_test

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
)

// agentMemory is the memory limit that deploy/base gives the agent, in KiB.
const agentMemory = 256 << 10

// Whoever may edit a ConfigMap must not be able to end the agent of each node by it, nor to silence it: a file of the largest size that
// the API server takes is refused in a few words, and the next wish is obeyed.
func TestFilesThatWouldFillTheMemoryAreRefusedAndTheNextWishObeyed(t *testing.T) {
	t.Parallel()
	const head = "version: v1\nmig-configs:\n"
	r := newRig(t, oneA100, "migConfigMap: {name: filling}\n")
	r.configMap("filling", head+"  all-balanced: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}]\n")
	r.awaitOffered("nvidia.com/gpu", 1)
	p := r.run()
	r.awaitReason(config.ReasonNotRequested)
	before := r.resident(p, "VmRSS")
	r.label(config.LabelMIGConfig, "broken")
	r.awaitReason(config.ReasonUnknownConfig)

	for _, file := range []struct{ name, text, says string }{
		{"a long scalar, aliased 300 times", "long: &long " + strings.Repeat("x", 900_000) + "\nall:\n" + strings.Repeat("- *long\n", 300), "aliases"},
		{"3,000 mistakes", head + mistakes(3_000), " more"},
		{"a list of 900,000 bytes", head + "  a: [" + strings.Repeat("{},", 300_000) + "]\n", "25000"},
	} {
		r.rewrite("filling", file.text)
		n := r.await(file.name+" to be refused", func(n *corev1.Node) bool {
			c := condition(n)
			return c != nil && c.Reason == string(config.ReasonInvalidCatalog) && strings.Contains(c.Message, file.says)
		})
		if size := len(condition(n).Message); size > 1024 {
			t.Errorf("%s: the condition has %d bytes", file.name, size)
		}
		if size := len(n.Annotations[config.AnnotationStatus]); size > 16<<10 {
			t.Errorf("%s: the status has %d bytes", file.name, size)
		}
		r.givenBack(n)
		t.Logf("%s: %d KiB resident, %d KiB at most since the start; %d KiB before", file.name, r.resident(p, "VmRSS"), r.resident(p, "VmHWM"), before)
	}
	if most := r.resident(p, "VmHWM"); most > agentMemory {
		t.Errorf("the agent took up to %d KiB, and its container may have %d", most, agentMemory)
	}
	r.rewrite("filling", head+"  mended: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}]\n")
	r.label(config.LabelMIGConfig, "mended")
	r.givenBack(r.awaitConverged("mended"))
}

// mistakes are so many MIG configs, each of which has one.
func mistakes(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "  c%d: [{devices: all, mig-enabled: 1}]\n", i)
	}
	return b.String()
}

// rewrite replaces what the ConfigMap has under the key that configMap gives it.
func (r *rig) rewrite(name, text string) {
	r.t.Helper()
	edit, err := json.Marshal(map[string]any{"data": map[string]string{"config.yaml": text}})
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.client.CoreV1().ConfigMaps("gpuslice").Patch(r.t.Context(), name, types.MergePatchType, edit, metav1.PatchOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

// resident reads a figure of the agent's memory, in KiB, as the kernel counts it: VmRSS is now, VmHWM the most ever.
func (r *rig) resident(p *process, figure string) int {
	r.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		r.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), figure+":")
	text, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
	kib, err := strconv.Atoi(text)
	if err != nil {
		r.t.Fatalf("reading %s of the agent: %v", figure, err)
	}
	return kib
}

// "Replicas not showing up": a ConfigMap has configs, no default says which, and no label does. Condition and recover say what would.
func TestConfigsThatNothingPicksAreNamedWithTheLabelThatWould(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "devicePlugin: {configMap: {name: unpicked}}\n", configFile)
	r.configMapOf("unpicked", map[string]string{
		"any": "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
	})
	r.awaitOffered("nvidia.com/gpu", 2)
	r.run()
	n := r.awaitReason(config.ReasonNotRequested)
	said := r.recover(0)
	for _, say := range []string{
		config.LabelProfile, config.LabelMIGConfig, "set label " + config.LabelDevicePluginConfig + " to a key of it (any)", "ConfigMap gpuslice/unpicked",
	} {
		if !strings.Contains(condition(n).Message, say) {
			t.Errorf("the condition does not say %q: %s", say, condition(n).Message)
		}
	}
	if !strings.Contains(said, "set label "+config.LabelDevicePluginConfig+" to a key of it (any)") {
		t.Errorf("recover does not say which label to set: %s", said)
	}
	r.label(config.LabelDevicePluginConfig, "any")
	r.givenBack(r.awaitConverged("any"))
	r.offers("nvidia.com/gpu", 4)
}
