package node_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/node"
)

const draDriver = "gpu.nvidia.com"

// withDRADriver is what nodes of NVIDIA's DRA driver share. Their control plane is their own: it has a DeviceClass that answers to nvidia.com/gpu.
var withDRADriver struct {
	once  sync.Once
	parts node.Parts
	err   error
}

// withShort are the tests with NVIDIA's DRA driver that run with -short: a control plane and two minutes of a small machine are enough.
var withShort = []string{"TestExactlyTheClaimantsOfTheCutGPULeave", "TestInRandomChangesOnlyClaimantsOfWhatGoesLeave"}

// newDRARig starts a node that has NVIDIA's DRA driver in place of its device plugin, in the mode.
func newDRARig(t *testing.T, spec, settings, mode string) *rig {
	t.Helper()
	if name, _, _ := strings.Cut(t.Name(), "/"); testing.Short() && !slices.Contains(withShort, name) {
		t.Skip("with -short, NVIDIA's DRA driver is started by " + strings.Join(withShort, " and ") + " alone")
	}
	build(t)
	c := clustertest.Apart(t, "dra")
	withDRADriver.once.Do(func() {
		withDRADriver.parts = common.parts
		if withDRADriver.err = withDRADriver.parts.BuildDRADriver(t.Context(), binaries.Builder{Log: os.Stderr}); withDRADriver.err == nil {
			withDRADriver.err = deploy(c, "manifests/dra-driver.yaml")
		}
	})
	if withDRADriver.err != nil {
		t.Fatal(withDRADriver.err)
	}
	return rigIn(t, c, spec, settings, func(o *node.Options) {
		o.Parts, o.Labels = withDRADriver.parts, map[string]string{node.DRADriverLabel: mode}
	})
}

func TestNVIDIAsDRADriverOffersTheGPUsAndGivesThemToPods(t *testing.T) {
	t.Parallel()
	r := newDRARig(t, "gpus: [{model: H100-80GB, count: 3}]", "", node.DRAStatic)
	r.awaitPublished(r.wholeAndCut())

	namespace := clustertest.NamespaceOf(t, r.cluster)
	r.template(namespace, "one-gpu", "gpu.nvidia.com", "")
	r.claimant(namespace, "by-template", "one-gpu")
	r.pod(namespace, "by-extended", map[string]string{"nvidia.com/gpu": "1"})
	r.pod(namespace, "by-class", map[string]string{"deviceclass.resource.kubernetes.io/gpu.nvidia.com": "1"})
	var given []string
	for _, pod := range []string{"by-template", "by-extended", "by-class"} {
		r.awaitRunning(namespace, pod)
		given = append(given, r.given(namespace, pod)...)
	}
	slices.Sort(given)
	if diff := cmp.Diff([]string{"gpu-0", "gpu-1", "gpu-2"}, given); diff != "" {
		t.Errorf("devices of pods (-want +got):\n%s", diff)
	}
	for _, gpu := range r.snapshot() {
		if len(gpu.Processes) != 1 {
			t.Errorf("GPU %d has %d processes, want that of its pod", gpu.Index, len(gpu.Processes))
		}
	}

	// What it offers is what it has seen at its start.
	r.deletePod(namespace, r.holderOf(namespace, "gpu-0"))
	r.cut("3g.40gb@4", "2g.20gb@0", "1g.10gb@2", "1g.10gb@3")
	r.restartDRADriver()
	r.awaitPublished(r.wholeAndCut())
	r.template(namespace, "one-3g", "mig.nvidia.com", "3g.40gb")
	r.claimant(namespace, "by-profile", "one-3g")
	r.awaitRunning(namespace, "by-profile")
	if got := r.given(namespace, "by-profile"); !slices.Equal(got, []string{"gpu-0-mig-3g40gb-9-4"}) {
		t.Errorf("the pod has %v, want the instance at 4 of GPU 0", got)
	}
	if i := r.snapshot()[0].Instances; len(i[len(i)-1].Processes) != 1 {
		t.Errorf("instance %v has %d processes, want that of its pod", i[len(i)-1].Placed, len(i[len(i)-1].Processes))
	}
}

