package agent_test

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

var (
	changeCount = flag.Int("changes", 60, "how many changes TestWhatAPlanSaysIsWhatComes foretells")
	seed        = flag.Uint64("seed", 1, "the first of its seeds: each change is drawn by one")
)

// drawn is a node in a state that a seed has drawn, and what is asked of it.
type drawn struct {
	*world
	random *rand.Rand

	byClaims bool
	waits    bool               // a rule has the agent wait for pods that hold GPUs behind the cordon
	kinds    map[string]podKind // of the pods that hold GPUs, by name
	budgets  map[string]*budget // by app
	maintain maintenanceFile
	label    string // that is asked for
	name     string
	allow    []string

	state     []string // in words
	calls     *int     // that change hardware
	cordons   *[]string
	evictions []string        // requests that are no dry run, by pod
	ended     map[string]bool // pods that leave by the hand of the test, or for an earlier change
	opens     time.Time       // when the window opens that the change waits for
}

// maintenanceFile is the parts of one.
type maintenanceFile struct{ windows, pools string }

func (m maintenanceFile) text() string {
	return cmp.Or(m.windows, "estimate: 10m\njitter: 0s\n") + m.pools
}

// budget is a disruption budget of the pods of an app. Each eviction uses it up by one, until the successor of the pod is ready on another node.
type budget struct {
	allowed int
	opens   []time.Time // for the successors that are not yet ready
}

func (b *budget) left() int {
	n := b.allowed
	for _, at := range b.opens {
		if time.Now().Before(at) {
			n--
		}
	}
	return n
}

// podKind is what a pod is to a drain.
type podKind struct {
	name       string
	change     func(*corev1.Pod)
	bare, disk bool // lost if it is evicted
}

var podKinds = []podKind{
	{name: "with a controller", change: controlled},
	{name: "with a controller", change: controlled},
	{name: "of app a", change: ofApp("a")},
	{name: "of app b", change: ofApp("b")},
	{name: "bare", change: bare, bare: true},
	{name: "with files on disk", change: files(""), disk: true},
	{name: "bare with files on disk", change: func(p *corev1.Pod) { bare(p); files("")(p) }, bare: true, disk: true},
	{name: "with files in memory", change: files(corev1.StorageMediumMemory)},
	{name: "of a tolerant DaemonSet", change: tolerant},
	{name: "static", change: static},
	{name: "that has ended", change: func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }},
	{name: "terminating past its grace", change: late},
}

// late is a pod that something keeps past its grace.
func late(p *corev1.Pod) {
	since := metav1.NewTime(time.Now().Add(-time.Hour))
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds, p.Finalizers = &since, new(int64(30)), []string{"example.com/keeps"}
}

// chance draws whether something is so.
func (d *drawn) chance(percent int) bool { return d.random.IntN(100) < percent }

func oneOf[T any](d *drawn, of ...T) T { return of[d.random.IntN(len(of))] }

func (d *drawn) says(format string, values ...any) {
	d.state = append(d.state, fmt.Sprintf(format, values...))
}

// geometries that a node may have before, as its labels name them.
func (d *drawn) names() []string {
	gpus := d.snapshot()
	out := []string{"all-disabled", "all-enabled", "all-balanced"}
	for _, p := range gpus[0].Profiles {
		if !strings.Contains(p.Name, "+") {
			out = append(out, "all-"+p.Name)
		}
	}
	return out
}

const foretoldProfiles = strictProfiles + `
  slices:
    mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]
    sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 2}]}}
  two:
    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}
    labels: {workload-type: development}
  four:
    mig: [{gpus: {all: true}, enabled: false}]
    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
    taints: [{key: gpu, value: "true", effect: NoSchedule}]
`

// draw draws the state of a node.
func draw(t *testing.T, seed uint64) *drawn {
	t.Helper()
	d := &drawn{random: rand.New(rand.NewPCG(seed, 0)), kinds: map[string]podKind{}, budgets: map[string]*budget{}, ended: map[string]bool{}}
	d.drawGPUs(t)
	d.client.PrependReactor("create", "pods", d.keep)
	d.drawSettings()
	d.drawOwner()
	d.turn()
	d.drawFormer()
	d.drawPods()
	d.drawMaintenance()
	d.drawObstacles()
	d.drawRequest()
	return d
}

