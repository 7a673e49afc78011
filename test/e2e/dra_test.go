package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/test/cluster/realkubelet"
	"github.com/gpuslice/gpuslice/test/node"
)

// draAsNVIDIA starts NVIDIA's DRA driver where it sees the driver's parts of /proc and /sys at their own places.
const draAsNVIDIA = "#!/bin/sh\nexec /sandbox" +
	" --bind=" + hostInside + "/proc/driver=/proc/driver --bind=" + hostInside + "/proc/devices=/proc/devices --bind=" + hostInside + "/proc/modules=/proc/modules" +
	" --bind=" + hostInside + "/sys/bus/pci=/sys/bus/pci --bind=" + hostInside + "/sys/devices=/sys/devices -- /nvidia/gpu-kubelet-plugin \"$@\"\n"

// draDriver is the image of NVIDIA's DRA driver.
func (r *rig) draDriver() realkubelet.Image {
	r.t.Helper()
	if err := os.WriteFile(r.file("dra-as-nvidia"), []byte(draAsNVIDIA), 0o600); err != nil {
		r.t.Fatal(err)
	}
	return realkubelet.Image{
		Name: node.DRADriverImage, Env: []string{"PATH=/usr/bin:/bin"},
		Files: map[string]string{
			"/bin/bash": "/bin/bash", "/bin/sh": "/bin/sh", "/sandbox": programs.Sandbox,
			"/usr/bin/gpu-kubelet-plugin": r.file("dra-as-nvidia"),
			"/nvidia/gpu-kubelet-plugin":  filepath.Join(programs.DRADriver, "gpu-kubelet-plugin"),
		},
	}
}

// startDRADriver deploys NVIDIA's DRA driver in static mode.
func (i *installed) startDRADriver() {
	i.t.Helper()
	files := filepath.Join(driverDir, "sim") // in the driver's root, where its pod finds them too
	if err := os.MkdirAll(files, 0o755); err != nil {
		i.t.Fatal(err)
	}
	for name, from := range map[string]string{"libnvidia-ml.so": programs.LibNVML, "gpusim": programs.GPUSim} {
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(files, name), text, 0o755)
		}
		if err != nil {
			i.t.Fatal(err)
		}
	}
	if err := i.gpus.RenderDriver(driverDir, "../../sim/libnvidia-ml.so", "../../sim/gpusim"); err != nil {
		i.t.Fatal(err)
	}
	manifest, err := os.ReadFile("../node/manifests/dra-driver.yaml")
	if err != nil {
		i.t.Fatal(err)
	}
	text := string(manifest)
	for was, is := range map[string]string{
		"value: /\n":                      "value: " + driverDir + "\n", // NVIDIA_DRIVER_ROOT
		"path: /\n":                       "path: " + driverDir + "\n",
		"value: /usr/bin/nvidia-cdi-hook": "value: /bin/true",
	} {
		if !strings.Contains(text, was) {
			i.t.Fatalf("the manifest of the DRA driver has no %q", was)
		}
		text = strings.ReplaceAll(text, was, is)
	}
	i.applyText("dra-driver.yaml", text)
	i.t.Cleanup(func() {
		i.kubectl(context.WithoutCancel(i.t.Context()), "delete", "--timeout=3m", "-f", i.file("dra-driver.yaml")) // another test may install it again
	})
	i.label(node.DRADriverLabel, node.DRAStatic)
}

// slicesOf are profiles that cut the GPUs: all alike, and the first one otherwise.
const slicesOf = `apiVersion: v1
kind: ConfigMap
metadata: {name: gpuslice-profiles, namespace: gpuslice}
data:
  profiles.yaml: |
    apiVersion: gpuslice.io/v1alpha1
    kind: Profiles
    profiles:
      small: {mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]}
      first-apart: {mig: [{gpus: {index: 0}, enabled: true, instances: {3g.40gb: 1, 2g.20gb: 1, 1g.10gb: 2}}]}
`

// template is what claims for one device of a MIG profile are made of.
const template = `apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: %[1]q, namespace: %[2]s}
spec:
  spec:
    devices:
      requests:
        - name: slice
          exactly:
            deviceClassName: mig.nvidia.com
            selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '%[1]s'"}}]
`

