package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
)

const (
	namespace = "gpuslice" // of deploy/base
	account   = "gpuslice-agent"
	pool      = "bench"
	labelPool = "bench.gpuslice.io/pool"
)

// manifests are what a user applies, below the root of the checkout, and the device plugin's DaemonSet.
var manifests = []string{
	"deploy/base/namespace.yaml", "deploy/base/serviceaccount.yaml", "deploy/base/rbac.yaml", "deploy/base/configmap-mig-configs.yaml",
	"deploy/components/impersonation/rbac.yaml", "deploy/policies", "test/node/manifests/device-plugin.yaml",
}

// fleet is a control plane with nodes, and an agent on each.
type fleet struct {
	options

	dir     string
	cluster *cluster.Cluster
	client  kubernetes.Interface // the administrator's
	nodes   []*node
	tally   *tally
	logs    *zap.Logger

	store   cache.Store   // of the nodes
	changed chan struct{} // a node has

	running  sync.WaitGroup
	end      context.CancelFunc
	endPlane context.CancelFunc // kubelets outlive the agents
}

// start starts all but the agents.
func start(ctx context.Context, o options, n int) (f *fleet, err error) {
	f = &fleet{options: o, tally: &tally{counts: counts{}}, changed: make(chan struct{}, 1)}
	if f.dir, err = os.MkdirTemp("", "gpuslice-fleet-"); err != nil {
		return nil, fmt.Errorf("making a directory for the fleet: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.stop())
		}
	}()
	logs := zap.NewProductionConfig()
	logs.Level, logs.OutputPaths = zap.NewAtomicLevelAt(zap.WarnLevel), []string{filepath.Join(f.dir, "agents.log")}
	if f.logs, err = logs.Build(); err != nil {
		return nil, err
	}
	if f.cluster, err = cluster.Start(ctx, cluster.Options{Dir: filepath.Join(f.dir, "cluster"), Log: o.log, APIServerFlags: o.flags}); err != nil {
		return nil, err
	}
	if f.client, err = kubernetes.NewForConfig(f.cluster.Config()); err != nil {
		return nil, err
	}
	if err := f.apply(ctx); err != nil {
		return nil, err
	}
	return f, f.join(ctx, n)
}

// apply applies the manifests, and the maintenance file with the pool.
func (f *fleet) apply(ctx context.Context) error {
	root, err := binaries.Builder{}.Checkout()
	if err != nil {
		return err
	}
	files := manifests
	if f.share {
		files = append(slices.Clone(files), "deploy/components/flow-control/flow-control.yaml")
	}
	var paths []string
	for _, file := range files {
		paths = append(paths, filepath.Join(root, file))
	}
	if err := f.cluster.Apply(ctx, paths...); err != nil {
		return err
	}
	for name, data := range map[string]map[string]string{
		maintenanceMap: {maintenanceKey: f.maintenance(f.limit)}, unrelated: {"key": "value"},
	} {
		_, err := f.client.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: data}, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("creating ConfigMap %s: %w", name, err)
		}
	}
	return nil
}

// The ConfigMaps that are edited.
const (
	maintenanceMap = "gpuslice-maintenance"
	maintenanceKey = "maintenance.yaml"
	configs        = "gpuslice-mig-configs" // of deploy/base
	unrelated      = "unrelated"
)

func (*fleet) maintenance(limit string) string {
	return "apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nestimate: 1s\njitter: 0s\npools:\n" +
		"- {name: " + pool + ", selector: " + labelPool + "=" + pool + ", maxUnavailable: " + limit + "}\n"
}

// atOnce is how many nodes are seen to at a time where all are.
const atOnce = 16

// each calls do for all nodes, some at a time.
func (f *fleet) each(ctx context.Context, do func(ctx context.Context, i int, n *node) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for i, n := range f.nodes {
		group.Go(func() error { return do(ctx, i, n) })
	}
	return group.Wait()
}

// join adds the nodes, and waits until the device plugin of each offers its GPU.
func (f *fleet) join(ctx context.Context, n int) error {
	plane, end := context.WithCancel(context.WithoutCancel(ctx))
	f.endPlane = end
	k := &kubelets{client: f.client, nodes: map[string]*node{}, log: f.logs}
	for i := range n {
		name, bootID := fmt.Sprintf("gpu-%04d", i), fmt.Sprintf("00000000-0000-4000-8000-%012d", i)
		made, err := newNode(f.dir, name, bootID)
		if err != nil {
			return err
		}
		f.nodes = append(f.nodes, made)
		k.nodes[name] = made
	}
	if err := f.each(ctx, func(ctx context.Context, _ int, n *node) error { return f.register(ctx, n) }); err != nil {
		return err
	}
	poke := func() {
		select {
		case f.changed <- struct{}{}:
		default:
		}
	}
	var informer cache.Controller
	f.store, informer = cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(f.client.CoreV1().RESTClient(), "nodes", metav1.NamespaceAll, fields.Everything()),
		ObjectType:    &corev1.Node{},
		Handler:       cache.ResourceEventHandlerFuncs{AddFunc: func(any) { poke() }, UpdateFunc: func(_, _ any) { poke() }, DeleteFunc: func(any) { poke() }},
	})
	go informer.RunWithContext(plane)
	k.run(plane)
	go f.renewLeases(plane)
	return f.await(ctx, "the GPU of each node", func(n *corev1.Node) bool {
		gpus := n.Status.Allocatable["nvidia.com/gpu"]
		return gpus.Value() == 1
	})
}

