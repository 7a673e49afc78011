package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
	"github.com/gpuslice/gpuslice/test/node"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

const (
	draProgram = "gpu-kubelet-plugin"
	pluginSet  = "gpuslice-device-plugin" // the plugin's DaemonSet, of deploy/overlays/device-plugin
	claimName  = "last-gpu"               // a claim, and the pod that has it
)

// claims has NVIDIA's DRA driver advertise the GPUs in the plugin's place. It cuts nothing.
func (t *trial) claims(ctx context.Context, p *plane) {
	ready := t.report.alone("NVIDIA's DRA driver in the plugin's place: its slices have the GPUs", func() (string, error) {
		if t.report.broken {
			return "", notHere(unmet)
		}
		return p.replacePlugin(ctx)
	})
	t.report.broken = ready != passed
	t.report.check("a pod computes on the GPU of its claim, and the agent names it", func() (string, error) { return p.claim(ctx) })
	t.report.check("sharing by label is refused where claims give out the GPUs", func() (string, error) { return p.refusesSharing(ctx) })
}

// replacePlugin takes the device plugin away, and brings the driver.
func (p *plane) replacePlugin(ctx context.Context) (string, error) {
	if p.driverless != nil {
		return "", p.driverless
	}
	if err := p.patch(ctx, "labels", config.LabelDevicePluginConfig, nil); err != nil {
		return "", err
	}
	if err := p.client.AppsV1().DaemonSets(own).Delete(ctx, pluginSet, metav1.DeleteOptions{}); err != nil {
		return "", err
	}
	if err := p.await(ctx, "the plugin's GPUs to be gone", func(n *corev1.Node) bool { return offered(n) == 0 }); err != nil {
		return "", err
	}
	began := time.Now()
	if err := p.cluster.Apply(ctx, p.programs.manifest(draManifest)); err != nil {
		return "", err
	}
	if err := p.patch(ctx, "labels", node.DRADriverLabel, node.DRAStatic); err != nil {
		return "", err
	}
	var want, got []string
	for _, g := range p.before {
		want = append(want, string(g.UUID))
	}
	slices.Sort(want)
	err := p.poll(ctx, "slices of NVIDIA's DRA driver", func(ctx context.Context) (bool, error) {
		devices, err := p.published(ctx)
		got = got[:0]
		for _, uuid := range devices {
			got = append(got, uuid)
		}
		slices.Sort(got)
		return slices.Equal(got, want), err
	})
	if err != nil {
		return "", fmt.Errorf("%w; its devices (-want +got):\n%s", err, gocmp.Diff(want, got))
	}
	took := time.Since(began)
	err = p.await(ctx, "the agent to say whose the GPUs are", func(n *corev1.Node) bool {
		var s api.Status
		return json.Unmarshal([]byte(n.Annotations[config.AnnotationStatus]), &s) == nil && s.Owner == api.OwnerDRAStatic && s.Reason == config.ReasonNotRequested
	})
	return fmt.Sprintf("%s in its slices, by the UUIDs of NVML, after %s; the agent: %s", counted(len(want), "GPU"), short(took), api.OwnerDRAStatic), err
}

// published are the UUIDs of the devices in the node's slices, by the devices' names.
func (p *plane) published(ctx context.Context) (map[string]string, error) {
	list, err := p.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + nodeName})
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			out[d.Name] = ""
			if uuid := d.Attributes["uuid"].StringValue; uuid != nil {
				out[d.Name] = *uuid
			}
		}
	}
	return out, nil
}

// claim runs a pod with a claim of the last GPU, which is not the one that it would get by chance, and checks that its process is there. The
// stand-in kubelet injects no CDI devices: the pod gets its GPU's name from its environment. The claim, and the CDI spec that the driver has written
// for it, show that the driver has allocated that GPU to the pod.
func (p *plane) claim(ctx context.Context) (string, error) {
	gpu := p.before[len(p.before)-1]
	_, err := p.client.ResourceV1().ResourceClaims(namespace).Create(ctx, &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: claimName},
		Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{
			Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{
				DeviceClassName: "gpu.nvidia.com", Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{
					Expression: fmt.Sprintf("device.attributes['gpu.nvidia.com'].uuid == '%s'", gpu.UUID),
				}}},
			},
		}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	pod := worker(claimName, computes)
	reference := claimName
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &reference}}
	c := &pod.Spec.Containers[0]
	c.Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	c.Env = []corev1.EnvVar{{Name: "NVIDIA_VISIBLE_DEVICES", Value: string(gpu.UUID)}}
	if _, err := p.client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return "", err
	}
	if err := p.poll(ctx, "pod "+claimName+" on the GPU of its claim", func(ctx context.Context) (bool, error) {
		running, err := p.computing(ctx, claimName)
		if err != nil || !running {
			return false, err
		}
		gpus, err := p.driver.Snapshot(ctx)
		return err == nil && alone(gpus, gpu.UUID), err
	}); err != nil {
		return "", err
	}
	device, err := p.deviceOf(ctx, gpu)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s is GPU %d, its CDI spec has the device file of that, and one process is there, of pod %s by the agent", device, gpu.Index, claimName), p.named(ctx, gpu)
}

