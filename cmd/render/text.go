package render

import (
	"encoding/json"
	"fmt"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/agent/legible"
)

// Text writes objects as a stream of YAML, the same for the same, below a comment that says where the numbers come from.
func Text(given []Given, objects []any) ([]byte, error) {
	var b strings.Builder
	for _, g := range given {
		var nodes, gives []string
		for _, p := range g.Pools {
			nodes = append(nodes, fmt.Sprintf("%s x %s", legible.Counted(p.Nodes, "node"), legible.Counted(p.GPUs, "GPU")))
		}
		for _, o := range g.Offers {
			gives = append(gives, fmt.Sprintf("%s %d", o.Resource, o.Total))
		}
		if len(gives) == 0 {
			gives = []string{"nothing that pods can ask for"}
		}
		fmt.Fprintf(&b, "# %s: %s, %s\n", g.Profile, legible.Listed(nodes), strings.Join(gives, ", "))
	}
	for i, object := range objects {
		if i > 0 {
			b.WriteString("---\n")
		}
		text, err := manifest(object)
		if err != nil {
			return nil, fmt.Errorf("writing YAML: %w", err)
		}
		b.Write(text)
	}
	return []byte(b.String()), nil
}

// manifest leaves out what only a cluster fills in.
func manifest(object any) ([]byte, error) {
	text, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	var fields map[string]any
	if err := json.Unmarshal(text, &fields); err != nil {
		return nil, err
	}
	delete(fields, "status")
	return yaml.Marshal(fields)
}
