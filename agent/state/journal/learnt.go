package journal

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// Learnt is what the agent has to know after a restart besides what it must restore. It reads that back only from the host's record, which only root can
// write, never from the node's annotations. Without a record it knows none of it, as on a new host.
type Learnt struct {
	NoReset    *NoReset      `json:"noReset,omitempty"`
	Pool       *Pool         `json:"pool,omitempty"` // the pool in whose Lease the node has a slot or a place in the queue, or may have
	Asked      *api.AskedFor `json:"asked,omitempty"`
	Took       []Took        `json:"took,omitempty"`     // the last changes, to estimate the next
	Verified   string        `json:"verified,omitempty"` // fingerprint of the config that the agent has last verified
	Boot       string        `json:"boot,omitempty"`     // boot in which that was
	Cut        string        `json:"cut,omitempty"`      // boot in which the node had MIG instances at that time
	Layouts    []GPULayout   `json:"layouts,omitempty"`  // of the GPUs in MIG mode at that time
	Failed     *api.Failure  `json:"failed,omitempty"`   // a change that the agent does not try again until a user has withdrawn it
	Published  nodekeys.Keys `json:"published,omitzero"`
	Reported   Reported      `json:"reported,omitzero"`
	FullMemory []string      `json:"fullMemory,omitempty"` // devices that count as nearly full, as in api.Status
	Uncured    *Uncured      `json:"uncured,omitempty"`
	Foreign    *Foreign      `json:"foreign,omitempty"` // what another program has done to GPUs since a user last changed the request
	// Found has the labels and annotations by which users had asked for something before the first agent came. It loses one that a user sets again.
	Found   map[string]string `json:"found,omitempty"`
	Granted *Granted          `json:"granted,omitempty"`
}

// Granted is until when pods may stay that are asked behind one fence. A pod that ends no longer shows it.
type Granted struct {
	Since time.Time               `json:"since"` // when the fence was raised: that of another change is void
	Until map[types.UID]time.Time `json:"until"`
}

// Behind returns how long after a fence raised at since the pods may take, by their UIDs; nil if nothing is known of this fence.
func (g *Granted) Behind(since time.Time) map[types.UID]time.Duration {
	if g == nil || !g.Since.Equal(since) {
		return nil
	}
	out := map[types.UID]time.Duration{}
	for uid, until := range g.Until {
		out[uid] = until.Sub(since)
	}
	return out
}

// bounded returns the longest that a record can hold.
func (g *Granted) bounded() *Granted {
	if g == nil {
		return nil
	}
	out := &Granted{Since: g.Since, Until: map[types.UID]time.Time{}}
	longestFirst := func(a, b types.UID) int { return cmp.Or(g.Until[b].Compare(g.Until[a]), cmp.Compare(a, b)) }
	for _, uid := range slices.SortedFunc(maps.Keys(g.Until), longestFirst) {
		if name("learnt.granted", string(uid)) == nil && len(out.Until) < maxNames {
			out.Until[uid] = g.Since.Add(min(max(g.Until[uid].Sub(g.Since), 0), longestChange*time.Second))
		}
	}
	return out
}

func (g *Granted) check() error {
	if g == nil {
		return nil
	}
	var err error
	if len(g.Until) > maxNames {
		err = fmt.Errorf("learnt.granted has %d entries, at most %d", len(g.Until), maxNames)
	}
	for uid, until := range g.Until {
		err = errors.Join(err, name("learnt.granted", string(uid)))
		if took := until.Sub(g.Since); took < 0 || took > maxSeconds*time.Second {
			err = errors.Join(err, fmt.Errorf("learnt.granted is %s from the fence on, at most %d seconds", took, maxSeconds))
		}
	}
	return err
}

// Foreign counts how often another program has changed the GPUs after the agent had verified them.
type Foreign struct {
	outcome.Repeats

	Open bool `json:"open,omitempty"` // the agent has not verified the GPUs since the last time
}

// Uncured has the devices for which a device plugin, or NVIDIA's DRA driver, was to be restarted: it advertised them, and they were gone. There is none once
// the program has advertised devices without such ones.
type Uncured struct {
	Devices []string  `json:"devices"`
	Since   time.Time `json:"since"` // a pod that has started since has not cured it
}

// Pool is a pool as it was when the node asked it for a slot. A change of the node's labels does not change it.
type Pool struct {
	Name     string `json:"name"`
	Selector string `json:"selector,omitempty"` // of the nodes with the same request; empty for a pool of the maintenance file
}

// NoReset names the GPUs that the driver has refused to reset during one boot.
type NoReset struct {
	Boot string      `json:"boot"`
	GPUs []nvml.UUID `json:"gpus"`
}

// Took is how long a change took, in seconds.
type Took struct {
	Whole int `json:"whole"` // from the fence on
	Rest  int `json:"rest"`  // from the first touch of a GPU on
}

