package policy_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/access"
	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/impersonate"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/kustomize"
)

var update = flag.Bool("update", false, "write the table of attempts into deploy/ATTEMPTS.md, and its sums into deploy/SECURITY.md")

// verdict is what becomes of an attempt: whether it goes through with RBAC alone, with the policies, and with them where the agent asks about
// pods in the name of its node.
type verdict struct{ rbac, policies, asNode bool }

var (
	never  = verdict{false, false, false} // RBAC denies it, or what a write means
	closed = verdict{true, false, false}  // the policies do
	others = verdict{true, true, false}   // the API server does, where the agent asks in the name of its node
	open   = verdict{true, true, true}    // nothing does
)

// attempt is one request by which the holder of an agent's token may try to do what the agent does not.
type attempt struct {
	what string
	want verdict
	do   func(context.Context, *scene, kubernetes.Interface) error
}

func patchNode(name string, kind types.PatchType, body string, sub ...string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().Nodes().Patch(ctx, name, kind, []byte(body), metav1.PatchOptions{}, sub...)
		return err
	}
}

func node(name, body string) func(context.Context, *scene, kubernetes.Interface) error {
	return patchNode(name, types.MergePatchType, body)
}

func status(name, body string) func(context.Context, *scene, kubernetes.Interface) error {
	return patchNode(name, types.StrategicMergePatchType, body, "status")
}

// taint adds one to a node, and leaves the others.
func taint(name, key, effect string) func(context.Context, *scene, kubernetes.Interface) error {
	return patchNode(name, types.JSONPatchType, fmt.Sprintf(`[{"op":"add","path":"/spec/taints/-","value":{"key":%q,"effect":%q}}]`, key, effect))
}

// retaint changes the taints that a node has. Without a kubelet it gets some of the node lifecycle controller's after a while, which no agent may take away.
func retaint(name string, change func([]corev1.Taint) []corev1.Taint) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, s *scene, c kubernetes.Interface) error {
		n, err := s.admin.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		patch, err := json.Marshal(map[string]any{"spec": map[string]any{"taints": change(n.Spec.Taints)}})
		if err != nil {
			return err
		}
		return node(name, string(patch))(ctx, s, c)
	}
}

// without takes the taints of a key away.
func without(key string) func([]corev1.Taint) []corev1.Taint {
	return func(taints []corev1.Taint) []corev1.Taint {
		return slices.DeleteFunc(taints, func(t corev1.Taint) bool { return t.Key == key })
	}
}

// apply is a server-side apply, by which the API server makes what is not there.
func apply(name, body string, sub ...string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		force := true
		_, err := c.CoreV1().Nodes().Patch(ctx, name, types.ApplyPatchType, []byte(body), metav1.PatchOptions{FieldManager: "mallory", Force: &force}, sub...)
		return err
	}
}

func patchPod(body string, sub ...string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().Pods("team").Patch(ctx, "app-own", types.StrategicMergePatchType, []byte(body), metav1.PatchOptions{}, sub...)
		return err
	}
}

func condition(name, kind string) func(context.Context, *scene, kubernetes.Interface) error {
	return status(name, fmt.Sprintf(`{"status":{"conditions":[{"type":%q,"status":"False","reason":"Forged","message":"forged"}]}}`, kind))
}

const forgedOwner = `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"none","uid":"none"}]}}`

// evictWith asks for an eviction of a pod by its UID, with more options.
func evictWith(namespace, name, version string, o metav1.DeleteOptions) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, s *scene, c kubernetes.Interface) error {
		uid := types.UID(s.uids[name])
		o.Preconditions = &metav1.Preconditions{UID: &uid}
		body, err := json.Marshal(policyv1.Eviction{
			TypeMeta:   metav1.TypeMeta{APIVersion: version, Kind: "Eviction"},
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, DeleteOptions: &o,
		})
		if err != nil {
			return err
		}
		return c.CoreV1().RESTClient().Post().Namespace(namespace).Resource("pods").Name(name).SubResource("eviction").
			SetHeader("Content-Type", "application/json").Body(body).Do(ctx).Error()
	}
}

// evict asks for an eviction with the UID of a pod, or with none.
func evict(namespace, name, uidOf string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, s *scene, c kubernetes.Interface) error {
		eviction := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
		if name == "" {
			eviction.Name = s.plugin
		}
		if uidOf == "its" {
			uidOf = eviction.Name
		}
		if uid := types.UID(s.uids[uidOf]); uid != "" {
			eviction.DeleteOptions = &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}
		}
		return c.CoreV1().Pods(namespace).EvictV1(ctx, eviction)
	}
}

func remove(namespace, name string, uid bool, grace int64) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, s *scene, c kubernetes.Interface) error {
		o := metav1.DeleteOptions{GracePeriodSeconds: &grace, DryRun: []string{metav1.DryRunAll}} // a body takes the place of the query
		if uid {
			u := types.UID(s.uids[name])
			o.Preconditions = &metav1.Preconditions{UID: &u}
		}
		return c.CoreV1().Pods(namespace).Delete(ctx, name, o)
	}
}

// ownKey begins, in the texts of the attempts, the keys of the agent of node own, which have the UID that the API server has given to the node.
const ownKey = "gpuslice-UID-"

func configMap(namespace, name, body string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, s *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().ConfigMaps(namespace).Patch(ctx, name, types.MergePatchType, []byte(s.keyed(body)), metav1.PatchOptions{})
		return err
	}
}

// managed patches who is said to have written the device plugin's ConfigMap.
func managed(change func([]metav1.ManagedFieldsEntry) []metav1.ManagedFieldsEntry) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, s *scene, c kubernetes.Interface) error {
		m, err := c.CoreV1().ConfigMaps("gpu-operator").Get(ctx, "device-plugin-config", metav1.GetOptions{})
		if err != nil {
			return err
		}
		body, err := json.Marshal(map[string]any{"metadata": map[string]any{"managedFields": change(m.ManagedFields)}})
		if err != nil {
			return err
		}
		return configMap(m.Namespace, m.Name, string(body))(ctx, s, c)
	}
}

func entry(manager string, operation metav1.ManagedFieldsOperationType, version, fields string) metav1.ManagedFieldsEntry {
	return metav1.ManagedFieldsEntry{
		Manager: manager, Operation: operation, APIVersion: version, FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(fields),
		Time: &metav1.Time{Time: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)},
	}
}