// register creates the node's object as kubelet does.
func (f *fleet) register(ctx context.Context, n *node) error {
	_, err := f.client.CoreV1().Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.name, Labels: map[string]string{labelPool: pool, corev1.LabelHostname: n.name, "nvidia.com/gpu.present": "true"}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("creating node %s: %w", n.name, err)
	}
	now, has := metav1.Now(), corev1.ResourceList{corev1.ResourcePods: *newQuantity(110), corev1.ResourceCPU: *newQuantity(64)}
	body, err := json.Marshal(map[string]any{"status": map[string]any{
		"capacity": has, "allocatable": has, "nodeInfo": map[string]any{"bootID": n.bootID},
		"conditions": []corev1.NodeCondition{{
			Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", LastHeartbeatTime: now, LastTransitionTime: now,
		}},
	}})
	if err != nil {
		return err
	}
	if _, err := f.client.CoreV1().Nodes().Patch(ctx, n.name, types.StrategicMergePatchType, body, metav1.PatchOptions{}, "status"); err != nil {
		return fmt.Errorf("reporting node %s as ready: %w", n.name, err)
	}
	return nil
}

// leaseEvery is how often a kubelet renews its node's Lease: the node counts as gone after 50 seconds.
const leaseEvery = 15 * time.Second

// renewLeases renews the Leases of all nodes, as their kubelets do.
func (f *fleet) renewLeases(ctx context.Context) {
	ticks := time.NewTicker(leaseEvery)
	defer ticks.Stop()
	for {
		now := time.Now().UTC().Format(metav1.RFC3339Micro)
		err := f.each(ctx, func(ctx context.Context, _ int, n *node) error {
			body := fmt.Appendf(nil, `{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":%q},"spec":{"leaseDurationSeconds":40,"renewTime":%q}}`, n.name, now)
			_, err := f.client.CoordinationV1().Leases("kube-node-lease").Patch(ctx, n.name, types.ApplyPatchType, body,
				metav1.PatchOptions{FieldManager: "kubelet", Force: new(bool)})
			return err
		})
		if err != nil && ctx.Err() == nil {
			f.logs.Warn("renewing the Leases of the nodes", zap.Error(err))
		}
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
	}
}

// startAgents starts all agents at once, each with a token of its node.
func (f *fleet) startAgents(ctx context.Context) error {
	accounts := make([]*rest.Config, len(f.nodes))
	err := f.each(ctx, func(ctx context.Context, i int, n *node) (err error) {
		accounts[i], err = f.cluster.NodeConfig(ctx, namespace, account, n.name)
		return err
	})
	if err != nil {
		return err
	}
	agents, end := context.WithCancel(context.WithoutCancel(ctx))
	f.end = end
	return f.each(ctx, func(_ context.Context, i int, n *node) error {
		a, err := n.agent(agents, accounts[i], f.tally, f.logs)
		if err != nil {
			return fmt.Errorf("making the agent of node %s: %w", n.name, err)
		}
		f.running.Go(func() {
			if err := a.Run(agents); err != nil {
				f.logs.Error("agent ended", zap.String("node", n.name), zap.Error(err))
			}
		})
		return nil
	})
}

// await waits until all nodes are as wanted.
func (f *fleet) await(ctx context.Context, what string, wanted func(*corev1.Node) bool) error {
	ctx, cancel := context.WithTimeout(ctx, f.patience)
	defer cancel()
	for {
		late, example := 0, ""
		for _, n := range f.nodes {
			object, _, _ := f.store.GetByKey(n.name) // the store's only error is a wrong key's
			node, is := object.(*corev1.Node)
			if is && wanted(node) {
				continue
			}
			late++
			if is && example == "" {
				example = describe(node)
			}
		}
		if late == 0 && len(f.nodes) > 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %d of %d nodes are not there: %w; %s", what, late, len(f.nodes), ctx.Err(), example)
		case <-f.changed:
		}
	}
}

// stopAgents ends the agents alone.
func (f *fleet) stopAgents() {
	f.end()
	f.running.Wait()
}

// stop ends everything. The directory stays if an agent or a kubelet had something to complain about.
func (f *fleet) stop() error {
	var err error
	if f.end != nil {
		f.stopAgents()
	}
	if f.endPlane != nil {
		f.endPlane()
	}
	if f.cluster != nil {
		err = f.cluster.Stop()
	}
	for _, n := range f.nodes {
		err = errors.Join(err, n.gpus.Close())
	}
	if info, missing := os.Stat(filepath.Join(f.dir, "agents.log")); missing == nil && info.Size() > 0 {
		fmt.Fprintf(f.log, "warnings of agents are in %s\n", filepath.Join(f.dir, "agents.log"))
		return errors.Join(err, os.RemoveAll(filepath.Join(f.dir, "cluster")))
	}
	return errors.Join(err, os.RemoveAll(f.dir))
}
