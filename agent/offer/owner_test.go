package offer_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// draPod is a pod of NVIDIA's DRA driver, as its chart has it: a script runs it.
func draPod(change ...func(*corev1.Pod)) corev1.Pod {
	p := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "dra", Name: "driver-1", UID: "driver-uid",
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "driver", UID: "set", Controller: new(true)}},
		},
		Spec: corev1.PodSpec{
			Volumes: []corev1.Volume{{Name: "r", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/plugins_registry"}}}},
			Containers: []corev1.Container{
				{Name: "compute-domains", Command: []string{"bash", "-c", "compute-domain-kubelet-plugin"}},
				{Name: "gpus", Command: []string{"bash", "-c"}, Args: []string{"if true; then mount; fi\ngpu-kubelet-plugin -v 6"}},
			},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for _, c := range change {
		c(&p)
	}
	return p
}

// allocatesByClaims reports whether pods may have GPUs from NVIDIA's DRA driver, so that its slices have to say which.
func allocatesByClaims(o state.Owner) bool {
	return o.Kind == api.OwnerBoth && (o.Driver != "" || o.Other == "") || o.Kind == api.OwnerDRAStatic || strings.Contains(o.Driver, "claims of")
}

// isReady is a driver whose containers run, and are ready.
func isReady(p *corev1.Pod) {
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "gpus", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
}

func gated(value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Containers[1].Env = []corev1.EnvVar{{Name: "FEATURE_GATES", Value: value}} }
}

// script starts the driver by these lines.
func script(lines string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Containers[1].Args = []string{lines} }
}

// envFrom gives the driver all of a ConfigMap's keys as variables, with this before each name.
func envFrom(prefix string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[1].EnvFrom = []corev1.EnvFromSource{{Prefix: prefix, ConfigMapRef: &corev1.ConfigMapEnvSource{}}}
	}
}

func flagged(args ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[1].Command, p.Spec.Containers[1].Args = []string{"/usr/bin/gpu-kubelet-plugin"}, args
	}
}

// published is one slice of the driver with these devices.
func published(devices ...resourcev1.Device) []resourcev1.ResourceSlice {
	return []resourcev1.ResourceSlice{{ObjectMeta: metav1.ObjectMeta{Name: "slice-1"}, Spec: resourcev1.ResourceSliceSpec{Devices: devices}}}
}

func draDevice(name string, attributes ...string) resourcev1.Device {
	d := resourcev1.Device{Name: name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{}}
	for i := 0; i+1 < len(attributes); i += 2 {
		d.Attributes[resourcev1.QualifiedName(attributes[i])] = resourcev1.DeviceAttribute{StringValue: new(attributes[i+1])}
	}
	return d
}

// claimant is a pod that names the claim "c".
func claimant(change ...func(*corev1.Pod)) corev1.Pod {
	p := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "a", UID: "uid-a"},
		Spec:       corev1.PodSpec{NodeName: "node", ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new("c")}}},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for _, c := range change {
		c(&p)
	}
	return p
}

// claimOf is the claim of that pod, with this device.
func claimOf(d holders.ClaimedDevice) holders.Claims {
	return holders.Claims{{Pod: "uid-a", Name: "c"}: {Allocated: true, Devices: []holders.ClaimedDevice{d}, Pods: []types.UID{"uid-a"}}}
}