// addEntry says that a manager has fields of the ConfigMap.
func addEntry(manager string, operation metav1.ManagedFieldsOperationType, fields string) func(context.Context, *scene, kubernetes.Interface) error {
	return managed(func(all []metav1.ManagedFieldsEntry) []metav1.ManagedFieldsEntry {
		return append(all, entry(manager, operation, "v1", fields))
	})
}

// argocdHas says that who applied the ConfigMap has these fields, and changes nothing else of that entry.
func argocdHas(fields string) func(context.Context, *scene, kubernetes.Interface) error {
	return managed(func(all []metav1.ManagedFieldsEntry) []metav1.ManagedFieldsEntry {
		for i := range all {
			if all[i].Manager == "argocd" {
				all[i].FieldsV1 = metav1.NewFieldsV1(fields)
			}
		}
		return all
	})
}

func forgetEntry(manager string) func(context.Context, *scene, kubernetes.Interface) error {
	return managed(func(all []metav1.ManagedFieldsEntry) []metav1.ManagedFieldsEntry {
		return slices.DeleteFunc(all, func(e metav1.ManagedFieldsEntry) bool { return e.Manager == manager })
	})
}

func applyConfigMap(manager, data string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().ConfigMaps("gpu-operator").Patch(ctx, "device-plugin-config", types.ApplyPatchType,
			[]byte(`{"apiVersion":"v1","kind":"ConfigMap","data":`+data+`}`), metav1.PatchOptions{FieldManager: manager})
		return err
	}
}

// lease updates one that is there.
func lease(name string, change func(*coordinationv1.Lease)) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		l, err := c.CoordinationV1().Leases("gpuslice").Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		change(l)
		_, err = c.CoordinationV1().Leases("gpuslice").Update(ctx, l, metav1.UpdateOptions{})
		return err
	}
}

// deleteLease deletes one that is there, if that goes through.
func deleteLease(name string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		return c.CoordinationV1().Leases("gpuslice").Delete(ctx, name, metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
	}
}

// event creates one about an object, by a component of a node.
func event(namespace, kind, name, component, host string, changes ...func(*corev1.Event)) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		e := &corev1.Event{
			ObjectMeta:     metav1.ObjectMeta{GenerateName: "forged-", Namespace: namespace},
			InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: kind, Name: name, Namespace: strings.TrimPrefix(namespace, "default")},
			Reason:         "Forged", Message: "forged", Type: corev1.EventTypeNormal,
			Source: corev1.EventSource{Component: component, Host: host}, ReportingController: component, ReportingInstance: host,
		}
		for _, change := range changes {
			change(e)
		}
		_, err := c.CoreV1().Events(namespace).Create(ctx, e, metav1.CreateOptions{})
		return err
	}
}

func patchEvent(name, body string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().Events("default").Patch(ctx, name, types.MergePatchType, []byte(body), metav1.PatchOptions{})
		return err
	}
}

// as makes an attempt in the name of another user.
func as(user string, groups []string, do func(context.Context, *scene, kubernetes.Interface) error) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, s *scene, _ kubernetes.Interface) error {
		return do(ctx, s, s.tries(inTheNameOf(s.token, user, groups...)))
	}
}

func readPod(namespace, name string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
		return err
	}
}

func readPodsOf(node string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
		return err
	}
}

func readSecret(ctx context.Context, _ *scene, c kubernetes.Interface) error {
	_, err := c.CoreV1().Secrets("gpuslice").Get(ctx, "pull", metav1.GetOptions{})
	return err
}

func readClaim(namespace, name string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.ResourceV1().ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
		return err
	}
}

func readSlices(selector string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: selector})
		return err
	}
}

// long is a text of 100,000 characters.
var long = strings.Repeat("a", 100_000)

// manyLabels are so many more of an object.
func manyLabels(n int) string {
	var text strings.Builder
	for i := range n {
		fmt.Fprintf(&text, `,"nvidia.com/gpu.deploy.%d":"true"`, i+1)
	}
	return text.String()
}

