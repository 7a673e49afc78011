package agent_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/act/reboot"
	"github.com/gpuslice/gpuslice/agent/monitor/health"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/clientset"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// A test of this package reads like this one: the first lines say what there is, a label says what a user asks for, and then the cluster and the agent take
// turns, in the bubble's time, until something is so. What must not happen in between is looked for all the way, as by the cordons here.
func TestAPodLeavesTheGPUThatIsCutAndTheNodeIsGivenBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.turn() // the device plugin starts, and kubelet advertises what it offers
		w.pod("holder", w.gpus.UUIDs()[0])
		cordons := w.recordCordons()
		w.label("all-1g.10gb")
		w.untilCordoned()
		w.restart() // another process, which knows nothing of the one before
		w.reach("all-1g.10gb")
		if w.runs("holder") || len(*cordons) != 1 {
			t.Errorf("the pod on GPU 0 runs: %t; the node was cordoned %d times", w.runs("holder"), len(*cordons))
		}
	})
}

// world is a node around an agent: simulated GPUs, and as much of kubelet, the DaemonSet controller and the device plugin
// as the agent sees of them. Locking, eviction and real plugins are tested in test/node, against the real parts.
type world struct {
	t               *testing.T
	gpus            *gpusim.Node
	client          *client
	agent           *agent.Agent
	settings        config.Settings
	offered         map[string][]string // what the plugin read when it started
	podsStarted     int                 // plugin pods so far
	pluginBroken    bool                // the plugin registers nothing
	renamed         map[string]string   // what the driver that is loaded calls profiles of the former one
	noPlugin        bool                // there is no plugin
	draDriver       bool                // there is a DaemonSet of NVIDIA's DRA driver
	offersGone      bool                // it offers cut GPUs as a whole, too, whenever it starts, and the device plugin a MIG device that is gone
	driverGates     string              // feature gates of its pods
	daemon          string              // a tenant's DaemonSet has a pod on the node with this device, if that exists and no taint keeps it away
	pluginOnHost    bool                // the plugin is a unit of the host, and not a pod
	pluginStrategy  config.MIGStrategy  // the plugin's MIG strategy; empty for mixed
	kubeletSilent   bool                // kubelet does not answer
	kubeletStarting bool                // kubelet answers, and does not know its pods yet, as for about a second after its start: it lists none
	grace           time.Duration       // how long an evicted pod takes to end
	boots           int                 // of the node, so far
	host            logind
	units           units
	specs           specs
	processTable    string // the host's process table
	pluginFile      string // the device plugin's config, as the agent sees it
	tolerations     []corev1.Toleration
	refusesConfig   string        // the device plugin ends on a config with this in it
	configReads     int           // how often it has read one
	operands        []string      // labels by which operands of the GPU operator run
	operandGrace    time.Duration // how long an operand's pod takes to end
	kubeletDelay    time.Duration // how long kubelet takes to answer
	clock           clock.WithTicker

	// Options of the next agent process.

	wrapDriver func(nvml.Driver) nvml.Driver // wraps the driver
	disk       disk                          // with the host's record
	health     *healthDisk                   // what it remembers of the health of the GPUs; nil for an agent that does not watch it
	stopWatch  func()                        // ends the watch of the one before
	file       map[string]catalog.MIGConfig  // the configs in the administrator's ConfigMap

	fileError error // why it cannot be read

	published  []resourcev1.ResourceSlice                         // by NVIDIA's DRA driver
	others     []resourcev1.ResourceSlice                         // by other DRA drivers
	slicesFail bool                                               // the API server refuses to list slices
	driverSeen time.Time                                          // when its pod was last on the node
	readsClaim func(ctx context.Context, name string) (err error) // called before the API server answers for a claim

	live *live // the agent that runs, and does not wait for the passes of the test; nil for none

	log *zap.Logger // of the agents; that of the test if nil

	withoutConfig bool // the device plugin reads no config
	configManager bool // the device plugin has NVIDIA's config manager
}

const (
	nodeName = "gpu-1"
	// pluginContainer is what the static manifest and the chart of the device plugin call it.
	pluginContainer = "nvidia-device-plugin-ctr"
)

func newWorld(t *testing.T, models string) *world {
	t.Helper()
	spec, err := gpusim.ParseSpec([]byte(models))
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := gpusim.Create(t.TempDir(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := gpus.Close(); err != nil {
			t.Error(err)
		}
	})
	w := &world{
		t: t, gpus: gpus, clock: clock.RealClock{}, settings: config.Default(), wrapDriver: func(d nvml.Driver) nvml.Driver { return d },
		client: newClient(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "node-uid", ResourceVersion: "1"}}),
	}
	w.settings.MIGConfigMap, w.settings.Profiles = config.ConfigMapKey{}, config.ConfigMapKey{}
	w.settings.Reboot.Sentinel = filepath.Join(t.TempDir(), "reboot-required")
	w.processTable = t.TempDir()
	w.addProcess(agentPID, "gpuslice-agent", "0::/system.slice/gpuslice.service")
	if err := os.Symlink(strconv.Itoa(agentPID), filepath.Join(w.processTable, "self")); err != nil {
		t.Fatal(err)
	}
	w.disk.text = []byte(`{"version":1}`) // an agent has been here
	w.nextBoot()
	w.client.PrependReactor("create", "pods", w.evict)
	w.restart()
	return w
}

