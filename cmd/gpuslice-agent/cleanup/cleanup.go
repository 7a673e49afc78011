// Package cleanup removes from a node, and from its host, what agents have left there, before gpuslice is uninstalled. It is for a machine without an
// agent, when nothing is left to restore on its node.
package cleanup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/monitor/remedy"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// ErrPendingRestore refuses to remove the journal, which node and host need to restore what a change took.
var ErrPendingRestore = errors.New("the node has the annotation " + config.AnnotationJournal +
	": a change is under way, or waits for a reboot; let the agent finish it, or remove the label that asks for it")

// File is a file of the host that agents write.
type File interface {
	Path() string
	// Remove removes it, if it is there, and reports whether it was.
	Remove(ctx context.Context) (bool, error)
}

// Cleaner cleans one node.
type Cleaner struct {
	Client  kube.Interface
	Node    string
	Timeout time.Duration // of one call of the API server
	// Published reads the labels and taints that a profile has put on the node. What it says is believed, so it must be from a source that
	// only an agent of this host can write.
	Published func(ctx context.Context) (nodekeys.Keys, error)
	Files     []File
	Plugin    *deviceplugin.File // the device plugin's config on the host; nil if the settings name none
	Startup   config.StartupTaints
}

// Report says what was removed, or would be, and what stays there.
type Report struct {
	Removed []string `json:"removed,omitempty"`
	Left    []string `json:"left,omitempty"` // with what the user can do
}

// Clean removes it, or, in a dry run, says what it would remove. The node comes first and the host's files last, so that one that was
// ended in the middle is finished by the next. The error says what could not be removed.
func (c *Cleaner) Clean(ctx context.Context, dryRun bool) (Report, error) {
	var r Report
	node, err := c.read(ctx)
	if err != nil {
		return r, err
	}
	if _, pending := node.Annotations[config.AnnotationJournal]; pending {
		return r, ErrPendingRestore
	}
	published, err := c.Published(ctx)
	if err != nil {
		return r, fmt.Errorf("reading which labels and taints a profile has put on the node: %w", err)
	}
	found := c.find(node, published)
	stays, err := c.pluginConfig(ctx)
	if err != nil {
		return r, err
	}
	r.Left = append(found.left, stays...)
	if dryRun {
		r.Removed = append(found.names(), c.paths()...)
		return r, nil
	}
	if err := c.removeConditions(ctx, node, found); err != nil {
		return r, err
	}
	if err := c.removeKeys(ctx, node, published); err != nil {
		return r, err
	}
	r.Removed = found.names()
	for _, f := range c.Files {
		removed, err := f.Remove(ctx)
		if err != nil {
			return r, fmt.Errorf("removing %s from the host: %w", f.Path(), err)
		}
		if removed {
			r.Removed = append(r.Removed, "file "+f.Path())
		}
	}
	return r, nil
}

// pluginConfig names the device plugin's config file, if it is there. It stays: without it a plugin that stays may not start.
func (c *Cleaner) pluginConfig(ctx context.Context) ([]string, error) {
	if c.Plugin == nil {
		return nil, nil
	}
	content, err := c.Plugin.Read(ctx)
	if err != nil || !content.Exists {
		return nil, err
	}
	return []string{"file " + c.Plugin.Name() + " of the host, which has the device plugin share the GPUs; remove it when no device plugin reads it any more"}, nil
}

func (c *Cleaner) paths() []string {
	var out []string
	for _, f := range c.Files {
		out = append(out, "file "+f.Path()+", if it is there")
	}
	return out
}

func (c *Cleaner) read(ctx context.Context) (*corev1.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	node, err := c.Client.Nodes().Get(ctx, c.Node, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("reading node %s: %w", c.Node, err)
	}
	return node, nil
}