func TestOwnerOf(t *testing.T) {
	t.Parallel()
	whole := published(draDevice("gpu-0", "type", "gpu", "uuid", "GPU-0"), draDevice("gpu-1", "type", "gpu", "uuid", "GPU-1"))
	cut := published(draDevice("gpu-1-mig-3g40gb-9-4", "type", "mig", "uuid", "MIG-b", "parentUUID", "GPU-1"))
	others := map[holders.Device]string{{Driver: "hami.example", Pool: "node", Name: "d"}: "MIG-b", {Driver: "hami.example", Pool: "node", Name: "e"}: "GPU-0"}
	counters := []resourcev1.ResourceSlice{
		{ObjectMeta: metav1.ObjectMeta{Name: "slice-0"}, Spec: resourcev1.ResourceSliceSpec{SharedCounters: []resourcev1.CounterSet{{Name: "gpu-0-counter-set"}}}},
	}
	consumes := published(resourcev1.Device{Name: "gpu-0-mig-3g40gb-9-4", ConsumesCounters: []resourcev1.DeviceCounterConsumption{{CounterSet: "gpu-0-counter-set"}}})
	held := holders.ClaimedDevice{Device: holders.Device{Driver: holders.ClaimDriver, Pool: "node", Name: "gpu-0"}}
	admin, elsewhere := held, held
	admin.Admin, elsewhere.Pool = true, "other"
	plugin := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "plugin-1"}}
	fails := func(p *corev1.Pod) {
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{
			Name: "gpus", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff" + strings.Repeat("x", 500)}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1, Reason: "Error"}},
		}}
	}
	for name, row := range map[string]struct {
		pods    []corev1.Pod
		slices  []resourcev1.ResourceSlice
		partial bool
		err     error
		offered capacity.Resources
		plugins []corev1.Pod
		others  map[holders.Device]string
		lost    bool
		want    api.Owner
		says    []string

		claims   holders.Claims
		prepared string // a device that kubelet has prepared for pod team/a by its claim

		changing bool // a change is under way that began when the driver gave out the GPUs
		modes    bool // and that made their instances itself
	}{
		"in a change of MIG modes alone, the driver away": {changing: true, modes: true, want: api.OwnerDRADynamic, says: []string{"when the change under way began"}},
		"in a change, the driver away":                    {changing: true, want: api.OwnerDRAStatic, says: []string{"NVIDIA's DRA driver"}},
		"in a change, the driver away, and a plugin comes": {
			changing: true, plugins: []corev1.Pod{plugin}, want: api.OwnerBoth, says: []string{"NVIDIA's device plugin", "NVIDIA's DRA driver"},
		},
		"in a change, the driver begins to cut": {changing: true, pods: []corev1.Pod{draPod(gated("DynamicMIG=true"))}, want: api.OwnerDRADynamic},

		"pods have claims, the driver away": {
			pods: []corev1.Pod{claimant()}, claims: claimOf(held), want: api.OwnerDRAStarting, says: []string{"claims of team/a", "no pod of it is on the node"},
		},
		"slices are left, the driver away": {
			pods: []corev1.Pod{claimant()}, slices: whole, claims: claimOf(held), want: api.OwnerDRAStarting,
			says: []string{"start NVIDIA's DRA driver on this node again: its ResourceSlices are here, and no pod of it"},
		},
		"kubelet has prepared a device, the driver away":                            {pods: []corev1.Pod{claimant()}, prepared: "gpu.nvidia.com/node/gpu-0", want: api.OwnerDRAStarting},
		"kubelet has prepared a device for a pod that the API server lists no more": {prepared: "gpu.nvidia.com/node/gpu-0", want: api.OwnerDRAStarting},
		"pods have claims, the driver away, and a plugin": {
			pods: []corev1.Pod{claimant()}, claims: claimOf(held), plugins: []corev1.Pod{plugin}, want: api.OwnerBoth, says: []string{"claims of team/a", "pod kube-system/plugin-1"},
		},
		"pods have claims, slices unreadable, and a plugin": {
			pods: []corev1.Pod{claimant()}, claims: claimOf(held), err: errors.New("forbidden"), plugins: []corev1.Pod{plugin}, want: api.OwnerBoth,
		},
		"claims of the driver that is here": {pods: []corev1.Pod{claimant(), draPod()}, slices: whole, claims: claimOf(held), want: api.OwnerDRAStatic},
		"in a change, the driver away, and pods have claims": {
			changing: true, pods: []corev1.Pod{claimant()}, claims: claimOf(held), want: api.OwnerDRAStatic,
		},
		"a pod that has ended has claims": {
			pods: []corev1.Pod{claimant(func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })}, claims: claimOf(held),
			prepared: "gpu.nvidia.com/node/gpu-0", plugins: []corev1.Pod{plugin}, want: api.OwnerPlugin,
		},
		"a claim that cannot be read":      {pods: []corev1.Pod{claimant()}, plugins: []corev1.Pod{plugin}, want: api.OwnerPlugin},
		"a claim of another node's device": {pods: []corev1.Pod{claimant()}, claims: claimOf(elsewhere), plugins: []corev1.Pod{plugin}, want: api.OwnerPlugin},
		"a claim of another driver":        {pods: []corev1.Pod{claimant()}, prepared: "dra.net/node/eth0", plugins: []corev1.Pod{plugin}, want: api.OwnerPlugin},
		"a claim by admin access":          {pods: []corev1.Pod{claimant()}, claims: claimOf(admin), prepared: "gpu.nvidia.com/node/gpu-0", plugins: []corev1.Pod{plugin}, want: api.OwnerPlugin},

		"nothing":             {want: api.OwnerNone},
		"the plugin":          {offered: capacity.Resources{"nvidia.com/gpu": {"GPU-0", "GPU-1"}}, plugins: []corev1.Pod{plugin}, want: api.OwnerPlugin},
		"the plugin's pod":    {plugins: []corev1.Pod{plugin}, want: api.OwnerPlugin},
		"an unknown plugin":   {offered: capacity.Resources{"nvidia.com/mig-1g.10gb": {"MIG-a"}}, want: api.OwnerPlugin, says: []string{"nvidia.com/mig-1g.10gb"}},
		"another's resource":  {offered: capacity.Resources{"nvidia.com/hostdev": {"eth0"}}, want: api.OwnerNone},
		"slices unreadable":   {plugins: []corev1.Pod{plugin}, err: errors.New("forbidden"), want: api.OwnerPlugin},
		"static, whole":       {pods: []corev1.Pod{draPod()}, slices: whole, want: api.OwnerDRAStatic, says: []string{"pod dra/driver-1"}},
		"static, cut":         {pods: []corev1.Pod{draPod()}, slices: cut, want: api.OwnerDRAStatic},
		"static, driver away": {slices: whole, want: api.OwnerDRAStarting, says: []string{"slice-1", "no pod of it is on the node"}},
		"static, gate off":    {pods: []corev1.Pod{draPod(gated("DynamicMIG=false,TimeSlicingSettings=true"))}, slices: whole, want: api.OwnerDRAStatic},
		"static, the last value of a gate counts": {
			pods: []corev1.Pod{draPod(gated("DynamicMIG=true,DynamicMIG=false"))}, slices: whole, want: api.OwnerDRAStatic,
		},
		"static, all alpha gates but this one": {pods: []corev1.Pod{draPod(gated("AllAlpha=true,DynamicMIG=false"))}, slices: whole, want: api.OwnerDRAStatic},
		"static, a gate of another container": {pods: []corev1.Pod{draPod(func(p *corev1.Pod) {
			p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "FEATURE_GATES", Value: "DynamicMIG=true"}}
		})}, slices: whole, want: api.OwnerDRAStatic},
		"dynamic, by sharedCounters":   {pods: []corev1.Pod{draPod()}, slices: append(counters, whole...), want: api.OwnerDRADynamic, says: []string{"sharedCounters in ResourceSlice slice-0"}},
		"dynamic, by consumesCounters": {slices: consumes, partial: true, want: api.OwnerDRADynamic, says: []string{"consumesCounters in ResourceSlice slice-1"}},
		"dynamic, an A100 without counters": {
			pods: []corev1.Pod{draPod(gated("DynamicMIG=true,"))}, slices: whole, want: api.OwnerDRADynamic, says: []string{"FEATURE_GATES=DynamicMIG=true,", "pod dra/driver-1"},
		},
		"dynamic, no slice yet":     {pods: []corev1.Pod{draPod(gated(" DynamicMIG = true"))}, want: api.OwnerDRADynamic},
		"dynamic, all alpha gates":  {pods: []corev1.Pod{draPod(gated("AllAlpha=true,MPSSupport=false"))}, slices: whole, want: api.OwnerDRADynamic},
		"dynamic, by a flag":        {pods: []corev1.Pod{draPod(flagged("--feature-gates", "DynamicMIG=true"))}, slices: whole, want: api.OwnerDRADynamic},
		"dynamic, by a flag with =": {pods: []corev1.Pod{draPod(flagged("-v=6", "--feature-gates=DynamicMIG=true"))}, slices: whole, want: api.OwnerDRADynamic},
		"dynamic, by a flag in a script": {pods: []corev1.Pod{draPod(func(p *corev1.Pod) {
			p.Spec.Containers[1].Args = []string{"exec gpu-kubelet-plugin --feature-gates 'DynamicMIG=true'"}
		})}, slices: whole, want: api.OwnerDRADynamic},
		"dynamic, by a flag with a blank": {
			pods: []corev1.Pod{draPod(flagged("--feature-gates", "TimeSlicingSettings=true, DynamicMIG=true"))}, slices: whole, want: api.OwnerDRADynamic,
		},
		"dynamic, by a flag with = and a blank": {
			pods: []corev1.Pod{draPod(flagged("--feature-gates=TimeSlicingSettings=true, DynamicMIG=true"))}, slices: whole, want: api.OwnerDRADynamic,
		},
		"dynamic, by a variable that a script sets": {pods: []corev1.Pod{
			draPod(script("export FEATURE_GATES='TimeSlicingSettings=true, DynamicMIG=true'\nexec gpu-kubelet-plugin -v 6")),
		}, slices: whole, want: api.OwnerDRADynamic, says: []string{"DynamicMIG=true"}},
		"dynamic, by a variable before the command": {pods: []corev1.Pod{draPod(script("set -e;FEATURE_GATES=A=true,DynamicMIG=true gpu-kubelet-plugin"))}, slices: whole, want: api.OwnerDRADynamic},
		"dynamic, by a variable and a semicolon":    {pods: []corev1.Pod{draPod(script("FEATURE_GATES=DynamicMIG=true;export FEATURE_GATES\ngpu-kubelet-plugin"))}, slices: whole, want: api.OwnerDRADynamic},
		"dynamic, with all alpha gates":             {pods: []corev1.Pod{draPod(script("export FEATURE_GATES=\"A=true, AllAlpha=true\"\ngpu-kubelet-plugin"))}, slices: whole, want: api.OwnerDRADynamic},
		"dynamic, by a file that a script reads":    {pods: []corev1.Pod{draPod(script("export FEATURE_GATES=`cat /etc/gates`\ngpu-kubelet-plugin"))}, slices: whole, want: api.OwnerDRADynamic},
		"static, without that alpha gate":           {pods: []corev1.Pod{draPod(flagged("--feature-gates=AllAlpha=true,DynamicMIG=false"))}, slices: whole, want: api.OwnerDRAStatic},
		"static, by a script with variables":        {pods: []corev1.Pod{draPod(script("export PATH=$PATH:/driver\nFEATURE_GATES=A=true gpu-kubelet-plugin -v $LEVEL"))}, slices: whole, want: api.OwnerDRAStatic},
		"dynamic, by a ConfigMap": {
			pods: []corev1.Pod{draPod(envFrom(""))}, slices: whole, want: api.OwnerDRADynamic, says: []string{"envFrom, which this agent cannot read"},
		},
		"static, by a ConfigMap of other variables": {pods: []corev1.Pod{draPod(envFrom("NODE_"))}, slices: whole, want: api.OwnerDRAStatic},
		"static, by a variable before a ConfigMap": {
			pods: []corev1.Pod{draPod(envFrom(""), gated("TimeSlicingSettings=true"))}, slices: whole, want: api.OwnerDRAStatic,
		},
		"static, by a flag before a ConfigMap": {
			pods: []corev1.Pod{draPod(envFrom(""), flagged("--feature-gates=DynamicMIG=false"))}, slices: whole, want: api.OwnerDRAStatic,
		},
		"dynamic, for all that is to see": {pods: []corev1.Pod{draPod(flagged("--feature-gates=$(GATES)"))}, slices: whole, want: api.OwnerDRADynamic},
		"dynamic, a value from elsewhere": {pods: []corev1.Pod{draPod(func(p *corev1.Pod) {
			p.Spec.Containers[1].Env = []corev1.EnvVar{{Name: "FEATURE_GATES", ValueFrom: &corev1.EnvVarSource{}}}
		})}, slices: whole, want: api.OwnerDRADynamic, says: []string{"cannot read"}},
		"dynamic, the next pod is": {
			pods:   []corev1.Pod{draPod(func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }), draPod(gated("DynamicMIG=true"))},
			slices: whole, want: api.OwnerDRADynamic,
		},
		"both, a whole GPU": {
			pods: []corev1.Pod{draPod()}, slices: whole, offered: capacity.Resources{"nvidia.com/gpu": {"GPU-1"}}, plugins: []corev1.Pod{plugin},
			want: api.OwnerBoth, says: []string{"GPU 1", "pod kube-system/plugin-1", "pod dra/driver-1"},
		},
		"both, a part of what is whole elsewhere": {slices: whole, offered: capacity.Resources{"nvidia.com/mig-3g.40gb": {"MIG-b"}}, want: api.OwnerBoth, says: []string{"GPU 1 3g.40gb"}},
		"both, a part by its GPU":                 {slices: cut, offered: capacity.Resources{"nvidia.com/gpu": {"GPU-1::2"}}, want: api.OwnerBoth, says: []string{"GPU 1"}},
		"both, under another name":                {slices: cut, offered: capacity.Resources{"nvidia.com/ours": {"MIG-b::0"}}, want: api.OwnerBoth},
		"both, without a GPU in common":           {slices: cut, offered: capacity.Resources{"nvidia.com/gpu": {"GPU-0"}}, want: api.OwnerBoth},
		"both, DynamicMIG": {
			pods: []corev1.Pod{draPod(gated("DynamicMIG=true"))}, slices: append(counters, whole...), offered: capacity.Resources{"nvidia.com/gpu": {"GPU-0"}}, want: api.OwnerBoth,
		},
		"another DRA driver next to NVIDIA's": {
			pods: []corev1.Pod{draPod()}, slices: whole, others: others, want: api.OwnerBoth, says: []string{"DRA driver hami.example (device d)", "GPU 1 3g.40gb", "pod dra/driver-1"},
		},
		"another DRA driver next to the plugin": {
			offered: capacity.Resources{"nvidia.com/gpu": {"GPU-0"}}, others: others, want: api.OwnerBoth, says: []string{"what advertises nvidia.com/gpu", "DRA driver hami.example"},
		},
		"another DRA driver in a change":      {changing: true, pods: []corev1.Pod{draPod()}, slices: whole, others: others, want: api.OwnerDRAStatic},
		"another DRA driver alone":            {others: others, want: api.OwnerBoth, says: []string{"DRA driver hami.example"}},
		"another DRA driver, of several GPUs": {others: map[holders.Device]string{{Driver: "hami.example", Name: "d"}: ""}, want: api.OwnerBoth},
		"another DRA driver, of a long name": {
			others: map[holders.Device]string{{Driver: strings.Repeat("h", 1<<10), Name: strings.Repeat("d", 1<<10)}: "GPU-0"}, want: api.OwnerBoth, says: []string{"GPU 0"},
		},
		"starting": {pods: []corev1.Pod{draPod()}, want: api.OwnerDRAStarting, says: []string{"no ResourceSlice", "its pod is Running"}},
		"starting, its slices lost": {
			pods: []corev1.Pod{draPod(isReady)}, want: api.OwnerDRAStarting, says: []string{"pod dra/driver-1 is ready, and has no ResourceSlice", "delete pod dra/driver-1"}, lost: true,
		},
		"starting, its slices lost, ending": {
			pods: []corev1.Pod{draPod(isReady, func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} })}, want: api.OwnerDRAStarting, says: []string{"see the log"},
		},
		"starting, its slices lost, next to the plugin": {
			pods: []corev1.Pod{draPod(isReady)}, offered: capacity.Resources{"nvidia.com/gpu": {"GPU-0"}}, plugins: []corev1.Pod{plugin}, want: api.OwnerDRAStarting, says: []string{"is ready, and has no"},
		},
		"starting, and unreadable": {pods: []corev1.Pod{draPod(isReady)}, err: errors.New("forbidden"), want: api.OwnerDRAStarting, says: []string{"see the log"}},
		"starting, not complete":   {pods: []corev1.Pod{draPod()}, slices: whole, partial: true, want: api.OwnerDRAStarting, says: []string{"not complete"}},
		"starting, beside the plugin": {
			pods: []corev1.Pod{draPod()}, offered: capacity.Resources{"nvidia.com/gpu": {"GPU-0"}}, plugins: []corev1.Pod{plugin}, want: api.OwnerDRAStarting,
		},
		"starting, slices unreadable": {pods: []corev1.Pod{draPod()}, err: errors.New("forbidden"), want: api.OwnerDRAStarting, says: []string{"cannot be read: forbidden"}},
		"starting, it fails":          {pods: []corev1.Pod{draPod(fails)}, want: api.OwnerDRAStarting, says: []string{"container gpus waits (CrashLoopBackOff", "exit code 1 (Error)"}},
		"compute domains alone": {
			pods:    []corev1.Pod{draPod(func(p *corev1.Pod) { p.Spec.Containers = p.Spec.Containers[:1] })},
			offered: capacity.Resources{"nvidia.com/gpu": {"GPU-0"}}, want: api.OwnerPlugin,
		},
		"a pod of no DaemonSet": {pods: []corev1.Pod{draPod(func(p *corev1.Pod) {
			p.OwnerReferences, p.Labels = nil, map[string]string{"app": "nvidia-dra-driver-kubelet-plugin"}
		})}, want: api.OwnerNone},
		"a pod without kubelet's folder": {pods: []corev1.Pod{draPod(func(p *corev1.Pod) { p.Spec.Volumes = nil })}, want: api.OwnerNone},
		"a pod of another program":       {pods: []corev1.Pod{draPod(func(p *corev1.Pod) { p.Spec.Containers[1].Args = []string{"sleep 1"} })}, want: api.OwnerNone},
		"a pod that has ended":           {pods: []corev1.Pod{draPod(func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })}, want: api.OwnerNone},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seen := &state.Observed{
				Pods: row.pods, DRA: state.DRA{Slices: row.slices, Complete: len(row.slices) > 0 && !row.partial, Err: row.err},
				Kubelet: state.Kubelet{Offered: row.offered}, DevicePlugin: state.DevicePlugin{Pods: row.plugins},
				GPUs: []nvml.GPU{{UUID: "GPU-0"}, {UUID: "GPU-1", Index: 1, Instances: []nvml.Instance{
					{Placed: nvml.Placed{Profile: "3g.40gb"}, Devices: []nvml.Device{{UUID: "MIG-b", Profile: "3g.40gb"}}},
				}}},
			}
			seen.DRA.Claims, seen.DRA.Others = row.claims, row.others
			if row.prepared != "" {
				seen.Kubelet.Assigned = holders.Assignments{{Namespace: "team", Name: "a"}: {"claim c": {row.prepared}}}
			}
			if row.changing {
				seen.Journal = &journal.Journal{ByClaims: true, ModesOnly: row.modes}
			}
			got := offer.OwnerOf(seen)
			seen.Owner = got
			if unknown := offer.ClaimsUnknown(seen); (unknown != nil) != (allocatesByClaims(got) && !seen.DRA.Complete) { // no pod is evicted while its claims say nothing
				t.Errorf("slices complete %t, and the claims: %v", seen.DRA.Complete, unknown)
			}
			if got.Kind != row.want || offer.LostSlices(seen) != row.lost {
				t.Errorf("%q, slices lost %t: %+v, want %q, %t", got.Kind, offer.LostSlices(seen), got, row.want, row.lost)
			}
			text := got.Plugin + "; " + got.Driver + "; " + got.Other + "; " + got.Evidence + "; " + offer.AdviceOn(got)
			for _, want := range row.says {
				if !strings.Contains(text, want) {
					t.Errorf("want %q in %s", want, text)
				}
			}
			if len(text) > 600 {
				t.Errorf("%d bytes: %s", len(text), text)
			}
		})
	}
}

