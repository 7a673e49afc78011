package fencing_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/act/fencing"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/nvml"
)

func labelled(key, value string) func(*corev1.Node) {
	return func(node *corev1.Node) { node.Labels[key] = value }
}

// released is a driver that a process may close.
type released struct{ nvml.Driver }

// Release implements nvml.Driver.
func (released) Release(context.Context) error { return nil }

// Promise 15. A user who may write labels must not stop an agent by one that no driver manager sets. The agent names a label that a driver manager
// has left, and what a user can do about it.
func TestAnUpgradeOfTheDriverIsWhatOperandsSayAndUsersReadWhenItDoesNotEnd(t *testing.T) {
	t.Parallel()
	for value, upgrade := range map[string]bool{
		"true": false, fence.PausedValue: false, fence.PausedForDriverUpgrade: true, fence.PausedValue + "_" + fence.PausedForDriverUpgrade: true,
	} {
		for label, operand := range map[string]bool{dcgm: true, config.LabelOperandPrefix + "anything": false} {
			h := newHost(t, labelled(label, value))
			u := &fencing.UpgradeWatch{Env: h.fencing.Env, Fencing: h.fencing}
			if err := u.Observe(h.seen); (err != nil) != (upgrade && operand) {
				t.Errorf("%s=%s: %v", label, value, err)
			}
		}
	}
	h := newHost(t, labelled(dcgm, fence.PausedForDriverUpgrade))
	u := &fencing.UpgradeWatch{Env: h.fencing.Env, Driver: released{}, Fencing: h.fencing}
	u.Settings.Timeouts.DriverUpgrade = 45 * time.Minute
	for _, row := range []struct {
		after   time.Duration
		advises bool
	}{{0, false}, {45*time.Minute - time.Second, false}, {time.Second, true}} {
		h.clock.Step(row.after)
		var wait *outcome.Waiting
		if err := u.Observe(h.seen); !errors.As(err, &wait) {
			t.Fatal(err)
		}
		if err := u.ReleaseDriver(t.Context(), h.seen); err != nil {
			t.Fatal(err)
		}
		const command = "kubectl label node gpu-1 " + dcgm + "=true --overwrite"
		if wait.Reason != config.ReasonDriverNotLoaded || wait.For != outcome.ForDriver || !wait.Since.Equal(now) ||
			!strings.Contains(wait.Message, dcgm+"="+fence.PausedForDriverUpgrade) || strings.Contains(wait.Advice, command) != row.advises {
			t.Errorf("after %s: %v", h.clock.Since(now), wait)
		}
	}
}

// The node takes pods again while the driver is being upgraded, unless the cordon is another's, or another needs it.
func TestWhichNodeIsGivenBackWhileTheDriverIsUpgraded(t *testing.T) {
	t.Parallel()
	upgrade := labelled(dcgm, fence.PausedForDriverUpgrade)
	fenced, ours := behind(journal.Journal{}, theirs), []corev1.Taint{theirs, state.FenceTaint()}
	forgotten := func(node *corev1.Node) { delete(node.Annotations, config.AnnotationJournal) }
	cordonedBy := func(manager string) func(*corev1.Node) {
		return func(node *corev1.Node) {
			node.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: manager, FieldsV1: metav1.NewFieldsV1(`{"f:spec":{"f:unschedulable":{}}}`)}}
		}
	}
	for name, row := range map[string]struct {
		node          []func(*corev1.Node)
		unschedulable bool
		taints        []corev1.Taint
		underWay      bool
	}{
		"a change is under way":                             {[]func(*corev1.Node){upgrade, fenced}, false, []corev1.Taint{theirs}, true},
		"no upgrade is under way":                           {[]func(*corev1.Node){fenced}, true, ours, true},
		"it was cordoned before":                            {[]func(*corev1.Node){upgrade, behind(journal.Journal{WasUnschedulable: true}, theirs)}, true, []corev1.Taint{theirs}, true},
		"another tool needs the cordon":                     {[]func(*corev1.Node){upgrade, fenced, annotated("talos.dev/cordoned", "true")}, true, ours, true},
		"a user keeps the cordon":                           {[]func(*corev1.Node){upgrade, fenced, annotated(config.AnnotationKeepCordoned, "yes")}, true, ours, true},
		"a fresh node":                                      {[]func(*corev1.Node){upgrade, behind(fresh())}, false, []corev1.Taint{startup}, true},
		"the journal is gone":                               {[]func(*corev1.Node){upgrade, fenced, forgotten, cordonedBy(config.FieldManager)}, false, []corev1.Taint{theirs}, false},
		"the journal is gone, and a user's cordon is there": {[]func(*corev1.Node){upgrade, fenced, forgotten, cordonedBy("kubectl")}, true, []corev1.Taint{theirs}, false},
		"a user's cordon alone":                             {[]func(*corev1.Node){upgrade, func(node *corev1.Node) { node.Spec.Unschedulable = true }, cordonedBy("kubectl")}, true, nil, false},
	} {
		h := newHost(t, row.node...)
		u := &fencing.UpgradeWatch{Env: h.fencing.Env, Fencing: h.fencing}
		_ = u.Observe(h.seen) // the wait for the end of the upgrade
		u.ReleaseNode(t.Context(), h.seen)
		h.is(name, row.unschedulable, row.taints...)
		h.observe()
		if underWay := h.seen.Journal != nil; underWay != row.underWay {
			t.Errorf("%s: the journal is %+v", name, h.seen.Journal)
		}
	}
}
