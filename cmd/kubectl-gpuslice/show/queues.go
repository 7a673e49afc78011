package show

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/drift"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

const (
	kueueGroup = "kueue.x-k8s.io"
	// Labels of pods that name their LocalQueue: the first Kueue sets on those of a Job that it admits, the other a user on a pod.
	labelLocalQueue, labelQueue = kueueGroup + "/local-queue-name", kueueGroup + "/queue-name"
	// Labels or annotations of pods that name their Workload: the first counts if both are there.
	keyWorkload, keyGroup = kueueGroup + "/prebuilt-workload-name", kueueGroup + "/pod-group-name"
	// Annotation of the Workload of an elastic Job that has grown: NAMESPACE/NAME of the one that it replaces.
	keyReplaces = kueueGroup + "/workload-slice-replacement-for"

	queuesAtATime = 500
	// mostQueued bounds the objects that are read of a kind.
	mostQueued = 50_000
)

// kueueVersions are those that are read, the best first. The fields that are read are the same in both.
var kueueVersions = []string{"v1beta2", "v1beta1"}

// workload is what is read of a Workload.
type workload struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		QueueName string `json:"queueName"`
		Active    *bool  `json:"active"`
		PodSets   []struct {
			Name     string                 `json:"name"`
			Count    int                    `json:"count"`
			Template corev1.PodTemplateSpec `json:"template"`
		} `json:"podSets"`
	} `json:"spec"`
	Status struct {
		Conditions      []metav1.Condition `json:"conditions"`
		ReclaimablePods []struct {         // that are done
			Name  string `json:"name"` // of their set
			Count int    `json:"count"`
		} `json:"reclaimablePods"`
	} `json:"status"`
}

// localQueue is what is read of a LocalQueue.
type localQueue struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		ClusterQueue string `json:"clusterQueue"`
	} `json:"spec"`
}

// clusterQueue is what is read of a ClusterQueue.
type clusterQueue struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		ResourceGroups []struct {
			Flavors []struct {
				Resources []struct {
					Name         string            `json:"name"`
					NominalQuota resource.Quantity `json:"nominalQuota"`
				} `json:"resources"`
			} `json:"flavors"`
		} `json:"resourceGroups"`
	} `json:"spec"`
	Status struct {
		FlavorsReservation []struct {
			Resources []struct {
				Name  string            `json:"name"`
				Total resource.Quantity `json:"total"`
			} `json:"resources"`
		} `json:"flavorsReservation"`
	} `json:"status"`
}

// kueue is what the user may read of Kueue's objects; nil where Kueue is not there, or where the rights are missing.
type kueue struct {
	workloads []workload
	there     map[ofWorkload]podSet // pods that wait
	locals    map[string]string     // ClusterQueue by namespace and name
	quotas    map[string]map[string]*quota
	notes     []string
}

// readKueue reads Kueue's objects. What cannot be read is left out, and a note says so.
func readKueue(ctx context.Context, client kube.Interface, namespace string) (k kueue) {
	served, err := drift.GroupsOf(client)(ctx, kueueGroup)
	at := slices.IndexFunc(kueueVersions, func(v string) bool { return slices.Contains(served, v) })
	switch {
	case err != nil:
		k.notes = append(k.notes, "Kueue's queues are left out: "+err.Error())
		return k
	case len(served) == 0:
		return k
	case at < 0:
		k.notes = append(k.notes, fmt.Sprintf("Kueue's queues are left out: the cluster serves %s in %s alone", kueueGroup, sanitize.Listed(served)))
		return k
	}
	r := kueueReader{client, "/apis/" + kueueGroup + "/" + kueueVersions[at]}
	if k.workloads, err = readAll[workload](ctx, r, namespace, "workloads"); err != nil {
		k.notes = append(k.notes, "Kueue's queues are left out: "+err.Error())
		return k
	}
	locals, err := readAll[localQueue](ctx, r, namespace, "localqueues")
	var queues []clusterQueue
	if err == nil {
		queues, err = readAll[clusterQueue](ctx, r, "", "clusterqueues")
	}
	if err != nil {
		k.notes = append(k.notes, "quotas of Kueue are left out: "+err.Error())
		return k
	}
	k.locals, k.quotas = map[string]string{}, map[string]map[string]*quota{}
	for i := range locals {
		k.locals[locals[i].Namespace+"/"+locals[i].Name] = locals[i].Spec.ClusterQueue
	}
	for i := range queues {
		k.quotas[queues[i].Name] = queues[i].quotas()
	}
	return k
}

