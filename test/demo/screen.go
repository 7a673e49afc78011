package main

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/fatih/color"
)

// screen prints the demo: colours on a terminal, plain lines elsewhere.
type screen struct {
	mu      sync.Mutex
	w       io.Writer
	clock   time.Time // since when elapsed times count; zero for none
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

func newScreen(w io.Writer) *screen { return &screen{w: w} }

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

func (s *screen) title(text string) { s.print("\n" + bold.Sprint(text) + "\n") }

func (s *screen) section(text string) { s.print("\n" + cyan.Sprint("== "+text) + "\n") }

// line prints one line, with the elapsed time while the clock runs.
func (s *screen) line(format string, args ...any) { s.marked(nil, " ", format, args...) }

// step prints what the agent has done.
func (s *screen) step(text string) { s.marked(green, "✔", "%s", text) }

// word prints what the node's condition says now.
func (s *screen) word(format string, args ...any) { s.marked(cyan, "»", format, args...) }

// pod prints what became of a pod.
func (s *screen) pod(format string, args ...any) { s.marked(yellow, "·", format, args...) }

// shock prints what no one should do to an agent.
func (s *screen) shock(format string, args ...any) { s.marked(red, "✘", format, args...) }

func (s *screen) marked(c *color.Color, mark, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if c != nil {
		mark = c.Sprint(mark)
	}
	s.mu.Lock()
	at := ""
	if !s.clock.IsZero() {
		at = faint.Sprintf("%6.1fs ", time.Since(s.clock).Seconds())
	}
	s.mu.Unlock()
	s.print(fmt.Sprintf("%s %s %s\n", at, mark, text))
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
	// When the terminal is gone, the demo has no one left to show anything to.
	_, _ = io.WriteString(s.w, text)
}
