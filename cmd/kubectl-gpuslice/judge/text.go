package judge

import (
	"fmt"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Lines are the judgement for people, each without the node's name.
func (j *Judgement) Lines() (lines []string) {
	switch n := len(j.Placed); n {
	case 0:
	case 1:
		lines = append(lines, "1 pod has a place on other nodes: "+j.Placed[0])
	default:
		lines = append(lines, fmt.Sprintf("%d pods have a place on other nodes: %s", n, sanitize.Listed(j.Placed)))
	}
	for _, p := range j.Homeless {
		lines = append(lines, fmt.Sprintf("%s fits on no other node: %s", p.Name, p.Why))
	}
	if n := len(j.Unplaced); n > 0 {
		lines = append(lines, moreUnknown(n)+": "+sanitize.Listed(j.unplaced()))
	}
	if j.More > 0 {
		lines = append(lines, moreUnknown(j.More))
	}
	for _, b := range j.Budgets {
		lines = append(lines, b.String())
	}
	for _, p := range j.Doubled {
		lines = append(lines, fmt.Sprintf("%s is in more than one budget, and the API server evicts no such pod: %s", p.Name, p.Why))
	}
	return lines
}

// unplaced names the pods that may have no place: the lists do not show it.
func (j *Judgement) unplaced() (out []string) {
	for _, p := range j.Unplaced {
		out = append(out, fmt.Sprintf("%s (%s)", p.Name, p.Why))
	}
	return out
}

func nothingKnown(pods int) string {
	return fmt.Sprintf("nothing is known of %s more", cli.Counted(pods, "pod"))
}

func moreUnknown(pods int) string {
	return fmt.Sprintf("whether %s more would fit elsewhere is not known", cli.Counted(pods, "pod"))
}

// String says what the budget does to the pods.
func (b Budget) String() string {
	pods := cli.Counted(b.Of, "pod")
	switch {
	case b.Allowed <= 0 && b.Failed != "":
		return fmt.Sprintf("budget %s lets none of %s go, since its pods cannot be counted: %s", b.Name, pods, b.Failed)
	case b.Allowed <= 0:
		return fmt.Sprintf("budget %s lets none of %s go now: it needs %d healthy and has %d", b.Name, pods, b.Desired, b.Healthy)
	case b.keeps():
		get := "get"
		if b.Alone == 1 {
			get = "gets"
		}
		return fmt.Sprintf("budget %s lets %d of %s go, and then no more: %d of them %s no successor", b.Name, b.Allowed, pods, b.Alone, get)
	default:
		return fmt.Sprintf("budget %s lets %d of %s go at a time: the next one waits until a successor is ready", b.Name, b.Allowed, pods)
	}
}
