package agent_test

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// situation is a node of which something is asked.
type situation struct {
	models  string // oneH100 if empty
	prepare func(w *world)
	each    func(w *world) // done before the question, and again before the label
	label   string         // that asks; that of MIG configs if empty
	name    string         // what it asks for; all-1g.10gb if empty
	allow   []string       // what the question allows, and the user who sets the label; nothing if empty
	want    string         // the verdict, in the words of verdictOf and of happens
}

// controlled has the world's pod be of a controller, which brings it back elsewhere.
func controlled(p *corev1.Pod) {
	p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "api", UID: "api", Controller: ptr.To(true)}}
}

// onDisk gives the pod files on the node's disk, or in its memory.
func onDisk(medium corev1.StorageMedium) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		controlled(p)
		p.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: medium}}}}
	}
}

// hosts has a pod run on the node's first GPU.
func hosts(change func(*corev1.Pod), then ...func(w *world)) func(w *world) {
	return func(w *world) {
		w.turn()
		w.pod("holder", w.gpus.UUIDs()[0], change)
		for _, do := range then {
			do(w)
		}
	}
}

// drains changes how the settings drain the node.
func drains(change func(d *config.Drain)) func(w *world) {
	return func(w *world) {
		change(&w.settings.Drain)
		w.restart()
	}
}

// rules has the first rule of the drain treat the pods of the team like that.
func rules(action config.DrainAction) func(w *world) {
	return drains(func(d *config.Drain) {
		d.Rules = []config.DrainRule{{Namespaces: []string{"team"}, Selector: labels.Everything(), Action: action, For: time.Hour}}
	})
}

func maintains(text func() string) func(w *world) {
	return func(w *world) { w.setMaintenance(text()) }
}

// pooled puts the node into a pool of two, and changes the other node.
func pooled(other func(n *corev1.Node), then ...func(w *world)) func(w *world) {
	return func(w *world) {
		w.pool()
		n, err := w.client.CoreV1().Nodes().Get(w.t.Context(), "gpu-2", metav1.GetOptions{})
		if err != nil {
			w.t.Fatal(err)
		}
		other(n)
		if _, err := w.client.CoreV1().Nodes().Update(w.t.Context(), n, metav1.UpdateOptions{}); err != nil {
			w.t.Fatal(err)
		}
		for _, do := range then {
			do(w)
		}
	}
}

// paused pauses the pool.
func paused(w *world) {
	_, err := w.client.CoordinationV1().Leases("gpuslice").Create(w.t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Name: config.LeasePrefix + "research", Namespace: "gpuslice", Annotations: map[string]string{config.AnnotationPaused: "audit"},
	}}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
}

const atOnce = "at once"

// always is what holds of the year in which the tests begin.
const (
	always     = "windows: [{notBefore: '1999-01-01T00:00:00Z', notAfter: '2001-01-01T00:00:00Z'}]\nestimate: 10m\njitter: 0s\n"
	millennium = always + "freezes: [{from: '1999-12-31T00:00:00Z', to: '2000-01-02T00:00:00Z', reason: the millennium}]\n"
	noon       = "windows: [{days: [Sat], start: '12:00', duration: 2h}]\nestimate: 10m\njitter: 0s\n"
	caturday   = "windows: [{days: [Caturday], start: '22:00', duration: 6h}]\n"
)

func text(t string) func() string { return func() string { return t } }

const strictProfiles = `
apiVersion: gpuslice.io/v1alpha1
kind: Profiles
profiles:
  strict:
    mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]
    drain: {emptyDir: refuse}
  lenient:
    mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]
    drain: {emptyDir: evict}
  marked:
    mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]
    labels: {workload-type: research}
  crowded:
    mig: [{gpus: {all: true}, enabled: true, instances: {3g.40gb: 2, 1g.10gb: 1}}]
`