// What render writes is what its driver's devices fit: by a claim of the profile, and by the name that the device plugin has for it.
func TestPodsGetMIGDevicesByWhatRenderWrites(t *testing.T) {
	t.Parallel()
	r := newDRARig(t, "gpus: [{model: H100-80GB, count: 1}]", "", node.DRAStatic)
	r.awaitPublished(r.wholeAndCut())
	r.cut("3g.40gb@4", "2g.20gb@0", "1g.10gb@2", "1g.10gb+me@3")
	r.restartDRADriver()
	r.awaitPublished(r.wholeAndCut())

	namespace := clustertest.NamespaceOf(t, r.cluster)
	rendered, err := os.ReadFile("../../cmd/kubectl-gpuslice/render/testdata/objects/dra.yaml")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "dra.yaml")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(string(rendered), "namespace: team\n", "namespace: "+namespace+"\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := deploy(r.cluster, file); err != nil {
		t.Fatal(err)
	}
	r.claimant(namespace, "by-template", "mig-2g.20gb")
	r.claimant(namespace, "by-attribute", "mig-1g.10gb.me")
	r.pod(namespace, "by-resource", map[string]string{"nvidia.com/mig-3g.40gb": "1"})
	got := map[string][]string{}
	for _, pod := range []string{"by-template", "by-attribute", "by-resource"} {
		r.awaitRunning(namespace, pod)
		got[pod] = r.given(namespace, pod)
	}
	starts := map[string]string{"by-template": "-0", "by-attribute": "-3", "by-resource": "-4"}
	for pod, start := range starts {
		if len(got[pod]) != 1 || !strings.HasPrefix(got[pod][0], "gpu-0-mig-") || !strings.HasSuffix(got[pod][0], start) {
			t.Errorf("pod %s has %v, want the instance at %s of GPU 0", pod, got[pod], start[1:])
		}
	}
}

func TestNVIDIAsDRADriverCutsGPUsItself(t *testing.T) {
	t.Parallel()
	r := newDRARig(t, "gpus: [{model: H100-80GB, count: 2}]", "", node.DRADynamicMIG)
	var want []string
	for _, gpu := range r.snapshot() {
		want = append(want, fmt.Sprintf("gpu-%d gpu %s %s", gpu.Minor, gpu.UUID, r.pcieRoot(gpu.PCI)))
		for _, p := range gpu.Profiles {
			for _, at := range p.Placements {
				want = append(want, fmt.Sprintf("gpu-%d mig of %s %s@%d", gpu.Minor, gpu.UUID, p.Name, at.Start))
			}
		}
	}
	r.awaitPublished(want)

	namespace := clustertest.NamespaceOf(t, r.cluster)
	r.template(namespace, "one-3g", "mig.nvidia.com", "3g.40gb")
	r.claimant(namespace, "by-profile", "one-3g")
	r.awaitRunning(namespace, "by-profile")
	gpus := r.snapshot()
	if len(gpus[0].Instances) != 1 || gpus[0].Instances[0].Profile != "3g.40gb" || len(gpus[0].Instances[0].Processes) != 1 || gpus[1].Enabled {
		t.Errorf("a pod has a 3g.40gb, and the GPUs are\n%s", r.GPUs)
	}
	r.deletePod(namespace, "by-profile")
	if gpus := r.snapshot(); gpus[0].Enabled || len(gpus[0].Instances) > 0 {
		t.Errorf("the pod is gone, and the GPUs are\n%s", r.GPUs)
	}
}

