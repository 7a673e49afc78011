package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	strictjson "sigs.k8s.io/json"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// stateVersion is the version of the state's format. An agent refuses another version, and fields that it does not know: they may
// decide which node may take a slot.
const stateVersion = 1

// leaseState is what the Lease's annotation holds. Its times are for users to read, except those of the queue.
type leaseState struct {
	Version  int       `json:"version"`
	Turn     int64     `json:"turn"`               // grows by one with each write
	Left     int64     `json:"left"`               // grows by one with each node that loses or returns a slot
	Nodes    int       `json:"nodes,omitempty"`    // size of the pool when an agent last counted it, for a limit in percent
	Holders  []holder  `json:"holders,omitempty"`  // nodes that have a slot, in the order in which they got it
	Queue    []waiter  `json:"queue,omitempty"`    // nodes that wait, in the order in which they get slots
	Failed   int       `json:"failed,omitempty"`   // failed changes in a row
	Failures []failure `json:"failures,omitempty"` // the last of them
}

type holder struct {
	Node      string      `json:"node"`
	UID       types.UID   `json:"uid"`
	Operation string      `json:"operation"`
	Since     metav1.Time `json:"since"`
	Renewed   int64       `json:"renewed"` // the turn in which the node last renewed its slot
	Failed    bool        `json:"failed,omitempty"`
}

type waiter struct {
	Node  string      `json:"node"`
	UID   types.UID   `json:"uid"`
	Since metav1.Time `json:"since"`
}

type failure struct {
	Node      string      `json:"node"`
	Operation string      `json:"operation"`
	Why       string      `json:"why"`
	At        metav1.Time `json:"at"`
}

// Bounds of the failures in the state, since an annotation has little room.
const (
	failuresKept = 10
	whyLength    = 160 // characters
)

func (l *leaseState) holder(uid types.UID) *holder {
	for i := range l.Holders {
		if l.Holders[i].UID == uid {
			return &l.Holders[i]
		}
	}
	return nil
}

// hold gives the node a slot for the operation, or renews the one that it has.
func (l *leaseState) hold(c Change, now time.Time) {
	l.dropWaiters(func(w waiter) bool { return w.UID == c.UID })
	l.dropHolders(func(h holder) bool { return h.Node == c.Node && h.UID != c.UID })
	h := l.holder(c.UID)
	if h == nil {
		l.Holders = append(l.Holders, holder{Node: c.Node, UID: c.UID, Operation: c.Operation, Since: metav1.NewTime(now.UTC())})
		h = &l.Holders[len(l.Holders)-1]
	}
	if h.Operation != c.Operation {
		h.Operation, h.Failed = c.Operation, false
	}
	h.Renewed = l.Turn + 1
	l.trimQueue()
}

// trimQueue drops the nodes at the queue's end that find no room.
func (l *leaseState) trimQueue() {
	room := maxStateBytes
	for _, h := range l.Holders {
		room -= size(h)
	}
	for i, w := range l.Queue {
		if room -= size(w); room < 0 || i == MaxNodes {
			l.Queue = l.Queue[:i]
			return
		}
	}
}

// size returns how many bytes an entry of the state takes, with the comma after it.
func size[T holder | waiter](entry T) int {
	text, err := json.Marshal(entry)
	if err != nil { // a time beyond the year 9999 has no JSON: write returns the error
		return maxStateBytes
	}
	return len(text) + len(",")
}

// dropHolders reports whether it has dropped any holder.
func (l *leaseState) dropHolders(which func(holder) bool) bool {
	before := len(l.Holders)
	l.Holders = slices.DeleteFunc(l.Holders, which)
	return len(l.Holders) < before
}

func (l *leaseState) waits(uid types.UID) bool {
	return slices.ContainsFunc(l.Queue, func(w waiter) bool { return w.UID == uid })
}

// enqueue puts the node at its place in the queue, unless the queue is full of nodes that have waited longer. It reports whether that
// changes the queue.
func (l *leaseState) enqueue(c Change) bool {
	me := waiter{Node: c.Node, UID: c.UID, Since: waitingSince(c)}
	if i := slices.IndexFunc(l.Queue, func(w waiter) bool { return w.UID == me.UID }); i >= 0 {
		if l.Queue[i].Node == me.Node && l.Queue[i].Since.Equal(&me.Since) {
			return false
		}
	}
	l.dropWaiters(func(w waiter) bool { return w.Node == me.Node || w.UID == me.UID })
	i, _ := slices.BinarySearchFunc(l.Queue, me, age)
	l.Queue = slices.Insert(l.Queue, i, me)
	l.trimQueue()
	return i < len(l.Queue)
}

