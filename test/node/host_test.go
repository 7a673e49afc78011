package node_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/systemd"
	"github.com/gpuslice/gpuslice/test/systemd/systemdtest"
)

// The dynamic loader binds NVIDIA's library once for a process. The agent becomes a new one under the same pid, so that
// kubelet sees no restart, and makes again what the driver has lost.
func TestADriverOfAnotherVersionIsLoadedByTheSameProcess(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	p := r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	r.awaitConverged("all-balanced")
	library := filepath.Join(r.DriverRoot(), "usr", "lib64", "libnvidia-ml.so.1")
	r.replace(library, nil) // the old driver is uninstalled
	if err := r.GPUs.Upgrade("590.10.01"); err != nil {
		t.Fatal(err)
	}
	r.awaitReason(config.ReasonDriverNotLoaded)
	r.replace(library, r.read(r.Parts.LibNVML))
	r.restartPlugin()
	r.givenBack(r.awaitConverged("all-balanced"))
	if err := p.cmd.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the process has ended: %v", err)
	}
	if n := strings.Count(string(r.read(filepath.Join(r.Dir, "agent.log"))), `"msg":"starting"`); n != 2 {
		t.Errorf("the agent started %d times, want a second time within its process", n)
	}
}

// replace puts another file in a file's place, or none.
func (r *rig) replace(path string, with []byte) {
	r.t.Helper()
	if with == nil {
		if err := os.Remove(path); err != nil {
			r.t.Fatal(err)
		}
		return
	}
	if err := renameio.WriteFile(path, with, 0o755); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) read(path string) []byte {
	r.t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		r.t.Fatal(err)
	}
	return b
}

func TestTwoAgentsOfOneMachineDoNotActAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.runToTheMiddle("all-balanced")
	first := r.agents.running
	second := r.run()
	r.awaitConverged("all-balanced")
	select {
	case step := <-second.steps:
		t.Errorf("the second agent did something beside the first: %s", step)
	default:
	}
	r.agents.running = first
	r.kill()
	r.agents.running = second
	r.label(config.LabelMIGConfig, "all-disabled")
	r.givenBack(r.awaitConverged("all-disabled"))
}

// Each step on a GPU holds a lock of logind, and none is begun while the host goes down.
func TestAShutdownWaitsForTheStepThatRunsAndForNoOther(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	host := systemdtest.Start(t, systemd.Options{InhibitDelayMax: patience})
	r.agents.bus = host.Address()
	r.awaitOffered("nvidia.com/gpu", 2)
	if err := r.GPUs.Fail(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{Hang: true}); err != nil {
		t.Fatal(err)
	}
	r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	r.hostHas(host, "a lock for the first instance", func() bool {
		return slices.ContainsFunc(host.Inhibitors(), func(i systemd.Inhibitor) bool {
			return i.Mode == "delay" && i.Who == "gpuslice-agent" && strings.Contains(i.Why, "create")
		})
	})
	if err := host.BeginReboot(); err != nil {
		t.Fatal(err)
	}
	if host.Reboots() != 0 {
		t.Error("the host went down in the middle of the step")
	}
	if err := r.GPUs.Fail(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{}); err != nil {
		t.Fatal(err)
	}
	r.hostHas(host, "the reboot", func() bool { return host.Reboots() == 1 })
	r.awaitReason(config.ReasonShuttingDown)
	if n := len(r.snapshot()[0].Instances); n != 1 {
		t.Errorf("%d instances stand, want the one whose step was running", n)
	}
	r.kill()
	if err := r.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	host.Boot()
	r.run()
	r.givenBack(r.awaitConverged("all-balanced"))
}

func (r *rig) hostHas(host *systemd.Host, what string, done func() bool) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	if err := host.Wait(ctx, done); err != nil {
		r.t.Fatalf("waiting for %s: %v", what, err)
	}
}

// In a virtual machine whose driver cannot reset its GPUs, one reboot through logind is enough for all of them, after all
// pods have left that a drain moves.
func TestTheAgentRebootsAVirtualMachineThroughLogind(t *testing.T) {
	t.Parallel()
	r := newRig(t, "gpus: [{model: A100-80GB, count: 2, passthrough: true}]", "reboot: {policy: self}\n")
	host := systemdtest.Start(t, systemd.Options{})
	r.agents.bus = host.Address()
	r.awaitOffered("nvidia.com/gpu", 2)
	r.pod("default", r.Name+"-web", nil)
	r.awaitRunning("default", r.Name+"-web")
	r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	r.hostHas(host, "the reboot", func() bool { return host.Reboots() == 1 })
	n := r.awaitReason(config.ReasonNeedsReboot)
	if state := n.Labels[config.LabelMIGConfigState]; state != string(config.StateRebooting) || !n.Spec.Unschedulable {
		t.Errorf("state is %q and unschedulable %t while the node is rebooted", state, n.Spec.Unschedulable)
	}
	if out := r.kubectl("get", "pods", "-n", "default", "--field-selector", "spec.nodeName="+r.Name, "-o", "name"); out != "" {
		t.Errorf("the node was rebooted under a pod:\n%s", out)
	}
	r.kill()
	if err := r.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	host.Boot()
	r.run()
	r.givenBack(r.awaitConverged("all-balanced"))
	if host.Reboots() != 1 {
		t.Errorf("%d reboots, want 1", host.Reboots())
	}
}

