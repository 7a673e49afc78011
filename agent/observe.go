package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/capacity"
	"github.com/gpuslice/gpuslice/agent/fleet"
	"github.com/gpuslice/gpuslice/agent/hostrecord"
	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/agent/nodekeys"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/retried"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// observed is one look at everything that decisions are made by, in sections. Each section is filled by one function, named after it.
type observed struct {
	node         *corev1.Node
	marks        marksSeen
	boot         bootSeen
	journal      *journal.Journal
	record       recordSeen
	files        filesSeen
	pool         poolSeen
	gpus         []nvml.GPU
	specs        []string // CDI specs that describe other GPU instances than there are
	reboots      plan.Reboots
	pods         []corev1.Pod // all pods of the node
	kubelet      kubeletSeen
	devicePlugin devicePluginSeen
	plugin       pluginConfig // of the device plugin; looked at only where anything is asked of it, or owed to it
	pauses       []fence.Operand
	leftovers    leftoversSeen
	holders      holdersSeen
	units        []plan.Unit // of the host that may have to stop, or to start again
	started      startedSeen
	capacity     capacitySeen
	complete     bool // all of it was seen; otherwise the look ended early with an error

	gives bool   // the step that is performed gives back
	asks  string // fingerprint of the wish that it is performed for
}

// marksSeen is what the agent and other tools have written on the node object.
type marksSeen struct {
	tools   []fence.Marker
	fenced  bool
	startup *corev1.Taint // of a node that has just been registered: it keeps pods away
	upgrade string        // label that says that the driver is being upgraded
	// complete: the look has not ended before it.
	complete bool
}

// bootSeen is the host's boot, by its kernel.
type bootSeen struct {
	id  string // empty if it is not known
	err error  // why it is not
}

// recordSeen is what the host's record says, beside the journal.
type recordSeen struct {
	forged    bool       // the node has a journal that this host's agent did not write for it
	status    api.Status // what we last told, with what the record says has been learnt
	learnt    hostrecord.Learnt
	published nodekeys.Keys     // labels and taints that a profile of ours has put on the node
	owed      owedHost          // to the host, by a journal that was lost
	dropped   map[string]string // units that were stopped and are not started, and why
}

// filesSeen are the administrator's files.
type filesSeen struct {
	configs  *configMapFile // MIG configs, nil if none are configured
	profiles *configMapFile // our own catalog, nil if none is configured
}

// poolSeen is the node's pool, and when its nodes may be disturbed.
type poolSeen struct {
	config.Pool
	file config.Maintenance
	err  error // why the maintenance file cannot be read, which keeps the node from any change
	slot fleet.State
}

// kubeletSeen is what kubelet says.
type kubeletSeen struct {
	offered  capacity.Resources // what it would give out
	assigned holders.Assignments
	err      error // it does not answer: which pod has which device is not known
}

// devicePluginSeen are the pods of NVIDIA's programs that offer GPUs.
type devicePluginSeen struct {
	pods       []corev1.Pod
	mpsDaemons []corev1.Pod
	rivals     string // why it is not known which of the pods counts; empty if it is
	unpicked   string // which configs there are that nothing asks for, where nothing is asked for
}

// leftoversSeen is what an agent, or another tool, has left on the node.
type leftoversSeen struct {
	orphan     orphan
	migManager bool          // a mig-manager runs here
	adopts     bool          // what one has left is ours to clear away
	adoptsIn   time.Duration // what one has left is on the node, and ours to take on only then
}

// holdersSeen are those who hold GPUs, or parts of them.
type holdersSeen struct {
	pods         []holders.Pod    // with a GPU or a part of one
	processes    []holders.Client // that hold what goes; looked for only when something does
	err          error            // the host's process table cannot be looked at: who holds what goes is not known
	ofLibrary    []holders.Pod    // pods without a GPU that keep the library open and can be sent away
	beforeReboot []holders.Pod    // pods that have to leave before a reboot
}