// Eight GPUs in 56 slices, each with a pod that has it by a claim. NVIDIA's DRA driver reads how the GPUs are cut when it starts, and never again.
func TestALabelCutsTheGPUsThatNVIDIAsDRADriverGivesOut(t *testing.T) {
	if testing.Short() {
		t.Skip("NVIDIA's DRA driver is built for tests at full length alone")
	}
	const gpus = 8
	i := installWithClaims(t, gpus)
	i.applyText("template-3g.yaml", fmt.Sprintf(template, "3g.40gb", i.Namespace))
	i.claimants("small", "1g.10gb", gpus*slicesOfGPU, 0)
	i.claimants("large", "3g.40gb", 1, 0)
	full := i.awaitHoldings(gpus * slicesOfGPU)
	i.did(fmt.Sprintf("%d pods run, each on the slice of its claim", len(full)))

	i.label(config.LabelProfile, "first-apart")
	t.Logf("with %d pods on the node the slices are there %.1f s after the last call that changes a GPU",
		len(full), i.awaitSlices((gpus-1)*slicesOfGPU+4).Seconds()) // kubelet has the driver's pods end and start, as fast as the machine lets it
	i.awaitCut("first-apart")
	apart := i.awaitHoldings((gpus-1)*slicesOfGPU + 3) // no pod asks for the 2g.20gb
	i.onlyHoldersLeft(full, apart)
	i.did("the first GPU is cut otherwise: the pods on what goes leave, all others run on; a pod runs on a 3g.40gb")

	i.label(config.LabelProfile, "small")
	i.awaitSlices(gpus * slicesOfGPU) // they are right for the first time, and the proof wants them twice
	if err := i.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	i.until("kubelet to delete the slices", func() bool { return len(i.published()) == 0 })
	gone := time.Now()
	if !i.underWay() {
		t.Error("the change is over before the slices are gone: this shows nothing")
	}
	i.awaitSlices(gpus * slicesOfGPU)
	t.Logf("kubelet, restarted before the proof, deletes the slices; the driver publishes them again after %.1f s", time.Since(gone).Seconds())
	i.awaitCut("small")
	i.onlyHoldersLeft(apart, i.awaitHoldings(gpus*slicesOfGPU))
	i.did("kubelet is restarted between cut and proof: the same end, and no other pod leaves")
}

// slicesOfGPU is how many profile small makes of a GPU.
const slicesOfGPU = 7

// installWithClaims starts a node on which NVIDIA's DRA driver gives out so many GPUs, cut as profile small says. Claims may be made of template 1g.10gb.
func installWithClaims(t *testing.T, gpus int) *installed {
	t.Helper()
	i := install(t, fmt.Sprintf("gpus: [{model: H100-80GB, count: %d}]", gpus), "dra")
	i.did("")
	i.startDRADriver()
	i.applyText("profiles.yaml", slicesOf)
	i.awaitSlices(gpus)
	i.did("installed: the agent and NVIDIA's DRA driver run")

	i.label(config.LabelProfile, "small")
	i.inTime(i.awaitSlices(gpus * slicesOfGPU))
	i.awaitCut("small")
	i.applyText("template-1g.yaml", fmt.Sprintf(template, "1g.10gb", i.Namespace))
	i.did("a label cuts all GPUs, and their slices are claimed")
	return i
}

