package document

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	node "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

// unlikeKeys finds texts that may have a key which YAML 1.1 reads as other than text, as n, on or 010.
var unlikeKeys = regexp.MustCompile(`(?m)(^|[ \t{,?-])((?i:y|n|yes|no|on|off|true|false|null)|~|[-+.]?[0-9][0-9a-fA-FxobeE_.:+-]*)[ \t]*:([ \t\r\n{\["']|$)`)

// maxKey bounds the characters of a key in an error. Keys that are read as others are of ASCII.
const maxKey = 63

// checkPlainKeys refuses keys that the decoder turns into others: a label n would be set as false, and a message could not name it as the file does.
// NVIDIA's tools and kubectl read such a key as the decoder does, so that it must not be read as written either.
func checkPlainKeys(text []byte) error {
	if !unlikeKeys.Match(text) {
		return nil
	}
	var root node.Node
	if node.Unmarshal(text, &root) != nil {
		return nil //nolint:nilerr // the decoder reports it
	}
	lines := misreadKeys(&root, nil)
	if more := len(lines) - maxLines; more > 0 {
		lines = append(lines[:maxLines], fmt.Sprintf("and %d more", more))
	}
	if len(lines) == 0 {
		return nil
	}
	return errors.New(strings.Join(lines, "\n"))
}

// misreadKeys adds a line for each key below the node that is read as another.
func misreadKeys(n *node.Node, found []string) []string {
	for i, child := range n.Content {
		if n.Kind == node.MappingNode && i%2 == 0 && child.Kind == node.ScalarNode && child.Style == 0 && unlikeKeys.MatchString(child.Value+":") {
			var read map[string]any
			if yaml.Unmarshal(quoteNumbers([]byte(child.Value+": ")), &read) == nil {
				if _, same := read[child.Value]; !same && len(read) == 1 {
					for other := range read {
						found = append(found, fmt.Sprintf("line %d: the key %s is read as %s: put it in quotes", child.Line, cut(child.Value), cut(other)))
					}
				}
			}
		}
		found = misreadKeys(child, found)
	}
	return found
}

func cut(key string) string {
	if len(key) > maxKey {
		return key[:maxKey] + "…"
	}
	return key
}
