package kubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/client-go/util/retry"
)

const (
	// reportPeriod is how often an unchanged status is written, as a sign of life.
	reportPeriod = 5 * time.Minute
	// leaseDuration and leasePeriod are a real kubelet's.
	leaseDuration = 40 * time.Second
	leasePeriod   = 10 * time.Second
	leaseSpace    = "kube-node-lease"
	version       = "v1.37.1" // of the kubelet whose behaviour this one has
)

// nodeReporter keeps the Node object and its Lease up to date.
type nodeReporter struct {
	k   *Kubelet
	log *zap.Logger

	mu       sync.Mutex
	written  *corev1.Node // the node as the last write left it
	reported time.Time    // when that was; zero makes the next observation write
}

func newNodeReporter(k *Kubelet) *nodeReporter {
	return &nodeReporter{k: k, log: k.Log.Named("node")}
}

// register makes the Node if there is none, and writes its status at once, as a kubelet does that starts.
func (n *nodeReporter) register(ctx context.Context) error {
	nodes := n.k.client.CoreV1().Nodes()
	if _, err := nodes.Create(ctx, n.initial(), metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating node %s: %w", n.k.Node, err)
	}
	n.mu.Lock()
	n.reported = time.Time{}
	n.mu.Unlock()
	if err := n.report(ctx); err != nil {
		return err
	}
	return n.renewLease(ctx)
}

// start reports with every period, and with every change of devices if so asked, until ctx ends. The channel reports the end.
func (n *nodeReporter) start(ctx context.Context) <-chan struct{} {
	status, lease := n.k.Clock.NewTicker(n.k.StatusPeriod), n.k.Clock.NewTicker(leasePeriod)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer status.Stop()
		defer lease.Stop()
		n.run(ctx, status.C(), lease.C())
	}()
	return done
}

func (n *nodeReporter) run(ctx context.Context, status, lease <-chan time.Time) {
	var devices <-chan struct{}
	if n.k.ReportAtOnce {
		devices = n.k.devices.watch()
		n.logged(ctx, n.report(ctx)) // what changed since the registration
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-devices:
			devices = n.k.devices.watch() // before the report, so that no change falls between the two
			n.logged(ctx, n.report(ctx))
		case <-status:
			n.logged(ctx, n.report(ctx))
		case <-lease:
			n.logged(ctx, n.renewLease(ctx))
		}
	}
}

func (n *nodeReporter) logged(ctx context.Context, err error) {
	if err != nil && ctx.Err() == nil {
		n.log.Warn("node not reported", zap.Error(err))
	}
}

// report computes the status and patches what differs from the API server's. So conditions and resources of others do
// not change.
func (n *nodeReporter) report(ctx context.Context) error {
	nodes := n.k.client.CoreV1().Nodes()
	before, err := nodes.Get(ctx, n.k.Node, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("reading node %s: %w", n.k.Node, err)
	}
	after := before.DeepCopy()
	forgotten := n.fill(&after.Status)
	n.mu.Lock()
	due := n.reported.IsZero() || n.k.Clock.Since(n.reported) >= reportPeriod
	n.mu.Unlock()
	if !due && !statusDiffers(before.Status, after.Status) {
		n.remember(before, false)
		return nil
	}
	now := metav1.NewTime(n.k.Clock.Now().Truncate(time.Second))
	for i := range after.Status.Conditions {
		if isOwn(after.Status.Conditions[i].Type) {
			after.Status.Conditions[i].LastHeartbeatTime = now
		}
	}
	patch, err := statusPatch(corev1.Node{Status: before.Status}, corev1.Node{Status: after.Status})
	if err != nil {
		return fmt.Errorf("comparing the status of node %s: %w", n.k.Node, err)
	}
	written, err := nodes.Patch(ctx, n.k.Node, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil {
		return fmt.Errorf("writing the status of node %s: %w", n.k.Node, err)
	}
	n.k.devices.reportedForgotten(forgotten)
	n.remember(written, true)
	return nil
}

func (n *nodeReporter) remember(node *corev1.Node, written bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.written = node
	if written {
		n.reported = n.k.Clock.Now()
	}
}

// fill sets what this kubelet knows and changes nothing else of the status. It returns the resources set to 0 for good.
func (n *nodeReporter) fill(s *corev1.NodeStatus) (forgotten []string) {
	if s.Capacity == nil {
		s.Capacity = corev1.ResourceList{}
	}
	if s.Allocatable == nil {
		s.Allocatable = corev1.ResourceList{}
	}
	maps.Copy(s.Capacity, capacity())
	known, forgotten := n.k.devices.amounts()
	for name, a := range known {
		s.Capacity[corev1.ResourceName(name)] = *resource.NewQuantity(a.capacity, resource.DecimalSI)
	}
	for _, name := range forgotten {
		s.Capacity[corev1.ResourceName(name)] = *resource.NewQuantity(0, resource.DecimalSI)
	}
	for name := range s.Allocatable {
		if _, stays := s.Capacity[name]; !stays && isExtendedResource(string(name)) {
			delete(s.Allocatable, name)
		}
	}
	maps.Copy(s.Allocatable, s.Capacity)
	for name, a := range known {
		s.Allocatable[corev1.ResourceName(name)] = *resource.NewQuantity(a.allocatable, resource.DecimalSI)
	}
	s.Addresses = []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: nodeAddress},
		{Type: corev1.NodeHostName, Address: n.k.Node},
	}
	s.DaemonEndpoints.KubeletEndpoint.Port = n.k.server.port
	s.NodeInfo = corev1.NodeSystemInfo{
		MachineID: "machine-of-" + n.k.Node, SystemUUID: "machine-of-" + n.k.Node, BootID: n.k.BootID,
		KernelVersion: "simulated", OSImage: "simulated", ContainerRuntimeVersion: "standin://1.0.0",
		KubeletVersion: version, OperatingSystem: "linux", Architecture: runtime.GOARCH,
	}
	for _, c := range ownConditions {
		n.setCondition(s, c)
	}
	return forgotten
}

