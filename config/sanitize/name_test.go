package sanitize_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/config/sanitize"
)

func TestANameIsShownWithoutWhatIsNotPrintable(t *testing.T) {
	for name, want := range map[string]string{
		"":                       "",
		"dcgm-exporter":          "dcgm-exporter",
		"größe 3":                "größe 3",
		"\x1b[2Jtrainer\n":       "?[2Jtrainer?",
		"right\u202eto left\x00": "right?to left?",
		"no \xff UTF-8":          "no ? UTF-8",
	} {
		if got := sanitize.Name(name); got != want {
			t.Errorf("%q is shown as %q, want %q", name, got, want)
		}
	}
}
