package node_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/renameio/v2"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
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
