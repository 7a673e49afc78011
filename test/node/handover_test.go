package node_test

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// handovers are the ways in which the device plugin is given another config.
var handovers = []struct {
	name   string
	option option
	newPod bool // the plugin's pod is another one afterwards
	label  bool // config-manager goes by the node's label
}{
	{name: "file", option: configFile},
	{name: "restart", option: configFile, newPod: true},
	{name: "label", option: configManager, label: true},
	{name: "configmap", option: configManager, label: true},
}

// sharingProfiles share whole GPUs. The ConfigMap of config-manager has keys for all but three-each and five-each. Nodes share that
// ConfigMap, and only one test has each of these two, so that it sees its key come and go.
const sharingProfiles = `apiVersion: gpuslice.io/v1alpha1
kind: Profiles
profiles:
  whole: {sharing: none}
  four-each: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}}
  four-renamed: {sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}}
  three-each: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}}
  five-each: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 5}]}}}
  four-by-MPS: {sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}}
`

// shares asks for the profile, waits until the agent says that it is done, and proves it by ids.
func (r *rig) shares(profile, resource string, replicas int) {
	r.t.Helper()
	r.label(config.LabelProfile, profile)
	n := r.awaitConverged(profile)
	r.givenBack(n)
	r.offers(resource, replicas)
	if diff := cmp.Diff(map[string]int{resource: 2 * replicas}, offered(n)); diff != "" {
		r.t.Errorf("%s: allocatable (-want +got):\n%s", profile, diff)
	}
}

// offers fails the test unless kubelet gives out each GPU so often under the name, and nothing else.
func (r *rig) offers(resource string, replicas int) {
	r.t.Helper()
	if diff := cmp.Diff(map[string][]string{resource: replicated(r.GPUs.UUIDs(), replicas)}, r.devices()); diff != "" {
		r.t.Errorf("devices of kubelet (-want +got):\n%s", diff)
	}
}

func TestSharingIsHandedToThePluginInEachWay(t *testing.T) {
	t.Parallel()
	for _, way := range handovers {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			name := "handover-" + way.name
			r := newRig(t, twoH100, "devicePlugin: {handover: "+way.name+"}\nprofiles: {name: "+name+"}\n", way.option)
			r.configMapOf(name, map[string]string{"profiles.yaml": sharingProfiles})
			r.awaitOffered("nvidia.com/gpu", 2)
			namespace := clustertest.Namespace(t)
			holder := r.holder(namespace, "holder")
			before := r.plugin()
			r.run()
			r.shares("four-each", "nvidia.com/gpu", 4)
			r.hasLeft(holder)
			if after := r.plugin(); (after.UID != before.UID) != way.newPod || restarts(after) != restarts(before) {
				t.Errorf("the plugin's pod is %s, was %s; restarted %d times", after.Name, before.Name, restarts(after)-restarts(before))
			}
			r.shares("four-renamed", "nvidia.com/gpu.shared", 4)
			if way.name != "label" {
				r.shares("three-each", "nvidia.com/gpu", 3)
			}
			key := r.node().Labels[config.LabelDevicePluginConfig]
			if way.label == (key == "") {
				t.Errorf("the node's label says %q", key)
			}
			r.shares("whole", "nvidia.com/gpu", 1)
			if _, there := r.pluginConfigs()[key]; way.name == "configmap" && there {
				t.Errorf("key %s, which no node uses any more, is still there", key)
			}
		})
	}
}

func restarts(pod *corev1.Pod) (n int32) {
	for _, c := range pod.Status.ContainerStatuses {
		n += c.RestartCount
	}
	return n
}

// awaitTakenBack waits until a change has failed and the node is given back.
func (r *rig) awaitTakenBack() *corev1.Node {
	r.t.Helper()
	n := r.await("a change to be taken back", func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && (c.Reason == string(config.ReasonCapacityMismatch) || c.Reason == string(config.ReasonPluginFailed)) &&
			n.Annotations[config.AnnotationJournal] == "" && n.Labels[config.LabelMIGConfigState] == string(config.StateFailed)
	})
	r.t.Logf("%s: %s", condition(n).Reason, condition(n).Message)
	r.givenBack(n)
	return n
}