// restart starts the next agent process: it knows nothing of the one before.
func (w *world) restart() {
	if w.live != nil {
		w.live.stop()
		w.live.start()
	}
	w.agent = agent.New(w.optionsFor(&w.host))
	if w.health != nil {
		w.watch()
	}
}

// restartUnlessVerifying restarts the agent, unless it is proving the capacity, which takes two observations of one process.
func (w *world) restartUnlessVerifying() {
	w.t.Helper()
	if w.reason() != config.ReasonAwaitingCapacity {
		w.restart()
	}
}

// optionsFor returns the options of the next agent process on the host.
func (w *world) optionsFor(h reboot.Host) agent.Options {
	o := agent.Options{
		Node: nodeName, Client: offering{clientset.Of(w.client), w}, Driver: w.wrapDriver(w.gpus.Driver()), Pods: podsOf{w.client}, Kubelet: w, Settings: w.settings,
		Host: h, Units: &w.units, Specs: &w.specs, Record: &w.disk, Processes: holders.Processes{Root: w.processTable, Signal: w.hangup},
		Parse:  func([]byte) (map[string]catalog.MIGConfig, error) { return w.file, w.fileError },
		Plugin: catalog.PluginFormat{Parse: deviceplugin.Parse, Render: deviceplugin.Render}, PluginFile: w.pluginFile,
		Clock: w.clock, Events: &record.FakeRecorder{}, Log: cmp.Or(w.log, zaptest.NewLogger(w.t)),
		Metrics: metrics.New(clock.RealClock{}), Liveness: report.NewLiveness(report.Patience(w.settings), zap.NewNop()),
	}
	if w.health != nil {
		o.Health = health.Sources{Driver: w.gpus.Health(), Store: w.health}
	}
	return o
}

// restartWithEvents starts the agent again, and returns the Events that it sends.
func (w *world) restartWithEvents() chan string {
	o, recorder := w.optionsFor(&w.host), record.NewFakeRecorder(1000)
	o.Events = recorder
	w.agent = agent.New(o)
	return recorder.Events
}

// heard counts the Events so far with these words in them.
func heard(events <-chan string, words ...string) int {
	n := 0
	for len(events) > 0 {
		e := <-events
		if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(e, word) }) {
			n++
		}
	}
	return n
}

// podsOf lists the pods of the test's node.
type podsOf struct{ client kubernetes.Interface }

// List implements agent.Pods.
func (p podsOf) List(ctx context.Context) ([]corev1.Pod, error) {
	list, err := p.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + nodeName})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// logind is the machine below the node, as logind answers for it.
type logind struct {
	silent  bool  // it does not answer
	down    bool  // it is shutting down
	refuses error // the answer to Reboot
	reboots int   // how often Reboot was called
	held    int   // inhibitors
	took    int   // inhibitors so far
}