// The DaemonSet controller places no device plugin under the startup taint, and no proof comes without one.
func TestAFreshNodeGetsPodsOnlyWhenItsCapacityIsProven(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.kubectl("taint", "node", r.Name, config.TaintNotReady+"=:NoSchedule")
	r.kubectl("delete", "pod", "-n", "kube-system", r.plugin().Name, "--wait")
	r.label(config.LabelMIGConfig, "all-balanced")
	began := time.Now()
	r.run()
	n := r.await("an open node", func(n *corev1.Node) bool { return !n.Spec.Unschedulable && len(n.Spec.Taints) == 0 })
	for resource, want := range map[corev1.ResourceName]int64{"nvidia.com/mig-1g.10gb": 4, "nvidia.com/mig-2g.20gb": 2, "nvidia.com/mig-3g.40gb": 2} {
		if got := n.Status.Allocatable[resource]; got.Value() != want {
			t.Errorf("when the node was opened it had %d %s, want %d", got.Value(), resource, want)
		}
	}
	t.Logf("opened after %s", time.Since(began).Round(time.Millisecond))
	r.givenBack(r.awaitConverged("all-balanced"))
}

// Container runtimes inject what the node's CDI spec names. NVIDIA's toolkit wrote it when the GPUs were whole.
func TestTheNodesCDISpecFollowsTheGeometry(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.agents.inSandbox = true
	caps := filepath.Join(r.DevRoot(), "dev", "nvidia-caps")
	if err := os.MkdirAll(caps, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, minor := range map[string]uint32{"nvidia0": 0, "nvidia1": 1, "nvidiactl": 255} {
		err := unix.Mknod(filepath.Join(r.DevRoot(), "dev", name), unix.S_IFCHR|0o666, int(unix.Mkdev(195, minor)))
		if errors.Is(err, unix.EPERM) {
			t.Skip("device files can be made here by nobody: run the test as root, in a container with CAP_MKNOD")
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(r.SpecDir(), 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(r.SpecDir(), "nvidia.yaml")
	r.replace(path, []byte(`cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}
- name: "1"
  containerEdits: {deviceNodes: [{path: /dev/nvidia1}]}
- name: all
  containerEdits: {deviceNodes: [{path: /dev/nvidia0}, {path: /dev/nvidia1}]}
containerEdits:
  deviceNodes: [{path: /dev/nvidiactl}]
  env: [NVIDIA_VISIBLE_DEVICES=void]
`))
	r.awaitOffered("nvidia.com/gpu", 2)
	r.run()
	for name, instances := range map[string]int{"all-balanced": 8, "all-3g.40gb": 4} {
		r.label(config.LabelMIGConfig, name)
		r.givenBack(r.awaitConverged(name))
		var spec struct {
			Devices []struct {
				Name  string
				Edits struct{ DeviceNodes []struct{ Path string } } `json:"containerEdits"`
			}
			Edits struct{ Env []string } `json:"containerEdits"`
		}
		if err := yaml.Unmarshal(r.read(path), &spec); err != nil {
			t.Fatal(err)
		}
		migs, nodes := 0, 0
		for _, d := range spec.Devices {
			if strings.Contains(d.Name, ":") { // GPU and MIG device, by their positions
				migs++
			}
			if d.Name == "all" {
				nodes = len(d.Edits.DeviceNodes)
			}
		}
		if migs != instances || len(spec.Devices) != instances+1 {
			t.Errorf("%s: of %d devices %d are MIG devices, want %d and one of all", name, len(spec.Devices), migs, instances)
		}
		if nodes != 2+2*instances { // each instance has a device file for itself and one for its compute instance
			t.Errorf("%s: all has %d device files, want those of 2 GPUs and 2 of each of %d instances", name, nodes, instances)
		}
		if !slices.Equal(spec.Edits.Env, []string{"NVIDIA_VISIBLE_DEVICES=void"}) {
			t.Errorf("%s: what was none of the geometry is now %v", name, spec.Edits.Env)
		}
	}
}