// quotas are those of the queue by resource, over all flavors.
func (q *clusterQueue) quotas() map[string]*quota {
	out := map[string]*quota{}
	for _, group := range q.Spec.ResourceGroups {
		for _, flavor := range group.Flavors {
			for _, r := range flavor.Resources {
				if out[r.Name] == nil {
					out[r.Name] = &quota{ClusterQueue: sanitize.Cut(q.Name, longestPod)}
				}
				out[r.Name].Nominal += amount(&r.NominalQuota)
			}
		}
	}
	for _, flavor := range q.Status.FlavorsReservation {
		for _, r := range flavor.Resources {
			if of := out[r.Name]; of != nil {
				of.Reserved += amount(&r.Total)
			}
		}
	}
	for _, of := range out {
		of.Full = of.Reserved >= of.Nominal
	}
	return out
}

// amount is at most a million, whatever an object says.
func amount(q *resource.Quantity) int { return int(min(max(q.Value(), 0), mostDevices)) }

// kueueReader reads objects of a version of Kueue's group.
type kueueReader struct {
	client kube.Interface
	path   string
}

// readAll reads all objects of a kind, of a namespace or of all. It returns none, and not nil, where there are none.
func readAll[T any](ctx context.Context, r kueueReader, namespace, plural string) ([]T, error) {
	path := r.path + "/" + plural
	if namespace != "" {
		path = r.path + "/namespaces/" + namespace + "/" + plural
	}
	all, token := []T{}, ""
	for {
		text, err := r.client.RawCore().Get().AbsPath(path).Param("limit", fmt.Sprint(queuesAtATime)).Param("continue", token).
			SetHeader("Accept", runtime.ContentTypeJSON).DoRaw(ctx)
		switch {
		case apierrors.IsForbidden(err):
			return nil, fmt.Errorf("listing %s needs rights that you lack", plural)
		case err != nil:
			return nil, fmt.Errorf("listing %s: %w", plural, err)
		}
		var page struct {
			metav1.ListMeta `json:"metadata"`
			Items           []T `json:"items"`
		}
		if err := json.Unmarshal(text, &page); err != nil {
			return nil, fmt.Errorf("reading %s: %w", plural, err)
		}
		if all = append(all, page.Items...); len(all) > mostQueued {
			return nil, fmt.Errorf("there are more than %d %s", mostQueued, plural)
		}
		if token = page.Continue; token == "" {
			return all, nil
		}
	}
}

// columns are those of the table.
func (k *kueue) columns() []column[waiting] {
	out := waitingColumns
	if k.workloads != nil {
		out = slices.Concat(out, queueColumns)
	}
	if k.quotas != nil {
		out = append(slices.Clip(out), quotaColumn)
	}
	return out
}

// queueOf is the LocalQueue that the pod names; empty if its workloads are not known.
func (k *kueue) queueOf(p *corev1.Pod) string {
	if k.workloads == nil {
		return ""
	}
	return cmp.Or(p.Labels[labelLocalQueue], p.Labels[labelQueue])
}

// ofWorkload are the pods of a Workload that ask for a resource.
type ofWorkload struct{ namespace, workload, resource string }