func (d *drawn) drawGPUs(t *testing.T) {
	t.Helper()
	model, count, mig := oneOf(d, "H100-80GB", "H100-80GB", "H100-80GB", "A100-80GB", "A100-80GB", "A30", "A30"), 1+d.random.IntN(2), false
	if d.chance(4) {
		model = "T4"
	} else {
		mig = d.chance(30)
	}
	d.says("%d %s, MIG mode on: %t", count, model, mig)
	d.world = newWorld(t, fmt.Sprintf("gpus: [{model: %s, count: %d, mig: %t}]", model, count, mig))
	if *changeCount > 1 {
		d.log = zap.NewNop() // the log of one is worth reading
	}
	d.calls, d.cordons = d.countChanges(nil), d.recordCordons()
}

func (d *drawn) drawSettings() {
	drain := &d.settings.Drain
	drain.UnmanagedPods, drain.EmptyDir = oneOf(d, config.DrainRefuse, config.DrainEvict), oneOf(d, config.DrainRefuse, config.DrainEvict)
	d.says("settings: unmanagedPods %s, emptyDir %s", drain.UnmanagedPods, drain.EmptyDir)
	if d.chance(10) {
		d.says("drain.afterDeadline delete")
		drain.AfterDeadline = config.AfterDeadlineDelete
	}
	if d.chance(15) {
		rule := config.DrainRule{Namespaces: []string{"team"}, Selector: labels.Everything(), Action: oneOf(d, config.DrainRefuse, config.DrainWait, config.DrainAsk), For: 2 * time.Minute}
		drain.Rules = []config.DrainRule{rule}
		d.says("a rule: %s", rule.Action)
		d.waits = rule.Action != config.DrainRefuse
	}
	if d.chance(20) {
		d.health = &healthDisk{}
		d.settings.Health.Reset = config.HealthResetNever
		d.t.Cleanup(func() { d.stopWatch() })
		d.says("the agent watches the health of the GPUs")
	}
	if d.grace = oneOf(d, 0, 0, 10*time.Second, 2*time.Minute); d.grace > 0 {
		d.says("pods take %s to end", d.grace)
	}
}

func (d *drawn) drawOwner() {
	owner := oneOf(d, "device plugin", "device plugin", "device plugin", "device plugin", "device plugin with a config file", "device plugin with a config manager",
		"DRA driver", "DRA driver", "DRA driver with DynamicMIG", "nothing")
	d.says("owner: %s", owner)
	switch owner {
	case "device plugin with a config file":
		d.deploySharing()
		d.setFile("profiles", foretoldProfiles)
		d.settings.Profiles = config.ConfigMapKey{Namespace: "gpuslice", Name: "profiles", Key: "config.yaml"}
	case "device plugin with a config manager":
		d.deployConfigManager()
		for name := range managedConfigs {
			d.setManagedKey(name, name)
		}
		d.profiles(foretoldProfiles)
	case "DRA driver":
		d.noPlugin, d.draDriver, d.byClaims = true, true, true
	case "DRA driver with DynamicMIG":
		d.noPlugin, d.draDriver, d.driverGates, d.byClaims = true, true, dynamicGate, true
	case "nothing":
		d.noPlugin = true
	}
	if d.settings.Profiles.Name == "" {
		d.profiles(foretoldProfiles)
	}
	d.restart()
}

// drawFormer draws what the labels have asked for before.
func (d *drawn) drawFormer() {
	if len(d.snapshot()[0].Profiles) == 0 || d.driverGates != "" || d.noPlugin && !d.byClaims {
		return
	}
	if d.chance(50) {
		return
	}
	name := oneOf(d, d.names()...)
	d.set(config.LabelMIGConfig, name)
	if !d.passesWithin(60, d.done(name)) {
		d.says("asked before for %s, and says %s", name, d.reason())
		return
	}
	if d.says("asked before for %s", name); d.chance(30) {
		d.unset(config.LabelMIGConfig)
		d.says("which is withdrawn")
		d.passesWithin(10, func() bool { return d.reason() == config.ReasonNotRequested })
	}
}

