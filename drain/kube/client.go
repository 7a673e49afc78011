package kube

import (
	"context"
	"fmt"
	"net/http"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/flowcontrol"
)

// Requests in a second, and at once: kubelet's own limits. A change takes some fifty passes of about five requests, and a rollout writes each node
// once. With client-go's default of 5 a second each step would take a second, and 400 nodes more than a minute.
const (
	requestsPerSecond = 50
	requestsAtOnce    = 100
)

// Config is how the clients of a program reach the API server, with its name and version as user agent.
func Config(c *rest.Config, program, version string) *rest.Config {
	c = rest.CopyConfig(c)
	c.QPS, c.Burst = requestsPerSecond, requestsAtOnce
	c.UserAgent = program + "/" + version
	return c
}

// New makes a client. The error is that the config cannot be meant.
func New(c *rest.Config) (Interface, error) {
	shared := rest.CopyConfig(c)
	if shared.UserAgent == "" {
		shared.UserAgent = rest.DefaultKubernetesUserAgent()
	}
	shared.Wrap(smallFrames)
	var through *pauses
	shared.Wrap(func(transport http.RoundTripper) http.RoundTripper {
		through = newPauses(transport)
		return through
	})
	sender, err := rest.HTTPClientFor(shared)
	if err != nil {
		return nil, err
	}
	out, err := newClient(shared, sender)
	if err != nil {
		return nil, err
	}
	out.pauses = through
	return out, nil
}

// frame is how long a frame of HTTP/2 may be, in bytes. By Go's default the API server sends up to 1 MiB at once, and each connection keeps a
// buffer as long as the longest that has come.
const frame = 32 << 10

// smallFrames has the transport that the others wrap take frames of that length.
func smallFrames(transport http.RoundTripper) http.RoundTripper {
	innermost := transport
	for {
		wrapper, is := innermost.(net.RoundTripperWrapper)
		if !is {
			break
		}
		innermost = wrapper.WrappedRoundTripper()
	}
	if t, is := innermost.(*http.Transport); is && t.HTTP2 == nil && t != http.DefaultTransport {
		t.HTTP2 = &http.HTTP2Config{MaxReadFrameSize: frame}
	}
	return transport
}

// NewThrough makes a client that sends its requests through the sender, without pauses when they fail.
func NewThrough(c *rest.Config, sender *http.Client) (Interface, error) {
	out, err := newClient(c, sender)
	if err != nil {
		return nil, err
	}
	return out, nil
}

// newClient makes a client. The groups share the limit of requests that the config names.
func newClient(c *rest.Config, sender *http.Client) (*client, error) {
	kinds, err := Kinds()
	if err != nil {
		return nil, err
	}
	shared := rest.CopyConfig(c)
	if shared.RateLimiter == nil && shared.QPS > 0 {
		if shared.Burst <= 0 { // no request would ever be sent
			return nil, fmt.Errorf("making a client of %g requests in a second: its burst is %d", shared.QPS, shared.Burst)
		}
		shared.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(shared.QPS, shared.Burst)
	}
	shared.NegotiatedSerializer = serializer.NewCodecFactory(kinds).WithoutConversion()
	if shared.ContentType == "" { // JSON takes more memory to read; watches and lists through RawCore request the config's type
		shared.ContentType = runtime.ContentTypeProtobuf
		shared.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	}
	out := &client{}
	for version, of := range map[schema.GroupVersion]**rest.RESTClient{
		appsv1.SchemeGroupVersion: &out.apps, authenticationv1.SchemeGroupVersion: &out.authentication,
		authorizationv1.SchemeGroupVersion: &out.authorization, coordinationv1.SchemeGroupVersion: &out.coordination,
		corev1.SchemeGroupVersion: &out.core, policyv1.SchemeGroupVersion: &out.policy,
		resourcev1.SchemeGroupVersion: &out.resource,
	} {
		shared.GroupVersion, shared.APIPath = &version, "/apis"
		if version.Group == "" {
			shared.APIPath = "/api"
		}
		if *of, err = rest.RESTClientForConfigAndClient(shared, sender); err != nil {
			return nil, fmt.Errorf("making the client of %s: %w", version, err)
		}
	}
	return out, nil
}

// Kinds knows the kinds of the API groups that the client speaks.
func Kinds() (*runtime.Scheme, error) {
	kinds := runtime.NewScheme()
	groups := runtime.NewSchemeBuilder(appsv1.AddToScheme, authenticationv1.AddToScheme, authorizationv1.AddToScheme, coordinationv1.AddToScheme,
		corev1.AddToScheme, policyv1.AddToScheme, resourcev1.AddToScheme)
	if err := groups.AddToScheme(kinds); err != nil {
		return nil, fmt.Errorf("registering kinds: %w", err)
	}
	return kinds, nil
}

