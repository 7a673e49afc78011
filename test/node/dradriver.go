package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// DRADriverImage is the image of NVIDIA's DRA driver for GPUs.
const DRADriverImage = "dra-driver-nvidia/dra-driver-nvidia-gpu:v0.5.0"

// DRADriverLabel on a node sets the mode of NVIDIA's DRA driver, which runs there in place of its device plugin: DRAStatic or
// DRADynamicMIG.
const DRADriverLabel = "test.gpuslice.io/dra-driver"

// The modes of NVIDIA's DRA driver.
const (
	DRAStatic     = "static"      // it offers the GPUs as they are cut when it starts
	DRADynamicMIG = "dynamic-mig" // it cuts them itself
)

// BuildDRADriver builds NVIDIA's DRA driver, which most nodes do without.
func (p *Parts) BuildDRADriver(ctx context.Context, b binaries.Builder) (err error) {
	if err := b.Announce(ctx, "dradriver"); err != nil {
		return err
	}
	p.DRADriver, err = b.DRADriver(ctx)
	return err
}

// draDriver is the DRA driver's image: a shell that finds the program, as its chart runs it.
func (n *Node) draDriver() (kubelet.Image, error) {
	image := kubelet.Image{Path: "/bin/bash", Env: append([]string{"PATH=" + n.Parts.DRADriver + ":/usr/bin:/bin"}, n.env...)}
	for _, shown := range []string{"proc/driver", "proc/modules", "proc/devices", "proc/sys/kernel/random/boot_id", "sys/bus/pci", "sys/devices"} {
		image.Mounts = append(image.Mounts, sandbox.Mount{Source: filepath.Join(n.host(), shown), Target: "/" + shown})
	}
	devices, err := os.ReadDir(filepath.Join(n.DriverRoot(), "dev"))
	if err != nil {
		return kubelet.Image{}, fmt.Errorf("listing the device files of node %s: %w", n.Name, err)
	}
	for _, d := range devices { // it takes character devices alone for device files
		image.Over = append(image.Over, sandbox.Mount{Source: os.DevNull, Target: "/driver-root/dev/" + d.Name()})
	}
	return image, nil
}

// claimed are the names that NVIDIA's DRA driver gives its devices.
var claimed = regexp.MustCompile(`^gpu\.nvidia\.com/[^/]+/gpu-(\d+)(?:-mig-.+-(\d+))?$`)

// deviceOf is the UUID of a device that a pod has by a claim; "" if there is none.
func (n *Node) deviceOf(id string) string {
	parts := claimed.FindStringSubmatch(id)
	if parts == nil {
		return ""
	}
	minor, err := strconv.Atoi(parts[1])
	gpus := n.GPUs.UUIDs()
	if err != nil || minor >= len(gpus) {
		return ""
	}
	if parts[2] == "" {
		return gpus[minor]
	}
	start, err := strconv.Atoi(parts[2])
	if err != nil {
		return ""
	}
	return n.GPUs.MIGDevice(minor, start)
}