// Inhibit implements reboot.Host.
func (h *logind) Inhibit(ctx context.Context, _ string) (func(), error) {
	if h.silent {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if h.down {
		return nil, host.ErrShuttingDown
	}
	h.held++
	h.took++
	return func() { h.held-- }, nil
}

// CanReboot implements reboot.Host.
func (h *logind) CanReboot(context.Context) error { return h.refuses }

// Reboot implements reboot.Host.
func (h *logind) Reboot(context.Context) error {
	if h.down {
		return host.ErrShuttingDown
	}
	h.reboots++
	h.down = true
	return nil
}

// disk holds the host's record, in the format of the file. An agent and a process that awaits its recovery read it side by side.
type disk struct {
	access  sync.Mutex // to text
	text    []byte
	aside   []byte
	refuses func(r journal.Record) error // called before each write; its error refuses the write
	after   func(r journal.Record) error // called after each write
	silent  bool
	reads   error // why it cannot be read
	writes  int
}

// Read implements agent.Records.
func (d *disk) Read(context.Context) (*journal.Record, error) {
	d.access.Lock()
	defer d.access.Unlock()
	switch {
	case d.silent:
		return nil, journal.ErrSilent
	case d.reads != nil:
		return nil, d.reads
	case d.text == nil:
		return nil, nil
	}
	r, err := journal.ParseRecord(d.text)
	if err != nil {
		return nil, err
	}
	return &r, nil
}

// Write implements agent.Records.
func (d *disk) Write(_ context.Context, r journal.Record) error {
	if d.silent {
		return journal.ErrSilent
	}
	if d.refuses != nil {
		if err := d.refuses(r); err != nil {
			return err
		}
	}
	text, err := json.Marshal(r)
	if err == nil {
		_, err = journal.ParseRecord(text)
	}
	if err == nil {
		d.access.Lock()
		d.text = text
		d.access.Unlock()
		d.writes++
		if d.after != nil {
			err = d.after(r)
		}
	}
	return err
}

// Try implements agent.Records.
func (d *disk) Try(_ context.Context, r journal.Record) error {
	switch {
	case d.silent:
		return journal.ErrSilent
	case d.refuses != nil:
		return d.refuses(r)
	default:
		return nil
	}
}

// SetAside implements agent.Records.
func (d *disk) SetAside(context.Context) (string, error) {
	d.aside, d.text = d.text, nil
	return "record.newer.json", nil
}

// record returns the record on the disk; nil for none.
func (d *disk) record(t *testing.T) *journal.Record {
	t.Helper()
	if d.text == nil {
		return nil
	}
	r, err := journal.ParseRecord(d.text)
	if err != nil {
		t.Fatal(err)
	}
	return &r
}

// agentPID is the agent's own process in the host's table.
const agentPID = 100

// addProcess adds a process to the host's table, with the files that it has open.
func (w *world) addProcess(pid int, command, cgroup string, files ...string) {
	w.t.Helper()
	dir := filepath.Join(w.processTable, strconv.Itoa(pid))
	if err := os.MkdirAll(filepath.Join(dir, "fd"), 0o755); err != nil {
		w.t.Fatal(err)
	}
	for name, text := range map[string]string{"comm": command + "\n", "cgroup": cgroup + "\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			w.t.Fatal(err)
		}
	}
	for i, file := range files {
		if err := os.Symlink(file, filepath.Join(dir, "fd", strconv.Itoa(i+3))); err != nil {
			w.t.Fatal(err)
		}
	}
}

// removeProcess removes a process from the host's table.
func (w *world) removeProcess(pid int) {
	w.t.Helper()
	if err := os.RemoveAll(filepath.Join(w.processTable, strconv.Itoa(pid))); err != nil {
		w.t.Fatal(err)
	}
}

// units is the host's systemd.
type units struct {
	states  map[string]string // by name; nil is a host without systemd
	refuses map[string]error  // to stop or to start
	changed func(name string) // after a unit has stopped or started
	did     []string
	asked   map[string]bool // units of which the agent has asked for the state
}

// States implements units.Systemd.
func (u *units) States(_ context.Context, names []string) (map[string]string, error) {
	if u.states == nil {
		return nil, host.ErrNoSystemd
	}
	out := map[string]string{}
	for _, name := range names {
		if u.asked == nil {
			u.asked = map[string]bool{}
		}
		u.asked[name] = true
		if state, ok := u.states[name]; ok {
			out[name] = state
		}
	}
	return out, nil
}

// Stop implements units.Systemd.
func (u *units) Stop(_ context.Context, name string) error { return u.set("stop", name, "inactive") }

// Start implements units.Systemd.
func (u *units) Start(_ context.Context, name string) error { return u.set("start", name, "active") }

func (u *units) set(verb, name, state string) error {
	u.did = append(u.did, verb+" "+name)
	if err := u.refuses[verb+" "+name]; err != nil {
		return err
	}
	u.states[name] = state
	if u.changed != nil {
		u.changed(name)
	}
	return nil
}

// specs are the CDI specs of the node, by the geometry that they describe.
type specs struct {
	used      bool
	describes string
	broken    error
	silent    bool // they are in a folder of which the disk does not answer
	written   int
}

