package observe

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
)

const (
	// maxReads bounds how many claims one observation reads; the next one reads more. A node of eight GPUs, each in seven, has 56 in use.
	maxReads = 256
	// readAgain is the least time between two reads of a claim that was not settled for its pod.
	readAgain = 15 * time.Second
)

// Claims reads the resource claims of the node's pods, and the ResourceSlices of NVIDIA's DRA driver for the node. A node with neither costs the API
// server nothing. It is not safe for use by several goroutines.
type Claims struct {
	Objects *watch.Objects
	Client  kube.Interface
	Clock   *monotonic.Clock
	Timeout time.Duration // of all reads of claims together, and again of the slices

	known    map[holders.PodClaim]readClaim
	driver   bool   // the node has shown a trace of the driver
	reported string // the last text that News has reported
}

// readClaim is a claim that was read for a pod. Once settled for the pod, it stays so until the pod has ended.
type readClaim struct {
	claim holders.Claim
	err   error
	at    time.Time
}

// Forget drops the claims that are due again after a while: their times are of the former clock.
func (c *Claims) Forget(time.Time) {
	for key, has := range c.known {
		if !has.claim.IsSettledFor(key.Pod) {
			delete(c.known, key)
		}
	}
}

// Observe adds the allocations of claims to the observation. It reads claims only if mayRead says so; otherwise it uses those that it has. An
// unreadable claim is no error of the observation: it counts as holding every GPU.
func (c *Claims) Observe(ctx context.Context, seen *state.Observed, mayRead bool) {
	seen.DRA.Claims, seen.DRA.Unread = c.claims(ctx, seen.Pods, mayRead)
	c.driver = c.driver || slices.ContainsFunc(seen.Pods, offer.NamesDriver) || seen.Kubelet.Assigned.GivesOut(holders.ClaimDriver) || allocates(seen.DRA.Claims)
	if !c.driver {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout) // a slow claim makes no slice unreadable
	defer cancel()
	all, err := c.Objects.Slices(ctx)
	if err != nil {
		seen.DRA.Err = err
		return
	}
	buses := map[string]string{}
	for _, gpu := range seen.GPUs {
		buses[gpu.PCI] = string(gpu.UUID)
	}
	seen.DRA.Slices, seen.DRA.Complete = holders.CurrentSlices(all)
	seen.DRA.Slices = holders.ByBus(seen.DRA.Slices, buses)
}

// claims returns the claims of the pods, and why some could not be read.
func (c *Claims) claims(ctx context.Context, pods []corev1.Pod, mayRead bool) (holders.Claims, error) {
	names := namedClaims(pods)
	if mayRead {
		c.refresh(ctx, names)
	}
	known, out := map[holders.PodClaim]readClaim{}, holders.Claims{}
	unread := 0
	var first error
	for _, n := range names {
		has, is := c.known[n.PodClaim]
		if !is {
			continue
		}
		known[n.PodClaim] = has
		if has.err != nil {
			first = cmp.Or(first, has.err)
			unread++
			continue
		}
		out[n.PodClaim] = has.claim
	}
	c.known = known
	if unread > 1 {
		first = fmt.Errorf("%w; one of %d unreadable resource claims, each treated as holding every GPU", first, unread)
	}
	return out, first
}

// namedClaim is a claim that a pod names.
type namedClaim struct {
	holders.PodClaim

	namespace string
}

// namedClaims returns the claims of the pods that have not ended.
func namedClaims(pods []corev1.Pod) (out []namedClaim) {
	for i := range pods {
		if state.Ended(&pods[i]) {
			continue
		}
		for _, name := range holders.ClaimNames(&pods[i]) {
			out = append(out, namedClaim{PodClaim: holders.PodClaim{Pod: pods[i].UID, Name: name}, namespace: pods[i].Namespace})
		}
	}
	return out
}

// refresh reads the due claims, as many as one observation may: first those that were never read, then those read the longest ago. A user may have
// many claims that never settle; in this order they delay no other claim for ever.
func (c *Claims) refresh(ctx context.Context, names []namedClaim) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	due := slices.DeleteFunc(slices.Clone(names), func(n namedClaim) bool {
		has, is := c.known[n.PodClaim]
		return is && !c.isDue(has, n.Pod)
	})
	slices.SortStableFunc(due, func(a, b namedClaim) int { return c.known[a.PodClaim].at.Compare(c.known[b.PodClaim].at) })
	for _, n := range due[:min(len(due), maxReads)] {
		if ctx.Err() != nil {
			return
		}
		if c.known == nil {
			c.known = map[holders.PodClaim]readClaim{}
		}
		c.known[n.PodClaim] = c.read(ctx, n.namespace, n.Name)
	}
}

// isDue reports whether the claim is to be read again for the pod.
func (c *Claims) isDue(has readClaim, pod types.UID) bool {
	return !has.claim.IsSettledFor(pod) && c.Clock.Since(has.at) >= readAgain
}

func (c *Claims) read(ctx context.Context, namespace, name string) readClaim {
	out := readClaim{at: c.Clock.Now()}
	// The API server takes any text as the name in a pod's status. There is no claim with an invalid name.
	if len(name) > validation.DNS1123SubdomainMaxLength || len(apivalidation.NameIsDNSSubdomain(name, false)) > 0 {
		out.claim.Free = true
		return out
	}
	var claim *resourcev1.ResourceClaim
	err := kube.Retry(ctx, func() (err error) {
		claim, err = c.Client.ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
		return err
	})
	switch {
	case apierrors.IsForbidden(err):
		out.err = fmt.Errorf("grant the agent get on resourceclaims of the group resource.k8s.io, as deploy/base/rbac.yaml does: reading resource claim %s/%s: %w", namespace, name, err)
	case apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse): // else the API server lacks the resource
		out.claim.Free = true
	case err != nil:
		out.err = fmt.Errorf("reading resource claim %s/%s: %w", namespace, name, err)
	default:
		out.claim = holders.ReadClaim(claim)
	}
	return out
}

// allocates reports whether one of the claims has a device of the driver.
func allocates(claims holders.Claims) bool {
	for _, c := range claims {
		if slices.ContainsFunc(c.Devices, func(d holders.ClaimedDevice) bool { return d.Driver == holders.ClaimDriver }) {
			return true
		}
	}
	return false
}

// News returns why the agent does not know all allocations of claims; nil if it does, or if News has returned that last.
func (c *Claims) News(seen *state.Observed) error {
	err := cmp.Or(seen.DRA.Err, seen.DRA.Unread)
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text == c.reported {
		return nil
	}
	c.reported = text
	return err
}
