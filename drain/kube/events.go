package kube

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
)

// EventSink sends Events to the API server, each in its own namespace.
type EventSink struct {
	Client Interface
}

var _ record.EventSink = EventSink{}

// eventTimeout bounds a request: behind one that hangs, all later Events would wait.
const eventTimeout = 30 * time.Second

// forAnEvent is the context of one request. A recorder hands over none: Events are sent as long as the process lives.
func forAnEvent() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), eventTimeout) //nolint:forbidigo // no caller has a context for it
}

// Create implements record.EventSink.
func (s EventSink) Create(event *corev1.Event) (*corev1.Event, error) {
	ctx, cancel := forAnEvent()
	defer cancel()
	return s.Client.Events(event.Namespace).Create(ctx, event, metav1.CreateOptions{})
}

// Patch implements record.EventSink, for an Event that happens again.
func (s EventSink) Patch(event *corev1.Event, body []byte) (*corev1.Event, error) {
	ctx, cancel := forAnEvent()
	defer cancel()
	return s.Client.Events(event.Namespace).Patch(ctx, event.Name, types.StrategicMergePatchType, body, metav1.PatchOptions{})
}

// Update implements record.EventSink. Recorders patch instead, and the agent has no right to update Events.
func (EventSink) Update(*corev1.Event) (*corev1.Event, error) { return nil, errors.ErrUnsupported }
