package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// fieldManager names the command in the managedFields of what it writes.
const fieldManager = "kubectl-gpuslice"

// options are what the subcommands share: kubectl's own flags for reaching a cluster.
type options struct {
	invoked   []string // the arguments of this process, for the user to come back
	loading   *clientcmd.ClientConfigLoadingRules
	overrides clientcmd.ConfigOverrides
	connect   func() (kube.Interface, error) // set by tests; otherwise the flags name the cluster
}

func (o *options) bind(flags *pflag.FlagSet) {
	o.loading = clientcmd.NewDefaultClientConfigLoadingRules()
	flags.StringVar(&o.loading.ExplicitPath, clientcmd.RecommendedConfigPathFlag, "", "Path to the kubeconfig file to use")
	clientcmd.BindOverrideFlags(&o.overrides, flags, clientcmd.RecommendedConfigOverrideFlags(""))
}

func (o *options) client() (kube.Interface, error) {
	if o.connect != nil {
		return o.connect()
	}
	c, err := o.config()
	if err != nil {
		return nil, err
	}
	return kube.New(c)
}

// config is how the command reaches the API server.
func (o *options) config() (*rest.Config, error) {
	c, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(o.loading, &o.overrides).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("finding the API server: %w", cmp.Or(missingFiles(o.loading), err)) // a missing file is why the loader knows no cluster
	}
	return kube.Config(c, fieldManager, version), nil
}

// agents is what a command goes by that foresees what the agents do: their settings, in a file.
type agents struct{ file string }

// bind adds the flag.
func (a *agents) bind(flags *pflag.FlagSet) {
	flags.StringVar(&a.file, "settings", "", "file of the agents' settings; without it their defaults hold")
}

// settings reads the agents' settings. The agents are in the namespace of the flag --namespace.
func (a *agents) settings(o *options) (config.Settings, error) {
	settings := config.Default()
	if a.file != "" {
		var err error
		if settings, err = config.Load(a.file); err != nil {
			return config.Settings{}, err
		}
	}
	return settings.Beside(cmp.Or(o.overrides.Context.Namespace, "gpuslice")), nil
}

// missingFiles names the files of the environment's KUBECONFIG, if none of them is there: the loader passes over them, and then knows no cluster.
func missingFiles(rules *clientcmd.ClientConfigLoadingRules) error {
	list := os.Getenv(clientcmd.RecommendedConfigPathEnvVar)
	if rules.ExplicitPath != "" || list == "" {
		return nil
	}
	for _, file := range filepath.SplitList(list) {
		if _, err := os.Stat(file); err == nil { //nolint:gosec // the user's own environment names it
			return nil
		}
	}
	return fmt.Errorf("%s names %s, which is not there", clientcmd.RecommendedConfigPathEnvVar, list)
}

// selection selects nodes: by their names, or by a selector.
type selection struct{ selector string }

var errBoth = errors.New("name nodes or select them with -l, not both")

// bind adds the flag. The other arguments of the command line are names.
func (s *selection) bind(c *cobra.Command) {
	c.Flags().StringVarP(&s.selector, "selector", "l", "", "select nodes by their labels, as kubectl get does: pool=research,zone!=a")
}

// nodes reads the selected nodes, sorted by name. It is an error if there are none.
func (s *selection) nodes(ctx context.Context, client kube.Interface, names []string) ([]corev1.Node, error) {
	switch {
	case s.selector != "" && len(names) > 0:
		return nil, errBoth
	case len(names) > 0:
		return named(ctx, client, names)
	case s.selector == "":
		return nil, errors.New("name nodes, or select them with -l: -l nvidia.com/gpu.present=true")
	}
	found, err := fitting(ctx, client, s.selector)
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("no node fits the selector %q; see the nodes' labels by: kubectl get nodes --show-labels", s.selector)
	}
	return found, err
}

// orAll is nodes, or without a selection all on which an agent has ever said anything.
func (s *selection) orAll(ctx context.Context, client kube.Interface, names []string) ([]corev1.Node, error) {
	if s.selector != "" || len(names) > 0 {
		return s.nodes(ctx, client, names)
	}
	found, err := fitting(ctx, client, "")
	found = slices.DeleteFunc(found, func(n corev1.Node) bool { return agentReportOf(&n).none() })
	if err == nil && len(found) == 0 {
		err = errors.New("no agent has ever said anything of any node; see deploy/README.md for how to install it")
	}
	return found, err
}

func fitting(ctx context.Context, client kube.Interface, selector string) ([]corev1.Node, error) {
	if _, err := labels.Parse(selector); err != nil {
		return nil, fmt.Errorf("reading the selector %q: %w", selector, err)
	}
	list, err := client.Nodes().List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return nil, fmt.Errorf("listing nodes: %w", err)
	}
	slices.SortFunc(list.Items, byName)
	return list.Items, nil
}

// named reads nodes by their names, which may be as kubectl get -o name writes them. It reads several by one request, if the user may list
// nodes.
func named(ctx context.Context, client kube.Interface, names []string) ([]corev1.Node, error) {
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
			return nil, fmt.Errorf("reading node %s: %w", name, err)
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

// change holds labels and annotations to set on a node; nil removes one.
type change struct{ labels, annotations map[string]*string }

// write changes a node, and returns it as it is then. It fails if the node was deleted and created again in between.
func write(ctx context.Context, client kube.Interface, node *corev1.Node, what change) (*corev1.Node, error) {
	metadata := map[string]any{"uid": node.UID}
	if len(what.labels) > 0 {
		metadata["labels"] = what.labels
	}
	if len(what.annotations) > 0 {
		metadata["annotations"] = what.annotations
	}
	body, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		return nil, fmt.Errorf("encoding the change of node %s: %w", node.Name, err)
	}
	after, err := client.Nodes().Patch(ctx, node.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: fieldManager})
	if err != nil {
		return nil, fmt.Errorf("writing to node %s: %w", node.Name, err)
	}
	return after, nil
}
