package document

import (
	"fmt"
	"slices"

	node "go.yaml.in/yaml/v3"
)

// merges reports whether a mapping has a merge key.
func merges(n *node.Node) bool {
	return isMerge(n) || slices.ContainsFunc(n.Content, merges)
}

func isMerge(n *node.Node) bool { return n.Kind == node.ScalarNode && n.ShortTag() == "!!merge" }

// checkKeys refuses duplicate keys, and merge keys after keys that they would override.
func checkKeys(n *node.Node) error {
	if n.Kind == node.MappingNode {
		if err := checkMapping(n); err != nil {
			return err
		}
	}
	for _, child := range n.Content {
		if err := checkKeys(child); err != nil {
			return err
		}
	}
	return nil
}

func checkMapping(n *node.Node) error {
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		if key.Kind != node.ScalarNode {
			continue
		}
		if seen[key.Value] {
			return fmt.Errorf("line %d: key %q is there twice", key.Line, key.Value)
		}
		if isMerge(key) {
			for _, taken := range keysOf(n.Content[i+1], nil) {
				if seen[taken] {
					return fmt.Errorf(`line %d: "<<" comes after %q, which it sets too: put "<<" first, to be overridden`, key.Line, taken)
				}
			}
		}
		seen[key.Value] = true
	}
	return nil
}

// keysOf adds the keys of a merged value: a mapping, an alias of one, or a list of these. The caller has checked that no alias contains itself.
func keysOf(n *node.Node, keys []string) []string {
	switch n.Kind {
	case node.AliasNode:
		return keysOf(n.Alias, keys)
	case node.SequenceNode:
		for _, child := range n.Content {
			keys = keysOf(child, keys)
		}
	case node.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			if isMerge(n.Content[i]) {
				keys = keysOf(n.Content[i+1], keys)
			} else {
				keys = append(keys, n.Content[i].Value)
			}
		}
	case node.DocumentNode, node.ScalarNode: // the decoder refuses to merge these
	}
	return keys
}
