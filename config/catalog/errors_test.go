package catalog_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/check"
)

func TestOfManyMistakesTheFirstAreReported(t *testing.T) {
	var text strings.Builder
	text.WriteString("apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\nprofiles:\n")
	for i := range 3000 {
		fmt.Fprintf(&text, "  p%04d: {sharing: some}\n", i)
	}
	_, err := catalog.ParseProfiles([]byte(text.String()))
	if err == nil {
		t.Fatal("taken")
	}
	lines := strings.Split(err.Error(), "\n")
	if first := `profile "p0000", sharing: "some" must be none`; len(lines) != 101 || !strings.HasPrefix(lines[0], first) || lines[100] != "and 2900 more" {
		t.Errorf("%d lines, the first %q, the last %q", len(lines), lines[0], lines[len(lines)-1])
	}
}

func TestWhatIsLongIsCutInAMessage(t *testing.T) {
	_, err := catalog.ParseProfiles([]byte("apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\nprofiles: {a: {sharing: " + strings.Repeat("é", 100_000) + "}}"))
	wrong, ok := errors.AsType[*check.InvalidError](err)
	if !ok || len(wrong.Error()) > 500 || !strings.HasSuffix(wrong.Error(), `must be none, or a mapping with "timeSlicing" or "mps"`) {
		t.Errorf("got %.600v", err)
	}
}