var situations = map[string]situation{
	"an empty node":             {want: atOnce},
	"a pod that comes back":     {prepare: hosts(controlled), want: atOnce},
	"as it is already":          {name: "all-disabled", want: "nothing to do"},
	"a name that is not known":  {name: "all-9g.999gb", want: "refused: UnknownConfig"},
	"a GPU without MIG":         {models: "gpus:\n- model: T4\n", name: "all-1g.10gb", want: "refused: NoCapableGPU"},
	"more than fits":            {prepare: func(w *world) { w.profiles(strictProfiles) }, label: config.LabelProfile, name: "crowded", want: "refused: ImpossibleGeometry"},
	"another's key on the node": {prepare: func(w *world) { w.profiles(strictProfiles); w.set("workload-type", "other") }, label: config.LabelProfile, name: "marked", want: "refused: NodeKeyConflict"},
	"a catalog with a mistake":  {prepare: func(w *world) { w.profiles("profiles: [") }, label: config.LabelProfile, name: "strict", want: "refused: InvalidCatalog"},
	"what has failed before": {prepare: func(w *world) {
		w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
		w.label("all-1g.10gb")
		w.settle(config.ReasonHardwareFailure)
	}, want: "refused: HardwareFailure"},
	"a label below a profile": {prepare: func(w *world) {
		w.profile("all-disabled")
		w.settle(config.ReasonConverged)
	}, want: "does not count"},

	"a hold":                       {prepare: func(w *world) { w.annotate(config.AnnotationHold, "audit") }, want: "held up: Held"},
	"an open window":               {prepare: hosts(controlled, maintains(text(always))), want: atOnce},
	"a window that opens later":    {prepare: hosts(controlled, maintains(text(noon))), want: "held up: AwaitingWindow"},
	"no window any more":           {prepare: hosts(controlled, maintains(func() string { return until(time.Now()) })), want: "held up: AwaitingWindow"},
	"a freeze":                     {prepare: hosts(controlled, maintains(text(millennium))), want: "held up: AwaitingWindow"},
	"a freeze on an empty node":    {prepare: maintains(text(millennium)), want: "held up: AwaitingWindow"},
	"a freeze, and force":          {prepare: hosts(controlled, maintains(text(millennium))), each: func(w *world) { w.annotate(config.AnnotationForce, config.ForceNow) }, want: atOnce},
	"a maintenance file in pieces": {prepare: hosts(controlled, maintains(text(caturday))), want: "held up: InvalidMaintenance"},

	"a pool with room":         {prepare: hosts(controlled, pooled(func(*corev1.Node) {})), want: atOnce},
	"a pool that is full":      {prepare: hosts(controlled, pooled(func(n *corev1.Node) { n.Spec.Unschedulable = true })), want: "held up: AwaitingSlot"},
	"a pool that is paused":    {prepare: hosts(controlled, pooled(func(*corev1.Node) {}, paused)), want: "held up: PoolPaused"},
	"a pool that spares none":  {prepare: hosts(controlled, pooled(func(*corev1.Node) {}, maintains(text(onePool[:len(onePool)-len("maxUnavailable: 1, pauseAfter: 2}]\n")]+"maxUnavailable: 0}]\n")))), want: "held up: AwaitingSlot"},
	"another node has a slot":  {prepare: hosts(controlled, pooled(func(*corev1.Node) {})), each: taken, want: "held up: AwaitingSlot"},
	"a paused pool and a hold": {prepare: hosts(controlled, pooled(func(*corev1.Node) {}, paused), func(w *world) { w.annotate(config.AnnotationHold, "") }), want: "held up: Held"},

	"a budget that is used up": {prepare: hosts(controlled, func(w *world) {
		w.budgetKeepsAll("The disruption budget train needs 2 healthy pods and has 2 currently")
	}), want: "held up: EvictionBlocked"},
	"a bare pod, refused":                 {prepare: hosts(bare, drains(func(d *config.Drain) { d.UnmanagedPods = config.DrainRefuse })), want: "held up: EvictionBlocked"},
	"a bare pod, evicted":                 {prepare: hosts(bare, drains(func(d *config.Drain) { d.UnmanagedPods = config.DrainEvict })), want: atOnce},
	"a bare pod, allowed by the question": {prepare: hosts(bare, drains(func(d *config.Drain) { d.UnmanagedPods = config.DrainRefuse })), allow: []string{config.FieldUnmanagedPods}, want: atOnce},
	"a bare pod with files, of which the question allows one": {prepare: hosts(func(p *corev1.Pod) { files("")(p); bare(p) }, drains(func(d *config.Drain) {
		d.UnmanagedPods, d.EmptyDir = config.DrainRefuse, config.DrainRefuse
	})), allow: []string{config.FieldEmptyDir}, want: "held up: EvictionBlocked"},
	"a bare pod, allowed on the node": {prepare: hosts(bare, drains(func(d *config.Drain) { d.UnmanagedPods = config.DrainRefuse })), each: func(w *world) {
		w.annotate(config.AnnotationAllowEviction, config.Allowance(config.LabelMIGConfig, "all-1g.10gb", config.FieldUnmanagedPods))
	}, want: atOnce},
	"files on disk, refused":                  {prepare: hosts(onDisk(""), drains(func(d *config.Drain) { d.EmptyDir = config.DrainRefuse })), want: "held up: EvictionBlocked"},
	"files on disk, evicted":                  {prepare: hosts(onDisk(""), drains(func(d *config.Drain) { d.EmptyDir = config.DrainEvict })), want: atOnce},
	"files in memory":                         {prepare: hosts(onDisk(corev1.StorageMediumMemory), drains(func(d *config.Drain) { d.EmptyDir = config.DrainRefuse })), want: atOnce},
	"files on disk, by the profile":           {prepare: hosts(onDisk(""), func(w *world) { w.profiles(strictProfiles) }), label: config.LabelProfile, name: "strict", want: "held up: EvictionBlocked"},
	"files on disk, for the profile":          {prepare: hosts(onDisk(""), drains(func(d *config.Drain) { d.EmptyDir = config.DrainRefuse }), func(w *world) { w.profiles(strictProfiles) }), label: config.LabelProfile, name: "lenient", want: atOnce},
	"a rule that refuses":                     {prepare: hosts(controlled, rules(config.DrainRefuse)), want: "held up: EvictionBlocked"},
	"a rule that waits":                       {prepare: hosts(controlled, rules(config.DrainWait)), want: atOnce},
	"a gradual drain":                         {prepare: hosts(controlled, drains(func(d *config.Drain) { d.Mode, d.GradualFor = config.DrainGradual, time.Hour })), want: atOnce},
	"deletion after the deadline":             {prepare: hosts(controlled, drains(func(d *config.Drain) { d.AfterDeadline = config.AfterDeadlineDelete })), want: atOnce},
	"a static pod":                            {prepare: hosts(static), want: "held up: EvictionBlocked"},
	"a tenant's DaemonSet":                    {prepare: hosts(tolerant), want: atOnce},
	"another tool at work":                    {prepare: func(w *world) { w.annotate("weave.works/kured-reboot-in-progress", "2000-01-01T00:00:00Z") }, want: "held up: OtherMaintenance"},
	"kubelet is silent":                       {prepare: hosts(controlled, func(w *world) { w.kubeletSilent = true }), want: "held up: KubeletUnavailable"},
	"a process of no pod":                     {prepare: func(w *world) { w.turn(); w.startGPUProcess(w.gpus.UUIDs()[0], 5000, "python", "0::/user.slice") }, want: "held up: GPUInUse"},
	"a process table that is closed":          {prepare: func(w *world) { _ = os.Remove(filepath.Join(w.processTable, "self")) }, want: "held up: HoldersUnknown"},
	"no device plugin":                        {prepare: func(w *world) { w.noPlugin = true }, want: "held up: NoDevicePlugin"},
	"as it is already, and kubelet is silent": {name: "all-disabled", prepare: func(w *world) { w.settle(config.ReasonNotRequested); w.kubeletSilent = true }, want: "held up: KubeletUnavailable"},
	"as it is already, and no device plugin": {name: "all-disabled", prepare: func(w *world) {
		w.settle(config.ReasonNotRequested)
		w.noPlugin = true
		for _, p := range w.podsIn("kube-system") {
			if err := w.client.Tracker().Delete(podResource, p.Namespace, p.Name); err != nil {
				w.t.Fatal(err)
			}
		}
	}, want: "held up: NoDevicePlugin"},
	"as it is already, before the second observation": {name: "all-disabled", prepare: func(w *world) { w.restart() }, want: "nothing to do"},
	"no driver": {prepare: func(w *world) { w.unloadDriver(); w.restart() }, want: "held up: DriverNotLoaded"},
	"the host's disk is read-only": {prepare: func(w *world) {
		w.settle(config.ReasonNotRequested)
		w.disk.refuses = func(journal.Record) error { return errors.New("read-only file system") }
	}, want: "held up: HostRecordUnavailable"},
	"instances in free slots, and the host's disk is read-only": {models: cutH100, prepare: func(w *world) {
		w.settle(config.ReasonNotRequested)
		w.disk.refuses = func(journal.Record) error { return errors.New("read-only file system") }
	}, want: "held up: HostRecordUnavailable"},
	"instances in free slots, and kubelet is silent": {models: cutH100, prepare: func(w *world) { w.kubeletSilent = true }, want: "held up: KubeletUnavailable"},
	"the host's disk is silent":                      {prepare: func(w *world) { w.settle(config.ReasonNotRequested); w.disk.silent = true }, want: "held up: HostRecordUnavailable"},
	"the node shuts down":                            {prepare: func(w *world) { w.settle(config.ReasonNotRequested); w.host.down = true }, want: atOnce},
	"sharing without a way to give it":               {prepare: func(w *world) { w.profiles(sharingProfiles); w.turn() }, label: config.LabelProfile, name: "two", want: "refused: NoHandover"},
}

