package sanitize

import (
	"fmt"
	"strings"
)

// most is how many entries a message shows: a node may have hundreds of pods, and a user has to read each. Tools find
// more of them in the status.
const most = 8

// Listed joins the first texts, and counts those that it does not show.
func Listed(texts []string) string {
	if more := len(texts) - most; more > 0 {
		return fmt.Sprintf("%s; and %d more", strings.Join(texts[:most], "; "), more)
	}
	return strings.Join(texts, "; ")
}
