package kubelet_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpuslice/gpuslice/test/cluster/claimdriver"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
	"github.com/gpuslice/gpuslice/test/receive"
)

// The order is kubelet's (SyncTerminatingPod): containers end, claims are unprepared, and only then is the pod said to have ended.
func TestAPodEndsWhenTheDriverOfItsClaimHasTakenItBack(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	const name = "gpu.example.com"
	driver, err := claimdriver.Start(t.Context(), j.options.Dir, name)
	if err != nil {
		t.Fatal(err)
	}
	pod := j.pod(t, "claimant", withClaim("mine"))
	j.allocate(t, "mine", name, pod)
	j.until(t, "claimant", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
	if !driver.Prepared(j.namespace, "mine") {
		t.Error("the pod runs, and no one has prepared its claim")
	}
	if !driver.Registered() {
		t.Error("the driver is asked, and its registration is not confirmed")
	}
	given := []*podresourcesv1.DynamicResource{j.given("mine", name)}
	j.hasClaims(t, "claimant", given)

	driver.Stop()
	j.remove(t, "claimant", metav1.DeleteOptions{})
	stays := j.until(t, "claimant", func(p *corev1.Pod) bool { return p.Status.ContainerStatuses[0].State.Terminated != nil })
	if stays.Status.Phase != corev1.PodRunning {
		t.Errorf("the pod is said to be %s, want Running: what it has is not given back", stays.Status.Phase)
	}
	j.hasClaims(t, "claimant", given)

	if driver, err = claimdriver.Start(t.Context(), j.options.Dir, name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(driver.Stop)
	j.gone(t, pod)
	if driver.Prepared(j.namespace, "mine") {
		t.Error("the pod is gone, and its claim is still prepared")
	}
}

// Whoever may create pods can name a template that is not there: kubelet starts no such pod.
func TestAPodWhoseClaimIsNotMadeYetDoesNotStart(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	none := "there-is-none"
	j.pod(t, "claimant", func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &none}}
	})
	pod := j.until(t, "claimant", func(p *corev1.Pod) bool { return p.Status.StartTime != nil }) // kubelet has tried
	if pod.Status.Phase != corev1.PodPending || len(pod.Status.ContainerStatuses) > 0 {
		t.Errorf("the pod has no claim, and is %s: %v", pod.Status.Phase, pod.Status.ContainerStatuses)
	}
	pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu"}} // no claim is needed
	if _, err := j.admin.CoreV1().Pods(j.namespace).UpdateStatus(t.Context(), pod, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	j.until(t, "claimant", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
}

// A claim that the scheduler makes for an extended resource is in the pod's status alone.
func TestAClaimForAnExtendedResourceIsPreparedAndListed(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	const name = "gpu.example.com"
	driver, err := claimdriver.Start(t.Context(), j.options.Dir, name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(driver.Stop)
	p := j.serve(t, "gpu.sock", "a") // a device plugin offers the same: it is not asked
	defer p.Stop()
	pod := j.pod(t, "implicit", func(p *corev1.Pod) {
		oneGPU(p)
		p.Spec.NodeName, p.Spec.SchedulerName = "", "the-test"
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "beside", Image: "example.com/sleep"})
	})
	pod.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{
		ResourceClaimName: "made",
		RequestMappings:   []corev1.ContainerExtendedResourceRequest{{ContainerName: "main", ResourceName: gpu, RequestName: "gpu"}},
	}
	j.allocate(t, "made", name, pod)
	pods := j.admin.CoreV1().Pods(j.namespace)
	if pod, err = pods.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := pods.Bind(t.Context(), &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: pod.Name, UID: pod.UID}, Target: corev1.ObjectReference{Kind: "Node", Name: j.options.Node},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	j.until(t, "implicit", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
	j.hasClaims(t, "implicit", []*podresourcesv1.DynamicResource{j.given("made", name)}, nil)
	if diff := cmp.Diff([]string{"allocate implicit " + name + "/pool/gpu-0"}, j.usage.lines()); diff != "" {
		t.Errorf("who has which device (-want +got):\n%s", diff)
	}
	j.remove(t, "implicit", metav1.DeleteOptions{})
	j.gone(t, pod)
	if driver.Prepared(j.namespace, "made") {
		t.Error("the pod is gone, and its claim is still prepared")
	}
}

func TestAClaimOfTwoPodsIsTakenBackAfterTheLast(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	const name = "gpu.example.com"
	driver, err := claimdriver.Start(t.Context(), j.options.Dir, name)
	if err != nil {
		t.Fatal(err)
	}
	var both []*corev1.Pod
	for _, pod := range []string{"one", "other"} {
		both = append(both, j.pod(t, pod, withClaim("ours")))
	}
	j.allocate(t, "ours", name, both...)
	for _, pod := range both {
		j.until(t, pod.Name, func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
	}
	j.remove(t, "one", metav1.DeleteOptions{})
	j.gone(t, both[0])
	if !driver.Prepared(j.namespace, "ours") {
		t.Error("the claim is taken back while a pod has it")
	}

	// What is prepared is on record, whether or not the driver is there when kubelet starts.
	driver.Stop()
	j.Stop()
	j.start(t.Context(), t)
	j.hasClaims(t, "other", []*podresourcesv1.DynamicResource{j.given("ours", name)})

	// So it is when the pod goes while no kubelet runs.
	j.Stop()
	j.remove(t, "other", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
	j.gone(t, both[1])
	if driver, err = claimdriver.Start(t.Context(), j.options.Dir, name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(driver.Stop)
	driver.Prepare(j.namespace, "ours")
	j.start(t.Context(), t)
	for driver.Prepared(j.namespace, "ours") {
		select {
		case <-t.Context().Done():
			t.Fatal("the pod is gone, and its claim is still prepared")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func TestTheSlicesOfADriverGoWithIt(t *testing.T) {
	t.Parallel()
	var later laterClock
	j := join(t, kubelet.Options{Clock: &later})
	var drivers []*claimdriver.Driver
	for _, name := range []string{"ends.example.com", "stays.example.com"} {
		driver, err := claimdriver.Start(t.Context(), j.options.Dir, name)
		if err != nil {
			t.Fatal(err)
		}
		j.connected(t, name)
		if !driver.Registered() {
			t.Errorf("the registration of driver %s is not confirmed", name)
		}
		drivers = append(drivers, driver)
		j.publish(t, j.options.Node, name)
	}
	t.Cleanup(drivers[1].Stop)
	j.publish(t, "other-"+j.namespace, "ends.example.com")

	ends, stays, others := j.options.Node+" ends.example.com", j.options.Node+" stays.example.com", "other-"+j.namespace+" ends.example.com"
	drivers[0].Stop()
	j.FollowDrivers(t.Context())
	for _, step := range []struct {
		after time.Duration
		want  []string
	}{
		{29 * time.Second, []string{ends, stays, others}},
		{31 * time.Second, []string{stays, others}},
		{time.Hour, []string{stays, others}},
	} {
		later.by.Store(int64(step.after))
		j.FollowDrivers(t.Context())
		j.hasSlices(t, step.want...)
	}

	// It comes back in time.
	driver, err := claimdriver.Start(t.Context(), j.options.Dir, "ends.example.com")
	if err != nil {
		t.Fatal(err)
	}
	j.connected(t, "ends.example.com")
	j.publish(t, j.options.Node, "ends.example.com")
	driver.Stop()
	j.FollowDrivers(t.Context())
	later.by.Add(int64(20 * time.Second))
	if driver, err = claimdriver.Start(t.Context(), j.options.Dir, "ends.example.com"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(driver.Stop)
	j.connected(t, "ends.example.com")
	later.by.Add(int64(time.Hour))
	j.FollowDrivers(t.Context())
	j.hasSlices(t, ends, stays, others)

	// Kubelet knows of no driver when it starts.
	if err := j.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	j.FollowDrivers(t.Context())
	j.hasSlices(t, others)
}

// The real kubelet counts from the end of the last connection, however short that was. What it has begun to delete it deletes, whoever has connected
// since (DRAPluginManager.sync and wipeResourceSlices).
func TestAConnectionPutsOffTheDeletionOfSlicesUntilThatBegins(t *testing.T) {
	t.Parallel()
	const name = "gpu.example.com"
	var later laterClock
	deletions := refusedDeletions{asked: make(chan struct{}, 1)}
	j := join(t, kubelet.Options{Clock: &later, Config: &rest.Config{WrapTransport: deletions.wrap}})
	j.publish(t, j.options.Node, name)
	here := j.options.Node + " " + name
	start := func() *claimdriver.Driver {
		t.Helper()
		d, err := claimdriver.Start(t.Context(), j.options.Dir, name)
		if err != nil {
			t.Fatal(err)
		}
		j.connected(t, name)
		return d
	}
	start().Stop()
	j.FollowDrivers(t.Context())
	for _, step := range []struct {
		after time.Duration
		want  []string
	}{{20 * time.Second, []string{here}}, {20 * time.Second, []string{here}}, {31 * time.Second, nil}} {
		later.by.Add(int64(step.after))
		if step.want != nil {
			start().Stop() // there for less than the second between two looks
		}
		j.FollowDrivers(t.Context())
		j.hasSlices(t, step.want...)
	}

	start().Stop()
	j.FollowDrivers(t.Context())
	deletions.refuse.Store(true)
	later.by.Add(int64(31 * time.Second))
	receive.From(t, deletions.asked)
	t.Cleanup(start().Stop)
	j.publish(t, j.options.Node, name)
	deletions.refuse.Store(false)
	clustertest.Eventually(t, "the slices that the driver has published since are gone", func(ctx context.Context) (bool, error) {
		list, err := j.admin.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + j.options.Node})
		return err == nil && len(list.Items) == 0, err
	})
}

// refusedDeletions is an API server that deletes no collection for a while.
type refusedDeletions struct {
	refuse atomic.Bool
	asked  chan struct{} // while it refuses
}

func (d *refusedDeletions) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTrip(func(r *http.Request) (*http.Response, error) {
		if r.Method != http.MethodDelete || !d.refuse.Load() {
			return next.RoundTrip(r)
		}
		select {
		case d.asked <- struct{}{}:
		default:
		}
		return nil, errors.New("the test refuses it")
	})
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// connected waits until kubelet has a connection to the driver.
func (j *joined) connected(t *testing.T, driver string) {
	t.Helper()
	for j.FollowDrivers(t.Context()); !j.Connected(driver); j.FollowDrivers(t.Context()) {
		select {
		case <-t.Context().Done():
			t.Fatalf("driver %s is not connected", driver)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// publish makes a ResourceSlice of a driver.
func (j *joined) publish(t *testing.T, node, driver string) {
	t.Helper()
	if _, err := j.admin.ResourceV1().ResourceSlices().Create(t.Context(), &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: j.namespace + "-"},
		Spec: resourcev1.ResourceSliceSpec{
			Driver: driver, NodeName: &node, Pool: resourcev1.ResourcePool{Name: node, ResourceSliceCount: 1},
			Devices: []resourcev1.Device{{Name: "gpu-0"}},
		},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// hasSlices compares the ResourceSlices of the test's nodes, as "node driver".
func (j *joined) hasSlices(t *testing.T, want ...string) {
	t.Helper()
	list, err := j.admin.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range list.Items {
		if s.Spec.NodeName != nil && strings.HasSuffix(*s.Spec.NodeName, j.namespace) {
			got = append(got, *s.Spec.NodeName+" "+s.Spec.Driver)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("slices (-want +got):\n%s", diff)
	}
}

// withClaim has the pod's first container ask for a claim.
func withClaim(claim string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}}
		p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	}
}

// given is what PodResources says of a claim that the driver has prepared.
func (j *joined) given(claim, driver string) *podresourcesv1.DynamicResource {
	return &podresourcesv1.DynamicResource{
		ClaimName: claim, ClaimNamespace: j.namespace,
		ClaimResources: []*podresourcesv1.ClaimResource{{DriverName: driver, PoolName: claimdriver.Pool, DeviceName: claimdriver.Device}},
	}
}

// allocate makes a claim that the pods have, as the scheduler does.
func (j *joined) allocate(t *testing.T, name, driver string, pods ...*corev1.Pod) {
	t.Helper()
	claims := j.admin.ResourceV1().ResourceClaims(j.namespace)
	claim, err := claims.Create(t.Context(), &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{
			Requests: []resourcev1.DeviceRequest{{Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: driver}}},
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	claim.Status = resourcev1.ResourceClaimStatus{
		Allocation: &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{
			Results: []resourcev1.DeviceRequestAllocationResult{{Request: "gpu", Driver: driver, Pool: claimdriver.Pool, Device: claimdriver.Device}},
		}},
	}
	for _, pod := range pods {
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: pod.Name, UID: pod.UID})
	}
	if _, err := claims.UpdateStatus(t.Context(), claim, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// hasClaims compares what PodResources says of the claims of the pod's containers.
func (j *joined) hasClaims(t *testing.T, pod string, want ...[]*podresourcesv1.DynamicResource) {
	t.Helper()
	answer, err := j.podResources(t).List(t.Context(), &podresourcesv1.ListPodResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(answer.PodResources, func(p *podresourcesv1.PodResources) bool { return p.Name == pod })
	if i < 0 {
		t.Fatalf("pod %s is not listed", pod)
	}
	for n, c := range answer.PodResources[i].Containers {
		if got := c.DynamicResources; !slices.EqualFunc(got, want[n], func(a, b *podresourcesv1.DynamicResource) bool { return a.String() == b.String() }) {
			t.Errorf("container %s of pod %s has %v, want %v", c.Name, pod, got, want[n])
		}
	}
}
