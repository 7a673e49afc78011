// Package kubelet is a stand-in for the kubelet of a simulated GPU node. It does what a real kubelet does for the API
// server and for device plugins. It has the Node and its Lease, and the device-plugin and PodResources gRPC services
// with the true behaviour after a plugin goes away. It admits, runs and stops pods.
//
// There are no containers. A container with a known image runs as a process of this machine in a sandbox; every other
// one is only reported as running. The package must not know what the devices are: it knows nothing of GPUs, MIG and
// the agent.
package kubelet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/test/sandbox"
)

// TerminationDelayAnnotation on a pod without processes says how long it takes to end after the request: a duration,
// bounded by the pod's grace period. Without it, Options.TerminationDelay holds.
const TerminationDelayAnnotation = "kubelet.gpuslice.io/termination-delay"

// volumeDelay is the time from the change of a ConfigMap to the change of its files.
const volumeDelay = time.Second

// nodeAddress is the InternalIP of the node, and of its pods with processes.
const nodeAddress = "127.0.0.1"

// maxSocketPath is the longest path of a Unix socket that Linux takes: sun_path without its terminating zero.
const maxSocketPath = 107

// Options say which node the kubelet stands for. Node, Dir and Config are required.
type Options struct {
	Node   string            // name of the Node object
	Dir    string            // what /var/lib/kubelet is on a real node; it outlives a kubelet. Short: sockets are in it
	Config *rest.Config      // the API server; credentials of system:node:<name> suffice
	Labels map[string]string // of the Node when it is made; an existing Node keeps its own, as with a real kubelet
	BootID string            // a change of it from one Start to the next is a reboot: no container survived

	// Images are the containers that run as processes, by the image that pods name. An image with several programs has an
	// entry for each beside its own: "image command[0]", or with more of the command and the arguments. The longest that fits counts.
	Images        map[string]Image
	HostPaths     map[string]string // directory of the machine by the path prefix that hostPath volumes name; others are below Dir/root
	SandboxBinary string            // cmd/sandbox, built; needed where Images are

	Clock            clock.WithTicker // real time if nil
	StatusPeriod     time.Duration    // between looks at the node's status; 10 s if 0
	ReportAtOnce     bool             // devices that come and go are reported now, not with the next period
	TerminationDelay time.Duration    // how long a pod without processes takes to end; 100 ms if 0
	ListDelay        time.Duration    // from a start of kubelet until PodResources lists its pods: about a second with a real one
	RestartDelay     time.Duration    // before the first restart of an ended container; doubles up to 30 times; 1 s if 0
	Log              *zap.Logger      // silent if nil

	// OnAllocate is informed of the devices of a pod that starts to run, OnFree when it has ended and no longer uses them.
	// A pod that survived a Start is announced again. The ids are the device plugin's: under sharing, "UUID::n". A pod with claims is
	// announced once more with their devices, as "driver/pool/device", and gives them up before the driver is to take them back.
	OnAllocate, OnFree func(pod *corev1.Pod, deviceIDs []string)
	// OnStart is informed of each process that begins to run for a container, OnEnd when it has ended.
	OnStart func(pod *corev1.Pod, container *corev1.Container, pid int)
	OnEnd   func(pid int)
}

// Image is what runs for a container image: a program of this machine.
type Image struct {
	Path   string          `json:"path"`             // stands for the image's entrypoint, and for command[0] of a container
	Args   []string        `json:"args,omitempty"`   // for this program alone, after those of the container
	Env    []string        `json:"env,omitempty"`    // "KEY=value", as an image sets it; the pod's own comes after
	Mounts []sandbox.Mount `json:"mounts,omitempty"` // what the image or its runtime brings, besides the pod's volumes
	Over   []sandbox.Mount `json:"over,omitempty"`   // the same, over the pod's volumes
	// Exec has the programs that exec probes of its containers run, by the path that the probes name, and kubectl exec by that or its last element.
	Exec map[string]Program `json:"exec,omitempty"`
	// Ports are those of this machine where its program serves, by those that a pod has: nodes of one machine share them.
	Ports map[int32]int32 `json:"ports,omitempty"`
}

// Program is one beside an image's own.
type Program struct {
	Path string   `json:"path"`           // of this machine
	Args []string `json:"args,omitempty"` // after those of the probe
}

// Kubelet runs one simulated node until it is stopped.
type Kubelet struct {
	Options
	client  kubernetes.Interface
	devices *deviceTable
	claims  *claimTable
	drivers *driverTable
	node    *nodeReporter
	pods    *podWatch
	server  *server

	stop    context.CancelFunc
	stopped chan struct{} // closed when all is over

	services sync.Mutex // held while the gRPC services start and stop
	podAPI   *podResources
}

