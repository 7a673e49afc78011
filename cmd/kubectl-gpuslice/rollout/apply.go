package rollout

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/progress"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/show"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// application has the flags of apply.
type application struct {
	nodes        cluster.Selection
	profile      string
	migConfig    string
	pluginConfig string
	none         bool
	wait, dryRun bool
	unmanaged    bool // pods may be evicted that nothing brings back
	emptyDir     bool // pods may be evicted that lose files by it
	verbose      bool // a plan lists its steps
	timeout      time.Duration
	again        string // the command line, for the user to repeat
}

// Apply is the command.
func Apply(o *cluster.Options) *cobra.Command {
	var a application
	c := &cobra.Command{
		Use:   "apply (-l SELECTOR | NODE...) (--profile NAME | --mig-config NAME | --device-plugin-config NAME | --none) [--wait] [--dry-run]",
		Short: "Ask the selected nodes for a profile, a MIG config or a config of the device plugin, and wait until they have it",
		Long: `Sets the label gpuslice.io/profile, nvidia.com/mig.config or nvidia.com/device-plugin.config on each selected node, and clears the
old result, the label nvidia.com/mig.config.state. The agents do the rest, each when it may; with --wait this command shows
how far they are. Ending it stops no change: the same command line shows the roll-out again.

First it asks all agents what they would do. If all that answer would refuse, as for a name that they do not know, it labels no node. Otherwise it says for
each node what becomes of the label, as plan does: begins at once, held up and by what, refused. Agents have five seconds to answer: one in the middle
of a step takes longer, and its node is not known.

With --none it removes these three labels: the GPUs do not change, and an agent undoes a change that is under way.

An agent does not begin a change that would evict pods without a controller, or lose files on an emptyDir, unless the settings or the profile allow it.
--force-unmanaged and --delete-emptydir-data allow it for this change alone, by the annotation gpuslice.io/allow-eviction. The agent removes that
when the change has ended.

Exit codes: 0 the nodes are labelled, also those that are held up, and with --wait, as asked; 1 a node has failed, refuses or, with --wait, was deleted,
or something else went wrong; 3 timeout; 4 with --dry-run: a node would refuse, be held up or give up, 5: begin, and not surely end; 130 interrupted, and the roll-out goes on.`,
		Example: `  # What would happen, node by node; nothing is labelled
  kubectl gpuslice apply -l pool=research --profile research --dry-run
  # Do it, and see it through
  kubectl gpuslice apply -l pool=research --profile research --wait`,
		RunE: func(cmd *cobra.Command, args []string) error {
			w, err := a.target()
			if err != nil {
				return err
			}
			client, err := o.Client()
			if err != nil {
				return err
			}
			a.again = commandLine(o.Invoked)
			return a.run(cmd, client, w, args)
		},
	}
	a.bind(c, o)
	c.ValidArgsFunction = o.CompleteNodes
	flags := c.Flags()
	flags.BoolVar(&a.wait, "wait", false, "wait until all nodes are as asked, and show how far they are")
	flags.DurationVar(&a.timeout, "timeout", 0, "with --wait: how long; 0 for as long as it takes")
	flags.BoolVar(&a.dryRun, "dry-run", false, "print what each node would do, and label nothing")
	flags.BoolVar(&a.none, "none", false, "request nothing any more: remove the labels")
	c.MarkFlagsMutuallyExclusive("wait", "dry-run")
	c.MarkFlagsMutuallyExclusive("profile", "mig-config", "device-plugin-config", "none")
	c.MarkFlagsMutuallyExclusive("wait", "none")
	c.MarkFlagsMutuallyExclusive(config.FlagForceUnmanaged, "none")
	c.MarkFlagsMutuallyExclusive(config.FlagDeleteEmptyDirData, "none")
	return c
}

// bind adds the flags that select the nodes and the config, and say what the change may evict.
func (a *application) bind(c *cobra.Command, o *cluster.Options) {
	a.nodes.Bind(c)
	flags := c.Flags()
	flags.StringVar(&a.profile, "profile", "", "name of a profile, as in the label "+config.LabelProfile+"; every MIG config is one")
	flags.StringVar(&a.migConfig, "mig-config", "", "name of a MIG config, as in the label "+config.LabelMIGConfig)
	flags.StringVar(&a.pluginConfig, "device-plugin-config", "", "key of a config of the device plugin, as in the label "+config.LabelDevicePluginConfig)
	flags.BoolVar(&a.unmanaged, config.FlagForceUnmanaged, false,
		"let this change evict pods without a controller, which the settings refuse by default")
	flags.BoolVar(&a.emptyDir, config.FlagDeleteEmptyDirData, false,
		"let this change evict pods that lose files on an emptyDir, which the settings refuse by default")
	flags.BoolVarP(&a.verbose, "verbose", "v", false, "list the single steps of a plan")
	c.MarkFlagsMutuallyExclusive("profile", "mig-config", "device-plugin-config")
	for flag, label := range map[string]string{
		"profile": config.LabelProfile, "mig-config": config.LabelMIGConfig, "device-plugin-config": config.LabelDevicePluginConfig,
	} {
		_ = c.RegisterFlagCompletionFunc(flag, o.CompleteNames(label)) // fails only for a flag that does not exist
	}
}

