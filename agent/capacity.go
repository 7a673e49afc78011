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
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// proofInterval is the least time between two looks that both count as proof. A plugin that registers and fails right
// after, or registers twice, does so within a second or two.
const proofInterval = 2 * time.Second

// proof is how often hardware, kubelet and node were seen to agree, and when last.
type proof struct {
	agreed     int // looks in a row
	at         time.Time
	staleSince time.Time // when labels of GPU feature discovery were first seen to lag behind the change
}

func (p *proof) forget(time.Time) { *p = proof{} }

// count adds a look, if it comes long enough after the last.
func (p *proof) count(agrees bool, now time.Time) {
	switch {
	case !agrees:
		p.agreed = 0
	case p.agreed == 0 || now.Sub(p.at) >= proofInterval:
		p.agreed++
		p.at = now
	}
}

// verification is the present wait for capacity.
type verification struct {
	began     time.Time // zero if none is under way
	restarted bool      // the device plugin was started anew for want of capacity
}

func (v *verification) forget(time.Time) { v.began = time.Time{} }

// featurePatience is how long the labels of GPU feature discovery are waited for: it looks each minute, and node feature discovery
// carries over what it finds. They are a hint that pods are placed by, and no proof.
const featurePatience = 90 * time.Second

// awaitFeatures treats stale labels of GPU feature discovery as missing capacity for up to featurePatience, in the middle of a change.
func (a *Agent) awaitFeatures(seen *observed, want *desiredPlugin) {
	if want == nil {
		return
	}
	stale := seen.staleFeatures(want)
	switch {
	case seen.journal == nil || len(stale) == 0:
		seen.capacity.proof.staleSince = time.Time{}
	case len(seen.capacity.missing) > 0:
	case seen.capacity.proof.staleSince.IsZero():
		seen.capacity.proof.staleSince = a.clock.Now()
		seen.capacity.missing = stale
	case a.clock.Since(seen.capacity.proof.staleSince) < min(featurePatience, a.settings.Timeouts.Capacity/2):
		seen.capacity.missing = stale
	}
}

// staleFeatures are the labels by which GPU feature discovery tells of another sharing than is wanted.
func (s observed) staleFeatures(want *desiredPlugin) []string {
	if want == nil || !want.known {
		return nil
	}
	return capacity.StaleFeatures(capacity.Expected(s.gpus, s.capacity.strategy), want.sharing, s.node.Labels)
}

// lacksDevicePlugin reports whether the node has no device plugin at all, though the agent keeps none away.
func (s observed) lacksDevicePlugin() bool {
	noneOffers := s.kubelet.err == nil && len(s.devicePlugin.pods) == 0 && len(capacity.Offered(s.kubelet.offered)) == 0
	return noneOffers && !s.marks.fenced && s.marks.startup == nil && !s.paused()
}

// noPluginOffers says of such a node what it lacks.
const noPluginOffers = "no device plugin offers the GPUs to kubelet, and no pod of this node matches devicePlugin.podSelector of the settings"

// devicePluginAdvice is what people can do about it.
func (a *Agent) devicePluginAdvice(seen observed) string {
	text := "deploy NVIDIA's device plugin, or see why its DaemonSet has no pod on this node: it has to select the node"
	var taints []string
	for _, t := range seen.node.Spec.Taints {
		if t.Effect != corev1.TaintEffectPreferNoSchedule {
			taints = append(taints, t.ToString())
		}
	}
	if len(taints) > 0 {
		text += ", and to tolerate " + listed(taints)
	}
	if value, there := seen.node.Labels[config.LabelDevicePlugin]; there && value != fence.DeployedValue {
		text += fmt.Sprintf("; label %s=%s keeps that of the GPU Operator away", config.LabelDevicePlugin, value)
	}
	return text + a.pretenders(seen.pods)
}

// missingCapacity says what is missing of the capacity, with the cause and what people can do where that is known.
func (a *Agent) missingCapacity(seen observed) (reason config.Reason, text string) {
	if seen.lacksDevicePlugin() {
		return config.ReasonNoDevicePlugin, fmt.Sprintf("%s; %s (%s)", noPluginOffers, a.devicePluginAdvice(seen), seen.blockers())
	}
	if under := seen.runsUnder(); under != "" {
		return config.ReasonWrongMIGStrategy, fmt.Sprintf("%s (%s)", a.otherStrategy(seen, under), seen.blockers())
	}
	return config.ReasonCapacityMismatch, seen.blockers() + "; see the device plugin's log on this node"
}

// causePatience is how long capacity is missing before a cause is told of it in the middle of a change: by then kubelet has forgotten what
// the device plugin offered before, and the next one has begun to offer.
const causePatience = 10 * time.Second

// runsUnder is the MIG strategy under which the device plugin evidently runs, if that is another than it is taken to have.
func (s observed) runsUnder() config.MIGStrategy {
	if s.kubelet.err != nil || s.devicePlugin.rivals != "" {
		return ""
	}
	return capacity.RunsUnder(s.gpus, s.kubelet.offered, s.capacity.strategy)
}

// otherStrategy names the strategy under which the device plugin evidently runs, and where to set the one that is needed.
func (a *Agent) otherStrategy(seen observed, under config.MIGStrategy) string {
	set := fmt.Sprintf("set MIG_STRATEGY=%[1]s in the environment of its DaemonSet, or flags.migStrategy: %[1]s in its config", seen.capacity.strategy)
	switch told := seen.toldStrategy(); {
	case a.settings.MIGStrategy != config.MIGStrategyAuto:
		set = fmt.Sprintf("migStrategy of the agent's settings is %s: %s; or set migStrategy of the settings to auto", seen.capacity.strategy, set)
	case told != "":
		set = "its environment or arguments say so, and it does otherwise: see its log on this node"
	case seen.plugin.current != nil && seen.plugin.current.MIGStrategy == seen.capacity.strategy:
		set = "its config says so, which it has not read: delete its pod on this node"
	}
	return fmt.Sprintf("the device plugin runs under the MIG strategy %s, by what it offers, and %s is needed: %s", under, seen.capacity.strategy, set)
}

// removeGhosts takes off the node what ghosts it has, where the settings say so. Kubelet does not put back what it has forgotten, which takes it
// five minutes: until then the capacity is not 0, and is left to it.
func (a *Agent) removeGhosts(ctx context.Context, seen observed, converged bool) {
	if a.settings.Ghosts != config.GhostsRemove || !converged {
		return
	}
	var patch []map[string]any
	var names []string
	for _, name := range capacity.Ghosts(seen.kubelet.offered, seen.node.Status.Allocatable) {
		if capacity.Count(seen.node.Status.Capacity, name) > 0 {
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
	a.eventf(seen.node, corev1.EventTypeNormal, config.ReasonReleased, "removed resources of former configs from the node, as ghosts: remove says: %s", strings.Join(names, ", "))
}
