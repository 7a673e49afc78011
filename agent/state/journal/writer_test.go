package journal_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// host is the disk and the API server of one node. It notes the writes of both in their order.
type host struct {
	did     []string
	record  journal.Record // on the disk
	full    error          // the disk refuses to write
	refuses error          // the API server's answer to a patch
}

// Read implements Store.
func (h *host) Read(context.Context) (*journal.Record, error) { return &h.record, nil }

// SetAside implements Store.
func (*host) SetAside(context.Context) (string, error) {
	return "", errors.New("there is no newer record")
}

// Try implements Store.
func (h *host) Try(context.Context, journal.Record) error { return h.full }

// Write implements Store.
func (h *host) Write(_ context.Context, r journal.Record) error {
	if h.full != nil {
		return h.full
	}
	h.did, h.record = append(h.did, "record"), r
	return nil
}

func (h *host) ledger(t *testing.T, node *corev1.Node) *journal.Writer {
	t.Helper()
	client := fake.NewClientset(node)
	client.PrependReactor("patch", "nodes", func(kubetesting.Action) (bool, runtime.Object, error) {
		h.did = append(h.did, "node")
		return h.refuses != nil, nil, h.refuses
	})
	clock := monotonic.New(clocktesting.NewFakeClock(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)))
	l := &journal.Writer{
		Record: &journal.Keeper{Store: h, Log: zap.NewNop()},
		Nodes:  nodewrite.Writer{Client: clientset.Of(client), Timeout: time.Minute},
		Fence:  fence.Fence{Taint: state.FenceTaint(), JournalKey: config.AnnotationJournal}, Clock: clock,
	}
	h.record.Node, h.record.UID = node.Name, string(node.UID)
	if err := l.Record.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	return l
}

// Promises 7 and 8. The host's record is on the disk before the node has the journal: an agent that is killed between the two knows by the record
// that the journal is its own. In the other order it would find a journal that nothing says to be its own.
func TestTheHostHasTheJournalBeforeTheNode(t *testing.T) {
	t.Parallel()
	started := time.Date(2026, 3, 1, 11, 0, 0, 0, time.UTC)
	opened := journal.Journal{Operation: "op", Target: "all-balanced", BootID: "boot", Started: started}
	fenced := opened
	fenced.Cordoned = true
	undone := fenced
	undone.Undo = &api.Failure{Fingerprint: "fingerprint", Reason: config.ReasonHardwareFailure, Message: "it broke"}
	full := errors.New("no space left on device")
	for name, row := range map[string]struct {
		before, writes *journal.Journal
		full           error
		did            []string
		reason         config.Reason // of the error; empty for none
	}{
		"a change begins":                        {nil, &opened, nil, []string{"record", "node", "record"}, ""},
		"it takes more":                          {&opened, &fenced, nil, []string{"record", "node", "record"}, ""},
		"it is given up":                         {&fenced, &undone, nil, []string{"record", "node", "record"}, ""},
		"a change begins, and the disk is full":  {nil, &opened, full, nil, config.ReasonHostRecordUnavailable},
		"it takes more, and the disk is full":    {&opened, &fenced, full, nil, config.ReasonHostRecordUnavailable},
		"it is given up, and the disk is full":   {&fenced, &undone, full, []string{"node"}, ""},
		"it takes nothing more, and is full too": {&fenced, &fenced, full, []string{"node"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", UID: "uid", ResourceVersion: "1"}}
			h := &host{full: row.full}
			l := h.ledger(t, node)
			err := l.Amend(t.Context(), journal.Write{Node: node, Before: row.before, Fingerprint: "fingerprint"}, *row.writes)
			var wait *outcome.Waiting
			if row.reason == "" && err != nil || row.reason != "" && (!errors.As(err, &wait) || wait.Reason != row.reason) {
				t.Errorf("got %v", err)
			}
			if diff := cmp.Diff(row.did, h.did); diff != "" {
				t.Errorf("writes (-want +got):\n%s", diff)
			}
		})
	}
}

// Promises 8 and 15. What the record holds when the node is written is what the next agent knows the journal by, whether the API server's answer has
// come or not. A journal that the API server has refused is not among those.
func TestTheNextAgentKnowsTheJournalThatWasBeingWritten(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		answer error
		known  bool
	}{
		"accepted":     {nil, true},
		"no answer":    {errors.New("connection reset by peer"), true},
		"not accepted": {apierrors.NewForbidden(corev1.Resource("nodes"), "gpu-1", errors.New("by a policy")), false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // a request without an answer is repeated after a pause
				node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", UID: "uid", ResourceVersion: "1"}}
				h := &host{refuses: row.answer}
				l := h.ledger(t, node)
				j := journal.Journal{Operation: "op", Target: "all-balanced", BootID: "boot", Started: time.Date(2026, 3, 1, 11, 0, 0, 0, time.UTC)}
				text, err := j.Encode()
				if err != nil {
					t.Fatal(err)
				}
				if err := l.Amend(t.Context(), journal.Write{Node: node, Fingerprint: "fingerprint"}, j); (err == nil) != (row.answer == nil) {
					t.Fatalf("got %v", err)
				}
				if !row.known { // the agent lives on, and observes again
					l.Tidy(t.Context(), false)
				}
				if known := h.record.Journal == text || slices.Contains(h.record.Next, text); known != row.known {
					t.Errorf("the record has the journal: %t, want %t: %s", known, row.known, strings.Join(h.record.Next, "; "))
				}
				after := node.DeepCopy()
				metav1.SetMetaDataAnnotation(&after.ObjectMeta, config.AnnotationJournal, text)
				believed, next, err := h.ledger(t, after).Read(t.Context(), after, "")
				if err != nil {
					t.Fatal(err)
				}
				if believed := believed != nil; believed != row.known || next.StrangeJournal == row.known {
					t.Errorf("the next agent believes the journal: %t, want %t", believed, row.known)
				}
			})
		})
	}
}
