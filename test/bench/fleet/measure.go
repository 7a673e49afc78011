package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
)

// result is what was measured of a fleet.
type result struct {
	nodes  int
	phases []phase
}

// phase is one thing that happens to the whole fleet.
type phase struct {
	name   string
	agents counts // requests of the agents
	server served // of everybody
	took   time.Duration
}

// requested is what each node requests.
const requested = "all-3g.40gb"

// settled is how long the agents have to be silent for what has happened to be over: a pass comes a little more than a second after what
// wakes it.
const settled = 5 * time.Second

// measure takes the fleet through the phases.
func (f *fleet) measure(ctx context.Context) (result, error) {
	r := result{nodes: len(f.nodes)}
	for _, p := range []struct {
		name  string
		do    func(context.Context) error
		exact bool // what comes after it is none of it
	}{
		{name: "start", do: f.begin},
		{name: "a change of each node", do: f.change},
		{name: "idle for " + f.idle.String(), do: f.rest, exact: true},
		{name: fmt.Sprintf("%d updates of a pod on each node", f.updates), do: f.updatePods},
		{name: "edit of a ConfigMap that no agent watches", do: f.edit(unrelated, "key", "another")},
		{name: "edit of a config that no node asks for", do: f.editUnused},
		{name: "edit of the pool's limit", do: f.edit(maintenanceMap, maintenanceKey, f.maintenance("11%"))},
	} {
		before := f.tally.now()
		server, err := askServed(ctx, f.client)
		if err != nil {
			return result{}, err
		}
		began := time.Now()
		if err := p.do(ctx); err != nil {
			return result{}, fmt.Errorf("%s: %w", p.name, err)
		}
		measured := phase{name: p.name, took: time.Since(began)}
		if !p.exact {
			if err := pause(ctx, settled); err != nil {
				return result{}, err
			}
		}
		measured.agents = f.tally.now().since(before)
		after, err := askServed(ctx, f.client)
		if err != nil {
			return result{}, err
		}
		measured.server = after.since(server)
		r.phases = append(r.phases, measured)
		fmt.Fprintf(f.log, "%s: %s\n%s", p.name, measured.took.Round(100*time.Millisecond), measured.agents)
		if err := f.settle(ctx); err != nil { // what is left of it belongs to no phase
			return result{}, err
		}
	}
	return r, nil
}

// begin starts the agents, and waits for the word of each.
func (f *fleet) begin(ctx context.Context) error {
	if err := f.startAgents(ctx); err != nil {
		return err
	}
	err := f.await(ctx, "the condition of each node", func(n *corev1.Node) bool { return reason(n) == config.ReasonNotRequested })
	if err != nil {
		return err
	}
	return f.addPods(ctx)
}

// request labels all nodes.
func (f *fleet) request(ctx context.Context) error {
	return f.each(ctx, func(ctx context.Context, _ int, n *node) error {
		body := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%q}}}`, config.LabelMIGConfig, requested)
		_, err := f.client.CoreV1().Nodes().Patch(ctx, n.name, types.MergePatchType, body, metav1.PatchOptions{})
		return err
	})
}

// change requests instances on all nodes at once: each waits for its turn, evicts a pod, and cuts its GPU.
func (f *fleet) change(ctx context.Context) error {
	if err := f.request(ctx); err != nil {
		return err
	}
	return f.await(ctx, "the instances of each node", func(n *corev1.Node) bool {
		_, pending := n.Annotations[config.AnnotationJournal]
		return reason(n) == config.ReasonConverged && strings.HasPrefix(condition(n).Message, requested+":") && !pending && !n.Spec.Unschedulable
	})
}

// rest lets nothing happen.
func (f *fleet) rest(ctx context.Context) error { return pause(ctx, f.idle) }

// updatePods writes annotations and labels of a pod on each node, in turn.
func (f *fleet) updatePods(ctx context.Context) error {
	return f.each(ctx, func(ctx context.Context, _ int, n *node) error {
		for i := range f.updates {
			body := fmt.Appendf(nil, `{"metadata":{%q:{"example.com/seen":"%d"}}}`, []string{"annotations", "labels"}[i%2], i)
			if _, err := f.client.CoreV1().Pods(metav1.NamespaceDefault).Patch(ctx, n.name, types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
				return err
			}
		}
		return nil
	})
}

func (f *fleet) edit(name, key, text string) func(context.Context) error {
	return func(ctx context.Context) error {
		body := fmt.Appendf(nil, `{"data":{%q:%q}}`, key, text)
		_, err := f.client.CoreV1().ConfigMaps(namespace).Patch(ctx, name, types.MergePatchType, body, metav1.PatchOptions{})
		return err
	}
}

// editUnused adds a config to those that all agents watch.
func (f *fleet) editUnused(ctx context.Context) error {
	file, err := f.client.CoreV1().ConfigMaps(namespace).Get(ctx, configs, metav1.GetOptions{})
	if err != nil {
		return err
	}
	const added = "  unused:\n    - {devices: all, mig-enabled: true, mig-devices: {\"7g.80gb\": 1}}\n"
	return f.edit(configs, config.DefaultMIGConfigMapKey, file.Data[config.DefaultMIGConfigMapKey]+added)(ctx)
}

// addPods runs a pod on each node, of the node's name: one that holds its GPU, and is evicted for the change.
func (f *fleet) addPods(ctx context.Context) error {
	return f.each(ctx, func(ctx context.Context, _ int, n *node) error {
		for name, limits := range map[string]corev1.ResourceList{n.name: nil, n.name + "-work": {"nvidia.com/gpu": *newQuantity(1)}} {
			_, err := f.client.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: name},
				Spec: corev1.PodSpec{NodeName: n.name, Containers: []corev1.Container{{
					Name: "c", Image: "work", Resources: corev1.ResourceRequirements{Limits: limits},
				}}},
			}, metav1.CreateOptions{})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// settle waits until the agents have sent nothing for a while, at most for some of it: one of many always has a heartbeat.
func (f *fleet) settle(ctx context.Context) error {
	for range 6 {
		before := f.tally.now()
		if err := pause(ctx, settled); err != nil {
			return err
		}
		if len(f.tally.now().since(before)) == 0 {
			return nil
		}
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

func condition(n *corev1.Node) corev1.NodeCondition {
	for _, c := range n.Status.Conditions {
		if c.Type == config.ConditionGPUPartitionReady {
			return c
		}
	}
	return corev1.NodeCondition{}
}

func reason(n *corev1.Node) config.Reason { return config.Reason(condition(n).Reason) }

func describe(n *corev1.Node) string {
	c := condition(n)
	return fmt.Sprintf("node %s says %s: %s", n.Name, c.Reason, c.Message)
}

func newQuantity(n int64) *resource.Quantity { return resource.NewQuantity(n, resource.DecimalSI) }

// ofLeases and conflicts match requests.
func ofLeases(r request) bool { return r.resource == "leases" }

func conflicts(r request) bool { return ofLeases(r) && r.code == http.StatusConflict }
