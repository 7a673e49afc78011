package node_test

import (
	"context"
	"regexp"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// awaitIdle watches the Events of the namespace until one that the pod is idle has such a message, and gives the pods that were told so till then.
func (r *rig) awaitIdle(namespace string, message *regexp.Regexp) map[string]bool {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	open := func(ctx context.Context) (watch.Interface, error) {
		return r.client.CoreV1().Events(namespace).Watch(ctx, metav1.ListOptions{FieldSelector: "reason=" + string(config.ReasonGPUIdle)})
	}
	told := map[string]bool{}
	var last string
	if err := clustertest.Follow(ctx, open, nil, func(_ watch.EventType, e *corev1.Event) bool {
		told[e.InvolvedObject.Name], last = true, e.Message
		return message.MatchString(e.Message)
	}); err != nil {
		r.t.Fatalf("no Event %s: %v; the last one is %q", message, err, last)
	}
	return told
}

// Two pods on instances of one GPU, by NVIDIA's own plugin, each with a process. The driver is asked by the agent's own way to it.
func TestAPodThatDoesNotUseItsInstanceIsToldAndOneThatWorksIsNot(t *testing.T) {
	t.Parallel()
	r := newRig(t, "gpus: [{model: H100-80GB}]", "idle: {every: 1s, after: 10s, instances: sample}\n")
	namespace := clustertest.Namespace(t)
	r.label(config.LabelMIGConfig, "all-1g.10gb")
	r.run()
	r.awaitConverged("all-1g.10gb")
	slice := map[string]string{"nvidia.com/mig-1g.10gb": "1"}
	trainer := r.pod(namespace, "trainer-0", slice)
	r.awaitRunning(namespace, "trainer-0")
	if err := r.Users.Busy(trainer, r.assignments(namespace)["trainer-0"][0], 60); err != nil {
		t.Fatal(err)
	}
	r.pod(namespace, "notebook-0", slice)
	begins := "^" + namespace + "/notebook-0 has had GPU 0 1g.10gb for "
	r.awaitIdle(namespace, regexp.MustCompile(begins+`\d+ s and used it for 0 %; 512 of \d+ MiB are held there by a process \(MIG-`))
	// By the second time the other pod has been judged, too.
	told := r.awaitIdle(namespace, regexp.MustCompile(begins+`\d+ s and used it for 0 % of the last 10 s;`))
	if told["trainer-0"] || len(told) != 1 {
		t.Errorf("told were %v, want notebook-0 alone", told)
	}
}
