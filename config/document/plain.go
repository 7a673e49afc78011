package document

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	node "go.yaml.in/yaml/v3"
)

// maxLines is how many mistakes of a text are told that the decoder has found.
const maxLines = 100

// plain is an error of the decoders without what they say of themselves.
func plain(err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	for _, prefix := range []string{"error converting YAML to JSON: ", "error unmarshaling JSON: ", "while decoding JSON: ", "yaml: ", "unmarshal errors:\n  "} {
		text = strings.TrimPrefix(text, prefix)
	}
	lines := strings.Split(strings.ReplaceAll(text, "\n  ", "\n"), "\n")
	if more := len(lines) - maxLines; more > 0 {
		lines = append(lines[:maxLines], fmt.Sprintf("and %d more", more))
	}
	return errors.New(strings.Join(lines, "\n"))
}

var (
	// beyond finds texts that may have a number which is none in JSON, or another one.
	beyond = regexp.MustCompile(`[0-9_]{19}|\.(?i:inf|nan)`)
	whole  = regexp.MustCompile(`^[-+]?[0-9][0-9_]*$`)
	// breaks are line breaks for the decoder alone.
	breaks = regexp.MustCompile("\r[^\n]|\u0085|\u2028|\u2029")
)

// asWritten puts numbers in quotes that the decoder would round, as those beyond 64 bits, or that JSON has not. No field takes any of
// them, and a message about it quotes what people wrote.
func asWritten(text []byte) []byte {
	var root node.Node
	if !beyond.Match(text) || breaks.Match(text) || node.Unmarshal(text, &root) != nil {
		return text
	}
	var out bytes.Buffer
	at, line, column, done := 0, 1, 1, 0
	for _, n := range misread(&root, nil) {
		for at < len(text) && (line < n.Line || line == n.Line && column < n.Column) {
			r, size := utf8.DecodeRune(text[at:])
			at += size
			column++
			if r == '\n' {
				line, column = line+1, 1
			}
		}
		rest, _, _ := bytes.Cut(text[at:], []byte("\n"))
		i := bytes.Index(rest, []byte(n.Value)) // which may be behind an anchor
		if i < 0 {
			continue
		}
		out.Write(text[done : at+i])
		out.WriteString(`"` + n.Value + `"`)
		done = at + i + len(n.Value)
	}
	out.Write(text[done:])
	return out.Bytes()
}

// misread adds the numbers below the node that JSON has not as they are written, in the order of the text.
func misread(n *node.Node, found []*node.Node) []*node.Node {
	const quoted = node.DoubleQuotedStyle | node.SingleQuotedStyle | node.LiteralStyle | node.FoldedStyle
	if n.Kind == node.ScalarNode && n.Style&quoted == 0 && (n.ShortTag() == "!!int" || n.ShortTag() == "!!float") && !holds(n.Value) {
		return append(found, n)
	}
	for _, child := range n.Content {
		found = misread(child, found)
	}
	return found
}

// holds reports whether the number is the same in JSON, as far as a whole number is.
func holds(number string) bool {
	if strings.Contains(strings.ToLower(number), ".inf") || strings.EqualFold(number, ".nan") {
		return false
	}
	digits := strings.ReplaceAll(number, "_", "")
	_, notSigned := strconv.ParseInt(digits, 10, 64)
	_, notUnsigned := strconv.ParseUint(strings.TrimPrefix(digits, "+"), 10, 64)
	return !whole.MatchString(number) || notSigned == nil || notUnsigned == nil
}
