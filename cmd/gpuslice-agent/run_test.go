package main

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/receive"
)

// sink hands on the reasons of the Events that reach the API server.
type sink chan string

func (s sink) Create(e *corev1.Event) (*corev1.Event, error) { s <- e.Reason; return e, nil }

func (s sink) Update(e *corev1.Event) (*corev1.Event, error) { s <- e.Reason; return e, nil }

func (s sink) Patch(e *corev1.Event, _ []byte) (*corev1.Event, error) { s <- e.Reason; return e, nil }

// Kubelet admits 110 pods to a node by default.
func TestTheEndOfAChangeThatEvictsAllPodsOfANodeIsReportedByAnEvent(t *testing.T) {
	const pods = 110
	recorded := make(sink)
	events := newEvents()
	defer events.Shutdown()
	defer events.StartRecordingToSink(recorded).Stop()
	recorder := events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "gpuslice", Host: "gpu-1"})
	node := &corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: "gpu-1", UID: "gpu-1"}
	for i := range pods {
		recorder.Eventf(node, corev1.EventTypeNormal, string(config.ReasonEvicting), "evicted pod team-a/worker-%d for the change to all-1g.10gb", i)
	}
	recorder.Event(node, corev1.EventTypeNormal, string(config.ReasonReleased), "released the node")
	other := node.DeepCopy()
	other.Name = "gpu-2"
	recorder.Event(other, corev1.EventTypeNormal, "Last", "") // of an object that has had none, so this comes
	seen := map[string]int{}
	for seen["Last"] == 0 {
		seen[receive.From(t, recorded)]++
	}
	if fmt.Sprint(seen) != fmt.Sprint(map[string]int{string(config.ReasonEvicting): pods, string(config.ReasonReleased): 1, "Last": 1}) {
		t.Errorf("the API server was sent %v", seen)
	}
}