// Stale implements agent.Specs.
func (s *specs) Stale(ctx context.Context, gpus []nvml.GPU) ([]string, error) {
	if s.silent {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if s.used && s.describes != geometries(gpus) {
		return []string{"/var/run/cdi/nvidia.yaml"}, nil
	}
	return nil, nil
}

// Write implements agent.Specs.
func (s *specs) Write(_ context.Context, gpus []nvml.GPU) error {
	if s.broken != nil {
		return s.broken
	}
	s.describes = geometries(gpus)
	s.written++
	return nil
}

func geometries(gpus []nvml.GPU) string {
	var out []string
	for _, gpu := range gpus {
		out = append(out, gpu.Geometry().String())
	}
	return strings.Join(out, "; ")
}

// nextBoot gives the node the identity of its next boot.
func (w *world) nextBoot() {
	w.t.Helper()
	w.boots++
	w.host.down = false
	n := w.node()
	n.Status.NodeInfo.BootID = bootID(w.boots)
	w.setKernelBootID(bootID(w.boots) + "\n")
	if _, err := w.client.CoreV1().Nodes().UpdateStatus(w.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// bootID is the identity of a boot of the node, counted from 1.
func bootID(boots int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", boots) }

// setKernelBootID sets the text that the host's kernel shows as its boot id from now on.
func (w *world) setKernelBootID(text string) {
	w.t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(w.bootFile()), 0o755), os.WriteFile(w.bootFile(), []byte(text), 0o600)); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) bootFile() string {
	return filepath.Join(w.processTable, "sys", "kernel", "random", "boot_id")
}

// setConfigs gives the cluster an administrator's file with the configs, and restarts the agent with it.
func (w *world) setConfigs(configs map[string]catalog.MIGConfig) {
	w.t.Helper()
	w.file = configs
	w.settings.MIGConfigMap = config.ConfigMapKey{Namespace: "gpuslice", Name: "custom", Key: "config.yaml"}
	_, err := w.client.CoreV1().ConfigMaps("gpuslice").Create(w.t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "custom", Namespace: "gpuslice"}, Data: map[string]string{"config.yaml": "the file"},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	w.restart()
}

// Assignments is kubelet's answer: each pod is listed, and has the device that its annotation names. One that is starting lists none, and that is no error.
func (w *world) Assignments(ctx context.Context) (holders.Assignments, error) {
	<-time.After(w.kubeletDelay)
	if ctx.Err() != nil || w.kubeletSilent {
		return nil, holders.ErrKubeletUnavailable
	}
	out := holders.Assignments{}
	if w.kubeletStarting {
		return out, nil
	}
	pods, err := w.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for _, p := range pods.Items {
		given := map[string][]string{}
		if device := p.Annotations["device"]; device != "" {
			given[cmp.Or(p.Annotations["resource"], "nvidia.com/gpu")] = []string{device}
		}
		out[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}] = given
	}
	return out, nil
}

// Allocatable is kubelet's answer: what the plugin registered, also while kubelet is starting, since the plugin may be quicker than the list of pods.
func (w *world) Allocatable(ctx context.Context) (map[string][]string, error) {
	if ctx.Err() != nil || w.kubeletSilent {
		return nil, holders.ErrKubeletUnavailable
	}
	return w.offered, nil
}

// evict lets every pod go, at once or after its grace.
func (w *world) evict(action k8stesting.Action) (bool, runtime.Object, error) {
	if action.GetSubresource() != "eviction" {
		return false, nil, nil
	}
	eviction, ok := action.(k8stesting.CreateAction).GetObject().(*policyv1.Eviction)
	if !ok || eviction.DeleteOptions != nil && len(eviction.DeleteOptions.DryRun) > 0 {
		return true, nil, nil
	}
	if object, err := w.client.Tracker().Get(podResource, eviction.Namespace, eviction.Name); err == nil && w.grace == 0 && !w.keepsClaims(object) {
		return true, nil, w.client.Tracker().Delete(podResource, eviction.Namespace, eviction.Name)
	}
	return true, nil, w.terminate(eviction.Namespace, eviction.Name)
}

// keepsClaims reports whether kubelet cannot end the pod now: only a driver that runs releases the devices of its claims.
func (w *world) keepsClaims(object runtime.Object) bool {
	p, is := object.(*corev1.Pod)
	return is && len(holders.ClaimNames(p)) > 0 && !slices.ContainsFunc(w.podsIn("dra"), func(p corev1.Pod) bool {
		return p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning
	})
}

var podResource = corev1.SchemeGroupVersion.WithResource("pods")

// terminate begins the end of a pod, which ends in the turn after its grace period.
func (w *world) terminate(namespace, name string) error {
	object, err := w.client.Tracker().Get(podResource, namespace, name)
	if err != nil {
		return err
	}
	p, ok := object.(*corev1.Pod)
	if !ok || p.DeletionTimestamp != nil {
		return nil
	}
	p = p.DeepCopy()
	end := metav1.NewTime(time.Now().Add(w.grace))
	p.DeletionTimestamp = &end
	return w.client.Tracker().Update(podResource, p, namespace)
}

// podsIn lists the pods of a namespace or of all, without a request that the fake API server would remember to the end of the test.
func (w *world) podsIn(namespace string) []corev1.Pod {
	w.t.Helper()
	object, err := w.client.Tracker().List(podResource, corev1.SchemeGroupVersion.WithKind("Pod"), namespace)
	if err != nil {
		w.t.Fatal(err)
	}
	list, ok := object.(*corev1.PodList)
	if !ok {
		w.t.Fatalf("the list of pods is a %T", object)
	}
	return list.Items
}

// deleteEndedPods removes the pods that are past their grace period.
func (w *world) deleteEndedPods() {
	w.t.Helper()
	for _, p := range w.podsIn(metav1.NamespaceAll) {
		if p.DeletionTimestamp == nil || time.Now().Before(p.DeletionTimestamp.Time) || len(p.Finalizers) > 0 || w.keepsClaims(&p) {
			continue
		}
		if err := w.client.Tracker().Delete(podResource, p.Namespace, p.Name); err != nil {
			w.t.Fatal(err)
		}
	}
}

// turn does what the cluster does between two passes: the DaemonSet controller starts a plugin if none runs and no taint
// forbids it, the plugin reads the GPUs, and kubelet updates the node.
func (w *world) turn() {
	w.t.Helper()
	w.deleteEndedPods()
	if w.configManager {
		w.configManagerTurn()
	}
	n := w.node()
	fenced := slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool {
		return t.Key == config.TaintRepartitioning || t.Key == config.TaintNotReady || t.Key == secondStartup
	})
	w.startAndEndOperands(n)
	w.turnDRADriver(fenced)
	if w.daemon != "" && !fenced && !slices.ContainsFunc(w.podsIn("team"), func(p corev1.Pod) bool { return strings.HasPrefix(p.Name, "daemon-") }) && w.offers(w.daemon) {
		w.podsStarted++
		w.podWithClaim(fmt.Sprintf("daemon-%d", w.podsStarted), w.daemon, ofADaemonSet)
	}
	plugins := w.podsIn("kube-system")
	value, byLabel := n.Labels[config.LabelDevicePlugin]
	switch {
	case w.pluginOnHost:
	case len(plugins) == 0 && (fenced || w.noPlugin || byLabel && value != "true"):
		w.offered = map[string][]string{}
	case len(plugins) == 0:
		w.startPlugin(w.tolerations...)
	}
	w.advertise(n)
}

