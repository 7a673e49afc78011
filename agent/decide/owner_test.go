package decide_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Where NVIDIA's DRA driver cuts the GPUs itself, a label can request MIG modes alone, as far as the driver does not switch them.
func TestWhichMIGModesALabelCanRequestOfTheDRADriver(t *testing.T) {
	t.Parallel()
	has := []nvml.Instance{{Placed: nvml.Placed{Profile: "3g.40gb", Span: nvml.Span{Start: 4, Size: 4}}}}
	const driver = "NVIDIA's DRA driver (pod dra/driver-1)"
	for name, row := range map[string]struct {
		mig     bool
		devices map[string]int
		gpu     nvml.GPU
		pods    []holders.Pod
		journal *journal.Journal
		unknown bool // the slices are

		waits bool
		says  []string // nil if it can
	}{
		"on":                            {mig: true},
		"on, as it is":                  {mig: true, gpu: nvml.GPU{Enabled: true, Instances: has}},
		"on, which the driver switches": {mig: true, gpu: nvml.GPU{ComputeCapability: nvml.ComputeCapability{Major: 9}}},
		"on, and none of a profile":     {mig: true, devices: map[string]int{"1g.10gb": 0}},
		"off":                           {gpu: nvml.GPU{Enabled: true}},
		"off, as it is":                 {},
		"off, which the driver switches": {
			gpu: nvml.GPU{ComputeCapability: nvml.ComputeCapability{Major: 10}}, says: []string{"leave GPU 0 out", driver, "class mig.nvidia.com", "the agent cannot keep that GPU whole"},
		},
		"off, with an instance that a pod has": {
			gpu: nvml.GPU{Enabled: true, Instances: has}, pods: []holders.Pod{{Namespace: "team", Name: "a", Devices: []string{"GPU-0"}, DevicesKnown: true}, {Namespace: "team", Name: "b", DevicesKnown: true}},
			waits: true, says: []string{"end the pods that have or may have claims on it: team/a;", "GPU 0", "3g.40gb@4", driver},
		},
		"off, with an instance that no pod has": {
			gpu: nvml.GPU{Enabled: true, Instances: has}, waits: true, says: []string{"delete the driver's pod", "GPU 0", "3g.40gb@4"},
		},
		"instances":      {mig: true, devices: map[string]int{"1g.10gb": 7}, says: []string{"by claims of class mig.nvidia.com", "as all-enabled and all-disabled do", "DynamicMIG"}},
		"in its change":  {mig: true, journal: &journal.Journal{Target: "mine", ModesOnly: true}, unknown: true},
		"the change cut": {mig: true, journal: &journal.Journal{Target: "mine"}, says: []string{"it cuts the GPUs of this node itself"}},
		"without slices": {mig: true, unknown: true, waits: true, says: []string{"changes no MIG mode until the ResourceSlices of " + driver}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := decide.Resolver{
				Settings: config.Default(),
				Parse: func([]byte) (map[string]catalog.MIGConfig, error) {
					return map[string]catalog.MIGConfig{"mine": {{All: true, MIG: row.mig, Devices: row.devices}}}, nil
				},
			}
			row.gpu.UUID, row.gpu.Capable = "GPU-0", true
			seen := &state.Observed{
				Node:  &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{config.LabelMIGConfig: "mine"}}},
				Owner: state.Owner{Kind: api.OwnerDRADynamic, Driver: driver}, GPUs: []nvml.GPU{row.gpu}, Files: state.Files{Configs: &state.ConfigMapFile{}},
				DRA: state.DRA{Complete: !row.unknown}, Holders: state.Holders{Pods: row.pods}, Journal: row.journal, Plugin: state.PluginConfig{Read: true},
			}
			want, err := r.Resolve(seen)
			if row.says == nil {
				if target := want.Targets["GPU-0"]; err != nil || !target.ModeOnly || target.MIG != row.mig || len(target.Devices) > 0 {
					t.Errorf("the target is %+v, %v", target, err)
				}
				return
			}
			var waiting *outcome.Waiting
			if errors.As(err, &waiting) != row.waits || err == nil {
				t.Fatalf("%v: waiting %t, want %t", err, waiting != nil, row.waits)
			}
			for _, text := range row.says {
				if !strings.Contains(err.Error()+";", text) {
					t.Errorf("want %q in %v", text, err)
				}
			}
		})
	}
}

