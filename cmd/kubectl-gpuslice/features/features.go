// Package features reads what GPU feature discovery says of a node's GPUs by the node's labels.
//
// Any account that may label nodes can write any value: one that is impossible counts as absent.
package features

import (
	"regexp"
	"strconv"
	"strings"
)

// Labels of GPU feature discovery.
const (
	LabelProduct = "nvidia.com/gpu.product"
	LabelCount   = "nvidia.com/gpu.count"
	LabelMemory  = "nvidia.com/gpu.memory"

	labelCapable = "nvidia.com/mig.capable"
	labelVirtual = "nvidia.com/vgpu.present"
)

// SuffixShared ends the product of GPUs or MIG devices that are shared.
const SuffixShared = "-SHARED"

// MostGPUs is more than any machine has.
const MostGPUs = 64

// mostMemoryMiB is more than any GPU has.
const mostMemoryMiB = 4 << 20

// GPUs is what the labels say of the GPUs of one node.
type GPUs struct {
	Model     string // with dashes for spaces, without what discovery adds for MIG and for sharing; empty if they do not say
	Count     int    // 0 if they do not say
	MemoryMiB int    // of one whole GPU; 0 if they do not say
	Incapable bool   // they say that none can be cut
	Virtual   bool   // they are vGPUs
}

// Of reads the labels of a node. Under the device plugin's MIG strategy single they describe MIG devices in place of GPUs, and then give
// neither count nor memory of the GPUs.
func Of(labels map[string]string) GPUs {
	product := labels[LabelProduct]
	g := GPUs{Model: suffix.ReplaceAllString(product, ""), Incapable: labels[labelCapable] == "false", Virtual: labels[labelVirtual] == "true"}
	if !strings.Contains(product, "-MIG-") {
		g.Count, g.MemoryMiB = bounded(labels[LabelCount], MostGPUs), bounded(labels[LabelMemory], mostMemoryMiB)
	}
	return g
}

// suffix is what discovery adds to the name of a model if all its GPUs are cut, or shared.
var suffix = regexp.MustCompile(`(-MIG-[0-9A-Za-z.+]*)?(-SHARED)?$`)

func bounded(text string, most int) int {
	if n, err := strconv.Atoi(text); err == nil && n > 0 && n <= most {
		return n
	}
	return 0
}
