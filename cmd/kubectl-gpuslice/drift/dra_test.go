package drift_test

import (
	"context"
	"fmt"
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/drift"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// offers is a ResourceSlice of a node.
func offers(node, devices string) string {
	return "{apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: {name: of-" + node + "}, spec: {driver: gpu.nvidia.com, nodeName: " + node +
		", pool: {name: " + node + ", generation: 1, resourceSliceCount: 1}, devices: [" + devices + "]}}"
}

const (
	third   = "{name: gpu-0-mig-3g40gb-9-0, attributes: {type: {string: mig}, profile: {string: 3g.40gb}}}"
	whole   = "{name: gpu-1, attributes: {type: {string: gpu}}}"
	dynamic = "{name: gpu-1, attributes: {type: {string: gpu}}, consumesCounters: [{counterSet: gpu-1-counter-set, counters: {memory: {value: 80Gi}}}]}"
)

// What claims can ask for is offered as what the device plugin has given out is.
func TestNodesOfNVIDIAsDRADriverCountByTheirSlices(t *testing.T) {
	withSlices := maps.Clone(served)
	withSlices[schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceslices"}] = "ResourceSliceList"
	for name, row := range map[string]struct {
		offered string // by the device plugin, of node a
		slice   string
		want    drift.Report
	}{
		"as they are cut": {"0", offers("a", third+","+whole), drift.Report{Static: []string{"a"}}},
		"too few": {"0", offers("a", third), drift.Report{Static: []string{"a"}, Findings: []drift.Finding{
			{About: "ClusterQueue q", Text: "1 of nvidia.com/gpu may be admitted by flavor x, and its 1 node offers 0: pods of admitted workloads stay Pending"},
		}}},
		"cut by the driver": {"0", offers("a", dynamic), drift.Report{Dynamic: []string{"a"}}},
		"no device":         {"1", offers("a", ""), drift.Report{}},
		"of another node":   {"1", offers("b", whole), drift.Report{}},
		"both": {"1", offers("a", third+","+whole), drift.Report{Findings: []drift.Finding{{
			About: "Node a",
			Text: "NVIDIA's device plugin offers nvidia.com/gpu 1, and its DRA driver 1 of class gpu.nvidia.com, 1 of class mig.nvidia.com 3g.40gb: each GPU is advertised twice, " +
				"so the agent changes nothing there; remove one of the two from the node",
		}}}},
	} {
		t.Run(name, func(t *testing.T) {
			objects := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), withSlices,
				object(t, row.slice), object(t, flavor("x", "pool: x")), object(t, queue("q", "x", "1")))
			var nodes runtime.Object = node("a", map[string]string{"pool": "x"}, row.offered)
			got, err := drift.Find(t.Context(), clientset.Of(fake.NewClientset(nodes)), objects, drift.Known{Groups: groups(withSlices)})
			if err != nil {
				t.Fatal(err)
			}
			row.want.Read = map[string]int{"ClusterQueue": 1, "HardwareProfile": 0, "LocalQueue": 0, "ResourceFlavor": 1, "ResourceQuota": 0}
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestWhoMayNotReadWhatLabelsNameIsShownTheRest(t *testing.T) {
	withSlices := maps.Clone(served)
	withSlices[schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceslices"}] = "ResourceSliceList"
	objects := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), withSlices, object(t, offers("a", whole)), object(t, local("l", "none")))
	got, err := drift.Find(t.Context(), clientset.Of(fake.NewClientset(node("a", nil, "0"))), objects, drift.Known{
		Groups: groups(withSlices), Refused: func(context.Context, map[string]string) (string, error) {
			return "", fmt.Errorf("reading: %w", apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "profiles", nil))
		},
	})
	if err != nil || len(got.Findings) != 1 || len(got.Unread) != 1 || len(got.Static) != 1 {
		t.Errorf("error %v, report %+v", err, got)
	}
}

func TestWhoMayNotReadSlicesIsShownTheRest(t *testing.T) {
	withSlices := maps.Clone(served)
	slices := schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceslices"}
	withSlices[slices] = "ResourceSliceList"
	objects := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), withSlices, object(t, local("l", "none")))
	objects.PrependReactor("list", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(slices.GroupResource(), "", nil)
	})
	got, err := drift.Find(t.Context(), clientset.Of(fake.NewClientset(&corev1.Node{})), objects, drift.Known{Groups: groups(withSlices)})
	if err != nil || len(got.Findings) != 1 || len(got.Unread) != 1 {
		t.Errorf("error %v, report %+v", err, got)
	}
}