// Promise 5. Kubelet ends no pod with claims while the driver is away. The driver's DaemonSet is rolled out while pods of a change leave: the successor starts
// on the node that is closed, and they end.
func TestTheDRADriverIsRolledOutWhilePodsOfAChangeLeave(t *testing.T) {
	if testing.Short() {
		t.Skip("NVIDIA's DRA driver is built for tests at full length alone")
	}
	const gpus = 2
	i := installWithClaims(t, gpus)
	i.claimants("small", "1g.10gb", gpus*slicesOfGPU, 20*time.Second)
	full := i.awaitHoldings(gpus * slicesOfGPU)
	former := i.driverPod("the driver's pod", anyPod)
	i.did(fmt.Sprintf("%d pods run, each on the slice of its claim", len(full)))

	i.label(config.LabelProfile, "first-apart")
	i.until("pods to leave", func() bool { return i.leaving() > 0 })
	i.kubectl(t.Context(), "-n", former.Namespace, "rollout", "restart", "daemonset", metav1.GetControllerOf(former).Name)
	i.driverPod("the driver's successor", func(p *corev1.Pod) bool { return p.UID != former.UID })
	if left := i.leaving(); left == 0 || !i.underWay() {
		t.Errorf("%d pods leave: this shows nothing", left)
	}
	i.awaitCut("first-apart")
	i.awaitSlices(slicesOfGPU + 4)
	i.onlyHoldersLeft(full, i.awaitHoldings(slicesOfGPU+2)) // no pod asks for the 3g.40gb and the 2g.20gb
	i.did("the driver is rolled out while pods of a change leave: its successor starts, they end, all others run on")
}

// Promises 3 and 8. A reboot takes all GPU instances, and the claims of pods name them by GPU, profile and place. The agent makes again what it has verified,
// where it was, of GPUs that the label does not name too. So each pod starts again on what it had, and none leaves.
func TestPodsWithClaimsStayOverAReboot(t *testing.T) {
	if testing.Short() {
		t.Skip("NVIDIA's DRA driver is built for tests at full length alone")
	}
	const gpus = 2
	i := installWithClaims(t, gpus)
	i.label(config.LabelProfile, "first-apart")
	i.awaitSlices(slicesOfGPU + 4)
	i.awaitCut("first-apart")
	i.applyText("template-3g.yaml", fmt.Sprintf(template, "3g.40gb", i.Namespace))
	i.claimants("small", "1g.10gb", slicesOfGPU+2, 0)
	i.claimants("large", "3g.40gb", 1, 0)
	before, cut := i.awaitHoldings(slicesOfGPU+3), i.geometries()
	i.did("pods run on the slices of both GPUs, of which the label names one")

	if err := i.gpus.Reboot(); err != nil {
		t.Fatal(err)
	}
	if err := i.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	i.awaitSlices(slicesOfGPU + 4)
	i.awaitCut("first-apart")
	if diff := cmp.Diff(cut, i.geometries()); diff != "" {
		t.Errorf("the GPUs are cut otherwise (-before +after the reboot):\n%s", diff)
	}
	claims := func(all map[types.UID]holding) map[types.UID]types.UID {
		out := map[types.UID]types.UID{}
		for pod, h := range all {
			out[pod] = h.Claim
		}
		return out
	}
	if diff := cmp.Diff(claims(before), claims(i.awaitHoldings(len(before)))); diff != "" {
		t.Errorf("pods and their claims (-before +after the reboot):\n%s", diff)
	}
	i.did("the machine reboots: each pod is on the device of its claim again")
}

// geometries are how the GPUs are cut.
func (i *installed) geometries() (all []string) {
	i.t.Helper()
	seen, err := i.gpus.Driver().Snapshot(i.t.Context())
	if err != nil {
		i.t.Fatal(err)
	}
	for _, gpu := range seen {
		all = append(all, gpu.Geometry().String())
	}
	return all
}

// driverPod is the pod of NVIDIA's DRA driver, which runs and is ready.
func (i *installed) driverPod(what string, wanted func(*corev1.Pod) bool) *corev1.Pod {
	i.t.Helper()
	var pod *corev1.Pod
	i.until(what, func() bool {
		found, err := i.Client.CoreV1().Pods(metav1.NamespaceAll).List(i.t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + i.View.Node})
		if err != nil {
			i.t.Fatal(err)
		}
		for n := range found.Items {
			p := &found.Items[n]
			if p.Spec.Containers[0].Image == node.DRADriverImage && p.DeletionTimestamp == nil && ready(p) && wanted(p) {
				pod = p
				return true
			}
		}
		return false
	})
	return pod
}

