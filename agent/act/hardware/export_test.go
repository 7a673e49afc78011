package hardware

import "github.com/gpuslice/gpuslice/agent/plan"

// Called are the kinds of steps for which there is a call into the driver.
func Called() []plan.Kind {
	var out []plan.Kind
	for kind := range calls {
		out = append(out, kind)
	}
	return out
}