// tolerant makes the pod one of a DaemonSet that no taint keeps away.
func tolerant(p *corev1.Pod) {
	p.OwnerReferences = ofDaemonSet("tolerant")
	p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
}

// static makes the pod the image of one whose manifest is a file on the node.
func static(p *corev1.Pod) {
	p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: nodeName, UID: "node-uid", Controller: ptr.To(true)}}
	p.Annotations[corev1.MirrorPodAnnotationKey] = "x"
}

// taken has the other node of the pool take the slot, or renew it.
func taken(w *world) {
	slots, pool, other := w.otherNode()
	if err := slots.Renew(w.t.Context(), pool, other); err != nil {
		w.t.Fatal(err)
	}
}

// verdictOf is what an answer says, in few words.
func verdictOf(a api.Answer) string {
	switch {
	case a.Refused != "" && a.Reason == "":
		return "does not count"
	case a.Refused != "":
		return "refused: " + string(a.Reason)
	case a.HeldUp != "":
		return "held up: " + string(a.Reason)
	case len(a.Steps) == 0:
		return "nothing to do"
	default:
		return atOnce
	}
}

// verdictOfLabel is what the agent makes of the label within some passes, in the same words.
func (w *world) verdictOfLabel(label, name string) string {
	w.t.Helper()
	cordons := w.recordCordons()
	w.set(label, name)
	began := w.passesWithin(8, func() bool { return len(*cordons) > 0 || w.done(name)() })
	var s api.Status
	if w.node().Annotations[config.AnnotationStatus] != "" { // an agent that has never seen the GPUs writes none
		s = w.status()
	}
	switch {
	case began && len(*cordons) == 0:
		return "nothing to do"
	case began:
		return atOnce
	case w.node().Labels[config.LabelProfile] != "" && label != config.LabelProfile:
		return "does not count"
	case s.Phase == api.PhaseStalled:
		return "refused: " + string(w.reason())
	default:
		if s.Phase != api.PhaseWaiting && s.Phase != api.PhaseVerifying && s.Phase != "" {
			w.t.Errorf("the phase of a change that has not begun is %s", s.Phase)
		}
		return "held up: " + string(w.reason())
	}
}

