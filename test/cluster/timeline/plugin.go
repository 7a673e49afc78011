package timeline

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Plugin is a device plugin that advertises what the script says. It prefers the first free devices.
type Plugin struct {
	v1beta1.UnimplementedDevicePluginServer
	dir, endpoint, resource string

	server  *grpc.Server
	serving sync.WaitGroup

	mu      sync.Mutex
	devices []*v1beta1.Device
	changed chan struct{}
}

// ServePlugin listens in kubelet's directory, and registers.
func ServePlugin(ctx context.Context, dir, endpoint, resource string, ids ...string) (*Plugin, error) {
	p := &Plugin{dir: dir, endpoint: endpoint, resource: resource, changed: make(chan struct{})}
	p.devices = healthy(ids...)
	return p, p.serve(ctx)
}

func healthy(ids ...string) []*v1beta1.Device {
	var all []*v1beta1.Device
	for _, id := range ids {
		all = append(all, &v1beta1.Device{ID: id, Health: v1beta1.Healthy})
	}
	return all
}

// serve begins to listen, and registers. A kubelet that starts has removed the socket of before.
func (p *Plugin) serve(ctx context.Context) error {
	socket := filepath.Join(p.dir, p.endpoint)
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return fmt.Errorf("serving a device plugin: %w", err)
	}
	server := grpc.NewServer()
	p.server = server
	v1beta1.RegisterDevicePluginServer(server, p)
	p.serving.Go(func() { _ = server.Serve(listener) }) // its only end is Stop
	conn, err := grpc.NewClient("unix://"+filepath.Join(p.dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("registering a device plugin: %w", err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if _, err = v1beta1.NewRegistrationClient(conn).Register(ctx, &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: p.endpoint, ResourceName: p.resource,
	}); err != nil {
		return fmt.Errorf("registering a device plugin: %w", err)
	}
	return nil
}

// Stop ends the server, and with it the streams: to kubelet, the plugin has died.
func (p *Plugin) Stop() {
	p.server.Stop()
	p.serving.Wait()
}

// report changes the devices.
func (p *Plugin) report(devices []*v1beta1.Device) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.devices = devices
	close(p.changed)
	p.changed = make(chan struct{})
}

// GetDevicePluginOptions says that the plugin supports preferred allocation.
func (p *Plugin) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// ListAndWatch reports the devices, and again whenever they change.
func (p *Plugin) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	for {
		p.mu.Lock()
		devices, changed := p.devices, p.changed
		p.mu.Unlock()
		if err := stream.Send(&v1beta1.ListAndWatchResponse{Devices: devices}); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}

// GetPreferredAllocation takes what comes first.
func (p *Plugin) GetPreferredAllocation(_ context.Context, q *v1beta1.PreferredAllocationRequest) (*v1beta1.PreferredAllocationResponse, error) {
	answer := &v1beta1.PreferredAllocationResponse{}
	for _, c := range q.ContainerRequests {
		ids := slices.Sorted(slices.Values(c.AvailableDeviceIDs))
		answer.ContainerResponses = append(answer.ContainerResponses, &v1beta1.ContainerPreferredAllocationResponse{
			DeviceIDs: ids[:min(int(c.AllocationSize), len(ids))],
		})
	}
	return answer, nil
}

// Allocate allocates any device.
func (p *Plugin) Allocate(_ context.Context, q *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	answer := &v1beta1.AllocateResponse{}
	for range q.ContainerRequests {
		answer.ContainerResponses = append(answer.ContainerResponses, &v1beta1.ContainerAllocateResponse{})
	}
	return answer, nil
}
