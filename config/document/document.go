// Package document reads YAML of users and other programs into JSON, with bounded memory. A user who may edit a ConfigMap must not be able to fill
// the memory of every agent.
//
// It decodes all YAML that the programs read, and knows no format.
package document

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	node "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

// limits bound a text, with its aliases expanded.
type limits struct {
	bytes int // of the text
	json  int // bytes as JSON, where a character may take six; an honest file takes little more than as YAML
	parts int // keys, values and entries; each takes up to 400 bytes decoded, however short it is in the text
}

var (
	// The API server takes ConfigMaps of at most 1 MiB. A thousand MIG configs have half of these parts.
	ofFile = limits{bytes: 1 << 20, json: 3 << 19, parts: 25_000}
	// Manifests contain files, and each line of these counts as a part. Users check several manifests at once, on machines with more memory than an
	// agent has.
	ofManifest = limits{bytes: 4 << 20, json: 8 << 20, parts: 100_000}
)

var errAliasLoop = errors.New("an alias contains itself")

// JSON turns a file of YAML into JSON. A key that is there twice is an error. So is a text of more than 1 MiB. So is one that would take much more
// memory than its length, by aliases, by more than 25,000 keys, values and entries, or by characters that are longer in JSON. JSON checks this before
// it decodes the text.
//
// A key that is read as another, as n for false, is an error.
//
// A number that 64 bits or JSON cannot hold becomes text, so that messages can quote it exactly.
//
// A merge key, "<<", adds the fields of another mapping, except for the mapping's own ones after the merge key. A merge key after a key that both
// have is an error: NVIDIA's tools would take the other's value, and by the standard the mapping's own counts.
func JSON(text []byte) ([]byte, error) {
	root, err := ofFile.check(text)
	if err != nil {
		return nil, err
	}
	if err := checkPlainKeys(text); err != nil {
		return nil, err
	}
	if root != nil && merges(root) {
		// The strict decoder mistakes a key that overrides a merged one for a duplicate.
		if err := checkKeys(root); err != nil {
			return nil, err
		}
		doc, err := yaml.YAMLToJSON(quoteNumbers(text))
		return doc, withoutPrefixes(err)
	}
	doc, err := yaml.YAMLToJSONStrict(quoteNumbers(text))
	return doc, withoutPrefixes(err)
}

// Into decodes a file as JSON does, but takes the last of duplicate keys.
func Into(text []byte, into any) error {
	if _, err := ofFile.check(text); err != nil {
		return err
	}
	return withoutPrefixes(yaml.Unmarshal(quoteNumbers(text), into))
}

// ManifestInto decodes a text with manifests as Into does. It may be four times as long.
func ManifestInto(text []byte, into any) error {
	if _, err := ofManifest.check(text); err != nil {
		return err
	}
	return withoutPrefixes(yaml.Unmarshal(quoteNumbers(text), into))
}

// ReadFile reads a file of at most JSON's length; a longer one is an error.
func ReadFile(path string) ([]byte, error) {
	file, err := os.Open(filepath.Clean(path))
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the path
	}
	text, err := io.ReadAll(io.LimitReader(file, int64(ofFile.bytes)+1))
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	if err := ofFile.checkLength(text); err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return text, nil
}

// check refuses a text that is not safe to decode. If the text may have aliases or merge keys, it returns its tree.
func (l limits) check(text []byte) (*node.Node, error) {
	if err := l.checkLength(text); err != nil {
		return nil, err
	}
	if err := l.checkSize(size{parts: parts(text), json: jsonLength(text)}); err != nil {
		return nil, fmt.Errorf("the text %w", err)
	}
	// A text without aliases has no copies.
	if !bytes.ContainsRune(text, '*') && !bytes.Contains(text, []byte("<<")) {
		return nil, nil //nolint:nilnil // the caller needs no tree then
	}
	var root node.Node
	if err := node.Unmarshal(text, &root); err != nil {
		return nil, withoutPrefixes(err)
	}
	if _, err := (expansion{limits: l, of: map[*node.Node]size{}}).size(&root); err != nil {
		return nil, err
	}
	return &root, nil
}

func (l limits) checkLength(text []byte) error {
	if len(text) > l.bytes {
		return fmt.Errorf("the text is longer than %d bytes: split it", l.bytes)
	}
	return nil
}

func (l limits) checkSize(s size) error {
	switch {
	case s.parts > l.parts:
		return fmt.Errorf("has more than %d keys, values and entries, or signs that may separate them: split it up", l.parts)
	case s.json > l.json:
		return fmt.Errorf("takes more than %d bytes when it is read, or has too many of the signs <, >, & and \\", l.json)
	}
	return nil
}

// size is the size of a text or a part of it, with its aliases expanded.
type size struct{ parts, json int }

// jsonLength estimates the length of a text as JSON: six bytes for each of <, > and &, and for the character of "\0".
func jsonLength[T string | []byte](text T) int {
	n := len(text)
	for i := range len(text) {
		switch c := text[i]; {
		case c == '<', c == '>', c == '&':
			n += 5
		case c == '\\', c == '"':
			n += 2
		case c < ' ':
			n++
		}
	}
	return n
}

// parts is an upper bound for the keys, values and entries of a text. Each begins after a separator. parts counts separators also in scalars, where
// they separate nothing.
func parts(text []byte) int {
	n := 1
	for i, c := range text {
		switch c {
		case ',', '[', '{', '\n', '?':
			n++
		case ':', '-':
			// Inside of words, as in 00000000:17:00.0, they separate nothing. The last character of the text may.
			if i+1 == len(text) || bytes.IndexByte([]byte(" \t\r\n,[]{}\"'"), text[i+1]) >= 0 {
				n++
			}
		}
	}
	return n
}

// expansion adds up the size of a document. It visits each node once, whatever the number of its aliases.
type expansion struct {
	limits
	of map[*node.Node]size // of nodes with an anchor and a complete sum
}

func (x expansion) size(n *node.Node) (size, error) {
	if n.Kind == node.AliasNode {
		of, known := x.of[n.Alias]
		if !known {
			return size{}, fmt.Errorf("line %d: %w", n.Line, errAliasLoop)
		}
		return of, nil
	}
	total := size{parts: 1, json: jsonLength(n.Value)}
	for _, child := range n.Content {
		s, err := x.size(child)
		if err != nil {
			return size{}, err
		}
		total.parts += s.parts
		total.json += s.json
		if err := x.checkSize(total); err != nil {
			return size{}, fmt.Errorf("line %d: with its aliases expanded, the text %w", child.Line, err)
		}
	}
	if n.Anchor != "" {
		x.of[n] = total
	}
	return total, nil
}
