package report

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// Bounds of what the agent writes to its node.
const (
	// longestBlocker is enough for a pod with the budget that keeps it.
	longestBlocker = 256 // characters

	// allAnnotations is what the API server accepts for all annotations of an object, keys and values together.
	allAnnotations = 256 << 10 // bytes
	// StatusRoom and AnswerRoom bound the status and an answer. The journal may take 64 KiB, and the rest is for other programs: kubelet and the
	// agents of network and storage write some KiB each.
	StatusRoom = 32 << 10 // bytes
	AnswerRoom = 48 << 10 // bytes
)

// EncodeStatus encodes the status in so many bytes. A status that is too long loses the pods first, which tenants make many of, then the blockers, then the models
// with the instances. Next are the geometry and the capacity, which users find elsewhere, and at last stale resources and full devices.
func EncodeStatus(s api.Status, room int) (text string, fits bool, err error) {
	s.Desired = sanitize.Cut(s.Desired, longestBlocker)
	s.Capacity, s.Failed = sanitize.Message(s.Capacity, sanitize.Longest), outcome.BoundedFailure(s.Failed)
	blockers := s.Blockers
	s.Blockers = nil
	for _, b := range blockers[:min(len(blockers), mostBlockers)] {
		s.Blockers = append(s.Blockers, sanitize.Message(b, longestBlocker))
	}
	for {
		text, err = marshal(s)
		switch {
		case err != nil || len(text) <= room:
			return text, err == nil, err
		case s.Held != nil:
			s.Held = nil
		case len(s.Blockers) > 0:
			s.Blockers = s.Blockers[:len(s.Blockers)/2]
		case s.Models != nil || slices.ContainsFunc(s.GPUs, func(g api.StatusGPU) bool { return g.Instances != nil }):
			s.Models, s.GPUs = nil, withoutInstances(s.GPUs)
		case len(s.GPUs) > 0:
			s.GPUs = nil
		case s.Capacity != "":
			s.Capacity = ""
		case len(s.StaleResources) > 0:
			s.StaleResources = nil
		case len(s.FullMemory) > 0:
			s.FullMemory = nil
		default:
			return text, false, nil
		}
	}
}

// EncodeAnswer encodes the answer in so many bytes. It counts the steps, pods, losses and uses that it leaves out, and a diagnosis says what it leaves out. If there
// is no room for the rest either, the answer says that.
func EncodeAnswer(a api.Answer, room int) (string, error) {
	a.Refused, a.Runs = sanitize.Message(a.Refused, sanitize.Longest), sanitize.Message(a.Runs, sanitize.Longest)
	for i := range a.Steps {
		a.Steps[i] = sanitize.Message(a.Steps[i], sanitize.Longest)
	}
	if a.Diagnosis != nil {
		return encodeDiagnosis(a, room)
	}
	for {
		b, err := json.Marshal(a)
		if err != nil {
			return "", fmt.Errorf("encoding an answer: %w", err)
		}
		steps, pods, lost, uses := len(a.Steps), len(a.Pods), len(a.Lost), len(a.Uses)
		switch {
		case len(b) <= room:
			return string(b), nil
		case steps+pods+lost+uses == 0 && len(a.GPUs) > 0:
			a.GPUs = nil
		case steps+pods+lost+uses == 0:
			return encodeTooLong(a)
		case uses > 0:
			a.Uses, a.MoreUses = a.Uses[:uses/2], a.MoreUses+uses-uses/2
		case lost >= max(steps, pods):
			a.Lost, a.MoreLost = a.Lost[:lost/2], a.MoreLost+lost-lost/2
		case steps >= pods:
			a.Steps, a.More = a.Steps[:steps/2], a.More+steps-steps/2
		default:
			a.Pods, a.MorePods = a.Pods[:pods/2], a.MorePods+pods-pods/2
		}
	}
}