// removeConditions removes the conditions, each by its type, whatever others write in the meantime.
func (c *Cleaner) removeConditions(ctx context.Context, node *corev1.Node, found found) error {
	if len(found.conditions) == 0 {
		return nil
	}
	var gone []map[string]string
	for _, name := range found.conditions {
		gone = append(gone, map[string]string{"type": name, "$patch": "delete"})
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": node.UID}, "status": map[string]any{"conditions": gone}})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	options := metav1.PatchOptions{FieldManager: config.FieldManager}
	if _, err := c.Client.Nodes().Patch(ctx, node.Name, types.StrategicMergePatchType, body, options, "status"); err != nil {
		return fmt.Errorf("removing conditions from node %s: %w", c.Node, err)
	}
	return nil
}

// removeKeys reads the node, and removes its labels, annotations and taints in one write.
func (c *Cleaner) removeKeys(ctx context.Context, node *corev1.Node, published nodekeys.Keys) error {
	writer := nodewrite.Writer{Client: c.Client, Timeout: c.Timeout, Startup: c.Startup}
	fresh, err := c.read(ctx) // the write above has changed its version
	if err != nil {
		return err
	}
	if fresh.UID != node.UID {
		return fmt.Errorf("node %s was replaced by another of its name: run the command again", c.Node)
	}
	err = writer.Patch(ctx, fresh, func(node *corev1.Node) ([]byte, error) {
		if _, pending := node.Annotations[config.AnnotationJournal]; pending {
			return nil, ErrPendingRestore
		}
		return c.find(node, published).patch(node)
	})
	if err != nil {
		return fmt.Errorf("removing labels, annotations and taints from node %s: %w", c.Node, err)
	}
	return nil
}

// found is what agents have left on a node.
type found struct {
	labels, annotations, conditions []string
	taints                          []corev1.Taint // those that go
	left                            []string
}

// kubeletsConditions are never removed, whoever is said to have made them.
var kubeletsConditions = []corev1.NodeConditionType{
	corev1.NodeReady, corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure, corev1.NodeNetworkUnavailable,
}

// find finds what agents have left on the node.
func (c *Cleaner) find(node *corev1.Node, published nodekeys.Keys) found {
	var f found
	wrote := writtenBy(node, config.FieldManager)
	for _, key := range []string{config.AnnotationStatus, config.AnnotationPublished, config.AnnotationPlan} {
		if _, there := node.Annotations[key]; there && (key != config.AnnotationPublished || !published.Empty()) {
			f.annotations = append(f.annotations, key)
		}
	}
	if _, there := node.Labels[config.LabelMIGConfigState]; there && wrote.label(config.LabelMIGConfigState) {
		f.labels = append(f.labels, config.LabelMIGConfigState)
	}
	labels, taints, _ := nodekeys.Settled(node, published, nodekeys.Keys{})
	taints = slices.DeleteFunc(slices.Clone(taints), remedy.IsOurs)
	for key := range labels {
		f.labels = append(f.labels, key)
	}
	slices.Sort(f.labels)
	for _, t := range node.Spec.Taints {
		if !slices.ContainsFunc(taints, func(o corev1.Taint) bool { return o.MatchTaint(&t) }) {
			f.taints = append(f.taints, t)
		}
	}
	for _, c := range node.Status.Conditions {
		if wrote.condition(c.Type) && !slices.Contains(kubeletsConditions, c.Type) {
			f.conditions = append(f.conditions, string(c.Type))
		}
	}
	f.left = c.leftOn(node, wrote, published)
	return f
}

// leftOn lists what an agent may have written and does not remove: that would change what the node's pods get.
func (c *Cleaner) leftOn(node *corev1.Node, wrote written, published nodekeys.Keys) []string {
	var out []string
	if _, there := node.Annotations[config.AnnotationPublished]; there && published.Empty() {
		out = append(out, "annotation "+config.AnnotationPublished+", which names labels and taints of a profile: the host has no record of which "+
			"are the agent's; remove those that you know to be, then the annotation")
	}
	for _, label := range []string{config.LabelProfile, config.LabelMIGConfig} {
		if value, there := node.Labels[label]; there {
			out = append(out, fmt.Sprintf("label %s=%s, which an agent would follow if it is installed again; to remove it: kubectl label node %s %s-",
				label, sanitize.Cut(value, 63), node.Name, label))
		}
	}
	for _, key := range []string{config.AnnotationHold, config.AnnotationForce, config.AnnotationAllowEviction, config.AnnotationPreview, config.AnnotationKeepCordoned} {
		if _, there := node.Annotations[key]; there {
			out = append(out, fmt.Sprintf("annotation %s, which is a user's; to remove it: kubectl annotate node %s %s-", key, node.Name, key))
		}
	}
	if key, there := node.Labels[config.LabelDevicePluginConfig]; there && wrote.label(config.LabelDevicePluginConfig) {
		out = append(out, fmt.Sprintf("label %s=%s, which has the device plugin share the GPUs; to remove it: kubectl label node %s %s-",
			config.LabelDevicePluginConfig, sanitize.Cut(key, 63), node.Name, config.LabelDevicePluginConfig))
	}
	ready := func(c corev1.NodeCondition) bool { return c.Type == config.ConditionGPUPartitionReady }
	if slices.ContainsFunc(node.Status.Conditions, ready) && !wrote.condition(config.ConditionGPUPartitionReady) {
		out = append(out, "conditions: the node no longer says that the agent wrote them, since its managedFields were removed")
	}
	for _, t := range node.Spec.Taints {
		if c.Startup.Has(t) {
			out = append(out, fmt.Sprintf("taint %s, which the node was registered with; to remove it: kubectl taint node %s %s:%s-",
				t.Key, node.Name, t.Key, t.Effect))
		}
	}
	return out
}

// names lists it for people.
func (f found) names() []string {
	var out []string
	for _, key := range f.labels {
		out = append(out, "label "+key)
	}
	for _, key := range f.annotations {
		out = append(out, "annotation "+key)
	}
	for _, t := range f.taints {
		out = append(out, "taint "+sanitize.Cut(t.ToString(), 320))
	}
	for _, name := range f.conditions {
		out = append(out, "condition "+name)
	}
	return out
}

// patch is the guarded update that removes labels, annotations and taints.
func (f found) patch(node *corev1.Node) ([]byte, error) {
	gone := func(keys []string) map[string]*string {
		out := map[string]*string{}
		for _, key := range keys {
			out[key] = nil
		}
		return out
	}
	patch := map[string]any{"metadata": map[string]any{
		"uid": node.UID, "resourceVersion": node.ResourceVersion, "labels": gone(f.labels), "annotations": gone(f.annotations),
	}}
	if len(f.taints) > 0 {
		stay := slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(t corev1.Taint) bool {
			return slices.ContainsFunc(f.taints, func(o corev1.Taint) bool { return o.MatchTaint(&t) })
		})
		patch["spec"] = map[string]any{"taints": stay}
	}
	return json.Marshal(patch)
}
