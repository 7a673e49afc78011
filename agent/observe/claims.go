package observe

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/agent/api"
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
	// maxOfPod bounds how many of these are of one pod that has not started: whoever makes pods decides how many claims it names.
	maxOfPod = 16
	// atOnce bounds how many claims are read at the same time: a slow API server still answers for those of a full node in one observation.
	atOnce = 16
	// readAgain is the time until a claim that was not settled for its pod is read again. It doubles with each read, up to readAgainMost.
	readAgain     = 10 * time.Second
	readAgainMost = 5 * time.Minute
	// soonest is the least time until the next observation that reads claims, where this one has left some out.
	soonest = time.Second
)

// Claims reads the resource claims of the node's pods, and the ResourceSlices of DRA drivers for the node. A node with neither costs the API
// server nothing. It is not safe for use by several goroutines.
type Claims struct {
	Objects *watch.Objects
	Client  kube.Interface
	Clock   *monotonic.Clock
	Timeout time.Duration // of all reads of claims together, and again of the slices

	known    map[holders.PodClaim]readClaim
	driver   bool                      // the node has shown a trace of a DRA driver
	others   map[holders.Device]string // see state.DRA
	reported string                    // the last text that News has reported

	again   bool // the next observation reads all claims that are not settled
	readAll bool // this one has
	unsure  bool // a pod has a claim that is not settled
	next    time.Duration
}

// readClaim is a claim that was read for a pod. Once settled for the pod, it stays so until the pod has ended.
type readClaim struct {
	claim   holders.Claim
	err     error
	at      time.Time
	reads   int
	started bool // a container of the pod had started before
}

// Forget drops the claims that are due again after a while: their times are of the former clock.
func (c *Claims) Forget(time.Time) {
	for key, has := range c.known {
		if !has.claim.IsSettledFor(key.Pod) {
			delete(c.known, key)
		}
	}
}

// FreshFor reports whether the claims of this observation are recent enough. For a step that changes something, each claim has to be read in this one. Only claims that are not
// settled for their pods can have changed. If this observation does not suffice, the next one reads them.
func (c *Claims) FreshFor(step bool) bool {
	fresh := !step || c.readAll || !c.unsure
	c.again = c.again || !fresh
	return fresh
}

// Observe adds the allocations of claims to the observation. It reads claims if mayRead is set, and always where NVIDIA's DRA driver advertises the GPUs:
// only its claim shows there that a pod has a device which is gone. Otherwise it uses those that it has. A claim that cannot be read is no
// error of the observation: its pod may have any GPU.
func (c *Claims) Observe(ctx context.Context, seen *state.Observed, mayRead bool) {
	c.driver = c.driver || slices.ContainsFunc(seen.Pods, offer.NamesDriver) || seen.Kubelet.Assigned.GivesOut("")
	had := c.driver
	if had {
		c.slices(ctx, seen)
	}
	kind := offer.OwnerOf(seen).Kind
	atRest := kind == api.OwnerDRAStatic || kind == api.OwnerDRADynamic
	c.claims(ctx, seen, mayRead || atRest)
	if !atRest {
		c.next = 0
	}
	if c.driver = had || allocates(seen.DRA.Claims, ""); c.driver && !had {
		c.slices(ctx, seen)
	}
	c.keepOthers(seen)
}

// ReadsIn returns in how long a claim is due again although no change is under way; 0 if none is.
func (c *Claims) ReadsIn() time.Duration { return c.next }

// slices adds the ResourceSlices, those of NVIDIA's driver apart from those of others. It has its own deadline: a slow claim makes no slice unreadable.
func (c *Claims) slices(ctx context.Context, seen *state.Observed) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
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
	seen.DRA.Others = holders.OfOthers(all, seen.GPUs)
	own := slices.DeleteFunc(all, func(s resourcev1.ResourceSlice) bool { return s.Spec.Driver != holders.ClaimDriver })
	seen.DRA.Slices, seen.DRA.Complete = holders.CurrentSlices(own)
	seen.DRA.Slices = holders.ByBus(seen.DRA.Slices, buses)
}

// keepOthers adds devices of other drivers from the observation before, if the driver shows none now and pods have devices of it. Kubelet deletes the slices of a
// driver that has gone, and its pods keep their GPUs.
func (c *Claims) keepOthers(seen *state.Observed) {
	shows := map[string]bool{}
	for d := range seen.DRA.Others {
		shows[d.Driver] = true
	}
	for d, uuid := range c.others {
		if shows[d.Driver] || !seen.Kubelet.Assigned.GivesOut(d.Driver) && !allocates(seen.DRA.Claims, d.Driver) {
			continue
		}
		if seen.DRA.Others == nil {
			seen.DRA.Others = map[holders.Device]string{}
		}
		seen.DRA.Others[d] = uuid
	}
	c.others = seen.DRA.Others
}

