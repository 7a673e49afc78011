package holders

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// ErrKubeletUnavailable means that kubelet's PodResources API could not be asked: its socket is missing, kubelet does not listen
// on it, or did not answer in time.
var ErrKubeletUnavailable = errors.New("kubelet's PodResources API is not available")

// ErrKubeletStarting means that kubelet lists no pods yet, though some run.
var ErrKubeletStarting = fmt.Errorf("%w: kubelet has just started and lists no pods yet", ErrKubeletUnavailable)

// resourcePrefix begins the name of every resource of NVIDIA's device plugins.
const resourcePrefix = "nvidia.com/"

// claimPrefix begins what stands for a resource claim among the resources of a pod. No resource has such a name.
const claimPrefix = "claim "

// ClaimDriver is NVIDIA's driver of GPUs and MIG devices for resource claims. Its other one, compute-domain.nvidia.com,
// gives out channels between nodes.
const ClaimDriver = "gpu.nvidia.com"

// maxAnswer bounds kubelet's answer in bytes. gRPC's own 4 MiB are too few for a large node, since the answer lists
// every CPU of every pod; kubelet's own client uses this bound.
const maxAnswer = 16 << 20

// Assignments are the device ids that kubelet gave to each pod, as kubelet writes them, by resource (nvidia.com/ only).
// Nil means that kubelet could not be asked, which is not the same as nothing being assigned. Every pod that kubelet lists is in
// it, also those without devices.
//
// For each resource claim of a pod, "claim <its name>" has those of the claim's devices that containers of the pod have, as driver/pool/device;
// none while kubelet has not prepared the claim. Kubelet reports them since Kubernetes 1.34, and earlier if its feature
// KubeletPodResourcesDynamicResources is on.
//
// Kubelet reports the names of pods, not their UIDs: for a moment after a pod was replaced by one of the same name,
// kubelet may list the devices of the former.
type Assignments map[types.NamespacedName]map[string][]string

// Kubelet is the PodResources API of this node's kubelet. It may be used from several goroutines.
type Kubelet struct {
	socket string

	mu   sync.Mutex
	conn *grpc.ClientConn // nil until the first call, and again after a call that kubelet did not take
}

// DialKubelet names the socket of kubelet's PodResources API, as a path. It connects at the first call.
func DialKubelet(socket string) *Kubelet { return &Kubelet{socket: socket} }

// Assignments lists the devices of each pod. Its error matches ErrKubeletUnavailable if kubelet does not answer before ctx ends; the Assignments are
// then nil.
func (k *Kubelet) Assignments(ctx context.Context) (Assignments, error) {
	var answer *podresources.ListPodResourcesResponse
	err := k.call(func(client podresources.PodResourcesListerClient) (err error) {
		answer, err = client.List(ctx, &podresources.ListPodResourcesRequest{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listing the devices of pods through %s: %w", k.socket, err)
	}
	out := Assignments{}
	for _, pod := range answer.GetPodResources() {
		name := types.NamespacedName{Namespace: pod.GetNamespace(), Name: pod.GetName()}
		out[name] = map[string][]string{}
		for _, c := range pod.GetContainers() {
			for _, d := range c.GetDevices() {
				if strings.HasPrefix(d.GetResourceName(), resourcePrefix) {
					out.add(name, d.GetResourceName(), d.GetDeviceIds())
				}
			}
			for _, claim := range c.GetDynamicResources() {
				out.add(name, claimPrefix+claim.GetClaimName(), prepared(claim))
			}
		}
	}
	return out, nil
}

// Allocatable lists the devices that kubelet can allocate, allocated ones included: sorted ids by resource, nvidia.com/ only. Its error matches
// ErrKubeletUnavailable if kubelet does not answer before ctx ends.
func (k *Kubelet) Allocatable(ctx context.Context) (map[string][]string, error) {
	var answer *podresources.AllocatableResourcesResponse
	err := k.call(func(client podresources.PodResourcesListerClient) (err error) {
		answer, err = client.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listing allocatable devices through %s: %w", k.socket, err)
	}
	out := map[string][]string{}
	for _, d := range answer.GetDevices() {
		if strings.HasPrefix(d.GetResourceName(), resourcePrefix) {
			out[d.GetResourceName()] = append(out[d.GetResourceName()], d.GetDeviceIds()...)
		}
	}
	// Kubelet lists a resource once for each NUMA node, in no order.
	for name, ids := range out {
		slices.Sort(ids)
		out[name] = slices.Compact(ids)
	}
	return out, nil
}

// Close ends the connection. A later call opens a new one.
func (k *Kubelet) Close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.drop(k.conn)
}

// Premature reports whether kubelet has answered before it knew its pods, as it does for about a second after its start: it lists none, though one of
// these runs. After such an answer devices may still be assigned.
func (a Assignments) Premature(pods []corev1.Pod) bool {
	return a != nil && len(a) == 0 && slices.ContainsFunc(pods, func(p corev1.Pod) bool {
		return p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil
	})
}

func (a Assignments) add(pod types.NamespacedName, resource string, more []string) {
	if len(more) == 0 && !strings.HasPrefix(resource, claimPrefix) {
		return
	}
	ids := append(a[pod][resource], more...)
	slices.Sort(ids)
	a[pod][resource] = slices.Compact(ids)
}

func prepared(claim *podresources.DynamicResource) []string {
	var out []string
	for _, r := range claim.GetClaimResources() {
		out = append(out, Device{r.GetDriverName(), r.GetPoolName(), r.GetDeviceName()}.id())
	}
	return out
}

func (k *Kubelet) call(ask func(podresources.PodResourcesListerClient) error) error {
	conn, err := k.connection()
	if err != nil {
		return err
	}
	err = ask(podresources.NewPodResourcesListerClient(conn))
	switch status.Code(err) {
	case codes.Unavailable:
		// A connection that failed answers at once with its last failure for as long as gRPC backs off, up to two
		// minutes. A restarted kubelet is back in seconds, so the next call shall try afresh.
		k.mu.Lock()
		defer k.mu.Unlock()
		k.drop(conn)
		return fmt.Errorf("%w: %w", ErrKubeletUnavailable, err)
	case codes.DeadlineExceeded, codes.Canceled:
		return fmt.Errorf("%w: %w", ErrKubeletUnavailable, err)
	default:
		return err
	}
}

func (k *Kubelet) connection() (*grpc.ClientConn, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn != nil {
		return k.conn, nil
	}
	conn, err := grpc.NewClient("unix:"+k.socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKubeletUnavailable, err)
	}
	k.conn = conn
	return conn, nil
}

// drop closes conn, unless another call has replaced it already. The caller holds mu.
func (k *Kubelet) drop(conn *grpc.ClientConn) {
	if conn == nil || k.conn != conn {
		return
	}
	k.conn = nil
	_ = conn.Close() // its only error is that the connection was closed before
}
