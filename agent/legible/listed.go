package legible

import (
	"fmt"
	"strings"
)

// most is how many of a kind people are shown: a node may have hundreds of pods, and each in the way is a line to read. Tools find
// more of them in the status.
const most = 8

// Listed joins what is in the way, and counts what is not shown.
func Listed(texts []string) string {
	if more := len(texts) - most; more > 0 {
		return fmt.Sprintf("%s; and %d more", strings.Join(texts[:most], "; "), more)
	}
	return strings.Join(texts, "; ")
}