// What a preview says of a change beside what the agent then does. The verdict has to come from the gates of the change itself.
func TestAPreviewSaysWhatTheAgentThenDoes(t *testing.T) {
	t.Parallel()
	if len(situations) < 30 {
		t.Fatalf("%d situations", len(situations))
	}
	for _, name := range slices.Sorted(maps.Keys(situations)) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { situations[name].agrees(t) })
		})
	}
}

func (s situation) agrees(t *testing.T) {
	t.Helper()
	label, name, models := s.label, s.name, s.models
	if label == "" {
		label = config.LabelMIGConfig
	}
	if name == "" {
		name = "all-1g.10gb"
	}
	if models == "" {
		models = oneH100
	}
	w := newWorld(t, models)
	w.settings.Drain.UnmanagedPods, w.settings.Drain.EmptyDir = config.DrainEvict, config.DrainEvict
	w.restart()
	if s.prepare != nil {
		s.prepare(w)
	}
	if s.each != nil {
		s.each(w)
	}
	before, cordons := w.snapshotOrNone(), w.recordCordons()
	given := w.ask(config.Allowance(label, name, s.allow...))
	if got := verdictOf(given); got != s.want {
		t.Errorf("the preview says %q, want %q: %+v", got, s.want, given)
	}
	if len(*cordons) > 0 || w.snapshotOrNone() != before {
		t.Error("to answer, the agent has changed something")
	}
	w.unannotate(config.AnnotationPreview)
	if s.each != nil {
		s.each(w)
	}
	if len(s.allow) > 0 {
		w.annotate(config.AnnotationAllowEviction, config.Allowance(label, name, s.allow...))
	}
	if got := w.verdictOfLabel(label, name); got != s.want {
		t.Errorf("what happens is %q, want %q; the node says %s", got, s.want, w.condition().Message)
	}
}

// snapshotOrNone is how the GPUs are cut; empty without a driver.
func (w *world) snapshotOrNone() string {
	if _, err := w.wrapDriver(w.gpus.Driver()).Snapshot(w.t.Context()); err != nil {
		return ""
	}
	return w.gpus.String()
}