// offers reports whether NVIDIA's DRA driver offers the device.
func (w *world) offers(device string) bool {
	return slices.ContainsFunc(w.published, func(s resourcev1.ResourceSlice) bool {
		return slices.ContainsFunc(s.Spec.Devices, func(d resourcev1.Device) bool { return d.Name == device })
	})
}

// turnDRADriver does what the DaemonSet controller and kubelet do about NVIDIA's DRA driver. A new pod offers the GPUs as they are cut when it starts.
// Kubelet deletes the slices of a driver that has been away for half a minute.
func (w *world) turnDRADriver(fenced bool) {
	w.t.Helper()
	switch pods := w.podsIn("dra"); {
	case !w.draDriver:
		return
	case len(pods) == 1 && pods[0].Status.Phase == corev1.PodFailed: // kubelet has evicted it
		if err := w.client.Tracker().Delete(podResource, pods[0].Namespace, pods[0].Name); err != nil {
			w.t.Fatal(err)
		}
	case len(pods) > 0:
		w.driverSeen = time.Now()
		return
	}
	if !fenced {
		w.startDRADriver(w.driverGates)
		w.publish(w.driverDevices()...)
	} else if time.Since(w.driverSeen) > 30*time.Second {
		w.publish()
	}
}

// advertise does what kubelet does about the node's status: it writes what the plugin offers, if that is news.
func (w *world) advertise(n *corev1.Node) {
	w.t.Helper()
	before := n.Status.Allocatable
	n.Status.Allocatable = corev1.ResourceList{}
	for name, ids := range w.offered {
		n.Status.Allocatable[corev1.ResourceName(name)] = *resource.NewQuantity(int64(len(ids)), resource.DecimalSI)
	}
	for name := range n.Status.Capacity { // kubelet never removes a name
		if _, offered := w.offered[string(name)]; !offered {
			n.Status.Allocatable[name] = resource.MustParse("0")
		}
	}
	if equality.Semantic.DeepEqual(before, n.Status.Allocatable) { // kubelet writes news alone
		return
	}
	if _, err := w.client.CoreV1().Nodes().UpdateStatus(w.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// startAndEndOperands does what the DaemonSet controller does about operands: it starts and ends their pods by the labels of the node. It starts
// the device plugin's as startPlugin does.
func (w *world) startAndEndOperands(n *corev1.Node) {
	w.t.Helper()
	if len(w.operands) == 0 {
		return
	}
	pods := w.podsIn(metav1.NamespaceAll)
	for _, label := range w.operands {
		runs := false
		for _, p := range pods {
			if p.Spec.NodeSelector[label] == "" {
				continue
			}
			runs = true
			if n.Labels[label] != "true" {
				if w.operandGrace > 0 {
					w.grace = w.operandGrace
					if err := w.terminate(p.Namespace, p.Name); err != nil {
						w.t.Fatal(err)
					}
					continue
				}
				if err := w.client.Tracker().Delete(podResource, p.Namespace, p.Name); err != nil {
					w.t.Fatal(err)
				}
			}
		}
		if !runs && n.Labels[label] == "true" && label != config.LabelDevicePlugin {
			w.operandPod("gpu-operator", label, nil)
		}
	}
}

// operandPod runs a pod of the DaemonSet that selects on the label.
func (w *world) operandPod(namespace, label string, labels map[string]string) {
	w.t.Helper()
	w.podsStarted++
	name := fmt.Sprintf("%s-%d", strings.TrimPrefix(label, config.LabelOperandPrefix), w.podsStarted)
	_, err := w.client.CoreV1().Pods(namespace).Create(w.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, UID: types.UID(name), Labels: labels,
			OwnerReferences: ofDaemonSet("operand"),
		},
		Spec:   corev1.PodSpec{NodeName: nodeName, NodeSelector: map[string]string{label: "true"}, Containers: w.pluginContainers()},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
}

// pluginContainers are those of a device plugin that reads a config where the agent cannot read it.
func (w *world) pluginContainers() []corev1.Container {
	c := corev1.Container{Name: pluginContainer}
	if !w.withoutConfig {
		c.Env = []corev1.EnvVar{{Name: "CONFIG_FILE", Value: "/config/config.yaml"}}
	}
	return []corev1.Container{c}
}

// startPlugin starts a new pod of the device plugin's DaemonSet, which reads the present GPUs.
func (w *world) startPlugin(tolerations ...corev1.Toleration) {
	w.t.Helper()
	if slices.Contains(w.operands, config.LabelDevicePlugin) {
		w.operandPod("kube-system", config.LabelDevicePlugin, map[string]string{"name": "nvidia-device-plugin-ds"})
		w.offered = w.devices()
		return
	}
	w.podsStarted++
	name := fmt.Sprintf("plugin-%d", w.podsStarted)
	if w.pluginFile != "" {
		w.startConfigured(name)
		return
	}
	_, err := w.client.CoreV1().Pods("kube-system").Create(w.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), Labels: map[string]string{"name": "nvidia-device-plugin-ds"}, OwnerReferences: ofDaemonSet("plugin")},
		Spec:       corev1.PodSpec{NodeName: nodeName, Tolerations: tolerations, Containers: w.pluginContainers()},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{runsSince(metav1.Now())}},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	w.offered = w.devices()
	if w.offersGone {
		w.offered[nvml.ResourceMIGPrefix+"1g.10gb"] = append(w.offered[nvml.ResourceMIGPrefix+"1g.10gb"], "MIG-of-before")
	}
}

