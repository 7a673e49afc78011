package deviceplugin

import (
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// Whoever may create a pod writes what it is called: of several the agent names the likeliest, and never more than a little of its text.
func TestTheLikeliestPluginIsNamed(t *testing.T) {
	pod := func(name, image string, labels map[string]string, change ...func(*corev1.Pod)) corev1.Pod {
		p := corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "platform", Labels: labels, OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "apps/v1", Kind: "DaemonSet", Name: "set", UID: "set", Controller: new(true),
			}}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: image}}},
		}
		for _, c := range change {
			c(&p)
		}
		return p
	}
	mounts := func(p *corev1.Pod) {
		p.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/device-plugins/"}}}}
	}
	bare := func(p *corev1.Pod) { p.OwnerReferences = nil }
	runs := func(command ...string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Containers[0].Command = command }
	}
	const image = "nvcr.io/nvidia/k8s-device-plugin:v0.19.3"
	hashed := map[string]string{"app.kubernetes.io/name": "hami", "component": "x", "controller-revision-hash": "1"}
	for name, row := range map[string]struct {
		pods []corev1.Pod
		want string
	}{
		"by its image": {
			[]corev1.Pod{pod("other", "nginx", nil), pod("gpus", image, hashed)},
			`add "app.kubernetes.io/name=hami,component=x" to devicePlugin.podSelector and "platform" to devicePlugin.namespaces and "c" to devicePlugin.containers of the settings, if pod platform/gpus is the node's device plugin, as its image ` + image + " suggests",
		},
		"beside GPU feature discovery, of the same image": {
			[]corev1.Pod{pod("features", image, hashed, runs("/usr/bin/gpu-feature-discovery")), pod("gpus", image, hashed)}, "if pod platform/gpus is",
		},
		"beside the plugin of a network card": {
			[]corev1.Pod{pod("rdma", "rdma-plugin", hashed, mounts), pod("gpus", "site/plugin", hashed, mounts, runs("/usr/bin/nvidia-device-plugin"))},
			"if pod platform/gpus is the node's device plugin, as its command /usr/bin/nvidia-device-plugin suggests",
		},
		"by its folder":       {[]corev1.Pod{pod("gpus", "site/plugin", hashed, mounts)}, "as its volume /var/lib/kubelet/device-plugins/ suggests"},
		"beside a bare pod":   {[]corev1.Pod{pod("tenant", image, hashed, mounts, bare), pod("gpus", image, hashed)}, "if pod platform/gpus is"},
		"a bare pod":          {[]corev1.Pod{pod("gpus", image, hashed, bare)}, "run the node's device plugin as a DaemonSet that devicePlugin of the settings matches, if pod platform/gpus is"},
		"none":                {[]corev1.Pod{pod("other", "nginx", nil)}, "no pod of the node looks like one, so it may be a unit of the host"},
		"with long text":      {[]corev1.Pod{pod("gpus", "nvidia/device-plugin"+strings.Repeat("x", 10000), map[string]string{"a": strings.Repeat("y", 10000)})}, "if pod platform/gpus is"},
		"without a container": {[]corev1.Pod{pod("gpus", image, hashed, mounts, func(p *corev1.Pod) { p.Spec.Containers = nil })}, "if pod platform/gpus is"},
	} {
		t.Run(name, func(t *testing.T) {
			sets := holders.NewDaemonSets(clientset.Of(fake.NewClientset(&appsv1.DaemonSet{
				ObjectMeta: metav1.ObjectMeta{Name: "set", Namespace: "platform", UID: "set"},
				Spec:       appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app.kubernetes.io/name": "hami", "component": "x"}}},
			})), clocktesting.NewFakePassiveClock(time.Now()))
			pods, err := sets.Believe(t.Context(), "", row.pods)
			if err != nil {
				t.Fatal(err)
			}
			dp := &Plugin{Settings: config.Default(), Sets: sets}
			got := dp.cure(pods)
			if !strings.Contains(got, row.want) || len(got) > 600 {
				t.Errorf("it says %q (%d), want %q", got, len(got), row.want)
			}
		})
	}
}
