package node_test

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/node"
)

// wrongRequest is one that NVIDIA's device plugin would refuse by ending, or pass over in silence.
type wrongRequest struct {
	name   string
	mig    string // MIG config that is asked for besides; none if empty
	config string // of the plugin
	reason config.Reason
	says   string
}

// wrongRequests has one of each kind of refusal. config/deviceplugin has what else a file may be wrong in, and agent what else a node cannot have.
var wrongRequests = []wrongRequest{
	{
		name: "no-replicas", config: "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu}]}}\n",
		reason: config.ReasonInvalidCatalog, says: "replicas",
	},
	{
		name:   "absent-after-the-cut",
		mig:    "all-3g.40gb",
		config: "version: v1\nflags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 2}]}}\n",
		reason: config.ReasonImpossibleSharing, says: "nvidia.com/mig-3g.40gb",
	},
	{
		name:   "MPS-on-MIG",
		mig:    "all-3g.40gb",
		config: "version: v1\nflags: {migStrategy: single, mpsRoot: /run/nvidia/mps}\nsharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n",
		reason: config.ReasonImpossibleSharing, says: "MPS",
	},
	{
		name: "single-of-several-sizes", mig: "all-balanced", config: "version: v1\nflags: {migStrategy: single}\n",
		reason: config.ReasonWrongMIGStrategy, says: "single",
	},
}

// Promise 1: nothing moves. There is no cordon, not even for a moment, no one is asked to leave, and the plugin runs on by the
// config that it has.
func TestWrongRequestsForSharingDisturbNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "devicePlugin: {configMap: {name: wrong-sharing}}\n", configFile)
	files := map[string]string{}
	for _, w := range wrongRequests {
		files[w.name] = w.config
	}
	r.configMapOf("wrong-sharing", files)
	r.awaitOffered("nvidia.com/gpu", 2)
	u := r.undisturbedBy(clustertest.Namespace(t))
	r.run()
	r.awaitReason(config.ReasonNotRequested)
	for _, w := range wrongRequests {
		r.labels(map[string]any{config.LabelMIGConfig: w.mig, config.LabelDevicePluginConfig: w.name})
		n := r.await(w.name+" to be refused", func(n *corev1.Node) bool {
			c := condition(n)
			return c != nil && c.Reason == string(w.reason) && strings.Contains(c.Message, w.name)
		})
		if !strings.Contains(condition(n).Message, w.says) {
			t.Errorf("%s: the message does not say %q: %s", w.name, w.says, condition(n).Message)
		}
		r.givenBack(n)
	}
	u.check()
}

// undisturbed is a node as it was, with a pod on one of its GPUs.
type undisturbed struct {
	*rig
	holder, plugin *corev1.Pod
	pids           []int
	file, gpus     string
	devices        map[string][]string
}

func (r *rig) undisturbedBy(namespace string) undisturbed {
	r.t.Helper()
	file, err := os.ReadFile(r.PluginConfig())
	if err != nil {
		r.t.Fatal(err)
	}
	return undisturbed{
		rig: r, holder: r.holder(namespace, "holder"), plugin: r.plugin(), pids: r.processes("nvidia-device-plugin"),
		file: string(file), gpus: r.GPUs.String(), devices: r.devices(),
	}
}

// check fails the test unless all is as it was, and was never otherwise as far as the API server knows.
func (u undisturbed) check() {
	u.t.Helper()
	u.neverFenced()
	if evicted := u.writes("pods/eviction"); len(evicted) > 0 {
		u.t.Errorf("evictions were asked for: %v", evicted)
	}
	after, err := u.client.CoreV1().Pods(u.holder.Namespace).Get(u.t.Context(), u.holder.Name, metav1.GetOptions{})
	if err != nil || after.UID != u.holder.UID || !running(after) {
		u.t.Errorf("the pod on a GPU was disturbed: %v", err)
	}
	if now := u.rig.plugin(); now.UID != u.plugin.UID || now.Status.ContainerStatuses[0].RestartCount != u.plugin.Status.ContainerStatuses[0].RestartCount {
		u.t.Error("the device plugin was restarted")
	}
	file, err := os.ReadFile(u.PluginConfig())
	if err != nil {
		u.t.Error(err)
	}
	if diff := cmp.Diff(u.file, string(file)); diff != "" {
		u.t.Errorf("the plugin's config (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(u.pids, u.processes("nvidia-device-plugin")); diff != "" {
		u.t.Errorf("processes of the plugin (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(u.devices, u.rig.devices()); diff != "" {
		u.t.Errorf("devices of kubelet (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(u.gpus, u.GPUs.String()); diff != "" {
		u.t.Errorf("the GPUs were touched (-before +after):\n%s", diff)
	}
}

// Promise 1: a device plugin that the agent cannot restart would never offer what a change makes, so no pod leaves for it.
func TestAPluginUnderANameThatTheAgentDoesNotKnowDisturbsNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "devicePlugin: {podSelector: [app=other]}\n", configFile)
	r.awaitOffered("nvidia.com/gpu", 2)
	u := r.undisturbedBy(clustertest.Namespace(t))
	r.run()
	r.label(config.LabelMIGConfig, "all-3g.40gb")
	n := r.awaitReason(config.ReasonNoDevicePlugin)
	for _, say := range []string{
		`all-3g.40gb: add "app.kubernetes.io/name=nvidia-device-plugin,app.kubernetes.io/part-of=gpuslice" to devicePlugin.podSelector of the settings`,
		"pod gpuslice/" + u.plugin.Name + " is the node's device plugin", "as its image " + node.DevicePluginImage + " suggests",
	} {
		if !strings.Contains(condition(n).Message, say) {
			t.Errorf("the message does not say %q: %s", say, condition(n).Message)
		}
	}
	r.givenBack(n)
	u.check()
}
