// Package plugin gives NVIDIA's device plugin another config, in two steps. WriteSharing writes it: for a config manager into a key of its ConfigMap,
// which the node's label then names; otherwise into the plugin's file on the host. Reload makes the plugin read the file, by SIGHUP or by a restart
// of its pod; a config manager does that by itself.
package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/evict"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// propagation is how long kubelet takes at most to show an edited ConfigMap to a running pod: its sync period of a minute, and another
// minute for its cache.
const propagation = 2 * time.Minute

// Handover gives the device plugin of one node another config.
type Handover struct {
	*deviceplugin.Plugin // as the agent sees it

	Client    kube.Interface
	Nodes     nodewrite.Writer
	Evictions *evict.Evictions
	Retries   *decide.Retries

	notifiedFirst time.Time   // when readers other than the plugin last got a SIGHUP before it
	labelWrites   labelWrites // of the config manager's label
	unmended      unmended    // zero if the agent has no key to rewrite
}

// Forget drops what depends on times that the clock gave. The plugin that it embeds has a Forget of its own.
func (h *Handover) Forget(time.Time) { h.notifiedFirst, h.unmended.next = time.Time{}, time.Time{} }

// maxFormer bounds the text that the journal holds. All annotations of a node together may take 256 KiB.
const maxFormer = 32 << 10

// FormerConfig returns the plugin's present config, for the journal. Without a file it is a config that shares nothing, and an undo writes that: a
// plugin that was started with a file does not run without it.
func (h *Handover) FormerConfig(seen *state.Observed, want state.Desired) (*journal.FormerPlugin, error) {
	p := seen.Plugin
	f := &journal.FormerPlugin{Way: p.Method, Text: p.Text, MPS: p.Current != nil && p.Current.Sharing.Strategy == catalog.SharingMPS}
	if m := p.Manager; m != nil {
		f.Label, f.Namespace, f.ConfigMap, f.Dir, f.Fallback = m.Label, m.Namespace, m.ConfigMap, m.Dir, m.Fallback
		if m.Owns(p.Text) && m.Believes(p.Text) {
			f.Body = m.Files[p.Text]
		}
	} else if !p.Exists {
		text, err := h.Format.Render(nil, catalog.Sharing{Strategy: catalog.SharingNone}, "")
		if err != nil {
			return nil, err
		}
		f.Text, f.Absent = string(text), true
	}
	if len(f.Text)+len(f.Body) > maxFormer {
		return nil, &outcome.Stalled{
			Reason:  config.ReasonNoHandover,
			Message: fmt.Sprintf("%s: noting the device plugin's config %s: %v; shorten it", want.PluginAskedBy(), h.Settings.DevicePlugin.ConfigFile, errTooLong),
		}
	}
	return f, nil
}

// WriteSharing gives the device plugin another config: by the label and ConfigMap of its config manager, or by the file.
func (h *Handover) WriteSharing(ctx context.Context, in act.Input) error {
	if in.Seen.Plugin.Manager != nil {
		return h.setLabel(ctx, in)
	}
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	err := h.File.Write(call, in.Want.Plugin.Text, h.Clock.Now())
	if full, is := errors.AsType[*deviceplugin.NoRoomError](err); is && !in.Want.Undo &&
		h.Clock.Now().Before(h.Retries.Deadline(in.Seen, in.Want, plan.Step{Kind: plan.WriteSharing})) {
		return fullFolder(full, in.Want.PluginAskedBy(), "the device plugin gets it")
	}
	return err
}

// Prepare makes sure, before the agent disturbs anything, that there is room for the plugin's config and for the former one.
func (h *Handover) Prepare(ctx context.Context, in act.Input) error {
	return h.makeRoom(ctx, in, in.Step().Kind == plan.AcquireSlot, h.File.Prepare)
}

// Foresee returns why Prepare would have to wait. Its trials leave nothing behind.
func (h *Handover) Foresee(ctx context.Context, in act.Input) error {
	return h.makeRoom(ctx, in, true, h.File.Try)
}

