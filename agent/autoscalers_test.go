package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
)

// autoscalerAnnotations are the node's annotations by which autoscalers let it be.
func (w *world) autoscalerAnnotations() map[string]string {
	w.t.Helper()
	out := map[string]string{}
	for _, key := range config.FenceAnnotations() {
		if value, there := w.node().Annotations[key]; there {
			out[key] = value
		}
	}
	return out
}

// Promises 6, 7 and 13: a drained node looks empty, and autoscalers remove empty nodes.
func TestAutoscalersLetTheNodeBeForTheTimeOfAChange(t *testing.T) {
	t.Parallel()
	const ca, karpenter = config.AnnotationScaleDownDisabled, config.AnnotationDoNotDisrupt
	for name, test := range map[string]struct {
		before, during map[string]string
		middle         func(w *world)
		after          map[string]string
	}{
		"no annotation says anything": {
			during: map[string]string{ca: "true", karpenter: "true"}, after: map[string]string{},
		},
		"a user says so in the middle": {
			during: map[string]string{ca: "true", karpenter: "true"}, after: map[string]string{karpenter: "false"},
			middle: func(w *world) { w.annotate(karpenter, "false") },
		},
		"the agent is killed in the middle": {
			during: map[string]string{ca: "true", karpenter: "true"}, after: map[string]string{},
			middle: (*world).restart,
		},
		"the journal is removed in the middle": {
			during: map[string]string{ca: "true", karpenter: "true"}, after: map[string]string{},
			middle: func(w *world) { w.unannotate(config.AnnotationJournal) },
		},
		"the journal and the request are removed in the middle": {
			during: map[string]string{ca: "true", karpenter: "true"}, after: map[string]string{},
			middle: func(w *world) {
				w.edit(func(n *corev1.Node) {
					delete(n.Annotations, config.AnnotationJournal)
					delete(n.Labels, config.LabelMIGConfig)
				})
			},
		},
		"the request is removed in the middle": {
			before: map[string]string{ca: "true"}, during: map[string]string{ca: "true", karpenter: "true"}, after: map[string]string{ca: "true"},
			middle: func(w *world) { w.unset(config.LabelMIGConfig) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.fillManagedFields()
				for key, value := range test.before {
					w.annotate(key, value)
				}
				w.startChange("all-1g.10gb")
				if diff := cmp.Diff(test.during, w.autoscalerAnnotations()); diff != "" {
					t.Errorf("in the middle (-want +got):\n%s", diff)
				}
				for key := range w.autoscalerAnnotations() {
					if _, theirs := test.before[key]; strings.Contains(w.node().Annotations[config.AnnotationJournal], key) == theirs {
						t.Errorf("the journal names %s, or does not: %s", key, w.node().Annotations[config.AnnotationJournal])
					}
				}
				if test.middle != nil {
					test.middle(w)
				}
				w.settle(config.ReasonConverged, config.ReasonNotRequested)
				w.expectGivenBack()
				if diff := cmp.Diff(test.after, w.autoscalerAnnotations()); diff != "" {
					t.Errorf("in the end (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// Promise 12: a change for which no pod has to leave keeps no pod away.
func TestAChangeWithoutAFenceIsNoMatterForAutoscalers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-enabled")
		w.label("all-1g.10gb")
		w.passes("the end", func() bool {
			if kept := w.autoscalerAnnotations(); len(kept) > 0 || w.node().Spec.Unschedulable {
				t.Fatalf("cordoned: %t; the node has %v", w.node().Spec.Unschedulable, kept)
			}
			return w.done("all-1g.10gb")()
		})
	})
}
