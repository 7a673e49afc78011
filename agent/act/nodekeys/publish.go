// Package nodekeys writes the labels and taints of a profile to the node, and removes them again.
package nodekeys

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config/nodekeys"
)

// Publisher publishes the labels and taints of one node's profile.
type Publisher struct {
	Nodes   nodewrite.Writer
	Record  *journal.Keeper
	Journal *journal.Writer
	Clock   *monotonic.Clock
}

// Noted returns the keys of a profile by the node's annotation. It is for a host without a record: an older agent kept none, and a host that
// was installed anew has lost it.
func (p *Publisher) Noted(seen *state.Observed) nodekeys.Keys {
	profiles, err := seen.CatalogOfProfiles()
	if err != nil {
		return nodekeys.Keys{}
	}
	return nodekeys.Noted(seen.Node, profiles)
}

// Publish writes the profile's labels and taints to the node. Before that it adds them to the host's record, and after it removes those of the
// former profile from there.
func (p *Publisher) Publish(ctx context.Context, seen *state.Observed, want state.Desired) error {
	ours, purpose := seen.Record.Published, seen.Writing(want, plan.PublishNodeKeys)
	_, _, note := nodekeys.Settled(seen.Node, ours, *want.Keys)
	during := note.And(ours)
	r := p.Record.Now
	r.Learnt = journal.LearntOf(seen.Record.Status, during)
	if purpose.GivesBack {
		p.Record.Keep(ctx, r, p.Clock.Now())
	} else if err := p.Record.Write(ctx, r, p.Clock.Now()); err != nil {
		return p.Journal.Unrecorded(purpose, err)
	}
	var body []byte
	err := p.Nodes.Patch(ctx, seen.Node, func(node *corev1.Node) (_ []byte, err error) {
		body, note, err = nodekeys.Patch(node, ours, *want.Keys)
		return body, err
	})
	switch {
	case err == nil:
		p.Journal.Learn(ctx, journal.LearntOf(seen.Record.Status, note))
	case journal.Refused(err): // the keys are not on the node
		p.Journal.Learn(ctx, journal.LearntOf(seen.Record.Status, ours))
	}
	return err
}
