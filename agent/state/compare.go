package state

import (
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
)

// CompareHardware compares what kubelet offers with the GPUs and with the node object, whatever the labels ask for. Under is the strategy under which the
// device plugin runs.
func (s *Observed) CompareHardware(under config.MIGStrategy) Capacity {
	missing, _ := s.missing(nil, under)
	return Capacity{Missing: missing, Verified: len(missing) == 0, Strategy: under}
}

// Compare compares what kubelet offers with what is desired, as far as that is known. Where it is what the labels ask for, no pod may hold what kubelet gives
// out to others by now: neither what was before a change, nor the way back to it, can promise that. Where NVIDIA's DRA driver gives out the GPUs, a way
// back that cuts GPUs does: it has the pods leave whose devices are gone.
func (s *Observed) Compare(want Desired, under config.MIGStrategy) Capacity {
	out := Capacity{Verified: s.Capacity.Verified, Strategy: under}
	var stands capacity.Resources
	out.Missing, stands = s.missing(want.Plugin, under)
	// Where the config is not known, only what agrees with hardware and node can be what stands.
	if (!want.Undo || s.cutsBackByClaims()) && (stands != nil && s.DevicePlugin.Unconnected == "" || len(out.Missing) == 0) {
		out.Withdrawn = s.WithdrawnFrom(stands, want)
		out.Missing = append(out.Missing, s.withdrawnTexts(out.Withdrawn)...)
	}
	if sharing := want.Plugin.SharingKnown(); sharing != nil {
		out.Stale = capacity.StaleFeatures(capacity.Expected(s.GPUs, under), *sharing, s.Node.Labels)
	}
	return out
}

func (s *Observed) cutsBackByClaims() bool {
	return s.Owner.ByClaims() && s.Journal != nil && len(s.Journal.Targets(s.GPUs)) > 0
}

// missing says how hardware, kubelet and node disagree, and what stands: all that the device plugin offers by its config; nil where that is not known.
func (s *Observed) missing(want *DesiredPlugin, under config.MIGStrategy) (missing []string, stands capacity.Resources) {
	expected := capacity.Expected(s.GPUs, under)
	switch sharing := want.SharingKnown(); {
	case s.Kubelet.Err != nil:
		missing = []string{s.Kubelet.Err.Error()}
	case s.Owner.ByClaims():
		missing = s.missingInSlices()
	case s.DevicePlugin.Rivals != "":
		missing = []string{s.DevicePlugin.Rivals}
	case sharing != nil:
		stands = capacity.Shared(expected.NamedBy(s.Kubelet.Offered), *sharing)
		missing = capacity.Mismatches(stands, s.Kubelet.Offered, s.Node.Status.Allocatable)
		if sharing.Strategy == catalog.SharingMPS {
			missing = append(missing, s.MissingMPS()...)
		}
	default:
		missing = capacity.Disagreements(expected, s.Kubelet.Offered, s.Node.Status.Allocatable)
	}
	if s.DevicePlugin.Unconnected != "" {
		missing = append(missing, s.DevicePlugin.Unconnected)
	}
	return missing, stands
}
