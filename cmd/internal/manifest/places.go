package manifest

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"sync"

	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/document"
)

// AddPlaces adds to each mistake of a piece its line in the file, or in the value of the key if the file does not have that value line by line.
func AddPlaces(p Piece, err error) error {
	return placesOf(sync.OnceValue(func() *document.Text { return document.Read(p.Text) }), p, err) // read once for all mistakes
}

// Unplaced is the piece without its place: no user knows lines of a text that a program has made.
func (p Piece) Unplaced() Piece {
	p.origin = func() origin { return origin{unwritten: true} }
	return p
}

func placesOf(text func() *document.Text, p Piece, err error) error {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var all []error
		for _, one := range joined.Unwrap() {
			all = append(all, placesOf(text, p, one))
		}
		slices.SortStableFunc(all, byPlace)
		return errors.Join(all...)
	}
	invalid, ok := errors.AsType[*check.InvalidError](err)
	if !ok { // of the decoder, which counts the lines of the text
		if o := p.origin(); o.known {
			return withLinesOfFile(err, o.lines)
		}
		return err
	}
	var steps []string
	switch {
	case invalid.Config != "":
		steps = []string{"mig-configs", invalid.Config}
	case invalid.Profile != "":
		steps = []string{"profiles", invalid.Profile}
	}
	if invalid.Rule > 0 && invalid.Profile != "" {
		steps = append(steps, "mig")
	}
	if invalid.Rule > 0 {
		steps = append(steps, strconv.Itoa(invalid.Rule-1))
	}
	at, o := text().Locate(steps, invalid.Field), p.origin()
	switch {
	case at == (document.Place{}), !o.known && p.Key == "", o.unwritten:
		return err
	case !o.known:
		return &placed{at, " of " + p.Key, err}
	default:
		return &placed{document.Place{Line: o.lines + at.Line, Column: o.indent + at.Column}, "", err}
	}
}

// placed is a mistake with its place in the file, or of a key of a ConfigMap.
type placed struct {
	at  document.Place
	of  string
	err error
}

func (p *placed) Error() string {
	return fmt.Sprintf("line %d, column %d%s: %v", p.at.Line, p.at.Column, p.of, p.err)
}

func (p *placed) Unwrap() error { return p.err }

// byPlace sorts mistakes as they stand in the file, those without a place last.
func byPlace(a, b error) int {
	x, y := document.Place{Line: math.MaxInt}, document.Place{Line: math.MaxInt}
	if at, ok := errors.AsType[*placed](a); ok {
		x = at.at
	}
	if at, ok := errors.AsType[*placed](b); ok {
		y = at.at
	}
	return cmp.Or(cmp.Compare(x.Line, y.Line), cmp.Compare(x.Column, y.Column))
}
