package node_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// requests are those that the agent has sent to the API server, by verb. A watch is one, when it begins.
func (r *rig) requests() map[string]int {
	r.t.Helper()
	out := map[string]int{}
	for line := range strings.Lines(r.metrics()) {
		labels, is := strings.CutPrefix(line, "gpuslice_api_requests_total{")
		if !is {
			continue
		}
		_, rest, _ := strings.Cut(labels, `verb="`)
		verb, rest, _ := strings.Cut(rest, `"} `)
		n, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
		if err != nil {
			r.t.Fatalf("%s: %v", line, err)
		}
		out[verb] += int(n)
	}
	return out
}

// lastPass is when the agent's last pass has ended, as its metrics have it.
func (r *rig) lastPass() string {
	r.t.Helper()
	for line := range strings.Lines(r.metrics()) {
		if at, is := strings.CutPrefix(line, config.MetricLastSuccessfulPass+" "); is {
			return at
		}
	}
	r.t.Fatalf("no %s", config.MetricLastSuccessfulPass)
	return ""
}

// occupy runs a pod on a slice, and returns when the agent has made a pass for it. A node at rest makes none for minutes else.
func (r *rig) occupy(namespace, pod string) {
	r.t.Helper()
	before := r.lastPass()
	r.pod(namespace, pod, map[string]string{"nvidia.com/mig-3g.40gb": "1"})
	r.awaitRunning(namespace, pod)
	err := wait.PollUntilContextTimeout(r.t.Context(), 100*time.Millisecond, patience, true, func(context.Context) (bool, error) {
		return r.lastPass() != before, nil //nolint:contextcheck // it has the test's, as all of a rig
	})
	if err != nil {
		r.t.Fatalf("no pass after pod %s: %v", pod, err)
	}
}

// Promise 17: pods of the node, the node itself and the ConfigMaps of the settings are written by others, and the agent sees it by its watches.
func TestPromise17WhatOthersWriteCostsTheAPIServerNoRead(t *testing.T) {
	t.Parallel()
	namespace := clustertest.Namespace(t)
	name := namespace + "-maintenance"
	r := newRig(t, twoH100, "maintenance: {name: "+name+"}\n")
	r.configMapOf(name, map[string]string{maintenanceKey: file()})
	r.awaitOffered("nvidia.com/gpu", 2)
	r.serveMetrics()
	r.run()
	r.label(config.LabelMIGConfig, "all-3g.40gb")
	r.await("the last word on it", func(n *corev1.Node) bool {
		return converged("all-3g.40gb")(n) && strings.Contains(n.Annotations[config.AnnotationStatus], string(config.ReasonConverged))
	})
	r.awaitEvent(metav1.NamespaceDefault, r.Name, config.ReasonConverged, "all-3g.40gb") // which another goroutine of the agent sends
	r.occupy(namespace, "busy")
	r.await("a status with the pod", func(n *corev1.Node) bool { return holding(n) == 1 })
	before, written := r.requests(), len(r.writes(""))

	patch := func(what string, n int, write func(body []byte) error) {
		t.Helper()
		for i := range n {
			if err := write(fmt.Appendf(nil, `{"metadata":{"annotations":{"example.com/seen":"%d"}}}`, i)); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
		}
	}
	patch("pod", 100, func(body []byte) error {
		_, err := r.client.CoreV1().Pods(namespace).Patch(t.Context(), "busy", types.MergePatchType, body, metav1.PatchOptions{})
		return err
	})
	patch("node", 20, func(body []byte) error {
		_, err := r.client.CoreV1().Nodes().Patch(t.Context(), r.Name, types.MergePatchType, body, metav1.PatchOptions{})
		return err
	})
	patch("ConfigMap", 20, func(body []byte) error {
		_, err := r.client.CoreV1().ConfigMaps("gpuslice").Patch(t.Context(), name, types.MergePatchType, body, metav1.PatchOptions{})
		return err
	})
	edited := fmt.Appendf(nil, `{"data":{%q:%q}}`, maintenanceKey, file()+"pools: [{name: other, selector: {matchLabels: {pool: other}}, maxUnavailable: 1}]\n")
	_, err := r.client.CoreV1().ConfigMaps("gpuslice").Patch(t.Context(), name, types.MergePatchType, edited, metav1.PatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r.occupy(namespace, "another") // so that a pass comes after all of these writes
	after := r.requests()
	if read := after["GET"] - before["GET"]; read > 0 {
		t.Errorf("100 writes to a pod, 20 to the node, 21 to a ConfigMap and another pod made the agent send %d requests that read: %v, %v before", read, after, before)
	}
	for _, w := range r.writes("")[written:] {
		if !strings.Contains(w.Body, config.AnnotationStatus) || strings.Count(w.Body, `\"pod\":`) != 2 { // the other pod has a GPU now
			t.Errorf("they made the agent write: %s %s", w, w.Body)
		}
	}
}

// holding counts the pods with GPUs in the status.
func holding(n *corev1.Node) int {
	return strings.Count(n.Annotations[config.AnnotationStatus], `"pod":`)
}
