// Package kube is the client of the API server, with the kinds and the verbs that the programs use.
//
// client-go's own client of all kinds brings the types of every API group into a program, a quarter of its size. The programs use six of these
// groups. This client is made of the same parts, and sends the same requests.
//
// It stands below drain, which evicts through it and stands alone: drain may import no package of the agent, and all others may import this one.
package kube

import (
	"context"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// Interface reads and writes the objects of a cluster. Its methods send nothing; the methods of their results do, and return the API server's own
// errors.
type Interface interface {
	ConfigMaps(namespace string) ConfigMaps
	DaemonSets(namespace string) DaemonSets
	DeviceClasses() DeviceClasses
	DeviceTaintRules() DeviceTaintRules
	Events(namespace string) Events
	Leases(namespace string) Leases
	Nodes() Nodes
	PodDisruptionBudgets(namespace string) PodDisruptionBudgets
	Pods(namespace string) Pods
	ResourceClaims(namespace string) ResourceClaims
	ResourceSlices() ResourceSlices
	SelfSubjectAccessReviews() SelfSubjectAccessReviews
	SubjectAccessReviews() SubjectAccessReviews
	TokenReviews() TokenReviews

	// Failures counts the requests so far that the API server has not answered, or only by saying that it cannot perform them now.
	Failures() uint64

	// RawCore makes requests of the group of pods and nodes that only read.
	RawCore() cache.Getter
	// RawPolicy makes requests of the group of disruption budgets that only read.
	RawPolicy() cache.Getter
	// RawResource makes requests of the group of resource claims and slices that only read.
	RawResource() cache.Getter
}

// ConfigMaps are those of a namespace.
type ConfigMaps interface {
	Get(ctx context.Context, name string, o metav1.GetOptions) (*corev1.ConfigMap, error)
	Patch(ctx context.Context, name string, as types.PatchType, body []byte, o metav1.PatchOptions, sub ...string) (*corev1.ConfigMap, error)
}

// DaemonSets are those of a namespace.
type DaemonSets interface {
	Get(ctx context.Context, name string, o metav1.GetOptions) (*appsv1.DaemonSet, error)
}

// DeviceClasses are those of the cluster.
type DeviceClasses interface {
	List(ctx context.Context, o metav1.ListOptions) (*resourcev1.DeviceClassList, error)
}

// DeviceTaintRules are those of the cluster.
type DeviceTaintRules interface {
	List(ctx context.Context, o metav1.ListOptions) (*resourcev1.DeviceTaintRuleList, error)
	Create(ctx context.Context, rule *resourcev1.DeviceTaintRule, o metav1.CreateOptions) (*resourcev1.DeviceTaintRule, error)
	Delete(ctx context.Context, name string, o metav1.DeleteOptions) error
}

// Events are those of a namespace.
type Events interface {
	Create(ctx context.Context, event *corev1.Event, o metav1.CreateOptions) (*corev1.Event, error)
	List(ctx context.Context, o metav1.ListOptions) (*corev1.EventList, error)
	Patch(ctx context.Context, name string, as types.PatchType, body []byte, o metav1.PatchOptions, sub ...string) (*corev1.Event, error)
}

// Leases are those of a namespace.
type Leases interface {
	Get(ctx context.Context, name string, o metav1.GetOptions) (*coordinationv1.Lease, error)
	Create(ctx context.Context, lease *coordinationv1.Lease, o metav1.CreateOptions) (*coordinationv1.Lease, error)
	Update(ctx context.Context, lease *coordinationv1.Lease, o metav1.UpdateOptions) (*coordinationv1.Lease, error)
	Delete(ctx context.Context, name string, o metav1.DeleteOptions) error
}

// Nodes are those of the cluster.
type Nodes interface {
	Get(ctx context.Context, name string, o metav1.GetOptions) (*corev1.Node, error)
	List(ctx context.Context, o metav1.ListOptions) (*corev1.NodeList, error)
	Watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error)
	Patch(ctx context.Context, name string, as types.PatchType, body []byte, o metav1.PatchOptions, sub ...string) (*corev1.Node, error)
}

// PodDisruptionBudgets are those of a namespace, or, where it is "", of all.
type PodDisruptionBudgets interface {
	List(ctx context.Context, o metav1.ListOptions) (*policyv1.PodDisruptionBudgetList, error)
}

// Pods are those of a namespace, or, where it is "", of all.
type Pods interface {
	Get(ctx context.Context, name string, o metav1.GetOptions) (*corev1.Pod, error)
	List(ctx context.Context, o metav1.ListOptions) (*corev1.PodList, error)
	Delete(ctx context.Context, name string, o metav1.DeleteOptions) error
	// EvictV1 asks once. Left to itself, client-go repeats a request that was answered 429 with Retry-After up to ten times, and sleeps in
	// between, which for a PodDisruptionBudget that is being processed is 100 seconds.
	EvictV1(ctx context.Context, eviction *policyv1.Eviction) error
}

// ResourceClaims are those of a namespace, or, where it is "", of all.
type ResourceClaims interface {
	Get(ctx context.Context, name string, o metav1.GetOptions) (*resourcev1.ResourceClaim, error)
	List(ctx context.Context, o metav1.ListOptions) (*resourcev1.ResourceClaimList, error)
}

// ResourceSlices are those of the cluster.
type ResourceSlices interface {
	List(ctx context.Context, o metav1.ListOptions) (*resourcev1.ResourceSliceList, error)
}

// SelfSubjectAccessReviews say what the client itself may do.
type SelfSubjectAccessReviews interface {
	Create(ctx context.Context, review *authorizationv1.SelfSubjectAccessReview, o metav1.CreateOptions) (*authorizationv1.SelfSubjectAccessReview, error)
}

// SubjectAccessReviews say what a user may do.
type SubjectAccessReviews interface {
	Create(ctx context.Context, review *authorizationv1.SubjectAccessReview, o metav1.CreateOptions) (*authorizationv1.SubjectAccessReview, error)
}

// TokenReviews say which user a token belongs to.
type TokenReviews interface {
	Create(ctx context.Context, review *authenticationv1.TokenReview, o metav1.CreateOptions) (*authenticationv1.TokenReview, error)
}
