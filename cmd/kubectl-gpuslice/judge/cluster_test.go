package judge

import (
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/test/clientset"
)

// What a user has no right to is named. The devices are not listed where no pod that leaves may need them, and are no reason to know nothing of the rest.
func TestOfAClusterOnlyWhatIsNeededIsRead(t *testing.T) {
	plain, claims := pod("plain"), pod("claims", by("a-gpu", true))
	extended := pod("extended", byResource)
	elsewhere := pod("elsewhere", by("b-gpu", true))
	class, devices := class(), devicesOn("gpu-2", "gpu-0-mig-0")
	base := []string{"deviceclasses", "nodes", "poddisruptionbudgets", "pods"}
	all := append(slices.Clone(base), "devicetaintrules", "resourceclaims", "resourceslices")
	slices.Sort(all)
	for name, row := range map[string]struct {
		leaves    corev1.Pod
		forbidden string
		lists     []string // empty if they may stop anywhere
		err       string
		unknown   string
	}{
		"a pod of a plugin":           {leaves: plain, lists: base},
		"a pod with a claim":          {leaves: claims, lists: all},
		"an extended resource":        {leaves: extended, lists: all},
		"no right to nodes":           {leaves: plain, forbidden: "nodes", err: "listing nodes: "},
		"no right to pods":            {leaves: plain, forbidden: "pods", err: "listing pods: "},
		"no right to budgets":         {leaves: plain, forbidden: "poddisruptionbudgets", err: "listing budgets: "},
		"no right to classes":         {leaves: plain, forbidden: "deviceclasses", unknown: "listing DeviceClasses: "},
		"no right to slices":          {leaves: claims, forbidden: "resourceslices", unknown: "listing ResourceSlices: "},
		"no right to claims":          {leaves: claims, forbidden: "resourceclaims", unknown: "listing ResourceClaims: "},
		"no right to rules":           {leaves: claims, forbidden: "devicetaintrules", unknown: "listing DeviceTaintRules: "},
		"no right to slices, no need": {leaves: plain, forbidden: "resourceslices", lists: base},
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset(&plain, &claims, &extended, &elsewhere, &class, &devices)
			client.PrependReactor("list", row.forbidden, func(a k8stesting.Action) (bool, runtime.Object, error) {
				return row.forbidden != "", nil, apierrors.NewForbidden(schema.GroupResource{Resource: row.forbidden}, "", nil)
			})
			c, err := Read(t.Context(), clientset.Of(client), []string{"team/" + row.leaves.Name})
			lists := map[string]bool{}
			for _, a := range client.Actions() {
				lists[a.GetResource().Resource] = true
			}
			if got := slices.Sorted(maps.Keys(lists)); row.lists != nil && !slices.Equal(got, row.lists) {
				t.Errorf("lists %v, want %v", got, row.lists)
			}
			switch {
			case (err == nil) != (row.err == ""), err != nil && !strings.HasPrefix(err.Error(), row.err):
				t.Errorf("error %v, want %q", err, row.err)
			case err == nil && ((c.Unknown == nil) != (row.unknown == "") || c.Unknown != nil && !strings.HasPrefix(c.Unknown.Error(), row.unknown)):
				t.Errorf("not known: %v, want %q", c.Unknown, row.unknown)
			}
		})
	}
}
