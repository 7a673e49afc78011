// Package claimdriver is a DRA driver's part on the node, as kubelet sees it: a plugin that registers, and prepares and
// unprepares any claim. It gives each claim the same device, and publishes none.
package claimdriver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// Driver serves until it is stopped.
type Driver struct {
	dra.UnimplementedDRAPluginServer
	registration.UnimplementedRegistrationServer
	name, endpoint string
	server         *grpc.Server
	serving        sync.WaitGroup

	mu         sync.Mutex
	registered bool            // kubelet has confirmed it
	refusal    string          // why it prepares nothing; "" if it does
	prepared   map[string]bool // claims by namespace/name
}

// Pool and Device are what each claim is given.
const (
	Pool   = "pool"
	Device = "gpu-0"
)

// Start runs the driver of that name for the kubelet in that directory, /var/lib/kubelet on a real node.
func Start(ctx context.Context, kubeletDir, name string) (*Driver, error) {
	d := &Driver{
		name: name, endpoint: filepath.Join(kubeletDir, "plugins", name, "dra.sock"), server: grpc.NewServer(), prepared: map[string]bool{},
	}
	dra.RegisterDRAPluginServer(d.server, d)
	registration.RegisterRegistrationServer(d.server, d)
	for _, socket := range []string{d.endpoint, filepath.Join(kubeletDir, "plugins_registry", name+"-reg.sock")} {
		if err := d.listen(ctx, socket); err != nil {
			d.Stop()
			return nil, fmt.Errorf("starting the DRA driver %s: %w", name, err)
		}
	}
	return d, nil
}

func (d *Driver) listen(ctx context.Context, socket string) error {
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return err
	}
	d.serving.Go(func() { _ = d.server.Serve(listener) }) // its only end is Stop, which removes the socket
	return nil
}

// Stop ends the driver as the end of its pod does.
func (d *Driver) Stop() {
	d.server.Stop()
	d.serving.Wait()
}

// Prepared reports whether the claim is in use, as the driver sees it.
func (d *Driver) Prepared(namespace, name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.prepared[namespace+"/"+name]
}

// Prepare makes the driver remember a claim that it prepared before it ended.
func (d *Driver) Prepare(namespace, name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.prepared[namespace+"/"+name] = true
}

// Refuse makes the driver refuse every claim for that reason; "" makes it prepare claims again.
func (d *Driver) Refuse(why string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refusal = why
}

// Registered reports whether kubelet has confirmed the registration.
func (d *Driver) Registered() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.registered
}

// GetInfo implements the plugin's registration.
func (d *Driver) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: registration.DRAPlugin, Name: d.name, Endpoint: d.endpoint, SupportedVersions: []string{dra.DRAPluginService},
	}, nil
}

// NotifyRegistrationStatus implements the plugin's registration.
func (d *Driver) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if !s.GetPluginRegistered() {
		return nil, errors.New(s.GetError())
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.registered = true
	return &registration.RegistrationStatusResponse{}, nil
}

// NodePrepareResources notes the claims.
func (d *Driver) NodePrepareResources(_ context.Context, q *dra.NodePrepareResourcesRequest) (*dra.NodePrepareResourcesResponse, error) {
	answer := &dra.NodePrepareResourcesResponse{Claims: map[string]*dra.NodePrepareResourceResponse{}}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range q.GetClaims() {
		if d.refusal != "" {
			answer.Claims[c.GetUid()] = &dra.NodePrepareResourceResponse{Error: d.refusal}
			continue
		}
		d.prepared[c.GetNamespace()+"/"+c.GetName()] = true
		answer.Claims[c.GetUid()] = &dra.NodePrepareResourceResponse{Devices: []*dra.Device{{PoolName: Pool, DeviceName: Device}}}
	}
	return answer, nil
}

// NodeUnprepareResources forgets the claims. Unknown claims are no error.
func (d *Driver) NodeUnprepareResources(_ context.Context, q *dra.NodeUnprepareResourcesRequest) (*dra.NodeUnprepareResourcesResponse, error) {
	answer := &dra.NodeUnprepareResourcesResponse{Claims: map[string]*dra.NodeUnprepareResourceResponse{}}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range q.GetClaims() {
		delete(d.prepared, c.GetNamespace()+"/"+c.GetName())
		answer.Claims[c.GetUid()] = &dra.NodeUnprepareResourceResponse{}
	}
	return answer, nil
}
