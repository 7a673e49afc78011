package plan

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// Step is one idempotent action. A plan is a list of them.
type Step struct {
	Kind     Kind
	GPU      nvml.UUID   // of steps that touch a GPU
	Index    int         // the same GPU by its index, as nvidia-smi shows it
	On       bool        // of SetMode
	Instance nvml.Placed // of Destroy and Create; without its division if the step is about a part of it
	Part     nvml.Part   // of Destroy and Create, if these are about one compute instance; else zero
	Pods     []Pod       // of Evict, PauseOperands, RestartOperands, RestartPlugin and RestartLatePlugin
	Devices  []string    // of Close, as NVIDIA's DRA driver names them, sorted
	Files    []string    // of RegenerateCDI
	Label    string      // of PauseOperands and ResumeOperands, if they work by label
	Unit     string      // of StopUnits and StartUnits
	Config   string      // of WriteSharing: names the config
	ByClaims bool        // of ResumeOperands: NVIDIA's DRA driver comes back, and not a device plugin
	// CordonOnly is of Fence: it sets no taint.
	CordonOnly bool
}

// Traits are those of the step's kind. A kind without a row has none.
func (s Step) Traits() Traits { return kinds[s.Kind] }

// String writes the step as plans, logs and goldens show it.
func (s Step) String() string {
	text := s.Traits().Text
	if text == nil {
		return string(s.Kind)
	}
	return text(s)
}

// OnPart reports whether the step is about one compute instance of an instance that stays.
func (s Step) OnPart() bool { return s.Part != nvml.Part{} }

// Any reports whether any of the steps has the trait: Any(steps, func(t plan.Traits) bool { return t.Disrupts }).
func Any(steps []Step, trait func(Traits) bool) bool {
	return slices.ContainsFunc(steps, func(s Step) bool { return trait(s.Traits()) })
}

// Has reports whether any of the steps is of the kind.
func Has(steps []Step, kind Kind) bool {
	return slices.ContainsFunc(steps, func(s Step) bool { return s.Kind == kind })
}

// Disrupts reports whether the steps take something from pods or from the host.
func Disrupts(steps []Step) bool { return Any(steps, func(t Traits) bool { return t.Disrupts }) }

func (s Step) pause() string {
	if s.Label != "" {
		return "pause " + s.Label
	}
	operands := slices.DeleteFunc(slices.Clone(s.Pods), func(p Pod) bool { return p.Client })
	clients := slices.DeleteFunc(slices.Clone(s.Pods), func(p Pod) bool { return !p.Client })
	switch {
	case len(clients) == 0:
		return "pause " + plugins(operands)
	case len(operands) == 0:
		return "pause clients of the driver " + names(clients)
	default:
		return "pause " + plugins(operands) + "; clients of the driver " + names(clients)
	}
}

func (s Step) fence() string {
	if s.CordonOnly {
		return "fence: journal, cordon"
	}
	return "fence: journal, cordon, taint"
}

func (s Step) resume() string {
	switch {
	case s.Label != "":
		return "resume " + s.Label
	case s.ByClaims:
		return "remove the taint, so that NVIDIA's DRA driver can start"
	default:
		return "resume device plugin"
	}
}

func onGPU(text func(Step) string) func(Step) string {
	return func(s Step) string { return fmt.Sprintf("GPU %d: %s", s.Index, text(s)) }
}

// what names what the step destroys or creates: "3g.40gb@4", or "1c@2 in 3g.40gb@4".
func (s Step) what() string {
	if !s.OnPart() {
		return s.Instance.String()
	}
	return s.Part.String() + " in " + s.Instance.String()
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// plugins names the pods that advertise the node's GPUs: of the device plugin or of NVIDIA's DRA driver.
func plugins(pods []Pod) string {
	if byDriver(pods) {
		return "NVIDIA's DRA driver " + names(pods)
	}
	return "device plugin " + names(pods)
}

func byDriver(pods []Pod) bool {
	return slices.ContainsFunc(pods, func(p Pod) bool { return p.Driver })
}

// withClaims names the pods, each with its claims: "team/a (claim team/a-gpu)".
func withClaims(pods []Pod) string {
	out := make([]string, len(pods))
	for i, p := range pods {
		out[i] = names(pods[i : i+1])
		if len(p.Claims) == 0 {
			continue
		}
		var claims []string
		for _, claim := range p.Claims {
			claims = append(claims, p.Namespace+"/"+claim)
		}
		out[i] += " (claim " + strings.Join(claims, ", ") + ")"
	}
	return strings.Join(out, ", ")
}

func names(pods []Pod) string {
	out := make([]string, len(pods))
	for i, p := range pods {
		out[i] = p.Namespace + "/" + p.Name
	}
	return strings.Join(out, ", ")
}
