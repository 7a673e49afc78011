package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// result is how a check ended.
type result string

const (
	passed result = "ok"
	failed result = "FAILED"
	notRun result = "not run"
)

// notHereError says why a check cannot be made on this machine, which is no fault.
type notHereError struct{ why string }

// Error says why.
func (e *notHereError) Error() string { return e.why }

func notHere(format string, args ...any) error { return &notHereError{fmt.Sprintf(format, args...)} }

// unmet says why a check is not made: its ground is missing.
const unmet = "a check that it rests on has not passed"

// row is one check, and what it saw.
type row struct {
	check  string
	result result
	saw    string
	took   time.Duration
}

// report collects the checks of a run.
type report struct {
	progress  io.Writer // a line for each check when it has ended
	simulated bool
	rows      []row
	broken    bool // a check has not passed that the later ones rest on
}

func newReport(progress io.Writer, simulated bool) *report {
	return &report{progress: progress, simulated: simulated}
}

// check makes a check that later ones rest on, unless one before it has failed.
func (r *report) check(name string, f func() (saw string, err error)) {
	if r.broken {
		r.add(row{check: name, result: notRun, saw: unmet})
		return
	}
	r.broken = r.alone(name, f) == failed
}

// alone makes a check that no other rests on.
func (r *report) alone(name string, f func() (saw string, err error)) result {
	began := time.Now()
	saw, err := f()
	done := row{check: name, result: passed, saw: saw, took: time.Since(began)}
	var absent *notHereError
	switch {
	case errors.As(err, &absent):
		done.result, done.saw = notRun, err.Error()
	case err != nil:
		done.result, done.saw = failed, err.Error()
	}
	r.add(done)
	return done.result
}

func (r *report) add(done row) {
	r.rows = append(r.rows, done)
	fmt.Fprintf(r.progress, "%-7s %s (%.1f s): %s\n", done.result, done.check, done.took.Seconds(), done.saw)
}

func (r *report) failed() bool {
	return slices.ContainsFunc(r.rows, func(done row) bool { return done.result == failed })
}

// widest is how wide the table's longest column may be, in characters.
const widest = 90

// table is what people read at the end.
func (r *report) table() string {
	w := table.NewWriter()
	w.SetStyle(table.StyleLight)
	w.Style().Format.Header = text.FormatDefault
	w.SetColumnConfigs([]table.ColumnConfig{{Number: 3, WidthMax: widest, WidthMaxEnforcer: text.WrapSoft}, {Number: 4, Align: text.AlignRight}})
	where := "on this machine's GPUs"
	if r.simulated {
		where = "on SIMULATED GPUs"
	}
	w.SetTitle("gpuslice " + where)
	w.AppendHeader(table.Row{"check", "result", "seen", "took"})
	for _, done := range r.rows {
		w.AppendRow(table.Row{done.check, done.result, done.saw, fmt.Sprintf("%.1f s", done.took.Seconds())})
	}
	return w.Render()
}