type client struct {
	apps, authentication, authorization, coordination, core, policy, resource *rest.RESTClient

	pauses *pauses // nil if it makes none
}

// Failures implements Interface.
func (c *client) Failures() uint64 {
	if c.pauses == nil {
		return 0
	}
	return c.pauses.failures()
}

type object[T any] interface {
	*T
	runtime.Object
	metav1.Object
}

type list[L any] interface {
	*L
	runtime.Object
}

// listed makes the client of a kind with lists.
func listed[T, L any, O object[T], OL list[L]](of *rest.RESTClient, resource, namespace string) *gentype.ClientWithList[O, OL] {
	newObject, newList := func() O { return new(T) }, func() OL { return new(L) }
	return gentype.NewClientWithList(resource, of, metav1.ParameterCodec, namespace, newObject, newList, gentype.PrefersProtobuf[O]())
}

// single makes the client of a kind that no program lists.
func single[T any, O object[T]](of *rest.RESTClient, resource, namespace string) *gentype.Client[O] {
	return gentype.NewClient(resource, of, metav1.ParameterCodec, namespace, func() O { return new(T) }, gentype.PrefersProtobuf[O]())
}

// ConfigMaps implements Interface.
func (c *client) ConfigMaps(namespace string) ConfigMaps {
	return single[corev1.ConfigMap](c.core, "configmaps", namespace)
}

// DaemonSets implements Interface.
func (c *client) DaemonSets(namespace string) DaemonSets {
	return single[appsv1.DaemonSet](c.apps, "daemonsets", namespace)
}

// DeviceClasses implements Interface.
func (c *client) DeviceClasses() DeviceClasses {
	return listed[resourcev1.DeviceClass, resourcev1.DeviceClassList](c.resource, "deviceclasses", "")
}

// DeviceTaintRules implements Interface.
func (c *client) DeviceTaintRules() DeviceTaintRules {
	return listed[resourcev1.DeviceTaintRule, resourcev1.DeviceTaintRuleList](c.resource, "devicetaintrules", "")
}

// Events implements Interface.
func (c *client) Events(namespace string) Events {
	return listed[corev1.Event, corev1.EventList](c.core, "events", namespace)
}

// Leases implements Interface.
func (c *client) Leases(namespace string) Leases {
	return single[coordinationv1.Lease](c.coordination, "leases", namespace)
}

// Nodes implements Interface.
func (c *client) Nodes() Nodes { return listed[corev1.Node, corev1.NodeList](c.core, "nodes", "") }

// PodDisruptionBudgets implements Interface.
func (c *client) PodDisruptionBudgets(namespace string) PodDisruptionBudgets {
	return listed[policyv1.PodDisruptionBudget, policyv1.PodDisruptionBudgetList](c.policy, "poddisruptionbudgets", namespace)
}

// Pods implements Interface.
func (c *client) Pods(namespace string) Pods {
	return pods{listed[corev1.Pod, corev1.PodList](c.core, "pods", namespace)}
}

// ResourceClaims implements Interface.
func (c *client) ResourceClaims(namespace string) ResourceClaims {
	return listed[resourcev1.ResourceClaim, resourcev1.ResourceClaimList](c.resource, "resourceclaims", namespace)
}

// ResourceSlices implements Interface.
func (c *client) ResourceSlices() ResourceSlices {
	return listed[resourcev1.ResourceSlice, resourcev1.ResourceSliceList](c.resource, "resourceslices", "")
}

// SelfSubjectAccessReviews implements Interface.
func (c *client) SelfSubjectAccessReviews() SelfSubjectAccessReviews {
	return single[authorizationv1.SelfSubjectAccessReview](c.authorization, "selfsubjectaccessreviews", "")
}

// SubjectAccessReviews implements Interface.
func (c *client) SubjectAccessReviews() SubjectAccessReviews {
	return single[authorizationv1.SubjectAccessReview](c.authorization, "subjectaccessreviews", "")
}

// TokenReviews implements Interface.
func (c *client) TokenReviews() TokenReviews {
	return single[authenticationv1.TokenReview](c.authentication, "tokenreviews", "")
}

// RawCore implements Interface.
func (c *client) RawCore() cache.Getter { return c.core }

// RawPolicy implements Interface.
func (c *client) RawPolicy() cache.Getter { return c.policy }

// RawResource implements Interface.
func (c *client) RawResource() cache.Getter { return c.resource }

type pods struct {
	*gentype.ClientWithList[*corev1.Pod, *corev1.PodList]
}

// EvictV1 implements Pods.
func (p pods) EvictV1(ctx context.Context, eviction *policyv1.Eviction) error {
	return p.GetClient().Post().Namespace(p.GetNamespace()).Resource("pods").Name(eviction.Name).SubResource("eviction").
		MaxRetries(0).Body(eviction).Do(ctx).Error()
}
