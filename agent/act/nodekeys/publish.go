// Package nodekeys writes the labels and taints of a profile to the node, and removes them again.
package nodekeys

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config/nodekeys"
)

// Publisher publishes the labels and taints of one node's profile.
type Publisher struct {
	act.Env

	Journal *journal.Writer
}

// Publish writes the profile's labels and taints to the node. Before that it adds them to the host's record, and after it removes those of the
// former profile from there.
func (p *Publisher) Publish(ctx context.Context, in act.Input) error {
	learnt := in.Seen.Record.Learnt
	ours := learnt.Published
	_, _, note := nodekeys.Settled(in.Seen.Node, ours, *in.Want.Keys)
	learnt.Published = note.And(ours)
	if err := p.Journal.LearnFirst(ctx, in.Seen.Writing(in.Want, plan.PublishNodeKeys), learnt); err != nil {
		return err
	}
	var body []byte
	err := p.Nodes.Patch(ctx, in.Seen.Node, func(node *corev1.Node) (_ []byte, err error) {
		body, note, err = nodekeys.Patch(node, ours, *in.Want.Keys)
		return body, err
	})
	switch {
	case err == nil:
		learnt.Published = note
	case journal.Refused(err): // the keys are not on the node
		learnt.Published = ours
	default:
		return err
	}
	p.Journal.Learn(ctx, learnt)
	return err
}
