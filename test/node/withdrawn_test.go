package node_test

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// withdrawal is another config of the device plugin, which its config manager gives it before the agent looks.
type withdrawal struct {
	name   string
	change func(r *rig)
	says   string // how the node's condition begins when all is as asked
	offers string // the resource under which kubelet gives out the GPU then
	long   bool   // it takes half a minute
}

// picks has the config manager give the plugin a key of its ConfigMap.
func picks(key string) func(*rig) { return func(r *rig) { r.label(labelPluginConfig, key) } }

// Promise 19. Config-manager obeys the label at once, so that the pods of the former config keep what kubelet gives out again. The node
// has one GPU, so that each pod of the next config would get what another has.
func TestNoDeviceIsWithTwoPodsWhateverTheConfigManagerDoes(t *testing.T) {
	t.Parallel()
	t.Run("a GPU", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, "gpus: [{model: H100-80GB}]", "", configManager)
		edited := "edited-" + r.Name
		r.configs(map[string]any{edited: r.pluginConfigs()["renamed-4"]})
		t.Cleanup(func() { r.configs(map[string]any{edited: nil}) })
		r.withdraws([]withdrawal{
			{"at first", picks("renamed-4"), "renamed-4: nvidia.com/gpu.shared 4 = 1 x 4 time-slicing", "nvidia.com/gpu.shared", false},
			{"another name, and whole", picks("whole"), "whole: nvidia.com/gpu 1", "nvidia.com/gpu", false},
			{"replicas where none were", picks("time-slicing-4"), "time-slicing-4: nvidia.com/gpu 4 = 1 x 4 time-slicing", "nvidia.com/gpu", false},
			{"no replicas", picks("whole"), "whole: nvidia.com/gpu 1", "nvidia.com/gpu", false},
			{"replicas by another name", picks(edited), edited + ": nvidia.com/gpu.shared 4 = 1 x 4 time-slicing", "nvidia.com/gpu.shared", false},
			{"the edit of a key", func(r *rig) {
				r.configs(map[string]any{edited: r.pluginConfigs()["time-slicing-4"]})
				r.restartPlugin() // config-manager does not signal an edit to it
			}, edited + ": nvidia.com/gpu 4 = 1 x 4 time-slicing", "nvidia.com/gpu", false},
			{"the default in place of the label", func(r *rig) {
				r.labels(map[string]any{config.LabelMIGConfig: "all-disabled", labelPluginConfig: nil})
			}, "all-disabled: nvidia.com/gpu 1", "nvidia.com/gpu", false},
			{"replicas once more", picks("time-slicing-4"), "all-disabled + time-slicing-4: nvidia.com/gpu 4 = 1 x 4 time-slicing", "nvidia.com/gpu", true},
			{"the same replicas by MPS", picks("mps-4"), "all-disabled + mps-4: nvidia.com/gpu 4 = 1 x 4 mps", "nvidia.com/gpu", true},
			{"no MPS", picks("renamed-4"), "all-disabled + renamed-4: nvidia.com/gpu.shared 4 = 1 x 4 time-slicing", "nvidia.com/gpu.shared", true},
		})
	})
	t.Run("MIG devices", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, "gpus: [{model: H100-80GB}]", "", configManager)
		single, mixed := "single-"+r.Name, "mixed-"+r.Name
		r.configs(map[string]any{single: sharingConfigs["single"], mixed: sharingConfigs["mixed"]})
		t.Cleanup(func() { r.configs(map[string]any{single: nil, mixed: nil}) })
		r.label(config.LabelMIGConfig, "all-7g.80gb")
		r.withdraws([]withdrawal{
			{"at first", picks(mixed), "all-7g.80gb + " + mixed + ": nvidia.com/mig-7g.80gb 1", "nvidia.com/mig-7g.80gb", false},
			{"as a GPU", picks(single), "all-7g.80gb + " + single + ": nvidia.com/gpu 1", "nvidia.com/gpu", false},
			{"by its profile", picks(mixed), "all-7g.80gb + " + mixed + ": nvidia.com/mig-7g.80gb 1", "nvidia.com/mig-7g.80gb", false},
		})
	})
}

