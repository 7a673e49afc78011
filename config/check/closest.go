package check

import (
	"cmp"
	"slices"
	"strings"
)

// maxSuggestions bounds the names that a message suggests: more than three are a list, not a suggestion.
const maxSuggestions = 3

// Closest lists the known names spelt like name, the nearest first. A third of the name may be wrong: "all-1g.5gb", written for another model of GPU,
// is two edits away from "all-1g.10gb".
func Closest(name string, known []string) []string {
	// A label cannot hold "+", so names have "." for it; users type what they see in NVIDIA's tools.
	name = strings.ToLower(strings.ReplaceAll(name, "+", "."))
	limit := max(2, len(name)/3)
	type candidate struct {
		name  string
		edits int
	}
	var near []candidate
	for _, k := range known {
		if d := editDistance(name, strings.ToLower(k)); d <= limit {
			near = append(near, candidate{k, d})
		}
	}
	slices.SortStableFunc(near, func(a, b candidate) int { return cmp.Compare(a.edits, b.edits) })
	var out []string
	for _, c := range near[:min(len(near), maxSuggestions)] {
		out = append(out, c.name)
	}
	return out
}

// editDistance counts the insertions, deletions and replacements of bytes that turn a into b (Levenshtein's distance).
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			above := row[j+1]
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			row[j+1] = min(above+1, row[j]+1, replace)
			diagonal = above
		}
	}
	return row[len(b)]
}
