// Package picture draws, on one line of text, how a GPU is cut into instances.
package picture

import (
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/gpuslice/gpuslice/nvml"
)

// drawingWidth is the number of columns of a drawing without its right border, or a little less where the memory slices
// do not divide it.
const drawingWidth = 64

const border = "│"

// GPU draws a GPU's memory slices on one line of text, all of the same width, cut as the geometry says: the present one
// (g.Geometry()) or a planned one. Each free memory slice is a dot:
//
//	│1g.10gb│1g.10gb│ 2g.20gb       │ 3g.40gb                       │
//	│ 4g.40gb                       │1g.10gb│   ·       ·       ·   │
//
// A GPU with MIG mode off is one box, unless the geometry is for MIG mode on. So is one that has fallen off the bus.
func GPU(g nvml.GPU, geometry nvml.Geometry) string {
	if g.Lost {
		return box("not known", drawingWidth) + border
	}
	slots := g.MemorySlices()
	if slots == 0 {
		return box("whole GPU", drawingWidth) + border
	}
	width := max(2, drawingWidth/slots) // of one memory slice, its left border included
	if !g.Enabled && len(geometry) == 0 {
		return box("MIG off: whole GPU", slots*width) + border
	}
	ordered := slices.Clone(geometry)
	ordered.Sort()
	var b strings.Builder
	at := 0
	for _, p := range ordered {
		b.WriteString(free(p.Start-at, width))
		b.WriteString(box(label(p, p.Size*width-1), p.Size*width))
		at = max(at, p.End())
	}
	b.WriteString(free(slots-at, width))
	return b.String() + border
}

// free draws a run of memory slices that no instance has.
func free(size, width int) string {
	if size <= 0 {
		return ""
	}
	left := (width - 1) / 2
	dot := strings.Repeat(" ", left) + "·" + strings.Repeat(" ", width-1-left)
	return border + strings.TrimSuffix(strings.Repeat(dot, size), " ")
}

// box draws an instance of so many columns, its left border included, with a space before its name if there is room.
func box(name string, width int) string {
	if utf8.RuneCountInString(name)+3 <= width {
		name = " " + name
	}
	return border + name + strings.Repeat(" ", max(0, width-1-utf8.RuneCountInString(name)))
}

// label is the fullest form of an instance's name that has no more than so many characters.
func label(p nvml.Placed, width int) string {
	size, attributes := p.Profile, ""
	if i := strings.IndexAny(p.Profile, "+-"); i >= 0 {
		size, attributes = p.Profile[:i], p.Profile[i:]
	}
	short, _, _ := strings.Cut(size, ".")
	short += attributes
	forms := []string{p.Profile, short}
	if p.Compute != "" {
		parts := "(" + p.Compute + ")"
		forms = []string{p.Profile + parts, short + parts, p.Compute, p.Profile, short}
	}
	return firstThatFits(append(forms, short), width)
}
