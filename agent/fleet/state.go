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

	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/retried"
	"github.com/gpuslice/gpuslice/config"
)

// stateVersion is the version of the state's format. Another is refused, and so is a field that is not known: it may well say who
// may take a slot.
const stateVersion = 1

// state is what an annotation of the Lease holds. Its times are for people, but for those of the line.
type state struct {
	Version  int       `json:"version"`
	Turn     int64     `json:"turn"`               // one more with each write
	Left     int64     `json:"left"`               // one more with each write by which somebody loses or returns a slot
	Nodes    int       `json:"nodes,omitempty"`    // of the pool when they were last counted, for a limit in percent
	Holders  []holder  `json:"holders,omitempty"`  // who has a slot, in the order in which they came
	Queue    []waiter  `json:"queue,omitempty"`    // who waits, in the order in which they go
	Failed   int       `json:"failed,omitempty"`   // changes in a row
	Failures []failure `json:"failures,omitempty"` // the last of them
}

type holder struct {
	Node      string      `json:"node"`
	UID       types.UID   `json:"uid"`
	Operation string      `json:"operation"`
	Since     metav1.Time `json:"since"`
	Renewed   int64       `json:"renewed"` // in this turn
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

// Bounds of what is kept of failures, since an annotation has little room.
const (
	failuresKept = 10
	whyLength    = 160 // characters
)

func (st *state) holder(uid types.UID) *holder {
	for i := range st.Holders {
		if st.Holders[i].UID == uid {
			return &st.Holders[i]
		}
	}
	return nil
}

// hold gives the node a slot, or renews the one that it has for this operation.
func (st *state) hold(c Change, now time.Time) {
	st.dropWaiters(func(w waiter) bool { return w.UID == c.UID })
	st.dropHolders(func(h holder) bool { return h.Node == c.Node && h.UID != c.UID })
	h := st.holder(c.UID)
	if h == nil {
		st.Holders = append(st.Holders, holder{Node: c.Node, UID: c.UID, Operation: c.Operation, Since: metav1.NewTime(now.UTC())})
		h = &st.Holders[len(st.Holders)-1]
	}
	if h.Operation != c.Operation {
		h.Operation, h.Failed = c.Operation, false
	}
	h.Renewed = st.Turn + 1
	st.cutLine()
}

// cutLine ends the line where nothing more has room.
func (st *state) cutLine() {
	room := mostBytes
	for _, h := range st.Holders {
		room -= size(h)
	}
	for i, w := range st.Queue {
		if room -= size(w); room < 0 || i == Most {
			st.Queue = st.Queue[:i]
			return
		}
	}
}

// size is how many bytes an entry of the state takes, with what parts it from the next.
func size[T holder | waiter](entry T) int {
	text, err := json.Marshal(entry)
	if err != nil { // a time beyond the year 9999: the state cannot be written at all, which write says
		return mostBytes
	}
	return len(text) + len(",")
}

// dropHolders reports whether any was dropped.
func (st *state) dropHolders(which func(holder) bool) bool {
	before := len(st.Holders)
	st.Holders = slices.DeleteFunc(st.Holders, which)
	return len(st.Holders) < before
}

func (st *state) waits(uid types.UID) bool {
	return slices.ContainsFunc(st.Queue, func(w waiter) bool { return w.UID == uid })
}

// lineUp puts the node where it belongs in the line, unless the line is full of older ones. It reports whether that changes the
// line.
func (st *state) lineUp(c Change) bool {
	me := waiter{Node: c.Node, UID: c.UID, Since: inLine(c)}
	if i := slices.IndexFunc(st.Queue, func(w waiter) bool { return w.UID == me.UID }); i >= 0 {
		if st.Queue[i].Node == me.Node && st.Queue[i].Since.Equal(&me.Since) {
			return false
		}
	}
	st.dropWaiters(func(w waiter) bool { return w.Node == me.Node || w.UID == me.UID })
	i, _ := slices.BinarySearchFunc(st.Queue, me, age)
	st.Queue = slices.Insert(st.Queue, i, me)
	st.cutLine()
	return i < len(st.Queue)
}

// inLine is a time as the line keeps it: in whole seconds, which an annotation keeps as they are.
func inLine(c Change) metav1.Time { return metav1.NewTime(c.Since.UTC().Truncate(time.Second)) }

// ahead are those who go first.
func (st *state) ahead(c Change) []waiter {
	i, _ := slices.BinarySearchFunc(st.Queue, waiter{Node: c.Node, Since: inLine(c)}, age)
	return st.Queue[:i]
}

func age(a, b waiter) int {
	return cmp.Or(a.Since.Compare(b.Since.Time), strings.Compare(a.Node, b.Node))
}

// dropWaiters reports whether any was dropped.
func (st *state) dropWaiters(which func(waiter) bool) bool {
	before := len(st.Queue)
	st.Queue = slices.DeleteFunc(st.Queue, which)
	return len(st.Queue) < before
}

// failed reports whether this failure is counted already.
func (st *state) failed(c Change) bool {
	return slices.ContainsFunc(st.Failures, func(f failure) bool { return f.Node == c.Node && f.Operation == c.Operation })
}

func (st *state) fail(c Change, why string, now time.Time) {
	why = legible.Message(why, whyLength)
	st.Failed++
	st.Failures = append(st.Failures, failure{Node: c.Node, Operation: c.Operation, Why: why, At: metav1.NewTime(now.UTC())})
	st.Failures = st.Failures[max(0, len(st.Failures)-failuresKept):]
}

// tooMany says why the pool is paused, and how it goes on: first, since what has failed where may be cut.
func (st *state) tooMany(namespace, lease string) string {
	which := make([]string, len(st.Failures))
	for i, f := range st.Failures {
		which[i] = fmt.Sprintf("%s (%s)", f.Node, f.Why)
	}
	return fmt.Sprintf("%d %s in a row failed; to go on: kubectl -n %s annotate lease %s %s-; failed are %s",
		st.Failed, plural(st.Failed, "change"), namespace, lease, config.AnnotationPaused, strings.Join(which, ", "))
}

// parse reads the state strictly.
func parse(text string) (state, error) {
	var version struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal([]byte(text), &version); err != nil {
		return state{}, err
	}
	if version.Version != stateVersion {
		return state{}, fmt.Errorf("its version is %d, and this agent knows version %d", version.Version, stateVersion)
	}
	var st state
	strict, err := strictjson.UnmarshalStrict([]byte(text), &st)
	if err := errors.Join(append(strict, err)...); err != nil {
		return state{}, err
	}
	for i, h := range st.Holders {
		if h.Node == "" || h.UID == "" {
			return state{}, fmt.Errorf("holders[%d]: node is %q and uid %q; neither may be empty", i, h.Node, h.UID)
		}
	}
	// Whoever has edited it need not know the order.
	slices.SortStableFunc(st.Queue, age)
	return st, nil
}

// record is the Lease of a pool as it was read, and the state that it gets.
type record struct {
	lease  *coordinationv1.Lease
	absent bool
	before []holder
	state  state
	pauses bool // the write pauses the pool
}

// paused is why nobody begins, or "".
func (r *record) paused() string {
	why, paused := r.lease.Annotations[config.AnnotationPaused]
	if paused && why == "" {
		return "somebody has paused it and not said why"
	}
	return why
}

func (r *record) pause(why string) {
	r.lease.Annotations[config.AnnotationPaused] = why
	r.pauses = true
}

// slotsMoved tells which nodes have lost or returned their slot, and which have got one.
func (r *record) slotsMoved() (left, come []string) {
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

// read gets the Lease, from the API server and not from a cache. That there is none yet is no error.
func (s *Slots) read(ctx context.Context, pool Pool) (*record, error) {
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	name := leaseName(pool)
	r := &record{}
	var lease *coordinationv1.Lease
	err := retried.Do(ctx, func() (err error) {
		lease, err = s.Client.CoordinationV1().Leases(s.Namespace).Get(ctx, name, metav1.GetOptions{})
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
		// A turn is never told twice, not even after somebody has taken the annotation or the Lease away.
		first := s.Clock.Now().UnixMilli()
		r.state = state{Version: stateVersion, Turn: first, Left: first}
	}
	r.before = slices.Clone(r.state.Holders)
	s.view(pool).noteRenewals(r.state.Holders, s.Clock.Now())
	return r, nil
}

// write replaces the Lease that was read, and reports whether somebody else was faster.
func (s *Slots) write(ctx context.Context, pool Pool, r *record) (lost bool, err error) {
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	left, come := r.slotsMoved()
	r.state.Turn++
	if len(left) > 0 {
		r.state.Left++
	}
	text, err := json.Marshal(r.state)
	if err != nil {
		return false, fmt.Errorf("encoding the state of pool %s: %w", pool.Name, err)
	}
	r.lease.Annotations[config.AnnotationSlots] = string(text)
	s.show(r, len(left)+len(come) > 0)
	leases := s.Client.CoordinationV1().Leases(s.Namespace)
	// One that was done though it failed is a conflict with itself the next time: the Lease is then read anew, with what it says.
	err = retried.Do(ctx, func() (err error) {
		if r.absent {
			_, err = leases.Create(ctx, r.lease, metav1.CreateOptions{})
		} else {
			_, err = leases.Update(ctx, r.lease, metav1.UpdateOptions{})
		}
		return err
	})
	switch {
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), !r.absent && apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("writing Lease %s/%s of pool %s: %w", s.Namespace, r.lease.Name, pool.Name, err)
	}
	if len(left)+len(come) > 0 {
		s.Log.Info("slots of the pool changed hands", zap.String("pool", pool.Name), zap.Strings("left", left), zap.Strings("come", come))
	}
	if r.pauses {
		s.Log.Warn("pausing the pool", zap.String("pool", pool.Name), zap.String("why", r.paused()))
	}
	return false, nil
}

// namesShown bounds what a table has to show.
const namesShown = 5

// show says in the Lease's own fields what people see in a table. Nobody reads them back.
func (s *Slots) show(r *record, moved bool) {
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
