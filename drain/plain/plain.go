// Package plain shows names that any user may have chosen: of processes, open files, labels and annotations. It knows nothing of what
// they name.
package plain

import (
	"strings"
	"unicode"
)

// Name is the name with a "?" in place of each character that is not printable. It is fit for logs and for the API server, which accepts only
// UTF-8.
func Name(name string) string {
	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, name)
}