// leaving is how many pods of the test are about to end.
func (i *installed) leaving() (count int) {
	i.t.Helper()
	pods, err := i.Client.CoreV1().Pods(i.Namespace).List(i.t.Context(), metav1.ListOptions{})
	if err != nil {
		i.t.Fatal(err)
	}
	for _, p := range pods.Items {
		if p.DeletionTimestamp != nil {
			count++
		}
	}
	return count
}

// devices are the UUIDs of what NVML says that can be given out, sorted.
func (i *installed) devices() (all []string) {
	i.t.Helper()
	seen, err := i.gpus.Driver().Snapshot(i.t.Context())
	if err != nil {
		i.t.Fatal(err)
	}
	for _, gpu := range seen {
		if !gpu.Enabled {
			all = append(all, string(gpu.UUID))
		}
		for _, instance := range gpu.Instances {
			for _, d := range instance.Devices {
				all = append(all, d.UUID)
			}
		}
	}
	slices.Sort(all)
	return all
}

// published are the UUIDs of what NVIDIA's DRA driver offers, by the names of the devices.
func (i *installed) published() map[string]string {
	i.t.Helper()
	list, err := i.Client.ResourceV1().ResourceSlices().List(i.t.Context(), metav1.ListOptions{
		FieldSelector: "spec.driver=" + holders.ClaimDriver + ",spec.nodeName=" + i.View.Node,
	})
	if err != nil {
		i.t.Fatal(err)
	}
	all := map[string]string{}
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			if uuid := d.Attributes["uuid"].StringValue; uuid != nil {
				all[d.Name] = *uuid
			}
		}
	}
	return all
}

// awaitSlices waits until there are so many devices and the driver offers these, and returns for how long it did not after the last call that
// changed what NVML says.
func (i *installed) awaitSlices(count int) time.Duration {
	i.t.Helper()
	var last []string
	changed := time.Now()
	i.until(fmt.Sprintf("slices of %d devices", count), func() bool {
		is := i.devices()
		if !slices.Equal(is, last) {
			last, changed = is, time.Now()
		}
		return len(is) == count && slices.Equal(slices.Sorted(maps.Values(i.published())), is)
	})
	return time.Since(changed)
}

// inTime fails the test unless the slices came as soon after the last call as is promised.
func (i *installed) inTime(took time.Duration) {
	i.t.Helper()
	const promised = 10 * time.Second
	i.t.Logf("from the last call that changes a GPU to the slices: %.1f s", took.Seconds())
	if took > promised {
		i.t.Errorf("the slices are what NVML says %s after the last call that changes a GPU, want %s", took.Round(time.Millisecond), promised)
	}
}

func (i *installed) underWay() bool {
	return underWay(i.awaitNode("the node", func(*corev1.Node) bool { return true }))
}

// awaitCut waits until the agent says that the node is as the profile asks, and has given it back.
func (i *installed) awaitCut(profile string) {
	i.t.Helper()
	last := ""
	i.awaitNode("the node to be as asked", func(n *corev1.Node) bool {
		c := partitionReady(n)
		if said := c.Reason + ": " + c.Message; said != last {
			last = said
			i.t.Log(said)
		}
		return c.Reason == string(config.ReasonConverged) && strings.HasPrefix(c.Message, profile+":") && !underWay(n) && !n.Spec.Unschedulable
	})
}

// claimants are pods of a Deployment, each of which computes on a device that it claims, and takes so long to end.
func (i *installed) claimants(name, template string, count int32, ends time.Duration) {
	i.t.Helper()
	var lifecycle *corev1.Lifecycle
	if ends > 0 {
		lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: int64(ends.Seconds())}}}
	}
	grace := int64(ends.Seconds()) + 1
	_, err := i.Client.AppsV1().Deployments(i.Namespace).Create(i.t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &count, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": name}},
				Spec: corev1.PodSpec{
					TerminationGracePeriodSeconds: &grace,
					ResourceClaims:                []corev1.PodResourceClaim{{Name: "slice", ResourceClaimTemplateName: &template}},
					Containers: []corev1.Container{{
						Name: "main", Image: trainer, Lifecycle: lifecycle, Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "slice"}}},
					}},
				},
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		i.t.Fatal(err)
	}
}

