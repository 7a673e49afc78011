package policy_test

import (
	"context"
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// Of more than ten that update an object, the API server puts the oldest together as ancient-changes, by the agent's write too. Who has applied
// keeps an entry all the same.
func TestTheAgentWritesAConfigMapThatManyWrite(t *testing.T) {
	s := newScene(t)
	s.apply()
	s.fill()
	maps := s.admin.CoreV1().ConfigMaps("gpu-operator")
	t.Cleanup(func() {
		if err := maps.Delete(context.WithoutCancel(t.Context()), "device-plugin-config", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	agent := s.tries(s.agent())
	goes := func(what string, do func(context.Context, *scene, kubernetes.Interface) error, want bool) {
		t.Helper()
		s.until(fmt.Sprintf("%s: goes through %t", what, want), func(ctx context.Context) (bool, error) {
			no, err := denied(do(ctx, s, agent))
			return no != want, err
		})
	}
	ancient := addEntry("ancient-changes", "Update", `{"f:data":{"f:any":{}}}`)
	writes := configMap("gpu-operator", "device-plugin-config", `{"data":{"gpuslice-UID-4d5e6f":"version: v1"}}`)
	goes("ancient changes of two", ancient, false)
	for n := range 8 { // two are there
		if _, err := maps.Patch(t.Context(), "device-plugin-config", types.MergePatchType, fmt.Appendf(nil, `{"data":{"key-%d":""}}`, n),
			metav1.PatchOptions{FieldManager: fmt.Sprintf("writer-%d", n)}); err != nil {
			t.Fatal(err)
		}
	}
	goes("a key of the agent", writes, true)
	goes("argocd has applied nothing", forgetEntry("argocd"), false)
	goes("flux has applied a user's key", addEntry("flux", "Apply", `{"f:data":{"f:any":{}}}`), false)
}
