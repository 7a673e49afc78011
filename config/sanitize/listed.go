package sanitize

import (
	"fmt"
	"strings"
)

// most is how many entries a message shows: a node may have hundreds of pods, and a user has to read each. Tools find
// more of them in the status.
const most = 8

// named is how many names of a kind a message shows: who has to act begins with the first, and finds the others in the status.
const named = 3

// Names joins the first names, and counts those that it does not show: "a, b, c and 2 more".
func Names(names []string) string {
	if more := len(names) - named; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:named], ", "), more)
	}
	return strings.Join(names, ", ")
}

// Listed joins the first texts, and counts those that it does not show.
func Listed(texts []string) string {
	if more := len(texts) - most; more > 0 {
		return fmt.Sprintf("%s; and %d more", strings.Join(texts[:most], "; "), more)
	}
	return strings.Join(texts, "; ")
}
