package rollout

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/show"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// diagnosisJSON is the format of a diagnosis for programs.
const diagnosisJSON = "json"

// exitNotOurs is the exit code if nothing is left to restore on the node, and a user or another tool keeps it closed.
const exitNotOurs = 3

// recovery has the flags of recover.
type recovery struct {
	dryRun  bool
	format  string
	timeout time.Duration
}

// Recover is the command.
func Recover(o *cluster.Options) *cobra.Command {
	var r recovery
	c := &cobra.Command{
		Use:   "recover NODE [--dry-run]",
		Short: "Say what keeps pods off a node, and wait until its agent has restored it",
		Long: `Asks the agent of the node what keeps pods off it: who cordoned it, what the agent still has to restore, who is in the way, and what to do.

Where the agent restores the node by itself, the command waits for that. Where someone has to act first, it says who, and ends. On the node it
changes only the annotation with its question. Where no agent runs, run gpuslice-agent recover on the node.

Exit codes: 0 the node is open for pods, or with --dry-run: the agent has answered; 3 another user or tool keeps it closed, and gpuslice does not,
or timeout; 1 someone has to act, and anything else.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.CompleteNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			if r.format != "text" && r.format != diagnosisJSON {
				return fmt.Errorf("flag --output is %q: it must be text or json", r.format)
			}
			client, err := o.Client()
			if err != nil {
				return err
			}
			nodes, err := cluster.NodesNamed(cmd.Context(), client, args)
			if err != nil {
				return err
			}
			return r.run(cmd.Context(), client, nodes[0], cmd.OutOrStdout())
		},
	}
	c.Flags().BoolVar(&r.dryRun, "dry-run", false, "say it, and wait for nothing")
	c.Flags().StringVarP(&r.format, "output", "o", "text", "text or json")
	c.Flags().DurationVar(&r.timeout, "timeout", 10*time.Minute, "how long to wait until the node is restored")
	cluster.CompleteFlag(c, "output", "text", diagnosisJSON)
	return c
}

func (r *recovery) run(ctx context.Context, client kube.Interface, node corev1.Node, w io.Writer) error {
	out := &cli.Printer{W: w}
	d, err := r.diagnose(ctx, client, node, out)
	if err != nil {
		return err
	}
	r.say(d, out)
	if r.dryRun || out.Err != nil {
		return out.Err
	}
	if d.Outcome.Verdict == api.VerdictGivesBack {
		g := &givenBack{node: node.Name, out: out, quiet: r.format == diagnosisJSON, closedBy: closing(d)}
		waiting, cancel := context.WithTimeoutCause(ctx, r.timeout, cluster.ErrLate)
		defer cancel()
		err := cluster.Follow(waiting, client, []string{node.Name}, g)
		switch {
		case ctx.Err() != nil:
			return &cli.ExitError{Code: cli.ExitInterrupted, Err: errors.New("interrupted; the agent goes on")}
		case errors.Is(err, cluster.ErrLate):
			return &cli.ExitError{Code: cli.ExitTimeout, Err: fmt.Errorf("the agent has not restored node %s in %s; it goes on", node.Name, r.timeout)}
		case err != nil:
			return err
		case g.deleted:
			return fmt.Errorf("node %s was deleted", node.Name)
		}
		now, err := cluster.NodesNamed(ctx, client, []string{node.Name})
		if err != nil {
			return err
		}
		if d, err = r.diagnose(ctx, client, now[0], out); err != nil {
			return err
		}
		if r.format == diagnosisJSON {
			r.say(d, out)
		} else {
			out.Printf("%s\n", d.Outcome.Text)
		}
	}
	switch {
	case out.Err != nil:
		return out.Err
	case d.Outcome.Verdict == api.VerdictFree:
		return nil
	case d.Outcome.Verdict == api.VerdictNotOurs:
		return &cli.ExitError{Code: exitNotOurs, Err: errors.New(d.Outcome.Text)}
	default:
		return errors.New(d.Outcome.Text)
	}
}

// diagnose asks the agent for its diagnosis.
func (r *recovery) diagnose(ctx context.Context, client kube.Interface, node corev1.Node, out *cli.Printer) (*api.Diagnosis, error) {
	q, err := cluster.Inquire(ctx, client, []corev1.Node{node}, cluster.Of(config.RequestDiagnosis), planTime, out)
	switch a := asked(q); {
	case err != nil && ctx.Err() != nil:
		return nil, &cli.ExitError{Code: cli.ExitInterrupted, Err: errors.New("interrupted")}
	case apierrors.IsForbidden(err):
		if r.format != diagnosisJSON {
			lastReport(&node, out)
		}
		return nil, errors.New("asking the agent needs the verb patch on nodes, which you lack")
	case err != nil:
		return nil, err
	case a.Lost != "":
		return nil, fmt.Errorf("node %s: %s", node.Name, a.Lost)
	case a.Answer == nil:
		return nil, fmt.Errorf("the agent of node %s has not answered within %s. If none runs there, run gpuslice-agent recover on the node; "+
			"to see whether one does: %s", node.Name, planTime, cluster.PodsOfAgents(node.Name))
	case a.Answer.Diagnosis == nil:
		return nil, fmt.Errorf("the agent of node %s does not say: %s", node.Name, a.Answer.Refused)
	default:
		return a.Answer.Diagnosis, nil
	}
}

// lastReport prints what the node shows of what keeps pods off it.
func lastReport(n *corev1.Node, out *cli.Printer) {
	t := cluster.ReportOf(n)
	switch {
	case t.None():
		out.Printf("no agent has ever reported on node %s\n", n.Name)
	case t.Condition.Type == "":
		out.Printf("%s has no condition of its agent\n", n.Name)
	default:
		out.Printf("%s, as its agent last reported at %s: %s: %s\n", n.Name, t.Condition.LastHeartbeatTime.UTC().Format(time.RFC3339), t.Condition.Reason,
			t.Condition.Message)
	}
	for _, b := range t.Status.Blockers {
		if !t.Agrees() { // they are of an earlier look
			break
		}
		out.Printf("  in the way: %s\n", b)
	}
	if c := cluster.CordonOf(n); c != nil {
		out.Printf("  %s\n", cluster.Cordoned(c, time.Now()))
	}
	for _, taint := range n.Spec.Taints {
		if taint.Effect != corev1.TaintEffectPreferNoSchedule {
			out.Printf("  taint %s:%s\n", taint.Key, taint.Effect)
		}
	}
}

// asked returns the one node of an inquiry.
func asked(q *cluster.Inquiry) *cluster.Asked {
	if len(q.Nodes) == 0 {
		return &cluster.Asked{}
	}
	return q.Nodes[0]
}

func (r *recovery) say(d *api.Diagnosis, out *cli.Printer) {
	if r.format != diagnosisJSON {
		out.Printf("%s", show.Diagnosis(*d))
		return
	}
	text, err := json.MarshalIndent(d, "", "  ")
	if err != nil && out.Err == nil {
		out.Err = err
	}
	out.Printf("%s\n", sanitize.JSON(string(text)))
}

// closing lists the keys of the agent's taints that keep the node closed. The settings, which the agent alone knows, may name one.
func closing(d *api.Diagnosis) []string {
	keys := []string{config.TaintRepartitioning, config.TaintNotReady}
	for _, t := range d.Taints {
		if t.Startup {
			keys = append(keys, t.Key)
		}
	}
	return keys
}

// givenBack waits until the agent has restored all.
type givenBack struct {
	node          string
	out           *cli.Printer
	quiet         bool
	closedBy      []string // keys of taints that the agent removes: the fence's, and the startup taints that it knows
	last          string
	done, deleted bool
}

// See implements cluster.Watcher.
func (g *givenBack) See(n *corev1.Node) {
	if n.Name != g.node {
		return
	}
	t := cluster.ReportOf(n)
	if said := t.Condition.Reason + ": " + t.Condition.Message; said != g.last && !g.quiet {
		g.last = said
		g.out.Printf("%s  %s\n", t.Condition.LastHeartbeatTime.UTC().Format(time.TimeOnly+"Z"), said)
	}
	_, pending := n.Annotations[config.AnnotationJournal]
	fenced := false
	for _, taint := range n.Spec.Taints {
		fenced = fenced || slices.Contains(g.closedBy, taint.Key)
	}
	g.done = !pending && !fenced
}

// Gone implements cluster.Watcher.
func (g *givenBack) Gone(name string) { g.deleted = g.deleted || name == g.node }

// Passed implements cluster.Watcher.
func (g *givenBack) Passed(time.Time) {}

// Trouble implements cluster.Watcher.
func (g *givenBack) Trouble(err error) { g.out.Printf("%v; trying again\n", err) }

// Settled implements cluster.Watcher.
func (g *givenBack) Settled() (bool, error) { return g.done || g.deleted, g.out.Err }
