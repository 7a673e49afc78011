package render

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Text writes objects as a stream of YAML, the same for the same, below a comment that says where the numbers come from.
func Text(given []Given, objects []any) ([]byte, error) {
	var b strings.Builder
	for _, g := range given {
		var nodes, gives []string
		for _, p := range g.Pools {
			nodes = append(nodes, fmt.Sprintf("%s x %s", sanitize.Counted(p.Nodes, "node"), sanitize.Counted(p.GPUs, "GPU")))
		}
		for _, o := range g.Offers {
			gives = append(gives, fmt.Sprintf("%s %d", o.Resource, o.Total))
		}
		if len(gives) == 0 {
			gives = []string{"nothing that pods can ask for"}
		}
		name := g.Profile
		if of := g.Pools[0].Type; of != "" {
			name += ", " + of
		}
		fmt.Fprintf(&b, "# %s: %s, %s\n", name, sanitize.Listed(nodes), strings.Join(gives, ", "))
	}
	for _, version := range []string{kinds.KueueVersion, kinds.HardwareProfileVersion, kinds.ResourceVersion, kinds.KueueConfigVersion, kinds.KueueOperatorVersion} {
		if slices.ContainsFunc(objects, func(o any) bool { return versionOf(o) == version }) {
			fmt.Fprintf(&b, "# %s needs %s.\n", version, kinds.Needs[version])
		}
	}
	for i, object := range objects {
		if i > 0 {
			b.WriteString("---\n")
		}
		text, err := documentOf(object)
		if err != nil {
			return nil, fmt.Errorf("writing YAML: %w", err)
		}
		b.Write(text)
	}
	return []byte(b.String()), nil
}

func versionOf(object any) string {
	typed, ok := object.(interface{ GetObjectKind() schema.ObjectKind })
	if !ok {
		return ""
	}
	return typed.GetObjectKind().GroupVersionKind().GroupVersion().String()
}

// documentOf leaves out what only a cluster fills in.
func documentOf(object any) ([]byte, error) {
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
