package agent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	restfake "k8s.io/client-go/rest/fake"
	"k8s.io/client-go/tools/cache"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// dynamicGate has NVIDIA's DRA driver cut the GPUs itself.
const dynamicGate = "DynamicMIG=true"

// startDRADriver starts a pod of NVIDIA's DRA driver with these feature gates.
func (w *world) startDRADriver(gates string, change ...func(*corev1.Pod)) {
	w.t.Helper()
	w.podsStarted++
	name := fmt.Sprintf("driver-%d", w.podsStarted)
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "dra", Name: name, UID: types.UID(name), OwnerReferences: ofDaemonSet("dra-driver")},
		Spec: corev1.PodSpec{
			NodeName: nodeName,
			Volumes: []corev1.Volume{{Name: "registry", VolumeSource: corev1.VolumeSource{
				HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/plugins_registry"},
			}}},
			Containers: []corev1.Container{{
				Name: "gpus", Command: []string{"bash", "-c"}, Args: []string{"gpu-kubelet-plugin -v 6"}, Env: []corev1.EnvVar{{Name: "FEATURE_GATES", Value: gates}},
			}},
		},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{runsSince(metav1.Now())},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		},
	}
	for _, c := range change {
		c(p)
	}
	if _, err := w.client.CoreV1().Pods(p.Namespace).Create(w.t.Context(), p, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// publish has the driver offer these devices: nil deletes its slices, and a driver that finds no device has a slice without any.
func (w *world) publish(devices ...resourcev1.Device) {
	w.t.Helper()
	w.published = nil
	if devices != nil {
		w.published = []resourcev1.ResourceSlice{{ObjectMeta: metav1.ObjectMeta{Name: "slice-1"}, Spec: resourcev1.ResourceSliceSpec{
			Driver: holders.ClaimDriver, NodeName: new(nodeName), Pool: resourcev1.ResourcePool{Name: nodeName, ResourceSliceCount: 1}, Devices: devices,
		}}}
	}
	w.show(w.published)
}

// show has watches show these slices, in place of those before.
func (w *world) show(all []resourcev1.ResourceSlice) {
	w.t.Helper()
	of := resourcev1.SchemeGroupVersion.WithResource("resourceslices")
	object, err := w.client.Tracker().List(of, resourcev1.SchemeGroupVersion.WithKind("ResourceSlice"), "")
	if err != nil {
		w.t.Fatal(err)
	}
	former := object.(*resourcev1.ResourceSliceList) //nolint:errcheck // it is a list of slices
	for i := range all {
		if slices.ContainsFunc(former.Items, func(s resourcev1.ResourceSlice) bool { return s.Name == all[i].Name }) {
			err = errors.Join(err, w.client.Tracker().Update(of, all[i].DeepCopy(), ""))
			continue
		}
		err = errors.Join(err, w.client.Tracker().Create(of, all[i].DeepCopy(), ""))
	}
	for i := range former.Items {
		if name := former.Items[i].Name; !slices.ContainsFunc(all, func(s resourcev1.ResourceSlice) bool { return s.Name == name }) {
			err = errors.Join(err, w.client.Tracker().Delete(of, "", name))
		}
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// wholeGPU is a device of the driver.
func wholeGPU(name, uuid string) resourcev1.Device {
	return resourcev1.Device{Name: name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"uuid": {StringValue: &uuid}}}
}

// offering answers requests for ResourceSlices, which client-go's fake cannot.
type offering struct {
	kube.Interface
	w *world
}

// IsWatchListSemanticsUnSupported reports to client-go's informers whether they may ask for a list as a watch.
func (o offering) IsWatchListSemanticsUnSupported() bool {
	says, has := o.Interface.(interface{ IsWatchListSemanticsUnSupported() bool })
	return has && says.IsWatchListSemanticsUnSupported()
}

// ResourceClaims implements kube.Interface. What the test has a read of a claim do takes its time beside other requests, which the fake makes one by one.
func (o offering) ResourceClaims(namespace string) kube.ResourceClaims {
	return claimReader{o.Interface.ResourceClaims(namespace), o.w}
}

type claimReader struct {
	kube.ResourceClaims
	w *world
}

// Get implements kube.ResourceClaims.
func (c claimReader) Get(ctx context.Context, name string, options metav1.GetOptions) (*resourcev1.ResourceClaim, error) {
	if c.w.readsClaim != nil {
		if err := c.w.readsClaim(ctx, name); err != nil {
			return nil, err
		}
	}
	return c.ResourceClaims.Get(ctx, name, options)
}

// RawCore implements kube.Interface. Watches, which only Run and Recover begin, are refused: each observation then asks the fake.
func (offering) RawCore() cache.Getter {
	return &restfake.RESTClient{
		NegotiatedSerializer: serializer.NewCodecFactory(runtime.NewScheme()).WithoutConversion(), GroupVersion: corev1.SchemeGroupVersion,
		Client: restfake.CreateHTTPClient(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusForbidden, Body: http.NoBody}, nil
		}),
	}
}

