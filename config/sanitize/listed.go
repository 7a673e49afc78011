package sanitize

import (
	"fmt"
	"strings"
)

// most bounds the entries that a message shows: a node may have hundreds of pods, and a user has to read each. The status has more of them for tools.
const most = 8

// named bounds the names of a kind that a message shows: a user begins with the first, and finds the others in the status.
const named = 3

// Names joins the first names, and counts the rest: "a, b, c and 2 more".
func Names(names []string) string {
	if more := len(names) - named; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:named], ", "), more)
	}
	return strings.Join(names, ", ")
}

// Listed joins the first texts, and counts the rest.
func Listed(texts []string) string {
	if more := len(texts) - most; more > 0 {
		return fmt.Sprintf("%s; and %d more", strings.Join(texts[:most], "; "), more)
	}
	return strings.Join(texts, "; ")
}