// devicesOffered names the devices that pods may have.
func (d *drawn) devicesOffered() (out []string) {
	d.turn()
	if !d.byClaims {
		for _, name := range slices.Sorted(maps.Keys(d.offered)) {
			out = append(out, d.offered[name]...)
		}
		return out
	}
	d.passesWithin(6, func() bool { return len(d.published) > 0 && len(d.published[0].Spec.Devices) > 0 })
	for _, s := range d.published {
		for _, device := range s.Spec.Devices {
			if _, whole := device.Attributes["uuid"]; whole || d.driverGates == "" {
				out = append(out, device.Name)
			}
		}
	}
	return out
}

// drawPods draws pods on the devices that are offered.
func (d *drawn) drawPods() {
	devices := d.devicesOffered()
	for i, device := range devices {
		if !d.chance(max(20, 100/len(devices))) {
			continue
		}
		kind, name := oneOf(d, podKinds...), fmt.Sprintf("pod-%d", i)
		d.kinds[name] = kind
		d.says("pod %s %s on %s", name, kind.name, device)
		if d.byClaims {
			d.podWithClaim(name, device, kind.change)
		} else {
			d.pod(name, device, kind.change)
		}
	}
	for _, app := range []string{"a", "b"} {
		if slices.ContainsFunc(slices.Collect(maps.Values(d.kinds)), func(k podKind) bool { return k.name == "of app "+app }) && d.chance(70) {
			d.drawBudget(app)
		}
	}
}

func (d *drawn) drawBudget(app string) {
	b := &budget{allowed: oneOf(d, 0, 1, 1, 5)}
	d.budgets[app] = b
	d.says("budget %s allows %d", app, b.allowed)
	_, err := d.client.PolicyV1().PodDisruptionBudgets("team").Create(d.t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: app, Namespace: "team"},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}},
		Status:     policyv1.PodDisruptionBudgetStatus{DesiredHealthy: 3, CurrentHealthy: 3 + int32(b.allowed), ExpectedPods: 3 + int32(b.allowed)},
	}, metav1.CreateOptions{})
	if err != nil {
		d.t.Fatal(err)
	}
}

// keep answers an eviction as the API server does by the budgets.
func (d *drawn) keep(action k8stesting.Action) (bool, runtime.Object, error) {
	if action.GetSubresource() != "eviction" {
		return false, nil, nil
	}
	e := action.(k8stesting.CreateAction).GetObject().(*policyv1.Eviction) //nolint:errcheck // it is an eviction
	real := e.DeleteOptions == nil || len(e.DeleteOptions.DryRun) == 0
	object, err := d.client.Tracker().Get(podResource, e.Namespace, e.Name)
	if err != nil {
		return true, nil, apierrors.NewNotFound(podResource.GroupResource(), e.Name)
	}
	p := object.(*corev1.Pod) //nolint:errcheck // it is a pod
	if real && e.Namespace == "team" {
		d.evictions = append(d.evictions, e.Name)
	}
	b := d.budgets[p.Labels["app"]]
	if b == nil || p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning || d.waits && len(*d.cordons) > 0 {
		return false, nil, nil // what answers to a cordon lets the pod go behind it
	}
	if b.left() <= 0 {
		refused := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 0)
		refused.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: policyv1.DisruptionBudgetCause, Message: fmt.Sprintf("The disruption budget %s needs 3 healthy pods and has 3 currently", p.Labels["app"])}}
		return true, nil, refused
	}
	if real {
		b.opens = append(b.opens, time.Now().Add(d.grace+20*time.Second))
	}
	return false, nil, nil
}

