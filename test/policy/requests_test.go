package policy_test

import (
	"context"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// Two users may patch nodes. One has the right to assign the profile research and the config all-1g.10gb besides, the other no such right.
func TestWhoMayAskForWhatIsSaidByRBAC(t *testing.T) {
	s := newScene(t)
	const assigns, patches = "anna", "bert"
	s.mayPatchNodes(assigns, rbacv1.PolicyRule{
		APIGroups: []string{"gpuslice.io"}, Resources: []string{"profiles"}, ResourceNames: []string{"research", "all-1g.10gb"}, Verbs: []string{"assign"},
	})
	s.mayPatchNodes(patches)
	s.apply("assign-by-right")
	s.fill()
	// Each starts with what the administrator has put on the node, and changes nothing.
	request := func(label, value string) string {
		if value != "null" {
			value = `"` + value + `"`
		}
		return `{"metadata":{"labels":{"` + label + `":` + value + `}}}`
	}
	const profile, mig, plugin = "gpuslice.io/profile", "nvidia.com/mig.config", "nvidia.com/device-plugin.config"
	clients := map[string]kubernetes.Interface{"admin": s.tries(s.cluster.Config()), "agent": s.tries(s.agent())}
	for _, user := range []string{assigns, patches} {
		c, err := s.cluster.ConfigFor(user)
		if err != nil {
			t.Fatal(err)
		}
		clients[user] = s.tries(c)
	}
	ask := func(ctx context.Context, who, body string, sub ...string) error {
		_, err := clients[who].CoreV1().Nodes().Patch(ctx, "own", types.MergePatchType, []byte(body), metav1.PatchOptions{}, sub...)
		return err
	}
	s.until("the policy", func(ctx context.Context) (bool, error) {
		err := ask(ctx, patches, request(profile, "research"))
		return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "ValidatingAdmissionPolicy"), ignoring(err, apierrors.IsForbidden)
	})
	for _, c := range []struct {
		has       string // body of the administrator's patch before
		who, asks string
		sub       string
		refused   string // what the refusal names; empty if it goes through
	}{
		{request(profile, "null"), assigns, request(profile, "research"), "", ""},
		{request(profile, "null"), assigns, request(mig, "all-1g.10gb"), "", ""},
		{request(profile, "null"), assigns, request(profile, "production"), "", "profiles.gpuslice.io: production"},
		{request(profile, "null"), assigns, request(mig, "all-disabled"), "", "all-disabled"},
		{request(profile, "null"), assigns, request(plugin, "shared"), "", "nvidia.com/device-plugin.config"},
		{request(profile, "null"), assigns, request(profile, "production"), "status", "production"},
		{request(profile, "null"), assigns, `{"metadata":{"labels":{"team":"finance"}}}`, "", ""},
		{request(profile, "null"), patches, request(profile, "research"), "", "research"},
		{request(profile, "null"), patches, request(mig, "all-1g.10gb"), "", "all-1g.10gb"},
		{request(profile, "null"), patches, `{"metadata":{"labels":{"team":"finance"}}}`, "", ""},
		{request(profile, "null"), "admin", request(profile, "production"), "", ""},
		{request(profile, "null"), "agent", request(plugin, "gpuslice-1"), "", ""},
		// What a node has is taken away by those alone who could give it.
		{`{"metadata":{"labels":{"nvidia.com/mig.config":"all-disabled","gpuslice.io/profile":null}}}`, assigns, request(profile, "research"), "", "all-disabled"},
		{request(mig, "null"), assigns, request(profile, "research"), "", ""},
		{request(profile, "production"), assigns, request(profile, "research"), "", "production, research"},
		{request(profile, "production"), assigns, request(profile, "null"), "", "production"},
		{request(profile, "production"), assigns, `{"metadata":{"labels":{"team":"finance"}}}`, "", ""},
		{request(profile, "research"), assigns, request(profile, "null"), "", ""},
		{request(profile, "research"), patches, request(profile, "null"), "", "research"},
		{request(profile, "production"), "admin", request(profile, "null"), "", ""},
	} {
		if _, err := s.admin.CoreV1().Nodes().Patch(t.Context(), "own", types.MergePatchType, []byte(c.has), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		var sub []string
		if c.sub != "" {
			sub = []string{c.sub}
		}
		err := ask(t.Context(), c.who, c.asks, sub...)
		if c.refused == "" && err != nil || c.refused != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), c.refused)) {
			t.Errorf("%s on a node with %s: %s %s: error %v, want %q", c.who, c.has, c.asks, c.sub, err, c.refused)
		}
	}
}

// mayPatchNodes gives a user that right, and more.
func (s *scene) mayPatchNodes(user string, more ...rbacv1.PolicyRule) {
	s.t.Helper()
	name := metav1.ObjectMeta{Name: "test-" + user}
	rules := append([]rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"nodes", "nodes/status"}, Verbs: []string{"get", "patch"}}}, more...)
	if _, err := s.admin.RbacV1().ClusterRoles().Create(s.t.Context(), &rbacv1.ClusterRole{ObjectMeta: name, Rules: rules}, metav1.CreateOptions{}); err != nil {
		s.t.Fatal(err)
	}
	if _, err := s.admin.RbacV1().ClusterRoleBindings().Create(s.t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: name, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: user}},
	}, metav1.CreateOptions{}); err != nil {
		s.t.Fatal(err)
	}
}