// waitingSince returns c.Since in whole seconds, which JSON does not round.
func waitingSince(c Change) metav1.Time { return metav1.NewTime(c.Since.UTC().Truncate(time.Second)) }

// ahead returns the nodes that get a slot before this one.
func (l *leaseState) ahead(c Change) []waiter {
	i, _ := slices.BinarySearchFunc(l.Queue, waiter{Node: c.Node, Since: waitingSince(c)}, age)
	return l.Queue[:i]
}

func age(a, b waiter) int {
	return cmp.Or(a.Since.Compare(b.Since.Time), strings.Compare(a.Node, b.Node))
}

// dropWaiters reports whether it has dropped any waiter.
func (l *leaseState) dropWaiters(which func(waiter) bool) bool {
	before := len(l.Queue)
	l.Queue = slices.DeleteFunc(l.Queue, which)
	return len(l.Queue) < before
}

// failed reports whether the state already counts the failure of this change.
func (l *leaseState) failed(c Change) bool {
	return slices.ContainsFunc(l.Failures, func(f failure) bool { return f.Node == c.Node && f.Operation == c.Operation })
}

func (l *leaseState) fail(c Change, why string, now time.Time) {
	why = sanitize.Message(why, whyLength)
	l.Failed++
	l.Failures = append(l.Failures, failure{Node: c.Node, Operation: c.Operation, Why: why, At: metav1.NewTime(now.UTC())})
	l.Failures = l.Failures[max(0, len(l.Failures)-failuresKept):]
}

// tooMany says why the pool is paused, and how a user lets it go on. That comes first, since the list of failures may be cut off.
func (l *leaseState) tooMany(namespace, lease string) string {
	which := make([]string, len(l.Failures))
	for i, f := range l.Failures {
		which[i] = fmt.Sprintf("%s (%s)", f.Node, f.Why)
	}
	return fmt.Sprintf("%d %s in a row failed; to go on: kubectl -n %s annotate lease %s %s-; failed are %s",
		l.Failed, plural(l.Failed, "change"), namespace, lease, config.AnnotationPaused, strings.Join(which, ", "))
}

// parse reads the state. It refuses fields that it does not know.
func parse(text string) (leaseState, error) {
	var version struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal([]byte(text), &version); err != nil {
		return leaseState{}, err
	}
	if version.Version != stateVersion {
		return leaseState{}, fmt.Errorf("its version is %d, and this agent knows version %d", version.Version, stateVersion)
	}
	var st leaseState
	strict, err := strictjson.UnmarshalStrict([]byte(text), &st)
	if err := errors.Join(append(strict, err)...); err != nil {
		return leaseState{}, err
	}
	for i, h := range st.Holders {
		if h.Node == "" || h.UID == "" {
			return leaseState{}, fmt.Errorf("holders[%d]: node is %q and uid %q; neither may be empty", i, h.Node, h.UID)
		}
	}
	// A user who edits it need not keep the order.
	slices.SortStableFunc(st.Queue, age)
	return st, nil
}

// record is the Lease of a pool as last read, and its new state.
type record struct {
	lease  *coordinationv1.Lease
	absent bool
	before []holder
	state  leaseState
	pauses bool // the write pauses the pool
}

// paused returns why the pool is paused, or "" if it is not.
func (r *record) paused() string {
	why, paused := r.lease.Annotations[config.AnnotationPaused]
	if paused && why == "" {
		return "a user has paused it and gave no reason"
	}
	return why
}

func (r *record) pause(why string) {
	r.lease.Annotations[config.AnnotationPaused] = why
	r.pauses = true
}

// slotsMoved returns which nodes have lost or returned their slot, and which have got one.
func (r *record) slotsMoved() (left, acquired []string) {
	without := func(all, others []holder) (names []string) {
		for _, h := range all {
			if !slices.ContainsFunc(others, func(o holder) bool { return o.UID == h.UID }) {
				names = append(names, h.Node)
			}
		}
		return names
	}
	return without(r.before, r.state.Holders), without(r.state.Holders, r.before)
}