// makeRoom prepares the config manager's key, or only tries to; or it calls file to prepare the file.
func (h *Handover) makeRoom(ctx context.Context, in act.Input, try bool, file func(ctx context.Context, text string) error) error {
	writes := plan.Has(in.Steps, plan.WriteSharing)
	switch {
	case in.Want.Undo || !writes || in.Seen.HardwareOrPluginTouched():
		return nil
	case in.Seen.Plugin.Manager != nil:
		return h.prepareKey(ctx, in, try)
	}
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	err := file(call, in.Want.Plugin.Text)
	full, is := errors.AsType[*deviceplugin.NoRoomError](err)
	switch {
	case is:
		wait := fullFolder(full, in.Want.PluginAskedBy(), "anything is disturbed")
		wait.Since = in.Seen.Since(wait.Reason, h.Clock.Stamp())
		return wait
	case aside.Hangs(err):
		return &outcome.UnseenError{Err: err}
	case err != nil: // WriteSharing reports and counts any other fault of the folder
		h.Log.Debug("making room for the device plugin's config", zap.Error(err))
	}
	return nil
}

// prepareKey writes the key for the config manager before any label names it: agents of all nodes write the ConfigMap, and may have filled it. A node
// that waits for a slot only tries, since a user may withdraw its change before that begins.
func (h *Handover) prepareKey(ctx context.Context, in act.Input, tries bool) error {
	m := in.Seen.Plugin.Manager
	if !lacksKey(m, in.Want) {
		return nil
	}
	var try []string
	if tries {
		try = []string{metav1.DryRunAll}
	}
	err := h.patchConfigMap(ctx, m, in.Want.Plugin.Text, &in.Want.Plugin.KeyContent, try...)
	switch why := whyRefused(m, err); {
	case why != "":
		wait := &outcome.Waiting{
			Reason: config.ReasonNoHandover, After: outcome.EvictionRetry, Blockers: []string{why}, Message: why,
			Else: "changes nothing until the key for " + in.Want.PluginAskedBy() + " is there",
		}
		wait.Since = in.Seen.Since(wait.Reason, h.Clock.Stamp())
		return wait
	case err != nil && try != nil: // a webhook may know no dry run
		h.Log.Debug("trying whether the config manager's ConfigMap takes a key", zap.Error(err))
		return nil
	}
	return err
}

// lacksKey reports whether the agent has to write the key for the label.
func lacksKey(m *state.ConfigManager, want state.Desired) bool {
	return want.Plugin.KeyContent != "" && m.Files[want.Plugin.Text] != want.Plugin.KeyContent
}

// whyRefused says what a user has to do before the API server takes the key; empty if the same request may succeed later by itself.
func whyRefused(m *state.ConfigManager, err error) string {
	configMap := "ConfigMap " + m.Namespace + "/" + m.ConfigMap
	switch {
	case apierrors.IsInvalid(err), apierrors.IsRequestEntityTooLargeError(err):
		return fmt.Sprintf("make room in %s, as by removing keys that no node's label names: %v", configMap, err)
	case apierrors.IsForbidden(err):
		return fmt.Sprintf("let the agent write its key of %s: %v", configMap, err)
	case apierrors.IsNotFound(err):
		return fmt.Sprintf("create %s again: %v", configMap, err)
	}
	return ""
}

// fullFolder waits until an administrator has made room in the folder.
func fullFolder(full *deviceplugin.NoRoomError, asked, before string) *outcome.Waiting {
	return &outcome.Waiting{
		Reason: config.ReasonNoHandover, After: outcome.EvictionRetry, Blockers: []string{full.Error()},
		Message: full.Error() + "; make room for the device plugin's config for " + asked + ", before " + before,
	}
}

// setLabel sets the node's label to another key for the plugin's config manager. The config manager ends if it does not see that key, so kubelet must
// first show the agent's new key to its pod.
func (h *Handover) setLabel(ctx context.Context, in act.Input) error {
	m, key := in.Seen.Plugin.Manager, in.Want.Plugin.Text
	if err := h.refuseToSetAgain(in.Seen, in.Want); err != nil {
		return err
	}
	if lacksKey(m, in.Want) { // another program has removed it since Prepare, or this is an undo
		err := h.patchConfigMap(ctx, m, key, &in.Want.Plugin.KeyContent)
		if why := whyRefused(m, err); why != "" && !in.Want.Undo {
			return &api.Failure{Fingerprint: in.Want.Fingerprint, Reason: config.ReasonNoHandover, Message: why}
		}
		if err != nil {
			return err
		}
		m.Files[key] = in.Want.Plugin.KeyContent
	}
	if in.Want.Plugin.KeyContent != "" && m.Pod.UID != "" {
		if err := h.awaitKey(ctx, in); err != nil {
			return err
		}
	}
	value := &key
	if key == "" {
		value = nil
	}
	err := h.Nodes.Patch(ctx, in.Seen.Node, func(node *corev1.Node) ([]byte, error) {
		return json.Marshal(map[string]any{"metadata": map[string]any{
			"uid": node.UID, "resourceVersion": node.ResourceVersion, "labels": map[string]*string{m.Label: value},
		}})
	})
	if err == nil {
		h.labelWrites.add(in.Seen.Operation(), key)
	}
	return err
}

