// Package nodewrite writes the agent's node. Metadata and spec: by patches that are guarded by the version of the node that they were made for,
// and sent again where others write in between what does not matter here. Conditions: each by itself, whatever others write.
package nodewrite

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/agent/retried"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// FieldManager names the agent in the managedFields of what it writes.
const FieldManager = "gpuslice-agent"

// Writer writes one node.
type Writer struct {
	Client  kubernetes.Interface
	Timeout time.Duration      // of a write with all its tries
	Saw     func(*corev1.Node) // is told the node as each write has left it; may be nil
}

// Patch sends one write of the node's metadata and spec.
func (w Writer) Patch(ctx context.Context, node *corev1.Node, write func(*corev1.Node) ([]byte, error)) error {
	_, err := w.Patched(ctx, node, write)
	return err
}

// Patched is Patch, and the node as it is then. Others write to the node too, some many times in a second: where nothing has changed that
// counts here, the write is as right for the node as it is now.
func (w Writer) Patched(ctx context.Context, node *corev1.Node, write func(*corev1.Node) ([]byte, error)) (*corev1.Node, error) {
	return w.patchedWhile(ctx, node, alike, write)
}

// LabelsWhile sets labels of the node, and takes away those that are nil, as long as the node is the same in what they rest on, whatever else has
// been written there since. When it is not, nothing is written, and that is no error: the next look is at the node as it is.
func (w Writer) LabelsWhile(ctx context.Context, node *corev1.Node, same func(a, b *corev1.Node) bool, labels map[string]*string) error {
	differs := false
	still := func(a, b *corev1.Node) bool {
		differs = !same(a, b)
		return !differs
	}
	_, err := w.patchedWhile(ctx, node, still, func(current *corev1.Node) ([]byte, error) {
		return json.Marshal(map[string]any{"metadata": map[string]any{"uid": current.UID, "resourceVersion": current.ResourceVersion, "labels": labels}})
	})
	if differs {
		return nil
	}
	return err
}

func (w Writer) patchedWhile(ctx context.Context, node *corev1.Node, same func(a, b *corev1.Node) bool, write func(*corev1.Node) ([]byte, error)) (*corev1.Node, error) {
	api, cancel := context.WithTimeout(ctx, w.Timeout)
	defer cancel()
	current := node
	for range conflicts {
		after, err := w.once(api, current, write)
		if !apierrors.IsConflict(err) {
			return after, err
		}
		fresh, failed := w.Client.CoreV1().Nodes().Get(api, node.Name, metav1.GetOptions{})
		if failed != nil || !same(node, fresh) {
			return nil, err
		}
		current = fresh
	}
	return w.once(api, current, write)
}

// conflicts is how often a write is tried again at once.
const conflicts = 10

// alike reports whether the same is decided by both looks at a node: nothing differs but status, and taints, labels and annotations
// that are not read here.
func alike(a, b *corev1.Node) bool {
	whoseA, _, _ := fence.Cordoner(a)
	whoseB, _, _ := fence.Cordoner(b)
	for _, key := range []string{
		config.AnnotationJournal, config.AnnotationStatus, config.AnnotationKeepCordoned, config.AnnotationHold, config.AnnotationForce,
	} {
		textA, isA := a.Annotations[key]
		if textB, isB := b.Annotations[key]; textA != textB || isA != isB {
			return false
		}
	}
	// Labels of operands are compared with all of NVIDIA's, so markers are looked for without them.
	return a.UID == b.UID && whoseA == whoseB &&
		a.Spec.Unschedulable == b.Spec.Unschedulable && equality.Semantic.DeepEqual(ourTaints(a), ourTaints(b)) &&
		slices.EqualFunc(fence.Markers(a, nil), fence.Markers(b, nil), sameMarker) && maps.Equal(nvidia(a.Labels), nvidia(b.Labels))
}

func sameMarker(a, b fence.Marker) bool { return a.Tool == b.Tool && a.Sign == b.Sign }

func ourTaints(node *corev1.Node) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(t corev1.Taint) bool {
		return t.Key != config.TaintRepartitioning && t.Key != config.TaintNotReady
	})
}

// nvidia are the labels that something is decided by.
func nvidia(labels map[string]string) map[string]string {
	out := maps.Clone(labels)
	maps.DeleteFunc(out, func(key, _ string) bool {
		return !strings.HasPrefix(key, "nvidia.com/") && key != config.LabelProfile
	})
	return out
}

func (w Writer) once(ctx context.Context, node *corev1.Node, write func(*corev1.Node) ([]byte, error)) (*corev1.Node, error) {
	body, err := write(node)
	if err != nil {
		return nil, err
	}
	var after *corev1.Node
	err = retried.Do(ctx, func() (err error) {
		after, err = w.Client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: FieldManager})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("patching node %s: %w", node.Name, err)
	}
	w.saw(after)
	return after, nil
}

func (w Writer) saw(node *corev1.Node) {
	if w.Saw != nil {
		w.Saw(node)
	}
}

// Conditions writes conditions of the node that has the name. A strategic merge patch leaves all others alone.
func (w Writer) Conditions(ctx context.Context, name string, conditions []corev1.NodeCondition) error {
	body, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": conditions}})
	if err != nil {
		return fmt.Errorf("encoding the conditions: %w", err)
	}
	api, cancel := context.WithTimeout(ctx, w.Timeout)
	defer cancel()
	var after *corev1.Node
	err = retried.Do(api, func() (err error) {
		after, err = w.Client.CoreV1().Nodes().Patch(api, name, types.StrategicMergePatchType, body, metav1.PatchOptions{FieldManager: FieldManager}, "status")
		return err
	})
	if err != nil {
		return fmt.Errorf("writing the conditions of node %s: %w", name, err)
	}
	w.saw(after)
	return nil
}

// Annotations is a merge patch that sets annotations, takes away those that are nil, and leaves all others alone.
func Annotations(annotations map[string]*string) ([]byte, error) {
	return json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
}
