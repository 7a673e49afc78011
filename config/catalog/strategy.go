package catalog

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// StrategyError says why the device plugin, under its MIG strategy, would not advertise GPUs in this geometry.
type StrategyError struct {
	Strategy config.MIGStrategy
	Problem  string // the end of the message, with a remedy
}

// Error names the strategy and the problem.
func (e *StrategyError) Error() string {
	return fmt.Sprintf("the device plugin's MIG strategy is %s, under which %s", e.Strategy, e.Problem)
}

// Reason is ReasonWrongMIGStrategy.
func (e *StrategyError) Reason() config.Reason { return config.ReasonWrongMIGStrategy }

// CheckStrategy checks whether NVIDIA's device plugin advertises GPUs in this geometry. Under the strategy none the plugin advertises GPUs in MIG
// mode as whole ones, and no program runs on them. Under the other two it exits on most cuts that they do not allow. The error is a *StrategyError.
func CheckStrategy(gpus []nvml.GPU, strategy config.MIGStrategy) error {
	gpus = slices.DeleteFunc(slices.Clone(gpus), func(g nvml.GPU) bool { return g.Lost })
	cut := slices.IndexFunc(gpus, func(g nvml.GPU) bool { return g.Enabled })
	if cut < 0 {
		return nil
	}
	refuse := func(format string, args ...any) error {
		return &StrategyError{Strategy: strategy, Problem: fmt.Sprintf(format, args...)}
	}
	switch strategy {
	case config.MIGStrategyNone:
		return refuse("it would advertise %s as a whole GPU that nothing can run on: set the plugin's strategy to single or mixed", nameOf(gpus[cut]))
	case config.MIGStrategySingle:
		return checkSingle(gpus, cut, refuse)
	case config.MIGStrategyMixed, config.MIGStrategyAuto: // auto counts as mixed
	}
	for _, g := range gpus {
		for _, d := range devices(g) {
			if size, _, _ := strings.Cut(d, "+"); strings.Count(size, ".") > 1 { // "1c.3g.40gb", and not "1g.24gb+me.all"
				return refuse("it exits on a device %s of %s, which is a part of a GPU instance: leave instances whole", d, nameOf(g))
			}
		}
	}
	return nil
}

// FittingStrategy returns a MIG strategy that fits GPUs in this geometry, shared by MPS or not: the present one if it fits. With MPS the only other
// one is none.
func FittingStrategy(gpus []nvml.GPU, has config.MIGStrategy, mps bool) config.MIGStrategy {
	switch {
	case CheckStrategy(gpus, has) == nil && !(mps && has == config.MIGStrategyMixed):
		return has
	case mps:
		return config.MIGStrategyNone
	default:
		return config.MIGStrategyMixed
	}
}

// checkSingle refuses GPUs unless all are cut into instances of one profile.
func checkSingle(gpus []nvml.GPU, cut int, refuse func(string, ...any) error) error {
	const remedy = ": cut all GPUs of the node into instances of one profile, or set the plugin's strategy to mixed"
	profile := ""
	for _, g := range gpus {
		all := devices(g)
		switch {
		case !g.Enabled:
			return refuse("it exits when %s has MIG mode on and %s has not"+remedy, nameOf(gpus[cut]), nameOf(g))
		case len(all) == 0:
			return refuse("it exits when %s has MIG mode on and no instance"+remedy, nameOf(g))
		}
		for _, d := range all {
			if profile == "" {
				profile = d
			}
			if d != profile {
				return refuse("it exits when there are both %s and %s"+remedy, d, profile)
			}
		}
	}
	return nil
}

func devices(g nvml.GPU) []string {
	var out []string
	for _, i := range g.Instances {
		for _, d := range i.Devices {
			out = append(out, d.Profile)
		}
	}
	return out
}
