package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"
)

// endpointStopGracePeriod is how long kubelet counts the devices of a plugin that is gone, as unhealthy ones.
const endpointStopGracePeriod = 5 * time.Minute

// dialTimeout is how long kubelet waits for a plugin that registers to answer.
const dialTimeout = 10 * time.Second

// deviceTable is kubelet's device manager: the connected plugins, the devices they report, and which pod has which. It
// behaves like Kubernetes 1.37 with one exception. When a plugin registers on a socket that is still connected, it
// replaces the old connection; the real kubelet refuses it until it has seen the old stream end.
type deviceTable struct {
	dir    string
	bootID string
	clock  clock.PassiveClock
	log    *zap.Logger

	admission sync.Mutex // one pod gets devices at a time

	mu        sync.Mutex
	changed   chan struct{} // closed and replaced with each change
	resources map[string]*pluginResource
	forgotten sets.Set[string] // resources that left the table and are to be reported as 0
	pods      map[types.UID]*podDevices
	rebooted  bool   // the checkpoint is of another boot, or there was none
	saved     []byte // the checkpoint as it was written last

	server *grpc.Server
	life   context.Context // ends with the service, which starts and stops many times
	cancel context.CancelFunc
	work   sync.WaitGroup
}

// pluginResource is what is known of one extended resource that a plugin has registered.
type pluginResource struct {
	plugins []*plugin // connected ones, in the order they came; the last one allocates
	stopped time.Time // when the last of them went; zero while one is connected
	devices map[string]*v1beta1.Device
	healthy sets.Set[string]
}

// plugin is a connection to a device plugin.
type plugin struct {
	resource string
	socket   string
	options  *v1beta1.DevicePluginOptions
	client   v1beta1.DevicePluginClient
	conn     *grpc.ClientConn
	cancel   context.CancelFunc
}

func newDeviceTable(dir, bootID string, c clock.PassiveClock, log *zap.Logger) *deviceTable {
	return &deviceTable{
		dir: filepath.Join(dir, "device-plugins"), bootID: bootID, clock: c, log: log,
		changed: make(chan struct{}), forgotten: sets.New[string](),
		resources: map[string]*pluginResource{}, pods: map[types.UID]*podDevices{},
	}
}

// start reads the checkpoint, removes the sockets of the last run and listens for registrations. Plugins take the new
// kubelet.sock as the sign to register again.
func (t *deviceTable) start(ctx context.Context) error {
	if err := os.MkdirAll(t.dir, 0o755); err != nil {
		return fmt.Errorf("making the directory of device plugins: %w", err)
	}
	if err := t.restore(); err != nil {
		return err
	}
	if err := removeSockets(t.dir); err != nil {
		return err
	}
	listener, err := listenUnix(ctx, filepath.Join(t.dir, "kubelet.sock"))
	if err != nil {
		return err
	}
	t.life, t.cancel = context.WithCancel(context.WithoutCancel(ctx))
	t.server = grpc.NewServer(grpc.WaitForHandlers(true))
	v1beta1.RegisterRegistrationServer(t.server, registration{table: t})
	server := t.server
	t.work.Go(func() {
		if err := server.Serve(listener); err != nil {
			t.log.Error("registration service ended", zap.Error(err))
		}
	})
	t.announce()
	return nil
}

// stop closes the service and the connections. Known devices stay until the next start.
func (t *deviceTable) stop() error {
	if t.server == nil {
		return nil
	}
	t.cancel()
	t.server.Stop()
	t.work.Wait()
	t.server = nil
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.save()
}

// watch returns a channel that is closed at the next change.
func (t *deviceTable) watch() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.changed
}

func (t *deviceTable) announce() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.announceLocked()
}

func (t *deviceTable) announceLocked() {
	close(t.changed)
	t.changed = make(chan struct{})
}

// registration is the gRPC service that device plugins register with.
type registration struct {
	v1beta1.UnimplementedRegistrationServer
	table *deviceTable
}

// Register connects to the plugin, and then follows its devices until it goes away.
func (r registration) Register(ctx context.Context, q *v1beta1.RegisterRequest) (*v1beta1.Empty, error) { //nolint:contextcheck // the plugin stays when this call has returned
	t := r.table
	if q.Version != v1beta1.Version {
		return nil, fmt.Errorf("registering %s: version %q is not %s, the only one supported", q.ResourceName, q.Version, v1beta1.Version)
	}
	if !isExtendedResource(q.ResourceName) {
		return nil, fmt.Errorf("registering resource %q: the name is not of the form domain/name outside kubernetes.io", q.ResourceName)
	}
	p, err := t.connect(ctx, q.ResourceName, filepath.Join(t.dir, q.Endpoint))
	if err != nil {
		t.log.Error("plugin refused", zap.String("resource", q.ResourceName), zap.String("endpoint", q.Endpoint), zap.Error(err))
		return nil, fmt.Errorf("registering %s: %w", q.ResourceName, err)
	}
	stream, cancel := context.WithCancel(t.life)
	p.cancel = cancel
	t.connected(p)
	t.work.Go(func() {
		defer cancel()
		err := t.follow(stream, p)
		t.disconnected(p, err)
	})
	return &v1beta1.Empty{}, nil
}

