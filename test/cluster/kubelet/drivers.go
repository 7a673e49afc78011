package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/stats"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const (
	// registrationPeriod is between looks at the directory into which DRA drivers put their sockets; a real kubelet's between its reconciliations.
	registrationPeriod = time.Second
	// registrationCall bounds each question to a driver that registers.
	registrationCall = 5 * time.Second
	// claimCall bounds one question about claims to a DRA driver, as a real kubelet does.
	claimCall = 45 * time.Second
	// wipingDelay is how long the ResourceSlices of a DRA driver stay after it is gone.
	wipingDelay = 30 * time.Second
	// allDrivers stands for the drivers of the node: at its start, kubelet knows none of them.
	allDrivers = ""
)

// wipingTries are how a real kubelet repeats a deletion of ResourceSlices that fails.
var wipingTries = wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.2, Cap: 5 * time.Minute, Steps: 100}

// driverTable is kubelet's manager of DRA drivers: those that have registered, and since when none of a name is connected. It follows DRAPluginManager of
// Kubernetes 1.37.1 (pkg/kubelet/cm/dra/plugin), where a connection cancels a deletion that is due, and neither a registration nor a connection cancels
// one that has begun.
type driverTable struct {
	k   *Kubelet
	dir string
	log *zap.Logger

	mu      sync.Mutex
	sockets map[string]*draDriver // by the path of its registration socket
	absent  map[string]*absence   // by the driver's name
	left    []*grpc.ClientConn    // of drivers that are forgotten, to be closed

	cancel context.CancelFunc // ends the looks and the deletions
	work   sync.WaitGroup
}

// draDriver is the driver behind a registration socket; one without a connection to it was refused.
type draDriver struct {
	table *driverTable
	path  string
	name  string
	file  fs.FileInfo // of the socket: a driver that starts again makes another
	conn  *grpc.ClientConn

	connected bool // guarded by table.mu
}

// TagRPC implements stats.Handler.
func (d *draDriver) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC implements stats.Handler.
func (d *draDriver) HandleRPC(context.Context, stats.RPCStats) {}

// TagConn implements stats.Handler.
func (d *draDriver) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn notes that the connection stands, or that it has ended.
func (d *draDriver) HandleConn(_ context.Context, event stats.ConnStats) {
	_, begins := event.(*stats.ConnBegin)
	if _, ends := event.(*stats.ConnEnd); ends {
		go d.conn.Connect() // gRPC does not reconnect by itself, and must not be asked in here
	} else if !begins {
		return
	}
	t := d.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.sockets[d.path] == d {
		d.connected = begins
		t.note(d.name)
	}
}

// absence is the time without a connection to any driver of a name.
type absence struct {
	since  time.Time
	wiping bool // the deletion of its ResourceSlices has begun
}

func newDriverTable(k *Kubelet) *driverTable {
	return &driverTable{k: k, dir: filepath.Join(k.Dir, "plugins_registry"), log: k.Log.Named("drivers")}
}

// start begins to follow the drivers. It keeps no slice of the node: each driver has to register and publish again.
func (t *driverTable) start(ctx context.Context) {
	ctx, t.cancel = context.WithCancel(context.WithoutCancel(ctx))
	t.mu.Lock()
	t.sockets, t.absent = map[string]*draDriver{}, map[string]*absence{allDrivers: {}}
	t.mu.Unlock()
	t.wipe(ctx)
	ticker := t.k.Clock.NewTicker(registrationPeriod)
	t.work.Go(func() {
		defer ticker.Stop()
		for {
			t.scan(ctx)
			t.wipe(ctx)
			select {
			case <-ctx.Done():
				return
			case <-ticker.C():
			}
		}
	})
}

func (t *driverTable) stop() error {
	if t.cancel == nil {
		return nil
	}
	t.cancel()
	t.work.Wait()
	t.mu.Lock()
	for path := range t.sockets {
		t.forget(path)
	}
	return t.unlock()
}

// unlock unlocks t.mu, and closes the connections of drivers that are forgotten: their end is noted under t.mu, too.
func (t *driverTable) unlock() error {
	left := t.left
	t.left = nil
	t.mu.Unlock()
	var failed []error
	for _, conn := range left {
		failed = append(failed, conn.Close())
	}
	return errors.Join(failed...)
}

// scan registers new drivers, and forgets drivers with a lost or replaced socket.
func (t *driverTable) scan(ctx context.Context) {
	t.mu.Lock()
	defer func() {
		if err := t.unlock(); err != nil {
			t.log.Warn("connections to DRA drivers did not close cleanly", zap.Error(err))
		}
	}()
	paths, err := filepath.Glob(filepath.Join(t.dir, "*.sock"))
	if err != nil || ctx.Err() != nil {
		return
	}
	for path, d := range t.sockets {
		file, err := os.Lstat(path)
		if err == nil && os.SameFile(file, d.file) && file.ModTime().Equal(d.file.ModTime()) {
			continue
		}
		t.forget(path)
		t.log.Info("DRA driver deregistered", zap.String("driver", d.name))
	}
	for _, path := range paths {
		if t.sockets[path] != nil {
			continue
		}
		if err := t.register(ctx, path); err != nil { // it may have left its socket behind
			t.log.Debug("DRA driver not registered", zap.String("socket", path), zap.Error(err))
		}
	}
}