// runsSince is the status of a container that has run since then.
func runsSince(began metav1.Time) corev1.ContainerStatus {
	return corev1.ContainerStatus{Name: pluginContainer, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: began}}}
}

// pod runs a pod that kubelet has given the device, as the resource under which the plugin offers it.
func (w *world) pod(name, device string, change ...func(*corev1.Pod)) {
	w.t.Helper()
	as := nvml.ResourceGPU
	for resource, ids := range w.offered {
		if slices.Contains(ids, device) {
			as = resource
		}
	}
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: "team", UID: types.UID(name), Annotations: map[string]string{"device": device, "resource": as},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: name, UID: types.UID("of-" + name), Controller: new(true)}},
		},
		Spec: corev1.PodSpec{NodeName: nodeName, Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{corev1.ResourceName(as): resource.MustParse("1")},
		}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for _, c := range change {
		c(p)
	}
	if _, err := w.client.CoreV1().Pods(p.Namespace).Create(w.t.Context(), p, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// runs reports whether the pod is still there.
func (w *world) runs(name string) bool {
	w.t.Helper()
	_, err := w.client.CoreV1().Pods("team").Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		w.t.Fatal(err)
	}
	return err == nil
}

// failForGood lets a function of the GPUs' library fail more often than the agent tries.
func (w *world) failForGood(function string) {
	w.t.Helper()
	if err := w.gpus.Fail(function, gpusim.Fault{Return: gpusim.Unknown, Times: w.settings.Retry.Failures}); err != nil {
		w.t.Fatal(err)
	}
}

// setLost lets a GPU fall off the bus, or come back.
func (w *world) setLost(index int, lost bool) {
	w.t.Helper()
	if err := w.gpus.SetHealth(index, gpusim.Health{Lost: lost}); err != nil {
		w.t.Fatal(err)
	}
	w.offered = w.devices()
}

