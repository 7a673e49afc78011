package policy_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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

// Whoever may patch nodes, Leases or ConfigMaps can put there what no agent may. The agent writes all the same: a policy judges what a write changes.
func TestWhatOthersHaveMalformedKeepsTheAgentFromWritingNothing(t *testing.T) {
	s := newScene(t)
	s.apply()
	s.fill()
	twice := `{"op":"add","path":"/status/conditions/-","value":{"type":"Drained","status":"False","reason":"Malformed","message":"malformed"}}`
	for what, do := range map[string]func(context.Context, *scene, kubernetes.Interface) error{
		"a condition that is long": status("own", `{"status":{"conditions":[{"type":"DrainInProgress","status":"`+long+`","reason":"`+long+`","message":"`+long+`"}]}}`),
		"conditions":               patchNode("own", types.JSONPatchType, "["+strings.Repeat(twice+",", 299)+twice+"]", "status"),
		"an annotation": node("own", `{"metadata":{"annotations":{"gpuslice.io/plan":"`+long+long+`"},"labels":{"labels":"a","key":"a","value":"a","effect":"a"`+
			manyLabels(70)+`}}}`),
		"keys": configMap("gpu-operator", "device-plugin-config", `{"data":{`+numberedKeys(20, strings.Repeat("a", 5000))+`}}`),
		"a holder": lease("gpuslice-pool-research", func(l *coordinationv1.Lease) {
			holder := long
			l.Spec.HolderIdentity = &holder
		}),
	} {
		if err := do(t.Context(), s, s.admin); err != nil {
			t.Fatalf("malforming %s: %v", what, err)
		}
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		for _, err := range []error{
			s.forgetConditions(ctx, "Drained", "DrainInProgress"),
			node("own", `{"metadata":{"annotations":{"gpuslice.io/plan":null},"labels":{"labels":null,"key":null,"value":null,"effect":null`+
				strings.ReplaceAll(manyLabels(70), `"true"`, "null")+`}}}`)(ctx, s, s.admin),
			s.admin.CoreV1().ConfigMaps("gpu-operator").Delete(ctx, "device-plugin-config", metav1.DeleteOptions{}),
			lease("gpuslice-pool-research", func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = nil })(ctx, s, s.admin),
		} {
			if err != nil {
				t.Error(err)
			}
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
	goes("a label that is not the agent's", node("own", `{"metadata":{"labels":{"team":"a"}}}`), false) // the policies act
	for what, do := range map[string]func(context.Context, *scene, kubernetes.Interface) error{
		"its condition":        condition("own", "GPUPartitionReady"),
		"the fence":            node("own", `{"metadata":{"annotations":{"gpuslice.io/journal":"{}"}},"spec":{"unschedulable":true}}`),
		"a condition, mended":  status("own", `{"status":{"conditions":[{"type":"DrainInProgress","status":"False","reason":"NoDrain","message":""}]}}`),
		"a profile's keys":     node("own", `{"metadata":{"annotations":{"gpuslice.io/published":"{\"labels\":{\"squad\":\"a\"},\"taints\":[{\"key\":\"squad\",\"value\":\"a\",\"effect\":\"NoSchedule\"}]}"},"labels":{"squad":"a"}}}`),
		"its plan, taken away": node("own", `{"metadata":{"annotations":{"gpuslice.io/plan":null}}}`),
		"keys, taken away":     configMap("gpu-operator", "device-plugin-config", `{"data":{"gpuslice-UID-k0":null,"gpuslice-UID-k1":"short"}}`),
		"its slot": lease("gpuslice-pool-research", func(l *coordinationv1.Lease) {
			l.Annotations = map[string]string{config.AnnotationSlots: "{}"}
		}),
	} {
		goes(what, do, true)
	}
	for what, do := range map[string]func(context.Context, *scene, kubernetes.Interface) error{
		"another condition twice":   patchNode("own", types.JSONPatchType, "["+twice+"]", "status"),
		"another message as long":   status("own", `{"status":{"conditions":[{"type":"DrainInProgress","status":"False","reason":"NoDrain","message":"`+long+`b"}]}}`),
		"another plan as long":      node("own", `{"metadata":{"annotations":{"gpuslice.io/plan":"`+long+long+`b"}}}`),
		"a user's label, as noted":  node("own", `{"metadata":{"annotations":{"gpuslice.io/published":"{\"labels\":{\"labels\":\"b\"}}"},"labels":{"labels":"b"}}}`),
		"one more key":              configMap("gpu-operator", "device-plugin-config", `{"data":{"gpuslice-UID-more":"a"}}`),
		"a key that is longer":      configMap("gpu-operator", "device-plugin-config", `{"data":{"gpuslice-UID-k0":"`+strings.Repeat("a", 5001)+`"}}`),
		"another holder as long":    lease("gpuslice-pool-research", func(l *coordinationv1.Lease) { *l.Spec.HolderIdentity += "b" }),
		"one more label of operand": node("own", `{"metadata":{"labels":{"nvidia.com/gpu.deploy.more":"true"}}}`),
	} {
		goes(what, do, false)
	}
}

// forgetConditions takes conditions from node own, however often they are there.
func (s *scene) forgetConditions(ctx context.Context, kinds ...corev1.NodeConditionType) error {
	own, err := s.admin.CoreV1().Nodes().Get(ctx, "own", metav1.GetOptions{})
	if err != nil {
		return err
	}
	own.Status.Conditions = slices.DeleteFunc(own.Status.Conditions, func(c corev1.NodeCondition) bool { return slices.Contains(kinds, c.Type) })
	_, err = s.admin.CoreV1().Nodes().UpdateStatus(ctx, own, metav1.UpdateOptions{})
	return err
}

// numberedKeys are so many keys of node own.
func numberedKeys(n int, value string) string {
	var keys []string
	for i := range n {
		keys = append(keys, fmt.Sprintf("%q:%q", fmt.Sprintf("gpuslice-UID-k%d", i), value))
	}
	return strings.Join(keys, ",")
}