var ownConditions = []corev1.NodeCondition{
	{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasSufficientMemory", Message: "kubelet has sufficient memory available"},
	{Type: corev1.NodeDiskPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasNoDiskPressure", Message: "kubelet has no disk pressure"},
	{Type: corev1.NodePIDPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasSufficientPID", Message: "kubelet has sufficient PID available"},
	{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", Message: "kubelet is posting ready status"},
}

func isOwn(t corev1.NodeConditionType) bool {
	return slices.ContainsFunc(ownConditions, func(c corev1.NodeCondition) bool { return c.Type == t })
}

func (n *nodeReporter) setCondition(s *corev1.NodeStatus, c corev1.NodeCondition) {
	now := metav1.NewTime(n.k.Clock.Now().Truncate(time.Second))
	for i, old := range s.Conditions {
		if old.Type != c.Type {
			continue
		}
		c.LastHeartbeatTime, c.LastTransitionTime = old.LastHeartbeatTime, old.LastTransitionTime
		if old.Status != c.Status {
			c.LastTransitionTime = now
		}
		s.Conditions[i] = c
		return
	}
	c.LastHeartbeatTime, c.LastTransitionTime = now, now
	s.Conditions = append(s.Conditions, c)
}

func capacity() corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU:              resource.MustParse("64"),
		corev1.ResourceMemory:           resource.MustParse("512Gi"),
		corev1.ResourceEphemeralStorage: resource.MustParse("1Ti"),
		corev1.ResourcePods:             resource.MustParse("110"),
	}
}

func (n *nodeReporter) initial() *corev1.Node {
	labels := map[string]string{
		corev1.LabelHostname: n.k.Node, corev1.LabelOSStable: "linux", corev1.LabelArchStable: runtime.GOARCH,
	}
	maps.Copy(labels, n.k.Labels)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.k.Node, Labels: labels}}
	n.fill(&node.Status)
	return node
}

// renewLease shows the node lifecycle controller that the node is alive. Like kubelet, it retries if someone wrote the
// lease between its read and its write: a request of the previous kubelet may still have been on its way.
func (n *nodeReporter) renewLease(ctx context.Context) error {
	leases := n.k.client.CoordinationV1().Leases(leaseSpace)
	written := func(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }
	err := retry.OnError(retry.DefaultRetry, written, func() error {
		now := metav1.NewMicroTime(n.k.Clock.Now())
		lease, err := leases.Get(ctx, n.k.Node, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			_, err = leases.Create(ctx, n.lease(now), metav1.CreateOptions{})
		case err == nil:
			lease = lease.DeepCopy()
			lease.Spec.RenewTime = &now
			_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("renewing the lease of node %s: %w", n.k.Node, err)
	}
	return nil
}

func (n *nodeReporter) lease(now metav1.MicroTime) *coordinationv1.Lease {
	seconds := int32(leaseDuration / time.Second)
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: leaseSpace, Name: n.k.Node},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &n.k.Node, LeaseDurationSeconds: &seconds, RenewTime: &now},
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.written != nil {
		lease.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.k.Node, UID: n.written.UID}}
	}
	return lease
}

// statusDiffers compares all but the heartbeats.
func statusDiffers(a, b corev1.NodeStatus) bool {
	a, b = *a.DeepCopy(), *b.DeepCopy()
	for _, list := range [][]corev1.NodeCondition{a.Conditions, b.Conditions} {
		for i := range list {
			list[i].LastHeartbeatTime = metav1.Time{}
		}
	}
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX != nil || errY != nil || string(x) != string(y)
}

// statusPatch is the strategic merge patch between two statuses, each in an object with nothing else, since a spec may be large.
func statusPatch[T corev1.Node | corev1.Pod](before, after T) ([]byte, error) {
	x, err := json.Marshal(before)
	if err != nil {
		return nil, err
	}
	y, err := json.Marshal(after)
	if err != nil {
		return nil, err
	}
	return strategicpatch.CreateTwoWayMergePatch(x, y, before)
}
