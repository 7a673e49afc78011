package node_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

var update = flag.Bool("update", false, "write what the agents of other nodes make of a stolen token's writes into deploy/ATTEMPTS.md")

// afterwards is a row of that table.
type afterwards struct{ attempt, write, then string }

// How a write ends that the token is tried for. One that the policies refuse an administrator makes in its place, so that it is seen what comes of it
// without them.
const (
	refused     = "denied by the policies"
	goesThrough = "goes through"
)

// Promise 24. test/policy asks what a stolen token can write. This is what the agents of other nodes make of it, with NVIDIA's own device plugin and config manager.
func TestNoOtherNodeIsDisturbedByWhatAStolenTokenWrites(t *testing.T) {
	t.Parallel()
	var keys, slots, rules []afterwards
	t.Run("of an agent", func(t *testing.T) {
		t.Run("into the device plugin's ConfigMap", func(t *testing.T) {
			t.Parallel()
			keys = stolenKeys(t)
		})
		t.Run("into the Lease of a pool", func(t *testing.T) {
			t.Parallel()
			slots = stolenSlots(t)
		})
		t.Run("into DeviceTaintRules", func(t *testing.T) {
			t.Parallel()
			rules = stolenRules(t)
		})
	})
	if !t.Failed() {
		compareAfterwards(t, slices.Concat(keys, slots, rules))
	}
}

// stolen is the token of the agent of another node, which runs none.
type stolen struct {
	kubernetes.Interface
	node *corev1.Node
}

func (r *rig) stolenToken() stolen {
	r.t.Helper()
	n := clustertest.NodeOf(r.t, r.cluster)
	token, err := r.cluster.NodeConfig(r.t.Context(), agentNamespace, "gpuslice-agent", n.Name)
	if err != nil {
		r.t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(token)
	if err != nil {
		r.t.Fatal(err)
	}
	return stolen{client, n}
}

// hostile is a config that takes all GPUs for MPS, so that all pods have to leave, and has the plugin write what the container runtime runs as root.
const hostile = "version: v1\nflags: {plugin: {containerDriverRoot: /opt/evil, nvidiaCTKPath: /opt/evil/hook, deviceListStrategy: cdi-annotations}}\n" +
	"sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 7}]}}\n"

// stolenKeys has a node whose pods have all of what its agent's own key of the ConfigMap shares.
func stolenKeys(t *testing.T) []afterwards {
	t.Helper()
	const profiles = "apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\nprofiles:\n  six-each: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 6}]}}}\n"
	r := newRig(t, "gpus: [{model: H100-80GB}]", "devicePlugin: {handover: configmap}\nprofiles: {name: stolen-keys}\n", configManager)
	r.configMapOf("stolen-keys", map[string]string{"profiles.yaml": profiles})
	r.awaitOffered("nvidia.com/gpu", 1)
	r.run()
	r.label(config.LabelProfile, "six-each")
	r.awaitConverged("six-each")
	namespace, cordons := clustertest.Namespace(t), r.cordons()
	for i := range 4 {
		r.pod(namespace, fmt.Sprintf("user-%d", i), map[string]string{"nvidia.com/gpu": "1"})
	}
	before := r.awaitPods(namespace, "4 pods", func(pods map[types.UID]*corev1.Pod) bool { return len(pods) == 4 && all(pods, running) })
	devices, token := r.assignments(namespace), r.stolenToken()
	key := r.node().Labels[config.LabelDevicePluginConfig]
	if own := config.OwnPluginKey + string(r.node().UID) + "-"; !strings.HasPrefix(key, own) {
		t.Fatalf("the node goes by key %s, want %s…", key, own)
	}
	text := r.pluginConfigs()[key]
	var rows []afterwards
	note := func(attempt, write string) {
		t.Helper()
		r.undisturbed(namespace, before, devices)
		rows = append(rows, afterwards{
			"ConfigMap of the device plugin: " + attempt, write,
			fmt.Sprintf("%d of %d pods evicted; fences: %d", len(r.evictions(namespace)), len(before), r.cordons()-cordons),
		})
	}
	foreign := config.OwnPluginKey + string(token.node.UID) + "-1a2b3c"
	for _, a := range []struct {
		attempt, key string
		text         any
		want         string
	}{
		{"another text under the key that the node uses: by MPS, with paths and hooks", key, hostile, refused},
		{"that key removed", key, nil, refused},
		{"the same text under a key of the token's own node", foreign, hostile, goesThrough},
	} {
		write := goesThrough
		switch err := setKey(t.Context(), token, a.key, a.text); {
		case apierrors.IsForbidden(err):
			write = refused
			err = setKey(t.Context(), r.client, a.key, a.text)
			fallthrough
		default:
			if err != nil {
				t.Fatal(err)
			}
		}
		if write != a.want {
			t.Errorf("%s: the write %s, want %s", a.attempt, write, a.want)
		}
		r.awaitObservation()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		err := wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(context.Context) (bool, error) {
			return r.pluginConfigs()[key] == text, nil //nolint:contextcheck // it has the test's, as all of a rig
		})
		cancel()
		if err != nil {
			t.Fatalf("%s: the agent does not write its key again: %v", a.attempt, err)
		}
		r.awaitObservation()
		r.givenBack(r.awaitConverged("six-each"))
		note(a.attempt, write)
	}
	// The config manager obeys the label at once, so that the agent has the plugin's own config to prove again.
	r.label(config.LabelDevicePluginConfig, foreign)
	r.givenBack(r.await("the agent's label", func(n *corev1.Node) bool {
		return n.Labels[config.LabelDevicePluginConfig] == key && n.Annotations[config.AnnotationJournal] == "" && converged("six-each")(n)
	}))
	note("and a user who may patch nodes sets the label of another node to that key, which its agent sets back", goesThrough)
	if err := setKey(t.Context(), token, foreign, nil); err != nil {
		t.Error(err)
	}
	return rows
}