// register asks the driver who it is, connects to it, and confirms. The caller holds t.mu.
func (t *driverTable) register(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, registrationCall)
	defer cancel()
	file, err := os.Lstat(path)
	if err != nil {
		return err
	}
	return connected(path, func(conn *grpc.ClientConn) error {
		client := pluginregistration.NewRegistrationClient(conn)
		info, err := client.GetInfo(ctx, &pluginregistration.InfoRequest{})
		if err != nil {
			return err
		}
		d := &draDriver{table: t, path: path, name: info.GetName(), file: file}
		t.sockets[path] = d
		refusal := refused(path, info)
		if refusal == "" {
			d.conn, err = grpc.NewClient("unix:"+t.k.socketOf(info.GetEndpoint()), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithStatsHandler(d))
			if err != nil {
				delete(t.sockets, path)
				return err
			}
			d.conn.Connect()
			t.note(d.name)
		}
		t.log.Info("DRA driver registers", zap.String("driver", d.name), zap.String("refusal", refusal))
		_, err = client.NotifyRegistrationStatus(ctx, &pluginregistration.RegistrationStatus{PluginRegistered: refusal == "", Error: refusal})
		if err != nil && refusal == "" {
			t.forget(path)
		}
		return err
	})
}

// socketOf is where a socket of a plugin is on this machine. A plugin in a pod has kubelet's directory at its place on a node.
func (k *Kubelet) socketOf(endpoint string) string {
	if below, inPod := strings.CutPrefix(endpoint, "/var/lib/kubelet/"); inPod {
		return filepath.Join(k.Dir, below)
	}
	return endpoint
}

// refused says in kubelet's words why a plugin is not taken; "" if it is.
func refused(path string, info *pluginregistration.PluginInfo) string {
	switch {
	case info.GetType() != pluginregistration.DRAPlugin:
		return fmt.Sprintf("RegisterPlugin error -- no handler registered for plugin type: %s at socket %s", info.GetType(), path)
	case !slices.Contains(info.GetSupportedVersions(), dra.DRAPluginService):
		return fmt.Sprintf("RegisterPlugin error -- plugin validation failed with err: none of services supported by the plugin (%q) are supported by the kubelet (%q)",
			info.GetSupportedVersions(), dra.DRAPluginService)
	default:
		return ""
	}
}

// forget gives up the connection. The caller holds t.mu.
func (t *driverTable) forget(path string) {
	d := t.sockets[path]
	delete(t.sockets, path)
	if d.conn != nil {
		t.left = append(t.left, d.conn)
		t.note(d.name)
	}
}

// note keeps the time since which no driver of the name is connected. It is called with each event that may change that. The caller holds t.mu.
func (t *driverTable) note(name string) {
	for _, d := range t.sockets {
		if d.name == name && d.connected {
			delete(t.absent, name)
			return
		}
	}
	if t.absent[name] == nil {
		t.absent[name] = &absence{since: t.k.Clock.Now()}
	}
}

// wipe begins to delete the node's ResourceSlices of drivers that have been gone for too long.
func (t *driverTable) wipe(ctx context.Context) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, a := range t.absent {
		if a.wiping || name != allDrivers && t.k.Clock.Since(a.since) < wipingDelay {
			continue
		}
		a.wiping = true
		t.work.Go(func() {
			t.wipeSlices(ctx, name)
			t.mu.Lock()
			defer t.mu.Unlock()
			if t.absent[name] == a {
				delete(t.absent, name) // what is published from now on stays until something changes
			}
		})
	}
}

// wipeSlices deletes the node's ResourceSlices of a driver, or of all. It goes on until the API server has deleted them, whichever driver has registered since.
func (t *driverTable) wipeSlices(ctx context.Context, driver string) {
	selector := fields.Set{resourcev1.ResourceSliceSelectorNodeName: t.k.Node}
	if driver != allDrivers {
		selector[resourcev1.ResourceSliceSelectorDriver] = driver
	}
	log := t.log.With(zap.String("driver", driver))
	err := wait.ExponentialBackoffWithContext(ctx, wipingTries, func(ctx context.Context) (bool, error) {
		err := t.k.client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: selector.String()})
		if err != nil && !apierrors.IsNotFound(err) { // an API server before 1.34 has none
			log.Warn("ResourceSlices not deleted", zap.Error(err))
			return false, nil
		}
		return true, nil
	})
	log.Info("ResourceSlices deleted", zap.Error(err))
}

// registered is the connection to a driver, one that answers before one that does not.
func (t *driverTable) registered(ctx context.Context, name string) (*grpc.ClientConn, error) {
	t.scan(ctx) // it may just have come
	t.mu.Lock()
	defer t.mu.Unlock()
	var found *grpc.ClientConn
	for _, d := range t.sockets {
		if d.name == name && d.conn != nil && (found == nil || d.connected) {
			found = d.conn
		}
	}
	if found == nil {
		return nil, fmt.Errorf("DRA driver %s is not registered", name)
	}
	return found, nil
}

// ask calls the driver of the name.
func (t *driverTable) ask(ctx context.Context, name string, do func(context.Context, dra.DRAPluginClient) error) error {
	conn, err := t.registered(ctx, name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, claimCall)
	defer cancel()
	return do(ctx, dra.NewDRAPluginClient(conn))
}

func connected(socket string, ask func(*grpc.ClientConn) error) error {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	return errors.Join(ask(conn), conn.Close())
}