func TestWhatIsRefusedByTheOwnerOfTheGPUs(t *testing.T) {
	t.Parallel()
	const driver, plugin = "NVIDIA's DRA driver (pod dra/driver-1)", "NVIDIA's device plugin (pod kube-system/plugin-1)"
	const other = "DRA driver hami.example (device d)"
	parts := map[string]int{"1c.3g.40gb": 1, "2c.3g.40gb": 1}
	for name, row := range map[string]struct {
		owner     state.Owner
		devices   map[string]int
		pluginKey string
		reason    config.Reason
		waits     bool
		underWay  bool // a change is
		says      []string
	}{
		"static": {
			owner: state.Owner{Kind: api.OwnerDRAStatic, Driver: driver}, devices: map[string]int{"1g.10gb": 7},
		},
		"static, parts of instances": {
			owner: state.Owner{Kind: api.OwnerDRAStatic, Driver: driver}, devices: parts,
			reason: config.ReasonImpossibleGeometry, says: []string{"request whole GPU instances", "1c.3g.40gb on GPU 0", "does not start"},
		},
		"static, instances with media extensions are whole": {
			owner: state.Owner{Kind: api.OwnerDRAStatic, Driver: driver}, devices: map[string]int{"1g.10gb+me": 1},
		},
		"static, and what is left out of parts of instances": {
			owner: state.Owner{Kind: api.OwnerDRAStatic, Driver: driver}, devices: map[string]int{"1c.3g.40gb": 0},
		},
		"static, an extension that ends as a part begins": {
			owner: state.Owner{Kind: api.OwnerDRAStatic, Driver: driver}, devices: map[string]int{"1g.10gb+mec.all": 1},
		},
		"dynamic": {
			owner:   state.Owner{Kind: api.OwnerDRADynamic, Driver: driver, Evidence: "sharedCounters in ResourceSlice s"},
			devices: parts, reason: config.ReasonForeignOwner, says: []string{"class mig.nvidia.com", "DynamicMIG", "sharedCounters in ResourceSlice s", driver},
		},
		"both": {
			owner: state.Owner{Kind: api.OwnerBoth, Plugin: plugin, Driver: driver, Evidence: "GPU 1"}, devices: parts,
			reason: config.ReasonForeignOwner, says: []string{plugin, driver, "both allocate GPU 1", "keep one of them off this node"},
		},
		"another DRA driver": {
			owner: state.Owner{Kind: api.OwnerBoth, Driver: driver, Other: other, Evidence: "GPU 1"}, devices: parts,
			reason: config.ReasonForeignOwner, says: []string{"keep one of them off this node", driver + " and " + other + " both allocate GPU 1, so two pods may get the same device; the agent"},
		},
		"another DRA driver, and both of NVIDIA's": {
			owner: state.Owner{Kind: api.OwnerBoth, Plugin: plugin, Driver: driver, Other: other}, devices: parts,
			reason: config.ReasonForeignOwner, says: []string{plugin + " and " + driver + " and " + other + " all allocate GPUs of this node"},
		},
		"another DRA driver alone": {
			owner: state.Owner{Kind: api.OwnerBoth, Other: other, Evidence: "GPU 1"}, devices: parts,
			reason: config.ReasonForeignOwner, says: []string{"keep it off this node", other + " allocates GPU 1", "changes nothing until then"},
		},
		"another DRA driver alone, of sharing": {
			owner: state.Owner{Kind: api.OwnerBoth, Other: other}, pluginKey: "slices", reason: config.ReasonForeignOwner, says: []string{other + " allocates GPUs of this node"},
		},
		"starting": {
			owner:   state.Owner{Kind: api.OwnerDRAStarting, Driver: driver, Evidence: "it has no ResourceSlice for the node", Since: time.Unix(1e9, 0), Left: time.Second},
			devices: parts, reason: config.ReasonForeignOwner, waits: true, says: []string{driver, "no ResourceSlice", "2001-09-09 01:46:40Z"},
		},
		"starting again in a change, which is not undone for that": {
			owner:   state.Owner{Kind: api.OwnerDRAStarting, Driver: driver, Evidence: "it has no ResourceSlice for the node", Since: time.Unix(1e9, 0), Left: time.Second},
			devices: parts, underWay: true, reason: config.ReasonForeignOwner, waits: true, says: []string{driver, "no ResourceSlice"},
		},
		"broken": {
			owner:   state.Owner{Kind: api.OwnerDRAStarting, Driver: driver, Evidence: "its container gpus waits (CrashLoopBackOff)", Since: time.Unix(1e9, 0)},
			devices: parts, reason: config.ReasonForeignOwner, says: []string{driver, "CrashLoopBackOff", "2001-09-09 01:46:40Z"},
		},
		"ready, and its slices are lost": {
			owner:   state.Owner{Kind: api.OwnerDRAStarting, Driver: driver, Lost: "pod dra/driver-1", Since: time.Unix(1e9, 0)},
			devices: parts, reason: config.ReasonForeignOwner, waits: true, says: []string{"delete pod dra/driver-1", "is ready, and has no ResourceSlice", "2001-09-09 01:46:40Z"},
		},
		"its slices are left, and no pod of it": {
			owner:   state.Owner{Kind: api.OwnerDRAStarting, Driver: driver, PodGone: true, Evidence: "no pod of it is on the node", Since: time.Unix(1e9, 0)},
			devices: parts, reason: config.ReasonForeignOwner, says: []string{"start NVIDIA's DRA driver on this node again: its ResourceSlices are here", "2001-09-09 01:46:40Z"},
		},
		"sharing, static": {
			owner: state.Owner{Kind: api.OwnerDRAStatic, Driver: driver}, pluginKey: "slices",
			reason: config.ReasonImpossibleSharing, says: []string{"kind: GpuConfig", "strategy: TimeSlicing", "strategy: MPS", driver, config.LabelDevicePluginConfig + "=slices"},
		},
		"sharing, dynamic": {
			owner: state.Owner{Kind: api.OwnerDRADynamic, Driver: driver}, pluginKey: "slices",
			reason: config.ReasonImpossibleSharing, says: []string{"apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig", driver, config.LabelDevicePluginConfig + "=slices"},
		},
		"sharing, both": {
			owner: state.Owner{Kind: api.OwnerBoth, Plugin: plugin, Driver: driver}, pluginKey: "slices",
			reason: config.ReasonForeignOwner, says: []string{plugin, driver, "GPUs of this node"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := decide.Resolver{
				Settings: config.Default(),
				Parse: func([]byte) (map[string]catalog.MIGConfig, error) {
					return map[string]catalog.MIGConfig{"mine": {{All: true, MIG: true, Devices: row.devices}}}, nil
				},
			}
			seen := &state.Observed{
				Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{config.LabelMIGConfig: "mine"}}}, Owner: row.owner, GPUs: []nvml.GPU{{UUID: "GPU-0", Capable: true}}, Files: state.Files{Configs: &state.ConfigMapFile{}},
			}
			if row.pluginKey != "" {
				seen.Node.Labels = map[string]string{config.LabelDevicePluginConfig: row.pluginKey}
			}
			if row.underWay {
				seen.Journal = &journal.Journal{Target: "mine"}
			}
			_, err := r.Resolve(seen)
			if row.reason != "" && outcome.IsUnseen(err) != row.underWay {
				t.Errorf("whose the GPUs are is not seen, so that the change stands still: %t, want %t", !row.underWay, row.underWay)
			}
			var stalled *outcome.Stalled
			var waiting *outcome.Waiting
			var reason config.Reason
			switch {
			case errors.As(err, &stalled):
				reason = stalled.Reason
			case errors.As(err, &waiting):
				reason = waiting.Reason
			}
			if reason != row.reason || (waiting != nil) != row.waits {
				t.Fatalf("%v: reason %q, waiting %v, want %q, %v", err, reason, waiting != nil, row.reason, row.waits)
			}
			for _, want := range row.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("want %q in %v", want, err)
				}
			}
		})
	}
}