// setKey writes a key of the device plugin's ConfigMap, or takes it away.
func setKey(ctx context.Context, by kubernetes.Interface, key string, text any) error {
	body, err := json.Marshal(map[string]any{"data": map[string]any{key: text}})
	if err != nil {
		return err
	}
	_, err = by.CoreV1().ConfigMaps("nvidia-device-plugin").Patch(ctx, "device-plugin-configs", types.MergePatchType, body, metav1.PatchOptions{FieldManager: config.FieldManager})
	return err
}

// awaitObservation waits until the agent has observed the node again: it answers a question that was not there.
func (r *rig) awaitObservation() {
	r.t.Helper()
	r.annotate(config.AnnotationPreview, "diagnosis")
	r.await("an answer", func(n *corev1.Node) bool { return n.Annotations[config.AnnotationPlan] != "" })
	r.annotate(config.AnnotationPreview, nil)
	r.await("no answer", func(n *corev1.Node) bool { return n.Annotations[config.AnnotationPlan] == "" })
}

func (r *rig) annotate(key string, value any) {
	r.t.Helper()
	if _, err := r.patch(r.t.Context(), map[string]any{"metadata": map[string]any{"annotations": map[string]any{key: value}}}); err != nil {
		r.t.Fatal(err)
	}
}

// stolenSlots has three nodes that wait for a pool, each with a pod on its GPU, and each given a slot that it has not asked for.
func stolenSlots(t *testing.T) []afterwards {
	t.Helper()
	f := newFleet(t, 3, 0)
	token, namespace := f.nodes[0].stolenToken(), clustertest.Namespace(t)
	for i, r := range f.nodes {
		r.user(namespace, fmt.Sprintf("user-%d", i), nil)
	}
	f.run()
	var rows []afterwards
	nodes := f.nodeEvents()
	// waits asks for another config, so that each agent has looked once it says why it does not begin.
	waits := func(requested string, reason config.Reason) {
		t.Helper()
		for _, r := range f.nodes {
			r.label(config.LabelMIGConfig, requested)
		}
		for _, r := range f.nodes {
			r.await(requested+" to wait", func(n *corev1.Node) bool {
				var s api.Status
				_ = json.Unmarshal([]byte(n.Annotations[config.AnnotationStatus]), &s) // what cannot be read does not wait
				return s.Desired == requested && s.Reason == reason
			})
		}
	}
	note := func(attempt string) {
		t.Helper()
		cordons := 0
		for _, r := range f.nodes {
			cordons += r.cordons()
		}
		rows = append(rows, afterwards{
			"Lease of a pool: slots for three nodes that wait, " + attempt, goesThrough,
			fmt.Sprintf("%d of 3 nodes fenced, %d pods evicted", cordons, len(f.nodes[0].evictions(namespace))),
		})
	}
	waits("all-balanced", config.ReasonAwaitingSlot)
	f.give(token)
	waits("all-7g.80gb", config.ReasonAwaitingSlot)
	note("with `maxUnavailable: 0`")

	f.kubectlLease("annotate", config.AnnotationPaused+"=an audit")
	waits("all-balanced", config.ReasonPoolPaused)
	f.give(token)
	waits("all-7g.80gb", config.ReasonPoolPaused)
	note("and people have paused it")

	f.limit = 1
	f.edit(f.limit)
	waits("all-balanced", config.ReasonPoolPaused)
	f.give(token)
	f.kubectlLease("annotate", config.AnnotationPaused+"-")
	for first := ""; first == "" || !converged("all-balanced")(f.seen[first]); {
		select {
		case e := <-nodes:
			f.observe(e)
			if n, ok := e.Object.(*corev1.Node); ok && first == "" && fenced(n) {
				first = n.Name
				f.give(token) // once more, beside the one that has begun
			}
		case <-time.After(patience):
			t.Fatalf("no node is as asked; the first was %q", first)
		}
	}
	rows = append(rows, afterwards{
		"Lease of a pool: slots for three nodes that wait, with `maxUnavailable: 1`, before the first begins and again when it has", goesThrough,
		fmt.Sprintf("%d of 3 nodes fenced at a time", f.most),
	})
	return rows
}