// Promise 3. A pod has a claim by its template, or one that the scheduler makes for a resource that a DeviceClass stands for, by either name that such a
// resource has. Whichever it is, the plan makes exactly those leave that hold what goes. A pod that reads from all GPUs by admin access leaves as a
// client of the library does: where a mode changes, and not for instances.
func TestAPlanKnowsWhichGPUAPodHasByItsClaim(t *testing.T) {
	t.Parallel()
	r := newDRARig(t, "gpus: [{model: H100-80GB, count: 4}]", "migConfigMap: {name: by-claims}\n", node.DRAStatic)
	r.awaitPublished(r.wholeAndCut())
	r.cut("3g.40gb@4", "2g.20gb@0", "1g.10gb@2")
	r.restartDRADriver()
	r.awaitPublished(r.wholeAndCut())
	configs := "version: v1\nmig-configs:\n  gpu-0-again: [{devices: [0], mig-enabled: true, mig-devices: {7g.80gb: 1}}]\n" // no instance can stay
	for i := 1; i < 4; i++ {
		configs += fmt.Sprintf("  gpu-%d-again: [{devices: [%d], mig-enabled: true, mig-devices: {1g.10gb: 7}}]\n", i, i)
	}
	r.configMap("by-claims", configs)

	namespace := clustertest.NamespaceOf(t, r.cluster)
	r.mayReadAllGPUs(namespace)
	slice := "example.com/" + r.Name
	r.class(slice, "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig'")
	r.template(namespace, "one-gpu", "gpu.nvidia.com", "")
	r.template(namespace, "one-slice", "mig.nvidia.com", "")
	r.claimant(namespace, "slice-by-template", "one-slice")
	r.pod(namespace, "slice-by-resource", map[string]string{slice: "1"})
	r.pod(namespace, "slice-by-class", map[string]string{"deviceclass.resource.kubernetes.io/mig.nvidia.com": "1"})
	r.claimant(namespace, "gpu-by-template", "one-gpu")
	r.pod(namespace, "gpu-by-resource", map[string]string{"nvidia.com/gpu": "1"})
	r.pod(namespace, "gpu-by-class", map[string]string{"deviceclass.resource.kubernetes.io/gpu.nvidia.com": "1"})
	metrics := r.claimant(namespace, "metrics", "all-gpus", node.DCGMImage)

	want := map[string][]string{}
	for _, kind := range []string{"slice-by-template", "slice-by-resource", "slice-by-class", "gpu-by-template", "gpu-by-resource", "gpu-by-class"} {
		r.awaitRunning(namespace, kind)
		for _, device := range r.given(namespace, kind) {
			gpu, _, _ := strings.Cut(device, "-mig-")
			want[gpu] = append(want[gpu], kind)
		}
	}
	r.awaitRunning(namespace, metrics.Name)
	if len(r.given(namespace, metrics.Name)) != 3 || len(want["gpu-0"]) != 3 || len(want) != 4 {
		t.Fatalf("pods have %v, and metrics %v", want, r.given(namespace, metrics.Name))
	}
	for gpu, pods := range want {
		if gpu != "gpu-0" { // whose mode stays; a change of the mode needs all clients of the library away
			pods = append(pods, metrics.Name)
		}
		slices.Sort(pods)
		if diff := cmp.Diff(pods, r.planned(namespace, gpu+"-again")); diff != "" {
			t.Errorf("pods that leave for %s (-want +got):\n%s", gpu, diff)
		}
	}
}

// planned are the pods of the namespace that a plan evicts.
func (r *rig) planned(namespace, config string) []string {
	r.t.Helper()
	cmd := exec.CommandContext(r.t.Context(), r.Parts.Agent, append([]string{"plan", "--mig-config", config}, r.flags()...)...)
	cmd.Env = append(os.Environ(), "GPUSIM_NODE="+r.GPUs.Dir())
	out, err := cmd.CombinedOutput()
	_, steps, planned := strings.Cut(string(out), " steps to "+config)
	if !planned { // a plan that would be held up has the steps, too
		r.t.Fatalf("plan %s: %v\n%s", config, err, out)
	}
	var pods []string
	for _, step := range regexp.MustCompile(`\n +\d+  `).Split(steps, -1) { // a long list goes on in further lines
		if evicted, evicts := strings.CutPrefix(step, "evict "); evicts {
			evicted = regexp.MustCompile(`\(claim [^)]*\)`).ReplaceAllString(evicted, "")
			for _, found := range regexp.MustCompile(namespace+`/([a-z-]+)`).FindAllStringSubmatch(evicted, -1) {
				pods = append(pods, found[1])
			}
		}
	}
	slices.Sort(pods)
	return pods
}

// class makes a DeviceClass that answers to an extended resource.
func (r *rig) class(resource, expression string) {
	r.t.Helper()
	classes, name := r.client.ResourceV1().DeviceClasses(), strings.ReplaceAll(resource, "/", "-")
	if _, err := classes.Create(r.t.Context(), &resourcev1.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourcev1.DeviceClassSpec{
			ExtendedResourceName: &resource, Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{Expression: expression}}},
		},
	}, metav1.CreateOptions{}); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if err := classes.Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			r.t.Error(err)
		}
	})
}

// mayReadAllGPUs lets pods of the namespace have devices by admin access, and makes a template for all whole GPUs of the node, as that of DCGM's exporter.
func (r *rig) mayReadAllGPUs(namespace string) {
	r.t.Helper()
	const label = `{"metadata":{"labels":{"resource.kubernetes.io/admin-access":"true"}}}`
	if _, err := r.client.CoreV1().Namespaces().Patch(r.t.Context(), namespace, types.MergePatchType, []byte(label), metav1.PatchOptions{}); err != nil {
		r.t.Fatal(err)
	}
	all := resourcev1.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com", AllocationMode: resourcev1.DeviceAllocationModeAll, AdminAccess: new(true)}
	if _, err := r.client.ResourceV1().ResourceClaimTemplates(namespace).Create(r.t.Context(), &resourcev1.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: "all-gpus"},
		Spec: resourcev1.ResourceClaimTemplateSpec{Spec: resourcev1.ResourceClaimSpec{
			Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{Name: "gpus", Exactly: &all}}},
		}},
	}, metav1.CreateOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

