package report

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Events records Events. All Events of the agent are of its node, or of a pod there.
type Events struct{ To record.EventRecorder }

// Nodef records an Event on the node, under the UID by which kubectl describe finds a node's Events.
func (r Events) Nodef(node *corev1.Node, kind string, reason config.Reason, format string, args ...any) {
	r.record(&corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: node.Name, UID: types.UID(node.Name)}, kind, reason, format, args)
}

// Of records Events on the node of that name.
func (r Events) Of(node string) func(kind string, reason config.Reason, format string, args ...any) {
	return func(kind string, reason config.Reason, format string, args ...any) {
		r.Nodef(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, kind, reason, format, args...)
	}
}

// Podf records an Event on a pod.
func (r Events) Podf(pod types.NamespacedName, uid types.UID, kind string, reason config.Reason, format string, args ...any) {
	r.record(&corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: pod.Namespace, Name: pod.Name, UID: uid}, kind, reason, format, args)
}

func (r Events) record(of *corev1.ObjectReference, kind string, reason config.Reason, format string, args []any) {
	r.To.Event(of, kind, string(reason), sanitize.Message(fmt.Sprintf(format, args...), sanitize.Longest))
}
