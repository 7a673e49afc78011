package holders

import (
	"context"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/drain/kube"
)

// DaemonSets distinguishes pods of DaemonSets from pods that only claim to be: a user who may create a pod may write any owner into it.
// It asks the API server for each DaemonSet that a pod of the node names, and remembers the answer. It is not safe for use by
// several goroutines.
type DaemonSets struct {
	client kube.Interface
	clock  clock.PassiveClock
	known  map[daemonSet]daemonSetAnswer
}

// daemonSet is one that a pod names as its owner.
type daemonSet struct {
	namespace, name string
	uid             types.UID
}

type daemonSetAnswer struct {
	exists   bool
	at       time.Time
	selector string // empty if there is none, or if it is longer than longestSelector
}

// longestSelector bounds what is remembered of a DaemonSet, in bytes: whoever may create one writes it.
const longestSelector = 300

// daemonSetFor is how long the answer holds that a DaemonSet exists. Its pods end with it, and no other DaemonSet ever gets its UID, so
// an old answer does no harm. For the same reason the answer that there is none holds for good.
const daemonSetFor = time.Hour

// NewDaemonSets makes one that remembers nothing.
func NewDaemonSets(client kube.Interface, clock clock.PassiveClock) *DaemonSets {
	return &DaemonSets{client: client, clock: clock, known: map[daemonSet]daemonSetAnswer{}}
}

// Forget drops all answers: they expire by a clock that has been set since.
func (d *DaemonSets) Forget(time.Time) { clear(d.known) }

// Believe returns copies of the pods without the owners that they only claim to have. A DaemonSet stays as owner if it exists, with this UID, in the
// pod's namespace. A node stays if it is the one with this UID. Nothing else of a pod changes, and the pods that are passed in are not changed. The
// pods are all of the node: Believe forgets answers about other DaemonSets.
//
// The error means that the API server did not answer. Then the caller may decide nothing by the owner of any pod.
func (d *DaemonSets) Believe(ctx context.Context, node types.UID, pods []corev1.Pod) ([]corev1.Pod, error) {
	out := slices.Clone(pods)
	kept := map[daemonSet]daemonSetAnswer{}
	for i := range out {
		owner := metav1.GetControllerOfNoCopy(&out[i])
		if owner != nil && isNode(owner) && owner.UID != node {
			out[i].OwnerReferences = slices.DeleteFunc(slices.Clone(out[i].OwnerReferences), func(r metav1.OwnerReference) bool { return isNode(&r) })
			continue
		}
		if owner == nil || !isDaemonSet(owner) {
			continue
		}
		named := daemonSet{namespace: out[i].Namespace, name: owner.Name, uid: owner.UID}
		answer, err := d.ask(ctx, named)
		if err != nil {
			return nil, fmt.Errorf("looking for DaemonSet %s/%s, which pod %s/%s names as its owner: %w", named.namespace,
				named.name, out[i].Namespace, out[i].Name, err)
		}
		kept[named] = answer
		if !answer.exists {
			out[i].OwnerReferences = slices.DeleteFunc(slices.Clone(out[i].OwnerReferences), func(r metav1.OwnerReference) bool { return isDaemonSet(&r) })
		}
	}
	d.known = kept
	return out, nil
}

func (d *DaemonSets) ask(ctx context.Context, named daemonSet) (daemonSetAnswer, error) {
	now := d.clock.Now()
	// The API server takes any text as the name of an owner. A request for a DaemonSet of such a name fails each time.
	if len(apivalidation.NameIsDNSSubdomain(named.name, false)) > 0 {
		return daemonSetAnswer{at: now}, nil
	}
	if a, known := d.known[named]; known && (!a.exists || now.Sub(a.at) < daemonSetFor) {
		return a, nil
	}
	// From the API server itself: its cache may not have one yet that was just made.
	var found *appsv1.DaemonSet
	err := kube.Retry(ctx, func() (err error) {
		found, err = d.client.DaemonSets(named.namespace).Get(ctx, named.name, metav1.GetOptions{})
		return err
	})
	switch {
	case apierrors.IsNotFound(err):
		return daemonSetAnswer{at: now}, nil
	case apierrors.IsForbidden(err):
		return daemonSetAnswer{}, fmt.Errorf("%w; grant the agent get on daemonsets of the group apps, as deploy/base/rbac.yaml does", err)
	case err != nil:
		return daemonSetAnswer{}, err
	}
	a := daemonSetAnswer{exists: found.UID == named.uid && named.uid != "", at: now}
	if selector, err := metav1.LabelSelectorAsSelector(found.Spec.Selector); err == nil && len(selector.String()) <= longestSelector {
		a.selector = selector.String()
	}
	d.known[named] = a
	return a, nil
}

// SelectorOf returns the label selector of the pod's DaemonSet, as kubectl writes it. It is empty if the selector is very long, or if Believe has not asked
// about the DaemonSet.
func (d *DaemonSets) SelectorOf(pod *corev1.Pod) string {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil {
		return ""
	}
	a := d.known[daemonSet{namespace: pod.Namespace, name: owner.Name, uid: owner.UID}]
	if !a.exists {
		return ""
	}
	return a.selector
}

// isDaemonSet reports whether the pod names a DaemonSet of the group apps as this owner.
func isDaemonSet(owner *metav1.OwnerReference) bool {
	return owner.APIVersion == "apps/v1" && owner.Kind == "DaemonSet"
}

// DaemonSetOf gives the UID of the pod's DaemonSet, if it has one. It takes pods from DaemonSets.Believe, not from the API server.
func DaemonSetOf(pod *corev1.Pod) (types.UID, bool) {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil || !isDaemonSet(owner) {
		return "", false
	}
	return owner.UID, true
}

// isNode reports whether the pod names a node as this owner.
func isNode(owner *metav1.OwnerReference) bool {
	return owner.APIVersion == "v1" && owner.Kind == "Node"
}

// isMirror reports whether the pod is the image of a static pod: kubelet makes it, and names the node as its owner. It takes pods from
// DaemonSets.Believe, not from the API server.
func isMirror(pod *corev1.Pod) bool {
	_, is := pod.Annotations[corev1.MirrorPodAnnotationKey]
	owner := metav1.GetControllerOfNoCopy(pod)
	return is && owner != nil && isNode(owner) && owner.Name == pod.Spec.NodeName
}
