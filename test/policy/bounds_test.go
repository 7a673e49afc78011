package policy_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/config"
)

// What the page says of bounds that are not the policies'.

// A pod without a projected token gets one that the API server lets live for a year.
func TestTheAgentsTokenLivesForAnHour(t *testing.T) {
	s := newScene(t)
	s.apply()
	s.fill()
	set, err := s.admin.AppsV1().DaemonSets("gpuslice").Get(t.Context(), "gpuslice-agent", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod, err := s.admin.CoreV1().Pods("gpuslice").Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "token-"}, Spec: set.Spec.Template.Spec,
	}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}) // as it is admitted
	if err != nil {
		t.Fatal(err)
	}
	tokens := 0
	for _, v := range pod.Spec.Volumes {
		if v.Projected == nil {
			continue
		}
		for _, source := range v.Projected.Sources {
			if source.ServiceAccountToken == nil {
				continue
			}
			tokens++
			given, err := s.admin.CoreV1().ServiceAccounts("gpuslice").CreateToken(t.Context(), "gpuslice-agent", &authenticationv1.TokenRequest{
				Spec: authenticationv1.TokenRequestSpec{
					ExpirationSeconds: source.ServiceAccountToken.ExpirationSeconds,
					BoundObjectRef:    &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: "agent"},
				},
			}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if lives := lifeOf(t, given.Status.Token); lives > time.Hour {
				t.Errorf("the token of volume %s lives for %s", v.Name, lives)
			}
		}
	}
	if tokens != 1 {
		t.Errorf("the pod has %d tokens", tokens)
	}
}

// lifeOf is how long the API server takes a token for good.
func lifeOf(t *testing.T, token string) time.Duration {
	t.Helper()
	body, err := base64.RawURLEncoding.DecodeString(strings.Split(token, ".")[1])
	if err != nil {
		t.Fatal(err)
	}
	var claims struct{ Iat, Exp int64 }
	if err := json.Unmarshal(body, &claims); err != nil {
		t.Fatal(err)
	}
	return time.Duration(claims.Exp-claims.Iat) * time.Second
}

// How many Leases a token makes, a quota bounds: those that are there can still be written.
func TestAQuotaBoundsHowManyLeasesATokenMakes(t *testing.T) {
	s := newScene(t)
	s.apply()
	s.fill()
	agent := s.tries(s.agent())
	another := func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoordinationV1().Leases("gpuslice").Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: config.LeasePrefix + "new"}}, metav1.CreateOptions{})
		return err
	}
	goes := func(what string, do func(context.Context, *scene, kubernetes.Interface) error, want bool) {
		t.Helper()
		s.until(fmt.Sprintf("%s: goes through %t", what, want), func(ctx context.Context) (bool, error) {
			no, err := denied(do(ctx, s, agent))
			return no != want, err
		})
	}
	goes("another Lease, without a quota", another, true)
	leases, err := s.admin.CoordinationV1().Leases("gpuslice").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	quotas := s.admin.CoreV1().ResourceQuotas("gpuslice")
	const counts corev1.ResourceName = "count/leases.coordination.k8s.io"
	if _, err := quotas.Create(t.Context(), &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Name: "leases"},
		Spec:       corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{counts: *resource.NewQuantity(int64(len(leases.Items)), resource.DecimalSI)}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := quotas.Delete(context.WithoutCancel(t.Context()), "leases", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	s.until("the quota to be counted", func(ctx context.Context) (bool, error) {
		q, err := quotas.Get(ctx, "leases", metav1.GetOptions{})
		return err == nil && len(q.Status.Used) > 0, err
	})
	goes("another Lease, with a quota", another, false)
	goes("slots of a pool, with a quota", lease("gpuslice-pool-research", func(l *coordinationv1.Lease) { l.Annotations = map[string]string{config.AnnotationSlots: "{}"} }), true)
}