// RawResource implements kube.Interface.
func (o offering) RawResource() cache.Getter {
	kinds := runtime.NewScheme()
	return &restfake.RESTClient{
		NegotiatedSerializer: serializer.NewCodecFactory(kinds).WithoutConversion(), GroupVersion: resourcev1.SchemeGroupVersion,
		Client: restfake.CreateHTTPClient(func(*http.Request) (*http.Response, error) {
			if o.w.slicesFail {
				return &http.Response{StatusCode: http.StatusForbidden, Body: http.NoBody}, nil
			}
			var body bytes.Buffer
			list := &resourcev1.ResourceSliceList{TypeMeta: metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceSliceList"}, Items: slices.Concat(o.w.published, o.w.others)}
			err := protobuf.NewSerializer(kinds, kinds).Encode(list, &body)
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(&body), Header: http.Header{"Content-Type": {runtime.ContentTypeProtobuf}}}, err
		}),
	}
}

// crashes is the status of a pod that ends again and again.
func crashes(p *corev1.Pod) {
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{
		Name: "gpus", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
		LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1, Reason: "Error"}},
	}}
}

// expectRefused fails the test unless the condition refuses with the reason and these words, and the node is undisturbed.
func (w *world) expectRefused(reason config.Reason, words ...string) {
	w.t.Helper()
	c := w.condition()
	if c.Reason != string(reason) || c.Status != corev1.ConditionFalse {
		w.t.Errorf("%s %s, want %s: %s", c.Status, c.Reason, reason, c.Message)
	}
	for _, want := range words {
		if !strings.Contains(c.Message, want) {
			w.t.Errorf("want %q in %s", want, c.Message)
		}
	}
	if strings.Contains(c.Message, "deploy NVIDIA's device plugin") {
		w.t.Errorf("a device plugin beside the driver would give out each GPU twice: %s", c.Message)
	}
	w.expectGivenBack()
}

// Where NVIDIA's DRA driver cuts the GPUs itself, it would destroy what the agent makes, and the agent what pods have by claims.
func TestGPUsThatTheDRADriverCutsAreNotCut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.noPlugin, w.draDriver, w.driverGates = true, true, dynamicGate
		w.profiles(`{apiVersion: gpuslice.io/v1alpha1, kind: Profiles, profiles: {
			cut: {mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}], labels: {team: a}},
			shared: {mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}], sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 2}]}}}}}`)
		calls := w.countChanges(nil)
		random := rand.New(rand.NewPCG(1, 2)) // the same labels each time
		known := catalog.Merge(catalog.Generate(w.snapshot()), nil).Names()
		for range 200 {
			w.edit(func(n *corev1.Node) {
				delete(n.Labels, config.LabelProfile)
				metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelMIGConfig, known[random.IntN(len(known))])
				if pick := random.IntN(4); pick < 2 {
					n.Labels[config.LabelProfile] = []string{"cut", "shared"}[pick]
				}
			})
			w.turn()
			w.agent.Pass(t.Context())
			if n := w.node().Labels; n[config.LabelProfile] == "" && n[config.LabelMIGConfig] == "all-enabled" { // of each GPU the driver makes parts anyway
				w.reach("all-enabled")
				continue
			}
			w.expectRefused(config.ReasonForeignOwner, "claims of class mig.nvidia.com", "pod dra/driver-1")
		}
		if s := w.status(); s.Owner != api.OwnerDRADynamic || s.Phase != api.PhaseStalled {
			t.Errorf("the status is %+v", s)
		}
		w.unset(config.LabelProfile)
		given := w.ask(config.LabelMIGConfig + "=all-1g.10gb")
		if given.Reason != config.ReasonForeignOwner || len(given.Steps) > 0 {
			t.Errorf("the plan is %+v", given)
		}
		if *calls > 0 {
			t.Errorf("%d calls that change a GPU", *calls)
		}
	})
}