// Promise 10: a config that the agent can find nothing wrong in, and by which the plugin ends, again and again: it has no CDI
// specs to write for a driver without files.
func TestAConfigByWhichThePluginEndsIsTakenBack(t *testing.T) {
	t.Parallel()
	const name = "plugin-ends"
	r := newRig(t, twoH100, "devicePlugin: {handover: file, configMap: {name: "+name+"}}\n", configFile)
	r.configMapOf(name, map[string]string{
		"good": sharingConfigs["time-slicing"],
		"bad": "version: v1\nflags: {migStrategy: none, plugin: {deviceListStrategy: cdi-annotations}}\n" +
			"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n",
	})
	r.awaitOffered("nvidia.com/gpu", 2)
	r.run()
	r.label(config.LabelDevicePluginConfig, "good")
	r.awaitConverged("good")
	r.offers("nvidia.com/gpu", 4)

	r.label(config.LabelDevicePluginConfig, "bad")
	n := r.awaitTakenBack()
	if c := condition(n); c.Reason != string(config.ReasonPluginFailed) || !strings.Contains(c.Message, "nvidia-device-plugin-ctr") {
		t.Errorf("%s, and the message does not name the container of the plugin: %s", c.Reason, c.Message)
	}
	r.offers("nvidia.com/gpu", 4)
	text, err := os.ReadFile(r.PluginConfig())
	if err != nil || string(text) != sharingConfigs["time-slicing"] {
		t.Errorf("the plugin's config is another than before: %v\n%s", err, text)
	}
}

// Promises 2 and 3: more replicas disturb no pod, not even by a cordon; of fewer, those that go are taken from who has them, and
// no one else can notice that anything has happened.
func TestOnlyHoldersOfReplicasThatGoLeave(t *testing.T) {
	t.Parallel()
	const profiles = `apiVersion: gpuslice.io/v1alpha1
kind: Profiles
profiles:
  two-each: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}}
  four-each: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}}
`
	r := newRig(t, twoH100, "profiles: {name: replicas}\n", configFile)
	r.configMapOf("replicas", map[string]string{"profiles.yaml": profiles})
	r.awaitOffered("nvidia.com/gpu", 2)
	r.run()
	r.shares("two-each", "nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	fill := func(from, to int) map[types.UID]*corev1.Pod {
		for i := from; i < to; i++ {
			r.pod(namespace, fmt.Sprintf("user-%d", i), map[string]string{"nvidia.com/gpu": "1"})
		}
		return r.awaitPods(namespace, fmt.Sprintf("%d pods", to), func(pods map[types.UID]*corev1.Pod) bool {
			return len(pods) == to && all(pods, running)
		})
	}
	first, cordons := fill(0, 4), r.cordons()
	devices := r.assignments(namespace)
	r.shares("four-each", "nvidia.com/gpu", 4)
	r.undisturbed(namespace, first, devices)
	if now := r.cordons(); now != cordons {
		t.Errorf("the node was cordoned %d times for more replicas", now-cordons)
	}

	everybody := fill(4, 8)
	devices = r.assignments(namespace)
	goes := func(pod *corev1.Pod) bool {
		_, replica, _ := strings.Cut(devices[pod.Name][0], "::")
		return replica == "2" || replica == "3"
	}
	leaves := those(everybody, goes)
	if len(leaves) != 4 {
		t.Fatalf("%d pods have a replica that goes, want 4: %v", len(leaves), devices)
	}
	r.shares("two-each", "nvidia.com/gpu", 2)
	if diff := cmp.Diff(names(leaves), r.evictions(namespace)); diff != "" {
		t.Errorf("evicted pods (-those with a replica that goes +asked for):\n%s", diff)
	}
	r.undisturbed(namespace, those(everybody, func(pod *corev1.Pod) bool { return !goes(pod) }), devices)
	if now := r.cordons(); now != cordons+1 {
		t.Errorf("the node was cordoned %d times for fewer replicas", now-cordons)
	}
}

// neverFenced fails the test if the agent has ever cordoned or tainted the node, also where it has given it back since.
func (r *rig) neverFenced() {
	r.t.Helper()
	for _, w := range r.writes("nodes") {
		if w.Name == r.Name && (strings.Contains(w.Body, "unschedulable") || strings.Contains(w.Body, config.TaintRepartitioning)) {
			r.t.Errorf("the node was fenced: %s %s", w, w.Body)
		}
	}
}

// cordons counts how often the agent has cordoned the node.
func (r *rig) cordons() (n int) {
	r.t.Helper()
	for _, w := range r.writes("nodes") {
		// A write that is refused cordons nothing, and the agent repeats it. The journal of another node may name this one, by a config's name.
		if w.Name == r.Name && w.Code == http.StatusOK && strings.Contains(w.Body, `"unschedulable":true`) {
			n++
		}
	}
	return n
}