// drawMaintenance draws windows and a pool.
func (d *drawn) drawMaintenance() {
	for _, w := range []struct {
		percent      int
		name, window string
	}{
		{10, "an open window", always},
		{10, "a window at noon", noon},
		{5, "no window any more", until(time.Now())},
		{5, "a freeze", millennium},
		{5, "a maintenance file in pieces", caturday},
	} {
		if d.maintain.windows == "" && d.chance(w.percent) {
			d.says("%s", w.name)
			d.maintain.windows = w.window
		}
	}
	if d.chance(20) && d.maintain.windows != caturday {
		d.drawPool()
	}
	if d.maintain != (maintenanceFile{}) {
		d.setMaintenance(d.maintain.text())
	}
}

const researchPool = "pools: [{name: research, selector: pool=research, maxUnavailable: %d}]\n"

func (d *drawn) drawPool() {
	d.pool()
	d.maintain.pools = fmt.Sprintf(researchPool, 1)
	other := oneOf(d, "a free slot", "a paused pool", "no slot at all", "another node cordoned")
	d.says("a pool with %s", other)
	switch other {
	case "a paused pool":
		paused(d.world)
	case "no slot at all":
		d.maintain.pools = fmt.Sprintf(researchPool, 0)
	case "another node cordoned":
		d.editOther(true)
	}
}

func (d *drawn) editOther(cordoned bool) {
	n, err := d.client.CoreV1().Nodes().Get(d.t.Context(), "gpu-2", metav1.GetOptions{})
	if err != nil {
		d.t.Fatal(err)
	}
	n.Spec.Unschedulable = cordoned
	if _, err := d.client.CoreV1().Nodes().Update(d.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		d.t.Fatal(err)
	}
}

const (
	kured      = "weave.works/kured-reboot-in-progress"
	strangePID = 5000
)

// drawObstacles draws what else may stand in the way of a change.
func (d *drawn) drawObstacles() {
	for _, o := range []struct {
		percent int
		name    string
		set     func()
	}{
		{6, "held", func() { d.annotate(config.AnnotationHold, "audit") }},
		{4, "held by an empty annotation", func() { d.annotate(config.AnnotationHold, "") }},
		{8, "forced now", func() { d.annotate(config.AnnotationForce, config.ForceNow) }},
		{5, "forced by a value that is none", func() { d.annotate(config.AnnotationForce, "0123456789") }},
		{6, "kured at work", func() { d.annotate(kured, "2000-01-01T00:00:00Z") }},
		{5, "cordoned by an administrator", func() { d.cordon(true) }},
		{5, "kubelet is silent", func() { d.kubeletSilent = true }},
		{3, "kubelet is starting", func() { d.kubeletStarting = true }},
		{6, "a process of no pod on GPU 0", func() {
			device := d.gpus.UUIDs()[0]
			if i := d.snapshot()[0].Instances; len(i) > 0 {
				device = i[0].Devices[0].UUID
			} else if d.snapshot()[0].Enabled {
				return
			}
			d.startGPUProcess(device, strangePID, "python", "0::/user.slice/user-1000.slice/session-3.scope")
		}},
		{4, "a process table that is closed", d.breakTable},
		{4, "GPU 0 is lost", func() { d.setLost(0, true) }},
		{4, "the driver recommends a reboot for GPU 0", func() { d.setRecoveryAction(0, 2) }},
		{4, "the driver is upgraded", func() { d.upgrade(true) }},
		{3, "the host's disk is read-only", func() {
			d.disk.refuses = func(journal.Record) error { return errors.New("read-only file system") }
		}},
		{4, "to be kept cordoned", func() { d.annotate(config.AnnotationKeepCordoned, "true") }},
		{4, "label workload-type is another's", func() { d.set("workload-type", "other") }},
		{5, "an allowance for another change", func() {
			d.annotate(config.AnnotationAllowEviction, config.Allowance(config.LabelMIGConfig, "all-enabled", config.FieldUnmanagedPods, config.FieldEmptyDir))
		}},
		{15, "", func() { d.drawFailure() }},
		{15, "", func() { d.drawUnderWay() }},
		{5, "", func() { d.drawOlder() }},
		{10, "the agent has just started", d.restart},
	} {
		if d.chance(o.percent) {
			if o.name != "" {
				d.says("%s", o.name)
			}
			o.set()
		}
	}
	for range 2 + d.random.IntN(3) { // after one, an agent at rest has removed what forces a change
		d.pass()
	}
}

