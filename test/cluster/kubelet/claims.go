package kubelet

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// claimCall bounds one question to a DRA driver, which makes no device ready here.
const claimCall = 5 * time.Second

// claim has the drivers of the pod's resource claims prepare them before its containers start. It returns when they are ready,
// and reports false if the pod is to end first, or the kubelet stops. What a pod that survived has is prepared already.
func (w *worker) claim(ctx context.Context) bool {
	if len(w.latest().Spec.ResourceClaims) == 0 {
		return true
	}
	for ctx.Err() == nil {
		err := w.findClaims(ctx)
		if err == nil && !w.survived {
			err = w.eachDriver(ctx, prepare)
		}
		if err == nil || w.isDeleting() {
			return err == nil
		}
		w.log.Warn("resource claims not prepared", zap.Error(err))
		w.report(ctx)
		w.sleep(ctx, retryDelay)
	}
	return false
}

// unclaim has the drivers take back what they prepared. Until all have, the pod counts as running for everybody else: its
// phase stays, its devices are not free, and its object is not deleted. It reports false if the kubelet stops first.
func (w *worker) unclaim(ctx context.Context) bool {
	for {
		err := w.eachDriver(ctx, unprepare)
		if err == nil {
			w.mu.Lock()
			w.claims = nil
			w.mu.Unlock()
			return true
		}
		w.log.Warn("resource claims not unprepared", zap.Error(err))
		w.report(ctx)
		if !w.sleep(ctx, retryDelay) {
			return false
		}
	}
}

// findClaims reads the pod's claims as they are allocated. They are on record from then on, prepared or not.
func (w *worker) findClaims(ctx context.Context) error {
	pod := w.latest()
	var all []*resourcev1.ResourceClaim
	for _, c := range pod.Spec.ResourceClaims {
		name, needed := claimName(pod, c.Name)
		if !needed {
			continue
		}
		claim, err := w.k.client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err) && w.isDeleting():
			continue
		case err != nil:
			return fmt.Errorf("fetch ResourceClaim %s: %w", name, err)
		case !slices.ContainsFunc(claim.Status.ReservedFor, func(r resourcev1.ResourceClaimConsumerReference) bool { return r.UID == pod.UID }):
			return fmt.Errorf("ResourceClaim %s is not reserved for the pod", name)
		}
		all = append(all, claim)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.claims = all
	return nil
}

// claimName is the name of the claim that the pod knows by another; false if there is none to be had.
func claimName(pod *corev1.Pod, of string) (name string, needed bool) {
	for _, c := range pod.Spec.ResourceClaims {
		if c.Name == of && c.ResourceClaimName != nil {
			return *c.ResourceClaimName, true
		}
	}
	for _, s := range pod.Status.ResourceClaimStatuses { // it was made from a template
		if s.Name == of && s.ResourceClaimName != nil {
			return *s.ResourceClaimName, true
		}
	}
	return "", false
}

// eachDriver does something with each claim of the pod and each driver that has given it a device.
func (w *worker) eachDriver(ctx context.Context, do func(context.Context, dra.DRAPluginClient, *dra.Claim) error) error {
	w.mu.Lock()
	claims := w.claims
	w.mu.Unlock()
	var failed []error
	for _, c := range claims {
		asked := map[string]bool{}
		for _, given := range devicesOf(c) {
			if asked[given.Driver] {
				continue
			}
			asked[given.Driver] = true
			failed = append(failed, w.k.askDriver(ctx, given.Driver, func(ctx context.Context, driver dra.DRAPluginClient) error {
				return do(ctx, driver, &dra.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)})
			}))
		}
	}
	return errors.Join(failed...)
}

func devicesOf(c *resourcev1.ResourceClaim) []resourcev1.DeviceRequestAllocationResult {
	if c.Status.Allocation == nil {
		return nil
	}
	return c.Status.Allocation.Devices.Results
}

func prepare(ctx context.Context, driver dra.DRAPluginClient, claim *dra.Claim) error {
	answer, err := driver.NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{Claims: []*dra.Claim{claim}})
	if err != nil {
		return fmt.Errorf("NodePrepareResources: %w", err)
	}
	if said := answer.GetClaims()[claim.Uid].GetError(); said != "" {
		return fmt.Errorf("NodePrepareResources failed for ResourceClaim %s: %s", claim.Name, said)
	}
	return nil
}

func unprepare(ctx context.Context, driver dra.DRAPluginClient, claim *dra.Claim) error {
	answer, err := driver.NodeUnprepareResources(ctx, &dra.NodeUnprepareResourcesRequest{Claims: []*dra.Claim{claim}})
	if err != nil {
		return fmt.Errorf("NodeUnprepareResources: %w", err)
	}
	if said := answer.GetClaims()[claim.Uid].GetError(); said != "" {
		return fmt.Errorf("NodeUnprepareResources failed for ResourceClaim %s: %s", claim.Name, said)
	}
	return nil
}

// askDriver finds the DRA driver of the name among the plugins that have put a socket into the directory that kubelet watches.
// A real kubelet keeps the connection, and forgets the driver when its socket goes.
func (k *Kubelet) askDriver(ctx context.Context, name string, ask func(context.Context, dra.DRAPluginClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, claimCall)
	defer cancel()
	sockets, err := filepath.Glob(filepath.Join(k.Dir, "plugins_registry", "*.sock"))
	if err != nil {
		return err
	}
	for _, socket := range sockets {
		var info *pluginregistration.PluginInfo
		err := connected(socket, func(conn *grpc.ClientConn) (err error) {
			info, err = pluginregistration.NewRegistrationClient(conn).GetInfo(ctx, &pluginregistration.InfoRequest{})
			return err
		})
		if err != nil || info.GetType() != pluginregistration.DRAPlugin || info.GetName() != name {
			continue // it may have left its socket behind
		}
		return connected(info.GetEndpoint(), func(conn *grpc.ClientConn) error { return ask(ctx, dra.NewDRAPluginClient(conn)) })
	}
	return fmt.Errorf("DRA driver %s is not registered", name)
}

func connected(socket string, ask func(*grpc.ClientConn) error) error {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	return errors.Join(ask(conn), conn.Close())
}

// claimsOf are those that the pod holds, prepared or about to be.
func (p *podWatch) claimsOf(uid types.UID) []*resourcev1.ResourceClaim {
	p.mu.Lock()
	w := p.workers[uid]
	p.mu.Unlock()
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.claims
}

// dynamic tells what a container has by claims.
func dynamic(pod *corev1.Pod, c *corev1.Container, claims []*resourcev1.ResourceClaim) []*podresourcesv1.DynamicResource {
	var all []*podresourcesv1.DynamicResource
	for _, use := range c.Resources.Claims {
		name, _ := claimName(pod, use.Name)
		i := slices.IndexFunc(claims, func(claim *resourcev1.ResourceClaim) bool { return claim.Name == name })
		if i < 0 {
			continue
		}
		of := &podresourcesv1.DynamicResource{ClaimName: name, ClaimNamespace: pod.Namespace}
		for _, d := range devicesOf(claims[i]) {
			of.ClaimResources = append(of.ClaimResources, &podresourcesv1.ClaimResource{DriverName: d.Driver, PoolName: d.Pool, DeviceName: d.Device})
		}
		all = append(all, of)
	}
	return all
}
