package sanitize

import (
	"strings"
	"unicode"
)

// Name returns the name with a "?" in place of each unprintable character. It is fit for logs and for the API server, which accepts only UTF-8.
func Name(name string) string {
	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, name)
}
