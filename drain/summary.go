package drain

import (
	"time"

	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Summary says to users why pods are still there: each cause once, what to do about it first, then the first pods and the number of further ones. It
// leaves out the given deadline, which its reader knows already.
func Summary(verdicts []Verdict, deadline time.Time) []string {
	type group struct {
		first   Verdict // of the earliest deadline
		pods    []string
		unready bool
	}
	type key struct {
		keeps keeps
		said  string
	}
	var order []key
	groups := map[key]*group{}
	for _, v := range verdicts {
		k := key{said: v.said}
		if v.keeps != (keeps{}) {
			k = key{keeps: v.keeps}
		}
		g := groups[k]
		if g == nil {
			g = &group{first: v}
			groups[k], order = g, append(order, k)
		}
		if v.Deadline.Before(g.first.Deadline) {
			g.first = v
		}
		g.pods, g.unready = append(g.pods, v.Pod.String()), g.unready || v.unready
	}
	var out []string
	for _, k := range order {
		g := groups[k]
		text := sanitize.Names(g.pods)
		switch {
		case k.keeps != (keeps{}):
			text = k.keeps.do + ": " + k.keeps.why + ", and keeps " + text
		case k.said != "":
			text += ": " + k.said
		}
		if g.unready {
			text += "; one that is not ready would go if the PDB had unhealthyPodEvictionPolicy: AlwaysAllow"
		}
		if !g.first.Deadline.Equal(deadline) {
			text += g.first.until
		}
		out = append(out, text)
	}
	return out
}