// capacitySeen is how hardware, kubelet and node agree.
type capacitySeen struct {
	missing  []string // how they disagree
	proven   bool     // they did not, whatever is asked for
	proof    proof    // with this look, if it is the one that is decided by
	strategy config.MIGStrategy
}

// configMapFile is one key of a ConfigMap, as found.
type configMapFile struct {
	name   string // "ConfigMap namespace/name, key config.yaml"
	data   []byte
	absent bool  // there is no such ConfigMap, which is legal: it is optional
	err    error // it may not be read, or has no such key
}

// observe looks at the node, its pods, kubelet, the ConfigMap and the GPUs. It writes nothing, tells nothing, and lets go of nothing: what
// follows from the look is up to the pass.
// Node and pods are read from the API server, not from a cache: a stale cordon or pod list is how fences fail.
func (a *Agent) observe(ctx context.Context) (observed, error) {
	api, cancel := context.WithTimeout(ctx, a.settings.Timeouts.APICall)
	defer cancel()
	var seen observed
	var node *corev1.Node
	err := retried.Do(api, func() (err error) {
		node, err = a.client.CoreV1().Nodes().Get(api, a.node, metav1.GetOptions{})
		return err
	})
	if err != nil {
		return seen, fmt.Errorf("reading node %s: %w", a.node, err)
	}
	seen.node = node
	seen.marks.tools = fence.Markers(node, a.settings.Operands)
	seen.marks.fenced, seen.marks.startup = a.fence.Stands(node), a.fence.Startup(node)
	a.observeBoot(ctx, &seen)
	if err := a.observeRecord(ctx, &seen); err != nil {
		return seen, err
	}
	if err = a.observeFiles(api, &seen); err != nil {
		return seen, err
	}
	pods, err := a.podList.List(api)
	if err != nil {
		return seen, fmt.Errorf("listing the pods of node %s: %w", a.node, err)
	}
	if pods, err = a.believe(api, pods); err != nil {
		return seen, err
	}
	if err := a.observeUpgrade(&seen); err != nil {
		return seen, err
	}
	if seen.gpus, err = a.snapshot(ctx); err != nil {
		return seen, err
	}
	if seen.record.published = publishedBy(seen.record.learnt); a.record.absent {
		seen.record.published = a.publishedOn(&seen)
	}
	a.observeOwed(ctx, &seen)
	seen.pods = pods
	a.observeKubelet(ctx, &seen, pods)
	a.observeOthers(&seen)
	a.observeReboots(ctx, &seen, pods)
	a.observeSpecs(ctx, &seen)
	seen.started = a.observeStarted(ctx, seen)
	seen.complete = true
	return seen, nil
}

func (a *Agent) snapshot(ctx context.Context) ([]nvml.GPU, error) {
	call, cancel := context.WithTimeout(ctx, a.settings.Timeouts.DriverCall)
	defer cancel()
	return a.driver.Snapshot(call)
}

// observeFiles reads the files of the administrator. One that cannot be read ends the look only if something is asked for that takes it.
func (a *Agent) observeFiles(ctx context.Context, seen *observed) (err error) {
	want, _ := a.asked(seen.node)
	geometry := want.name != "" && want.label != config.LabelDevicePluginConfig
	if seen.files.configs, err = a.configMap(ctx, a.settings.MIGConfigMap); err != nil && geometry {
		return err
	}
	if seen.files.profiles, err = a.configMap(ctx, a.settings.Profiles); err != nil && geometry && want.label == config.LabelProfile {
		return err
	}
	if err = a.observeMaintenance(ctx, seen); err != nil && (want.name != "" || seen.journal != nil) {
		return err
	}
	if err != nil {
		seen.pool.err = err
	}
	return nil
}

