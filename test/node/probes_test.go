package node_test

import (
	"bytes"
	"context"
	"os"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/node"
)

// quick is a clock by which kubelet waits a twelfth of the time: probes are asked each five seconds that are to be asked each minute.
type quick struct{ clock.RealClock }

const quicker = 12

func (q quick) NewTimer(d time.Duration) clock.Timer   { return q.RealClock.NewTimer(d / quicker) }
func (q quick) After(d time.Duration) <-chan time.Time { return q.RealClock.After(d / quicker) }
func (q quick) NewTicker(d time.Duration) clock.Ticker { return q.RealClock.NewTicker(d / quicker) }

// deployAgent runs the agent in a pod of this node alone, as the DaemonSet of deploy/base declares it, and gives the pods' label.
func (r *rig) deployAgent() (selector string) {
	r.t.Helper()
	r.kubectl("apply", "-f", "../../deploy/base/configmap-settings.yaml")
	text, err := os.ReadFile("../../deploy/base/daemonset.yaml")
	if err != nil {
		r.t.Fatal(err)
	}
	var set appsv1.DaemonSet
	if err := yaml.UnmarshalStrict(bytes.TrimSpace(text), &set); err != nil {
		r.t.Fatal(err)
	}
	labels := map[string]string{"agent-of": r.Name}
	set.Name += "-" + r.Name
	set.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
	set.Spec.Template.Labels = labels
	set.Spec.Template.Spec.NodeSelector = map[string]string{corev1.LabelHostname: r.Name}
	sets := r.client.AppsV1().DaemonSets(set.Namespace)
	if _, err := sets.Create(r.t.Context(), &set, metav1.CreateOptions{}); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if err := sets.Delete(context.Background(), set.Name, metav1.DeleteOptions{}); err != nil {
			r.t.Error(err)
		}
	})
	return metav1.FormatLabelSelector(set.Spec.Selector)
}

// A process that stands still answers no probe. Kubelet asks as the DaemonSet declares it, ends the agent, which takes no notice of
// SIGTERM, and starts another one, that goes on where the first has stopped.
func TestKubeletRestartsAnAgentThatStandsStill(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100+"delays: {CreateGpuInstanceWithPlacement: 300ms}", "", func(o *node.Options) {
		configFile(o)
		o.Clock, o.Labels[corev1.LabelHostname] = quick{}, o.Name
	})
	r.awaitOffered("nvidia.com/gpu", 2)
	agents := metav1.ListOptions{LabelSelector: r.deployAgent()}
	const space = "gpuslice"
	ready := func(p *corev1.Pod) bool {
		return len(p.Status.ContainerStatuses) == 1 && p.Status.ContainerStatuses[0].Ready
	}
	restarts := r.awaitPod(space, agents, ready).Status.ContainerStatuses[0].RestartCount
	r.awaitReason(config.ReasonNotRequested)
	r.label(config.LabelMIGConfig, "all-1g.10gb")
	r.await("a journal", func(n *corev1.Node) bool { return n.Annotations[config.AnnotationJournal] != "" })
	if _, err := r.StopAgent(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	again := r.awaitPod(space, agents, func(p *corev1.Pod) bool { return p.Status.ContainerStatuses[0].RestartCount > restarts && ready(p) })
	r.givenBack(r.awaitConverged("all-1g.10gb"))
	r.awaitOffered("nvidia.com/mig-1g.10gb", 14)
	ended := again.Status.ContainerStatuses[0].LastTerminationState.Terminated
	if ended == nil || ended.ExitCode != 128+9 {
		t.Errorf("the agent that stood still has ended so: %v", ended)
	}
	if n := r.awaitPod(space, agents, ready).Status.ContainerStatuses[0].RestartCount; n != restarts+1 {
		t.Errorf("the agent was restarted %d times", n-restarts)
	}
	t.Logf("after %s, of kubelet's time %s, another agent is ready", time.Since(began).Round(time.Second), quicker*time.Since(began).Round(time.Second))
}