func (d *drawn) drawFailure() {
	name := oneOf(d, d.names()...)
	times := oneOf(d, 1, 2, d.settings.Retry.Failures)
	d.setFault(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{Return: gpusim.Unknown, Times: times})
	d.set(config.LabelMIGConfig, name)
	passes := 5 + d.random.IntN(30)
	for range passes {
		d.pass()
	}
	d.setFault(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{})
	d.says("asked for %s, and %d attempts to create an instance failed within %d passes", name, times, passes)
}

func (d *drawn) drawUnderWay() {
	name := oneOf(d, d.names()...)
	d.set(config.LabelMIGConfig, name)
	passes := 1 + d.random.IntN(20)
	for range passes {
		d.pass()
	}
	d.says("asked for %s %d passes ago", name, passes)
}

func (d *drawn) drawOlder() {
	if d.hasJournal() || d.pluginFile != "" {
		return
	}
	name := oneOf(d, d.names()...)
	d.edit(func(n *corev1.Node) {
		n.Status.Conditions = nil
		n.Annotations = nil
		metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelMIGConfig, name)
	})
	n := d.node()
	n.Status.Conditions = nil
	if _, err := d.client.CoreV1().Nodes().UpdateStatus(d.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		d.t.Fatal(err)
	}
	d.disk.text = nil
	d.restart()
	for range 3 {
		d.pass()
	}
	d.says("label %s is older than the agent", name)
}

// drawRequest draws what is asked for.
func (d *drawn) drawRequest() {
	d.label, d.name = config.LabelMIGConfig, oneOf(d, append(d.names(), d.names()...)...)
	switch {
	case d.chance(5):
		d.name = "all-9g.999gb"
	case d.node().Labels[config.LabelMIGConfig] != "" && d.chance(25):
		d.name = d.node().Labels[config.LabelMIGConfig]
	case d.configManager && d.chance(40):
		d.label, d.name = config.LabelDevicePluginConfig, oneOf(d, append(slices.Sorted(maps.Keys(managedConfigs)), "missing")...)
	case d.chance(cmp.Or(map[bool]int{true: 60}[d.pluginFile != "" || d.configManager], 15)):
		d.label, d.name = config.LabelProfile, oneOf(d, "strict", "lenient", "marked", "crowded", "slices", "two", "four", "none-such", "all-disabled")
	}
	for _, field := range []string{config.FieldUnmanagedPods, config.FieldEmptyDir} {
		if d.chance(25) {
			d.allow = append(d.allow, field)
		}
	}
}

// allowance is the request with what is allowed for it, as kubectl gpuslice plan asks it, and apply writes it.
func (d *drawn) allowance() string {
	fields := slices.Clone(d.allow)
	if asked, already, _ := config.ParseAllowance(d.node().Annotations[config.AnnotationAllowEviction]); asked == d.label+"="+d.name {
		for field, allowed := range map[string]config.DrainAction{config.FieldUnmanagedPods: already.UnmanagedPods, config.FieldEmptyDir: already.EmptyDir} {
			if allowed != "" {
				fields = append(fields, field)
			}
		}
	}
	slices.Sort(fields)
	return config.Allowance(d.label, d.name, slices.Compact(fields)...)
}

