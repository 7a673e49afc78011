// Package document reads the YAML of people and of other programs into JSON, and bounds what that takes: a user who may edit a
// ConfigMap must not be able to fill the memory of every agent that reads it.
//
// All YAML is decoded by it. It knows no format.
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

// limits bound a text, and what its aliases make of it.
type limits struct {
	bytes int // of the text
	json  int // bytes that it comes to as JSON, where a sign may take six; what people write takes little more than in YAML
	parts int // keys, values and entries, each of which takes up to 400 bytes decoded, whatever it takes in the text
}

var (
	// A file is at most what the API server takes as a ConfigMap, 1 MiB. A thousand MIG configs have half of
	// these parts.
	ofFile = limits{bytes: 1 << 20, json: 3 << 19, parts: 25_000}
	// Manifests hold files, whose lines are counted as parts, and people check several at once, where memory is not bounded
	// as tightly as an agent's.
	ofManifest = limits{bytes: 4 << 20, json: 8 << 20, parts: 100_000}
)

var errWithinItself = errors.New("an alias is within what it refers to")

// JSON turns a file of YAML into JSON. A key that is there twice is an error. So is a text of more than 1 MiB, and one that
// would take much more memory than its length: for its aliases, for 25,000 keys, values and entries, or for signs that are
// written longer in JSON. That is found before it is decoded.
//
// A number that no machine's number holds is text, so that messages can quote it as it is written.
//
// A merge key, "<<", gives a mapping what another has, but for what it has itself behind it. One that stands behind a key which
// both have is an error, since it would win in NVIDIA's tools and lose by the standard.
func JSON(text []byte) ([]byte, error) {
	root, err := ofFile.check(text)
	if err != nil {
		return nil, err
	}
	if root != nil && merges(root) {
		// The strict decoder takes what a mapping overrides for a key that is there twice.
		if err := checkKeys(root); err != nil {
			return nil, err
		}
		doc, err := yaml.YAMLToJSON(asWritten(text))
		return doc, plain(err)
	}
	doc, err := yaml.YAMLToJSONStrict(asWritten(text))
	return doc, plain(err)
}

// Into decodes a file as JSON does, but that of a key that is there twice the last one counts.
func Into(text []byte, into any) error {
	if _, err := ofFile.check(text); err != nil {
		return err
	}
	return plain(yaml.Unmarshal(asWritten(text), into))
}

// ManifestInto decodes a text with manifests as Into does. It may be four times as long.
func ManifestInto(text []byte, into any) error {
	if _, err := ofManifest.check(text); err != nil {
		return err
	}
	return plain(yaml.Unmarshal(asWritten(text), into))
}

// ReadFile reads a file that JSON may take: one that is longer is an error, however long it is.
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

// check refuses a text that is not safe to decode. It gives the tree of one that may have aliases or merge keys.
func (l limits) check(text []byte) (*node.Node, error) {
	if err := l.checkLength(text); err != nil {
		return nil, err
	}
	if err := l.checkSize(size{parts: parts(text), json: written(text)}); err != nil {
		return nil, fmt.Errorf("the text %w", err)
	}
	// What has no alias is not longer decoded than written.
	if !bytes.ContainsRune(text, '*') && !bytes.Contains(text, []byte("<<")) {
		return nil, nil //nolint:nilnil // there is nothing to look at
	}
	var root node.Node
	if err := node.Unmarshal(text, &root); err != nil {
		return nil, plain(err)
	}
	if _, err := (expansion{limits: l, of: map[*node.Node]size{}}).size(&root); err != nil {
		return nil, err
	}
	return &root, nil
}

func (l limits) checkLength(text []byte) error {
	if len(text) > l.bytes {
		return fmt.Errorf("the text is longer than %d bytes, which is all that is read", l.bytes)
	}
	return nil
}

func (l limits) checkSize(s size) error {
	switch {
	case s.parts > l.parts:
		return fmt.Errorf("has more than %d keys, values and entries, or signs that may part them: cut it up into several", l.parts)
	case s.json > l.json:
		return fmt.Errorf("comes to more than %d bytes when it is read, or has too many of the signs <, >, & and \\", l.json)
	}
	return nil
}

// size is what a text, or a part of it with all that its aliases repeat, comes to.
type size struct{ parts, json int }

// written is about what a text comes to as JSON: six bytes for each of three signs, and for what "\0" stands for.
func written[T string | []byte](text T) int {
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

// parts is an upper bound for the keys, values and entries of a text. Each follows on a sign that sets it apart from the
// one before; in a scalar these signs part nothing, and are counted all the same.
func parts(text []byte) int {
	n := 1
	for i, c := range text {
		switch c {
		case ',', '[', '{', '\n', '?':
			n++
		case ':', '-':
			// Inside of words they part nothing, as in 00000000:17:00.0. The last sign of the text may.
			if i+1 == len(text) || bytes.IndexByte([]byte(" \t\r\n,[]{}\"'"), text[i+1]) >= 0 {
				n++
			}
		}
	}
	return n
}

// expansion adds up what a document comes to. Each node is looked at once, whatever refers to it.
type expansion struct {
	limits
	of map[*node.Node]size // of the nodes that aliases refer to; not of those that are being added up
}

func (x expansion) size(n *node.Node) (size, error) {
	if n.Kind == node.AliasNode {
		of, known := x.of[n.Alias]
		if !known {
			return size{}, fmt.Errorf("line %d: %w", n.Line, errWithinItself)
		}
		return of, nil
	}
	total := size{parts: 1, json: written(n.Value)}
	for _, child := range n.Content {
		s, err := x.size(child)
		if err != nil {
			return size{}, err
		}
		total.parts += s.parts
		total.json += s.json
		if err := x.checkSize(total); err != nil {
			return size{}, fmt.Errorf("line %d: with what its aliases repeat the text %w", child.Line, err)
		}
	}
	if n.Anchor != "" {
		x.of[n] = total
	}
	return total, nil
}