// A profile without a geometry goes on: its labels are the node's.
func TestLabelsOfAProfileArePublishedWhereTheDRADriverOwnsTheGPUs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.noPlugin = true
		w.startDRADriver(dynamicGate)
		w.profiles(`{apiVersion: gpuslice.io/v1alpha1, kind: Profiles, profiles: {named: {labels: {team: a}}}}`)
		w.profile("named")
		w.reach("named")
		if said := w.condition().Message; said != "named: as claims ask" {
			t.Errorf("the node says %s", said)
		}
		if got := w.node().Labels["team"]; got != "a" {
			t.Errorf("label team is %q", got)
		}
		w.unset(config.LabelProfile)
		w.settle(config.ReasonNotRequested)
		if d := w.agent.Diagnose(t.Context(), true); slices.ContainsFunc(d.Causes, func(f api.Finding) bool { return f.Cause == api.CauseCapacityMissing }) {
			t.Errorf("kubelet has no device of a plugin, as it should be: %+v", d.Causes)
		}
	})
}

func TestSharingIsTheClaimsWhereTheDRADriverOwnsTheGPUs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.noPlugin = true
		w.startDRADriver(dynamicGate)
		w.deploySharing()
		for _, name := range []string{"two", "clients"} {
			w.profile(name)
			w.spend(time.Minute)
			w.expectRefused(config.ReasonImpossibleSharing, "apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig", "strategy: TimeSlicing", "MPS", config.LabelProfile+"="+name)
		}
		w.unset(config.LabelProfile)
		w.set(config.LabelDevicePluginConfig, "shared")
		w.spend(time.Minute)
		w.expectRefused(config.ReasonImpossibleSharing, config.LabelDevicePluginConfig+"=shared")
	})
}

// Before the driver has offered GPUs, nothing shows whether it cuts them itself. A driver that cannot start needs its user.
func TestADRADriverThatOffersNothingIsAwaitedForAMinute(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.startDRADriver("", crashes)
		w.turn()
		w.agent.Pass(t.Context())
		w.label("all-1g.10gb")
		w.spend(50 * time.Second)
		w.expectRefused(config.ReasonForeignOwner, "changes nothing until NVIDIA's DRA driver (pod dra/driver-1) advertises GPUs")
		if s := w.status(); s.Phase != api.PhaseWaiting || s.Owner != api.OwnerDRAStarting {
			t.Errorf("after 50 seconds the status is %+v", s)
		}
		w.spend(11 * time.Second)
		w.expectRefused(config.ReasonForeignOwner, "see the log of NVIDIA's DRA driver (pod dra/driver-1)", "container gpus waits (CrashLoopBackOff)", "exit code 1 (Error)")
		if s := w.status(); s.Phase != api.PhaseStalled {
			t.Errorf("after a minute the status is %+v", s)
		}
		if err := w.client.Tracker().Delete(podResource, "dra", "driver-1"); err != nil {
			t.Fatal(err)
		}
		w.reach("all-1g.10gb")
	})
}

// The owner is observed again right before the first GPU is touched: what has come since the fence ends the change.
func TestAChangeEndsWhereTheDRADriverTakesTheGPUsOver(t *testing.T) {
	t.Parallel()
	t.Run("before the first call", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := busy(t)
			relent := w.budgetKeepsTeam()
			calls := w.countChanges(nil)
			w.label("all-1g.10gb")
			w.untilCordoned()
			w.startDRADriver(dynamicGate)
			relent()
			w.settle(config.ReasonForeignOwner)
			if *calls > 0 {
				t.Errorf("%d calls that change a GPU", *calls)
			}
			w.expectGivenBack()
		})
	})
	t.Run("after the first call", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.converge("all-balanced")
			calls := w.countChanges(func(call int) {
				if call == 1 {
					w.startDRADriver(dynamicGate)
				}
			})
			w.label("all-1g.10gb")
			w.settle(config.ReasonForeignOwner)
			if *calls != 2 { // that during which it came was the last
				t.Errorf("%d calls that change a GPU, want 2", *calls)
			}
			w.expectGivenBack()
		})
	})
}