// alone reports whether a process is on the GPU, and none on another.
func alone(gpus []nvml.GPU, on nvml.UUID) bool {
	for _, g := range gpus {
		if (g.UUID == on) != (len(g.Processes) == 1) || len(g.Processes) > 1 {
			return false
		}
	}
	return true
}

// deviceOf is the device that the claim has, which must be the GPU.
func (p *plane) deviceOf(ctx context.Context, gpu nvml.GPU) (string, error) {
	claim, err := p.client.ResourceV1().ResourceClaims(namespace).Get(ctx, claimName, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	if claim.Status.Allocation == nil || len(claim.Status.Allocation.Devices.Results) != 1 {
		return "", fmt.Errorf("claim %s of a pod that runs has %v", claimName, claim.Status.Allocation)
	}
	device := claim.Status.Allocation.Devices.Results[0].Device
	devices, err := p.published(ctx)
	if err != nil {
		return "", err
	}
	if devices[device] != string(gpu.UUID) {
		return "", fmt.Errorf("claim %s has %s, which is %s, and not GPU %d, which is %s", claimName, device, devices[device], gpu.Index, gpu.UUID)
	}
	specs, err := filepath.Glob(filepath.Join(p.root(), "var", "run", "cdi", "*"+string(claim.UID)+"*"))
	if err != nil || len(specs) != 1 {
		return "", fmt.Errorf("of claim %s there are the CDI specs %v: %w", claimName, specs, cmpOr(err, errSpecs))
	}
	text, err := os.ReadFile(specs[0])
	if err != nil {
		return "", err
	}
	if got := gpuFile.FindAllString(string(text), -1); !slices.Contains(got, fmt.Sprintf("/dev/nvidia%d", gpu.Minor)) || len(slices.Compact(got)) != 1 {
		return "", fmt.Errorf("the CDI spec of claim %s has the device files %v, want /dev/nvidia%d alone", claimName, got, gpu.Minor)
	}
	return device, nil
}

var (
	errSpecs = errors.New("want one")
	gpuFile  = regexp.MustCompile(`/dev/nvidia\d+\b`)
)

// named asks the agent for its diagnosis, and sees that the pod holds the GPU in it.
func (p *plane) named(ctx context.Context, gpu nvml.GPU) error {
	if err := p.patch(ctx, "annotations", config.AnnotationPreview, config.RequestDiagnosis); err != nil {
		return err
	}
	var answer api.Answer
	if err := p.await(ctx, "the agent's diagnosis", func(n *corev1.Node) bool {
		return json.Unmarshal([]byte(n.Annotations[config.AnnotationPlan]), &answer) == nil && answer.Diagnosis != nil
	}); err != nil {
		return err
	}
	want := api.PodSeen{Namespace: namespace, Name: claimName, Devices: []string{fmt.Sprintf("GPU %d", gpu.Index)}}
	if !slices.ContainsFunc(answer.Diagnosis.Pods, func(s api.PodSeen) bool {
		return s.Namespace == want.Namespace && s.Name == want.Name && slices.Equal(s.Devices, want.Devices)
	}) || answer.Diagnosis.Owner != api.OwnerDRAStatic {
		return fmt.Errorf("the agent says that the GPUs are given out by %q, and held by %+v, want %q and %+v", answer.Diagnosis.Owner, answer.Diagnosis.Pods, api.OwnerDRAStatic, want)
	}
	return p.patch(ctx, "annotations", config.AnnotationPreview, nil)
}

// refusesSharing requests sharing by the label of the plugin, and checks that the agent refuses it and disturbs
// nothing.
func (p *plane) refusesSharing(ctx context.Context) (string, error) {
	if err := p.patch(ctx, "labels", config.LabelDevicePluginConfig, "time-slicing-2"); err != nil {
		return "", err
	}
	var says corev1.NodeCondition
	if err := p.await(ctx, "the agent to refuse to share GPUs", func(n *corev1.Node) bool {
		says = said(n, config.ConditionGPUPartitionReady)
		return says.Reason == string(config.ReasonImpossibleSharing) && !n.Spec.Unschedulable
	}); err != nil {
		return "", err
	}
	if running, err := p.computing(ctx, claimName); err != nil || !running {
		return "", fmt.Errorf("pod %s runs no more: %w", claimName, cmpOr(err, errThere))
	}
	if err := p.patch(ctx, "labels", config.LabelDevicePluginConfig, nil); err != nil {
		return "", err
	}
	what, _, _ := strings.Cut(says.Message, ":")
	return fmt.Sprintf("%s: %s", says.Reason, what), p.remove(ctx, claimName)
}

// patch sets a label or an annotation of the node, or removes it.
func (p *plane) patch(ctx context.Context, what, key string, value any) error {
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{what: map[string]any{key: value}}})
	if err != nil {
		return err
	}
	_, err = p.client.CoreV1().Nodes().Patch(ctx, nodeName, types.MergePatchType, body, metav1.PatchOptions{})
	return err
}

