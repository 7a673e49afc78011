package rollout

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// mostNamed bounds the nodes that refuse, in what is printed of them and in a command to paste.
const mostNamed = 20

// withdraw removes the labels that request something of the nodes.
func (a *application) withdraw(ctx context.Context, client kube.Interface, nodes []corev1.Node, out *cli.Printer) error {
	loses, asking := "lost", 0
	if a.dryRun {
		loses = "would lose"
	}
	for i := range nodes {
		n := &nodes[i]
		targets := cluster.TargetsOf(n)
		if len(targets) == 0 {
			out.Printf("%s  requests nothing\n", n.Name)
			continue
		}
		labels := map[string]*string{}
		for _, w := range targets {
			labels[w.Label] = nil
		}
		var err error
		if !a.dryRun {
			_, err = cluster.Write(ctx, client, n, cluster.Change{Labels: labels})
		}
		switch {
		case apierrors.IsNotFound(err):
			out.Printf("%s  was deleted\n", n.Name)
			continue
		case err != nil:
			return fmt.Errorf("%w; %d of %s request nothing any more; run the same command to go on", err, asking, cli.Counted(len(nodes), "node"))
		}
		asking++
		for j, w := range targets {
			out.Printf("%s  %s label %s%s\n", n.Name, loses, w, follows(n, w, j == 0))
		}
	}
	if a.dryRun {
		out.Printf("nothing was changed; without --dry-run, %d of %s would lose labels, and no GPU would change\n", asking, cli.Counted(len(nodes), "node"))
	}
	return out.Err
}

// follows says what comes of it that the node loses the label; first is whether that is the one that counts.
func follows(n *corev1.Node, w cluster.Target, first bool) string {
	_, underWay := n.Annotations[config.AnnotationJournal]
	switch {
	case first && underWay:
		return "; its agent undoes the change that is under way"
	case w.Label == config.LabelDevicePluginConfig:
		return "; the device plugin takes its default config then"
	default:
		return ""
	}
}

// takeBack is the command that removes the label from the nodes.
func (a *application) takeBack(names []string, of int) string {
	args := []string{"apply"}
	switch {
	case len(names) == of && a.nodes.Selector != "":
		args = append(args, "-l", a.nodes.Selector)
	case len(names) > mostNamed:
		args = append(args, "NODE...")
	default:
		args = append(args, names...)
	}
	return "to take the label back:\n  " + commandLine(append(args, "--none"))
}
