package fencing_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
)

// opens puts the startup taint on the node, and returns for how long the agent leaves it there.
func (h *host) opens() time.Duration {
	h.t.Helper()
	node := h.node()
	node.Spec.Taints = []corev1.Taint{theirs, startup}
	if _, err := h.client.CoreV1().Nodes().Update(h.t.Context(), node, metav1.UpdateOptions{}); err != nil {
		h.t.Fatal(err)
	}
	for put := h.clock.Now(); ; {
		h.observe()
		err := h.fencing.Resume(h.t.Context(), act.Input{Seen: h.seen, Steps: []plan.Step{{Kind: plan.ResumeOperands}}})
		var wait *outcome.Waiting
		switch {
		case err == nil:
			h.is("opened", false, theirs)
			return h.clock.Since(put)
		case !errors.As(err, &wait) || wait.Reason != config.ReasonStepHadNoEffect || wait.After <= 0:
			h.t.Fatal(err)
		}
		h.clock.Step(wait.After)
	}
}

// Something that sets the startup taint again at each event of the node gets no answer to each of its writes, and users read that it does.
func TestAStartupTaintThatIsPutBackIsTakenAwayEverLater(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	for i, want := range []time.Duration{0, 5, 10, 20, 40, 80, 160, 300, 300} {
		if took := h.opens(); took != want*time.Second {
			t.Errorf("the taint is taken away the %d. time after %s, want %ds", i+1, took, want)
		}
		if n := len(h.events.Events); n != i { // not of the first: kubelet has set that taint
			t.Fatalf("%d Events after %d times", n, i+1)
		}
	}
	last := ""
	for len(h.events.Events) > 0 {
		last = <-h.events.Events
	}
	for _, want := range []string{string(config.ReasonStepHadNoEffect), config.TaintNotReady, "9 times", "something puts it back", "spec.taints"} {
		if !strings.Contains(last, want) {
			t.Errorf("the Event is %q, want %q in it", last, want)
		}
	}
	if text := h.fencing.Returned(h.seen); !strings.Contains(text, "next removal at 2026-03-01 12:20:15Z") {
		t.Errorf("the condition says %q", text)
	}
	h.observe() // it is away
	if text := h.fencing.Returned(h.seen); text != "" {
		t.Errorf("the condition says %q", text)
	}
	for name, change := range map[string]func(*host){
		"after half an hour":    func(h *host) { h.clock.Step(30*time.Minute + time.Second) },
		"of another node":       (*host).register,
		"after the clock's set": func(h *host) { h.fencing.Forget(now) },
	} {
		h := newHost(t)
		h.opens()
		h.opens()
		change(h)
		if first, second := h.opens(), h.opens(); first != 0 || second != 5*time.Second {
			t.Errorf("%s the taint is taken away after %s, and then after %s", name, first, second)
		}
	}
}

// register gives the node object of this name another identity.
func (h *host) register() {
	h.t.Helper()
	node := h.node()
	node.UID = "another"
	if _, err := h.client.CoreV1().Nodes().Update(h.t.Context(), node, metav1.UpdateOptions{}); err != nil {
		h.t.Fatal(err)
	}
}
