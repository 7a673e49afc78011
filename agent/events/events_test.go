package events_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// sent is the last Event that was sent.
type sent struct {
	about                 *corev1.ObjectReference
	kind, reason, message string
}

func (s *sent) Event(about runtime.Object, kind, reason, message string) {
	s.about, _ = about.(*corev1.ObjectReference)
	s.kind, s.reason, s.message = kind, reason, message
}

func (s *sent) Eventf(runtime.Object, string, string, string, ...any) {}

func (s *sent) AnnotatedEventf(runtime.Object, map[string]string, string, string, string, ...any) {}

// kubectl describe finds the Events of a node under its name as UID, and those of a pod under the pod's own. Text of others has no end and any sign.
func TestAnEventIsAboutItsNodeOrPodAndBounded(t *testing.T) {
	t.Parallel()
	var got sent
	r := events.Recorder{To: &got}
	r.OfNode("gpu-1")(events.GPUUnhealthy("XidError", "\x1b[31m"+strings.Repeat("x", 10_000)))
	if got.about.Kind != "Node" || got.about.Name != "gpu-1" || got.about.UID != "gpu-1" || got.kind != corev1.EventTypeWarning || got.reason != string(config.ReasonGPUUnhealthy) {
		t.Errorf("%+v about %+v", got, got.about)
	}
	if utf8.RuneCountInString(got.message) > sanitize.Longest || strings.Contains(got.message, "\x1b") {
		t.Errorf("the message is %q", got.message)
	}
	r.Pod(types.NamespacedName{Namespace: "team", Name: "a"}, "uid-a", events.EvictingThis("evicting", "gpu-1", "all-1g.10gb"))
	if got.about.Kind != "Pod" || got.about.Namespace != "team" || got.about.UID != "uid-a" || got.kind != corev1.EventTypeNormal {
		t.Errorf("%+v about %+v", got, got.about)
	}
	if want := "evicting this pod for the change of node gpu-1 to all-1g.10gb"; got.message != want {
		t.Errorf("%q, want %q", got.message, want)
	}
}