// Start registers the node and runs its kubelet until Stop, or until ctx ends. It returns when the Node exists, the sockets
// are listening and the pods of the node are known.
func Start(ctx context.Context, o Options) (*Kubelet, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	config := rest.CopyConfig(o.Config)
	config.QPS, config.Burst = 50, 100 // a kubelet's own
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("connecting node %s to the API server: %w", o.Node, err)
	}
	run, stop := context.WithCancel(ctx)
	k := &Kubelet{Options: o, client: client, stop: stop, stopped: make(chan struct{})}
	k.devices = newDeviceTable(o.Dir, o.BootID, o.Clock, o.Log.Named("devices"))
	k.claims, k.drivers = newClaimTable(o.Dir), newDriverTable(k)
	k.node = newNodeReporter(k)
	k.pods = newPodWatch(k)
	if k.server, err = k.startServer(run); err != nil {
		return nil, errors.Join(err, k.abandon())
	}
	if err := errors.Join(k.claims.restore(), k.startServices(run)); err != nil {
		return nil, errors.Join(err, k.abandon())
	}
	if err := k.node.register(run); err != nil {
		return nil, errors.Join(err, k.abandon())
	}
	k.drivers.start(run)
	if err := k.pods.start(run); err != nil {
		return nil, errors.Join(err, k.abandon())
	}
	reporting := k.node.start(run)
	go func() {
		<-run.Done()
		k.pods.stop()
		<-reporting
		if err := errors.Join(k.server.stop(), k.stopServices()); err != nil {
			o.Log.Warn("services did not stop cleanly", zap.Error(err))
		}
		close(k.stopped)
	}()
	return k, nil
}

// Stop ends the processes of the node's pods and the kubelet itself. The Node, its pods and the record of their devices stay.
func (k *Kubelet) Stop() {
	k.stop()
	<-k.stopped
}

// Restart does the same as `systemctl restart kubelet`. The sockets are recreated, every device leaves the node's
// status until its plugin registers again, and running pods keep running on their devices.
func (k *Kubelet) Restart(ctx context.Context) error {
	if err := k.stopServices(); err != nil {
		return err
	}
	if err := k.startServices(ctx); err != nil {
		return err
	}
	if err := k.node.register(ctx); err != nil {
		return err
	}
	k.drivers.start(ctx)
	return nil
}

// PodResourcesSocket is the path of the PodResources v1 service.
func (k *Kubelet) PodResourcesSocket() string {
	return filepath.Join(k.Dir, "pod-resources", "kubelet.sock")
}

// DevicePluginDir is the directory of the device plugins' sockets and of the Registration service's, kubelet.sock.
func (k *Kubelet) DevicePluginDir() string { return k.devices.dir }

func (k *Kubelet) startServices(ctx context.Context) error {
	k.services.Lock()
	defer k.services.Unlock()
	if err := k.devices.start(ctx); err != nil {
		return err
	}
	api, err := servePodResources(ctx, k.PodResourcesSocket(), k.devices, k.pods, k.ListDelay)
	if err != nil {
		return errors.Join(err, k.devices.stop())
	}
	k.podAPI = api
	return nil
}

func (k *Kubelet) stopServices() error {
	k.services.Lock()
	defer k.services.Unlock()
	if k.podAPI != nil {
		k.podAPI.stop()
		k.podAPI = nil
	}
	return errors.Join(k.drivers.stop(), k.devices.stop())
}

// abandon releases what a failing Start has begun.
func (k *Kubelet) abandon() error {
	k.stop()
	k.pods.stop()
	return errors.Join(k.server.stop(), k.stopServices())
}

func (o *Options) complete() error {
	switch {
	case o.Node == "":
		return errors.New("starting a kubelet: Options.Node is empty: name the node")
	case o.Config == nil:
		return fmt.Errorf("starting the kubelet of %s: Options.Config is nil: say where the API server is", o.Node)
	case !filepath.IsAbs(o.Dir):
		return fmt.Errorf("starting the kubelet of %s: Options.Dir %q is not an absolute path", o.Node, o.Dir)
	case len(o.Images) > 0 && o.SandboxBinary == "":
		return fmt.Errorf("starting the kubelet of %s: Options.SandboxBinary is empty, yet Images are to be run", o.Node)
	}
	o.BootID = cmp.Or(o.BootID, "first-boot-of-"+o.Node)
	o.StatusPeriod = cmp.Or(o.StatusPeriod, 10*time.Second)
	o.TerminationDelay = cmp.Or(o.TerminationDelay, 100*time.Millisecond)
	o.RestartDelay = cmp.Or(o.RestartDelay, time.Second)
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	paths := map[string]string{"/var/lib/kubelet": o.Dir}
	for prefix, dir := range o.HostPaths {
		paths[filepath.Clean(prefix)] = dir
	}
	o.HostPaths = paths
	return os.MkdirAll(o.Dir, 0o755)
}

// checkSocketPath reports a path that is too long to listen on or to connect to.
func checkSocketPath(path string) error {
	if len(path) > maxSocketPath {
		return fmt.Errorf("socket path %s has %d bytes, and Linux takes %d: choose a shorter directory for the node", path, len(path), maxSocketPath)
	}
	return nil
}
