package cluster

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
)

// completionTime bounds the requests to the cluster while the user waits after the tab key.
const completionTime = 2 * time.Second

// CompleteFlag offers fixed values of a flag. The caller has defined the flag.
func CompleteFlag(c *cobra.Command, flag string, values ...cobra.Completion) {
	// It fails only if there is no such flag, or for a second call: without the offers the flag works anyway.
	_ = c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

// CompleteNodes offers nodes that an agent has ever reported on, without those that the command line names already.
func (o *Options) CompleteNodes(c *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	var out []cobra.Completion
	for _, n := range o.known(c) {
		if t := ReportOf(&n); !t.None() && !slices.Contains(args, n.Name) {
			out = append(out, cobra.CompletionWithDesc(n.Name, strings.TrimSpace(Requested(&n)+" "+t.Condition.Reason)))
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// everywhere are the configs that every node has.
var everywhere = []string{"all-balanced", "all-disabled", "all-enabled"}

// CompleteNames offers the configs that labels of nodes name, and those that every node has. It does not read ConfigMaps: a user who may
// label nodes need not have the right to.
func (o *Options) CompleteNames(label string) cobra.CompletionFunc {
	return func(c *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		names := map[string]bool{}
		if label != config.LabelDevicePluginConfig {
			for _, name := range everywhere {
				names[name] = true
			}
		}
		for _, n := range o.known(c) {
			names[n.Labels[label]] = true
			if label == config.LabelProfile {
				names[n.Labels[config.LabelMIGConfig]] = true // every MIG config is a profile
			}
			t := ReportOf(&n)
			if t.Status.Label == label && !strings.Contains(t.Status.Desired, api.DesiredSeparator) {
				names[t.Status.Desired] = true
			}
		}
		delete(names, "")
		return slices.Sorted(maps.Keys(names)), cobra.ShellCompDirectiveNoFileComp
	}
}

// known returns the cluster's nodes; none if the API server does not answer soon.
func (o *Options) known(c *cobra.Command) []corev1.Node {
	ctx := c.Context()
	if ctx == nil {
		ctx = context.Background() // cobra has none for a completion in some of its paths
	}
	ctx, cancel := context.WithTimeout(ctx, completionTime)
	defer cancel()
	client, err := o.Client()
	if err != nil {
		return nil
	}
	nodes, err := fitting(ctx, client, "")
	if err != nil {
		return nil
	}
	return nodes
}
