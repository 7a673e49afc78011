package agent

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/record"

	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/config"
)

// events is a recorder that says nothing that is not printable, and nothing endless.
type events struct{ record.EventRecorder }

// Event implements record.EventRecorder.
func (e events) Event(object runtime.Object, kind, reason, message string) {
	e.EventRecorder.Event(object, kind, reason, legible.Message(message, legible.Longest))
}

// Eventf implements record.EventRecorder.
func (e events) Eventf(object runtime.Object, kind, reason, format string, args ...any) {
	e.Event(object, kind, reason, fmt.Sprintf(format, args...))
}

// AnnotatedEventf implements record.EventRecorder.
func (e events) AnnotatedEventf(object runtime.Object, annotations map[string]string, kind, reason, format string, args ...any) {
	e.EventRecorder.AnnotatedEventf(object, annotations, kind, reason, "%s", legible.Message(fmt.Sprintf(format, args...), legible.Longest))
}

// noRoom is what people are told where others have filled the node's annotations.
const noRoom = "; annotation " + config.AnnotationStatus + " is out of date, since the annotations of this node are full"