// One or the other: two pods may get a GPU that a device plugin and NVIDIA's DRA driver give out.
func TestAGPUThatThePluginAndTheDRADriverGiveOutIsNotCut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		calls := w.countChanges(nil)
		w.turn()
		w.startDRADriver("")
		w.publish(wholeGPU("gpu-1", w.gpus.UUIDs()[1]))
		w.label("all-1g.10gb")
		w.spend(time.Minute)
		w.expectRefused(config.ReasonForeignOwner, "pod kube-system/plugin-1", "pod dra/driver-2", "both allocate GPU 1")
		if s := w.status(); s.Owner != api.OwnerBoth || *calls > 0 {
			t.Errorf("%d calls that change a GPU; the status is %+v", *calls, s)
		}
		w.profiles(`{apiVersion: gpuslice.io/v1alpha1, kind: Profiles, profiles: {named: {labels: {team: a}}}}`)
		for _, ask := range []func(){func() { w.unset(config.LabelMIGConfig) }, func() { w.profile("named") }} { // no success, whatever is asked for
			ask()
			w.spend(10 * time.Minute)
			w.expectRefused(config.ReasonForeignOwner, "both allocate GPU 1")
			if d := w.agent.Diagnose(t.Context(), true); !strings.Contains(d.GPUs.Refused, "both allocate GPU 1") {
				t.Errorf("the diagnosis says %q of the GPUs", d.GPUs.Refused)
			}
		}
		w.unset(config.LabelProfile)
		w.label("all-1g.10gb")
		w.publish()
		if err := w.client.Tracker().Delete(podResource, "dra", "driver-2"); err != nil {
			t.Fatal(err)
		}
		w.reach("all-1g.10gb")
	})
}

// Two DRA drivers on one node are two schedulers' books of the same GPUs. A driver of other devices does not matter.
func TestAGPUThatAnotherDRADriverGivesOutIsNotCut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.noPlugin, w.draDriver = true, true
		w.spend(time.Minute)
		ofOther := func(driver, attribute, value string) resourcev1.ResourceSlice {
			return resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "z-" + driver}, Spec: resourcev1.ResourceSliceSpec{
				Driver: driver, NodeName: new(nodeName), Pool: resourcev1.ResourcePool{Name: nodeName, ResourceSliceCount: 1},
				Devices: []resourcev1.Device{{Name: "d", Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{resourcev1.QualifiedName(attribute): {StringValue: &value}}}},
			}}
		}
		const bus = "resource.kubernetes.io/pciBusID"
		w.others = []resourcev1.ResourceSlice{ofOther("compute-domain.nvidia.com", "type", "channel"), ofOther("dra.net", bus, "0000:99:00.0")}
		w.label("all-1g.10gb")
		w.reach("all-1g.10gb")

		calls := w.countChanges(nil)
		w.others = append(w.others, ofOther("hami.example", bus, w.snapshot()[1].PCI))
		w.label("all-disabled")
		w.spend(time.Minute)
		w.expectRefused(config.ReasonForeignOwner, "NVIDIA's DRA driver (pod dra/", "DRA driver hami.example (device d)", "both allocate GPU 1")
		w.unset(config.LabelMIGConfig)
		w.spend(10 * time.Minute)
		w.expectRefused(config.ReasonForeignOwner, "DRA driver hami.example (device d)")
		if *calls > 0 {
			t.Errorf("%d calls that change a GPU", *calls)
		}
		others, pci := w.others[:2:2], w.snapshot()[1].PCI
		w.others = others
		w.label("all-disabled")
		w.reach("all-disabled")

		w.countChanges(func(call int) { // a change that has begun is completed first
			if call == 5 {
				w.others = append(others, ofOther("hami.example", bus, pci))
			}
		})
		w.label("all-1g.10gb")
		w.spend(time.Hour)
		w.expectRefused(config.ReasonForeignOwner, "DRA driver hami.example (device d)")
		w.expectGivenBack()
		if n := len(w.snapshot()[1].Instances); n != 7 {
			t.Errorf("GPU 1 has %d instances", n)
		}
	})
}