func (t *deviceTable) connect(ctx context.Context, resourceName, socket string) (*plugin, error) {
	if err := checkSocketPath(socket); err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient("passthrough:///"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"), grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}))
	if err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", socket, err)
	}
	p := &plugin{resource: resourceName, socket: socket, conn: conn, client: v1beta1.NewDevicePluginClient(conn)}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	p.options, err = p.client.GetDevicePluginOptions(ctx, &v1beta1.Empty{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("asking %s for its options: %w", socket, err), conn.Close())
	}
	return p, nil
}

// follow takes over what the plugin reports until its stream ends.
func (t *deviceTable) follow(ctx context.Context, p *plugin) error {
	stream, err := p.client.ListAndWatch(ctx, &v1beta1.Empty{})
	if err != nil {
		return err
	}
	for {
		answer, err := stream.Recv()
		if err != nil {
			return err
		}
		t.reported(p, answer.Devices)
	}
}

func (t *deviceTable) connected(p *plugin) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.resources[p.resource]
	if r == nil {
		r = &pluginResource{devices: map[string]*v1beta1.Device{}, healthy: sets.New[string]()}
		t.resources[p.resource] = r
	}
	for _, old := range r.plugins {
		if old.socket == p.socket {
			old.cancel()
		}
	}
	r.plugins = append(slices.DeleteFunc(r.plugins, func(old *plugin) bool { return old.socket == p.socket }), p)
	r.stopped = time.Time{}
	t.log.Info("plugin registered", zap.String("resource", p.resource), zap.String("endpoint", filepath.Base(p.socket)))
}

func (t *deviceTable) reported(p *plugin, devices []*v1beta1.Device) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.resources[p.resource]
	if r == nil || !slices.Contains(r.plugins, p) {
		return // replaced in the meantime
	}
	r.devices, r.healthy = make(map[string]*v1beta1.Device, len(devices)), sets.New[string]()
	for _, d := range devices {
		r.devices[d.ID] = d
		if d.Health == v1beta1.Healthy {
			r.healthy.Insert(d.ID)
		}
	}
	t.log.Info("devices reported", zap.String("resource", p.resource), zap.Int("devices", len(devices)), zap.Int("healthy", r.healthy.Len()))
	if err := t.save(); err != nil {
		t.log.Error("devices are not on record", zap.Error(err))
	}
	t.announceLocked()
}

// disconnected counts all devices of the resource as unhealthy when its last plugin is gone.
func (t *deviceTable) disconnected(p *plugin, cause error) {
	closing := p.conn.Close()
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.resources[p.resource]
	if r == nil || !slices.Contains(r.plugins, p) {
		return // replaced by one on the same socket
	}
	r.plugins = slices.DeleteFunc(r.plugins, func(other *plugin) bool { return other == p })
	if len(r.plugins) == 0 {
		r.stopped = t.clock.Now()
		r.healthy = sets.New[string]()
	}
	t.log.Info("plugin gone", zap.String("resource", p.resource), zap.NamedError("cause", cause), zap.NamedError("closing", closing))
	t.announceLocked()
}

// amount counts the devices of one resource as the node's status does.
type amount struct{ capacity, allocatable int64 }

// amounts counts the devices of each resource, and names resources that left the table and stay in the node's status as
// 0. A resource leaves when its last plugin has been gone longer than the grace period.
func (t *deviceTable) amounts() (known map[string]amount, forgotten []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	known = map[string]amount{}
	for name, r := range t.resources {
		if len(r.plugins) == 0 && t.clock.Since(r.stopped) > endpointStopGracePeriod {
			delete(t.resources, name)
			t.forgotten.Insert(name)
			t.log.Info("resource forgotten", zap.String("resource", name))
			if err := t.save(); err != nil {
				t.log.Error("devices are not on record", zap.Error(err))
			}
			continue
		}
		known[name] = amount{capacity: int64(len(r.devices)), allocatable: int64(r.healthy.Len())}
		t.forgotten.Delete(name)
	}
	return known, sets.List(t.forgotten)
}

// reportedForgotten learns which zeros the node's status now holds. Kubelet writes them once and never again, so an
// administrator may remove the key.
func (t *deviceTable) reportedForgotten(names []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.forgotten.Delete(names...)
}

// isNew reports whether no container can have run under the last kubelet of this directory.
func (t *deviceTable) isNew() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.rebooted
}

func isExtendedResource(name string) bool {
	domain, _, found := strings.Cut(name, "/")
	return found && domain != "kubernetes.io" && !strings.HasSuffix(domain, ".kubernetes.io") && !strings.HasPrefix(domain, "requests.")
}

func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	if err := checkSocketPath(path); err != nil {
		return nil, err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", path, err)
	}
	return listener, nil
}

func removeSockets(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("looking for old sockets: %w", err)
	}
	for _, e := range entries {
		if e.Type()&fs.ModeSocket == 0 {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("removing an old socket: %w", err)
		}
	}
	return nil
}