// holding is what a pod has.
type holding struct {
	Claim    types.UID
	Device   string // UUID of what its claim has got, by the driver's slices
	Restarts int32
}

// awaitHoldings waits until so many pods compute, each on the device of its claim by what NVML says, and returns what they have by their UIDs.
func (i *installed) awaitHoldings(count int) map[types.UID]holding {
	i.t.Helper()
	var all map[types.UID]holding
	i.until(fmt.Sprintf("%d pods to compute on the devices of their claims", count), func() bool {
		all = i.holdings()
		computing := i.computing()
		for uid, h := range all {
			if computing[h.Device] != uid {
				return false
			}
		}
		return len(all) == count && len(computing) == count
	})
	return all
}

// holdings are what running pods have.
func (i *installed) holdings() map[types.UID]holding {
	i.t.Helper()
	pods, err := i.Client.CoreV1().Pods(i.Namespace).List(i.t.Context(), metav1.ListOptions{})
	if err != nil {
		i.t.Fatal(err)
	}
	claims, err := i.Client.ResourceV1().ResourceClaims(i.Namespace).List(i.t.Context(), metav1.ListOptions{})
	if err != nil {
		i.t.Fatal(err)
	}
	byName := map[string]resourcev1.ResourceClaim{}
	for _, c := range claims.Items {
		byName[c.Name] = c
	}
	offered, all := i.published(), map[types.UID]holding{}
	for _, p := range pods.Items {
		if p.Status.Phase != corev1.PodRunning || p.DeletionTimestamp != nil || len(p.Status.ResourceClaimStatuses) != 1 {
			continue
		}
		h := holding{}
		for _, s := range p.Status.ContainerStatuses {
			h.Restarts += s.RestartCount
		}
		if name := p.Status.ResourceClaimStatuses[0].ResourceClaimName; name != nil {
			claim := byName[*name]
			h.Claim = claim.UID
			if a := claim.Status.Allocation; a != nil && len(a.Devices.Results) == 1 {
				h.Device = offered[a.Devices.Results[0].Device]
			}
		}
		all[p.UID] = h
	}
	return all
}

// computing are the UIDs of the pods whose processes NVML shows, by the UUIDs of the devices. They hold what their containers let them open.
func (i *installed) computing() map[string]types.UID {
	i.t.Helper()
	seen, err := i.gpus.Driver().Snapshot(i.t.Context())
	if err != nil {
		i.t.Fatal(err)
	}
	all := map[string]types.UID{}
	for _, gpu := range seen {
		for _, instance := range gpu.Instances {
			for _, p := range instance.Processes {
				if uid := podOf(p.PID); uid != "" {
					all[instance.Devices[0].UUID] = uid
				}
			}
		}
	}
	return all
}

// podOf is the UID of the pod that the process is of; "" if it has ended.
func podOf(pid int) types.UID {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	_, after, _ := strings.Cut(string(text), "/pod")
	uid, _, _ := strings.Cut(after, "/")
	return types.UID(uid)
}

// onlyHoldersLeft fails the test unless exactly the pods left whose devices are gone, with their claims, and all others have what they had.
func (i *installed) onlyHoldersLeft(before, after map[types.UID]holding) {
	i.t.Helper()
	stand, left := i.devices(), map[types.UID]bool{}
	want, got := map[types.UID]holding{}, map[types.UID]holding{}
	for uid, h := range before {
		if _, stands := slices.BinarySearch(stand, h.Device); stands {
			want[uid] = h
		} else {
			left[h.Claim] = true
		}
		if now, there := after[uid]; there {
			got[uid] = now
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		i.t.Errorf("pods that run on (-want +got):\n%s", diff)
	}
	if len(left) == 0 {
		i.t.Error("no pod had a device that is gone: this shows nothing")
	}
	for uid, h := range after {
		if left[h.Claim] {
			i.t.Errorf("pod %s has the claim %s of one that has left", uid, h.Claim)
		}
	}
	i.t.Logf("%d pods left, %d ran on untouched, %d claims are new", len(left), len(want), len(after)-len(want))
}
