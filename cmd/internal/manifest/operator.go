package manifest

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config/document"
)

// IsClusterPolicy reports whether a piece is one of the GPU Operator. Kyverno has a kind of the same name.
func IsClusterPolicy(p Piece) bool {
	version, _ := p.Top["apiVersion"].(string)
	return p.Foreign == "ClusterPolicy" && strings.HasPrefix(version, "nvidia.com/")
}

// ofValues describes values of the GPU Operator's chart.
const ofValues = "values of the GPU Operator's chart (kubectl gpuslice migrate reads them)"

// ofOperator recognizes values of the chart by the sections that matter here.
func ofOperator(values map[string]any) bool {
	return slices.ContainsFunc([]string{"migManager", "devicePlugin", "mig"}, func(section string) bool { return isMapping(values, section) })
}

// helmChart hands on the values that k3s' HelmChart or HelmChartConfig has of the GPU Operator's chart, and reports whether it has any.
func (r *Reader) helmChart(name string, d section, steps []string, top map[string]any) bool {
	version, _ := top["apiVersion"].(string)
	spec, _ := top["spec"].(map[string]any)
	content, _ := spec["valuesContent"].(string)
	if !strings.HasPrefix(version, "helm.cattle.io/") || content == "" {
		return false
	}
	at := func() origin {
		before, indent, ok := d.read().Block(append(slices.Clone(steps), "spec", "valuesContent")...)
		return origin{lines: d.lines + before, indent: indent, known: ok}
	}
	values, err := Mapping([]byte(content))
	switch {
	case err != nil:
		if o := at(); o.known {
			err = withLinesOfFile(err, o.lines)
		}
		r.Found(Piece{At: name, Err: fmt.Errorf("spec.valuesContent: %w", err)})
		return true
	case ofOperator(values):
		r.values(Piece{At: name, Text: []byte(content), Top: values, origin: at})
		return true
	default:
		return false
	}
}

// values hands on values of the GPU Operator's chart, and the texts of the ConfigMaps that it makes of them.
func (r *Reader) values(p Piece) {
	p.Format, p.Foreign, p.Values = "", ofValues, p.Top
	r.Found(p)
	var read *document.Text
	for _, place := range [][2]string{{"migManager", "config"}, {"migManager", "gpuClientsConfig"}, {"devicePlugin", "config"}} {
		in, _ := p.Top[place[0]].(map[string]any)
		of, _ := in[place[1]].(map[string]any)
		data, _ := of["data"].(map[string]any)
		name, _ := of["name"].(string)
		field := strings.Join(append(place[:], "data"), ".")
		if len(data) > 0 && place == [2]string{"migManager", "config"} && isCatalog(data) { // the chart writes the file around it
			data = map[string]any{"config.yaml": map[string]any{"version": "v1", "mig-configs": data}}
		}
		for _, key := range slices.Sorted(maps.Keys(data)) {
			embedded := Piece{At: fmt.Sprintf("%s, %s, %s", p.At, field, key), ConfigMap: cmp.Or(name, "of "+path.Base(p.At)), Key: key}
			text, is := data[key].(string)
			if is {
				embedded.origin = func() origin {
					if read == nil {
						read = document.Read(p.Text)
					}
					before, indent, ok := read.Block(place[0], place[1], "data", key)
					outer := p.origin()
					return origin{lines: outer.lines + before, indent: outer.indent + indent, known: ok && outer.known}
				}
			} else {
				written, err := yaml.Marshal(data[key])
				if err != nil {
					r.Found(Piece{At: embedded.At, Err: err})
					continue
				}
				text, embedded = string(written), embedded.Unplaced()
			}
			embedded.Text = []byte(text)
			r.value(embedded)
		}
	}
}

// isCatalog reports whether the data are MIG configs by their names, each a list of rules.
func isCatalog(data map[string]any) bool {
	for _, value := range data {
		if _, is := value.([]any); !is {
			return false
		}
	}
	return true
}

// LineOf is the line of a piece's field in the file, or of the section that would have it. It is 0 if neither is there, or if the file does not have the piece
// line by line.
func LineOf(p Piece, field string) int {
	section, _, _ := strings.Cut(field, ".")
	if _, there := p.Top[section]; !there || p.origin == nil {
		return 0
	}
	o := p.origin()
	if !o.known {
		return 0
	}
	return o.lines + document.Read(p.Text).Locate(nil, field).Line
}
