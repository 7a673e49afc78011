package cluster

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/drain/kube"
)

// Change holds labels and annotations to set on a node; nil removes one.
type Change struct {
	Labels, Annotations map[string]*string
	Unchanged           bool // only if nothing else has changed the node since it was read; otherwise the error is a conflict
}

// Write changes a node, and returns its new state. It fails if the node was deleted and created again in between.
func Write(ctx context.Context, client kube.Interface, node *corev1.Node, what Change) (*corev1.Node, error) {
	metadata := map[string]any{"uid": node.UID}
	if what.Unchanged && node.ResourceVersion != "" {
		metadata["resourceVersion"] = node.ResourceVersion
	}
	if len(what.Labels) > 0 {
		metadata["labels"] = what.Labels
	}
	if len(what.Annotations) > 0 {
		metadata["annotations"] = what.Annotations
	}
	body, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		return nil, fmt.Errorf("encoding the change of node %s: %w", node.Name, err)
	}
	after, err := client.Nodes().Patch(ctx, node.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: fieldManager})
	if err != nil {
		return nil, fmt.Errorf("writing to node %s: %w", node.Name, err)
	}
	return after, nil
}