// configMap reads a file of the administrator. That it is missing or broken is an observation, not an error: the generated
// configs still work.
func (a *Agent) configMap(ctx context.Context, ref config.ConfigMapKey) (*configMapFile, error) {
	if ref.Name == "" {
		return nil, nil
	}
	file := &configMapFile{name: fmt.Sprintf("ConfigMap %s/%s, key %s", ref.Namespace, ref.Name, ref.Key)}
	object, err := a.readConfigMap(ctx, ref.Namespace, ref.Name)
	switch {
	case apierrors.IsNotFound(err):
		file.absent = true
		return file, nil
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		file.err = fmt.Errorf("reading %s: %w", file.name, err)
		return file, nil
	case err != nil:
		file.err = fmt.Errorf("reading %s: %w", file.name, err)
		return file, file.err
	}
	data, ok := object.Data[ref.Key]
	if !ok {
		file.err = fmt.Errorf("%s: no such key; put the file there, or name its key in the settings", file.name)
	}
	file.data = []byte(data)
	return file, nil
}

func (a *Agent) readConfigMap(ctx context.Context, namespace, name string) (object *corev1.ConfigMap, err error) {
	err = retried.Do(ctx, func() (err error) {
		object, err = a.client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
		return err
	})
	return object, err
}

// observeKubelet sorts the pods into holders and operands, and compares the capacity. A kubelet that cannot be asked is
// no error: pods then count as holding anything, and no capacity is proven.
func (a *Agent) observeKubelet(ctx context.Context, seen *observed, pods []corev1.Pod) {
	call, cancel := context.WithTimeout(ctx, a.settings.Timeouts.APICall)
	defer cancel()
	assigned, err := a.kubelet.Assignments(call)
	if assigned.Premature(pods) {
		assigned, err = nil, holders.ErrKubeletStarting
	}
	if err == nil {
		seen.kubelet.offered, err = a.kubelet.Allocatable(call)
	}
	seen.kubelet.err = err
	seen.kubelet.assigned = assigned
	seen.holders.pods = holders.GPUPods(pods, assigned, nil)
	seen.devicePlugin.pods = a.operands(pods)
	seen.devicePlugin.mpsDaemons = a.ofNVIDIA(picked(pods, a.settings.MPS.PodSelector, a.settings.MPS.Containers))
	seen.devicePlugin.rivals = a.rivals(seen.devicePlugin.pods)
	a.prove(seen, nil)
	seen.capacity.proven = len(seen.capacity.missing) == 0
}

// prove compares the capacity with the hardware, and with the sharing that is wanted, if any is known.
func (a *Agent) prove(seen *observed, want *desiredPlugin) {
	seen.capacity.strategy = a.strategy(*seen, want)
	switch {
	case seen.kubelet.err != nil:
		seen.capacity.missing = []string{seen.kubelet.err.Error()}
	case seen.devicePlugin.rivals != "":
		seen.capacity.missing = []string{seen.devicePlugin.rivals}
	case want != nil && want.known:
		seen.capacity.missing = capacity.Mismatches(capacity.Shared(capacity.Expected(seen.gpus, seen.capacity.strategy).NamedBy(seen.kubelet.offered), want.sharing), seen.kubelet.offered, seen.node.Status.Allocatable)
		if want.sharing.Strategy == config.SharingMPS {
			seen.capacity.missing = append(seen.capacity.missing, seen.missingMPS()...)
		}
	default:
		seen.capacity.missing = capacity.Disagreements(capacity.Expected(seen.gpus, seen.capacity.strategy), seen.kubelet.offered, seen.node.Status.Allocatable)
	}
	seen.capacity.proof = a.proof
	a.awaitFeatures(seen, want)
	seen.capacity.proof.count(len(seen.capacity.missing) == 0, a.clock.Now())
}

// strategy is how the plugin presents MIG devices: as the settings say, or as it is told, above all by its environment.
func (a *Agent) strategy(seen observed, want *desiredPlugin) config.MIGStrategy {
	if a.settings.MIGStrategy != config.MIGStrategyAuto {
		return a.settings.MIGStrategy
	}
	if s := seen.toldStrategy(); s != "" {
		return s
	}
	if want != nil && want.strategy != "" {
		return want.strategy
	}
	if want != nil && want.sharing.Strategy == config.SharingMPS {
		return config.MIGStrategyNone // which a plugin is told nothing has, and mixed would be none that MPS goes with
	}
	return a.settings.MIGStrategy.On(seen.node.Labels[config.LabelMIGStrategy])
}