// plan asks as kubectl gpuslice plan does, and returns the agent's answer; nil for none.
func (d *drawn) plan() *api.Answer {
	request := d.allowance()
	if d.reason() == config.ReasonOlderRequest {
		request += " " + config.AskedAgain
	}
	d.edit(func(n *corev1.Node) {
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, config.AnnotationPreview, request)
		delete(n.Annotations, config.AnnotationPlan)
	})
	for range 20 {
		d.pass()
		var given api.Answer
		if json.Unmarshal([]byte(d.node().Annotations[config.AnnotationPlan]), &given) != nil || given.For != request {
			continue
		}
		if d.chance(80) { // otherwise the question stands beside the change
			d.edit(func(n *corev1.Node) {
				delete(n.Annotations, config.AnnotationPreview)
				delete(n.Annotations, config.AnnotationPlan)
			})
		}
		return &given
	}
	return nil
}

// apply asks for the change as kubectl gpuslice apply does.
func (d *drawn) apply() {
	older, allowance := d.reason() == config.ReasonOlderRequest, d.allowance()
	d.edit(func(n *corev1.Node) {
		if n.Labels[d.label] != d.name {
			delete(n.Labels, config.LabelMIGConfigState)
		}
		metav1.SetMetaDataLabel(&n.ObjectMeta, d.label, d.name)
		asked, _, _ := config.ParseAllowance(n.Annotations[config.AnnotationAllowEviction])
		if len(d.allow) > 0 || older {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, config.AnnotationAllowEviction, allowance)
		} else if asked != d.label+"="+d.name {
			delete(n.Annotations, config.AnnotationAllowEviction)
		}
	})
}

// verdictLine is the first line of the plan, as package cmd/internal/show words it.
func verdictLine(a *api.Answer) string {
	switch {
	case a.Refused != "":
		return fmt.Sprintf("would be refused: %s: %s", a.Reason, a.Refused)
	case a.HeldUp != "":
		return fmt.Sprintf("would be held up: %s: %s", a.Reason, a.HeldUp)
	case len(a.Steps) == 0:
		return "nothing to do"
	default:
		return "runs " + a.Runs
	}
}

// disturbed says what was disturbed since the marks were set; empty for nothing.
func (d *drawn) disturbed(since marks) string {
	var out []string
	if n := len(*d.cordons) - since.cordons; n > 0 {
		out = append(out, fmt.Sprintf("%d cordons", n))
	}
	if n := d.evictions[since.evictions:]; len(n) > 0 {
		out = append(out, fmt.Sprintf("evictions of %v", n))
	}
	if n := *d.calls - since.calls; n > 0 {
		out = append(out, fmt.Sprintf("%d calls that change a GPU", n))
	}
	return strings.Join(out, ", ")
}

type marks struct{ cordons, evictions, calls int }

func (d *drawn) mark() marks { return marks{len(*d.cordons), len(d.evictions), *d.calls} }

// podNames are the pods of the team that are on the node. It notes those that an earlier change has evicted: they leave whatever comes.
func (d *drawn) podNames() []string {
	var out []string
	for _, p := range d.podsIn("team") {
		out = append(out, p.Name)
		if p.DeletionTimestamp != nil && slices.Contains(d.evictions, p.Name) {
			d.ended[p.Name] = true
		}
	}
	return out
}

const mostRounds = 12

// foretell holds what the plan says against what comes, until the change has ended or is refused. It returns the first difference; empty for none.
func (d *drawn) foretell() (first, differs string) {
	for round := range mostRounds {
		begun, before := d.hasJournal(), d.mark()
		pods := d.podNames()
		given := d.plan()
		if given == nil {
			return first, "the agent gives no answer"
		}
		line := verdictLine(given)
		if first += fmt.Sprintf("\n  plan: %s", line); len(given.Pods) > 0 || len(given.Lost) > 0 {
			first += fmt.Sprintf("; leave: %v; lost: %v", given.Pods, given.Lost)
		}
		if round == 0 {
			if what := d.disturbed(before); what != "" && !begun {
				return first, "to answer, the agent has disturbed something: " + what
			}
			if given.Refused != "" && given.Reason == "" {
				return first, "" // the label does not count; apply refuses it, too
			}
			d.apply()
			pods = d.podNames()
		}
		ends, differs := d.follow(given, pods, begun)
		if differs != "" || ends {
			return first, differs
		}
		if !d.lift(given) {
			return first, ""
		}
		if what := d.awaitWindow(); what != "" {
			return first, what
		}
	}
	return first, fmt.Sprintf("after %d obstacles were lifted the change is still held up: %s", mostRounds, d.condition().Message)
}