// driverDevices are the devices that the driver finds on the GPUs.
func (w *world) driverDevices() (out []resourcev1.Device) {
	w.t.Helper()
	out = []resourcev1.Device{}
	for _, gpu := range w.snapshot() {
		if w.driverGates == dynamicGate {
			out = append(out, dynamicDevices(gpu)...)
			continue
		}
		if !gpu.Enabled || w.offersGone {
			out = append(out, wholeGPU(fmt.Sprintf("gpu-%d", gpu.Minor), string(gpu.UUID)))
		}
		for _, i := range gpu.Instances {
			d := wholeGPU(fmt.Sprintf("gpu-%d-mig-%s-%d", gpu.Minor, strings.ReplaceAll(i.Profile, ".", ""), i.Start), i.Devices[0].UUID)
			d.Attributes["profile"] = resourcev1.DeviceAttribute{StringValue: &i.Devices[0].Profile}
			d.Attributes["parentUUID"] = resourcev1.DeviceAttribute{StringValue: new(string(gpu.UUID))}
			out = append(out, d)
		}
	}
	return out
}

// The driver reads how the GPUs are cut when it starts, and never again: so the agent starts it again, and the slices prove the change. Beside parts of
// instances it does not start at all.
func TestGPUsThatTheDRADriverGivesOutAreCutAndItStartsAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &pressure{world: newWorld(t, h100)}
		w.noPlugin, w.draDriver = true, true
		m := w.measured()
		w.spend(time.Minute)
		given := w.ask(config.LabelMIGConfig + "=all-1g.10gb")
		if !slices.Contains(given.Steps, "restart NVIDIA's DRA driver dra/driver-1") || len(given.Notes) != 1 || !strings.Contains(given.Notes[0], "GPUCluster's DCGM exporter") {
			t.Errorf("the plan is %+v", given)
		}
		w.removeRequest()
		w.converge("all-1g.10gb")
		for _, name := range []string{"gpuslice_capacity_expected", "gpuslice_capacity_kubelet", "gpuslice_capacity_allocatable"} { // an alert compares the first with the last
			if got := counters(t, m); got[name+" nvidia.com/mig-1g.10gb"] != 14 {
				t.Errorf("%s: %v", name, got)
			}
		}
		if c := w.world.condition(); !strings.Contains(c.Message, "all-1g.10gb: mig.nvidia.com 1g.10gb 14") {
			t.Errorf("the node says %s", c.Message)
		}
		if pods := w.podsIn("dra"); len(pods) != 1 || pods[0].Name != "driver-2" {
			t.Errorf("pods of the driver: %v, want the second one", pods)
		}
		calls := w.countChanges(nil)
		w.setConfigs(map[string]catalog.MIGConfig{"mine": {{All: true, MIG: true, Devices: map[string]int{"1c.3g.40gb": 1}}}})
		w.label("mine")
		w.spend(time.Minute)
		w.expectRefused(config.ReasonImpossibleGeometry, "pod dra/driver-2")
		if said := jsonOf(t, w.agent.Diagnose(t.Context(), true)); !strings.Contains(said, `"owner":"DRA static"`) || strings.Contains(said, "device plugin on this node") {
			t.Errorf("the diagnosis says %s", said)
		}
		if *calls > 0 {
			t.Errorf("%d calls that change a GPU", *calls)
		}
	})
}

// A driver that watches the health of GPUs has them open, so that no mode of theirs can change while it runs.
func TestADRADriverThatWatchesTheHealthOfGPUsMakesWayForAMode(t *testing.T) {
	t.Parallel()
	for gates, pauses := range map[string]bool{"": false, "NVMLDeviceHealthCheck=true": true, "NVMLDeviceHealthCheck=false": false, "AllAlpha=true,DynamicMIG=false": true} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.noPlugin = true
			w.startDRADriver(gates)
			w.publish(w.driverDevices()...)
			w.spend(time.Minute)
			steps := w.ask(config.LabelMIGConfig + "=all-1g.10gb").Steps
			pause, mode := slices.Index(steps, "pause NVIDIA's DRA driver dra/driver-1"), slices.Index(steps, "GPU 0: turn MIG on")
			if (pause >= 0) != pauses || pause > mode || mode < 0 {
				t.Errorf("%q: the steps are %q", gates, steps)
			}
		})
	}
}

