package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/fatih/color"
	"github.com/mattn/go-runewidth"
	"golang.org/x/term"
)

// columns is how wide the demo is at most, and where there is no terminal.
const columns = 80

// screen prints the demo. On a terminal it has colours, and lines at its end that change in place; elsewhere plain lines.
type screen struct {
	mu      sync.Mutex
	w       io.Writer
	width   int
	live    []string // at the end; nil but on a terminal
	lasting bool     // lines may change in place
	clock   time.Time
	partial bytes.Buffer
}

var (
	bold   = color.New(color.Bold)
	faint  = color.New(color.Faint)
	green  = color.New(color.FgGreen)
	yellow = color.New(color.FgYellow)
	red    = color.New(color.FgRed, color.Bold)
	cyan   = color.New(color.FgCyan)
)

func newScreen(w io.Writer) *screen {
	s := &screen{w: w, width: columns}
	if f, is := w.(*os.File); is && term.IsTerminal(int(f.Fd())) {
		if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
			s.width, s.lasting = min(columns, width), width >= columns // a drawing has one row
		}
	}
	return s
}

// startClock lets each line carry the time since now.
func (s *screen) startClock() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clock = time.Now()
}

func (s *screen) stopClock() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	took := time.Since(s.clock)
	s.clock = time.Time{}
	return took
}

func (s *screen) title(text string) { s.print("\n" + bold.Sprint(s.wrapped(text, "")) + "\n") }

func (s *screen) section(text string) {
	s.print("\n" + cyan.Sprint(s.wrapped("== "+text, "   ")) + "\n")
}

// line prints one line, with the elapsed time while the clock runs.
func (s *screen) line(format string, args ...any) { s.marked(nil, " ", format, args...) }

// step prints what the agent has done.
func (s *screen) step(format string, args ...any) { s.marked(green, "✔", format, args...) }

// pod prints what became of a pod, or of its budget.
func (s *screen) pod(format string, args ...any) { s.marked(yellow, "·", format, args...) }

// shock prints what no one should do to an agent.
func (s *screen) shock(format string, args ...any) { s.marked(red, "✘", format, args...) }

func (s *screen) marked(c *color.Color, mark, format string, args ...any) {
	s.mu.Lock()
	at := ""
	if !s.clock.IsZero() {
		at = fmt.Sprintf("%5.1fs ", time.Since(s.clock).Seconds())
	}
	s.mu.Unlock()
	indent := strings.Repeat(" ", len(at)+2)
	text := strings.TrimPrefix(s.wrapped(indent+fmt.Sprintf(format, args...), indent), indent)
	if c != nil {
		mark = c.Sprint(mark)
	}
	s.print(faint.Sprint(at) + mark + " " + text + "\n")
}

// raw prints a line without wrapping it: a drawing.
func (s *screen) raw(text string) { s.print(text + "\n") }

// grow replaces the lines at the end, where lines may change in place.
func (s *screen) grow(lines []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.lasting {
		return
	}
	s.put(s.erase() + joined(lines))
	s.live = lines
}

// keep ends the change of the lines at the end.
func (s *screen) keep() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live = nil
}

// wrapped breaks a text between words, so that no line is wider than the screen.
func (s *screen) wrapped(text, indent string) string {
	var out strings.Builder
	at := 0
	for i, word := range strings.Split(text, " ") {
		width := runewidth.StringWidth(word)
		switch {
		case i == 0:
		case at+1+width > s.width:
			out.WriteString("\n" + indent)
			at = len(indent)
		default:
			out.WriteByte(' ')
			at++
		}
		out.WriteString(word)
		at += width
	}
	return out.String()
}

// Write takes the progress of builds and prints it line by line.
func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	s.partial.Write(p)
	var lines []string
	for {
		line, err := s.partial.ReadString('\n')
		if err != nil {
			s.partial.WriteString(line)
			break
		}
		lines = append(lines, strings.TrimRight(line, "\n"))
	}
	s.mu.Unlock()
	for _, l := range lines {
		s.line("%s", l)
	}
	return len(p), nil
}

func (s *screen) print(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(s.erase() + text + joined(s.live))
}

// erase goes back to before the lines that change, and removes them.
func (s *screen) erase() string {
	if len(s.live) == 0 {
		return ""
	}
	return fmt.Sprintf("\x1b[%dA\x1b[J", len(s.live))
}

func joined(lines []string) string {
	if len(lines) == 0 {
		return ""
	}
	return strings.Join(lines, "\n") + "\n"
}

// put needs mu. When the terminal is gone, the demo has no one left to show anything to.
func (s *screen) put(text string) { _, _ = io.WriteString(s.w, text) }