// toldStrategy is what the plugin is told besides its config. While it is away in the middle of a change, the journal knows.
func (s observed) toldStrategy() config.MIGStrategy {
	for _, pod := range s.devicePlugin.pods {
		if told := toldStrategy(pod); told != "" {
			return told
		}
	}
	if s.journal != nil {
		return s.journal.Strategy
	}
	return ""
}

// toldStrategy is the MIG strategy of the plugin's arguments or environment, which win over its config file in this order.
func toldStrategy(pod corev1.Pod) config.MIGStrategy {
	var env config.MIGStrategy
	for _, c := range pod.Spec.Containers {
		for i, arg := range slices.Concat(c.Command, c.Args) {
			all := slices.Concat(c.Command, c.Args)
			if value, ok := strings.CutPrefix(arg, migStrategyFlag+"="); ok {
				return config.MIGStrategy(value)
			}
			if arg == migStrategyFlag && i+1 < len(all) {
				return config.MIGStrategy(all[i+1])
			}
		}
		for _, e := range c.Env {
			if e.Name == envMIGStrategy && e.Value != "" {
				env = config.MIGStrategy(e.Value)
			}
		}
	}
	return env
}

// How the plugin is told its MIG strategy.
const (
	migStrategyFlag = "--mig-strategy"
	envMIGStrategy  = "MIG_STRATEGY"
)

// picked are the pods that match a selector and have one of the containers, where any are named: one chart gives pods of several programs the
// same labels.
func picked(pods []corev1.Pod, any []labels.Selector, containers []string) []corev1.Pod {
	var out []corev1.Pod
	for i := range pods {
		has := len(containers) == 0 || slices.ContainsFunc(pods[i].Spec.Containers, func(c corev1.Container) bool { return slices.Contains(containers, c.Name) })
		if has && !ended(&pods[i]) && matches(&pods[i], any) {
			out = append(out, pods[i])
		}
	}
	return out
}

func matches(pod *corev1.Pod, any []labels.Selector) bool {
	return slices.ContainsFunc(any, func(s labels.Selector) bool { return s.Matches(labels.Set(pod.Labels)) })
}

// observeOthers looks what else on the node has a say: operands, clients of the library, other tools, and what an agent has
// left there.
func (a *Agent) observeOthers(seen *observed) {
	seen.leftovers.migManager = runsMIGManager(seen.pods)
	seen.leftovers.adopts = a.adopts(seen.pods)
	seen.leftovers.orphan = a.orphanOn(seen)
	labels := union(a.settings.Operands, slices.Sorted(maps.Keys(seen.leftovers.orphan.labels)))
	if seen.journal != nil {
		labels = union(labels, slices.Sorted(maps.Keys(seen.journal.Paused)))
	}
	seen.pauses = fence.Operands(seen.node, seen.pods, labels)
	a.observeClients(seen)
}

// planned is what the planner needs of the look.
func (a *Agent) planned(s observed, want desired) plan.Observed {
	out := plan.Observed{
		GPUs: s.gpus, Fenced: s.marks.fenced, Startup: s.marks.startup != nil, Undo: want.undo, Reboots: s.reboots, CDI: s.specs,
		Capacity: plan.Capacity{Agreed: s.capacity.proof.agreed}, Orphaned: s.leftovers.orphan.is(), Breached: s.uncordoned() && !want.undo &&
			(a.settingsFor(want).Drain.OnUncordon == config.UncordonRefence || s.other(want)),
		Slot:  a.plannedSlot(s, want),
		Units: s.units, Keys: want.keys != nil && !want.undo && nodekeys.Unpublished(s.node, s.record.published, *want.keys),
	}
	if want.plugin != nil {
		out.Plugin = a.plannedPlugin(s, want)
	}
	if j := s.journal; j != nil {
		out.Journal = plan.Journal{
			Owed: true, Cordoned: j.Cordoned, Other: s.other(want) || s.edited(want), Cuts: j.Cut(), Persistent: j.PersistentGPUs(), Proven: j.Proven,
			Paused: j.PausedLabels(), Stopped: j.StoppedUnits(), MPS: j.ChangesPlugin() && j.Plugin.MPS,
		}
	}
	for _, p := range s.mustLeave() {
		pod := plannedPod(p)
		pod.Replicas = replicas(s.kubelet.assigned[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}])
		out.Pods = append(out.Pods, pod)
	}
	for _, p := range s.holders.ofLibrary {
		out.Clients = append(out.Clients, plannedPod(p))
	}
	out.Pauses, out.Operands = s.plannedOperands()
	return out
}