// wholeAndCut is what the driver is to offer of the GPUs as they are, in static mode.
func (r *rig) wholeAndCut() []string {
	r.t.Helper()
	var all []string
	for _, gpu := range r.snapshot() {
		if !gpu.Enabled {
			all = append(all, fmt.Sprintf("gpu-%d gpu %s %s", gpu.Minor, gpu.UUID, r.pcieRoot(gpu.PCI)))
		}
		for _, i := range gpu.Instances {
			all = append(all, fmt.Sprintf("gpu-%d mig %s of %s %s@%d", gpu.Minor, i.Devices[0].UUID, gpu.UUID, i.Profile, i.Start))
		}
	}
	return all
}

// pcieRoot is where the GPU's bus begins.
func (r *rig) pcieRoot(address string) string {
	r.t.Helper()
	to, err := os.Readlink(filepath.Join(r.PCIDevices(), address))
	if err != nil {
		r.t.Fatal(err)
	}
	return filepath.Base(filepath.Dir(to))
}

// awaitPublished waits until the driver's slices for the node are complete and offer exactly that.
func (r *rig) awaitPublished(want []string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	slices.Sort(want)
	var got []string
	known := map[string]*resourcev1.ResourceSlice{}
	open := func(ctx context.Context) (watch.Interface, error) {
		return r.client.ResourceV1().ResourceSlices().Watch(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + draDriver + ",spec.nodeName=" + r.Name})
	}
	err := clustertest.Follow(ctx, open, func() { clear(known) }, func(did watch.EventType, s *resourcev1.ResourceSlice) bool {
		known[s.Name] = s
		if did == watch.Deleted {
			delete(known, s.Name)
		}
		got = nil
		for _, s := range known {
			if s.Spec.Pool.Name != r.Name || int(s.Spec.Pool.ResourceSliceCount) != len(known) {
				return false
			}
			for _, d := range s.Spec.Devices {
				got = append(got, published(d))
			}
		}
		slices.Sort(got)
		return slices.Equal(got, want)
	})
	if err != nil {
		r.t.Fatalf("waiting for the driver's slices: %v; devices (-want +got):\n%s", err, cmp.Diff(want, got))
	}
}

// published describes a device as it is offered.
func published(d resourcev1.Device) string {
	text := func(name resourcev1.QualifiedName) string {
		if value := d.Attributes[name].StringValue; value != nil {
			return *value
		}
		return ""
	}
	gpu, of, _ := strings.Cut(d.Name, "-mig-")
	if of == "" {
		return fmt.Sprintf("%s %s %s %s", d.Name, text("type"), text("uuid"), text("resource.kubernetes.io/pcieRoot"))
	}
	uuid := text("uuid") // none of an instance that is not made yet
	if uuid != "" {
		uuid += " "
	}
	return fmt.Sprintf("%s %s %sof %s %s@%s", gpu, text("type"), uuid, text("parentUUID"), text("profile"), of[strings.LastIndex(of, "-")+1:])
}

// template is what claims for one device of the class are made of, of one with the MIG profile if there is one.
func (r *rig) template(namespace, name, class, profile string) {
	r.t.Helper()
	one := resourcev1.ExactDeviceRequest{DeviceClassName: class}
	if profile != "" {
		one.Selectors = []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{
			Expression: fmt.Sprintf("device.attributes['gpu.nvidia.com'].profile == '%s'", profile),
		}}}
	}
	if _, err := r.client.ResourceV1().ResourceClaimTemplates(namespace).Create(r.t.Context(), &resourcev1.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourcev1.ResourceClaimTemplateSpec{Spec: resourcev1.ResourceClaimSpec{
			Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{Name: "gpu", Exactly: &one}}},
		}},
	}, metav1.CreateOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

