package output

import (
	"io"
	"os"
	"regexp"
	"slices"
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

// Line is a line of a text, or of a command in it.
type Line struct {
	Text    string
	Command bool
}

// command is one to paste, within a text: after a colon, or in brackets, up to where the text goes on.
var command = regexp.MustCompile(`(?:: |\(|run )(kubectl(?: (?:[^\s';,:.()]|'[^']*'|[,:.][^\s])+)+)`)

// Lines writes a text in lines of the paper's width. A command that they would break has lines of its own, which a shell reads as one.
func (p Paper) Lines(what string) (out []Line) {
	for {
		lines, at := p.Block("", what), command.FindStringSubmatchIndex(what)
		if at == nil || slices.ContainsFunc(lines, func(line string) bool { return strings.Contains(line, what[at[2]:at[3]]) }) {
			for _, line := range lines {
				out = append(out, Line{Text: line})
			}
			return out
		}
		for _, line := range p.Block("", strings.TrimRight(what[:at[2]], ":( ")+":") {
			out = append(out, Line{Text: line})
		}
		for _, line := range p.continued(what[at[2]:at[3]]) {
			out = append(out, Line{line, true})
		}
		if what = strings.TrimLeft(what[at[3]:], ";,:.) "); what == "" {
			return out
		}
	}
}

// continued writes a command in lines of the paper's width. A shell reads a line on behind a backslash, unless that is in quotes.
func (p Paper) continued(what string) (out []string) {
	line := ""
	for word := range strings.SplitSeq(what, " ") {
		if line != "" && strings.Count(line, "'")%2 == 0 && runewidth.StringWidth(line+" "+word+` \`) > p.Width {
			out, line = append(out, line+` \`), word
			continue
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}
	return append(out, line)
}

// Hanging writes a text in lines of the paper's width, all but the first indented, and commands as Lines does.
func (p Paper) Hanging(what string) (out []string) {
	if p.Width == 0 || runewidth.StringWidth(what) <= p.Width {
		return []string{what}
	}
	for i, line := range (Paper{Width: max(1, p.Width-len(Indent))}).Lines(what) {
		if i > 0 {
			line.Text = Indent + line.Text
		}
		out = append(out, line.Text)
	}
	return out
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
