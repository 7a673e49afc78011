package cli_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
)

var errAny = errors.New("any")

func TestTheExitCodeIsThatOfTheError(t *testing.T) {
	for want, err := range map[int]error{
		0:   nil,
		1:   errAny,
		3:   &cli.ExitError{Err: errAny, Code: 3},
		130: fmt.Errorf("in the middle: %w", &cli.ExitError{Err: errAny, Code: 130}),
	} {
		if got := cli.ExitCode(err); got != want {
			t.Errorf("%v ends with %d, want %d", err, got, want)
		}
	}
	if err := error(&cli.ExitError{Err: errAny, Code: 3}); !errors.Is(err, errAny) || err.Error() != "any" {
		t.Errorf("the error is %v", err)
	}
}

// full is a pipe whose reader is gone after so many writes.
type full struct {
	written strings.Builder
	left    int
}

func (f *full) Write(p []byte) (int, error) {
	if f.left--; f.left < 0 {
		return 0, errAny
	}
	return f.written.Write(p)
}

func TestAPrinterStopsAtTheFirstErrorAndMovesNoCursor(t *testing.T) {
	w := &full{left: 1}
	p := &cli.Printer{W: w}
	p.Printf("%s\n", "a\x1b[2Jb")
	p.Printf("lost\n")
	w.left = 1
	p.Printf("after\n")
	if got := w.written.String(); got != "a\\x1b[2Jb\n" || !errors.Is(p.Err, errAny) {
		t.Errorf("written %q, error %v", got, p.Err)
	}
}

func TestACommandEndsWithItsErrorForPeople(t *testing.T) {
	var out strings.Builder
	if code := cli.End(&out, nil); code != 0 || out.Len() > 0 {
		t.Errorf("without an error it ends with %d and %q", code, out.String())
	}
	code := cli.End(&out, &cli.ExitError{Err: errors.New("node \x1b[2Jgpu-1 is not there"), Code: 3})
	if want := "error: node \\x1b[2Jgpu-1 is not there\n"; code != 3 || out.String() != want {
		t.Errorf("it ends with %d and %q, want 3 and %q", code, out.String(), want)
	}
}