// follow lets the agent act after an answer, and returns whether nothing more can be lifted, and how what it does differs from what it said.
func (d *drawn) follow(given *api.Answer, pods []string, begun bool) (ends bool, differs string) {
	switch {
	case given.Refused != "":
		return true, d.expectStill(given.Reason, begun)
	case given.HeldUp != "":
		return false, d.expectStill(given.Reason, begun)
	case len(given.Steps) == 0:
		return true, d.expectStill(config.ReasonConverged, begun)
	case given.Unsure != "": // it does not say that the change ends
		return true, ""
	default:
		return true, d.expectEnd(given, pods)
	}
}

// expectStill says what differs from a node that says the reason, and on which nothing is disturbed.
func (d *drawn) expectStill(reason config.Reason, begun bool) string {
	before := d.mark()
	most := 20
	if begun {
		most = 400
	}
	said := func() bool { return d.reason() == reason }
	if reason == config.ReasonConverged {
		said = func() bool { return d.doneAsked() }
	}
	if !d.passesWithin(most, func() bool { return said() || !begun && d.disturbed(before) != "" }) || !said() {
		return fmt.Sprintf("the condition is %s, not %s; disturbed: %s; it says %s", d.reason(), reason, cmp.Or(d.disturbed(before), "nothing"), d.condition().Message)
	}
	for range 8 {
		d.pass()
	}
	if begun && d.hasJournal() {
		return ""
	}
	if what := d.disturbed(before); what != "" && !begun {
		return "disturbed: " + what + "; the node says " + d.condition().Message
	}
	if d.reason() != reason {
		return fmt.Sprintf("the condition is first %s, then %s: %s", reason, d.reason(), d.condition().Message)
	}
	return ""
}

// doneAsked reports whether the node is as asked, without a journal.
func (d *drawn) doneAsked() bool {
	return d.reason() == config.ReasonConverged && !d.hasJournal() && slices.Contains(strings.Split(d.status().Desired, api.DesiredSeparator), d.name)
}

// expectEnd says what differs from a change that begins and ends as the plan says.
func (d *drawn) expectEnd(given *api.Answer, pods []string) string {
	if !d.passesWithin(1500, d.doneAsked) {
		return fmt.Sprintf("it does not end; the node says %s: %s", d.reason(), d.condition().Message)
	}
	var left, lost []string
	for _, name := range pods {
		if d.runs(name) || d.ended[name] {
			continue
		}
		left = append(left, "team/"+name)
		if d.kinds[name].bare {
			lost = append(lost, fmt.Sprintf("pod team/%s, which no controller recreates", name))
		}
		if d.kinds[name].disk {
			lost = append(lost, fmt.Sprintf("the files of team/%s on emptyDir scratch", name))
		}
	}
	leave := slices.DeleteFunc(slices.Clone(given.Pods), func(pod string) bool { return d.ended[strings.TrimPrefix(pod, "team/")] })
	if slices.Sort(left); !slices.Equal(left, leave) {
		return fmt.Sprintf("pods %v left, not %v", left, leave)
	}
	if slices.Sort(lost); !slices.Equal(lost, given.Lost) && len(leave) == len(given.Pods) {
		return fmt.Sprintf("lost is %v, not %v", lost, given.Lost)
	}
	return ""
}

var (
	moment      = regexp.MustCompile(`^at \w+ ([-\d]+ [:\d]+Z)`)
	fingerprint = regexp.MustCompile(config.AnnotationForce + `=(\w+)`)
)

