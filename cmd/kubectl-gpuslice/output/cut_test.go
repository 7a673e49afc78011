package output

import (
	"strings"
	"testing"
)

// A status that claims anything of its instances draws no bar that is wider than its GPU.
func TestBarsAreBounded(t *testing.T) {
	for _, slots := range []int{-1, 0, 8, 1 << 40} {
		drawn := string(Bar(slots, []Cell{{At: -5, Size: 1 << 40}, {At: 1 << 62, Size: 1 << 62}, {At: 0, Size: 1, Name: "first"}, {At: 0, Size: 1}, {At: 1, Size: -1}}))
		if n := strings.Count(drawn, "<div"); n > 3 || strings.Count(drawn, "first") != 1 {
			t.Errorf("%d slots: %s", slots, drawn)
		}
	}
}
