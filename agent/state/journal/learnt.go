package journal

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// LearntOf returns what later changes need of the status, in the record's form.
func LearntOf(s api.Status, published nodekeys.Keys) Learnt {
	out := Learnt{Proven: s.Proven, Cut: sanitize.Cut(s.Cut, 128)}
	if n := s.NoReset; n != nil {
		out.NoReset = &NoReset{Boot: sanitize.Cut(n.Boot, 128)}
		for _, gpu := range n.GPUs {
			out.NoReset.GPUs = append(out.NoReset.GPUs, string(gpu))
		}
	}
	if s.Asked != nil {
		out.Asked = &Asked{Wish: s.Asked.Wish, Since: s.Asked.Since}
	}
	const year = 365 * 24 * 3600
	for _, t := range s.Took {
		out.Took = append(out.Took, Took{Whole: min(max(t.Whole, 0), year), Rest: min(max(t.Rest, 0), year)})
	}
	if f := s.Failed; f != nil {
		out.Failed = &Failed{Wish: f.Wish, Reason: string(f.Reason), Message: sanitize.Cut(f.Message, 4<<10)}
	}
	out.Published.Labels = published.Labels
	for _, t := range published.Taints {
		out.Published.Taints = append(out.Published.Taints, Taint{Key: t.Key, Value: t.Value, Effect: string(t.Effect)})
	}
	return out
}

// StatusWith returns the status with what the host's record holds of it. That wins over the annotation, which other programs can write.
func StatusWith(s api.Status, l Learnt) api.Status {
	s.Failed, s.NoReset, s.Asked, s.Took = nil, nil, nil, nil
	s.Proven, s.Cut = l.Proven, l.Cut
	if n := l.NoReset; n != nil {
		s.NoReset = &api.NoReset{Boot: n.Boot}
		for _, gpu := range n.GPUs {
			s.NoReset.GPUs = append(s.NoReset.GPUs, nvml.UUID(gpu))
		}
	}
	if l.Asked != nil {
		s.Asked = &api.AskedFor{Wish: l.Asked.Wish, Since: l.Asked.Since}
	}
	for _, t := range l.Took {
		s.Took = append(s.Took, api.Took{Whole: t.Whole, Rest: t.Rest})
	}
	if f := l.Failed; f != nil {
		s.Failed = &api.Failure{Wish: f.Wish, Reason: config.Reason(f.Reason), Message: f.Message}
	}
	return s
}

// PublishedBy returns the labels and taints that the agent has set for a profile, by the record.
func PublishedBy(l Learnt) nodekeys.Keys {
	out := nodekeys.Keys{Labels: l.Published.Labels}
	for _, t := range l.Published.Taints {
		out.Taints = append(out.Taints, corev1.Taint{Key: t.Key, Value: t.Value, Effect: corev1.TaintEffect(t.Effect)})
	}
	return out
}
