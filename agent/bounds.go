package agent

import (
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/record"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/config"
)

// Bounds of what the agent writes. Everything that goes to the API server passes one of the functions here: a condition by
// conditionOf, an Event by events, a text of the status by bounded, an answer by within.
const (
	// longestDecision leaves a condition room for what was asked for, and for what becomes of the node, around the cause.
	longestDecision = 768 // characters
	// longestBlocker is a pod with the budget that keeps it.
	longestBlocker = 256 // characters
	// longestLastWords are those of a container that has ended.
	longestLastWords = 256 // characters

	// allAnnotations is what the API server lets all annotations of an object take, keys and values together.
	allAnnotations = 256 << 10 // bytes
	// statusRoom and answerRoom are what the status and an answer may take of it. The journal may take 64 KiB, and what is left is for
	// others: kubelet, the network's and the storage's agents write some KiB each.
	statusRoom = 32 << 10 // bytes
	answerRoom = 48 << 10 // bytes
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

// bounded is the decision with texts that leave room for what is said around them.
func (d decision) bounded() decision {
	d.message = legible.Message(d.message, longestDecision)
	if d.failure != nil {
		d.failure = boundedFailure(d.failure)
	}
	return d
}

// boundedFailure is the failure as it can be kept on the node.
func boundedFailure(f *api.Failure) *api.Failure {
	if f == nil {
		return nil
	}
	out := *f
	out.Message = legible.Message(f.Message, longestDecision)
	return &out
}

// boundedStatus is the status in so many bytes: without blockers first, then without the geometry and the capacity, which people find
// elsewhere. What the agent reads back stays, also where there is no room even for that.
func boundedStatus(s api.Status, room int) (text string, fits bool, err error) {
	s.Desired = legible.Cut(s.Desired, longestBlocker)
	s.Capacity, s.Failed = legible.Message(s.Capacity, legible.Longest), boundedFailure(s.Failed)
	blockers := s.Blockers
	s.Blockers = nil
	for _, b := range blockers[:min(len(blockers), mostBlockers)] {
		s.Blockers = append(s.Blockers, legible.Message(b, longestBlocker))
	}
	for {
		text, err = encodeStatus(s)
		switch {
		case err != nil || len(text) <= room:
			return text, err == nil, err
		case len(s.Blockers) > 0:
			s.Blockers = s.Blockers[:len(s.Blockers)/2]
		case len(s.GPUs) > 0:
			s.GPUs = nil
		case s.Capacity != "":
			s.Capacity = ""
		default:
			return text, false, nil
		}
	}
}

// roomFor is what an annotation of the node may take, of so many bytes at most: others may have filled the rest.
func roomFor(node *corev1.Node, key string, most int) int {
	left := allAnnotations - len(key)
	for k, v := range node.Annotations {
		if k != key {
			left -= len(k) + len(v)
		}
	}
	return min(left, most)
}

// noRoom is what people are told where others have filled the node's annotations.
const noRoom = "; annotation " + config.AnnotationStatus + " is out of date, since the annotations of this node are full"

// boundedAnswer is the answer in so many bytes: it counts the steps and pods that are left out.
func boundedAnswer(a api.Answer, room int) (string, error) {
	a.Refused, a.Runs = legible.Message(a.Refused, legible.Longest), legible.Message(a.Runs, legible.Longest)
	for i := range a.Steps {
		a.Steps[i] = legible.Message(a.Steps[i], legible.Longest)
	}
	for {
		b, err := json.Marshal(a)
		if err != nil {
			return "", fmt.Errorf("encoding an answer: %w", err)
		}
		steps, pods := len(a.Steps), len(a.Pods)
		switch {
		case len(b) <= room || steps+pods == 0:
			return string(b), nil
		case steps >= pods:
			a.Steps, a.More = a.Steps[:steps/2], a.More+steps-steps/2
		default:
			a.Pods, a.MorePods = a.Pods[:pods/2], a.MorePods+pods-pods/2
		}
	}
}
