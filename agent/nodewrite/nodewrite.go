// Package nodewrite writes the agent's node. It writes metadata and spec by patches that name the version of the node that they were made for.
// It repeats them if another program has in between written something irrelevant here. It writes each condition by itself, whatever other
// programs write.
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

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/drain/managed"
)

// longestOthers bounds what a message quotes of managedFields, in characters.
const longestOthers = 100

// Others names the managers of a field other than the agent, for a message; empty if there are none.
func Others(managers []string) string {
	others := slices.DeleteFunc(slices.Clone(managers), func(m string) bool { return m == config.FieldManager })
	return sanitize.Message(strings.Join(others, ", "), longestOthers)
}

// Writer writes one node.
type Writer struct {
	Client  kube.Interface
	Timeout time.Duration      // of a write with all its tries
	Saw     func(*corev1.Node) // called with the node as each write has left it; may be nil
	Startup config.StartupTaints
}

// Patch sends one write of the node's metadata and spec.
func (w Writer) Patch(ctx context.Context, node *corev1.Node, write func(*corev1.Node) ([]byte, error)) error {
	_, err := w.Patched(ctx, node, write)
	return err
}

// Patched is Patch, and returns the resulting node. Other programs write to the node, some many times in a second: if nothing has changed that
// the agent decides by, it repeats the write for the new version of the node.
func (w Writer) Patched(ctx context.Context, node *corev1.Node, write func(*corev1.Node) ([]byte, error)) (*corev1.Node, error) {
	return w.patchedWhile(ctx, node, w.alike, write)
}

// LabelsWhile sets labels of the node, and removes those that are nil, as long as same says that nothing has changed that the labels rest on. If
// it has, LabelsWhile writes nothing and returns no error: the next pass observes the node again.
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

// Taints replaces the node's taints by the result of the function of, whatever else has been written there since the observation. If of
// changes nothing, nothing is written.
func (w Writer) Taints(ctx context.Context, node *corev1.Node, of func(*corev1.Node) []corev1.Taint) error {
	if equality.Semantic.DeepEqual(of(node), node.Spec.Taints) {
		return nil
	}
	same := func(a, b *corev1.Node) bool { return a.UID == b.UID }
	_, err := w.patchedWhile(ctx, node, same, func(current *corev1.Node) ([]byte, error) {
		return json.Marshal(map[string]any{
			"metadata": map[string]any{"uid": current.UID, "resourceVersion": current.ResourceVersion},
			"spec":     map[string]any{"taints": of(current)},
		})
	})
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
		fresh, failed := w.Client.Nodes().Get(api, node.Name, metav1.GetOptions{})
		if failed != nil || !same(node, fresh) {
			return nil, err
		}
		current = fresh
	}
	return w.once(api, current, write)
}

// conflicts is how often the agent repeats a write at once after a conflict.
const conflicts = 10

// alike reports whether the agent decides the same by both states of a node: they differ only in the status, and in taints, labels and
// annotations that the agent does not read.
func (w Writer) alike(a, b *corev1.Node) bool {
	whoseA, _, _ := managed.Cordoner(a)
	whoseB, _, _ := managed.Cordoner(b)
	// Labels of operands are among NVIDIA's labels, which are compared below, so Markers need not look for them.
	return a.UID == b.UID && whoseA == whoseB && maps.Equal(ours(a.Annotations), ours(b.Annotations)) &&
		a.Spec.Unschedulable == b.Spec.Unschedulable && equality.Semantic.DeepEqual(w.ourTaints(a), w.ourTaints(b)) &&
		slices.EqualFunc(fence.Markers(a, nil), fence.Markers(b, nil), sameMarker) && maps.Equal(nvidia(a.Labels), nvidia(b.Labels))
}

func sameMarker(a, b fence.Marker) bool { return a.Tool == b.Tool && a.Sign == b.Sign }

func (w Writer) ourTaints(node *corev1.Node) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(t corev1.Taint) bool {
		return t.Key != config.TaintRepartitioning && !w.Startup.Has(t)
	})
}

// ours returns the annotations of the agent's domain, except a user's question and its answer: these decide nothing.
func ours(annotations map[string]string) map[string]string {
	out := maps.Clone(annotations)
	maps.DeleteFunc(out, func(key, _ string) bool {
		return !strings.HasPrefix(key, "gpuslice.io/") || key == config.AnnotationPreview || key == config.AnnotationPlan
	})
	return out
}

// nvidia returns the labels of NVIDIA's programs that the agent decides by.
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
	err = kube.Retry(ctx, func() (err error) {
		after, err = w.Client.Nodes().Patch(ctx, node.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: config.FieldManager})
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

// Conditions writes conditions of the node that has the name. A strategic merge patch leaves all others unchanged.
func (w Writer) Conditions(ctx context.Context, name string, conditions []corev1.NodeCondition) error {
	body, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": conditions}})
	if err != nil {
		return fmt.Errorf("encoding the conditions: %w", err)
	}
	if err := w.status(ctx, name, types.StrategicMergePatchType, body); err != nil {
		return fmt.Errorf("writing the conditions of node %s: %w", name, err)
	}
	return nil
}

// RemoveEmptyResources removes resources from the capacity and the allocatable of the node that has the name, if all of them are 0 in both.
func (w Writer) RemoveEmptyResources(ctx context.Context, name string, resources []string) error {
	var patch []map[string]any
	for _, resource := range resources {
		for _, list := range []string{"capacity", "allocatable"} {
			at := "/status/" + list + "/" + strings.ReplaceAll(resource, "/", "~1")
			patch = append(patch, map[string]any{"op": "test", "path": at, "value": "0"}, map[string]any{"op": "remove", "path": at})
		}
	}
	body, err := json.Marshal(patch)
	if err != nil {
		return fmt.Errorf("encoding the resources: %w", err)
	}
	if err := w.status(ctx, name, types.JSONPatchType, body); err != nil {
		return fmt.Errorf("removing resources from node %s: %w", name, err)
	}
	return nil
}

// status patches the node's status.
func (w Writer) status(ctx context.Context, name string, kind types.PatchType, body []byte) error {
	api, cancel := context.WithTimeout(ctx, w.Timeout)
	defer cancel()
	var after *corev1.Node
	err := kube.Retry(api, func() (err error) {
		after, err = w.Client.Nodes().Patch(api, name, kind, body, metav1.PatchOptions{FieldManager: config.FieldManager}, "status")
		return err
	})
	if err == nil {
		w.saw(after)
	}
	return err
}

// Annotations returns a merge patch that sets annotations, removes those that are nil, and leaves all others unchanged.
func Annotations(annotations map[string]*string) ([]byte, error) {
	return json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
}
