package document

import (
	"strconv"
	"strings"

	node "go.yaml.in/yaml/v3"
)

// Place is a line and a column of a text, from 1. The zero value is no place.
type Place struct{ Line, Column int }

// Text is a document with the places of its fields.
type Text struct {
	lines []string
	root  *node.Node // nil if the text cannot be read
}

// Read reads the places of a document. A document that cannot be read has none.
func Read(text []byte) *Text {
	t := &Text{lines: strings.Split(string(text), "\n")}
	var document node.Node
	if node.Unmarshal(text, &document) == nil && len(document.Content) == 1 {
		t.root = document.Content[0]
	}
	return t
}

// Locate finds the place of a field. Steps lead through mappings by key and through lists by position from 0. field continues from there in the form
// of messages, "timeouts.drain" or "rules[0].for". For a missing field Locate returns the place of the mapping or list that would have it.
func (t *Text) Locate(steps []string, field string) Place {
	if t.root == nil {
		return Place{}
	}
	n := t.root
	at := Place{n.Line, n.Column}
	for _, step := range steps {
		next, place, rest := enter(n, step)
		if next == nil || rest != "" {
			return at
		}
		n, at = next, place
	}
	for field != "" {
		next, place, rest := enter(n, field)
		if next == nil {
			return at
		}
		n, at, field = next, place, rest
	}
	return at
}

// Value is a key's value, and the line of the key.
type Value struct {
	Text string // empty for one that is no scalar
	Line int
}

// Values lists the values of a key at the top of the document, in order. Several are often documents without a separator.
func (t *Text) Values(key string) []Value {
	var out []Value
	if t.root == nil || t.root.Kind != node.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(t.root.Content); i += 2 {
		if t.root.Content[i].Value == key {
			out = append(out, Value{Text: t.root.Content[i+1].Value, Line: t.root.Content[i].Line})
		}
	}
	return out
}

// Block finds the place of a value that the document has line by line, after a "|". It returns the number of lines before the value, and of spaces
// before each of its lines. For a value in another form ok is false.
func (t *Text) Block(steps ...string) (before, indent int, ok bool) {
	n := t.root
	for _, step := range steps {
		if n == nil {
			return 0, 0, false
		}
		next, _, rest := enter(n, step)
		if rest != "" {
			return 0, 0, false
		}
		n = next
	}
	if n == nil || n.Kind != node.ScalarNode || n.Style&node.LiteralStyle == 0 {
		return 0, 0, false
	}
	before = n.Line
	for i, line := range strings.Split(n.Value, "\n") {
		if line == "" {
			continue
		}
		if before+i >= len(t.lines) {
			return 0, 0, false
		}
		spaces, is := strings.CutSuffix(strings.TrimSuffix(t.lines[before+i], "\r"), line)
		return before, len(spaces), is && strings.Trim(spaces, " ") == ""
	}
	return 0, 0, false
}

// enter goes one step along the path, and returns the rest of the path. A key may have dots itself, so the longest one counts.
func enter(n *node.Node, path string) (next *node.Node, at Place, rest string) {
	if n.Kind == node.AliasNode {
		n = n.Alias
	}
	path = strings.TrimPrefix(path, ".")
	switch n.Kind {
	case node.MappingNode:
		longest := -1
		for i := 0; i+1 < len(n.Content); i += 2 {
			key := n.Content[i]
			after, ok := strings.CutPrefix(path, key.Value)
			if ok && len(key.Value) > longest && (after == "" || after[0] == '.' || after[0] == '[') {
				longest = len(key.Value)
				next, at, rest = n.Content[i+1], Place{key.Line, key.Column}, after
			}
		}
	case node.SequenceNode:
		index, after := path, ""
		if inside, ok := strings.CutPrefix(path, "["); ok {
			index, after, _ = strings.Cut(inside, "]")
		}
		if i, err := strconv.Atoi(index); err == nil && i >= 0 && i < len(n.Content) {
			next, rest = n.Content[i], after
			at = Place{next.Line, next.Column}
		}
	case node.DocumentNode, node.ScalarNode, node.AliasNode: // nothing is below a scalar; the others are unwrapped before
	}
	return next, at, rest
}
