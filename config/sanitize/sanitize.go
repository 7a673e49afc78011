// Package sanitize makes text of other programs and users fit for a terminal, a condition, and the API server. The API server refuses text that is
// too long or not UTF-8.
//
// Labels, annotations, files, process names and termination messages can hold anything: sequences that clear a screen, characters that reverse the
// reading direction, line feeds that forge a row, megabytes of text.
package sanitize

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Longest is how many characters a condition or an Event may have.
const Longest = 1024

// Text returns the text in one line. It escapes unprintable characters as in a string of Go: \x1b, \n or \u202e.
func Text(text string) string { return escaped(text, "") }

// Lines is Text for several lines: it keeps line feeds and tabs.
func Lines(text string) string { return escaped(text, "\n\t") }

// Printable reports whether the character moves no cursor, does not change the reading direction, and has a width.
func Printable(r rune) bool { return unicode.IsPrint(r) }

func escaped(text, legal string) string {
	fits := func(r rune) bool { return Printable(r) || strings.ContainsRune(legal, r) }
	if utf8.ValidString(text) && strings.IndexFunc(text, func(r rune) bool { return !fits(r) }) < 0 {
		return text
	}
	var b strings.Builder
	for len(text) > 0 {
		r, size := utf8.DecodeRuneInString(text)
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, text[0])
		case fits(r):
			b.WriteRune(r)
		default:
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
		text = text[size:]
	}
	return b.String()
}

// Cut is Text with at most so many characters. If there are more, the last one is "…".
func Cut(text string, most int) string {
	// A character has at most four bytes: the text beyond that is never needed.
	head, more := text, len(text) > most*utf8.UTFMax
	if more {
		end := most * utf8.UTFMax
		for end > 0 && !utf8.RuneStart(text[end]) {
			end--
		}
		head = text[:end]
	}
	head = Text(head)
	if !more && utf8.RuneCountInString(head) <= most {
		return head
	}
	return first(head, most-1) + "…"
}

// first returns the first n characters of the text, or all.
func first(text string, n int) string {
	for i := range text {
		if n--; n < 0 {
			return text[:i]
		}
	}
	return text
}

// Message returns a text of several lines, such as joined errors, in one line of at most so many characters. It always shows the first line, then as
// many as fit, and the number of lines not shown.
func Message(text string, most int) string {
	text = strings.TrimSpace(text)
	lines := strings.Count(text, "\n") + 1
	if lines == 1 {
		return Cut(text, most)
	}
	const separator = "; "
	room := most - len(more(lines)) // the note is longest if no line is shown
	var b strings.Builder
	shown, length := 0, 0
	for line := range strings.Lines(text) {
		line = Cut(strings.TrimSpace(line), room)
		if line == "" {
			lines--
			continue
		}
		if n := utf8.RuneCountInString(line); length > 0 && length+len(separator)+n > room {
			break
		} else if length += n; shown > 0 {
			b.WriteString(separator)
			length += len(separator)
		}
		b.WriteString(line)
		shown++
	}
	if left := lines - shown; left > 0 {
		b.WriteString(more(left))
	}
	return b.String()
}

func more(n int) string { return fmt.Sprintf("; and %d more", n) }

// Counted writes a number of things: "1 node", "2 nodes".
func Counted(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// JSON returns a text of JSON with unprintable characters escaped. Encoders escape only control characters below space. They keep others, and
// characters that change the reading direction.
func JSON(text string) string {
	fits := func(r rune) bool { return Printable(r) || r < ' ' } // a character below space is white space outside of strings: inside, the encoder has escaped it
	if strings.IndexFunc(text, func(r rune) bool { return !fits(r) }) < 0 {
		return text
	}
	var b strings.Builder
	for _, r := range text {
		switch high, low := utf16.EncodeRune(r); {
		case fits(r):
			b.WriteRune(r)
		case r < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		}
	}
	return b.String()
}
