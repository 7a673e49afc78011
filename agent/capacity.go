package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/capacity"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// verification is the present wait for capacity.
type verification struct {
	began     time.Time // zero if none is under way
	restarted bool      // the device plugin was started anew for want of capacity
}

// Forget implements forgetter.
func (v *verification) Forget(time.Time) { v.began = time.Time{} }

// featurePatience is how long the labels of GPU feature discovery are waited for: it looks each minute, and node feature discovery
// carries over what it finds. They are a hint that pods are placed by, and no proof.
const featurePatience = 90 * time.Second

// awaitFeatures treats stale labels of GPU feature discovery as missing capacity for up to featurePatience, in the middle of a change.
func (a *Agent) awaitFeatures(seen *state.Observed, want *state.DesiredPlugin) {
	if want == nil {
		return
	}
	stale := seen.StaleFeatures(want)
	switch {
	case seen.Journal == nil || len(stale) == 0:
		seen.Capacity.Proof.StaleSince = time.Time{}
	case len(seen.Capacity.Missing) > 0:
	case seen.Capacity.Proof.StaleSince.IsZero():
		seen.Capacity.Proof.StaleSince = a.clock.Now()
		seen.Capacity.Missing = stale
	case a.clock.Since(seen.Capacity.Proof.StaleSince) < min(featurePatience, a.settings.Timeouts.Capacity/2):
		seen.Capacity.Missing = stale
	}
}

// devicePluginAdvice is what people can do about it.
func (a *Agent) devicePluginAdvice(seen state.Observed) string {
	text := "deploy NVIDIA's device plugin, or see why its DaemonSet has no pod on this node: it has to select the node"
	var taints []string
	for _, t := range seen.Node.Spec.Taints {
		if t.Effect != corev1.TaintEffectPreferNoSchedule {
			taints = append(taints, t.ToString())
		}
	}
	if len(taints) > 0 {
		text += ", and to tolerate " + legible.Listed(taints)
	}
	if value, there := seen.Node.Labels[config.LabelDevicePlugin]; there && value != fence.DeployedValue {
		text += fmt.Sprintf("; label %s=%s keeps that of the GPU Operator away", config.LabelDevicePlugin, value)
	}
	return text + a.pretenders(seen.Pods)
}

// missingCapacity says what is missing of the capacity, with the cause and what people can do where that is known.
func (a *Agent) missingCapacity(seen state.Observed) (reason config.Reason, text string) {
	if seen.LacksDevicePlugin() {
		return config.ReasonNoDevicePlugin, fmt.Sprintf("%s; %s (%s)", state.NoPluginOffers, a.devicePluginAdvice(seen), seen.Blockers())
	}
	if under := seen.RunsUnder(); under != "" {
		return config.ReasonWrongMIGStrategy, fmt.Sprintf("%s (%s)", a.otherStrategy(seen, under), seen.Blockers())
	}
	return config.ReasonCapacityMismatch, seen.Blockers() + "; see the device plugin's log on this node"
}

// causePatience is how long capacity is missing before a cause is told of it in the middle of a change: by then kubelet has forgotten what
// the device plugin offered before, and the next one has begun to offer.
const causePatience = 10 * time.Second

// otherStrategy names the strategy under which the device plugin evidently runs, and where to set the one that is needed.
func (a *Agent) otherStrategy(seen state.Observed, under config.MIGStrategy) string {
	set := fmt.Sprintf("set MIG_STRATEGY=%[1]s in the environment of its DaemonSet, or flags.migStrategy: %[1]s in its config", seen.Capacity.Strategy)
	switch told := seen.ExplicitStrategy(); {
	case a.settings.MIGStrategy != config.MIGStrategyAuto:
		set = fmt.Sprintf("migStrategy of the agent's settings is %s: %s; or set migStrategy of the settings to auto", seen.Capacity.Strategy, set)
	case told != "":
		set = "its environment or arguments say so, and it does otherwise: see its log on this node"
	case seen.Plugin.Current != nil && seen.Plugin.Current.MIGStrategy == seen.Capacity.Strategy:
		set = "its config says so, which it has not read: delete its pod on this node"
	}
	return fmt.Sprintf("the device plugin runs under the MIG strategy %s, by what it offers, and %s is needed: %s", under, seen.Capacity.Strategy, set)
}

// removeGhosts takes off the node what ghosts it has, where the settings say so. Kubelet does not put back what it has forgotten, which takes it
// five minutes: until then the capacity is not 0, and is left to it.
func (a *Agent) removeGhosts(ctx context.Context, seen state.Observed, converged bool) {
	if a.settings.Ghosts != config.GhostsRemove || !converged {
		return
	}
	var patch []map[string]any
	var names []string
	for _, name := range capacity.Ghosts(seen.Kubelet.Offered, seen.Node.Status.Allocatable) {
		if capacity.Count(seen.Node.Status.Capacity, name) > 0 {
			continue
		}
		names = append(names, name)
		for _, list := range []string{"capacity", "allocatable"} {
			at := "/status/" + list + "/" + strings.ReplaceAll(name, "/", "~1")
			patch = append(patch, map[string]any{"op": "test", "path": at, "value": "0"}, map[string]any{"op": "remove", "path": at})
		}
	}
	if len(patch) == 0 {
		return
	}
	body, err := json.Marshal(patch)
	if err == nil {
		api, cancel := context.WithTimeout(ctx, a.settings.Timeouts.APICall)
		defer cancel()
		_, err = a.client.CoreV1().Nodes().Patch(api, a.node, types.JSONPatchType, body, metav1.PatchOptions{FieldManager: nodewrite.FieldManager}, "status")
	}
	if err != nil {
		a.log.Warn("removing resources of former configs from the node", zap.Strings("resources", names), zap.Error(err))
		return
	}
	a.eventf(seen.Node, corev1.EventTypeNormal, config.ReasonReleased, "removed resources of former configs from the node, as ghosts: remove says: %s", strings.Join(names, ", "))
}
