package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/monitor/health"
	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/access"
	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/impersonate"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/pods"
)

// gpusOfNode are the GPUs of each node.
const gpusOfNode = "gpus: [{model: H100-80GB}]"

// node is one node of the fleet, with the agent on it.
type node struct {
	answers

	name   string
	bootID string
	dir    string
	gpus   *gpusim.Node
	table  *pods.Table
	users  pods.Users
}

func newNode(dir, name, bootID string) (*node, error) {
	spec, err := gpusim.ParseSpec([]byte(gpusOfNode))
	if err != nil {
		return nil, err
	}
	n := &node{name: name, bootID: bootID, dir: filepath.Join(dir, name), answers: answers{
		offered: map[string][]string{}, names: map[string]bool{}, given: holders.Assignments{},
	}}
	if err := os.MkdirAll(filepath.Join(n.dir, "gpus"), 0o700); err != nil {
		return nil, fmt.Errorf("making a directory for node %s: %w", name, err)
	}
	if n.gpus, err = gpusim.Create(filepath.Join(n.dir, "gpus"), spec); err != nil {
		return nil, fmt.Errorf("making the GPUs of node %s: %w", name, err)
	}
	if n.table, err = pods.MakeTable(filepath.Join(n.dir, "proc"), bootID); err != nil {
		return nil, fmt.Errorf("making the process table of node %s: %w", name, err)
	}
	n.users = pods.Users{GPUs: n.gpus, Table: n.table, Log: zap.NewNop()}
	return n, nil
}

// begin gives a pod its devices.
func (n *node) begin(pod *corev1.Pod) {
	if ids := n.give(pod); len(ids) > 0 {
		n.users.Hold(pod, ids)
	}
}

// end ends a pod.
func (n *node) end(pod *corev1.Pod) {
	if ids := n.take(pod); len(ids) > 0 {
		n.users.Release(pod, ids)
	}
}

// devices are what a device plugin that starts now finds.
func (n *node) devices(ctx context.Context) map[string][]string {
	out := map[string][]string{}
	gpus, err := n.gpus.Driver().Snapshot(ctx)
	if err != nil {
		return out
	}
	for _, gpu := range gpus {
		if !gpu.Enabled {
			out["nvidia.com/gpu"] = append(out["nvidia.com/gpu"], string(gpu.UUID))
		}
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				name := "nvidia.com/mig-" + strings.ReplaceAll(d.Profile, "+", ".")
				out[name] = append(out[name], d.UUID)
			}
		}
	}
	return out
}

// agent makes the node's agent as cmd/gpuslice-agent does, over what is simulated here.
func (n *node) agent(ctx context.Context, account *rest.Config, t *tally, log *zap.Logger) (*agent.Agent, error) {
	settings := config.Default().Beside(namespace)
	settings.MIGConfigMap.Name = configs
	settings.Drain.UnmanagedPods, settings.Drain.EmptyDir = config.DrainEvict, config.DrainEvict // the pods here are bare
	settings.Reboot.Sentinel = filepath.Join(n.dir, "reboot-required")
	log = log.With(zap.String("node", n.name))
	asNode := impersonate.New(impersonate.Options{Node: n.name, Access: settings.PodAccess, Timeout: settings.Timeouts.APICall, Log: log.Named("pods")})
	c := kube.Config(account, config.FieldManager, "bench")
	c.Wrap(t.wrap)
	c.Wrap(asNode.Wrap)
	client, err := kube.New(c)
	if err != nil {
		return nil, err
	}
	events := record.NewBroadcaster(record.WithCorrelatorOptions(record.CorrelatorOptions{BurstSize: 150, QPS: 1.0 / 30}), record.WithContext(ctx))
	events.StartRecordingToSink(kube.EventSink{Client: client})
	recorder := events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: config.FieldManager, Host: n.name})
	checker := access.New(access.Options{
		Client: client, Node: n.name, Namespace: namespace, Access: settings.PodAccess, Pods: asNode, Timeout: settings.Timeouts.APICall,
		Events: recorder, Log: log.Named("access"),
	})
	checker.Begin(ctx)
	go checker.Run(ctx)
	state := filepath.Join(n.dir, "state")
	return agent.New(agent.Options{
		Node: n.name, Client: client, Settings: settings, Log: log, Clock: clock.RealClock{},
		Metrics: metrics.New(clock.RealClock{}), Liveness: report.NewLiveness(report.Patience(settings), log),
		Driver: n.gpus.Driver(), Health: health.Sources{Driver: n.gpus.Health(), Store: health.In(state)},
		Pods: watch.Lister{Client: client, Node: n.name}, Kubelet: n, Host: machine{}, Units: machine{}, Specs: noSpecs{},
		Record: journal.RecordIn(state), Processes: holders.Processes{Root: filepath.Join(n.dir, "proc")},
		Parse:  migparted.Parse,
		Plugin: catalog.PluginFormat{Parse: deviceplugin.Parse, Render: deviceplugin.Render}, PluginFile: filepath.Join(n.dir, "plugin", "config.yaml"),
		Events: recorder, Sources: []report.Source{checker},
	}), nil
}

// machine is a host that never goes down, without systemd.
type machine struct{}

// Inhibit implements reboot.Host.
func (machine) Inhibit(context.Context, string) (func(), error) { return func() {}, nil }

// CanReboot implements reboot.Host.
func (machine) CanReboot(context.Context) error { return nil }

// Reboot implements reboot.Host.
func (machine) Reboot(context.Context) error { return nil }

// States implements units.Systemd.
func (machine) States(context.Context, []string) (map[string]string, error) {
	return nil, host.ErrNoSystemd
}

// Stop implements units.Systemd.
func (machine) Stop(context.Context, string) error { return host.ErrNoSystemd }

// Start implements units.Systemd.
func (machine) Start(context.Context, string) error { return host.ErrNoSystemd }

// noSpecs is a host without CDI.
type noSpecs struct{}

// Stale implements hardware.Specs.
func (noSpecs) Stale(context.Context, []nvml.GPU) ([]string, error) { return nil, nil }

// Write implements hardware.Specs.
func (noSpecs) Write(context.Context, []nvml.GPU) error { return nil }
