package node_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

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
	r.pod(namespace, "busy", map[string]string{"nvidia.com/mig-3g.40gb": "1"})
	r.awaitRunning(namespace, "busy")
	idle(t, 3*time.Second) // the agent has looked at the pod
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
	idle(t, 4*time.Second) // a pass comes after a little more than a second
	after := r.requests()
	if read := after["GET"] - before["GET"]; read > 0 {
		t.Errorf("100 writes to a pod, 20 to the node and 21 to a ConfigMap made the agent send %d requests that read: %v, %v before", read, after, before)
	}
	for _, w := range r.writes("")[written:] {
		t.Errorf("they made the agent write: %s %s", w, w.Body)
	}
}