// claimant makes a pod with a claim by a template, of another image than that of users' pods if one is named.
func (r *rig) claimant(namespace, name, template string, image ...string) *corev1.Pod {
	r.t.Helper()
	spec := r.podSpec(nil)
	for _, other := range image {
		spec.Containers[0].Image = other
	}
	spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}}
	spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	pod, err := r.client.CoreV1().Pods(namespace).Create(r.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}}, Spec: spec,
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	return pod
}

// given are the devices that a pod has by claims, as kubelet lists them.
func (r *rig) given(namespace, pod string) []string { r.t.Helper(); return r.claimed(namespace)[pod] }

// claimed are the devices that the pods of the namespace have by claims, as kubelet lists them. Each of them has a CDI device.
func (r *rig) claimed(namespace string) map[string][]string {
	r.t.Helper()
	conn, err := grpc.NewClient("unix:"+r.Kubelet.PodResourcesSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		r.t.Fatal(err)
	}
	defer conn.Close()
	answer, err := podresourcesv1.NewPodResourcesListerClient(conn).List(r.t.Context(), &podresourcesv1.ListPodResourcesRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	devices := map[string][]string{}
	for _, p := range answer.PodResources {
		if p.Namespace != namespace {
			continue
		}
		for _, c := range p.Containers {
			for _, claim := range c.DynamicResources {
				for _, d := range claim.ClaimResources {
					if d.DriverName != draDriver || d.PoolName != r.Name || len(d.CdiDevices) == 0 {
						r.t.Errorf("pod %s has %v", p.Name, d)
					}
					devices[p.Name] = append(devices[p.Name], d.DeviceName)
				}
			}
		}
	}
	return devices
}

// holderOf is the pod that has the device.
func (r *rig) holderOf(namespace, device string) string {
	r.t.Helper()
	for _, pod := range r.pods() {
		if pod.Namespace == namespace && slices.Contains(r.given(namespace, pod.Name), device) {
			return pod.Name
		}
	}
	r.t.Fatalf("no pod has %s", device)
	return ""
}

// deletePod deletes a pod, and waits until it is gone.
func (r *rig) deletePod(namespace, name string) {
	r.t.Helper()
	if err := r.client.CoreV1().Pods(namespace).Delete(r.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		r.t.Fatal(err)
	}
	clustertest.Eventually(r.t, "pod "+name+" is gone", func(ctx context.Context) (bool, error) {
		list, err := r.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
		return err == nil && len(list.Items) == 0, err
	})
}

// restartDRADriver deletes the driver's pod. Its DaemonSet makes another.
func (r *rig) restartDRADriver() {
	r.t.Helper()
	for _, pod := range r.pods() {
		if pod.Spec.Containers[0].Image == node.DRADriverImage {
			r.deletePod(pod.Namespace, pod.Name)
			return
		}
	}
	r.t.Fatalf("no DRA driver on node %s", r.Name)
}

// Promise 20. Where the driver cuts the GPUs itself, the agent changes none of them, whatever is asked of the node, and disturbs no pod.
func TestGPUsThatNVIDIAsDRADriverCutsAreNotCut(t *testing.T) {
	t.Parallel()
	r := newDRARig(t, twoH100, "", node.DRADynamicMIG)
	namespace := clustertest.NamespaceOf(t, r.cluster)
	r.template(namespace, "one-3g", "mig.nvidia.com", "3g.40gb")
	r.claimant(namespace, "by-profile", "one-3g")
	r.awaitRunning(namespace, "by-profile")
	before := r.changingCalls()
	if before[gpusim.CreateGpuInstanceWithPlacement]+before[gpusim.CreateGpuInstance] == 0 {
		t.Fatalf("the driver has cut a GPU, and the library has %v", before)
	}
	r.run()
	r.awaitReason(config.ReasonNotRequested)
	random := rand.New(rand.NewPCG(1, 2)) // the same labels each time
	configs := []string{"all-disabled", "all-1g.10gb", "all-3g.40gb", "all-7g.80gb", "all-balanced"}
	for i := range 200 {
		name := configs[random.IntN(len(configs))]
		r.labels(map[string]any{config.LabelMIGConfig: name})
		if i%20 != 19 { // those between may be gone before the agent has seen them
			continue
		}
		n := r.await(name+" to be refused", func(n *corev1.Node) bool {
			c := condition(n)
			return c != nil && c.Reason == string(config.ReasonForeignOwner) && strings.Contains(c.Message, config.LabelMIGConfig+"="+name)
		})
		r.givenBack(n)
	}
	if diff := cmp.Diff(before, r.changingCalls()); diff != "" {
		t.Errorf("calls of the library that change a GPU (-before +after):\n%s", diff)
	}
	r.awaitRunning(namespace, "by-profile")
}

// Promise 20. The driver never changes a MIG mode that takes a reset, and reads the modes at its start. The agent switches them, and leaves the instances to
// the driver. Only pods of GPUs whose mode changes leave.
func TestMIGModesAreSwitchedForNVIDIAsDRADriverThatCutsGPUs(t *testing.T) {
	t.Parallel()
	r := newDRARig(t, "gpus: [{model: A100-80GB, count: 2}]", "migConfigMap: {name: modes}\n", node.DRADynamicMIG)
	r.awaitPublished(r.offeredByMode())
	r.configMap("modes", "version: v1\nmig-configs:\n  parts-of-gpu-0: [{devices: [0], mig-enabled: true, mig-devices: {}}, {devices: [1], mig-enabled: false}]\n")
	namespace := clustertest.NamespaceOf(t, r.cluster)
	r.template(namespace, "one-gpu", "gpu.nvidia.com", "")
	r.template(namespace, "one-3g", "mig.nvidia.com", "3g.40gb")
	pods := map[string]*corev1.Pod{"a": r.claimant(namespace, "a", "one-gpu"), "b": r.claimant(namespace, "b", "one-gpu")}
	for name := range pods {
		r.awaitRunning(namespace, name)
	}
	stays := pods[r.holderOf(namespace, "gpu-1")]
	leaves := r.holderOf(namespace, "gpu-0")
	r.run()

	r.label(config.LabelMIGConfig, "parts-of-gpu-0")
	r.givenBack(r.awaitConverged("parts-of-gpu-0"))
	if gpus := r.snapshot(); !gpus[0].Enabled || gpus[1].Enabled {
		t.Errorf("the GPUs are\n%s", r.GPUs)
	}
	r.awaitPublished(r.offeredByMode())
	r.undisturbedClaimant(stays, []string{"gpu-1"})
	if r.podsOf(namespace)[pods[leaves].UID] != nil {
		t.Errorf("pod %s has stayed on GPU 0", leaves)
	}

	part := r.claimant(namespace, "part", "one-3g")
	r.awaitRunning(namespace, "part")
	made, has := r.snapshot()[0].Geometry().String(), r.given(namespace, "part")
	r.label(config.LabelMIGConfig, "all-enabled")
	r.givenBack(r.awaitConverged("all-enabled"))
	r.awaitPublished(r.offeredByMode())
	r.undisturbedClaimant(part, has)
	if gpus := r.snapshot(); gpus[0].Geometry().String() != made || !gpus[1].Enabled || len(gpus[1].Instances) > 0 {
		t.Errorf("the driver had made %s, and the GPUs are\n%s", made, r.GPUs)
	}

	r.label(config.LabelMIGConfig, "all-disabled")
	r.await("all-disabled to wait for the pod's instance", func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && c.Reason == string(config.ReasonForeignOwner) && strings.Contains(c.Message, namespace+"/part") && strings.Contains(c.Message, made)
	})
	r.deletePod(namespace, "part")
	r.givenBack(r.awaitConverged("all-disabled"))
	if gpus := r.snapshot(); gpus[0].Enabled || gpus[1].Enabled {
		t.Errorf("the GPUs are\n%s", r.GPUs)
	}
	r.awaitPublished(r.offeredByMode())
}

// offeredByMode are the devices of GPUs that the driver offers as a whole or in parts, as their MIG mode is.
func (r *rig) offeredByMode() (out []string) {
	for _, gpu := range r.snapshot() {
		if !gpu.Enabled {
			out = append(out, fmt.Sprintf("gpu-%d gpu %s %s", gpu.Minor, gpu.UUID, r.pcieRoot(gpu.PCI)))
			continue
		}
		for _, p := range gpu.Profiles {
			for _, at := range p.Placements {
				out = append(out, fmt.Sprintf("gpu-%d mig of %s %s@%d", gpu.Minor, gpu.UUID, p.Name, at.Start))
			}
		}
	}
	return out
}

// changingCalls are the calls of the simulated library so far that change a GPU.
func (r *rig) changingCalls() map[string]int {
	calls := r.GPUs.Calls()
	maps.DeleteFunc(calls, func(function string, _ int) bool {
		return !strings.HasPrefix(function, "Create") && !strings.HasPrefix(function, "Set") && !strings.HasSuffix(function, "Destroy") && function != gpusim.Reset
	})
	return calls
}