// claims adds the claims of the pods, and why some could not be read.
func (c *Claims) claims(ctx context.Context, seen *state.Observed, mayRead bool) {
	names := namedClaims(seen.Pods)
	if c.readAll = mayRead && c.again; mayRead {
		c.again = false
		c.refresh(ctx, seen, names)
	}
	known := map[holders.PodClaim]readClaim{}
	seen.DRA.Claims, seen.DRA.Unread, c.unsure = holders.Claims{}, nil, false
	unread := 0
	for _, n := range names {
		has, is := c.known[n.PodClaim]
		c.unsure = c.unsure || !has.claim.IsSettledFor(n.Pod)
		if !is {
			continue
		}
		known[n.PodClaim] = has
		if has.err != nil {
			seen.DRA.Unread = cmp.Or(seen.DRA.Unread, has.err)
			unread++
			continue
		}
		seen.DRA.Claims[n.PodClaim] = has.claim
	}
	c.known = known
	_, c.next = c.due(seen, names, false)
	if unread > 1 {
		seen.DRA.Unread = fmt.Errorf("%w; one of %d resource claims that cannot be read", seen.DRA.Unread, unread)
	}
}

// namedClaim is a claim that a pod names.
type namedClaim struct {
	holders.PodClaim

	by *corev1.Pod
}

// namedClaims returns the claims of the pods that have not ended.
func namedClaims(pods []corev1.Pod) (out []namedClaim) {
	for i := range pods {
		if state.Ended(&pods[i]) {
			continue
		}
		for _, name := range holders.ClaimNames(&pods[i]) {
			out = append(out, namedClaim{PodClaim: holders.PodClaim{Pod: pods[i].UID, Name: name}, by: &pods[i]})
		}
	}
	return out
}

// refresh reads the due claims side by side, as many as one observation may: first those that were never read, then those read the longest ago.
func (c *Claims) refresh(ctx context.Context, seen *state.Observed, names []namedClaim) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	due, _ := c.due(seen, names, c.readAll)
	slices.SortStableFunc(due, func(a, b namedClaim) int { return c.known[a.PodClaim].at.Compare(c.known[b.PodClaim].at) })
	due = due[:min(len(due), maxReads)]
	read, slots := make([]readClaim, len(due)), make(chan struct{}, atOnce)
	var all sync.WaitGroup
	for i, n := range due {
		slots <- struct{}{}
		all.Go(func() {
			if ctx.Err() == nil {
				read[i] = c.read(ctx, n.by.Namespace, n.Name)
			}
			<-slots
		})
	}
	all.Wait()
	if c.known == nil {
		c.known = map[holders.PodClaim]readClaim{}
	}
	for i, n := range due {
		switch {
		case !read[i].at.IsZero():
			read[i].reads, read[i].started = c.known[n.PodClaim].reads+1, holders.HasStarted(n.by)
			c.known[n.PodClaim] = read[i]
		case c.readAll: // the time was over: a step would rest on what was read before
			delete(c.known, n.PodClaim)
		}
	}
}

// due lists the claims to read, and says in how long the next is due; 0 if none is. All says that each is due that is not settled for its pod. Of a pod that
// awaits a claim without a device, that one claim is enough. So pods that name claims which are never settled cost little, however many they name.
func (c *Claims) due(seen *state.Observed, names []namedClaim, all bool) (out []namedClaim, next time.Duration) {
	read := holders.Claimed{Claims: holders.Claims{}}
	for key, has := range c.known {
		if has.err == nil {
			read.Claims[key] = has.claim
		}
	}
	var of *corev1.Pod
	var awaits, started bool
	var n int
	for _, name := range names { // pod by pod
		if name.by != of {
			of, n = name.by, 0
			awaits, started = read.Awaits(of, seen.Kubelet.Assigned), holders.HasStarted(of)
		}
		has, is := c.known[name.PodClaim]
		wait := time.Duration(0)
		if is && !all {
			wait = c.dueIn(has, of)
		}
		switch {
		case has.claim.IsSettledFor(name.Pod), awaits && (!has.claim.Free || n > 0), !started && n >= maxOfPod:
			continue
		case wait <= 0:
			out = append(out, name)
		}
		n++
		if wait = max(wait, soonest); next == 0 || wait < next {
			next = wait
		}
	}
	return out, next
}

// dueIn returns in how long the claim, which is not settled for the pod, is to be read again.
func (c *Claims) dueIn(has readClaim, pod *corev1.Pod) time.Duration {
	if holders.HasStarted(pod) && !has.started {
		return 0
	}
	pause := readAgain
	for n := 1; n < has.reads && pause < readAgainMost; n++ {
		pause *= 2
	}
	return min(pause, readAgainMost) - c.Clock.Since(has.at)
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

// allocates reports whether one of the claims has a device of the driver; of any if it is empty.
func allocates(claims holders.Claims, driver string) bool {
	for _, c := range claims {
		if slices.ContainsFunc(c.Devices, func(d holders.ClaimedDevice) bool { return driver == "" || d.Driver == driver }) {
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
