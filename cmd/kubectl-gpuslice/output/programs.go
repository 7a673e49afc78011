// Package output is how commands write what they say: for users in lines or as a page for a browser, and for programs.
package output

import (
	"encoding/json"

	"sigs.k8s.io/yaml"
)

// Formats of the flag --output.
const (
	Wide = "wide"
	JSON = "json"
	YAML = "yaml"
	HTML = "html" // a page without links to other files
)

// ForPrograms returns what programs read, as JSON or YAML.
func ForPrograms(format string, of any) (string, error) {
	if format == YAML {
		said, err := yaml.Marshal(of)
		return string(said), err
	}
	said, err := json.MarshalIndent(of, "", "  ")
	return string(said) + "\n", err
}
