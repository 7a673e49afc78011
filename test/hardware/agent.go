package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/monitor/health"
	"github.com/gpuslice/gpuslice/agent/monitor/health/kernellog"
	"github.com/gpuslice/gpuslice/agent/observe/watch"
	agentreport "github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/nvml/cdi"
	"github.com/gpuslice/gpuslice/nvml/lib"
)

// agentRun is an agent that runs in this program: so its driver is the guard, and whatever it decides, no GPU is changed.
type agentRun struct {
	cancel  context.CancelFunc
	ended   chan error
	metrics http.Handler
}

// settings are the defaults with two differences: a full GPU is reported at once, and the pod of this program is bare.
const settings = `apiVersion: gpuslice.io/v1alpha1
kind: Settings
memoryPressure: {for: 0s}
drain: {unmanagedPods: evict, emptyDir: evict}
`

// startAgent starts the agent as cmd/gpuslice-agent does, with the account that deploy/base gives it. All paths of the host that it would
// write to are in the directory of the run: its record, the plugin's config, CDI specs, the system bus.
func (p *plane) startAgent(ctx context.Context) error {
	file := filepath.Join(p.dir, "settings.yaml")
	if err := os.WriteFile(file, []byte(settings), 0o600); err != nil {
		return err
	}
	s, err := config.Load(file)
	if err != nil {
		return err
	}
	s = s.Beside(own)
	account, err := p.cluster.NodeConfig(ctx, own, "gpuslice-agent", nodeName)
	if err != nil {
		return err
	}
	client, err := kube.New(account)
	if err != nil {
		return err
	}
	const burst, later = 150, 1.0 / 30 // as cmd/gpuslice-agent has them
	events := record.NewBroadcaster(record.WithCorrelatorOptions(record.CorrelatorOptions{BurstSize: burst, QPS: later}))
	events.StartRecordingToSink(kube.EventSink{Client: client})
	state := filepath.Join(p.dir, "state")
	none := "unix:path=" + filepath.Join(p.dir, "no-bus")
	set := metrics.New(clock.RealClock{})
	set.CountRequests()
	a := agent.New(agent.Options{
		Node: nodeName, Client: client, Settings: s, Log: p.log, Metrics: set, Liveness: agentreport.NewLiveness(agentreport.Patience(s), p.log), Clock: clock.RealClock{},
		Driver: p.driver, Usage: p.driver,
		Health: health.Sources{
			Driver: p.driver, Bus: lib.OpenBus(p.pciDevices), KernelLog: kernellog.New(p.kernelLog, clock.RealClock{}, p.log.Named("kernel")),
			Processes: holders.Processes{Root: p.table.Dir(), Lanes: &holders.Lanes{}}, Store: health.In(state),
		},
		Pods:    watch.Lister{Client: client, Node: nodeName},
		Kubelet: holders.DialKubelet(p.kubelet.PodResourcesSocket()), Host: &host.Logind{Address: none}, Units: &host.Units{Address: none},
		Record:    journal.RecordIn(state),
		Processes: holders.Processes{Root: p.table.Dir()},
		Specs:     cdi.New(cdi.Options{Dirs: []string{filepath.Join(p.dir, "cdi")}, DriverRoot: p.driverRoot, DevRoot: "/", Logger: p.log}),
		Parse:     migparted.Parse,
		Plugin:    catalog.PluginFormat{Parse: deviceplugin.Parse, Render: deviceplugin.Render}, PluginFile: p.pluginConfig(),
		Events: events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: config.FieldManager, Host: nodeName}),
	})
	ctx, cancel := context.WithCancel(ctx)
	p.agent = &agentRun{cancel: cancel, ended: make(chan error, 1), metrics: set.Handler()}
	go func() {
		defer events.Shutdown()
		p.agent.ended <- a.Run(ctx)
	}()
	return nil
}

var errStuck = errors.New("the agent does not end")

// stop ends the agent.
func (r *agentRun) stop() error {
	r.cancel()
	select {
	case err := <-r.ended:
		return err
	case <-time.After(callTime):
		return errStuck
	}
}

// scrape gives the metrics, as Prometheus gets them.
func (r *agentRun) scrape(ctx context.Context) (string, error) {
	answer := httptest.NewRecorder()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "/metrics", nil)
	if err != nil {
		return "", err
	}
	r.metrics.ServeHTTP(answer, request)
	if answer.Code != http.StatusOK {
		return "", fmt.Errorf("reading the agent's metrics: %d %s", answer.Code, answer.Body)
	}
	return answer.Body.String(), nil
}