// lift removes the obstacle that the answer names; false if a user cannot.
func (d *drawn) lift(given *api.Answer) bool {
	do := map[config.Reason]func(){
		config.ReasonHeld: func() { d.unannotate(config.AnnotationHold) },
		config.ReasonInvalidMaintenance: func() {
			d.maintain.windows = ""
			d.setMaintenance(d.maintain.text())
		},
		config.ReasonAwaitingWindow: func() { d.openWindow(given) },
		config.ReasonAwaitingSlot:   d.freeSlot,
		config.ReasonPoolPaused: func() {
			d.editLease(func(l *coordinationv1.Lease) { delete(l.Annotations, config.AnnotationPaused) })
		},
		config.ReasonEvictionBlocked:    func() { d.letGo(given.HeldUp) },
		config.ReasonOtherMaintenance:   func() { d.unannotate(kured) },
		config.ReasonKubeletUnavailable: func() { d.kubeletSilent, d.kubeletStarting = false, false },
		config.ReasonGPUInUse:           func() { d.endGPUProcess(strangePID) },
		config.ReasonHoldersUnknown: func() {
			if err := os.Symlink(strconv.Itoa(agentPID), filepath.Join(d.processTable, "self")); err != nil {
				d.t.Fatal(err)
			}
		},
		config.ReasonNoDevicePlugin: func() {
			d.noPlugin = false
			d.turn()
		},
		config.ReasonDriverNotLoaded:       func() { d.upgrade(false) },
		config.ReasonHostRecordUnavailable: func() { d.disk.refuses = nil },
	}[given.Reason]
	if do == nil {
		return false
	}
	do()
	return true
}

// openWindow waits for the window, if the answer says when it opens, forces the change, or mends the file.
func (d *drawn) openWindow(given *api.Answer) {
	at := moment.FindStringSubmatch(given.Runs)
	named := fingerprint.FindStringSubmatch(given.HeldUp)
	switch {
	case at != nil && d.chance(50):
		opens, err := time.Parse("2006-01-02 15:04:05Z", at[1])
		if err != nil {
			d.t.Fatal(err)
		}
		d.opens = opens
	case named != nil && d.chance(50):
		d.annotate(config.AnnotationForce, named[1])
	default:
		d.maintain.windows = always
		d.setMaintenance(d.maintain.text())
	}
}

// awaitWindow lets the time pass until the window opens, and says what is disturbed before.
func (d *drawn) awaitWindow() string {
	before := d.mark()
	for time.Until(d.opens) > d.settings.NodeHeartbeat {
		d.pass()
	}
	<-time.After(time.Until(d.opens))
	if what := d.disturbed(before); what != "" {
		return "before the window opens, disturbed: " + what
	}
	return ""
}

func (d *drawn) freeSlot() {
	d.maintain.pools = fmt.Sprintf(researchPool, 2)
	d.setMaintenance(d.maintain.text())
	d.editOther(false)
}

// letGo does what the message of an eviction that is blocked asks for: it opens the budgets that it names, and ends the pods.
func (d *drawn) letGo(message string) {
	for app, b := range d.budgets {
		if strings.Contains(message, "PDB team/"+app) {
			b.allowed = 100
		}
	}
	for _, p := range d.podsIn("team") {
		if strings.Contains(message, "team/"+p.Name) && !strings.Contains(message, "PDB team/"+cmp.Or(p.Labels["app"], "none")) {
			d.ended[p.Name] = true
			d.endPod(p.Name)
		}
	}
}

// What the first line of a plan says is what comes, in both directions: what is said to begin begins and ends, with no other pods leaving; what is said to be
// held up is held up by that, and begins once that is removed; what is said to be refused disturbs nothing.
func TestWhatAPlanSaysIsWhatComes(t *testing.T) {
	t.Parallel()
	for i := range uint64(*changeCount) {
		n := *seed + i
		t.Run(fmt.Sprintf("seed %d", n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := draw(t, n)
				first, differs := d.foretell()
				text := fmt.Sprintf("to draw the same: -seed %d -changes 1\n  node: %s\n  asked for: %s=%s %v%s\n  what came: %s",
					n, strings.Join(d.state, "; "), d.label, d.name, d.allow, first, cmp.Or(differs, "the same"))
				if differs != "" {
					t.Error(text)
				} else {
					t.Log(text)
				}
			})
		})
	}
}
