package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/config"
)

// many is the size of the fleet that the smaller ones are extended to.
const many = 5000

// table is the results in markdown: requests by agent, and below them what the sizes say for a large fleet.
func table(results []result) string {
	var out strings.Builder
	out.WriteString("| phase | nodes | reads | writes | watches | of Leases | Lease conflicts | all of the fleet | took | p99 |\n")
	out.WriteString("| --- | ---:| ---:| ---:| ---:| ---:| ---:| ---:| ---:| ---:|\n")
	if len(results) == 0 {
		return out.String()
	}
	for i := range results[0].phases {
		for j, r := range results {
			p := r.phases[i]
			name := ""
			if j == 0 {
				name = p.name
			}
			each := func(match func(request) bool) string { return figure(float64(p.agents.sum(match)) / float64(r.nodes)) }
			fmt.Fprintf(&out, "| %s | %d | %s | %s | %s | %s | %d | %d | %s | %s |\n", name, r.nodes,
				each(request.reads), each(request.writes), each(isWatch), each(ofLeases),
				p.agents.sum(conflicts), p.agents.sum(func(request) bool { return true }),
				p.took.Round(100*time.Millisecond), p.server.quantile(0.99).Round(time.Millisecond))
		}
	}
	out.WriteString(extended(results))
	out.WriteString(atRest(results[len(results)-1]))
	return out.String()
}

// extended reports what the largest fleet says for a larger one, and how much more one agent asks for in it than in the smallest.
func extended(results []result) string {
	small, large := results[0], results[len(results)-1]
	var out strings.Builder
	fmt.Fprintf(&out, "\n| phase | requests of an agent, at %d nodes to those at %d | of %d agents, if it stays so |\n| --- | ---:| ---:|\n", large.nodes, small.nodes, many)
	for i, p := range large.phases {
		all := func(r result) float64 {
			return float64(r.phases[i].agents.sum(func(request) bool { return true })) / float64(r.nodes)
		}
		growth := "-"
		if all(small) > 0 {
			growth = figure(all(large)/all(small)) + " times"
		}
		fmt.Fprintf(&out, "| %s | %s | %.0f |\n", p.name, growth, all(large)*many)
	}
	return out.String()
}

// shortestWatch is how long a watch lasts at least, by client-go, which takes up to twice as long by chance.
const shortestWatch = 5 * time.Minute

// atRest reports what agents send by the clock, which a phase of minutes sees little or nothing of.
func atRest(r result) string {
	watches := float64(r.phases[0].agents.sum(isWatch)) / float64(r.nodes) // that the start has begun
	writes, again := many/config.DefaultNodeHeartbeat.Seconds(), watches*many/shortestWatch.Seconds()
	return fmt.Sprintf("\nAt rest %d agents send by the clock %s heartbeats a second, one each in %s, and begin again %s watches a second, each of their %s after %s to %s.\n"+
		"If all have started at the same moment, that is none for %[6]s, and then %[8]s watches a second for as long. An idle phase of less sees neither.\n",
		many, figure(writes), config.DefaultNodeHeartbeat, figure(again/1.5), figure(watches), shortestWatch, 2*shortestWatch, figure(again))
}

// figure is a number with as many places as matter.
func figure(n float64) string {
	switch {
	case n == 0:
		return "0"
	case n < 10:
		return fmt.Sprintf("%.2f", n)
	default:
		return fmt.Sprintf("%.1f", n)
	}
}
