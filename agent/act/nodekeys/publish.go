// Package nodekeys writes the labels and taints of a profile to the node, and removes them again.
package nodekeys

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config/nodekeys"
)

// Publisher publishes the labels and taints of one node's profile.
type Publisher struct {
	act.Env

	Record  *journal.Keeper
	Journal *journal.Writer
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
func (p *Publisher) Publish(ctx context.Context, in act.Input) error {
	ours, purpose := in.Seen.Record.Published, in.Seen.Writing(in.Want, plan.PublishNodeKeys)
	_, _, note := nodekeys.Settled(in.Seen.Node, ours, *in.Want.Keys)
	during := note.And(ours)
	r := p.Record.Now
	r.Learnt = journal.LearntOf(in.Seen.Record.Status, during)
	if purpose.GivesBack {
		p.Record.Keep(ctx, r, p.Clock.Now())
	} else if err := p.Record.Write(ctx, r, p.Clock.Now()); err != nil {
		return p.Journal.Unrecorded(purpose, err)
	}
	var body []byte
	err := p.Nodes.Patch(ctx, in.Seen.Node, func(node *corev1.Node) (_ []byte, err error) {
		body, note, err = nodekeys.Patch(node, ours, *in.Want.Keys)
		return body, err
	})
	switch {
	case err == nil:
		p.Journal.Learn(ctx, journal.LearntOf(in.Seen.Record.Status, note))
	case journal.Refused(err): // the keys are not on the node
		p.Journal.Learn(ctx, journal.LearntOf(in.Seen.Record.Status, ours))
	}
	return err
}
