package preview

import (
	"fmt"
	"maps"
	"slices"
	"unicode/utf8"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
)

// Bounds of an answer: all annotations of a node together may take 256 KiB.
const (
	mostSteps   = 100
	mostAsked   = 10
	longestText = 1000 // bytes of a step, which may name any number of pods, or of an error
)

// AddTo adds the agent's plan to an answer, as far as there is room.
func (p Result) AddTo(out *api.Answer) {
	for _, step := range p.Steps[:min(len(p.Steps), mostSteps)] {
		out.Steps = append(out.Steps, Shortened(step.String()))
	}
	pods := leaving(p.Steps)
	out.Pods = pods[:min(len(pods), mostSteps)]
	out.More, out.MorePods = len(p.Steps)-len(out.Steps), len(pods)-len(out.Pods)
	out.Reboot, out.Runs = p.Reboot || len(p.AtReboot) > 0, p.Runs
	out.HeldUp, out.Reason, out.Patience = Shortened(p.HeldUp), p.Reason, api.Duration(p.Patience)
	for _, what := range p.Lost[:min(len(p.Lost), mostSteps)] {
		out.Lost = append(out.Lost, Shortened(what))
	}
	out.MoreLost, out.Notes, out.Unsure = len(p.Lost)-len(out.Lost), p.Notes, Shortened(p.Unsure)
	if out.Offers, out.Takes, out.Measured = Shortened(p.Offers), api.Duration(p.Takes), p.Measured; len(p.Steps) > 0 {
		out.GPUs = api.Recuts(p.Before, p.After, p.AtReboot)
	}
	for _, what := range p.Asked[:min(len(p.Asked), mostAsked)] {
		out.Asked = append(out.Asked, Shortened(what))
	}
	if more := len(p.Asked) - len(out.Asked); more > 0 {
		out.Asked = append(out.Asked, fmt.Sprintf("and %d more", more))
	}
}

// leaving names the pods that the steps evict.
func leaving(steps []plan.Step) []string {
	pods := map[string]bool{}
	for _, s := range steps {
		if s.Kind != plan.Evict {
			continue
		}
		for _, p := range s.Pods {
			pods[p.Namespace+"/"+p.Name] = true
		}
	}
	return slices.Sorted(maps.Keys(pods))
}

// Shortened returns the text, cut between two characters if it is too long.
func Shortened(text string) string {
	if len(text) <= longestText {
		return text
	}
	end := longestText
	for !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + "…"
}
