package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
	"github.com/gpuslice/gpuslice/test/gpusim/pods"
	"github.com/gpuslice/gpuslice/test/node"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

const (
	nodeName  = "hardware"
	namespace = "default" // of the pods
	own       = "gpuslice"

	pluginProgram = "nvidia-device-plugin"
	pluginImage   = "nvcr.io/nvidia/k8s-device-plugin:v0.19.3"
	workImage     = "gpuslice/hardware-work" // this program
)

// plane is a control plane with one node, which has the machine's GPUs.
type plane struct {
	*trial
	cluster *cluster.Cluster
	client  kubernetes.Interface
	kubelet *kubelet.Kubelet
	agent   *agentRun

	driverless error // why NVIDIA's DRA driver cannot run here; nil if it can

	table *pods.Table // that the agent reads: a pod's processes are this program's children, and of no cgroup of a pod

	mu    sync.Mutex
	given map[types.UID][]string // devices of pods
}

// start runs the control plane and the node.
func (t *trial) start(ctx context.Context) (*plane, error) {
	if err := sandbox.Possible(); err != nil {
		return nil, err
	}
	p := &plane{trial: t, given: map[types.UID][]string{}}
	var err error
	if p.cluster, err = cluster.Start(ctx, cluster.Options{Dir: filepath.Join(t.dir, "cluster"), Binaries: filepath.Dir(t.programs.bin("etcd"))}); err != nil {
		return nil, err
	}
	if err := p.join(ctx); err != nil {
		return nil, errors.Join(err, p.stop())
	}
	return p, nil
}

func (p *plane) join(ctx context.Context) error {
	var err error
	if p.client, err = kubernetes.NewForConfig(p.cluster.Config()); err != nil {
		return err
	}
	if p.table, err = pods.MakeTable(filepath.Join(p.dir, "proc"), p.bootID); err != nil {
		return err
	}
	credentials, err := p.cluster.ConfigFor("system:node:"+nodeName, "system:nodes")
	if err != nil {
		return err
	}
	log, err := logTo(filepath.Join(p.dir, "kubelet.log"))
	if err != nil {
		return err
	}
	var driver kubelet.Image
	driver, p.driverless = p.draDriver()
	p.kubelet, err = kubelet.Start(ctx, kubelet.Options{
		Node: nodeName, Dir: filepath.Join(p.dir, "kubelet"), Config: credentials, Log: log, BootID: p.bootID,
		Labels:        map[string]string{corev1.LabelHostname: nodeName, "nvidia.com/gpu.present": "true"},
		SandboxBinary: p.programs.bin("sandbox"), ReportAtOnce: true, ListDelay: time.Second,
		HostPaths: map[string]string{"/": p.root()},
		Images: map[string]kubelet.Image{
			pluginImage:         {Path: p.programs.bin(pluginProgram), Env: p.env, Mounts: p.mounts},
			pluginImage + " sh": {Path: "/bin/sh"},
			workImage:           {Path: p.self, Env: p.env},

			node.DRADriverImage + " bash": driver,
		},
		OnAllocate: p.allocated, OnFree: p.freed, OnStart: p.started, OnEnd: p.ended,
	})
	return err
}

// root is what pods see as the root of the host: nothing that they write there is the machine's.
func (p *plane) root() string { return filepath.Join(p.dir, "root") }

// pluginConfig is the config file of the device plugin.
func (p *plane) pluginConfig() string {
	return filepath.Join(p.root(), "var", "lib", "gpuslice", "device-plugin", "config.yaml")
}

func (p *plane) allocated(pod *corev1.Pod, ids []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.given[pod.UID] = ids
}

func (p *plane) freed(pod *corev1.Pod, _ []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.given, pod.UID)
}

// started shows a process to the agent as one of its pod, with the files of its GPUs open.
func (p *plane) started(pod *corev1.Pod, c *corev1.Container, pid int) {
	p.mu.Lock()
	ids := p.given[pod.UID]
	p.mu.Unlock()
	process := pods.Process{PID: pid, Command: "hardware", Args: slices.Concat(c.Command, c.Args), Cgroup: pods.OfPod(pod)}
	plugin := c.Image == pluginImage && c.Command[0] == pluginProgram
	switch c.Image {
	case pluginImage:
		process.Command = c.Command[0]
	case node.DRADriverImage:
		process.Command = draProgram // which has no GPU open between its calls
	}
	for _, g := range p.before {
		// The plugin has them all open.
		if plugin || slices.ContainsFunc(ids, func(id string) bool {
			return strings.HasPrefix(id, string(g.UUID)) || strings.HasSuffix(id, fmt.Sprintf("/gpu-%d", g.Minor)) // by the plugin, or by a claim
		}) {
			process.Files = append(process.Files, fmt.Sprintf("/dev/nvidia%d", g.Minor))
		}
	}
	if err := p.table.Add(process); err != nil {
		p.log.Warn("process not shown in the table", zap.Int("pid", pid), zap.Error(err))
	}
}

func (p *plane) ended(pid int) {
	if err := p.table.Remove(pid); err != nil {
		p.log.Warn("process not taken out of the table", zap.Int("pid", pid), zap.Error(err))
	}
}

// stop ends everything that was started. All processes on the GPUs are gone then.
func (p *plane) stop() error {
	var err error
	if p.agent != nil {
		err = p.agent.stop()
	}
	if p.kubelet != nil {
		p.kubelet.Stop()
	}
	return errors.Join(err, p.cluster.Stop())
}
