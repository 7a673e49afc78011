package migrate

import (
	"fmt"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
)

// Cluster has the fields of a GPUCluster of the GPU Operator (v26.7) that matter here: it deploys NVIDIA's DRA driver, and no MIG manager.
type Cluster struct {
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		DRADriver struct {
			FeatureGates map[string]bool `json:"featureGates"`
			GPUs         struct {
				KubeletPlugin struct {
					Env []struct{ Name, Value string } `json:"env"`
				} `json:"kubeletPlugin"`
			} `json:"gpus"`
		} `json:"draDriver"`
		Daemonsets struct {
			Tolerations []corev1.Toleration `json:"tolerations"`
		} `json:"daemonsets"`
	} `json:"spec"`
}

// ReadCluster reads a GPUCluster from its JSON or YAML. Fields that do not matter here may be anything.
func ReadCluster(text []byte) (c Cluster, err error) {
	if err := yaml.Unmarshal(text, &c); err != nil {
		return c, fmt.Errorf("reading a GPUCluster: %w", manifest.InWords(err))
	}
	return c, nil
}

// gateDynamicMIG has the driver cut the GPUs itself, and so has gateAllAlpha where the other is not named.
const (
	gateDynamicMIG = "DynamicMIG"
	gateAllAlpha   = "AllAlpha"
)

// gate is the feature gate that has the driver cut the GPUs itself, and the field that has it; empty if none does.
func (c Cluster) gate() (field, gate string) {
	field, gates := c.gates()
	switch on, named := gates[gateDynamicMIG]; {
	case on:
		return field, gateDynamicMIG
	case !named && gates[gateAllAlpha]:
		return field, gateAllAlpha
	default:
		return "", ""
	}
}

// gates are the driver's feature gates, and the field that has them: the operator writes featureGates into the variable FEATURE_GATES, which env replaces.
func (c Cluster) gates() (field string, gates map[string]bool) {
	field, gates = "draDriver.featureGates.", c.Spec.DRADriver.FeatureGates
	for _, v := range c.Spec.DRADriver.GPUs.KubeletPlugin.Env {
		if v.Name != "FEATURE_GATES" {
			continue
		}
		field, gates = "draDriver.gpus.kubeletPlugin.env: FEATURE_GATES ", map[string]bool{}
		for gate := range strings.SplitSeq(v.Value, ",") {
			name, value, _ := strings.Cut(gate, "=")
			if on, err := strconv.ParseBool(strings.TrimSpace(value)); err == nil {
				gates[strings.TrimSpace(name)] = on
			}
		}
	}
	return field, gates
}

// cluster judges a GPUCluster. Next to it, no ClusterPolicy counts.
func (j *judge) cluster(c Cluster, s Sources) {
	about := "GPUCluster " + c.Metadata.Name
	for _, p := range s.Policies {
		j.say(about, Change, "", "%s is there too, and the operator works with one of the two alone: delete the other; migManager, mig.strategy and devicePlugin of a ClusterPolicy count no more on nodes of a GPUCluster",
			p.about())
	}
	if field, gate := c.gate(); gate != "" {
		j.say(about, Change, "", "%s%s is true: the driver cuts the GPUs itself, so the agent leaves MIG alone; set %s to false where labels are to divide them", field, gate, gateDynamicMIG)
	} else {
		j.say(about, Taken, "", "it deploys NVIDIA's DRA driver and no MIG manager: gpuslice divides the GPUs of its nodes by the same labels; deploy overlays/dra (deploy/DRA.md)")
	}
	j.say(about, Ignored, "", "MIG strategy and configs of the device plugin have no meaning on its nodes: pods ask by claims, or by the names of DeviceClasses, which kubectl gpuslice render dra writes; "+
		"time-slicing and MPS are the claim's own config")
	j.tolerated(about, c.Spec.Daemonsets.Tolerations, s)
}