func (a *application) target() (cluster.Target, error) {
	var w cluster.Target
	switch {
	case a.profile != "":
		w = cluster.Target{Label: config.LabelProfile, Name: a.profile}
	case a.migConfig != "":
		w = cluster.Target{Label: config.LabelMIGConfig, Name: a.migConfig}
	case a.pluginConfig != "":
		w = cluster.Target{Label: config.LabelDevicePluginConfig, Name: a.pluginConfig}
	case a.none:
	default:
		return w, errors.New("say what to ask for: --profile NAME, --mig-config NAME, --device-plugin-config NAME or --none")
	}
	if wrong := validation.IsValidLabelValue(w.Name); len(wrong) > 0 {
		return w, fmt.Errorf("%q can be no value of label %s: %s", w.Name, w.Label, strings.Join(wrong, "; "))
	}
	return w, nil
}

func (a *application) run(cmd *cobra.Command, client kube.Interface, w cluster.Target, names []string) error {
	ctx := cmd.Context()
	nodes, err := a.nodes.Nodes(ctx, client, names)
	if err != nil {
		return err
	}
	out := &cli.Printer{W: cmd.OutOrStdout()}
	if a.none {
		return a.withdraw(ctx, client, nodes, out)
	}
	if err := checkLabelPrecedence(nodes, w); err != nil {
		return err
	}
	if a.dryRun {
		return a.preview(ctx, client, nodes, w, out)
	}
	p, err := a.foresee(ctx, client, nodes, w, out)
	if err != nil {
		return err
	}
	asked, refused, err := a.label(ctx, client, nodes, p, out)
	if err != nil {
		return err
	}
	warn(asked, out)
	if !a.wait {
		return cmp.Or(out.Err, a.end(w, asked, refused, out))
	}
	r := &rollout{target: w, nodes: asked, deleted: len(nodes) - len(asked), out: out, back: a.takeBack}
	r.screen = newLines(out)
	if _, height, is := cli.Terminal(out.W); is {
		picture := progress.NewWriter()
		picture.SetOutputWriter(out.W)
		r.screen = newBars(picture, fmt.Sprintf("%s on %s; Ctrl-C leaves the roll-out running", w.Kind(), cli.Counted(len(nodes), "node")), len(nodes), height, output.PaperOf(out.W))
	}
	return r.wait(ctx, client, a.timeout, a.again)
}

// end says how to see what the agents do. It is an error if one refuses.
func (a *application) end(w cluster.Target, asked []*followed, refused []string, out *cli.Printer) error {
	if slices.ContainsFunc(asked, func(f *followed) bool { return f.stage == pending && !slices.Contains(refused, f.Name) }) {
		out.Printf("to see what the agents do:\n  %s --wait\n", a.again)
	}
	if len(refused) == 0 {
		return nil
	}
	return fmt.Errorf("%s refused by %s; %s", w.Kind(), cli.Counted(len(refused), "node"), a.takeBack(refused, len(asked)))
}

