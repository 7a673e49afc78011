package migrate

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
)

// helmValues returns the values of the GPU Operator's chart in a piece: a file of values, or what k3s' HelmChart and HelmChartConfig have of them.
func helmValues(p manifest.Piece) (values map[string]any, ok bool, err error) {
	version, _ := p.Top["apiVersion"].(string)
	switch {
	case p.ConfigMap != "" || p.Format != "":
		return nil, false, nil
	case strings.HasPrefix(version, "helm.cattle.io/"):
		spec, _ := p.Top["spec"].(map[string]any)
		text, _ := spec["valuesContent"].(string)
		if values, err = manifest.Mapping([]byte(text)); err != nil {
			return nil, false, fmt.Errorf("%s: spec.valuesContent: %w", p.At, err)
		}
		return values, ofOperator(values), nil
	default:
		return p.Top, version == "" && ofOperator(p.Top), nil
	}
}

// ofOperator recognises values of the chart by the sections that matter here.
func ofOperator(values map[string]any) bool {
	return slices.ContainsFunc([]string{"migManager", "devicePlugin", "mig"}, func(section string) bool {
		_, is := values[section].(map[string]any)
		return is
	})
}

// values takes values of the chart: they have the fields of the ClusterPolicy that it makes of them, and the ConfigMaps that it creates.
func (m *migration) values(at string, values map[string]any) error {
	text, err := json.Marshal(map[string]any{"metadata": map[string]any{"name": "by the values in " + at}, "spec": values})
	if err != nil {
		return fmt.Errorf("%s: %w", at, err)
	}
	if err := m.policy(text); err != nil {
		return fmt.Errorf("%s: %w", at, err)
	}
	for _, place := range [][2]string{{"migManager", "config"}, {"migManager", "gpuClientsConfig"}, {"devicePlugin", "config"}} {
		section, _ := values[place[0]].(map[string]any)
		of, _ := section[place[1]].(map[string]any)
		data, _ := of["data"].(map[string]any)
		if len(data) == 0 {
			continue
		}
		name, _ := of["name"].(string)
		name = cmp.Or(name, "of "+at)
		if place[0] == "migManager" && place[1] == "config" && isCatalog(data) { // the chart writes the file around it
			data = map[string]any{"config.yaml": map[string]any{"version": "v1", "mig-configs": data}}
		}
		for _, key := range slices.Sorted(maps.Keys(data)) {
			text, is := data[key].(string)
			if !is {
				written, err := yaml.Marshal(data[key])
				if err != nil {
					return fmt.Errorf("%s: %s.%s.data.%s: %w", at, place[0], place[1], key, err)
				}
				text = string(written)
			}
			m.keys(name, key)
			m.text(fmt.Sprintf("%s, %s.%s.data, %s", at, place[0], place[1], key), name, []byte(text))
		}
	}
	return nil
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