// encodeDiagnosis encodes a diagnosis in so many bytes: the longest list loses its second half until the rest fits. Causes and outcome stay.
func encodeDiagnosis(a api.Answer, room int) (string, error) {
	d := *a.Diagnosis
	a.Diagnosis = &d
	d.GPUs.Now = slices.Clone(d.GPUs.Now)
	for {
		b, err := json.Marshal(a)
		switch {
		case err != nil:
			return "", fmt.Errorf("encoding a diagnosis: %w", err)
		case len(b) <= room:
			return string(b), nil
		}
		if !halveLongestList(&d) {
			return encodeTooLong(a)
		}
	}
}

// encodeTooLong encodes the answer if there is no room for more.
func encodeTooLong(a api.Answer) (string, error) {
	const tooLong = "the annotations of this node are too full for the answer; ask on the node itself, by gpuslice-agent plan or recover --dry-run"
	b, err := json.Marshal(api.Answer{For: a.For, At: a.At, Refused: tooLong})
	if err != nil {
		return "", fmt.Errorf("encoding an answer: %w", err)
	}
	return string(b), nil
}

// listed is a list of a diagnosis.
type listed struct {
	name string
	size int
	cut  func(n int)
}

// halveLongestList shortens the longest list of a diagnosis, and says so in it. It reports false if no list is left.
func halveLongestList(d *api.Diagnosis) bool {
	lists := []listed{
		{"steps", len(d.GPUs.Steps), func(n int) { d.GPUs.Steps = d.GPUs.Steps[:n] }},
		{"pods", len(d.Pods), func(n int) { d.Pods = d.Pods[:n] }},
		{"processes", len(d.Processes), func(n int) { d.Processes = d.Processes[:n] }},
		{"operands", len(d.Operands), func(n int) { d.Operands = d.Operands[:n] }},
		{"taints", len(d.Taints), func(n int) { d.Taints = d.Taints[:n] }},
		{"tools", len(d.Others), func(n int) { d.Others = d.Others[:n] }},
		{"differences of capacity", len(d.Capacity), func(n int) { d.Capacity = d.Capacity[:n] }},
		{"GPUs", len(d.GPUs.Now), func(n int) { d.GPUs.Now = d.GPUs.Now[:n] }},
	}
	longest := slices.MaxFunc(lists, func(a, b listed) int { return cmp.Compare(a.size, b.size) })
	if longest.size == 0 {
		return false
	}
	longest.cut(longest.size / 2)
	note := fmt.Sprintf("for want of room, not all %s are named", longest.name)
	if !slices.Contains(d.Unseen, note) {
		d.Unseen = append(slices.Clone(d.Unseen), note)
	}
	return true
}

// GPUs returns the modes and instances of the GPUs for the status.
func GPUs(gpus []nvml.GPU) []api.StatusGPU {
	var out []api.StatusGPU
	for _, gpu := range gpus {
		s := api.StatusGPU{Index: gpu.Index, UUID: gpu.UUID, MIG: gpu.Enabled, Lost: gpu.Lost}
		if geometry := gpu.Geometry(); len(geometry) > 0 {
			s.Geometry = geometry.String()
		}
		s.Slices = gpu.MemorySlices()
		s.Instances = instances(gpu)
		out = append(out, s)
	}
	return out
}

// instances are those of the GPU, in the order of its geometry.
func instances(gpu nvml.GPU) []api.StatusInstance {
	var out []api.StatusInstance
	for _, i := range slices.SortedFunc(slices.Values(gpu.Instances), func(a, b nvml.Instance) int { return nvml.ComparePlaced(a.Placed, b.Placed) }) {
		out = append(out, api.StatusInstance{Is: i.Placed.String(), At: i.Start, Size: i.Size, ID: i.ID})
	}
	return out
}

// withoutInstances returns the GPUs with only the fields that people read.
func withoutInstances(gpus []api.StatusGPU) []api.StatusGPU {
	out := slices.Clone(gpus)
	for i := range out {
		out[i].Instances = nil
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
