package sanitize

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
