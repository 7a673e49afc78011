package policy_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Where an overlay gives the account another namespace, its rights follow, and so do the policies.
func TestAnAccountOfAnotherNamespaceIsConfined(t *testing.T) {
	s := newScene(t)
	if _, err := s.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "apart"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	dir := kustomization(t, "base")
	file := filepath.Join(dir, "kustomization.yaml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, append(text, "namespace: elsewhere\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	s.kubectl("apply", "-k", dir)
	defer s.kubectl("delete", "validatingadmissionpolicybindings,validatingadmissionpolicies", "-l", "app.kubernetes.io/name=gpuslice")
	defer s.kubectl("delete", "node", "apart")
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
