package agent_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
)

// wrongProfiles is a file of profiles with a mistake in each of them.
func wrongProfiles(n int) string {
	var b strings.Builder
	b.WriteString("apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\nprofiles:\n")
	for i := range n {
		fmt.Fprintf(&b, "  p%d: {mig: [{enabled: maybe\u202e}]}\n", i)
	}
	return b.String()
}

// TestPromise16ThousandsOfMistakesAreReportedInOneMessage: the API server refuses a condition of megabytes, and the node would keep its
// former condition.
func TestPromise16ThousandsOfMistakesAreReportedInOneMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H100-80GB}]")
		w.settings.Profiles = config.ConfigMapKey{Namespace: "gpuslice", Name: "profiles", Key: "config.yaml"}
		file := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "gpuslice", Name: "profiles"}, Data: map[string]string{"config.yaml": wrongProfiles(3_000)}}
		if err := w.client.Tracker().Add(file); err != nil {
			t.Fatal(err)
		}
		events := w.restartWithEvents()
		w.set(config.LabelProfile, "p1")
		c := w.settle(config.ReasonInvalidCatalog)
		isPlainText(t, "condition", c.Message, 1024)
		if !strings.Contains(c.Message, " more") || !strings.Contains(c.Message, "p0") {
			t.Errorf("neither the first mistake nor how many: %s", c.Message)
		}
		isPlainText(t, "Event", strings.TrimPrefix(<-events, "Warning InvalidCatalog "), 1024)
		if n := len(w.node().Annotations[config.AnnotationStatus]); n > 32<<10 {
			t.Errorf("the status has %d bytes", n)
		}
	})
}

func isPlainText(t *testing.T, what, text string, most int) {
	t.Helper()
	if n := utf8.RuneCountInString(text); n > most || n == 0 {
		t.Errorf("%s of %d characters", what, n)
	}
	if strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		t.Errorf("%s with what is not printable: %q", what, text)
	}
}

// TestPromise16FullAnnotationsSilenceNoCondition: a program that fills the annotations of a node keeps the agent only from writing its
// annotation.
func TestPromise16FullAnnotationsSilenceNoCondition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H100-80GB}]")
		w.converge("all-1g.10gb")
		w.client.PrependReactor("patch", "nodes", w.refusesAnnotations)
		w.annotate("example.com/full", strings.Repeat("x", 256<<10-200))
		w.label("no-such-config")
		c := w.settle(config.ReasonUnknownConfig)
		if !strings.Contains(c.Message, "annotations of this node are full") {
			t.Errorf("it does not say why the status is out of date: %s", c.Message)
		}
		if state := w.node().Labels[config.LabelMIGConfigState]; state != string(config.StateFailed) {
			t.Errorf("state label %q", state)
		}
		w.unannotate("example.com/full")
		w.passes("status", func() bool {
			var s api.Status
			if err := json.Unmarshal([]byte(w.node().Annotations[config.AnnotationStatus]), &s); err != nil {
				t.Fatal(err)
			}
			return s.Reason == config.ReasonUnknownConfig
		})
		w.spend(time.Minute)
		if c := w.condition(); strings.Contains(c.Message, "full") {
			t.Errorf("there is room, and it says: %s", c.Message)
		}
	})
}

// refusesAnnotations refuses a patch by which the node's annotations would take more than 256 KiB, as the API server does.
func (w *world) refusesAnnotations(action k8stesting.Action) (bool, runtime.Object, error) {
	var patch struct {
		Metadata struct {
			Annotations map[string]*string `json:"annotations"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(action.(k8stesting.PatchAction).GetPatch(), &patch); err != nil { //nolint:errcheck // it is a patch
		return true, nil, err
	}
	object, err := w.client.nodes.Get(corev1.SchemeGroupVersion.WithResource("nodes"), "", nodeName)
	if err != nil {
		return true, nil, err
	}
	all := object.(*corev1.Node).Annotations //nolint:errcheck // it is a node
	for k, v := range patch.Metadata.Annotations {
		delete(all, k)
		if v != nil {
			all[k] = *v
		}
	}
	size := 0
	for k, v := range all {
		size += len(k) + len(v)
	}
	if size <= 256<<10 || len(patch.Metadata.Annotations) == 0 {
		return false, nil, nil
	}
	return true, nil, apierrors.NewInvalid(schema.GroupKind{Kind: "Node"}, nodeName, nil)
}