// Reported is what the agent has last reported of the node.
type Reported struct {
	Desired string        `json:"desired,omitempty"` // name of the desired config
	Phase   api.Phase     `json:"phase,omitempty"`
	Reason  config.Reason `json:"reason,omitempty"`
	Since   time.Time     `json:"since,omitzero"` // when Reason began, for the desired config
}

// Bounds of what is learnt.
const (
	longestFailure = 4 << 10 // bytes of its message
	longestChange  = 365 * 24 * 3600
)

// bounded returns it as a record can hold it.
func (l Learnt) bounded() Learnt {
	if f := l.Failed; f != nil { // whatever led to it: the agent does not retry it
		l.Failed = &api.Failure{Fingerprint: f.Fingerprint, Reason: f.Reason, Message: sanitize.Cut(f.Message, longestFailure)}
	}
	took := l.Took
	l.Took = nil
	for _, t := range took {
		l.Took = append(l.Took, Took{Whole: min(max(t.Whole, 0), longestChange), Rest: min(max(t.Rest, 0), longestChange)})
	}
	l.FullMemory = l.FullMemory[:min(len(l.FullMemory), maxNames)]
	l.Layouts = l.Layouts[:min(len(l.Layouts), maxEntries)]
	if u := l.Uncured; u != nil {
		l.Uncured = &Uncured{Devices: u.Devices[:min(len(u.Devices), maxNames)], Since: u.Since}
	}
	l.Granted = l.Granted.bounded()
	return l
}

// FullMemory returns the devices that the agent has last reported as nearly full.
func (w *Writer) FullMemory() []string { return w.Record.Now().Learnt.FullMemory }

// check holds it to its bounds: another program may have written the record.
func (l *Learnt) check() error {
	err := errors.Join(
		name("learnt.verified", l.Verified), name("learnt.boot", l.Boot), name("learnt.cut", l.Cut), names("learnt.fullMemory", l.FullMemory, maxName),
		name("learnt.reported.desired", l.Reported.Desired), name("learnt.reported.phase", string(l.Reported.Phase)),
		name("learnt.reported.reason", string(l.Reported.Reason)),
	)
	if n := l.NoReset; n != nil {
		err = errors.Join(err, name("learnt.noReset.boot", n.Boot), names("learnt.noReset.gpus", n.GPUs, maxName))
	}
	if u := l.Uncured; u != nil {
		err = errors.Join(err, names("learnt.uncured.devices", u.Devices, maxName))
	}
	if p := l.Pool; p != nil {
		err = errors.Join(err, name("learnt.pool.name", p.Name), name("learnt.pool.selector", p.Selector))
	}
	if a := l.Asked; a != nil {
		err = errors.Join(err, name("learnt.asked.fingerprint", a.Fingerprint))
	}
	if f := l.Failed; f != nil {
		err = errors.Join(err, name("learnt.failed.fingerprint", f.Fingerprint), name("learnt.failed.reason", string(f.Reason)),
			checkText("learnt.failed.message", f.Message, maxText))
	}
	if f := l.Foreign; f != nil && f.Times < 1 {
		err = errors.Join(err, fmt.Errorf("learnt.foreign.times is %d, at least 1", f.Times))
	}
	if len(l.Found) > maxNames {
		err = errors.Join(err, fmt.Errorf("learnt.found has %d entries, at most %d", len(l.Found), maxNames))
	}
	for key, value := range l.Found {
		err = errors.Join(err, name("learnt.found", key), name("learnt.found", value))
	}
	if len(l.Took) > maxTook {
		err = errors.Join(err, fmt.Errorf("learnt.took has %d entries, at most %d", len(l.Took), maxTook))
	}
	for _, t := range l.Took {
		if min(t.Whole, t.Rest) < 0 || max(t.Whole, t.Rest) > maxSeconds {
			err = errors.Join(err, fmt.Errorf("learnt.took is %d and %d seconds, at most %d", t.Whole, t.Rest, maxSeconds))
		}
	}
	return errors.Join(err, checkKeys(l.Published), l.Granted.check(), checkLayouts(l.Layouts))
}

func checkLayouts(of []GPULayout) error {
	if len(of) > maxEntries {
		return fmt.Errorf("learnt.layouts has %d entries, at most %d", len(of), maxEntries)
	}
	if err := checkCuts(of); err != nil {
		return fmt.Errorf("learnt.layouts: %w", err)
	}
	return nil
}

func checkKeys(k nodekeys.Keys) error {
	var err error
	if len(k.Labels) > maxNames || len(k.Taints) > maxNames {
		err = fmt.Errorf("learnt.published has %d labels and %d taints, at most %d", len(k.Labels), len(k.Taints), maxNames)
	}
	for key, value := range k.Labels {
		err = errors.Join(err, name("learnt.published.labels", key), name("learnt.published.labels", value))
	}
	for _, t := range k.Taints {
		err = errors.Join(err, name("learnt.published.taints", t.Key), name("learnt.published.taints", t.Value), name("learnt.published.taints", string(t.Effect)))
	}
	return err
}
