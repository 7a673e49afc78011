package kubelet_test

import (
	"context"
	"net"
	"path/filepath"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// plugin is a device plugin that reports what a test tells it to.
type plugin struct {
	v1beta1.UnimplementedDevicePluginServer
	dir, endpoint, resource string
	prefers                 []string // what it answers to GetPreferredAllocation; nil if it does not offer that
	server                  *grpc.Server
	serving                 sync.WaitGroup

	mu      sync.Mutex
	devices []*v1beta1.Device
	changed chan struct{}
	asked   [][]string // ids of each Allocate
}

// servePlugin listens in the kubelet's directory, and registers.
func servePlugin(t *testing.T, dir, endpoint, resource string, ids ...string) *plugin {
	t.Helper()
	p := &plugin{dir: dir, endpoint: endpoint, resource: resource, changed: make(chan struct{})}
	p.devices = healthy(ids...)
	p.serve(t)
	return p
}

func healthy(ids ...string) []*v1beta1.Device {
	var all []*v1beta1.Device
	for _, id := range ids {
		all = append(all, &v1beta1.Device{ID: id, Health: v1beta1.Healthy})
	}
	return all
}

func (p *plugin) serve(t *testing.T) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", filepath.Join(p.dir, p.endpoint))
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	p.server = server
	v1beta1.RegisterDevicePluginServer(server, p)
	p.serving.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(p.stop)
	if err := p.register(t); err != nil {
		t.Fatal(err)
	}
}

func (p *plugin) register(t *testing.T) error {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+filepath.Join(p.dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = v1beta1.NewRegistrationClient(conn).Register(t.Context(), &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: p.endpoint, ResourceName: p.resource,
	})
	return err
}

// stop ends the server, and with it the streams.
func (p *plugin) stop() {
	p.server.Stop()
	p.serving.Wait()
}

// report changes the devices.
func (p *plugin) report(devices []*v1beta1.Device) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.devices = devices
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *plugin) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: p.prefers != nil}, nil
}

func (p *plugin) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
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

func (p *plugin) GetPreferredAllocation(context.Context, *v1beta1.PreferredAllocationRequest) (*v1beta1.PreferredAllocationResponse, error) {
	return &v1beta1.PreferredAllocationResponse{ContainerResponses: []*v1beta1.ContainerPreferredAllocationResponse{{DeviceIDs: p.prefers}}}, nil
}

func (p *plugin) Allocate(_ context.Context, q *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	answer := &v1beta1.AllocateResponse{}
	for _, c := range q.ContainerRequests {
		p.asked = append(p.asked, c.DevicesIds)
		answer.ContainerResponses = append(answer.ContainerResponses, &v1beta1.ContainerAllocateResponse{
			Envs: map[string]string{"VISIBLE_DEVICES": c.DevicesIds[0]},
		})
	}
	return answer, nil
}
