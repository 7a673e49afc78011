package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
)

// item is something to try: commands to paste.
type item struct {
	name     string
	title    string
	says     string // what to see in it
	commands []string
}

// menu is what to try. Each item works after any other.
var menu = []item{
	{
		"1", "a pod is pending: what would let it run?",
		"The command that it prints cuts one GPU. No pod has to leave for it.",
		[]string{"kubectl gpuslice advise --pending"},
	},
	{
		"2", "cut eight H100s under three pods with a disruption budget",
		"One pod at a time leaves, when its successor runs elsewhere.",
		[]string{"kubectl gpuslice apply h100-1 --mig-config all-balanced --wait"},
	},
	{
		"3", "kill the agent in the middle of a change",
		"Its successor looks at the node, and goes on.",
		[]string{
			"kubectl gpuslice apply h100-1 --mig-config all-1g.10gb",
			"playground kill-agent h100-1",
			"kubectl gpuslice apply h100-1 --mig-config all-1g.10gb --wait",
		},
	},
	{
		"4", "ask for what the GPUs cannot do",
		"It is refused before anything is disturbed.",
		[]string{
			"kubectl gpuslice plan l4-1 --mig-config all-1g.10gb",
			"kubectl gpuslice explain NoCapableGPU",
		},
	},
	{
		"5", "share GPUs that cannot be cut: four pods on each",
		"sharing.yaml has the config, in the format of NVIDIA's device plugin.",
		[]string{"kubectl gpuslice apply l4-1 --device-plugin-config four-pods-a-gpu --wait"},
	},
	{
		"6", "a GPU reports Xid 79, falls off the bus, and comes back",
		"gpusim l4-1 play lists what else happens to GPUs; gpusim l4-1 xid 0 94 is an Xid alone.",
		[]string{
			"gpusim l4-1 play 0 fallen-off",
			"kubectl wait node/l4-1 --for=condition=GPUUnhealthy",
			"kubectl gpuslice status l4-1",
			"gpusim l4-1 play 0 fallen-off --cure",
		},
	},
	{
		"7", "a ConfigMap with mistakes",
		"Nothing begins anywhere until it is right again.",
		[]string{
			"kubectl gpuslice validate -f bad-maintenance.yaml",
			"kubectl apply -f bad-maintenance.yaml",
			"kubectl gpuslice plan h100-2 --mig-config gpu7_3g.40gb",
			"kubectl apply -f maintenance.yaml",
		},
	},
	{
		"8", "a node with a maintenance window; then force it",
		"The pool of h100-2 opens six hours after the playground has begun (maintenance.yaml).",
		[]string{
			"kubectl gpuslice apply h100-2 --mig-config all-3g.40gb",
			"kubectl annotate node h100-2 gpuslice.io/force=now",
			"kubectl gpuslice apply h100-2 --mig-config all-3g.40gb --wait",
		},
	},
	{
		"9", "a Slurm job on the GPUs; end it, and the change goes on",
		"The budget opens when the job has ended, as with Slinky's slurm-operator. You are the operator here (slurm.yaml).",
		[]string{
			"kubectl apply -f slurm.yaml",
			"kubectl gpuslice apply a100-1 --mig-config all-balanced",
			"kubectl gpuslice status a100-1",
			"kubectl -n slurm label pod slurmd-0 nodeset.slinky.slurm.net/pod-protect-",
			"kubectl gpuslice apply a100-1 --mig-config all-balanced --wait",
		},
	},
	{
		"10", "cut one GPU of those that NVIDIA's DRA driver gives out",
		"The driver is restarted, and its ResourceSlice has the instances. The other GPUs stay whole.",
		[]string{
			"kubectl gpuslice apply dra-1 --mig-config gpu0_3g.40gb_4x1g.10gb --wait",
			"kubectl get resourceslices",
		},
	},
	{
		"look", "logs, exec, metrics, and the GPUs themselves",
		"Containers without a program of their own say that they are simulated.",
		[]string{
			"kubectl -n gpuslice logs -l app.kubernetes.io/component=agent --tail=1",
			"kubectl -n gpuslice exec ds/gpuslice-agent -- gpuslice-agent recover --dry-run",
			"kubectl -n gpuslice port-forward ds/gpuslice-agent 9400 >/dev/null &",
			"curl -s --retry 9 --retry-connrefused localhost:9400/metrics | grep ^gpuslice; kill %%",
			"gpusim h100-1 show",
		},
	},
	{
		"remove", "remove gpuslice from the cluster",
		"These are the commands of deploy/README.md, \"Removing it\". kubectl apply -k deploy/mine installs it again, and kubectl apply -f maintenance.yaml -f sharing.yaml what 5 and 8 need.",
		[]string{
			`kubectl -n gpuslice patch daemonset gpuslice-agent --type=json -p='[
  {"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": ["cleanup", "--stay"]},
  {"op": "replace", "path": "/spec/updateStrategy/rollingUpdate/maxUnavailable", "value": "100%"},
  {"op": "replace", "path": "/spec/minReadySeconds", "value": 0}]'`,
			"kubectl -n gpuslice rollout status daemonset gpuslice-agent",
			"kubectl delete -k deploy/mine",
		},
	},
}

func menuCommand() *cobra.Command {
	return &cobra.Command{
		Use: "menu [NAME | all]", Short: "List what to try, or the commands of one", Args: cobra.MaximumNArgs(1), SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				writeMenu(cmd.OutOrStdout())
				return nil
			}
			return writeItem(cmd.OutOrStdout(), args[0])
		},
	}
}

func writeMenu(w io.Writer) {
	for _, it := range menu {
		fmt.Fprintf(w, "%s  %s\n", bold.Sprintf("menu %-6s", it.name), it.title)
	}
	fmt.Fprintln(w, "\nEach has commands to paste: begin with menu 1. menu all shows them all.\nexit, or Ctrl-D, ends the cluster and removes everything.")
}

// writeItem writes the commands of an item, or of all.
func writeItem(w io.Writer, name string) error {
	found := false
	for _, it := range menu {
		if it.name != name && name != "all" {
			continue
		}
		found = true
		fmt.Fprintf(w, "%s\n%s\n\n", bold.Sprintf("%s: %s", it.name, it.title), newScreen(nil).wrapped(it.says, ""))
		for _, c := range it.commands {
			fmt.Fprintf(w, "%s\n", c)
		}
		fmt.Fprintln(w)
	}
	if !found {
		var names []string
		for _, it := range menu {
			names = append(names, it.name)
		}
		return fmt.Errorf("there is no %s on the menu: use one of %s, or all", strconv.Quote(name), strings.Join(names, ", "))
	}
	return nil
}