// awaitKey waits until the config manager sees the key. If the agent cannot tell, it waits until kubelet must have shown it.
func (h *Handover) awaitKey(ctx context.Context, in act.Input) error {
	m, key := in.Seen.Plugin.Manager, in.Want.Plugin.Text
	step := plan.Step{Kind: plan.WriteSharing, Config: in.Want.Plugin.ConfigText()}
	began := h.Retries.Began(step)
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	there, err := h.Processes.FileOf(call, m.Pod.UID, state.ManagerCommand, path.Join(m.Dir, key))
	if there || h.Clock.Since(began) > propagation {
		return nil
	}
	wait := &outcome.Waiting{
		Reason: config.ReasonConfiguringPlugin, For: outcome.ForStep, After: deviceplugin.Retry, Since: began,
		Message: fmt.Sprintf("waiting for kubelet to show %s to pod %s/%s", m.KeyName(key), m.Pod.Namespace, m.Pod.Name),
		Until:   began.Add(propagation), Then: "the agent sets label " + m.Label + " to it",
	}
	if h.isSetBack(in.Seen, in.Want) {
		wait.Message += fmt.Sprintf("; the label had that key already: %s has set it back to %q", labeler(in.Seen.Node, m.Label), in.Seen.Node.Labels[m.Label])
	}
	if err != nil {
		h.Log.Debug("cannot tell whether the config manager sees its new config", zap.Error(err))
	}
	return wait
}

// patchConfigMap sets one key, or removes it if text is nil.
func (h *Handover) patchConfigMap(ctx context.Context, m *state.ConfigManager, key string, text *string, dryRun ...string) error {
	if !m.Owns(key) || text != nil && key != m.OwnKey(*text) { // the agent never writes a user's key, or that of another node
		return &outcome.Stalled{
			Reason: config.ReasonNoHandover,
			Message: fmt.Sprintf("%s is not ours to write: its name is not %s, the node's UID and a hash of the text",
				m.KeyName(key), strings.TrimSuffix(config.OwnPluginKey, "-")),
		}
	}
	body, err := json.Marshal(map[string]any{"data": map[string]*string{key: text}})
	if err != nil {
		return fmt.Errorf("encoding %s: %w", m.KeyName(key), err)
	}
	api, cancel := context.WithTimeout(ctx, h.Settings.Timeouts.APICall)
	defer cancel()
	err = kube.Retry(api, func() error {
		_, err := h.Client.ConfigMaps(m.Namespace).Patch(api, m.ConfigMap, types.MergePatchType, body,
			metav1.PatchOptions{FieldManager: config.FieldManager, DryRun: dryRun})
		return err
	})
	if err != nil {
		return fmt.Errorf("writing %s: %w", m.KeyName(key), err)
	}
	return nil
}

// Tidy removes the leftovers of a change of the plugin's config.
func (h *Handover) Tidy(ctx context.Context, seen *state.Observed) {
	if way := seen.Journal.Plugin.Way; way != config.HandoverFile && way != config.HandoverRestart {
		h.collectKeys(ctx, seen)
		return
	}
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	if err := h.File.Tidy(call); err != nil {
		h.Log.Warn("leaving the texts kept for a change of the device plugin's config", zap.Error(err))
	}
}

// collectKeys removes the agent's own keys for this node that no node's label names: the key before the change, or the key of a failed change. The
// admission policy allows a node only a few.
func (h *Handover) collectKeys(ctx context.Context, seen *state.Observed) {
	former, m := seen.Journal.Plugin, seen.Plugin.Manager
	if former == nil || former.Stays {
		return
	}
	manager := deviceplugin.FormerManager(former, seen.Node.UID)
	if manager == nil || m != nil && (m.Namespace != former.Namespace || m.ConfigMap != former.ConfigMap) {
		return // the plugin's DaemonSet names another ConfigMap now
	}
	keys := map[string]bool{former.Text: true}
	if m != nil {
		for key := range m.Files {
			keys[key] = true
		}
	}
	for key := range keys {
		if manager.Owns(key) && seen.Node.Labels[former.Label] != key {
			h.collectKey(ctx, manager, key)
		}
	}
}

