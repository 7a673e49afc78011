package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/transport"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/monitor/health"
	"github.com/gpuslice/gpuslice/agent/monitor/health/kernellog"
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
	"github.com/gpuslice/gpuslice/nvml/cdi"
	"github.com/gpuslice/gpuslice/nvml/lib"
)

var errNoNode = errors.New("flag --node is empty: name the node this runs on, or set NODE_NAME by the downward API")

func (o *options) run() *cobra.Command {
	cmd := &cobra.Command{
		Use:         "run",
		Short:       "Watch the node's labels and keep its GPUs as they ask",
		Args:        cobra.NoArgs,
		Annotations: map[string]string{annotationGrace: gracePeriod.String()},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := boundMemory(o.memoryLimit); err != nil {
				return err
			}
			if o.pprofAddress == "" {
				runtime.MemProfileRate = 0 // without pprof the record of what has allocated what is not served, and takes memory
			}
			log, err := o.logger()
			if err != nil {
				return err
			}
			set := metrics.New(clock.RealClock{})
			set.CountRequests()
			a, err := o.agent(cmd.Context(), log, set)
			if err != nil {
				return err
			}
			o.settingsFile.keep(cmd.Context(), o.stateDir, log)
			log.Info("starting", zap.String("version", version))
			o.answerHealth(cmd.Context(), o.alive.State, log)
			if err := o.lock(cmd.Context(), log); err != nil {
				return err
			}
			set.Register(o.access)
			o.access.Begin(cmd.Context()) // so that the first status has it
			go o.access.Run(cmd.Context())
			o.serve(cmd.Context(), set.Handler(), log)
			o.serveProfiles(cmd.Context(), log)
			go o.settingsFile.watch(cmd.Context())
			if err := a.Run(cmd.Context()); !errors.Is(err, nvml.ErrReplaced) && !errors.Is(err, agent.ErrEdited) {
				return err
			}
			return replaceProcess()
		},
	}
	cmd.Flags().StringVar(&o.metricsAddress, "metrics-address", env("METRICS_ADDRESS", ""),
		"address to serve metrics for Prometheus at, as 127.0.0.1:9400; without it none are served (env GPUSLICE_METRICS_ADDRESS)")
	cmd.Flags().BoolVar(&o.metricsSecure, "metrics-secure", env("METRICS_SECURE", "") == "true",
		"serve metrics with TLS, to those whom the API server lets get the URL /metrics; needed beyond loopback (env GPUSLICE_METRICS_SECURE=true)")
	cmd.Flags().StringVar(&o.metricsCertDir, "metrics-cert-dir", env("METRICS_CERT_DIR", ""),
		"directory of tls.crt and tls.key for that, read again when they change; without it the agent signs its own (env GPUSLICE_METRICS_CERT_DIR)")
	cmd.Flags().StringVar(&o.pprofAddress, "pprof-address", env("PPROF_ADDRESS", ""),
		"loopback address to serve Go's profiles of the agent at, as 127.0.0.1:6060; without it none are served (env GPUSLICE_PPROF_ADDRESS)")
	cmd.Flags().StringVar(&o.memoryLimit, "memory-limit", env("MEMORY_LIMIT", ""),
		"bytes of memory that the container may take; Go's heap gets three quarters (env GPUSLICE_MEMORY_LIMIT)")
	return cmd
}