// draDriver is the image of NVIDIA's DRA driver: a shell that finds the program, which sees NVIDIA's driver below /driver-root.
func (m *machine) draDriver() (kubelet.Image, error) {
	image := kubelet.Image{
		Path: "/bin/sh", Env: append(slices.Clone(m.env), "PATH="+filepath.Dir(m.programs.bin(draProgram))+":/usr/bin:/bin"), Mounts: slices.Clone(m.mounts),
	}
	if m.simulated {
		for _, shown := range []string{"proc/modules", "proc/devices", "proc/sys/kernel/random/boot_id", "sys/bus/pci", "sys/devices"} {
			image.Mounts = append(image.Mounts, sandbox.Mount{Source: filepath.Join(m.dir, "host", shown), Target: "/" + shown})
		}
		image.Over = []sandbox.Mount{{Source: m.driverRoot, Target: "/driver-root"}}
		devices, err := os.ReadDir(filepath.Join(m.driverRoot, "dev"))
		for _, d := range devices { // it takes character devices alone for device files
			image.Over = append(image.Over, sandbox.Mount{Source: os.DevNull, Target: "/driver-root/dev/" + d.Name()})
		}
		return image, err
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return kubelet.Image{}, err
	}
	folder, version, err := loaded(string(maps))
	if err != nil {
		return kubelet.Image{}, err
	}
	image.Over, err = driverFiles(filepath.Join(m.dir, "driver"), folder, version, m.smi)
	return image, err
}

// library is the path of NVML's library in a line of the memory map.
var library = regexp.MustCompile(`\s(/\S*)/libnvidia-ml\.so\.(\d+(?:\.\d+)+)$`)

// loaded finds the folder and the version of NVIDIA's libraries by what this process has loaded of them.
func loaded(maps string) (folder, version string, err error) {
	lines := bufio.NewScanner(strings.NewReader(maps))
	for lines.Scan() {
		if found := library.FindStringSubmatch(lines.Text()); found != nil {
			return found[1], found[2], nil
		}
	}
	return "", "", notHere("libnvidia-ml.so.1 has no version in its file's name, and NVIDIA's DRA driver finds it by that alone")
}

// driverFiles makes a folder that NVIDIA's DRA driver takes for the root of NVIDIA's driver, and returns the mounts to show in it. The DRA driver wants files
// there, not links that lead out of the folder.
func driverFiles(root, libraries, version, smi string) ([]sandbox.Mount, error) {
	over := []sandbox.Mount{{Source: root, Target: "/driver-root"}, {Source: "/dev", Target: "/driver-root/dev"}}
	files := map[string]string{"usr/bin/nvidia-smi": smi}
	for _, name := range []string{"libnvidia-ml.so.", "libcuda.so."} {
		file := filepath.Join(libraries, name+version)
		files["usr/lib64/"+name+version], files["usr/lib64/"+name+"1"] = file, file
	}
	if err := os.MkdirAll(filepath.Join(root, "dev"), 0o755); err != nil {
		return nil, err
	}
	for name, source := range files {
		if _, err := os.Stat(source); err != nil {
			return nil, fmt.Errorf("looking for a part of NVIDIA's driver: %w", err)
		}
		at := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(at), 0o755)
		if err == nil {
			err = os.WriteFile(at, nil, 0o644)
		}
		if err != nil {
			return nil, err
		}
		over = append(over, sandbox.Mount{Source: source, Target: "/driver-root/" + name})
	}
	slices.SortFunc(over[2:], func(a, b sandbox.Mount) int { return strings.Compare(a.Target, b.Target) })
	return over, nil
}
