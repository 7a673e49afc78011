package fleet_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/config"
)

// BenchmarkFourHundredNodes measures a call in a pool of 400 nodes, of which 40 have a slot and 360 wait. Nodes list their
// images as real ones do, which makes most of their size.
func BenchmarkFourHundredNodes(b *testing.B) {
	const nodes, limit = 400, 40
	w := newWorld(b, atMost(limit))
	agents := make([]*agent, nodes)
	for i := range agents {
		agents[i] = w.node(fmt.Sprintf("ip-10-0-%03d.compute.internal", i), time.Duration(nodes-i)*time.Minute)
		images := make([]corev1.ContainerImage, 50)
		for j := range images {
			images[j].Names = []string{
				fmt.Sprintf("registry.example.com/team/image-%02d@sha256:%064d", j, j), fmt.Sprintf("registry.example.com/team/image-%02d:v1.2.3", j),
			}
		}
		w.images(agents[i].change.Node, images)
		if err := agents[i].take(); (err == nil) != (i < limit) {
			b.Fatalf("node %d: %v", i, err)
		}
	}
	b.Logf("the state is %d bytes with %d that wait", len(w.lease().Annotations[config.AnnotationSlots]), len(w.state().Queue))
	measure := func(name string, call func()) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			requests, sent := w.wire.requests.Load(), w.wire.sent.Load()
			for b.Loop() {
				call()
			}
			b.ReportMetric(float64(w.wire.requests.Load()-requests)/float64(b.N), "requests/op")
			b.ReportMetric(float64(w.wire.sent.Load()-sent)/float64(b.N), "sent-B/op")
		})
	}
	waits := func(a *agent) {
		var full *fleet.Full
		if err := a.take(); !errors.As(err, &full) {
			b.Fatal(err)
		}
	}
	measure("Take/behind", func() { waits(agents[nodes-1]) })
	measure("Take/front", func() { waits(agents[limit]) })
	measure("Renew", func() {
		agents[0].pass(fleet.Duration / 3)
		agents[0].renew()
	})
	w.cordon(agents[nodes-1].change.Node[len(w.namespace)+1:], true)
	agents[0].release()
	measure("Take/front, reads the nodes", func() { waits(agents[limit]) })
}
