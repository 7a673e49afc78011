package picture

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// Cell is a run of memory slices that belong together, as those of a GPU instance.
type Cell struct {
	At, Size int      // memory slices
	Names    []string // from the fullest to the shortest: the first that has room is written
}

// Slices draws memory slices on one line, in at most so many columns, if these are at least three for each slice. A free slice is a dot.
// It leaves out cells that overlap or lie outside, since other programs may have written the data.
func Slices(slots int, cells []Cell, columns int) string {
	width := max(2, (columns-1)/max(1, slots)) // of one slice, its left border included
	ordered := slices.SortedStableFunc(slices.Values(cells), func(a, b Cell) int { return a.At - b.At })
	var b strings.Builder
	at := 0
	for _, c := range ordered {
		if c.At < at || c.Size < 1 || c.Size > slots-c.At {
			continue
		}
		b.WriteString(free(c.At-at, width))
		b.WriteString(box(firstThatFits(c.Names, c.Size*width-1), c.Size*width))
		at = c.At + c.Size
	}
	b.WriteString(free(slots-at, width))
	return b.String() + border
}

// firstThatFits gives the first name that has no more than so many characters, or the beginning of the last one.
func firstThatFits(names []string, width int) string {
	last := ""
	for _, name := range names {
		if last = name; utf8.RuneCountInString(name) <= width {
			return name
		}
	}
	if last == "" {
		return ""
	}
	return string([]rune(last)[:max(0, width-1)]) + "…"
}
