package catalog

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/check"
)

// maxNodeKeys bounds a profile's labels, and its taints: the host's record, the node and each write have them twice, for the new profile and the
// former one.
const maxNodeKeys = 100

// boundKeys refuses more keys than that.
func boundKeys(c *check.Mistakes, field string, n int) bool {
	if n > maxNodeKeys {
		c.Add(&check.InvalidError{Field: field, Want: fmt.Sprintf("has %d entries: at most %d are allowed", n, maxNodeKeys)})
	}
	return n <= maxNodeKeys
}

// readNodeLabels checks the labels that a profile puts on its nodes.
func readNodeLabels(c *check.Mistakes, raw json.RawMessage) map[string]string {
	const field = "labels"
	var in map[string]json.RawMessage
	if check.Absent(raw) || !c.Read(field, raw, &in) || len(in) == 0 || !boundKeys(c, field, len(in)) {
		return nil
	}
	labels := map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(in)) {
		c.RefuseEach(field, key, nodeKeyProblems(key))
		labels[key] = readNodeValue(c, field+"."+key, in[key])
	}
	return labels
}

// TaintFields is a taint of the node.
type TaintFields struct {
	Key   string            `json:"key" jsonschema:"required" form:"nodeKey"`
	Value check.Raw[string] `json:"value" form:"labelValue"`
	// NoExecute is refused: it deletes pods whatever their disruption budgets say.
	Effect string `json:"effect" jsonschema:"required" form:"taintEffect"`
}

func init() {
	check.Forms["nodeKey"], check.Forms["taintEffect"] = nodeKeyProblems, taintEffectProblems
}

func taintEffectProblems(effect string) []string {
	switch corev1.TaintEffect(effect) {
	case corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule:
		return nil
	case corev1.TaintEffectNoExecute:
		return []string{"deletes pods whatever their disruption budget says: write NoSchedule"}
	}
	return []string{"must be NoSchedule or PreferNoSchedule"}
}

// readNodeTaints checks the taints that a profile puts on its nodes.
func readNodeTaints(c *check.Mistakes, raw json.RawMessage) []corev1.Taint {
	const field = "taints"
	var entries []json.RawMessage
	if !check.Absent(raw) && json.Unmarshal(raw, &entries) != nil {
		c.Add(&check.InvalidError{Field: field, Want: `must be a list of entries with "key", "value" and "effect"`})
	}
	if !boundKeys(c, field, len(entries)) {
		return nil
	}
	var taints []corev1.Taint
	for i, entry := range entries {
		var in TaintFields
		at := fmt.Sprintf("%s[%d]", field, i)
		if !c.Read(at, check.OrEmpty(entry), &in) {
			continue
		}
		taint := corev1.Taint{Key: in.Key, Value: readNodeValue(c, at+".value", in.Value.RawMessage), Effect: corev1.TaintEffect(in.Effect)}
		if taint.Key != "" && slices.ContainsFunc(taints, func(t corev1.Taint) bool { return t.MatchTaint(&taint) }) {
			c.Refuse(at, taint.Key+":"+string(taint.Effect), "is there twice")
		}
		taints = append(taints, taint)
	}
	return taints
}

func nodeKeyProblems(key string) []string {
	problems := validation.IsQualifiedName(key)
	if foreign := config.ForeignDomain(key); len(problems) == 0 && foreign != "" {
		return []string{fmt.Sprintf("is under %s, where a profile may not set keys: use one of your own", foreign)}
	}
	if slices.Contains(noteNames, key) {
		return []string{"is a name in gpuslice.io/published, by which the admission policy recognizes the agent's keys: use another one"}
	}
	return problems
}

// noteNames are the names of JSON in config.AnnotationPublished. deploy/policies/nodes.yaml has them, too.
var noteNames = []string{"labels", "taints", "key", "value", "effect", "timeAdded"}

// readNodeValue checks the value of a label or taint, which may be empty.
func readNodeValue(c *check.Mistakes, field string, raw json.RawMessage) string {
	var value string
	if !check.Absent(raw) && json.Unmarshal(raw, &value) != nil {
		c.Refuse(field, string(raw), "must be text: put it in quotes, as YAML reads y, yes, on and 1 as other than text")
		return ""
	}
	c.RefuseEach(field, value, validation.IsValidLabelValue(value))
	return value
}