// collectKey removes a key of this node's agent, unless another node's label names it.
func (h *Handover) collectKey(ctx context.Context, m *state.ConfigManager, key string) {
	api, cancel := context.WithTimeout(ctx, h.Settings.Timeouts.APICall)
	defer cancel()
	users, err := h.Client.Nodes().List(api, metav1.ListOptions{LabelSelector: m.Label + "=" + key, Limit: 1})
	if err == nil && len(users.Items) == 0 {
		err = h.patchConfigMap(ctx, m, key, nil)
	}
	if err != nil {
		h.Log.Warn("leaving a config of the device plugin that no node uses", zap.String("key", key), zap.Error(err))
	}
}

// Reload makes the readers of the plugin's config file read it: by SIGHUP, or by a restart of the pod if the method is another or a reader got no
// signal. It is over when all have read it.
func (h *Handover) Reload(ctx context.Context, in act.Input) error {
	unnotified, wait := h.notifyFirst(ctx, in, in.Seen.Plugin.UnnotifiedReaders())
	if len(unnotified) == 0 {
		if wait == nil && in.Seen.Plugin.Early {
			h.notifyEarly(ctx, in.Seen)
		}
		return wait
	}
	if in.Seen.Plugin.Method == config.HandoverFile {
		call, cancel := context.WithTimeout(ctx, h.Settings.Timeouts.DriverCall)
		defer cancel()
		notified, err := h.Processes.Hangup(call, unnotified, deviceplugin.Readers)
		for _, c := range notified {
			in.Seen.Plugin.NotifiedPods[c.PodUID] = in.Seen.Plugin.Writing()
			h.Log.Info("notified to read the device plugin's config", zap.String("command", c.Command), zap.Int("pid", c.PID))
		}
		h.NoteNotified(call, in.Seen.Plugin)
		if plugins, _ := h.readersByRole(in.Seen); slices.ContainsFunc(notified, func(c holders.Client) bool { return slices.Contains(plugins, c.PodUID) }) {
			h.NoteEarlyNotified()
		}
		if err != nil {
			return err
		}
		still := in.Seen.Plugin.UnnotifiedReaders()
		if unnotified = slices.DeleteFunc(slices.Clone(unnotified), func(pod types.UID) bool { return !slices.Contains(still, pod) }); len(unnotified) == 0 {
			return wait
		}
	}
	var restarted []plan.Pod
	for _, pod := range in.Seen.Plugin.Readers {
		for _, uid := range unnotified {
			if pod.UID == uid {
				restarted = append(restarted, state.PlannedPod(holders.Describe(&pod)))
			}
		}
	}
	return h.Evictions.EvictPods(ctx, in, restarted)
}

// DaemonsGone waits for the end of the MPS control daemon, which resets the GPUs' compute mode if it is not killed.
func (h *Handover) DaemonsGone(in act.Input) error {
	if len(in.Seen.DevicePlugin.MPSDaemons) == 0 {
		return nil
	}
	var pods []string
	for _, pod := range in.Seen.DevicePlugin.MPSDaemons {
		pods = append(pods, pod.Namespace+"/"+pod.Name)
	}
	message := "waiting for the MPS control daemon to end: " + sanitize.Listed(pods)
	until := h.Retries.Deadline(in.Seen, in.Want, in.Step())
	if h.Clock.Now().After(until) && !in.Want.Undo {
		return &api.Failure{Fingerprint: in.Want.Fingerprint, Reason: config.ReasonPluginFailed, Message: message + ", up to the deadline"}
	}
	wait := &outcome.Waiting{
		Reason: config.ReasonConfiguringPlugin, For: outcome.ForStep, After: outcome.EvictionRetry, Message: message, Since: in.Seen.Journal.Started,
		Blockers: pods, Advice: "the daemon ends with the node's label " + state.LabelMPSCapable + ": " + state.SetsMPSCapable,
	}
	wait.Until, wait.Then = in.Seen.AtDeadline(until, in.Want)
	return wait
}

var errTooLong = errors.New("it is longer than the journal can hold, and could not be restored")