// edit gives the pool another limit.
func (f *fleet) edit(limit int) {
	f.t.Helper()
	body, err := json.Marshal(map[string]any{"data": map[string]string{maintenanceKey: fmt.Sprintf(
		"%spools:\n- {name: %s, selector: %s=%s, maxUnavailable: %d}\n", maintenanceHeader, f.pool, labelPool, f.pool, limit)}})
	if err != nil {
		f.t.Fatal(err)
	}
	if _, err := f.client.CoreV1().ConfigMaps(agentNamespace).Patch(f.t.Context(), f.pool, types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
		f.t.Fatal(err)
	}
}

// give writes with the token that all nodes of the pool have a slot.
func (f *fleet) give(token stolen) {
	f.t.Helper()
	var given []map[string]any
	for _, r := range f.nodes {
		given = append(given, map[string]any{"node": r.Name, "uid": r.node().UID, "operation": "forged", "since": metav1.Now(), "renewed": 1 << 40})
	}
	text, err := json.Marshal(map[string]any{"version": 1, "turn": 1 << 40, "left": 1 << 40, "holders": given})
	if err != nil {
		f.t.Fatal(err)
	}
	leases := token.CoordinationV1().Leases(agentNamespace)
	for {
		var lease *coordinationv1.Lease
		if lease, err = leases.Get(f.t.Context(), f.lease(), metav1.GetOptions{}); err != nil {
			f.t.Fatal(err)
		}
		lease.Annotations[config.AnnotationSlots] = string(text)
		if _, err = leases.Update(f.t.Context(), lease, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
			break
		}
	}
	if err != nil {
		f.t.Fatal(err)
	}
}

const (
	attemptsPage    = "../../deploy/ATTEMPTS.md"
	afterwardsBegin = "<!-- afterwards: written by go test ./test/node -run StolenToken -update -->\n"
	afterwardsEnd   = "<!-- end of afterwards -->\n"
)

// compareAfterwards holds the page to what was seen.
func compareAfterwards(t *testing.T, rows []afterwards) {
	t.Helper()
	var want strings.Builder
	want.WriteString("| with the token of the agent on another node | the write | what the agents of these nodes do, where it goes through |\n|---|---|---|\n")
	for _, r := range rows {
		fmt.Fprintf(&want, "| %s | %s | %s |\n", r.attempt, r.write, r.then)
	}
	text, err := os.ReadFile(attemptsPage)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), afterwardsBegin)
	table, after, ended := strings.Cut(rest, afterwardsEnd)
	if !found || !ended {
		t.Fatalf("%s has no place for the table", attemptsPage)
	}
	if testing.Short() { // NVIDIA's DRA driver does not run then, and its rows are not seen
		var seen strings.Builder
		for line := range strings.Lines(table) {
			if !strings.HasPrefix(line, "| "+rulesRow) {
				seen.WriteString(line)
			}
		}
		table = seen.String()
	} else if *update {
		if err := os.WriteFile(attemptsPage, []byte(before+afterwardsBegin+want.String()+afterwardsEnd+after), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(table, want.String()); diff != "" {
		t.Errorf("%s says otherwise (-page +seen); go test ./test/node -run StolenToken -update writes it:\n%s", attemptsPage, diff)
	}
}