// agent wires the parts together.
func (o *options) agent(ctx context.Context, log *zap.Logger, set *metrics.Metrics) (*agent.Agent, error) {
	if o.node == "" {
		return nil, errNoNode
	}
	file, settings, err := readSettings(ctx, o.settings, o.stateDir, log)
	if err != nil {
		return nil, err
	}
	o.settingsFile, settings = file, o.complete(settings)
	pods := impersonate.New(impersonate.Options{Node: o.node, Access: settings.PodAccess, Timeout: settings.Timeouts.APICall, Log: log.Named("pods")})
	client, err := o.client(pods.Wrap)
	if err != nil {
		return nil, err
	}
	// A goroutine sends the Events as long as the process lives; those that it has not sent by then are lost.
	events := newEvents()
	events.StartRecordingToSink(kube.EventSink{Client: client})
	kinds, err := kube.Kinds()
	if err != nil {
		return nil, err
	}
	recorder := events.NewRecorder(kinds, corev1.EventSource{Component: config.FieldManager, Host: o.node})
	o.access = access.New(access.Options{
		Client: client, Node: o.node, Namespace: settings.Maintenance.Namespace, Deletes: settings.Drain.AfterDeadline == config.AfterDeadlineDelete,
		ConfigMap: settings.DevicePlugin.ConfigMap, Access: settings.PodAccess, Pods: pods, Timeout: settings.Timeouts.APICall, Heartbeat: settings.NodeHeartbeat,
		Events: recorder, Log: log.Named("access"),
		Version: func(ctx context.Context) (string, error) { return kube.ServerVersion(ctx, client) },
	})
	o.alive = report.NewLiveness(report.Patience(settings), log)
	driver := lib.Open(lib.Options{DriverRoot: o.driverRoot, Logger: log.Named("nvml")})
	return agent.New(agent.Options{
		Node: o.node, Client: client, Settings: settings, Log: log, Liveness: o.alive, Metrics: set, Clock: clock.RealClock{},
		Driver: driver, Usage: driver,
		Health: health.Sources{
			Driver: driver, Bus: lib.OpenBus(o.pciDevices), KernelLog: kernellog.New(o.kernelLog, clock.RealClock{}, log.Named("kernel")),
			Processes: holders.Processes{Root: o.procRoot, Lanes: &holders.Lanes{}}, Store: health.In(o.stateDir),
		},
		Pods:    watch.Lister{Client: client, Node: o.node},
		Kubelet: holders.DialKubelet(o.podResources), Host: &host.Logind{Address: o.systemBus}, Units: &host.Units{Address: o.systemBus},
		Record:    journal.RecordIn(o.stateDir),
		Processes: holders.Processes{Root: o.procRoot},
		Specs:     cdi.New(cdi.Options{Dirs: o.specs, DriverRoot: o.driverRoot, DevRoot: o.devRoot, Logger: log}),
		Parse:     migparted.Parse,
		Plugin:    catalog.PluginFormat{Parse: deviceplugin.Parse, Render: deviceplugin.Render}, PluginFile: o.pluginConfig,
		Edited: file.edited,
		Events: recorder, Sources: []report.Source{o.access},
	}), nil
}

// newEvents makes a broadcaster that sends as many Events of one object in a row as a change of a full node has, one for each evicted pod and some
// for the change; then one each half minute. With the default of 25, the Event about the end of a change would be lost.
func newEvents() record.EventBroadcaster {
	return record.NewBroadcaster(record.WithCorrelatorOptions(record.CorrelatorOptions{BurstSize: 150, QPS: 1.0 / 30}))
}

func (o *options) load() (config.Settings, error) {
	settings := config.Default()
	if o.settings != "" {
		var err error
		if settings, err = config.Load(o.settings); err != nil {
			return config.Settings{}, err
		}
	}
	return o.complete(settings), nil
}

// complete adds to the settings what the flags say.
func (o *options) complete(settings config.Settings) config.Settings {
	if len(o.adopt) > 0 {
		settings.Recover.Adopt = o.adopt
	}
	return settings.Beside(o.namespace)
}

// client sends its requests through the wrappers.
func (o *options) client(through ...transport.WrapperFunc) (kube.Interface, error) {
	c, err := o.config()
	if err != nil {
		return nil, err
	}
	for _, wrap := range through {
		c.Wrap(wrap)
	}
	return kube.New(c)
}

// config is how this program reaches the API server.
func (o *options) config() (*rest.Config, error) {
	load := rest.InClusterConfig
	if o.kubeconfig != "" {
		load = func() (*rest.Config, error) { return clientcmd.BuildConfigFromFlags("", o.kubeconfig) }
	}
	c, err := load()
	if err != nil {
		return nil, fmt.Errorf("finding the API server: %w", err)
	}
	return kube.Config(c, config.FieldManager, version), nil
}
