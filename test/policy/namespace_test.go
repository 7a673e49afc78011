package policy_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/test/kustomize"
)

// Where an overlay gives the account another namespace, its rights follow, and so do the policies.
func TestAnAccountOfAnotherNamespaceIsConfined(t *testing.T) {
	s := newScene(t)
	if _, err := s.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "apart"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	files := kustomize.Over("base")
	files["kustomization.yaml"] += "namespace: elsewhere\n"
	s.put(s.build(files))
	t.Cleanup(func() {
		ctx, all := context.WithoutCancel(t.Context()), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=gpuslice"}
		policies := s.admin.AdmissionregistrationV1()
		if err := errors.Join(
			s.admin.CoreV1().Nodes().Delete(ctx, "apart", metav1.DeleteOptions{}),
			policies.ValidatingAdmissionPolicyBindings().DeleteCollection(ctx, metav1.DeleteOptions{}, all),
			policies.ValidatingAdmissionPolicies().DeleteCollection(ctx, metav1.DeleteOptions{}, all),
		); err != nil {
			t.Error(err)
		}
	})
	account, err := s.cluster.ServiceAccountConfig(t.Context(), "elsewhere", "gpuslice-agent")
	if err != nil {
		t.Fatal(err)
	}
	client := s.tries(account)
	s.until("the policy", func(ctx context.Context) (bool, error) {
		_, err := client.CoreV1().Nodes().Patch(ctx, "apart", types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{})
		return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "the token names no node"), ignoring(err, apierrors.IsForbidden)
	})
}