// has counts a pod that waits and asks for so many devices, for its Workload.
func (k *kueue) has(p *corev1.Pod, resource string, devices int) {
	of := ofWorkload{p.Namespace, cmp.Or(p.Labels[keyWorkload], p.Annotations[keyWorkload], p.Labels[keyGroup], p.Annotations[keyGroup]), resource}
	if of.workload == "" {
		return
	}
	if k.there == nil {
		k.there = map[ofWorkload]podSet{}
	}
	k.there[of] = podSet{k.there[of].pods + 1, k.there[of].devices + devices}
}

// count adds the workloads, and the pods that pending ones have yet to get.
func (k *kueue) count(all waits) {
	running := map[string]bool{}
	for i := range k.workloads {
		w := &k.workloads[i]
		running[w.Namespace+"/"+w.Name] = !w.ended() && w.is("Admitted")
	}
	for i := range k.workloads {
		if w := &k.workloads[i]; !w.ended() && !w.is("Admitted") {
			w.wait(all, k.there, running[w.Annotations[keyReplaces]])
		}
	}
	for i := range k.workloads {
		w := &k.workloads[i]
		if !running[w.Namespace+"/"+w.Name] {
			continue
		}
		for what := range w.wants() {
			if one := all[what]; one != nil && one.Queue != nil {
				one.Queue.Admitted++
			}
		}
	}
	for what, one := range all {
		if one.Queue != nil {
			one.Queue.Quota = k.quotas[k.locals[what.namespace+"/"+what.queue]][what.resource]
		}
	}
}

// wait adds a pending workload, with the pods that are not there yet: those of a group or of a StatefulSet are made one by one, behind a gate. All pods of
// a Job that grows are there, the new ones behind a gate.
func (w *workload) wait(all waits, there map[ofWorkload]podSet, grows bool) {
	for what, asks := range w.wants() {
		has := there[ofWorkload{w.Namespace, w.Name, what.resource}]
		if w.isOnePod() || grows {
			has = asks
		}
		all.add(what, max(asks.pods-has.pods, 0), max(asks.devices-has.devices, 0), w.CreationTimestamp.Time)
		if q := all[what].Queue; q != nil {
			q.Pending++
		}
	}
}

// ended reports whether the workload takes no quota any more, or wants none.
func (w *workload) ended() bool {
	return w.is("Finished") || w.Spec.Active != nil && !*w.Spec.Active
}

func (w *workload) is(condition string) bool {
	return meta.IsStatusConditionTrue(w.Status.Conditions, condition)
}

// podSet are pods that ask for so many devices together.
type podSet struct{ pods, devices int }

// wants are the GPUs and parts of them that the workload asks for, by all of its pods.
func (w *workload) wants() map[waitFor]podSet {
	out := map[waitFor]podSet{}
	for _, set := range w.Spec.PodSets {
		pods := set.Count
		for _, done := range w.Status.ReclaimablePods {
			if done.Name == set.Name {
				pods -= max(done.Count, 0)
			}
		}
		pods = min(max(pods, 0), mostDevices)
		requestLimits(&set.Template.Spec)
		for _, r := range judge.Asked(&corev1.Pod{Spec: set.Template.Spec}) {
			what := waitFor{resourceOf(r), w.Namespace, w.Spec.QueueName}
			if what.resource != "" && pods > 0 {
				out[what] = podSet{out[what].pods + pods, out[what].devices + pods*devicesOf(r)}
			}
		}
	}
	return out
}

// requestLimits has containers request what they limit and say nothing else of, as the API server has pods do. Templates of a Job have no such default.
func requestLimits(spec *corev1.PodSpec) {
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			r := &containers[i].Resources
			requests := corev1.ResourceList{}
			maps.Copy(requests, r.Limits)
			maps.Copy(requests, r.Requests)
			r.Requests = requests
		}
	}
}

// isOnePod reports whether Kueue has made the workload for a single pod, which is there.
func (w *workload) isOnePod() bool {
	return len(w.Spec.PodSets) == 1 && w.Spec.PodSets[0].Count == 1 &&
		slices.ContainsFunc(w.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "Pod" && o.APIVersion == "v1" })
}
