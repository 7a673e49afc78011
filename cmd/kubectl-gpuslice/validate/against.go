package validate

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/client-go/dynamic"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/drift"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// againstCluster says where the cluster promises GPUs that no node offers.
func againstCluster(ctx context.Context, o *cluster.Options, of cluster.AgentSettings, autoscaled []string, out *cli.Printer) error {
	settings, err := of.Load(o)
	if err != nil {
		return err
	}
	c, err := o.Config()
	if err != nil {
		return err
	}
	client, err := kube.New(c)
	if err != nil {
		return err
	}
	objects, err := dynamic.NewForConfig(c)
	if err != nil {
		return err
	}
	report, err := drift.Find(ctx, client, objects, drift.Known{
		Groups: drift.GroupsOf(client), Startup: settings.StartupTaints(),
		Autoscaled: autoscaled, Refused: (&askedByLabels{client: client, settings: settings}).refused,
	})
	if err != nil {
		return err
	}
	return printDrift(out, report)
}

// printDrift prints what differs. The error says how many promises cannot be kept, and how many queues and hardware profiles mix classes.
func printDrift(out *cli.Printer, r drift.Report) error {
	var read []string
	for _, kind := range slices.Sorted(maps.Keys(r.Read)) {
		read = append(read, fmt.Sprintf("%s %d", kind, r.Read[kind]))
	}
	if len(read) == 0 {
		read = []string{"nothing that promises GPUs"}
	}
	out.Printf("read: %s\n", strings.Join(read, ", "))
	for _, line := range r.Unread {
		out.Printf("not read: %s\n", sanitize.Cut(line, longestLine))
	}
	for _, version := range r.Older {
		out.Printf("read in an older version than render writes: %s\n", sanitize.Cut(version, longestLine))
	}
	if len(r.Changing) > 0 {
		out.Printf("changing, and counted in their present state: %s\n", sanitize.Message(strings.Join(r.Changing, "\n"), longestLine))
	}
	printDRA(out, r)
	broken, mixed, printed := 0, 0, 0
	for _, f := range r.Findings {
		verdict := "drift"
		switch {
		case f.Idle:
			verdict = "idle"
		case f.Mixed:
			mixed++
			verdict = "mixed"
		default:
			broken++
		}
		if printed++; printed <= maxMistakes {
			out.Printf("%-5s  %s: %s\n", verdict, sanitize.Cut(f.About, manifest.LongestName), sanitize.Cut(f.Text, longestLine))
		}
	}
	if more := printed - maxMistakes; more > 0 {
		out.Printf("and %d more\n", more)
	}
	if out.Err != nil {
		return out.Err
	}
	var wrong []string
	if broken > 0 {
		wrong = append(wrong, "the cluster promises GPUs that its nodes do not offer, "+times(broken))
	}
	if mixed > 0 {
		wrong = append(wrong, "queues or hardware profiles mix classes of isolation, "+times(mixed))
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%s: see above, and kubectl gpuslice render", strings.Join(wrong, "; "))
	}
	out.Printf("no quota, queue or hardware profile promises more than the nodes offer\n")
	return out.Err
}

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

// printDRA names the nodes of NVIDIA's DRA driver, and says who cuts their GPUs.
func printDRA(out *cli.Printer, r drift.Report) {
	if len(r.Static) > 0 {
		out.Printf("NVIDIA's DRA driver advertises the GPUs by its ResourceSlices, which count: %s\n",
			sanitize.Cut(sanitize.Listed(r.Static), longestLine))
	}
	if len(r.Dynamic) > 0 {
		out.Printf("NVIDIA's DRA driver cuts the GPUs itself (DynamicMIG): agents switch only MIG modes there, and each device counts that it could make: %s\n",
			sanitize.Cut(sanitize.Listed(r.Dynamic), longestLine))
	}
}
