// Package node assembles a whole simulated GPU node: simulated GPUs, the stand-in kubelet, NVIDIA's own device plugin on
// the simulated library, and our agent. The demo shows one to people; the tests of this package put one through what
// real nodes go through.
package node

import (
	"context"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/pods"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// Images that the node runs as processes; every other image is only said to run.
const (
	DevicePluginImage = "nvcr.io/nvidia/k8s-device-plugin:v0.19.3"
	DCGMImage         = "nvidia/dcgm:4.4.1"
	AgentImage        = "gpuslice/gpuslice-agent:v0.1.0"
)

// Other programs of the image of NVIDIA's device plugin. It runs the plugin where no command is named.
const (
	discovery     = DevicePluginImage + " gpu-feature-discovery"
	configManager = DevicePluginImage + " config-manager"
	mpsDaemon     = DevicePluginImage + " mps-control-daemon"
	mountShm      = mpsDaemon + " mount-shm"
	shell         = DevicePluginImage + " sh"
)

// programs are those that the node's process table shows, by their image and command.
var programs = map[string]struct {
	name     string
	monitors bool // has every GPU open for as long as it runs
}{
	DevicePluginImage: {"nvidia-device-plugin", true},
	discovery:         {"gpu-feature-discovery", false},
	configManager:     {"config-manager", false},
	mpsDaemon:         {"mps-control-daemon", false},
	shell:             {"sh", false},
	DCGMImage:         {"nv-hostengine", true},
	DRADriverImage:    {"gpu-kubelet-plugin", false},
}

// Parts are the programs that a node consists of.
type Parts struct {
	Kube         string // directory of the control plane's programs and kubectl
	DevicePlugin string // directory of NVIDIA's device plugin, GPU feature discovery, config-manager and MPS control daemon
	DRADriver    string // directory of NVIDIA's DRA driver; "" on nodes that have none
	LibNVML      string // the simulated library
	Agent        string
	Sandbox      string
	GPUSim       string // the command that stands for NVIDIA's DCGM, nvidia-smi and nvidia-cuda-mps-control
}

// part is one of them, and what builds it.
type part struct {
	into  *string
	build func(context.Context) (string, error)
}

// Build builds what is missing of a node with NVIDIA's device plugin.
func Build(ctx context.Context, b binaries.Builder) (p Parts, err error) {
	err = p.build(ctx, b, "deviceplugin", part{&p.DevicePlugin, b.DevicePlugin})
	return p, err
}

// BuildByClaims builds what is missing of a node that has NVIDIA's DRA driver in place of its device plugin.
func BuildByClaims(ctx context.Context, b binaries.Builder) (p Parts, err error) {
	err = p.build(ctx, b, "dradriver", part{&p.DRADriver, b.DRADriver})
	return p, err
}

// build builds the parts of every node, and the offerer, the part that offers its GPUs. name announces the offerer.
func (p *Parts) build(ctx context.Context, b binaries.Builder, name string, offerer part) error {
	if err := b.Announce(ctx, "kube", name); err != nil {
		return err
	}
	for _, part := range []part{
		{&p.Kube, b.Kube},
		offerer,
		{&p.LibNVML, b.LibNVML},
		{&p.Agent, func(ctx context.Context) (string, error) { return b.Tool(ctx, "./cmd/gpuslice-agent", agentFlags...) }},
		{&p.Sandbox, func(ctx context.Context) (string, error) { return b.Tool(ctx, "./test/sandbox/cmd/sandbox") }},
		{&p.GPUSim, func(ctx context.Context) (string, error) { return b.Tool(ctx, "./test/gpusim/cmd/gpusim") }},
	} {
		var err error
		if *part.into, err = part.build(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Options say what node it is.
type Options struct {
	Name   string
	Dir    string // of the node; short, since Unix sockets are in it
	GPUs   gpusim.Spec
	Labels map[string]string
	Parts  Parts
	Clock  clock.WithTicker // of the stand-in kubelet; real time if nil
	Log    *zap.Logger      // of the stand-in kubelet; silent if nil
}

// Node is a running simulated GPU node.
type Node struct {
	Name    string
	Dir     string
	GPUs    *gpusim.Node
	Users   pods.Users // of the GPUs; to start and end processes beside those of the pods
	Kubelet *kubelet.Kubelet
	Parts   Parts

	cluster  *cluster.Cluster
	client   kubernetes.Interface
	env      []string
	kubelet  kubelet.Options
	features *Features

	kernelLog   *kernelLog
	metricsPort int32 // of the agent, on this machine
}

// Start brings up the node and joins it to the cluster. Its device plugin and agent come as DaemonSets, as on any node.
func Start(ctx context.Context, c *cluster.Cluster, o Options) (*Node, error) {
	sim := filepath.Join(o.Dir, "gpus")
	if o.GPUs.Seed == 0 {
		o.GPUs.Seed = seedOf(o.Name)
	}
	gpus, err := gpusim.Create(sim, o.GPUs)
	if err != nil {
		return nil, fmt.Errorf("making the GPUs of node %s: %w", o.Name, err)
	}
	n := &Node{
		Name: o.Name, Dir: o.Dir, GPUs: gpus, Parts: o.Parts, cluster: c, env: []string{"GPUSIM_NODE=" + sim},
	}
	if err := gpus.RenderHost(n.host()); err != nil {
		return nil, fmt.Errorf("rendering the host of node %s: %w", o.Name, err)
	}
	if n.kernelLog, err = openKernelLog(o.Dir); err != nil {
		return nil, fmt.Errorf("making the host of node %s: %w", o.Name, err)
	}
	table, err := pods.MakeTable(n.ProcRoot(), gpus.BootID())
	if err != nil {
		return nil, fmt.Errorf("making the host of node %s: %w", o.Name, err)
	}
	if err := gpus.RenderDriver(n.DriverRoot(), o.Parts.LibNVML, o.Parts.GPUSim); err != nil {
		return nil, fmt.Errorf("installing the driver of node %s: %w", o.Name, err)
	}
	if err := os.MkdirAll(filepath.Join(n.DriverRoot(), "run"), 0o755); err != nil {
		return nil, fmt.Errorf("making the host of node %s: %w", o.Name, err)
	}
	if n.metricsPort, err = freePort(ctx); err != nil {
		return nil, fmt.Errorf("looking for a port for the metrics of node %s: %w", o.Name, err)
	}
	if n.client, err = kubernetes.NewForConfig(c.Config()); err != nil {
		return nil, fmt.Errorf("connecting to the cluster: %w", err)
	}
	credentials, err := c.ConfigFor("system:node:"+o.Name, "system:nodes")
	if err != nil {
		return nil, fmt.Errorf("making credentials of node %s: %w", o.Name, err)
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	n.Users = pods.Users{GPUs: gpus, Table: table, Log: o.Log.Named("gpus"), DeviceOf: n.deviceOf}
	n.kubelet = n.kubeletOptions(o, credentials)
	if o.Parts.DRADriver != "" {
		if n.kubelet.Images[DRADriverImage+" bash"], err = n.draDriver(); err != nil {
			return nil, err
		}
	}
	if err := n.startKubelet(ctx); err != nil {
		return nil, err
	}
	n.features = FollowFeatures(ctx, n.client, n.Name, n.FeatureDir(), o.Log.Named("features"))
	return n, nil
}

// seedOf gives the GPUs of each node UUIDs of their own.
func seedOf(name string) int64 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // a hash takes everything
	return int64(h.Sum32())
}

// agentPort is where the manifests have the agent serve its metrics.
const agentPort = 9400

// freePort finds a port below those that Linux gives to connections, so that an agent that starts again finds it free.
func freePort(ctx context.Context) (port int32, err error) {
	const first, last, tries = 20000, 32767, 100
	for range tries {
		port = first + rand.Int32N(last-first+1)
		var free net.Listener
		if free, err = (&net.ListenConfig{}).Listen(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			return port, free.Close()
		}
	}
	return 0, err
}

// Reboot ends everything that runs on the node and brings it up again. A test that has started another program next to it,
// such as an agent, ends that program before and starts it after.
func (n *Node) Reboot(ctx context.Context) error {
	n.Kubelet.Stop()
	err := n.GPUs.Reboot()
	if err == nil {
		err = n.Users.Table.Reboot(n.GPUs.BootID())
	}
	if err != nil {
		return fmt.Errorf("rebooting node %s: %w", n.Name, err)
	}
	return n.startKubelet(ctx)
}

func (n *Node) startKubelet(ctx context.Context) error {
	o := n.kubelet
	o.BootID = n.GPUs.BootID()
	var err error
	if n.Kubelet, err = kubelet.Start(ctx, o); err != nil {
		return fmt.Errorf("starting the kubelet of node %s: %w", n.Name, err)
	}
	return nil
}

func (n *Node) kubeletOptions(o Options, credentials *rest.Config) kubelet.Options {
	drivers := []sandbox.Mount{{Source: filepath.Join(n.host(), "proc", "driver"), Target: "/proc/driver"}}
	nvidia := func(program string) kubelet.Image {
		return kubelet.Image{
			Path: filepath.Join(o.Parts.DevicePlugin, program), Mounts: drivers,
			Env: append([]string{n.loaderPath(), "PATH=" + n.tools() + ":/usr/bin:/bin"}, n.env...),
		}
	}
	// Probes find the agent by the name of its lock, in the network of its pod. Here all nodes have the same network.
	host := []string{"--proc=" + n.ProcRoot(), "--pci-devices=" + n.PCIDevices(), "--kernel-log=" + n.KernelLog(), "--lock=/run/host/gpuslice/" + o.Name + ".lock"}
	agent := kubelet.Image{
		Path: o.Parts.Agent, Args: host, Env: n.env, Mounts: drivers,
		Exec: map[string]kubelet.Program{"/usr/bin/gpuslice-agent": {Path: o.Parts.Agent, Args: host}},
	}
	running := agent
	running.Args = append(slices.Clone(host), fmt.Sprintf("--metrics-address=127.0.0.1:%d", n.metricsPort))
	running.Ports = map[int32]int32{agentPort: n.metricsPort}
	return kubelet.Options{
		Node: o.Name, Dir: filepath.Join(o.Dir, "kubelet"), Config: credentials, Labels: o.Labels, Log: o.Log,
		SandboxBinary: o.Parts.Sandbox, Clock: o.Clock,
		StatusPeriod: 10 * time.Second, ReportAtOnce: true, ListDelay: time.Second,
		HostPaths: map[string]string{"/": n.DriverRoot(), "/dev": "/dev", "/sys": filepath.Join(n.host(), "sys")},
		Images: map[string]kubelet.Image{
			DevicePluginImage:   nvidia("nvidia-device-plugin"),
			discovery:           nvidia("gpu-feature-discovery"),
			configManager:       {Path: filepath.Join(o.Parts.DevicePlugin, "config-manager")},
			mpsDaemon:           nvidia("mps-control-daemon"),
			mountShm:            {Path: "/bin/true"}, // a folder of the node's own needs no tmpfs
			shell:               {Path: "/bin/sh"},
			DCGMImage:           {Path: o.Parts.GPUSim, Args: []string{"monitor"}, Env: n.env},
			AgentImage:          agent,
			AgentImage + " run": running,
		},
		OnAllocate: n.Users.Hold, OnFree: n.Users.Release,
		OnStart: n.started, OnEnd: n.Users.Close,
	}
}

// started shows a process of a container in the simulated process table, if it is one of NVIDIA's programs.
func (n *Node) started(pod *corev1.Pod, c *corev1.Container, pid int) {
	program, known := programs[c.Image]
	if len(c.Command) > 0 {
		if named, other := programs[c.Image+" "+c.Command[0]]; other {
			program, known = named, true
		}
	}
	if !known {
		return
	}
	command := c.Command
	if len(command) == 0 {
		command = []string{program.name}
	}
	var opens []string
	if program.monitors {
		opens = n.GPUs.UUIDs()
	}
	n.Users.Open(pods.Process{
		PID: pid, Command: program.name, Args: slices.Concat(command, c.Args), Cgroup: pods.OfPod(pod),
	}, opens...)
}

// Stop ends the node and its processes, and takes it out of the cluster.
func (n *Node) Stop(ctx context.Context) error {
	n.features.Stop()
	n.Kubelet.Stop()
	_ = n.kernelLog.pipe.Close() // no one could react to it
	if err := n.client.CoreV1().Nodes().Delete(ctx, n.Name, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("deleting node %s: %w", n.Name, err)
	}
	return nil
}

// DriverRoot is the directory under which the node's driver is installed.
func (n *Node) DriverRoot() string { return filepath.Join(n.Dir, "driver") }

// DevRoot is the directory with the node's device files in dev. Only those of capabilities exist.
func (n *Node) DevRoot() string { return n.host() }

// ProcRoot is the node's process table.
func (n *Node) ProcRoot() string { return filepath.Join(n.Dir, "proc") }

// PCIDevices is what sysfs shows of the node's PCI bus.
func (n *Node) PCIDevices() string { return filepath.Join(n.host(), "sys", "bus", "pci", "devices") }

// PluginConfig is the config file of the device plugin where that is run with one of the host's.
func (n *Node) PluginConfig() string {
	return filepath.Join(n.DriverRoot(), "var", "lib", "gpuslice", "device-plugin", "config.yaml")
}

// FeatureDir is where GPU feature discovery writes the labels that the node is to get.
func (n *Node) FeatureDir() string {
	return filepath.Join(n.DriverRoot(), "etc", "kubernetes", "node-feature-discovery", "features.d")
}

// SpecDir is where the node's CDI specs are, if a test puts any there.
func (n *Node) SpecDir() string { return filepath.Join(n.DriverRoot(), "var", "run", "cdi") }

func (n *Node) libraries() string { return filepath.Join(n.DriverRoot(), "usr", "lib64") }

func (n *Node) tools() string { return filepath.Join(n.DriverRoot(), "usr", "bin") }

func (n *Node) loaderPath() string { return "LD_LIBRARY_PATH=" + n.libraries() }

func (n *Node) host() string { return filepath.Join(n.Dir, "host") }

// Sandbox is where a program of NVIDIA's sees the node's GPUs, driver and buses as its own.
func (n *Node) Sandbox() sandbox.Options {
	return sandbox.Options{
		Mounts: []sandbox.Mount{
			{Source: filepath.Join(n.host(), "proc", "driver"), Target: "/proc/driver"},
			{Source: filepath.Join(n.host(), "proc", "modules"), Target: "/proc/modules"},
			{Source: filepath.Join(n.host(), "proc", "devices"), Target: "/proc/devices"},
			{Source: filepath.Join(n.host(), "sys", "bus", "pci"), Target: "/sys/bus/pci"},
			{Source: filepath.Join(n.host(), "sys", "devices"), Target: "/sys/devices"},
		},
		Env: append([]string{n.loaderPath()}, n.env...),
	}
}
