package nvml

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// sliceWidth is the number of columns that one memory slice takes in a drawing, its left border included. It is the
// same for all GPUs, so that drawings under one another can be compared.
const sliceWidth = 8

// Draw shows a GPU's memory slices on one line of text, cut as the geometry says: what stands (g.Geometry()) or what
// shall stand. Each free memory slice is a dot:
//
//	│1g.10gb│1g.10gb│ 2g.20gb       │ 3g.40gb                       │
//	│ 4g.40gb                       │1g.10gb│   ·       ·       ·   │
//
// A GPU whose MIG mode is off is one box, unless the geometry is what it shall be once the mode is on.
func Draw(g GPU, geometry Geometry) string {
	slots := g.MemorySlices()
	if slots == 0 {
		return box("whole GPU", 8) + border
	}
	if !g.Enabled && len(geometry) == 0 {
		return box("MIG off: whole GPU", slots) + border
	}
	ordered := slices.Clone(geometry)
	ordered.Sort()
	var b strings.Builder
	at := 0
	for _, p := range ordered {
		b.WriteString(free(p.Start - at))
		b.WriteString(box(label(p), p.Size))
		at = max(at, p.End())
	}
	b.WriteString(free(slots - at))
	return b.String() + border
}

const border = "│"

// free draws a run of memory slices that no instance has.
func free(size int) string {
	if size <= 0 {
		return ""
	}
	return border + strings.Repeat("   ·    ", size)[:size*(sliceWidth+len("·")-1)-1]
}

// box draws an instance without its right border. The name is set off from the border where there is room.
func box(name string, size int) string {
	width := size*sliceWidth - 1
	if utf8.RuneCountInString(name)+2 <= width {
		name = " " + name
	}
	if n := utf8.RuneCountInString(name); n < width {
		name += strings.Repeat(" ", width-n)
	}
	return border + name
}

// label is the fullest form of an instance's name that fits into its memory slices.
func label(p Placed) string {
	width := p.Size*sliceWidth - 1
	size, attributes := p.Profile, ""
	if i := strings.IndexAny(p.Profile, "+-"); i >= 0 {
		size, attributes = p.Profile[:i], p.Profile[i:]
	}
	short, _, _ := strings.Cut(size, ".")
	short += attributes
	forms := []string{p.Profile, short}
	if p.Compute != "" {
		forms = []string{p.Profile + "(" + p.Compute + ")", short + "(" + p.Compute + ")", p.Compute, p.Profile, short}
	}
	for _, f := range forms {
		if utf8.RuneCountInString(f) <= width {
			return f
		}
	}
	return string([]rune(short)[:width-1]) + "…"
}
