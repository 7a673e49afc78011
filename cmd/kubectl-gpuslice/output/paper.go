package output

import (
	"io"
	"os"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/mattn/go-runewidth"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
)

const (
	// PaperWidth is the number of columns of running text without a terminal.
	PaperWidth = 80
	// Indent indents the lines below a heading.
	Indent = "  "
	// widestDrawing is the largest number of columns of a GPU, on a terminal of any width.
	widestDrawing = 129
)

// Paper is the width and the colours of the output.
type Paper struct {
	Width  int  // columns; 0 without a bound
	Whole  bool // nothing is cut: lines end at the width, and longer words stand out
	Colour bool
	Now    time.Time
}

// PaperOf returns the paper of the writer: a terminal has a width, and colour unless the user wants none.
func PaperOf(w io.Writer) Paper {
	width, _, is := cli.Terminal(w)
	return Paper{Width: width, Colour: is && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb", Now: time.Now()}
}

// Sheet is the paper of a page for a browser, which breaks lines by itself.
func (p Paper) Sheet() Paper { return Paper{Now: p.Now} }

// Paint colours a text, if the output has colours.
func (p Paper) Paint(what string, with ...text.Color) string {
	if !p.Colour || what == "" {
		return what
	}
	return text.Colors(with).Sprint(what)
}

// Block writes a text in lines of the paper's width, the first after a heading, the others below its beginning. It cuts a word that is longer
// than a line.
func (p Paper) Block(heading, what string) []string {
	if p.Width == 0 {
		return []string{heading + what}
	}
	lines := strings.Split(Wrapped(heading, what, p.Width), "\n")
	for i := range lines {
		if !p.Whole {
			lines[i] = runewidth.Truncate(lines[i], p.Width, "…")
		}
	}
	return lines
}

// Hanging writes a text in lines of the paper's width, all but the first indented.
func (p Paper) Hanging(what string) []string {
	if p.Width == 0 {
		return []string{what}
	}
	lines := Paper{Width: max(1, p.Width-len(Indent))}.Block("", what)
	for i := range lines[1:] {
		lines[i+1] = Indent + lines[i+1]
	}
	return lines
}

// Cut cuts a line that is wider than the paper.
func (p Paper) Cut(line string) string {
	if p.Width == 0 || p.Whole {
		return line
	}
	return text.Snip(line, p.Width, "…")
}

// Drawn is the number of columns of a drawing of a GPU.
func (p Paper) Drawn() int {
	if p.Width == 0 {
		return PaperWidth - len(Indent)
	}
	return min(widestDrawing, p.Width-len(Indent))
}

// Wrapped writes a text in lines of the width, the first after a heading, the others below its beginning.
func Wrapped(heading, text string, width int) string {
	indent := strings.Repeat(" ", runewidth.StringWidth(heading))
	var b strings.Builder
	b.WriteString(heading)
	at := len(indent)
	for i, word := range strings.Fields(text) {
		size := runewidth.StringWidth(word)
		switch {
		case i > 0 && at+1+size > width:
			b.WriteString("\n" + indent)
			at = len(indent)
		case i > 0:
			b.WriteString(" ")
			at++
		}
		b.WriteString(word)
		at += size
	}
	return b.String()
}

// Shortened leaves out the middle of a name, since names that begin alike differ at their ends.
func Shortened(name string, most int) string {
	width := runewidth.StringWidth(name)
	if width <= most {
		return name
	}
	tail := most / 3
	return runewidth.Truncate(name, most-tail-1, "") + "…" + runewidth.TruncateLeft(name, width-tail, "")
}
