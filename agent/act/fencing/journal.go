package fencing

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// forgetFormerTarget drops the counts and times of the former target, if the next journal has a new one.
func (f *Fencing) forgetFormerTarget(in act.Input) {
	former := ""
	if in.Seen.Journal != nil {
		former = in.Seen.Journal.Target
	}
	if !in.Want.Undo && former != in.Want.Name {
		f.Retries.ForgetFailures()
		f.Timing.Forget(f.Clock.Now())
	}
}

// journalWith returns the journal, extended by what the agent must restore after the steps. It writes nothing.
func (f *Fencing) journalWith(in act.Input) (*journal.Journal, error) {
	j := &journal.Journal{
		Operation: cmp.Or(f.Slot.Claim(), uuid.NewString()), BootID: in.Seen.Boot.ID,
		Verified: in.Seen.Capacity.Verified || in.Seen.Leftovers.Orphan.Exists(), // after leftovers the agent releases the node only with a verified capacity
		Started:  f.Clock.Stamp(), ModesOnly: in.Seen.Owner.Kind == api.OwnerDRADynamic,
	}
	if in.Seen.Journal != nil {
		copied := *in.Seen.Journal
		j = &copied
		j.Previous, j.Parked = slices.Clone(j.Previous), false
	}
	if !in.Want.Undo && j.Target != in.Want.Name { // the deadlines count for each target
		j.Target, j.Started = in.Want.Name, f.Clock.Stamp()
		j.NoReset, j.Reboots, j.RebootAsked, j.Forced = nil, nil, time.Time{}, in.Seen.Forces(in.Want)
		if known := in.Seen.Refusal(); known != nil && known.Boot == in.Seen.Boot.ID {
			j.NoReset = known
		}
	}
	if in.Seen.Edited(in.Want) {
		j.Forced = in.Seen.Forces(in.Want)
	}
	if !in.Want.Undo {
		j.Fingerprint = in.Want.Fingerprint
	}
	recordLayouts(j, in)
	recordTaken(j, in)
	recordKept(j, in.Seen.Leftovers.Orphan.Kept)
	if in.Seen.Journal == nil && in.Steps[0].Kind == plan.Adopt {
		j.Undo = cmp.Or(in.Seen.Failed(in.Want), in.Want.Left) // the agent does not retry a failed request
	}
	return j, f.notePlugin(j, in)
}

// recordLayouts records the layout of the GPUs that the steps change.
func recordLayouts(j *journal.Journal, in act.Input) {
	for _, gpu := range in.Seen.GPUs {
		if !slices.ContainsFunc(in.Steps, func(s plan.Step) bool { return s.GPU == gpu.UUID && s.Traits().ShapesPlugin }) {
			continue
		}
		known := len(j.Previous)
		j.RecordLayout(gpu)
		if _, asked := in.Want.Targets[gpu.UUID]; !asked && len(j.Previous) > known {
			j.Previous[known].Foreign = true // it is reset, since it is not well
		}
	}
}

// notePlugin adds the device plugin's pods that have read the former GPUs, and its config.
func (f *Fencing) notePlugin(j *journal.Journal, in act.Input) error {
	j.Strategy, j.ByClaims = in.Seen.ExplicitStrategy(), in.Seen.Owner.ByClaims()
	shapes := plan.Any(in.Steps, func(t plan.Traits) bool { return t.ShapesPlugin })
	if shapes {
		j.Operands = operandsOf(*j, offer.Of(in.Seen).Pods())
	}
	changes := plan.Has(in.Steps, plan.WriteSharing)
	if in.Seen.Plugin.Method == "" || j.Plugin != nil && (!j.Plugin.Stays || !changes) {
		return nil
	}
	former, err := f.Handover.FormerConfig(in.Seen, in.Want)
	if err != nil {
		return err
	}
	former.Stays = !changes
	j.Plugin = former
	return nil
}

// operandsOf returns the UIDs of the plugin's present pods for the journal: those in it and the new ones. It drops pods that are gone, since there
// may be any number of them while the agent waits.
func operandsOf(j journal.Journal, pods []corev1.Pod) []string {
	var out []string
	for _, uid := range j.Operands {
		if slices.ContainsFunc(pods, func(p corev1.Pod) bool { return string(p.UID) == uid }) {
			out = append(out, uid)
		}
	}
	for _, pod := range pods {
		if !j.RanBefore(string(pod.UID)) {
			out = append(out, string(pod.UID))
		}
	}
	return out
}

// recordTaken notes in the journal what the steps take from operands and units, and an agent's leftovers on the node.
func recordTaken(j *journal.Journal, in act.Input) {
	paused := maps.Clone(in.Seen.Leftovers.Orphan.Labels)
	if paused == nil {
		paused = map[string]string{}
	}
	j.Stopped = slices.Clone(j.Stopped)
	for _, s := range in.Steps {
		switch {
		case s.Kind == plan.PauseOperands && s.Label != "" && in.Seen.Node.Labels[s.Label] != fence.PausedValue:
			paused[s.Label] = in.Seen.Node.Labels[s.Label]
		case s.Kind == plan.StopUnits && !slices.Contains(j.Stopped, s.Unit):
			j.Stopped = append(j.Stopped, s.Unit)
		}
	}
	for label, value := range j.Paused { // the values that the journal holds already are older
		paused[label] = value
	}
	j.Paused = paused
	for _, unit := range in.Seen.Leftovers.Orphan.Host.Stopped {
		if !slices.Contains(j.Stopped, unit) {
			j.Stopped = append(j.Stopped, unit)
		}
	}
	for _, gpu := range in.Seen.Leftovers.Orphan.Host.Persistent {
		if !slices.Contains(j.Persistent, gpu) {
			j.Persistent = append(slices.Clone(j.Persistent), gpu)
		}
	}
	if in.Seen.Leftovers.Orphan.Cordon {
		j.Cordoned, j.WasUnschedulable = true, false
	}
}

// recordKept notes the annotations for other tools that an agent has left on the node without a journal.
func recordKept(j *journal.Journal, left []string) {
	j.Kept = slices.Clone(j.Kept)
	for _, key := range left {
		if !slices.Contains(j.Kept, key) {
			j.Kept = append(j.Kept, key)
		}
	}
}

// keep notes the annotations that the fence sets for other tools: those that the node lacks. A user's own annotation does not change.
func keep(j *journal.Journal, seen *state.Observed) {
	for _, key := range config.FenceAnnotations() {
		_, there := seen.Node.Annotations[key]
		if there || slices.Contains(j.Kept, key) || key == config.AnnotationCordonReason && !slices.ContainsFunc(seen.Pods, isSlurmNode) {
			continue
		}
		j.Kept = append(j.Kept, key)
	}
}

// isSlurmNode reports whether Slinky's slurm-operator has put the pod's name and label on it: it drains such a pod in Slurm when its node is cordoned.
func isSlurmNode(pod corev1.Pod) bool {
	for label := range pod.Labels {
		if strings.HasPrefix(label, config.LabelSlurmNodePrefix) {
			return true
		}
	}
	return false
}

// cordonReason is what Slurm shows for the cordon.
func cordonReason(j *journal.Journal) string { return "change to " + j.Target }
