// Package clientset makes the programs' client from one of client-go's. With client-go's fake, its trackers and reactors
// answer.
package clientset

import (
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/gpuslice/gpuslice/drain/kube"
)

// Of sends the requests of the programs through a client of client-go.
func Of(client kubernetes.Interface) kube.Interface { return of{client} }

type of struct{ client kubernetes.Interface }

// ConfigMaps implements kube.Interface.
func (o of) ConfigMaps(namespace string) kube.ConfigMaps {
	return o.client.CoreV1().ConfigMaps(namespace)
}

// DaemonSets implements kube.Interface.
func (o of) DaemonSets(namespace string) kube.DaemonSets {
	return o.client.AppsV1().DaemonSets(namespace)
}

// DeviceClasses implements kube.Interface.
func (o of) DeviceClasses() kube.DeviceClasses { return o.client.ResourceV1().DeviceClasses() }

// DeviceTaintRules implements kube.Interface.
func (o of) DeviceTaintRules() kube.DeviceTaintRules { return o.client.ResourceV1().DeviceTaintRules() }

// Events implements kube.Interface.
func (o of) Events(namespace string) kube.Events { return o.client.CoreV1().Events(namespace) }

// Leases implements kube.Interface.
func (o of) Leases(namespace string) kube.Leases { return o.client.CoordinationV1().Leases(namespace) }

// Nodes implements kube.Interface.
func (o of) Nodes() kube.Nodes { return o.client.CoreV1().Nodes() }

// PodDisruptionBudgets implements kube.Interface.
func (o of) PodDisruptionBudgets(namespace string) kube.PodDisruptionBudgets {
	return o.client.PolicyV1().PodDisruptionBudgets(namespace)
}

// Pods implements kube.Interface.
func (o of) Pods(namespace string) kube.Pods { return o.client.CoreV1().Pods(namespace) }

// ResourceClaims implements kube.Interface.
func (o of) ResourceClaims(namespace string) kube.ResourceClaims {
	return o.client.ResourceV1().ResourceClaims(namespace)
}

// ResourceSlices implements kube.Interface.
func (o of) ResourceSlices() kube.ResourceSlices { return o.client.ResourceV1().ResourceSlices() }

// SelfSubjectAccessReviews implements kube.Interface.
func (o of) SelfSubjectAccessReviews() kube.SelfSubjectAccessReviews {
	return o.client.AuthorizationV1().SelfSubjectAccessReviews()
}

// SubjectAccessReviews implements kube.Interface.
func (o of) SubjectAccessReviews() kube.SubjectAccessReviews {
	return o.client.AuthorizationV1().SubjectAccessReviews()
}

// TokenReviews implements kube.Interface.
func (o of) TokenReviews() kube.TokenReviews { return o.client.AuthenticationV1().TokenReviews() }

// Failures implements kube.Interface. A client of client-go does not count them.
func (o of) Failures() uint64 { return 0 }

// RawCore implements kube.Interface.
func (o of) RawCore() cache.Getter { return o.client.CoreV1().RESTClient() }

// RawPolicy implements kube.Interface.
func (o of) RawPolicy() cache.Getter { return o.client.PolicyV1().RESTClient() }

// RawResource implements kube.Interface.
func (o of) RawResource() cache.Getter { return o.client.ResourceV1().RESTClient() }

// IsWatchListSemanticsUnSupported says to client-go's informers whether they may ask for a list as a watch, which its fake cannot do.
func (o of) IsWatchListSemanticsUnSupported() bool {
	says, has := o.client.(interface{ IsWatchListSemanticsUnSupported() bool })
	return has && says.IsWatchListSemanticsUnSupported()
}
