package judge

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/drain/kube"
)

// Cluster is what decides where pods find a place, by lists of one moment.
type Cluster struct {
	Nodes   []corev1.Node
	Pods    []corev1.Pod
	Budgets []policyv1.PodDisruptionBudget
	Classes []resourcev1.DeviceClass
	Slices  []resourcev1.ResourceSlice
	Claims  []resourcev1.ResourceClaim
	Rules   []resourcev1.DeviceTaintRule
	Unknown error // why the devices that claims have are not known; nil if the last four are whole, or no pod needs them
}

// Read lists what decides where these pods find a place, each by namespace and name. It lists slices, claims and rules only if one of the pods asks by claims.
// The lists come from the API server's cache, since they may be long.
func Read(ctx context.Context, client kube.Interface, pods []string) (*Cluster, error) {
	return ReadFor(ctx, client, func(p *corev1.Pod) bool { return slices.Contains(pods, p.Namespace+"/"+p.Name) })
}

// ReadFor is Read for pods that their state shows, and for others that are not in the cluster.
func ReadFor(ctx context.Context, client kube.Interface, asked func(p *corev1.Pod) bool, others ...corev1.Pod) (*Cluster, error) {
	var c Cluster
	cached := metav1.ListOptions{ResourceVersion: "0"}
	nodes, err := client.Nodes().List(ctx, cached)
	if err != nil {
		return nil, fmt.Errorf("listing nodes: %w", err)
	}
	running, err := client.Pods("").List(ctx, cached)
	if err != nil {
		return nil, fmt.Errorf("listing pods: %w", err)
	}
	budgets, err := client.PodDisruptionBudgets("").List(ctx, cached)
	if err != nil {
		return nil, fmt.Errorf("listing budgets: %w", err)
	}
	c.Nodes, c.Pods, c.Budgets = nodes.Items, running.Items, budgets.Items
	c.Unknown = c.readDevices(ctx, client, asked, others)
	return &c, nil
}

// readDevices lists the DeviceClasses, and the rest if one of the pods asks by claims. An API server without DRA has none.
func (c *Cluster) readDevices(ctx context.Context, client kube.Interface, asked func(p *corev1.Pod) bool, others []corev1.Pod) error {
	cached := metav1.ListOptions{ResourceVersion: "0"}
	list, err := client.DeviceClasses().List(ctx, cached)
	switch {
	case apierrors.IsNotFound(err):
	case err != nil:
		return fmt.Errorf("listing DeviceClasses: %w", err)
	default:
		c.Classes = list.Items
	}
	by := classesOf(c.Classes)
	asks := func(p corev1.Pod) bool { return by.asksByClaims(&p) }
	if !slices.ContainsFunc(c.Pods, func(p corev1.Pod) bool { return asked(&p) && asks(p) }) && !slices.ContainsFunc(others, asks) {
		return nil
	}
	published, err := client.ResourceSlices().List(ctx, cached)
	if err != nil {
		return fmt.Errorf("listing ResourceSlices: %w", err)
	}
	claims, err := client.ResourceClaims("").List(ctx, cached)
	if err != nil {
		return fmt.Errorf("listing ResourceClaims: %w", err)
	}
	rules, err := client.DeviceTaintRules().List(ctx, cached)
	switch {
	case apierrors.IsNotFound(err):
	case err != nil:
		return fmt.Errorf("listing DeviceTaintRules: %w", err)
	default:
		c.Rules = rules.Items
	}
	c.Slices, c.Claims = published.Items, claims.Items
	return nil
}
