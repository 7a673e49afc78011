package cleanup

import (
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// written is what the API server says that one manager has written of a node, and no one since.
type written struct{ fields []*fieldpath.Set }

// writtenBy reads it from managedFields. An entry that cannot be read says nothing.
func writtenBy(node *corev1.Node, manager string) written {
	var w written
	for _, entry := range node.ManagedFields {
		if entry.Manager != manager || entry.FieldsV1 == nil {
			continue
		}
		fields := &fieldpath.Set{}
		if fields.FromJSON(entry.FieldsV1.GetRawReader()) == nil {
			w.fields = append(w.fields, fields)
		}
	}
	return w
}

func (w written) has(path fieldpath.Path) bool {
	for _, fields := range w.fields {
		if fields.Has(path) {
			return true
		}
	}
	return false
}

func (w written) label(key string) bool {
	return w.has(fieldpath.MakePathOrDie("metadata", "labels", key))
}

// condition reports whether the manager has made the condition of the type. One that it has only changed is another's.
func (w written) condition(name corev1.NodeConditionType) bool {
	return w.has(fieldpath.MakePathOrDie("status", "conditions", fieldpath.KeyByFields("type", string(name))))
}
