package nodekeys_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config/nodekeys"
)

// Promise 13. What the node had before with the profile's value is not the agent's: it stays when the profile goes.
func TestOnlyKeysThatTheAgentHasSetAreItsOwn(t *testing.T) {
	t.Parallel()
	keys := func(value string) nodekeys.Keys {
		if value == "" {
			return nodekeys.Keys{}
		}
		return nodekeys.Keys{
			Labels: map[string]string{"team": value},
			Taints: []corev1.Taint{{Key: "team", Value: value, Effect: corev1.TaintEffectNoSchedule}},
		}
	}
	for name, c := range map[string]struct {
		has, ours, want string // values on the node, of the agent's note, and of the profile
		is, note        string // values on the node and of the note afterwards
		refused         bool
	}{
		"the node has none":                       {want: "a", is: "a", note: "a"},
		"a user has set the same":                 {has: "a", want: "a", is: "a"},
		"a user has set another value":            {has: "b", want: "a", refused: true},
		"the agent has set the same":              {has: "a", ours: "a", want: "a", is: "a", note: "a"},
		"the agent has set a former profile's":    {has: "b", ours: "b", want: "a", is: "a", note: "a"},
		"a user has taken the agent's away":       {ours: "a", want: "a", is: "a", note: "a"},
		"the profile goes":                        {has: "a", ours: "a"},
		"the profile goes, and the user's stays":  {has: "a", is: "a"},
		"the profile goes after a user's change":  {has: "b", ours: "a", is: "b"},
		"the profile goes when its keys are gone": {ours: "a"},
	} {
		t.Run(name, func(t *testing.T) {
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: keys(c.has).Labels}, Spec: corev1.NodeSpec{Taints: keys(c.has).Taints}}
			body, note, err := nodekeys.Patch(node, keys(c.ours), keys(c.want))
			if refused := err != nil; refused != c.refused {
				t.Fatalf("the patch is %s, and the error %v", body, err)
			}
			if c.refused {
				return
			}
			if diff := cmp.Diff(keys(c.note).String(), note.String()); diff != "" {
				t.Errorf("keys of the agent (-want +got):\n%s", diff)
			}
			var patch struct {
				Metadata struct{ Labels map[string]*string }
				Spec     *struct{ Taints []corev1.Taint }
			}
			if err := json.Unmarshal(body, &patch); err != nil {
				t.Fatal(err)
			}
			got := nodekeys.Keys{Labels: map[string]string{}, Taints: node.Spec.Taints}
			if value := keys(c.has).Labels["team"]; value != "" {
				got.Labels["team"] = value
			}
			for key, value := range patch.Metadata.Labels {
				if delete(got.Labels, key); value != nil {
					got.Labels[key] = *value
				}
			}
			if patch.Spec != nil {
				got.Taints = patch.Spec.Taints
			}
			if diff := cmp.Diff(keys(c.is).String(), got.String()); diff != "" {
				t.Errorf("keys of the node (-want +got):\n%s", diff)
			}
		})
	}
}