// withdraws makes each of the changes, the first on a node without pods, while pods have what was given out before. Then it runs pods with what is given out
// after it.
func (r *rig) withdraws(changes []withdrawal) {
	r.t.Helper()
	r.awaitOffered("nvidia.com/gpu", 1)
	r.run()
	namespace := clustertest.Namespace(r.t)
	var former []*corev1.Pod
	for i, c := range changes {
		if c.long && testing.Short() {
			continue
		}
		name := string(rune('a' + i))
		began, before := time.Now(), r.cordons()
		c.change(r)
		r.neverTrueBeside(former, c)
		r.givenBack(r.node())
		for _, pod := range former {
			r.hasLeft(pod)
		}
		if fenced := r.cordons() - before; i > 0 && fenced != 1 {
			r.t.Errorf("%s: the node was cordoned %d times", c.name, fenced)
		}
		former = []*corev1.Pod{r.holder(namespace, name)}
		if len(r.devices()[c.offers]) > 1 {
			former = append(former, r.holder(namespace, name+"-beside"))
		}
		r.noDeviceIsWithTwo(namespace, c.name)
		r.t.Logf("%s after %s", c.name, time.Since(began).Round(100*time.Millisecond))
	}
}

// neverTrueBeside waits until the node is as asked. It fails the test if the node says so while one of the pods is there.
func (r *rig) neverTrueBeside(former []*corev1.Pod, c withdrawal) {
	r.t.Helper()
	began, said := time.Now(), ""
	r.await(c.says, func(n *corev1.Node) bool {
		is := condition(n)
		if is == nil {
			return false
		}
		if text := string(is.Status) + " " + is.Reason + ": " + is.Message; text != said {
			said = text
			r.t.Logf("%s, after %s: %s", c.name, time.Since(began).Round(100*time.Millisecond), text)
		}
		if is.Status != corev1.ConditionTrue || !strings.HasPrefix(is.Message, c.says) {
			return false
		}
		for _, pod := range former {
			if now, err := r.client.CoreV1().Pods(pod.Namespace).Get(r.t.Context(), pod.Name, metav1.GetOptions{}); err == nil && now.UID == pod.UID {
				r.t.Errorf("%s: the node says %s while pod %s has what it was given before", c.name, said, pod.Name)
			}
		}
		return n.Annotations[config.AnnotationJournal] == ""
	})
}

// noDeviceIsWithTwo fails the test if a pod has what kubelet does not give out, or two have the same.
func (r *rig) noDeviceIsWithTwo(namespace, when string) {
	r.t.Helper()
	kubelet := holders.DialKubelet(r.Kubelet.PodResourcesSocket())
	defer kubelet.Close()
	given, err := kubelet.Assignments(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	offered, has := r.devices(), map[string]string{}
	for _, pod := range slices.SortedFunc(maps.Keys(given), func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) }) {
		for resource, ids := range given[pod] {
			for _, id := range ids {
				if other := has[id]; pod.Namespace != namespace || other != "" || !slices.Contains(offered[resource], id) {
					r.t.Errorf("%s: pod %s has %s %s, and kubelet gives out %v; another with it is %q", when, pod, resource, id, offered, other)
				}
				has[id] = pod.Name
			}
		}
	}
}

// configs sets keys of config-manager's ConfigMap, and removes those that are nil.
func (r *rig) configs(keys map[string]any) {
	r.t.Helper()
	body, err := json.Marshal(map[string]any{"data": keys})
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.client.CoreV1().ConfigMaps("nvidia-device-plugin").Patch(context.Background(), "device-plugin-configs", types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
		r.t.Fatal(err)
	}
}