// GPUCluster labels the driver's pod by another name than the driver's chart does, and any user's pod may have either.
func TestTheDRADriverIsKnownByWhatItRuns(t *testing.T) {
	t.Parallel()
	labelled := func(p *corev1.Pod) { p.Labels = map[string]string{"app": "nvidia-dra-driver-kubelet-plugin"} }
	for name, row := range map[string]struct {
		pod       corev1.Pod
		is, names bool
	}{
		"GPUCluster's":         {draPod(labelled), true, true},
		"a script in quotes":   {draPod(func(p *corev1.Pod) { p.Spec.Containers[1].Args = []string{"exec 'gpu-kubelet-plugin';"} }), true, true},
		"it does not run":      {draPod(func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }), false, true},
		"of no DaemonSet":      {draPod(func(p *corev1.Pod) { p.OwnerReferences = nil }), false, true},
		"another container":    {draPod(func(p *corev1.Pod) { p.Spec.Containers[1].Name = "driver" }), false, true},
		"by its label alone":   {corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"dra-driver-nvidia-gpu-component": "kubelet-plugin"}}}, false, false},
		"compute domain alone": {draPod(func(p *corev1.Pod) { p.Spec.Containers = p.Spec.Containers[:1] }), false, false},
	} {
		if got := offer.DriverRuns(&state.Observed{Pods: []corev1.Pod{row.pod}}); got != row.is {
			t.Errorf("%s: the driver runs: %t, want %t", name, got, row.is)
		}
		if got := offer.NamesDriver(row.pod); got != row.names {
			t.Errorf("%s: the pod names the driver: %t, want %t", name, got, row.names)
		}
	}
}

