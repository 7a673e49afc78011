package kubelet_test

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpuslice/gpuslice/test/cluster/claimdriver"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
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
	pod := j.pod(t, "claimant", func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new("mine")}}
		p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	})
	j.allocate(t, "mine", name, pod)
	j.until(t, "claimant", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
	if !driver.Prepared(j.namespace, "mine") {
		t.Error("the pod runs, and nobody has prepared its claim")
	}
	given := []*podresourcesv1.DynamicResource{{
		ClaimName: "mine", ClaimNamespace: j.namespace,
		ClaimResources: []*podresourcesv1.ClaimResource{{DriverName: name, PoolName: "pool", DeviceName: "gpu-0"}},
	}}
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

// allocate makes a claim that the pod has, as the scheduler does.
func (j *joined) allocate(t *testing.T, name, driver string, pod *corev1.Pod) {
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
			Results: []resourcev1.DeviceRequestAllocationResult{{Request: "gpu", Driver: driver, Pool: "pool", Device: "gpu-0"}},
		}},
		ReservedFor: []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: pod.Name, UID: pod.UID}},
	}
	if _, err := claims.UpdateStatus(t.Context(), claim, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// hasClaims compares what PodResources tells of the pod's claims.
func (j *joined) hasClaims(t *testing.T, pod string, want []*podresourcesv1.DynamicResource) {
	t.Helper()
	answer, err := j.podResources(t).List(t.Context(), &podresourcesv1.ListPodResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(answer.PodResources, func(p *podresourcesv1.PodResources) bool { return p.Name == pod })
	if i < 0 {
		t.Fatalf("pod %s is not listed", pod)
	}
	got := answer.PodResources[i].Containers[0].DynamicResources
	if !slices.EqualFunc(got, want, func(a, b *podresourcesv1.DynamicResource) bool { return a.String() == b.String() }) {
		t.Errorf("pod %s has %v, want %v", pod, got, want)
	}
}