// A pod that has GPUs by admin access alone, as one for metrics, keeps the driver's library open, and no mode changes while it runs. It holds no GPU: where
// no mode changes, it stays.
func TestAPodWithAdminAccessIsPausedBeforeAModeChanges(t *testing.T) {
	t.Parallel()
	for models, pauses := range map[string]bool{h100: true, cutH100: false} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, models)
			w.noPlugin = true
			w.startDRADriver("")
			w.publish(wholeGPU("gpu-0", w.gpus.UUIDs()[0]), wholeGPU("gpu-1", w.gpus.UUIDs()[1]))
			w.podWithClaim("metrics", "gpu-0")
			w.asAdmin("metrics")
			w.spend(time.Minute)
			steps := w.ask(config.LabelMIGConfig + "=all-1g.10gb").Steps
			named := func(s string) bool { return strings.Contains(s, "team/metrics") }
			pause, mode := slices.IndexFunc(steps, named), slices.Index(steps, "GPU 0: turn MIG on")
			if (pause >= 0) != pauses || (mode >= 0) != pauses || pause > mode || pauses && !strings.HasPrefix(steps[pause], "pause ") {
				t.Errorf("a mode changes: %t, and the steps are %q", pauses, steps)
			}
		})
	}
}

// Between the cut and the proof the driver may be away for good: the change is undone, and the node given back once the driver offers what was before.
func TestADRADriverThatDoesNotComeBackEndsTheChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.noPlugin, w.draDriver = true, true
		w.spend(time.Minute)
		w.label("all-1g.10gb")
		w.passes("the cut", func() bool { return len(w.snapshot()[1].Instances) == 7 })
		w.draDriver = false
		w.passes("the undo", func() bool { return len(w.snapshot()[0].Instances) == 0 })
		if c := w.condition(); !strings.Contains(c.Message, "NVIDIA's DRA driver does not run on this node") || !w.node().Spec.Unschedulable {
			t.Errorf("the node says %s", c.Message)
		}
		w.publish() // kubelet deletes the slices of a driver that is away
		w.spend(time.Minute)
		w.draDriver = true
		w.settle(config.ReasonCapacityMismatch)
		w.expectRefused(config.ReasonCapacityMismatch, "NVIDIA's DRA driver does not run on this node")
	})
}

// Kubelet deletes all slices when it starts, and a driver may miss that. Kubelet's own second deletion comes half a minute after a socket went.
func TestADriverThatHasLostItsSlicesIsRestarted(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		keep     func(*world)
		comes    bool // the restart helps
		restarts int  // in two hours
		says     []string
	}{
		"a label asks for a geometry":   {comes: true, restarts: 1},
		"and the restart does not help": {restarts: 3, says: []string{"delete pod dra/driver-", "is ready, and has no ResourceSlice for the node", "has advertised no GPU since", "changes nothing until it does"}},
		"nothing is asked for": {
			keep: func(w *world) { w.unset(config.LabelMIGConfig) }, says: []string{"delete pod dra/driver-2, so that its DaemonSet starts another: it is ready, and has no ResourceSlice"},
		},
		"the node is held":   {keep: func(w *world) { w.annotate(config.AnnotationHold, "x") }},
		"it is not ready":    {keep: func(w *world) { w.setDriver(w.podsIn("dra")[0], func(p *corev1.Pod) { p.Status.Conditions = nil }) }, says: []string{"see the log of"}},
		"no right to see it": {keep: func(w *world) { w.slicesFail = true }, says: []string{"cannot be read"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.noPlugin, w.draDriver = true, true
				w.spend(time.Minute)
				w.converge("all-1g.10gb")
				if row.keep != nil {
					row.keep(w)
					w.spend(time.Minute)
				}
				w.draDriver = row.comes
				w.publish()
				before := w.podsIn("dra")[0].Name
				restarts := 0
				for i := range 2 * 360 {
					w.spend(10 * time.Second)
					if pods := w.podsIn("dra"); len(pods) == 0 && !row.comes {
						w.startDRADriver("")
					}
					if now := w.podsIn("dra")[0].Name; now != before {
						before = now
						if restarts++; i < 5 {
							t.Errorf("restarted after %d s, while the slices may come", 10*(i+1))
						}
					}
				}
				if restarts != row.restarts {
					t.Errorf("%d restarts, want %d", restarts, row.restarts)
				}
				c := w.condition()
				for _, want := range row.says {
					if !strings.Contains(c.Message, want) {
						t.Errorf("want %q in %s", want, c.Message)
					}
				}
				if row.comes {
					w.settle(config.ReasonConverged)
				} else if c.Status == corev1.ConditionTrue && row.keep == nil {
					t.Errorf("%s: %s", c.Reason, c.Message)
				}
				w.expectGivenBack()
			})
		})
	}
}

