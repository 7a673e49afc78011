package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/drain/kube"
)

// Selection selects nodes: by their names, or by a selector.
type Selection struct{ Selector string }

var errBoth = errors.New("name nodes or select them with -l, not both")

// Bind adds the flag. The other arguments of the command line are names.
func (s *Selection) Bind(c *cobra.Command) {
	c.Flags().StringVarP(&s.Selector, "selector", "l", "", "select nodes by their labels, as kubectl get does: pool=research,zone!=a")
}

// Nodes reads the selected nodes, sorted by name. It is an error if there are none.
func (s *Selection) Nodes(ctx context.Context, client kube.Interface, names []string) ([]corev1.Node, error) {
	switch {
	case s.Selector != "" && len(names) > 0:
		return nil, errBoth
	case len(names) > 0:
		return NodesNamed(ctx, client, names)
	case s.Selector == "":
		return nil, errors.New("name nodes, or select them with -l: -l nvidia.com/gpu.present=true")
	}
	found, err := fitting(ctx, client, s.Selector)
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("no node fits the selector %q; see the nodes' labels by: kubectl get nodes --show-labels", s.Selector)
	}
	return found, err
}

// OrAll is Nodes, or without a selection all that an agent has ever reported on.
func (s *Selection) OrAll(ctx context.Context, client kube.Interface, names []string) ([]corev1.Node, error) {
	if s.Selector != "" || len(names) > 0 {
		return s.Nodes(ctx, client, names)
	}
	found, err := fitting(ctx, client, "")
	found = slices.DeleteFunc(found, func(n corev1.Node) bool { return ReportOf(&n).None() })
	if err == nil && len(found) == 0 {
		err = errors.New("no agent has ever reported on any node; see deploy/README.md for how to install it")
	}
	return found, err
}

func fitting(ctx context.Context, client kube.Interface, selector string) ([]corev1.Node, error) {
	if _, err := labels.Parse(selector); err != nil {
		return nil, fmt.Errorf("reading the selector %q: %w", selector, err)
	}
	list, err := client.Nodes().List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return nil, unreadable("listing nodes", err)
	}
	slices.SortFunc(list.Items, byName)
	return list.Items, nil
}

// unreadable is the error of a read of nodes. It says what a user can do who may not read them.
func unreadable(doing string, err error) error {
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("%s: %w; without rights to nodes, kubectl gpuslice top shows the pods of your namespace that request GPUs", doing, err)
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// NodesNamed reads nodes by their names, which may be as kubectl get -o name writes them. It reads several by one request, if the user may list
// nodes.
func NodesNamed(ctx context.Context, client kube.Interface, names []string) ([]corev1.Node, error) {
	var wanted []string
	for _, name := range names {
		if name = strings.TrimPrefix(name, "node/"); !slices.Contains(wanted, name) {
			wanted = append(wanted, name)
		}
	}
	if len(wanted) > 1 {
		all, err := fitting(ctx, client, "")
		switch {
		case err == nil:
			return pick(all, wanted)
		case !apierrors.IsForbidden(err):
			return nil, err
		}
	}
	var all []corev1.Node
	for _, name := range wanted {
		n, err := client.Nodes().Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return nil, unreadable("reading node "+name, err)
		default:
			all = append(all, *n)
		}
	}
	return pick(all, wanted)
}

// pick returns the nodes of these names, sorted. It is an error if one is missing.
func pick(all []corev1.Node, wanted []string) ([]corev1.Node, error) {
	found := map[string]corev1.Node{}
	for _, n := range all {
		found[n.Name] = n
	}
	var out []corev1.Node
	var missing []string
	for _, name := range wanted {
		if n, there := found[name]; there {
			out = append(out, n)
		} else {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("there is no node %s; see kubectl get nodes", strings.Join(missing, ", "))
	}
	slices.SortFunc(out, byName)
	return out, nil
}

func byName(a, b corev1.Node) int { return cmp.Compare(a.Name, b.Name) }
