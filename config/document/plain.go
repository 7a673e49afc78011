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

// maxLines bounds the mistakes of the decoder that an error lists.
const maxLines = 100

// withoutPrefixes strips the decoders' prefixes from an error, and bounds its lines.
func withoutPrefixes(err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	for _, prefix := range []string{"error converting YAML to JSON: ", "error unmarshaling JSON: ", "while decoding JSON: ", "yaml: ", "unmarshal errors:\n  "} {
		text = strings.TrimPrefix(text, prefix)
	}
	text = strings.ReplaceAll(text, "found character that cannot start any token",
		"a tab, or another sign that begins no value: indent by spaces, and quote values that begin with @, % or `")
	lines := strings.Split(strings.ReplaceAll(text, "\n  ", "\n"), "\n")
	if more := len(lines) - maxLines; more > 0 {
		lines = append(lines[:maxLines], fmt.Sprintf("and %d more", more))
	}
	return errors.New(strings.Join(lines, "\n"))
}

var (
	// suspects finds texts that may have a number that JSON cannot hold.
	suspects    = regexp.MustCompile(`[0-9_]{19}|\.(?i:inf|nan)`)
	wholeNumber = regexp.MustCompile(`^[-+]?[0-9][0-9_]*$`)
	// lineBreaks are line breaks for the decoder, but not for other programs.
	lineBreaks = regexp.MustCompile("\r[^\n]|\u0085|\u2028|\u2029")
)

// quoteNumbers puts numbers in quotes that the decoder would round, such as those beyond 64 bits, or that JSON cannot hold. No field takes any of
// them, and a message about one can then quote it exactly.
func quoteNumbers(text []byte) []byte {
	var root node.Node
	if !suspects.Match(text) || lineBreaks.Match(text) || node.Unmarshal(text, &root) != nil {
		return text
	}
	var out bytes.Buffer
	at, line, column, done := 0, 1, 1, 0
	for _, n := range misreadNumbers(&root, nil) {
		for at < len(text) && (line < n.Line || line == n.Line && column < n.Column) {
			r, size := utf8.DecodeRune(text[at:])
			at += size
			column++
			if r == '\n' {
				line, column = line+1, 1
			}
		}
		rest, _, _ := bytes.Cut(text[at:], []byte("\n"))
		i := bytes.Index(rest, []byte(n.Value)) // there may be an anchor before it
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

// misreadNumbers adds the numbers below the node that JSON cannot hold exactly, in the order of the text.
func misreadNumbers(n *node.Node, found []*node.Node) []*node.Node {
	const quoted = node.DoubleQuotedStyle | node.SingleQuotedStyle | node.LiteralStyle | node.FoldedStyle
	if n.Kind == node.ScalarNode && n.Style&quoted == 0 && (n.ShortTag() == "!!int" || n.ShortTag() == "!!float") && !sameInJSON(n.Value) {
		return append(found, n)
	}
	for _, child := range n.Content {
		found = misreadNumbers(child, found)
	}
	return found
}

// sameInJSON reports whether the number is the same in JSON. It compares whole numbers only.
func sameInJSON(number string) bool {
	if strings.Contains(strings.ToLower(number), ".inf") || strings.EqualFold(number, ".nan") {
		return false
	}
	digits := strings.ReplaceAll(number, "_", "")
	_, notSigned := strconv.ParseInt(digits, 10, 64)
	_, notUnsigned := strconv.ParseUint(strings.TrimPrefix(digits, "+"), 10, 64)
	return !wholeNumber.MatchString(number) || notSigned == nil || notUnsigned == nil
}