// replacements are what takes NVIDIA's DRA driver from the node for a while. Its DaemonSet starts another pod.
var replacements = map[string]func(w *world, driver corev1.Pod){
	"deleted at once": func(w *world, driver corev1.Pod) { w.deleteDriver(driver) },
	"rolled out":      func(w *world, driver corev1.Pod) { w.terminateDriver(driver) },
	"evicted by kubelet": func(w *world, driver corev1.Pod) {
		w.setDriver(driver, func(p *corev1.Pod) { p.Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted"} })
	},
}

func (w *world) deleteDriver(driver corev1.Pod) {
	w.t.Helper()
	if err := w.client.Tracker().Delete(podResource, driver.Namespace, driver.Name); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) terminateDriver(driver corev1.Pod) {
	w.t.Helper()
	if err := w.terminate(driver.Namespace, driver.Name); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) setDriver(driver corev1.Pod, change func(*corev1.Pod)) {
	w.t.Helper()
	change(&driver)
	if err := w.client.Tracker().Update(podResource, &driver, driver.Namespace); err != nil {
		w.t.Fatal(err)
	}
}

// ofADaemonSet makes a pod one of a tenant's DaemonSet.
func ofADaemonSet(p *corev1.Pod) { p.OwnerReferences = ofDaemonSet("tenant") }

// asAdmin has the pod read all GPUs by its claim, and hold none.
func (w *world) asAdmin(pod string) {
	w.t.Helper()
	claims := w.client.ResourceV1().ResourceClaims("team")
	claim, err := claims.Get(w.t.Context(), pod+"-gpu", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	claim.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	if _, err := claims.Update(w.t.Context(), claim, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// Kubelet ends a pod with claims only while the driver runs, and a DaemonSet may replace the driver's pod at any moment: its successor has to start, whatever
// the agent keeps away.
func TestTheDRADriverMayBeReplacedAtAnyMomentOfAChange(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		gates string
		pods  func(w *world)
		to    string // the config
	}{
		"instances":                        {"", func(*world) {}, "one"},
		"instances of a DaemonSet's pod":   {"", func(w *world) { w.daemon = "gpu-0-mig-3g40gb-4" }, "one"},
		"a mode":                           {"", func(*world) {}, "off"},
		"a mode, with a client":            {"", func(w *world) { w.podWithClaim("metrics", "gpu-1-mig-3g40gb-0", ofADaemonSet); w.asAdmin("metrics") }, "off"},
		"a mode, with the driver's health": {"NVMLDeviceHealthCheck=true", func(*world) {}, "off"},
		"a mode, with both": {
			"NVMLDeviceHealthCheck=true", func(w *world) { w.podWithClaim("metrics", "gpu-1-mig-3g40gb-0", ofADaemonSet); w.asAdmin("metrics") }, "off",
		},
	} {
		for way, replace := range replacements {
			t.Run(name+", "+way, func(t *testing.T) {
				t.Parallel()
				for moment, over := 0, false; !over; moment++ {
					synctest.Test(t, func(t *testing.T) {
						w := newWorld(t, h100)
						w.noPlugin, w.draDriver, w.driverGates = true, true, row.gates
						w.setConfigs(map[string]catalog.MIGConfig{
							"three": {{All: true, MIG: true, Devices: map[string]int{"3g.40gb": 2}}},
							"one":   {{Indices: []int{0}, MIG: true, Devices: map[string]int{"7g.80gb": 1}}},
							"off":   {{Indices: []int{0}}},
						})
						w.spend(time.Minute)
						w.converge("three")
						w.grace = 10 * time.Second
						w.podWithClaim("of-0", "gpu-0-mig-3g40gb-0")
						row.pods(w)
						w.label(row.to)
						w.passes("the journal", w.hasJournal)
						began, passes := time.Now(), 0
						w.passes(fmt.Sprintf("%s, %d passes after the fence", row.to, moment), func() bool {
							if pods := w.podsIn("dra"); passes == moment && len(pods) > 0 {
								replace(w, pods[0])
							} else if passes == moment {
								passes--
							}
							passes++
							return passes > moment && w.done(row.to)()
						})
						over = passes <= moment+1
						w.expectGivenBack()
						if took := time.Since(began); took > 10*time.Minute || w.runs("of-0") {
							t.Errorf("%d passes after the fence it took %s; of-0 runs %t", moment, took, w.runs("of-0"))
						}
					})
				}
			})
		}
	}
}