// A DaemonSet tolerates some taints of the control plane; any other may keep the driver's pod away.
func TestWhatKeepsTheDRADriverAwayIsNamed(t *testing.T) {
	t.Parallel()
	taint := func(key, value string, effect corev1.TaintEffect) corev1.Taint {
		return corev1.Taint{Key: key, Value: value, Effect: effect}
	}
	gpus := func(state corev1.ContainerState) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "gpus", State: state}}
		}
	}
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	for name, row := range map[string]struct {
		pods   []corev1.Pod
		taints []corev1.Taint
		want   string
	}{
		"it runs": {[]corev1.Pod{draPod(gpus(running))}, nil, ""},
		"its container waits": {
			[]corev1.Pod{draPod(gpus(corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff"}}))},
			nil,
			"pod dra/driver-1, its container gpus waits (ImagePullBackOff)",
		},
		"its pod is pending": {[]corev1.Pod{draPod(func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending })}, nil, "pod dra/driver-1, its pod is Pending"},
		"no taint": {
			nil,
			[]corev1.Taint{
				taint(corev1.TaintNodeUnschedulable, "", corev1.TaintEffectNoSchedule), taint(corev1.TaintNodeDiskPressure, "", corev1.TaintEffectNoSchedule),
				taint("soft", "", corev1.TaintEffectPreferNoSchedule),
			},
			"no pod of it is on the node, and no taint keeps one away: kubectl get daemonsets -A shows whether its DaemonSet is there and selects the node",
		},
		"ours and another": {
			nil,
			[]corev1.Taint{
				taint("team", "a", corev1.TaintEffectNoExecute), taint(config.TaintGPUUnhealthy, "critical", corev1.TaintEffectNoSchedule), state.FenceTaint(),
				taint(strings.Repeat("k", 253), strings.Repeat("v", 63), corev1.TaintEffectNoSchedule),
			},
			"no pod of it is on the node; unless its DaemonSet tolerates them, taints of the node keep it away: " +
				"gpuslice.io/gpu-unhealthy=critical:NoSchedule, gpuslice.io/repartitioning:NoSchedule, team=a:NoExecute and 1 more",
		},
	} {
		got := offer.DriverAway(&state.Observed{Pods: row.pods, Node: &corev1.Node{Spec: corev1.NodeSpec{Taints: row.taints}}})
		if !strings.HasPrefix(got, row.want) || row.want == "" && got != "" || len(got) > 400 {
			t.Errorf("%s: %q, want %q", name, got, row.want)
		}
	}
}

// Where the driver makes the parts itself, the slices show which GPUs it makes parts of. What the GPUs have been cut into says nothing.
func TestSlicesShowTheMIGModesThatTheDriverHasRead(t *testing.T) {
	t.Parallel()
	one, part := draDevice("gpu-0", "type", "gpu", "uuid", "GPU-a"), draDevice("gpu-0-mig-1g10gb-19-0", "type", "mig", "profile", "1g.10gb", "parentUUID", "GPU-a")
	whole, parts, both := published(one), published(part), published(one, part)
	gpu, cut := nvml.GPU{UUID: "GPU-a", Capable: true}, nvml.GPU{UUID: "GPU-a", Capable: true, Enabled: true, Instances: []nvml.Instance{{Placed: nvml.Placed{Profile: "3g.40gb"}}}}
	hopper, hopperCut := gpu, cut
	hopper.ComputeCapability.Major, hopperCut.ComputeCapability.Major = 9, 9
	driver := draPod(gated("DynamicMIG=true"))
	driver.Status.Phase = corev1.PodRunning
	pending := *driver.DeepCopy()
	pending.Status.Phase = corev1.PodPending
	claims := []holders.Pod{{Namespace: "team", Name: "a", UID: "a", DeviceClaims: []string{"c"}}}
	for name, row := range map[string]struct {
		gpu     nvml.GPU
		dra     state.DRA
		pods    []corev1.Pod
		unasked bool
		holds   bool // a pod has a claim

		want    string
		unknown string // why the agent cannot know which device a claim has
	}{
		"whole":                     {gpu: gpu, dra: state.DRA{Complete: true, Slices: whole}},
		"parts":                     {gpu: cut, dra: state.DRA{Complete: true, Slices: parts}, holds: true},
		"both":                      {gpu: hopper, dra: state.DRA{Complete: true, Slices: both}},
		"both, cut":                 {gpu: hopperCut, dra: state.DRA{Complete: true, Slices: both}},
		"whole, switched on since":  {gpu: cut, dra: state.DRA{Complete: true, Slices: whole}, want: "GPU 0 is in MIG mode, and the ResourceSlices have no parts of it"},
		"both, on":                  {gpu: cut, dra: state.DRA{Complete: true, Slices: both}, want: "GPU 0 is in MIG mode, and the ResourceSlices have it as a whole"},
		"parts, switched off since": {gpu: gpu, dra: state.DRA{Complete: true, Slices: parts}, want: "GPU 0 is not in MIG mode, and the ResourceSlices do not have it as a whole"},
		"both, off":                 {gpu: gpu, dra: state.DRA{Complete: true, Slices: both}, want: "GPU 0 is not in MIG mode, and the ResourceSlices have parts of it"},
		"no device":                 {gpu: gpu, dra: state.DRA{Complete: true, Slices: published()}, want: "GPU 0 is not in MIG mode, and the ResourceSlices do not have it as a whole"},
		"whole, which should be both": {
			gpu: hopper, dra: state.DRA{Complete: true, Slices: whole}, want: "GPU 0 is not in MIG mode, and the ResourceSlices have no parts of it",
		},
		"not asked of": {gpu: cut, dra: state.DRA{Complete: true, Slices: whole}, unasked: true},
		"no slices": {
			gpu: gpu, holds: true, want: "NVIDIA's DRA driver has not published all of its ResourceSlices for this node",
			unknown: "NVIDIA's DRA driver has not published all of its ResourceSlices for this node",
		},
		"no slices, and no claims": {gpu: gpu, want: "NVIDIA's DRA driver has not published all of its ResourceSlices for this node"},
		"no driver": {
			gpu: gpu, dra: state.DRA{Complete: true, Slices: whole}, pods: []corev1.Pod{pending},
			want: "NVIDIA's DRA driver does not run on this node: pod dra/driver-1, its pod is Pending",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := state.Observed{GPUs: []nvml.GPU{row.gpu}, DRA: row.dra, Owner: state.Owner{Kind: api.OwnerDRADynamic}, Pods: row.pods}
			if row.pods == nil {
				s.Pods = []corev1.Pod{driver}
			}
			if row.holds {
				s.Holders.Pods = claims
			}
			want := state.Desired{Targets: plan.Targets{"GPU-a": {ModeOnly: true}}}
			if row.unasked {
				want.Targets = nil
			}
			if diff := cmp.Diff(row.want, strings.Join(offer.Compare(&s, want, config.MIGStrategyMixed).Missing, "; ")); diff != "" {
				t.Errorf("missing (-want +got):\n%s", diff)
			}
			unknown := ""
			if err := offer.ClaimsUnknown(&s); err != nil {
				unknown = err.Error()
			}
			if unknown != row.unknown {
				t.Errorf("of the claims it is not known %q, want %q", unknown, row.unknown)
			}
		})
	}
}