// attempts are what the token of the agent on node own is tried for. The agent itself needs none of them.
var attempts = []attempt{
	{"other node: cordon it", closed, node("other", `{"spec":{"unschedulable":true}}`)},
	{"other node: taint it NoExecute, which ends its pods", closed, taint("other", "node.kubernetes.io/not-ready", "NoExecute")},
	{"other node: remove its taints", closed, node("other", `{"spec":{"taints":null}}`)},
	{"other node: ask for another geometry by its label", closed, node("other", `{"metadata":{"labels":{"nvidia.com/mig.config":"all-disabled"}}}`)},
	{"other node: write its journal", closed, node("other", `{"metadata":{"annotations":{"gpuslice.io/journal":"{}"}}}`)},
	{"other node: give it an owner that is not there, so that it is deleted", closed, node("other", forgedOwner)},
	{"other node: give it a finalizer", closed, node("other", `{"metadata":{"finalizers":["example.com/kept"]}}`)},
	{"other node: delete it", never, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		return c.CoreV1().Nodes().Delete(ctx, "other", metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
	}},
	{"other node: say that it is not Ready, which evicts its pods", closed, condition("other", "Ready")},
	{"other node: write our own condition", closed, condition("other", "GPUPartitionReady")},
	{"other node: redirect kubelet's address", closed, status("other", `{"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.66"}]}}`)},
	{"other node: offer 99 GPUs", closed, status("other", `{"status":{"capacity":{"nvidia.com/gpu":"99"},"allocatable":{"nvidia.com/gpu":"99"}}}`)},
	{"own node: a role", closed, node("own", `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`)},
	{"own node: a restricted label", closed, node("own", `{"metadata":{"labels":{"node-restriction.kubernetes.io/tier":"secret"}}}`)},
	{"own node: a restricted label through its status", closed, status("own", `{"metadata":{"labels":{"node-restriction.kubernetes.io/tier":"secret"}}}`)},
	{"own node: another zone", closed, node("own", `{"metadata":{"labels":{"topology.kubernetes.io/zone":"b"}}}`)},
	{"own node: a label that no profile of the node has", closed, node("own", `{"metadata":{"labels":{"team":"finance"}}}`)},
	{"own node: change a user's label, noted as published in the same write", closed, node("own",
		`{"metadata":{"labels":{"team":"finance"},"annotations":{"gpuslice.io/published":"{\"labels\":{\"team\":\"finance\"}}"}}}`)},
	{"own node: note a user's label as published, to change it by the next write", closed, node("own",
		`{"metadata":{"annotations":{"gpuslice.io/published":"{\"labels\":{\"team\":\"research\"}}"}}}`)},
	{"own node: remove a user's taint, noted as published in the same write", closed, func(ctx context.Context, s *scene, c kubernetes.Interface) error {
		n, err := s.admin.CoreV1().Nodes().Get(ctx, "own", metav1.GetOptions{})
		if err != nil {
			return err
		}
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"annotations": map[string]string{config.AnnotationPublished: `{"taints":[{"key":"dedicated"}]}`}},
			"spec":     map[string]any{"taints": without("dedicated")(n.Spec.Taints)},
		})
		if err != nil {
			return err
		}
		return node("own", string(patch))(ctx, s, c)
	}},
	{"own node: an annotation of its own of 200,000 characters", closed, node("own", `{"metadata":{"annotations":{"gpuslice.io/plan":"`+long+long+`"}}}`)},
	{"own node: our own condition with a message of 100,000 characters", closed, status("own",
		`{"status":{"conditions":[{"type":"GPUPartitionReady","status":"False","reason":"Forged","message":"`+long+`"}]}}`)},
	{"own node: our own condition with a status of 100,000 characters", closed, status("own",
		`{"status":{"conditions":[{"type":"GPUPartitionReady","status":"`+long+`","reason":"Forged","message":"forged"}]}}`)},
	{"own node: our own condition 300 times", closed, patchNode("own", types.JSONPatchType,
		`[`+strings.Repeat(`{"op":"add","path":"/status/conditions/-","value":{"type":"GPUPartitionReady","status":"False","reason":"Forged","message":"forged"}},`, 299)+
			`{"op":"add","path":"/status/conditions/-","value":{"type":"GPUPartitionReady","status":"False","reason":"Forged","message":"forged"}}]`, "status")},
	{"own node: 300 labels of operands", closed, node("own", `{"metadata":{"labels":{"nvidia.com/gpu.deploy.0":"true"`+manyLabels(300)+`}}}`)},
	{"own node: ask for another geometry", closed, node("own", `{"metadata":{"labels":{"nvidia.com/mig.config":"all-disabled"}}}`)},
	{"own node: an annotation of another tool", closed, node("own", `{"metadata":{"annotations":{"csi.volume.kubernetes.io/nodeid":"{}"}}}`)},
	{"own node: an annotation for autoscalers with another value", closed, node("own", `{"metadata":{"annotations":{"karpenter.sh/do-not-disrupt":"false"}}}`)},
	{"own node: a reason for Slurm that is not its own", closed, node("own", `{"metadata":{"annotations":{"nodeset.slinky.slurm.net/node-cordon-reason":"disk 3"}}}`)},
	{"own node: force a change outside of its window", closed, node("own", `{"metadata":{"annotations":{"gpuslice.io/force":"other"}}}`)},
	{"own node: let a change evict what the settings refuse", closed, node("own", `{"metadata":{"annotations":{"gpuslice.io/allow-eviction":"nvidia.com/mig.config=a emptyDir"}}}`)},
	{"own node: remove the taint of the control plane", closed, retaint("own", without("node-role.kubernetes.io/control-plane"))},
	{"own node: remove a user's taint", closed, retaint("own", without("dedicated"))},
	{"own node: taint it node.kubernetes.io/not-ready:NoExecute", closed, taint("own", "node.kubernetes.io/not-ready", "NoExecute")},
	{"own node: taint it out of service", closed, taint("own", "node.kubernetes.io/out-of-service", "NoExecute")},
	{"own node: our own taint as NoExecute", closed, taint("own", "gpuslice.io/repartitioning", "NoExecute")},
	{"own node: the taint of a GPU that is not well, as NoExecute", closed, taint("own", "gpuslice.io/gpu-unhealthy", "NoExecute")},
	{"own node: the taint of a GPU that is not well, as another program's", closed, taint("own", "gpuslice.io/gpu-unhealthy", "NoSchedule")},
	{"own node: give it an owner that is not there, so that it is deleted", closed, node("own", forgedOwner)},
	{"own node: give it a finalizer", closed, node("own", `{"metadata":{"finalizers":["example.com/kept"]}}`)},
	{"own node: say that it is not Ready", closed, condition("own", "Ready")},
	{"own node: a condition of others", closed, condition("own", "DiskPressure")},
	{"own node: redirect kubelet's address", closed, status("own", `{"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.66"}]}}`)},
	{"own node: redirect kubelet's port", closed, status("own", `{"status":{"daemonEndpoints":{"kubeletEndpoint":{"Port":10666}}}}`)},
	{"own node: another kubelet version", closed, status("own", `{"status":{"nodeInfo":{"kubeletVersion":"v0.1.0"}}}`)},
	{"own node: runtime handlers", closed, status("own", `{"status":{"runtimeHandlers":[{"name":"forged"}]}}`)},
	{"own node: features", closed, status("own", `{"status":{"features":{"supplementalGroupsPolicy":true}}}`)},
	{"own node: volumes attached", closed, status("own", `{"status":{"volumesAttached":[{"name":"v","devicePath":"/dev/null"}]}}`)},
	{"own node: images", closed, status("own", `{"status":{"images":[{"names":["forged"]}]}}`)},
	{"own node: offer 99 GPUs", closed, status("own", `{"status":{"capacity":{"nvidia.com/gpu":"99"},"allocatable":{"nvidia.com/gpu":"99"}}}`)},
	{"own node: remove GPUs that are there", closed, status("own", `{"status":{"capacity":{"nvidia.com/gpu":null}}}`)},
	{"own node: kubelet's proxy", never, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		return c.CoreV1().RESTClient().Get().AbsPath("/api/v1/nodes/own/proxy/pods").Do(ctx).Error()
	}},

	{"pod of another node: evict it", closed, evict("team", "app-other", "its")},
	{"pod of another node: evict it by the UID of one of its own", never, evict("team", "app-other", "app-own")},
	{"pod of another node: delete it", closed, remove("team", "app-other", true, 30)},
	{"pod of no node: evict it", closed, evict("team", "app-waits", "its")},
	{"pod of its own node: evict it without its UID", closed, evict("team", "app-own", "")},
	{"pod of its own node: delete it without its UID", closed, remove("team", "app-own", false, 30)},
	{"pod of its own node: delete it at once", closed, remove("team", "app-own", true, 0)},
	{"pod of its own node: evict it at once", closed, evictWith("team", "app-own", "policy/v1", metav1.DeleteOptions{GracePeriodSeconds: new(int64)})},
	{"pod of its own node: evict it at once, by policy/v1beta1", closed, evictWith("team", "app-own", "policy/v1beta1", metav1.DeleteOptions{GracePeriodSeconds: new(int64)})},
	{"pod of its own node: evict it with a grace of a second", closed, evictWith("team", "app-own", "policy/v1", metav1.DeleteOptions{GracePeriodSeconds: new(int64(1))})},
	{"pod of its own node: evict it, and leave what it owns for good", closed, evictWith("team", "app-own", "policy/v1",
		metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationOrphan)})},
	{"pod of kube-system: evict it", closed, evict("kube-system", "dns", "its")},
	{"pod of kube-system: delete it", closed, remove("kube-system", "dns", true, 30)},
	{"pod: create a privileged one", never, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().Pods("gpuslice").Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "root"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "none"}}},
		}, metav1.CreateOptions{})
		return err
	}},
	{"pod: change a label of one", never, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().Pods("team").Patch(ctx, "app-own", types.MergePatchType, []byte(`{"metadata":{"labels":{"a":"b"}}}`), metav1.PatchOptions{})
		return err
	}},
	{"pod: run a program in one", never, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		return c.CoreV1().RESTClient().Post().Namespace("team").Resource("pods").Name("app-own").SubResource("exec").Param("command", "id").Do(ctx).Error()
	}},

	{"pod: add a container to one that runs", never, patchPod(`{"spec":{"ephemeralContainers":[{"name":"e","image":"none"}]}}`, "ephemeralcontainers")},
	{"pod: give one more CPU", never, patchPod(`{"spec":{"containers":[{"name":"c","resources":{"requests":{"cpu":"1"}}}]}}`, "resize")},
	{"pod: say that it has failed", never, patchPod(`{"status":{"phase":"Failed"}}`, "status")},
	{"other node: cordon it by server-side apply", closed, apply("other", `{"apiVersion":"v1","kind":"Node","metadata":{"name":"other"},"spec":{"unschedulable":true}}`)},
	{"own node: a role by server-side apply to its status", closed, apply("own", `{"apiVersion":"v1","kind":"Node","metadata":{"name":"own","labels":{"node-role.kubernetes.io/control-plane":""}}}`, "status")},
	{"a node that is not there: make it by server-side apply", never, apply("new", `{"apiVersion":"v1","kind":"Node","metadata":{"name":"new"}}`)},
	{"Lease: one with a name that the API server makes up", closed, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoordinationV1().Leases("gpuslice").Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{GenerateName: "leader-"}}, metav1.CreateOptions{})
		return err
	}},
	{"Lease: one that is no pool's", closed, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoordinationV1().Leases("gpuslice").Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "leader"}}, metav1.CreateOptions{})
		return err
	}},
	{"Lease of a pool: give it an owner that is not there, so that it is deleted", closed, lease("gpuslice-pool-research", func(l *coordinationv1.Lease) {
		l.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "none", UID: "none"}}
	})},
	{"Lease of a pool: end its pause", closed, lease("gpuslice-pool-paused", func(l *coordinationv1.Lease) { l.Annotations = nil })},
	{"Lease of a pool: say that others have applied the pause, which their next apply ends", closed, lease("gpuslice-pool-paused", func(l *coordinationv1.Lease) {
		l.ManagedFields = append(l.ManagedFields, entry("flux", "Apply", "coordination.k8s.io/v1", `{"f:metadata":{"f:annotations":{"f:gpuslice.io/paused":{}}}}`))
	})},
	{"Lease of a pool: say that who has applied it has applied all annotations", closed, lease("gpuslice-pool-paused", func(l *coordinationv1.Lease) {
		for i := range l.ManagedFields {
			if l.ManagedFields[i].Manager == "argocd" {
				l.ManagedFields[i].FieldsV1 = metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{}}}`)
			}
		}
	})},
	{"Lease of a pool: say that kubectl has applied the pause, which its next apply ends", closed, lease("gpuslice-pool-paused", func(l *coordinationv1.Lease) {
		l.Annotations[corev1.LastAppliedConfigAnnotation] = `{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"annotations":{"gpuslice.io/paused":""}}}`
	})},
	{"Lease of a pool: another one, with an annotation that is not the agents'", closed, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoordinationV1().Leases("gpuslice").Create(ctx, &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: "gpuslice-pool-new", Annotations: map[string]string{"example.com/any": long}},
		}, metav1.CreateOptions{})
		return err
	}},
	{"Lease of a pool: a pause of 100,000 characters", closed, lease("gpuslice-pool-research", func(l *coordinationv1.Lease) {
		l.Annotations = map[string]string{"gpuslice.io/paused": long}
	})},
	{"Lease of a pool: holders of 100,000 characters", closed, lease("gpuslice-pool-research", func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = new(long) })},
	{"Lease of a pool: another one, for a holder of 100,000 characters", closed, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoordinationV1().Leases("gpuslice").Create(ctx, &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: "gpuslice-pool-new"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: new(long)},
		}, metav1.CreateOptions{})
		return err
	}},
	{"Lease of a pool: delete it though a node has a slot", closed, deleteLease("gpuslice-pool-held")},
	{"Lease of a pool: delete it though a node waits", closed, deleteLease("gpuslice-pool-waits")},
	{"Lease of a pool: delete it with its failures", closed, deleteLease("gpuslice-pool-failed")},
	{"Lease of a pool: delete it with its pause", closed, deleteLease("gpuslice-pool-paused-empty")},
	{"Lease of a pool: delete one that people have labelled", closed, deleteLease("gpuslice-pool-labelled")},
	{"Lease of a pool: delete one without slots, which people have made", closed, deleteLease("gpuslice-pool-made")},
	{"Lease: delete one that is no pool's", closed, deleteLease("others")},
	{"Lease of a pool: delete all", never, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		return c.CoordinationV1().Leases("gpuslice").DeleteCollection(ctx, metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}, metav1.ListOptions{})
	}},
	{"Lease of another node's kubelet", never, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoordinationV1().Leases("kube-node-lease").Patch(ctx, "other", types.MergePatchType, []byte(`{}`), metav1.PatchOptions{})
		return err
	}},

	{"ConfigMap of the device plugin: a user's key", closed, configMap("gpu-operator", "device-plugin-config", `{"data":{"any":"forged"}}`)},
	{"ConfigMap of the device plugin: remove a user's key", closed, configMap("gpu-operator", "device-plugin-config", `{"data":{"any":null}}`)},
	{"ConfigMap of the device plugin: a binary key", closed, configMap("gpu-operator", "device-plugin-config", `{"binaryData":{"any2":"AAAA"}}`)},
	{"ConfigMap of the device plugin: make it immutable", closed, configMap("gpu-operator", "device-plugin-config", `{"immutable":true}`)},
	{"ConfigMap of the device plugin: give it an owner that is not there, so that it is deleted", closed, configMap("gpu-operator", "device-plugin-config", forgedOwner)},
	{
		"ConfigMap of the device plugin: say that others have applied a user's key, which their next apply removes", closed,
		addEntry("flux", "Apply", `{"f:data":{"f:any":{}}}`),
	},
	{"ConfigMap of the device plugin: say that another has written a user's key", closed, addEntry("another", "Update", `{"f:data":{"f:any":{}}}`)},
	{
		"ConfigMap of the device plugin: say that who has applied it has applied a user's key", closed,
		argocdHas(`{"f:data":{"f:any":{},"f:shared":{},"f:gpuslice-UID-7a8b9c":{}}}`),
	},
	{"ConfigMap of the device plugin: say that who has applied it has applied all data", closed, argocdHas(`{"f:data":{}}`)},
	{"ConfigMap of the device plugin: say that who has applied it has no key of theirs", closed, argocdHas(`{"f:data":{"f:gpuslice-UID-7a8b9c":{}}}`)},
	{"ConfigMap of the device plugin: say that users have written nothing", closed, forgetEntry("kubectl-client-side-apply")},
	{"ConfigMap of the device plugin: say that no one has written anything", closed, configMap("gpu-operator", "device-plugin-config", `{"metadata":{"managedFields":[{}]}}`)},
	{
		"ConfigMap of the device plugin: keys that are not there as its own, which fill its managedFields", closed,
		addEntry(config.FieldManager, "Apply", `{"f:data":{"f:gpuslice-none":{}}}`),
	},
	{"ConfigMap of the device plugin: a user's key as its own, so that theirs is a conflict", closed, addEntry(config.FieldManager, "Update", `{"f:data":{"f:any":{}}}`)},
	{"ConfigMap of the device plugin: apply a user's key unchanged", closed, applyConfigMap("flux", `{"any":"version: v1"}`)},
	{"ConfigMap of the device plugin: another config under a key that another node uses", closed, configMap("gpu-operator", "device-plugin-config", `{"data":{"gpuslice-1a2b3c":"forged"}}`)},
	{"ConfigMap of the device plugin: remove a key that another node uses", closed, configMap("gpu-operator", "device-plugin-config", `{"data":{"gpuslice-1a2b3c":null}}`)},
	{"ConfigMap of the device plugin: a key of its own node of 100 KiB", closed, configMap("gpu-operator", "device-plugin-config", `{"data":{"gpuslice-UID-1a2b3c":"`+long+`"}}`)},
	{"ConfigMap of the device plugin: two keys of its own node of 40 KB each", closed, configMap("gpu-operator", "device-plugin-config",
		`{"data":{"gpuslice-UID-1a2b3c":"`+long[:40_000]+`","gpuslice-UID-4d5e6f":"`+long[:40_000]+`"}}`)},
	{"ConfigMap: a script that the operator's privileged pods run", never, configMap("gpu-operator", "nvidia-device-plugin-entrypoint", `{"data":{"entrypoint.sh":"id"}}`)},
	{"ConfigMap: the agents' own settings", never, configMap("gpuslice", "gpuslice-settings", `{"data":{"settings.yaml":"forged"}}`)},

	{"Secret: read one of the agents' namespace", never, readSecret},
	{"Secret: read one in the name of its node", never, as("system:node:own", nil, readSecret)},
	{"Secret: list all of the cluster", never, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().Secrets("").List(ctx, metav1.ListOptions{})
		return err
	}},
	{"token: request one of its account, or another", never, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().ServiceAccounts("gpuslice").CreateToken(ctx, "gpuslice-agent", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
		return err
	}},

	{"in the name of its node: cordon it", never, as("system:node:own", nil, node("own", `{"spec":{"unschedulable":true}}`))},
	{"in the name of its node: give it a label", never, as("system:node:own", nil, node("own", `{"metadata":{"labels":{"team":"finance"}}}`))},
	{"in the name of its node: make a pod", never, as("system:node:own", nil, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().Pods("team").Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "mirror", Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "a"}},
			Spec:       corev1.PodSpec{NodeName: "own", Containers: []corev1.Container{{Name: "c", Image: "none"}}},
		}, metav1.CreateOptions{})
		return err
	})},
	{"in the name of its node: a token of a pod's account", never, as("system:node:own", nil, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().ServiceAccounts("team").CreateToken(ctx, "default", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
		return err
	})},
	{"in the name of its node, as an administrator: read its pods", never, as("system:node:own", []string{"system:masters"}, readPodsOf("own"))},
	{"pods of another node: read them in its name", never, as("system:node:other", nil, readPodsOf("other"))},
	{"pod of another node: evict it in the name of that node", never, as("system:node:other", nil, evict("team", "app-other", "its"))},
	{"all pods of the cluster: read them as an administrator", never, as("admin", []string{"system:masters"}, readPodsOf(""))},

	{"DeviceTaintRule: under a name of another node's agent", never, makesRule(func(r *rule) { r.Name = "gpuslice-another-uid-gpu-0-repartitioning" })},
	{"DeviceTaintRule: with the label by which another node's agent finds its own", never, makesRule(func(r *rule) { r.Labels["gpuslice.io/node"] = "another-uid" })},
	{"DeviceTaintRule: for a device of another node", never, makesRule(func(r *rule) { r.Spec.DeviceSelector.Pool = ptr.To("other") })},
	{"DeviceTaintRule: NoExecute, which ends pods", never, makesRule(func(r *rule) { r.Spec.Taint.Effect = resourcev1.DeviceTaintEffectNoExecute })},
	{"Event on another node", closed, event("default", "Node", "other", "gpuslice-agent", "own")},
	{"Event as kubelet", closed, event("default", "Node", "own", "kubelet", "own")},
	{"Event as the agent of another node", closed, event("default", "Node", "own", "gpuslice-agent", "other")},
	{"Event on a Secret", closed, event("team", "Secret", "any", "gpuslice-agent", "own")},
	{"Event of 100,000 characters", closed, patchEvent("by-the-agent", `{"message":"`+long+`"}`)},
	{"Event of a type of 100,000 characters", closed, patchEvent("by-the-agent", `{"type":"`+long+`"}`)},
	{"Event with a name of 100,000 characters", closed, event("default", "Node", "own", "gpuslice-agent", "own", func(e *corev1.Event) { e.Name = long })},
	{"Event of kubelet: change what it says", closed, patchEvent("by-kubelet", `{"message":"forged"}`)},
	{"Event of kubelet: take it over", closed, patchEvent("by-kubelet", `{"source":{"component":"gpuslice-agent"}}`)},

	{"all pods of the cluster: read them, with their environment", others, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
		return err
	}},
	{"pods of another node: read them", others, readPodsOf("other")},
	{"pod of another node: read it", others, readPod("team", "app-other")},
	{"pod of no node: read it", others, readPod("team", "app-waits")},
	{"claim of a pod of another node: read it", others, readClaim("team", "claim-other")},
	{"claim of a pod of no node: read it", others, readClaim("team", "claim-waits")},
	{"claim of any pod: list them", never, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.ResourceV1().ResourceClaims("").List(ctx, metav1.ListOptions{})
		return err
	}},
	{"claim of a pod of its node: allocate another device to it", never, func(ctx context.Context, s *scene, c kubernetes.Interface) error {
		claim, err := s.admin.ResourceV1().ResourceClaims("team").Get(ctx, "claim-own", metav1.GetOptions{})
		if err != nil {
			return err
		}
		_, err = c.ResourceV1().ResourceClaims("team").UpdateStatus(ctx, claim, metav1.UpdateOptions{})
		return err
	}},
	{"devices of another node: read its ResourceSlices", others, readSlices("spec.nodeName=other")},
	{"devices of all nodes: read their ResourceSlices", others, readSlices("")},
	{"devices of its node: delete its ResourceSlices", never, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		return c.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: "spec.nodeName=own"})
	}},
	{"any DaemonSet: read it, with its environment", open, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.AppsV1().DaemonSets("kube-system").Get(ctx, "plugin", metav1.GetOptions{})
		return err
	}},
	{"ConfigMaps of its own namespace: read them", open, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().ConfigMaps("gpuslice").List(ctx, metav1.ListOptions{})
		return err
	}},
	{"all nodes: read them", open, func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
		_, err := c.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		return err
	}},
	{"own node: a label or taint that was not there, outside of the protected domains, noted as published", open, node("own",
		`{"metadata":{"labels":{"tier":"finance"},"annotations":{"gpuslice.io/published":"{\"labels\":{\"tier\":\"finance\"}}"}}}`)},
	{"own node: uncordon it, whoever has cordoned it", open, node("own", `{"spec":{"unschedulable":null}}`)},
	{"own node: keep autoscalers from removing it", open, node("own", `{"metadata":{"annotations":{"cluster-autoscaler.kubernetes.io/scale-down-disabled":"true"}}}`)},
	{"own node: gpuslice.io/not-ready:NoExecute, which ends its pods", open, retaint("own", func(taints []corev1.Taint) []corev1.Taint {
		return append(without("gpuslice.io/not-ready")(taints), corev1.Taint{Key: "gpuslice.io/not-ready", Value: "forged", Effect: corev1.TaintEffectNoExecute})
	})},
	{"Lease of a pool that its node is not of: slots of other nodes, or pause it", open, lease("gpuslice-pool-research", func(l *coordinationv1.Lease) {
		l.Annotations = map[string]string{"gpuslice.io/slots": "{}", "gpuslice.io/paused": "forged"}
	})},
	{"ConfigMap of the device plugin: a key of its own node, which no other node uses", open, configMap("gpu-operator", "device-plugin-config", `{"data":{"gpuslice-UID-1a2b3c":"forged"}}`)},
	{"Event on a pod of another node", open, event("team", "Pod", "app-other", "gpuslice-agent", "own")},
}

// since has the minor version of Kubernetes in which the field of an attempt is there; before, the API server passes it over.
var since = map[string]uint{"own node: features": 31}

// claims begin the attempts that need resource.k8s.io/v1.
var claims = regexp.MustCompile("^(claim|devices) of|its resource claim|its DRA driver")

// servesClaims is the minor version of Kubernetes from which on the API server serves resource.k8s.io/v1.
const servesClaims = 34

// has reports whether this minor version of Kubernetes has what the attempt is about.
func (a attempt) has(minor uint) bool {
	return minor >= since[a.what] && (minor >= servesClaims || !claims.MatchString(a.what)) &&
		(minor >= servesTaintRules || !strings.HasPrefix(a.what, "DeviceTaintRule"))
}

// needed are what the agent does; its token must be good for it under the policies.
var needed = []attempt{
	{"fence", open, node("own", `{"metadata":{"annotations":{"gpuslice.io/journal":"{}","gpuslice.io/force":null,"karpenter.sh/do-not-disrupt":"true",`+
		`"nodeset.slinky.slurm.net/node-cordon-reason":"gpuslice: change to all-1g.10gb"}},"spec":{"unschedulable":true}}`)},
	{"taint", open, taint("own", "gpuslice.io/repartitioning", "NoSchedule")},
	{"taint of a GPU that is not well", open, patchNode("own", types.JSONPatchType,
		`[{"op":"add","path":"/spec/taints/-","value":{"key":"gpuslice.io/gpu-unhealthy","value":"critical","effect":"NoSchedule"}}]`)},
	{"startup taint", open, retaint("own", without("gpuslice.io/not-ready"))},
	{"status", open, node("own", `{"metadata":{"labels":{"nvidia.com/mig.config.state":"success"},"annotations":{"gpuslice.io/status":"{}","gpuslice.io/plan":"{}"}}}`)},
	{"operands", open, node("own", `{"metadata":{"labels":{"nvidia.com/gpu.deploy.dcgm":"paused-for-gpuslice","nvidia.com/device-plugin.config":"gpuslice-1"}}}`)},
	{"profile", open, node("own", `{"metadata":{"labels":{"pool":"large"},"annotations":{"gpuslice.io/published":"{\"labels\":{\"pool\":\"large\"}}"}}}`)},
	{"profile's taint", open, taint("own", "gpu", "NoSchedule")},
	{"condition", open, condition("own", "GPUPartitionReady")},
	{"stale resources", open, status("own", `{"status":{"capacity":{"nvidia.com/mig-1g.10gb":null},"allocatable":{"nvidia.com/mig-1g.10gb":null}}}`)},
	{"pods of its node", open, readPodsOf("own")},
	{"pod of its node", open, readPod("team", "app-own")},
	{"pod of its node: its resource claim", open, readClaim("team", "claim-own")},
	{"pods of its node: the devices that its DRA drivers offer", open, readSlices("spec.nodeName=own")},
	{"evict", open, evict("team", "app-own", "its")},
	{"evict the device plugin", open, evict("kube-system", "", "its")},
	{"delete after the deadline", open, remove("team", "app-own", true, 30)},
	{"slot", open, lease("gpuslice-pool-research", func(l *coordinationv1.Lease) { l.Annotations = map[string]string{"gpuslice.io/slots": "{}"} })},
	{"slot of a paused pool", open, lease("gpuslice-pool-paused", func(l *coordinationv1.Lease) { l.Annotations["gpuslice.io/slots"] = "{}" })},
	{"an empty Lease", open, deleteLease("gpuslice-pool-empty")},
	{"an empty Lease, of which the nodes were counted", open, deleteLease("gpuslice-pool-counted")},
	{"sharing", open, configMap("gpu-operator", "device-plugin-config", `{"data":{"gpuslice-UID-4d5e6f":"version: v1"}}`)},
	{"sharing, by a key that others have applied", open, configMap("gpu-operator", "device-plugin-config", `{"data":{"gpuslice-UID-7a8b9c":"version: v2"}}`)},
	{"sharing, by a key that is all that someone has written", open, configMap("gpu-operator", "device-plugin-config", `{"data":{"gpuslice-UID-0d1e2f":null}}`)},
	{"event", open, event("default", "Node", "own", "gpuslice-agent", "own")},
	{"event on a pod", open, event("team", "Pod", "app-own", "gpuslice-agent", "own")},
	{"event again", open, patchEvent("by-the-agent", `{"count":2}`)},
}

// Promises 15 and 24.
func TestOneAgentsTokenIsGoodForItsOwnNodeOnly(t *testing.T) {
	s := newScene(t)
	minor, err := s.cluster.Minor()
	if err != nil {
		t.Fatal(err)
	}
	s.attempts = slices.DeleteFunc(slices.Clone(attempts), func(a attempt) bool { return !a.has(minor) })
	s.needed = slices.DeleteFunc(slices.Clone(needed), func(a attempt) bool { return !a.has(minor) })
	s.apply("without-policies")
	s.fill()
	if minor >= servesClaims {
		s.putFile("claims.yaml")
	}
	bound, loose := s.agent(), s.unbound()
	s.token = bound
	if minor >= servesTaintRules {
		s.appliesTaintRules(bound)
	}
	s.finds("without the policies", bound, access.Findings{InForce: s.all(false), Level: config.PodAccessRBAC, MayNotDelete: true})
	s.apply("without-policies", "delete-after-deadline")
	s.finds("with the right to delete", bound, access.Findings{InForce: s.all(false), Level: config.PodAccessRBAC})

	agent, unbound := []kubernetes.Interface{s.tries(bound)}, []kubernetes.Interface{s.tries(loose)}
	got := map[string]verdict{}
	s.try(agent, s.attempts, func(a attempt, done bool) { got[a.what] = verdict{rbac: done} })
	s.apply("delete-after-deadline")
	s.inForce(agent, func(want verdict) bool { return want.policies })
	s.finds("with the policies", bound, access.Findings{InForce: s.all(true), Level: config.PodAccessPolicy})
	s.finds("with a token that is bound to no pod", loose, access.Findings{InForce: s.all(true), Level: config.PodAccessPolicy, Unbound: true})
	s.try(agent, s.attempts, func(a attempt, done bool) { got[a.what] = verdict{got[a.what].rbac, done, false} })
	s.isGoodForTheAgent(agent, unbound)

	s.apply("delete-after-deadline", "impersonation")
	if minor < cluster.ImpersonatesNodes {
		found := access.Findings{InForce: s.all(true), MayNotEvict: true}
		delete(found.InForce, access.Evictions)
		s.finds("with impersonation, which this version lacks", bound, found)
		for _, a := range s.attempts {
			if want := (verdict{a.want.rbac, a.want.policies, false}); got[a.what] != want {
				t.Errorf("%s: with RBAC alone, the policies: goes through %v, want %v", a.what, got[a.what], want)
			}
		}
		return
	}
	agent = append(agent, s.tries(inTheNameOf(bound, "system:node:own"))) // what one of them may do, the thief of the token may
	unbound = append(unbound, s.tries(inTheNameOf(loose, "system:node:own")))
	s.inForce(agent, func(want verdict) bool { return want.asNode })
	found := access.Findings{InForce: s.all(true), Level: config.PodAccessImpersonation}
	delete(found.InForce, access.Evictions)
	s.finds("with impersonation", bound, found)
	s.try(agent, s.attempts, func(a attempt, done bool) { got[a.what] = verdict{got[a.what].rbac, got[a.what].policies, done} })
	s.isGoodForTheAgent(agent, unbound)

	for _, a := range attempts {
		if got[a.what] != a.want {
			t.Errorf("%s: with RBAC alone, the policies, impersonation: goes through %v, want %v", a.what, got[a.what], a.want)
		}
	}
	if len(got) != len(attempts) {
		t.Errorf("%d of %d attempts have a name of their own", len(got), len(attempts))
	}
	compareTables(t, got)
}

// appliesTaintRules gives the agent's account the rights to DeviceTaintRules until the test ends. Their policy stays without the others.
func (s *scene) appliesTaintRules(agent *rest.Config) {
	s.t.Helper()
	s.put(s.build(kustomize.Over("overlays/dra", "device-taint-rules", "without-policies")))
	s.t.Cleanup(func() {
		err := s.admin.RbacV1().ClusterRoleBindings().Delete(context.WithoutCancel(s.t.Context()), "gpuslice-agent-device-taint-rules", metav1.DeleteOptions{})
		if err != nil {
			s.t.Error(err)
		}
	})
	for _, its := range []bool{true, false} { // the rights act, and then the policy
		s.until(fmt.Sprintf("a rule of its own: %t", its), func(ctx context.Context) (bool, error) {
			no, err := denied(makesRule(func(r *rule) {
				if !its {
					r.Spec.DeviceSelector.Pool = ptr.To("other")
				}
			})(ctx, s, s.tries(agent)))
			return no != its, err
		})
	}
}

// try makes attempts by each of some clients, and notes of each whether it goes through by one of them.
func (s *scene) try(clients []kubernetes.Interface, all []attempt, note func(attempt, bool)) {
	s.t.Helper()
	for _, a := range all {
		done := false
		for _, client := range clients {
			no, err := denied(a.do(s.t.Context(), s, client))
			if err != nil {
				s.t.Errorf("%s: %v", a.what, err)
			}
			done = done || !no
		}
		note(a, done)
	}
}

// isGoodForTheAgent fails the test if the agent's token is not good for what the agent does, or another than that of its pod is.
func (s *scene) isGoodForTheAgent(agent, unbound []kubernetes.Interface) {
	s.t.Helper()
	s.try(agent, s.needed, func(a attempt, done bool) {
		if !done {
			s.t.Errorf("the agent needs it, and is refused: %s: %v", a.what, a.do(s.t.Context(), s, agent[len(agent)-1]))
		}
	})
	// A token that names no node may not even do what the agent does.
	writes := slices.DeleteFunc(slices.Clone(s.needed), func(a attempt) bool { return strings.HasPrefix(a.what, "pod") })
	s.try(unbound, writes, func(a attempt, done bool) {
		if done {
			s.t.Errorf("with a token that is bound to no pod: %s went through", a.what)
		}
	})
	rights := slices.DeleteFunc(slices.Concat(s.needed, s.attempts), func(a attempt) bool { return a.want == never })
	s.try([]kubernetes.Interface{s.tries(s.cluster.Config())}, rights, func(a attempt, done bool) {
		if !done {
			s.t.Errorf("the policies touch an administrator: %s", a.what)
		}
	})
}

// all are the policies that an agent tries. That for DeviceTaintRules comes with the right to them.
func (s *scene) all(in bool) map[access.Policy]bool {
	out := map[access.Policy]bool{access.Nodes: in, access.Evictions: in, access.Leases: in, access.Events: in, access.ConfigMaps: in}
	if minor, err := s.cluster.Minor(); err != nil || minor >= servesTaintRules {
		out[access.DeviceTaintRules] = true
	}
	return out
}

// finds waits until an agent with these credentials finds out what it should: of a right or a policy, the API server knows a
// moment after it was written.
func (s *scene) finds(when string, credentials *rest.Config, want access.Findings) {
	s.t.Helper()
	s.until("what an agent finds out "+when, func(ctx context.Context) (bool, error) {
		pods := impersonate.New(impersonate.Options{Node: "own", Access: config.PodAccessAuto, Timeout: patience, Log: zap.NewNop()})
		through := rest.CopyConfig(credentials)
		through.Wrap(pods.Wrap)
		client, err := kube.New(through)
		if err != nil {
			return false, err
		}
		found, err := access.New(access.Options{
			Client: client, Node: "own", Namespace: "gpuslice", Deletes: true,
			ConfigMap: config.ConfigMapName{Namespace: "gpu-operator", Name: "device-plugin-config"}, Access: config.PodAccessAuto, Pods: pods, Timeout: patience, Log: zap.NewNop(),
		}).Find(ctx)
		return cmp.Equal(want, found), err
	})
}

// inForce waits until all is denied that should be: the API server takes rights and policies up a second after they were written.
func (s *scene) inForce(agent []kubernetes.Interface, goesThrough func(verdict) bool) {
	s.t.Helper()
	for _, a := range s.attempts {
		if !goesThrough(a.want) && a.want != never {
			s.until("the refusal of: "+a.what, func(ctx context.Context) (bool, error) {
				for _, client := range agent {
					if no, _ := denied(a.do(ctx, s, client)); !no {
						return false, nil
					}
				}
				return true, nil
			})
		}
	}
}

// The pages of what was seen: one with every attempt, and one with the sums.
var (
	attemptsTable = table{
		page:  deployFolder + "/ATTEMPTS.md",
		head:  "| attempt with the token of the agent on node `own` | RBAC alone | with the policies | and impersonation |\n|---|---|---|---|\n",
		begin: "<!-- attempts: written by go test ./test/policy -update -->\n",
		end:   "<!-- end of attempts -->\n",
	}
	sumsTable = table{
		page:  deployFolder + "/SECURITY.md",
		head:  "| attempts that go through | RBAC alone | with the policies | and impersonation |\n|---|---|---|---|\n",
		begin: "<!-- sums: written by go test ./test/policy -update -->\n",
		end:   "<!-- end of sums -->\n",
	}
)

// sums are the rows of the second table.
var sums = []struct {
	what string
	is   *regexp.Regexp
}{
	{"against other nodes", regexp.MustCompile("^(other node|a node that)")},
	{"against pods of other nodes, or of none", regexp.MustCompile("^((claim of a )?pods? of (another|no) node|all pods|devices of (another node|all nodes))")},
	{"against Secrets and tokens", regexp.MustCompile("^(Secret|token)|: a token of")},
	{"against Leases that are no pool's", regexp.MustCompile("^Lease(:| of another node)")},
	{"in all", regexp.MustCompile("")},
}

// compareTables holds the pages to what was seen.
func compareTables(t *testing.T, got map[string]verdict) {
	t.Helper()
	word := map[bool]string{true: "goes through", false: "denied"}
	var rows, total strings.Builder
	for _, a := range attempts {
		v := got[a.what]
		fmt.Fprintf(&rows, "| %s | %s | %s | %s |\n", a.what, word[v.rbac], word[v.policies], word[v.asNode])
	}
	for _, sum := range sums {
		of, counts := 0, [3]int{}
		for _, a := range attempts {
			if !sum.is.MatchString(a.what) {
				continue
			}
			of++
			for i, done := range []bool{got[a.what].rbac, got[a.what].policies, got[a.what].asNode} {
				if done {
					counts[i]++
				}
			}
		}
		fmt.Fprintf(&total, "| of %d %s | %d | %d | %d |\n", of, sum.what, counts[0], counts[1], counts[2])
	}
	attemptsTable.compare(t, rows.String())
	sumsTable.compare(t, total.String())
}

// table is where a page has what was seen, between two marks.
type table struct{ page, head, begin, end string }

// compare holds the page to these rows, or writes them there.
func (b table) compare(t *testing.T, rows string) {
	t.Helper()
	want := b.head + rows
	text, err := os.ReadFile(b.page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), b.begin)
	has, after, ended := strings.Cut(rest, b.end)
	if !found || !ended {
		t.Fatalf("%s has no place for the table: %s", b.page, b.begin)
	}
	if *update {
		if err := os.WriteFile(b.page, []byte(before+b.begin+want+b.end+after), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(has, want); diff != "" {
		t.Errorf("%s says otherwise (-page +seen); go test ./test/policy -update writes it:\n%s", b.page, diff)
	}
}