// checkLabelPrecedence names the nodes where another label would win over the one that the command sets.
func checkLabelPrecedence(nodes []corev1.Node, w cluster.Target) error {
	if w.Label == config.LabelProfile {
		return nil
	}
	var names []string
	for _, n := range nodes {
		if n.Labels[config.LabelProfile] != "" {
			names = append(names, n.Name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	instead := fmt.Sprintf(", or use --profile %s, which knows MIG configs too", w.Name)
	if w.Label == config.LabelDevicePluginConfig {
		instead = "; set together with the profile, NVIDIA's config manager still obeys it, and the agent evicts the pods on devices that it withdraws"
	}
	return fmt.Errorf("%s has label %[2]s, which wins over %[3]s, and nothing was labelled: remove that label first"+
		" (kubectl label node %[4]s %[2]s-)%[5]s", strings.Join(names, ", "), config.LabelProfile, w.Label, names[0], instead)
}

// writes reports whether apply changes the node, which may have the label already.
func (a *application) writes(n *corev1.Node, w cluster.Target) bool {
	return n.Labels[w.Label] != w.Name || len(a.allowed()) > 0 || waitsForUser(n)
}

// label sets the label on each node, and prints what becomes of it. It returns the nodes that have the label, and the names of those that refuse it. Nodes that
// were deleted in between are in neither list.
func (a *application) label(ctx context.Context, client kube.Interface, nodes []corev1.Node, p *plans, out *cli.Printer) (asked []*followed, refused []string, err error) {
	w := p.target
	var lines said
	defer func() { lines.print(out, "  ") }()
	for i := range nodes {
		n := &nodes[i]
		now := time.Now()
		if !a.writes(n, w) {
			f := waitFor(n, w, false, now)
			lines.add(n.Name, fmt.Sprintf("has label %s already: %s", w, f.soFar()))
			asked, refused = append(asked, f), append(refused, failures([]*followed{f})...)
			continue
		}
		after, err := cluster.Write(ctx, client, n, a.change(n, w))
		switch {
		case apierrors.IsNotFound(err):
			lines.add(n.Name, "was deleted")
		case err != nil && ctx.Err() != nil:
			return nil, nil, &cli.ExitError{
				Code: cli.ExitInterrupted,
				Err:  fmt.Errorf("interrupted; %d of %s have the label; to go on:\n  %s", len(asked), cli.Counted(len(nodes), "node"), a.again),
			}
		case apierrors.IsForbidden(err) && len(asked) == 0:
			return nil, nil, fmt.Errorf("%w; nothing was labelled", err)
		case err != nil:
			return nil, nil, fmt.Errorf("%w; %d of %s have the label; run the same command to go on", err, len(asked), cli.Counted(len(nodes), "node"))
		default:
			verdict, notes := p.of(n)
			if verdict.Ruling == show.Refused {
				refused = append(refused, n.Name)
			}
			lines.add(n.Name, strings.Join(append([]string{fmt.Sprintf("labelled %s: %s", w, verdict.Labelled())}, notes...), "\n      "))
			asked = append(asked, waitFor(after, w, n.Labels[w.Label] != w.Name, now))
		}
	}
	return asked, refused, nil
}

// allowed are the fields of the settings that the user overrides for this change.
func (a *application) allowed() []string {
	var fields []string
	if a.unmanaged {
		fields = append(fields, config.FieldUnmanagedPods)
	}
	if a.emptyDir {
		fields = append(fields, config.FieldEmptyDir)
	}
	return fields
}

// waitsForUser reports whether the agent of the node asks users whether they still mean the label, which is older than itself.
func waitsForUser(n *corev1.Node) bool {
	return cluster.ReportOf(n).Condition.Reason == string(config.ReasonOlderRequest)
}

// allowance returns the annotation of the node as this command would write it. It keeps what is allowed for the same request already: each report advises
// the next flag.
func (a *application) allowance(n *corev1.Node, w cluster.Target) string {
	all := *a
	if asked, already, _ := config.ParseAllowance(n.Annotations[config.AnnotationAllowEviction]); asked == w.String() {
		all.unmanaged, all.emptyDir = a.unmanaged || already.UnmanagedPods != "", a.emptyDir || already.EmptyDir != ""
	}
	return config.Allowance(w.Label, w.Name, all.allowed()...)
}

// question asks the agent of the node what the request would do. Plan without a name requests nothing itself.
func (a *application) question(n *corev1.Node, w cluster.Target) string {
	text := a.allowance(n, w)
	if a.profile+a.migConfig+a.pluginConfig != "" && waitsForUser(n) {
		text += " " + config.AskedAgain
	}
	return text
}

// change requests the config: it sets the label and, in the same write, the annotation with the allowed evictions. It sets that annotation also for a label
// that the node has already, but that is older than its agent. It removes one that allows another change.
func (a *application) change(n *corev1.Node, w cluster.Target) cluster.Change {
	c := cluster.Change{Labels: map[string]*string{w.Label: &w.Name}}
	if _, answered := n.Labels[config.LabelMIGConfigState]; answered && n.Labels[w.Label] != w.Name {
		c.Labels[config.LabelMIGConfigState] = nil // the former answer goes with what it was for
	}
	former, there := n.Annotations[config.AnnotationAllowEviction]
	asked, _, _ := config.ParseAllowance(former)
	switch {
	case len(a.allowed()) > 0 || waitsForUser(n):
		c.Annotations = map[string]*string{config.AnnotationAllowEviction: new(a.allowance(n, w))}
	case there && asked != w.String():
		c.Annotations = map[string]*string{config.AnnotationAllowEviction: nil}
	}
	return c
}

// warn names nodes that no agent has ever reported on, or not for too long.
func warn(nodes []*followed, out *cli.Printer) {
	var never, silent []string
	var longest time.Duration
	for _, f := range nodes {
		silence := f.first.Silence(time.Now())
		switch {
		case f.first.None():
			never = append(never, f.Name)
		case silence > 0:
			silent, longest = append(silent, f.Name), max(longest, silence)
		}
	}
	if len(never) > 0 {
		tell(out, "warning: no agent has ever reported on %s: no GPUs, or no agent there; --wait gives up after %s",
			strings.Join(never, ", "), answerTime)
	}
	if len(silent) > 0 {
		tell(out, "warning: %s", cluster.SilentAgents(silent, duration.HumanDuration(longest)))
	}
}

// plain matches arguments that a shell needs no quotes for.
var plain = regexp.MustCompile(`^[-\w./=:,@%+]+$`)

// commandLine returns the command with the arguments, for the user to paste.
func commandLine(args []string) string {
	words := []string{"kubectl", "gpuslice"}
	for _, a := range args {
		if !plain.MatchString(a) {
			a = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
		words = append(words, a)
	}
	return strings.Join(words, " ")
}
