package nodekeys_test

import (
	"context"
	"errors"
	"testing"
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

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/nodekeys"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	keys "github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// disk is the host's: it notes which labels each write of the record names as the agent's.
type disk struct {
	full  error
	names []map[string]string
}

// Read implements journal.Store.
func (*disk) Read(context.Context) (*journal.Record, error) { return &journal.Record{}, nil }

// Write implements journal.Store.
func (d *disk) Write(_ context.Context, r journal.Record) error {
	if d.full == nil {
		d.names = append(d.names, r.Learnt.Published.Labels)
	}
	return d.full
}

// Try implements journal.Store.
func (d *disk) Try(context.Context, journal.Record) error { return d.full }

// SetAside implements journal.Store.
func (*disk) SetAside(context.Context) (string, error) { return "", errors.New("there is none") }

// Promises 7, 8 and 13: the record names the new keys before the node has them, and the former ones until the node has them no more. So an agent that is
// killed in between takes both away, and none of another's. Without a record no key is written, but to give the node back.
func TestTheRecordNamesTheKeysBeforeTheNodeHasThem(t *testing.T) {
	t.Parallel()
	former, wanted := map[string]string{"team": "a", "old": "1"}, map[string]string{"team": "b", "new": "1", "zone": "x"}
	during, after := map[string]string{"team": "b", "old": "1", "new": "1"}, map[string]string{"team": "b", "new": "1"} // zone is a user's, with this value
	full := errors.New("no space left on device")
	refused := apierrors.NewForbidden(corev1.Resource("nodes"), "gpu-1", errors.New("by a policy"))
	for name, row := range map[string]struct {
		undo   bool
		full   error
		answer error
		names  []map[string]string // by the record, one write after the other
		labels map[string]string   // of the node
		reason config.Reason       // of the error; empty for none
		failed bool                // the API server's answer is the error
	}{
		"a change":                      {false, nil, nil, []map[string]string{during, after}, map[string]string{"team": "b", "new": "1", "zone": "x"}, "", false},
		"the API server refuses":        {false, nil, refused, []map[string]string{during, former}, map[string]string{"team": "a", "old": "1", "zone": "x"}, "", true},
		"the disk is full":              {false, full, nil, nil, map[string]string{"team": "a", "old": "1", "zone": "x"}, config.ReasonHostRecordUnavailable, false},
		"an undo, and the disk is full": {true, full, nil, nil, map[string]string{"team": "b", "new": "1", "zone": "x"}, "", false},
	} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", UID: "uid", ResourceVersion: "1", Labels: map[string]string{"team": "a", "old": "1", "zone": "x"}}}
		client, d := fake.NewClientset(node), &disk{full: row.full}
		client.PrependReactor("patch", "nodes", func(kubetesting.Action) (bool, runtime.Object, error) {
			if len(d.names) == 0 && row.full == nil {
				t.Errorf("%s: the node is written before the record", name)
			}
			return row.answer != nil, nil, row.answer
		})
		clock := monotonic.New(clocktesting.NewFakeClock(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)))
		keeper := &journal.Keeper{Store: d, Log: zap.NewNop()}
		p := nodekeys.Publisher{
			Env:     act.Env{Nodes: nodewrite.Writer{Client: clientset.Of(client), Timeout: time.Minute}, Clock: clock, Log: zap.NewNop()},
			Journal: &journal.Writer{Record: keeper, Clock: clock},
		}
		seen := &state.Observed{Node: node, Record: state.Record{Known: journal.Known{Learnt: journal.Learnt{Verified: "former", Published: keys.Keys{Labels: former}}}}}
		err := p.Publish(t.Context(), act.Input{
			Seen: seen, Want: state.Desired{Fingerprint: "asked", Undo: row.undo, Keys: &keys.Keys{Labels: wanted}}, Steps: []plan.Step{{Kind: plan.PublishNodeKeys}},
		})
		var wait *outcome.Waiting
		if errors.As(err, &wait) && wait.Reason != row.reason || (err != nil) != (row.reason != "" || row.failed) {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(row.names, d.names); diff != "" {
			t.Errorf("%s: the record (-want +got):\n%s", name, diff)
		}
		got, err := client.CoreV1().Nodes().Get(t.Context(), "gpu-1", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(row.labels, got.Labels); diff != "" {
			t.Errorf("%s: labels (-want +got):\n%s", name, diff)
		}
		if row.reason == "" && keeper.Now().Learnt.Verified != "former" {
			t.Errorf("%s: the record has lost what is verified", name)
		}
	}
}