// devices returns the devices that the plugin offers under its strategy.
func (w *world) devices() map[string][]string {
	out := map[string][]string{}
	if w.pluginBroken {
		return out
	}
	gpus, err := w.gpus.Driver().Snapshot(w.t.Context())
	if err != nil {
		return out // like a plugin without a driver
	}
	for _, gpu := range gpus {
		if (!gpu.Enabled || w.pluginStrategy == config.MIGStrategyNone) && !gpu.Lost {
			out["nvidia.com/gpu"] = append(out["nvidia.com/gpu"], string(gpu.UUID))
		}
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				if w.pluginStrategy == config.MIGStrategyNone {
					continue
				}
				name := "nvidia.com/mig-" + strings.ReplaceAll(cmp.Or(w.renamed[d.Profile], d.Profile), "+", ".")
				if w.pluginStrategy == config.MIGStrategySingle {
					name = "nvidia.com/gpu"
				}
				out[name] = append(out[name], d.UUID)
			}
		}
	}
	return out
}

func (w *world) snapshot() []nvml.GPU {
	w.t.Helper()
	gpus, err := w.gpus.Driver().Snapshot(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	return gpus
}

func (w *world) node() *corev1.Node {
	w.t.Helper()
	n, err := w.client.CoreV1().Nodes().Get(w.t.Context(), nodeName, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}

// administrator is the field manager of everything that the agent does not write.
const administrator = "kubectl-edit"

// edit writes the node as a user does.
func (w *world) edit(change func(n *corev1.Node)) {
	w.t.Helper()
	n := w.node()
	change(n)
	if _, err := w.client.CoreV1().Nodes().Update(w.t.Context(), n, metav1.UpdateOptions{FieldManager: administrator}); err != nil {
		w.t.Fatal(err)
	}
}

// set sets a label of the node.
func (w *world) set(label, value string) {
	w.t.Helper()
	w.edit(func(n *corev1.Node) { metav1.SetMetaDataLabel(&n.ObjectMeta, label, value) })
}

// unset removes a label of the node.
func (w *world) unset(label string) {
	w.t.Helper()
	w.edit(func(n *corev1.Node) { delete(n.Labels, label) })
}

func (w *world) label(value string) {
	w.t.Helper()
	w.set(config.LabelMIGConfig, value)
}

// annotate sets an annotation of the node.
func (w *world) annotate(key, value string) {
	w.t.Helper()
	w.edit(func(n *corev1.Node) { metav1.SetMetaDataAnnotation(&n.ObjectMeta, key, value) })
}

// unannotate removes an annotation of the node, as any user may who can patch nodes.
func (w *world) unannotate(key string) {
	w.t.Helper()
	w.edit(func(n *corev1.Node) { delete(n.Annotations, key) })
}

// writeBetween lets another program write the node between the agent's observation and a write of the agent.
func (w *world) writeBetween(change func(*corev1.Node)) error {
	object, err := w.client.nodes.Get(nodeResource, "", nodeName)
	if err != nil {
		return err
	}
	n, ok := object.(*corev1.Node)
	if !ok {
		return fmt.Errorf("the node is a %T", object)
	}
	n = n.DeepCopy()
	change(n)
	return w.client.nodes.Update(nodeResource, n, "")
}

// patched calls the function with each patch of the node before it is made. Its error is the API server's answer.
func (w *world) patched(answer func(patch string) error) {
	w.client.PrependReactor("patch", "nodes", func(action k8stesting.Action) (bool, runtime.Object, error) {
		err := answer(string(action.(k8stesting.PatchAction).GetPatch())) //nolint:errcheck // it is a patch
		return err != nil, nil, err
	})
}

// killAtPatch has the agent die at its first patch of the node that is such a one: before the API server has it, or right after. No request reaches the
// API server from then on, until revive starts the next agent.
func (w *world) killAtPatch(such func(patch string) bool, after bool) (died func() bool, revive func()) {
	w.t.Helper()
	dead := false
	w.client.PrependReactor("*", "*", func(action k8stesting.Action) (bool, runtime.Object, error) {
		patch, ok := action.(k8stesting.PatchAction)
		now := !dead && ok && such(string(patch.GetPatch()))
		dead = dead || now
		return dead && !(now && after), nil, errors.New("the agent is dead")
	})
	return func() bool { return dead }, func() {
		w.t.Helper()
		if !dead {
			w.t.Fatal("the agent has not died")
		}
		w.client.ReactionChain = w.client.ReactionChain[1:]
		w.restart()
	}
}

// cordon cordons or uncordons the node, as an administrator does with kubectl.
func (w *world) cordon(on bool) {
	w.t.Helper()
	w.edit(func(n *corev1.Node) { n.Spec.Unschedulable = on })
}

// hasJournal reports whether there is a journal.
func (w *world) hasJournal() bool {
	w.t.Helper()
	_, pending := w.node().Annotations[config.AnnotationJournal]
	return pending
}

func (w *world) condition() corev1.NodeCondition {
	w.t.Helper()
	for _, c := range w.node().Status.Conditions {
		if c.Type == config.ConditionGPUPartitionReady {
			return c
		}
	}
	return corev1.NodeCondition{}
}

func (w *world) reason() config.Reason { w.t.Helper(); return config.Reason(w.condition().Reason) }

// holdDevice puts a process that is in no table of processes on a device.
func (w *world) holdDevice(device string, pid int) {
	w.t.Helper()
	if err := w.gpus.Hold(device, pid, "python", 100); err != nil {
		w.t.Fatal(err)
	}
}

// releaseDevice ends such a process.
func (w *world) releaseDevice(pid int) {
	w.t.Helper()
	if err := w.gpus.Release(pid); err != nil {
		w.t.Fatal(err)
	}
}

// mostPasses is several times what the longest wait of a test takes, an hour in which pods leave. A pass costs some milliseconds, however long the agent
// sleeps after it: so a wait that never ends fails within seconds.
const mostPasses = 3000

// pass lets the cluster take its turn, and then the agent, in the bubble's time.
func (w *world) pass() {
	w.t.Helper()
	if w.live != nil {
		w.live.pass()
		return
	}
	w.turn()
	if pause := w.agent.Pass(w.t.Context()); pause > 0 {
		<-time.After(pause)
	}
}

// passes lets the agent and the cluster take turns until stop returns true. It fails after mostPasses.
func (w *world) passes(what string, stop func() bool) {
	w.t.Helper()
	w.atMost(mostPasses, what, stop)
}

// spend lets turns pass for at least d.
func (w *world) spend(d time.Duration) {
	w.t.Helper()
	began := time.Now()
	w.atMost(10*mostPasses, "end of "+d.String(), func() bool { return time.Since(began) >= d })
}

// atMost lets the agent and the cluster take turns until stop returns true, and fails after n passes.
func (w *world) atMost(n int, what string, stop func() bool) {
	w.t.Helper()
	began := time.Now()
	for range n {
		if stop() {
			return
		}
		w.pass()
	}
	c := w.condition()
	w.t.Fatalf("no %s in %d passes, which took %s; the node says %s: %s", what, n, time.Since(began), c.Reason, c.Message)
}

// startChange asks for the config and lets turns pass until the first GPU has its first instance.
func (w *world) startChange(name string) {
	w.t.Helper()
	w.label(name)
	w.passes("the first instance", func() bool { return len(w.snapshot()[0].Instances) == 1 })
}

// untilReason lets turns pass until the condition has the reason.
func (w *world) untilReason(reason config.Reason) corev1.NodeCondition {
	w.t.Helper()
	w.passes(string(reason), func() bool { return w.reason() == reason })
	return w.condition()
}

// untilCordoned lets turns pass until the node is cordoned.
func (w *world) untilCordoned() {
	w.t.Helper()
	w.passes("the fence", func() bool { return w.node().Spec.Unschedulable })
}

// passesWithin runs at most n passes until stop returns true, and reports whether it did. Before each, the cluster has its turn.
func (w *world) passesWithin(n int, stop func() bool) bool {
	w.t.Helper()
	for range n {
		if stop() {
			return true
		}
		w.pass()
	}
	c := w.condition()
	w.t.Logf("after %d passes the node says %s: %s", n, c.Reason, c.Message)
	return false
}

// done reports whether the node is as the config asks, without a journal.
func (w *world) done(name string) func() bool {
	return func() bool {
		c := w.condition()
		return c.Reason == string(config.ReasonConverged) && strings.HasPrefix(c.Message, name+":") && !w.hasJournal()
	}
}

// settle lets turns pass until the condition has one of the reasons, and there is no journal.
func (w *world) settle(reasons ...config.Reason) corev1.NodeCondition {
	w.t.Helper()
	w.passes(fmt.Sprint(reasons), func() bool {
		return slices.Contains(reasons, config.Reason(w.condition().Reason)) && !w.hasJournal()
	})
	return w.condition()
}

// converge asks for the config and lets turns pass until the node has it and is given back.
func (w *world) converge(name string) {
	w.t.Helper()
	w.label(name)
	w.reach(name)
}

// reach lets turns pass until the node has the config and is given back.
func (w *world) reach(name string) {
	w.t.Helper()
	w.passes(name, w.done(name))
	w.expectGivenBack()
}

// expectGivenBack fails the test if anything of a change is left on the node.
func (w *world) expectGivenBack() {
	w.t.Helper()
	n := w.node()
	ours := slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return strings.HasPrefix(t.Key, "gpuslice.io/") })
	if n.Spec.Unschedulable || ours || n.Annotations[config.AnnotationJournal] != "" {
		w.t.Errorf("the node is not given back: unschedulable %t, taints %v, journal %q",
			n.Spec.Unschedulable, n.Spec.Taints, n.Annotations[config.AnnotationJournal])
	}
}

// breakTable makes the host's process table unreadable.
func (w *world) breakTable() {
	w.t.Helper()
	if err := os.Remove(filepath.Join(w.processTable, "self")); err != nil {
		w.t.Fatal(err)
	}
}
