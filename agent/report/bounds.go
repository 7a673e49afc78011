package report

import (
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/nvml"
)

// Bounds of what the agent writes to its node.
const (
	// longestDecision leaves a condition room for what was asked for, and for what becomes of the node, around the cause.
	longestDecision = 768 // characters
	// longestBlocker is a pod with the budget that keeps it.
	longestBlocker = 256 // characters

	// AllAnnotations is what the API server lets all annotations of an object take, keys and values together.
	allAnnotations = 256 << 10 // bytes
	// StatusRoom and AnswerRoom are what the status and an answer may take of it. The journal may take 64 KiB, and what is left is for
	// others: kubelet, the network's and the storage's agents write some KiB each.
	StatusRoom = 32 << 10 // bytes
	AnswerRoom = 48 << 10 // bytes
)

// Bounded is the decision with texts that leave room for what is said around them.
func (d Decision) Bounded() Decision {
	d.Message = legible.Message(d.Message, longestDecision)
	if d.Failure != nil {
		d.Failure = boundedFailure(d.Failure)
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

// EncodeStatus is the status in so many bytes: without blockers first, then without the geometry and the capacity, which people find
// elsewhere. What the agent reads back stays, also where there is no room even for that.
func EncodeStatus(s api.Status, room int) (text string, fits bool, err error) {
	s.Desired = legible.Cut(s.Desired, longestBlocker)
	s.Capacity, s.Failed = legible.Message(s.Capacity, legible.Longest), boundedFailure(s.Failed)
	blockers := s.Blockers
	s.Blockers = nil
	for _, b := range blockers[:min(len(blockers), mostBlockers)] {
		s.Blockers = append(s.Blockers, legible.Message(b, longestBlocker))
	}
	for {
		text, err = marshal(s)
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

// EncodeAnswer is the answer in so many bytes: it counts the steps and pods that are left out.
func EncodeAnswer(a api.Answer, room int) (string, error) {
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

// GPUs is how they are cut, as the status tells it.
func GPUs(gpus []nvml.GPU) []api.StatusGPU {
	var out []api.StatusGPU
	for _, gpu := range gpus {
		s := api.StatusGPU{Index: gpu.Index, UUID: gpu.UUID, MIG: gpu.Enabled}
		if geometry := gpu.Geometry(); len(geometry) > 0 {
			s.Geometry = geometry.String()
		}
		out = append(out, s)
	}
	return out
}

func marshal(s api.Status) (string, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return "", fmt.Errorf("encoding the status: %w", err)
	}
	return string(b), nil
}

// RoomFor is what an annotation of the node may take, of so many bytes at most: others may have filled the rest.
func RoomFor(node *corev1.Node, key string, most int) int {
	left := allAnnotations - len(key)
	for k, v := range node.Annotations {
		if k != key {
			left -= len(k) + len(v)
		}
	}
	return min(left, most)
}