// read gets the Lease from the API server, not from a cache. A missing Lease is not an error.
func (s *Leases) read(ctx context.Context, pool Pool) (*record, error) {
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	name := leaseName(pool)
	r := &record{}
	var lease *coordinationv1.Lease
	err := kube.Retry(ctx, func() (err error) {
		lease, err = s.Client.Leases(s.Namespace).Get(ctx, name, metav1.GetOptions{})
		return err
	})
	switch {
	case apierrors.IsNotFound(err):
		r.absent = true
		lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: s.Namespace, Labels: map[string]string{"app.kubernetes.io/name": "gpuslice"},
		}}
	case err != nil:
		return nil, fmt.Errorf("reading Lease %s/%s of pool %s: %w", s.Namespace, name, pool.Name, err)
	}
	r.lease = lease
	if lease.Annotations == nil {
		lease.Annotations = map[string]string{}
	}
	if text, there := lease.Annotations[config.AnnotationSlots]; there {
		if r.state, err = parse(text); err != nil {
			return nil, &Unreadable{Pool: pool.Name, Namespace: s.Namespace, Lease: name, Err: err}
		}
	} else {
		// The clock starts the turns, so that none is used twice even after a user has removed the annotation or the Lease.
		first := s.Clock.Now().UnixMilli()
		r.state = leaseState{Version: stateVersion, Turn: first, Left: first}
	}
	r.before = slices.Clone(r.state.Holders)
	s.view(pool).noteRenewals(r.state.Holders, s.Clock.Now())
	return r, nil
}

// write replaces the Lease that was read, and reports whether another node's agent has written it since.
func (s *Leases) write(ctx context.Context, pool Pool, r *record) (lost bool, err error) {
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	left, acquired := r.slotsMoved()
	r.state.Turn++
	r.state.Left += int64(len(left))
	text, err := json.Marshal(r.state)
	if err != nil {
		return false, fmt.Errorf("encoding the state of pool %s: %w", pool.Name, err)
	}
	r.lease.Annotations[config.AnnotationSlots] = string(text)
	s.fillSpec(r, len(left)+len(acquired) > 0)
	leases, written := s.Client.Leases(s.Namespace), r.lease
	// A write may succeed though its answer got lost. Its repetition is then a conflict: settle reads the Lease again, and finds the write.
	err = kube.Retry(ctx, func() (err error) {
		if r.absent {
			written, err = leases.Create(ctx, r.lease, metav1.CreateOptions{})
		} else {
			written, err = leases.Update(ctx, r.lease, metav1.UpdateOptions{})
		}
		return err
	})
	switch {
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), !r.absent && apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("writing Lease %s/%s of pool %s: %w", s.Namespace, r.lease.Name, pool.Name, err)
	}
	r.lease = written
	if len(left)+len(acquired) > 0 {
		s.Log.Info("slots of the pool changed hands", zap.String("pool", pool.Name), zap.Strings("left", left), zap.Strings("acquired", acquired))
	}
	if r.pauses {
		s.Log.Warn("pausing the pool", zap.String("pool", pool.Name), zap.String("why", r.paused()))
	}
	return false, nil
}

// remove deletes the Lease that was read or written last, if its pool has no other name than a request, no node has a slot or waits, and no user has noted
// anything on it. Otherwise each request that a label has ever named would leave a Lease. If the Lease has changed since, or the agent may not delete it, it
// stays: the next node that leaves the pool deletes it.
func (s *Leases) remove(ctx context.Context, pool Pool, r *record) {
	lease, st := r.lease, r.state
	if !pool.Unnamed || lease.ResourceVersion == "" || len(st.Holders)+len(st.Queue)+st.Failed > 0 || len(lease.Annotations) > 1 ||
		lease.Annotations[config.AnnotationSlots] == "" {
		return
	}
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	err := s.Client.Leases(s.Namespace).Delete(ctx, lease.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &lease.UID, ResourceVersion: &lease.ResourceVersion},
	})
	if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		s.Log.Info("the pool's Lease stays though it is empty", zap.String("pool", pool.Name), zap.Error(err))
	}
}

// namesShown is how many holders the table of kubectl get leases shows.
const namesShown = 5

// fillSpec fills the Lease's own fields, which kubectl shows in a table. No agent reads them.
func (s *Leases) fillSpec(r *record, moved bool) {
	spec := &r.lease.Spec
	now := ptr.To(metav1.NewMicroTime(s.Clock.Now().UTC()))
	spec.RenewTime = now
	spec.LeaseDurationSeconds = ptr.To(int32(Duration / time.Second))
	if moved {
		spec.AcquireTime = now
		spec.LeaseTransitions = ptr.To(ptr.Deref(spec.LeaseTransitions, 0) + 1)
	}
	names := make([]string, 0, namesShown+1)
	for i, h := range r.state.Holders {
		if i == namesShown {
			names = append(names, fmt.Sprintf("and %d more", len(r.state.Holders)-i))
			break
		}
		names = append(names, h.Node)
	}
	spec.HolderIdentity = nil
	if len(names) > 0 {
		spec.HolderIdentity = ptr.To(strings.Join(names, ","))
	}
}