// plannedOperands are the operands that go by a label of the node, and the device plugin's pods.
func (s observed) plannedOperands() (pauses []plan.Pause, plugins []plan.Operand) {
	byLabel := map[string]bool{}
	for _, o := range s.pauses {
		p := plan.Pause{Label: o.Label, Plugin: o.Label == config.LabelDevicePlugin, Paused: s.pausedHere(o)}
		if !p.Paused && (o.State != fence.OperandRunning || keepsClaims(o)) {
			continue
		}
		for _, pod := range o.Pods {
			p.Pods = append(p.Pods, plannedPod(pod))
			byLabel[string(pod.UID)] = true
		}
		pauses = append(pauses, p)
	}
	for _, p := range s.devicePlugin.pods {
		plugins = append(plugins, plan.Operand{
			Pod:     plan.Pod{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID)},
			Stale:   s.journal != nil && s.journal.RanBefore(string(p.UID)),
			Returns: holders.Tolerates(p.Spec.Tolerations, fenceTaint()),
			ByLabel: byLabel[string(p.UID)],
		})
	}
	return pauses, plugins
}

func plannedPod(p holders.Pod) plan.Pod {
	return plan.Pod{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Devices: p.Devices, Known: p.DevicesKnown}
}

// failed is the failure that is known of the wish: while it is being undone from the journal, after that from the status.
func (s observed) failed(want desired) *api.Failure {
	if s.givenUp(want) {
		return s.journal.Undo
	}
	if f := s.record.status.Failed; f != nil && f.Wish == want.fingerprint && !f.Later {
		return f
	}
	return nil
}

// kept is the failure that the status must go on telling: the one that is known of the wish, or, while nobody knows what
// is wished because the catalog cannot be read, the last one.
func (s observed) kept(want desired) *api.Failure {
	if f := s.failed(want); f != nil && !f.Later {
		return f
	}
	if want.name != "" && want.fingerprint == "" {
		return s.record.status.Failed
	}
	return nil
}

// foreignCordon reports whether the node is cordoned by somebody else. Who has cordoned it is in managedFields; where
// those are stripped, a cordon under our own taint is ours, unless the journal says that it was there before.
func (s observed) foreignCordon() bool {
	if !s.node.Spec.Unschedulable {
		return false
	}
	who, _, ok := fence.Cordoner(s.node)
	switch {
	case ok && who != "":
		return who != nodewrite.FieldManager
	case s.journal != nil && s.journal.Cordoned:
		return s.journal.WasUnschedulable
	default:
		return !s.marks.fenced
	}
}

// givenUp reports whether what is asked for is what the journal says cannot be done.
func (s observed) givenUp(want desired) bool {
	return s.journal != nil && s.journal.Undo != nil && s.journal.Undo.Wish == want.fingerprint
}

// other reports whether the journal is about another target than the one that is asked for.
func (s observed) other(want desired) bool {
	return s.journal != nil && !want.undo && s.journal.Target != want.name
}

// edited reports whether the journal is about what the target's name meant before somebody has edited it. A journal of an agent that
// did not note it is not.
func (s observed) edited(want desired) bool {
	return s.journal != nil && !want.undo && !s.other(want) && s.journal.Wish != "" && want.fingerprint != "" && s.journal.Wish != want.fingerprint
}

// operation identifies the change that is under way, across restarts of the agent; empty if there is none.
func (s observed) operation() string {
	if s.journal == nil {
		return ""
	}
	return s.journal.Operation
}

func (s observed) blockers() string { return strings.Join(s.capacity.missing, "; ") }
