package show

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// mostWhatIf bounds the pods of --what-if.
	mostWhatIf = 1000
	// whatIfNamespace is where these are.
	whatIfNamespace = "what-if"
	// whatIfGPU stands for whole GPUs in --what-if.
	whatIfGPU = "gpu"
)

// advice has the arguments of advise.
type advice struct {
	names     []string
	selector  string
	pending   bool
	whatIf    map[string]int
	explain   bool // what the free slices of nodes can be used for
	defrag    bool // the same of all nodes together
	counts    bool // who waits for what alone
	format    string
	settings  cluster.AgentSettings
	agents    config.Settings // by these
	namespace string          // of pods that are named without one
	only      string          // the pending pods of this namespace alone; empty for all
	now       time.Time
}

// Advise is the command.
func Advise(o *cluster.Options) *cobra.Command {
	var a advice
	c := &cobra.Command{
		Use:   "advise [POD... | -l SELECTOR | --pending] [-n NAMESPACE] [--what-if PROFILE=PODS] [--explain | --defrag [NODE...] | --demand] [-o json|yaml|html]",
		Short: "Say why pods are pending, and which change of geometry would let them run",
		Long: `Says of each pending pod what it needs to run: a node has room, a node's GPUs have to be cut otherwise, pods have to leave for that, or
something else is in the way. It draws the change, and writes the command that asks for it. Without an argument, of all pending pods that request
GPUs, in all namespaces or in that of -n; of more than three pods it writes a table, and one proposal for them all.

It reads nodes, pods and budgets, the agents' reports on the nodes and the maintenance file, and writes nothing. A pod counts on the changes
for those before it, in the order in which the scheduler tries them. --what-if adds pods that are not there.

With --explain the arguments are nodes: it draws who has what, and says what the free slices can be used for, and which pods would have to leave for
more. With --defrag it says that of the nodes together: for each profile the smallest set of pods that would have to leave, with the command.
With --demand it only counts who waits for what, with Kueue's queues and quotas.

Exit codes: 0 each pod has room, or a change that lets it run; 4 there is none for at least one; 5 for at least one it is not known; 1 something
went wrong; 130 interrupted.`,
		Example: `  # Why are pods pending, and what would let them run
  kubectl gpuslice advise
  # Why is this one
  kubectl gpuslice advise -n team-a trainer-0
  # Would four more instances have room
  kubectl gpuslice advise --what-if 3g.40gb=4
  # Why can this node not take a larger instance
  kubectl gpuslice advise --explain gpu-1
  # A page for a browser, with the GPUs before and after; it loads nothing else
  kubectl gpuslice advise -o html > advice.html
  # What would it take in the pool
  kubectl gpuslice advise --defrag -l pool=research
  # How many pods wait for what, for how long, and which quota is full
  kubectl gpuslice advise --demand`,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			a.names, a.now = args, time.Now()
			if err := a.check(); err != nil {
				return err
			}
			client, err := o.Client()
			if err != nil {
				return err
			}
			namespace, only, err := o.Namespace()
			if err != nil {
				return fmt.Errorf("finding the namespace: %w", err)
			}
			if a.namespace = namespace; only {
				a.only = namespace
			}
			if a.agents, err = a.settings.LoadBeside(cluster.AgentNamespace); err != nil { // the flag --namespace is that of the pods
				return err
			}
			return a.print(cmd.Context(), client, cmd.OutOrStdout())
		},
	}
	c.Flags().StringVarP(&a.selector, "selector", "l", "", "select pending pods by their labels, as kubectl get does")
	c.Flags().BoolVar(&a.pending, "pending", false, "all pending pods that request GPUs, as without an argument")
	c.Flags().StringToIntVar(&a.whatIf, "what-if", nil, "pods that are not there: 3g.40gb=4 for four that each request one such instance, gpu=2 for whole GPUs")
	c.Flags().BoolVar(&a.explain, "explain", false, "say what the free slices of nodes can be used for; the arguments and -l are of nodes")
	c.Flags().BoolVar(&a.defrag, "defrag", false, "the same of the nodes together: the fewest pods that would have to leave for a device of each profile")
	c.Flags().BoolVar(&a.counts, "demand", false, "only how many pods wait for what, and for how long, with the workloads and quotas of Kueue's queues")
	c.Flags().StringVarP(&a.format, "output", "o", "", output.JSON+", "+output.YAML+" or "+output.HTML+", a page for a browser")
	a.settings.Bind(c.Flags())
	cluster.CompleteFlag(c, "output", output.JSON, output.YAML, output.HTML)
	return c
}

// check refuses arguments that contradict each other, or say nothing.
func (a *advice) check() error {
	if ofNodes := a.explain || a.defrag; a.explain && a.defrag || ofNodes && (a.pending || len(a.whatIf) > 0) {
		return errors.New("--explain and --defrag are of nodes: give one of them, without --pending and --what-if")
	}
	if err := a.checkWays(); err != nil {
		return err
	}
	if !slices.Contains([]string{"", output.JSON, output.YAML, output.HTML}, a.format) {
		return fmt.Errorf("flag --output is %q: it must be %s, %s or %s", a.format, output.JSON, output.YAML, output.HTML)
	}
	if _, err := labels.Parse(a.selector); err != nil {
		return fmt.Errorf("reading the selector %q: %w", a.selector, err)
	}
	return a.checkWhatIf()
}

// checkWays refuses several ways to name pods.
func (a *advice) checkWays() error {
	ways := 0
	for _, is := range []bool{len(a.names) > 0, a.selector != "", a.pending} {
		if is {
			ways++
		}
	}
	switch {
	case a.counts && (ways > 0 || len(a.whatIf) > 0 || a.explain || a.defrag):
		return errors.New("--demand counts all that wait: give it without pods and other ways to ask; -n NAMESPACE counts those of one namespace")
	case ways > 1:
		return errors.New("name pods, select them with -l, or take all with --pending: only one of these")
	default:
		return nil
	}
}

// checkWhatIf refuses pods that cannot be.
func (a *advice) checkWhatIf() error {
	all := 0
	for kind, n := range a.whatIf {
		if _, err := catalog.DeviceName(kind); err != nil && kind != whatIfGPU {
			return fmt.Errorf("flag --what-if: %q is neither a profile, as 3g.40gb, nor %s", kind, whatIfGPU)
		}
		if n < 1 || n > mostWhatIf {
			return fmt.Errorf("flag --what-if: %s=%d must be from 1 to %d pods", kind, n, mostWhatIf)
		}
		all += n
	}
	if all > mostWhatIf {
		return fmt.Errorf("flag --what-if has %d pods: it may have %d", all, mostWhatIf)
	}
	return nil
}

// print reads the cluster once, and writes what the pods need.
func (a *advice) print(ctx context.Context, client kube.Interface, w io.Writer) error {
	out, err := a.answer(ctx, client)
	switch {
	case ctx.Err() != nil:
		return &cli.ExitError{Code: cli.ExitInterrupted, Err: errors.New("interrupted")}
	case err != nil:
		return err
	}
	said, err := out.text(a.format, output.PaperOf(w))
	if err != nil {
		return err
	}
	if _, err := io.WriteString(w, said); err != nil {
		return err
	}
	return out.verdict()
}

// answer is what the command prints, and the verdict that it ends with.
type answer interface {
	text(format string, p output.Paper) (string, error)
	verdict() error
}

// answer reads the cluster once.
func (a *advice) answer(ctx context.Context, client kube.Interface) (answer, error) {
	switch {
	case a.explain || a.defrag:
		return a.fragments(ctx, client)
	case a.counts:
		return a.demand(ctx, client)
	}
	return a.read(ctx, client)
}

// read reads the cluster, and finds what the pods need.
func (a *advice) read(ctx context.Context, client kube.Interface) (*advised, error) {
	c, err := judge.ReadFor(ctx, client, isPending, a.whatIfs(nil)...)
	lacks, narrowed := "", false // the right that the user lacks to see the cluster, and whether pods of other namespaces are left out
	if apierrors.IsForbidden(err) {
		lacks = "listing " + forbidden(err)
		c, narrowed, err = a.readOwn(ctx, client)
	}
	if err != nil {
		return nil, err
	}
	out := &advised{Moves: []adviceFor{}, Proposals: []proposal{}, Waiting: []waiting{}}
	if narrowed {
		out.note("pods of other namespaces than %s are left out: listing pods of all namespaces needs rights that you lack", a.namespace)
	}
	pending, err := a.find(ctx, client, c, out)
	if err != nil {
		return nil, err
	}
	q := judge.Question{Cluster: c, Pending: append(pending, a.whatIfs(c.Nodes)...), All: lacks == "", Now: a.now, Status: out.statusOf(a.now)}
	q.Spells = func(n *corev1.Node, requests map[int]nvml.Request) bool {
		_, _, ok := spelled(n, requests)
		return ok
	}
	if !slices.ContainsFunc(q.Pending, func(p corev1.Pod) bool { return isWhatIf(&p) || a.asks(&p) }) {
		q.Pending = nil
	}
	if lacks == "" && len(q.Pending) > 0 {
		if q.Begins, err = a.begins(ctx, client, c.Nodes, out); err != nil {
			return nil, err
		}
	}
	a.add(out, q, judge.Moves(ctx, q), lacks)
	if len(out.Moves) == 0 && len(a.names) == 0 {
		out.none = "no pod that requests a GPU is pending"
		if narrowed || a.only != "" {
			out.none += " in namespace " + sanitize.Cut(a.namespace, longestPod)
		}
	}
	return out, nil
}

// forbidden is what the user may not list.
func forbidden(err error) string {
	if status, is := errors.AsType[*apierrors.StatusError](err); is && status.ErrStatus.Details != nil {
		return sanitize.Cut(status.ErrStatus.Details.Kind, cluster.LongestWord)
	}
	return "what decides"
}

// asks reports whether the pod is one of those to advise on. The scheduler tries all pending pods: the others take what they find before it.
func (a *advice) asks(p *corev1.Pod) bool {
	if !isPending(p) {
		return false
	}
	if len(a.names) > 0 {
		return slices.ContainsFunc(a.names, func(name string) bool { return a.named(name) == p.Namespace+"/"+p.Name })
	}
	selector, err := labels.Parse(a.selector)
	return err == nil && (a.only == "" || a.only == p.Namespace) && selector.Matches(labels.Set(p.Labels)) && a.others()
}

// others reports whether the user asks for pods of the cluster, not for those of --what-if alone.
func (a *advice) others() bool {
	return len(a.names) > 0 || a.selector != "" || a.pending || len(a.whatIf) == 0
}

// isPending reports whether the pod waits for a node.
func isPending(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodPending && p.Spec.NodeName == "" && p.DeletionTimestamp == nil
}

// named is the pod's namespace and name, as the user may write them: trainer-0, pod/trainer-0, team-a/trainer-0.
func (a *advice) named(name string) string {
	name = strings.TrimPrefix(strings.TrimPrefix(name, "pods/"), "pod/")
	if strings.Contains(name, "/") {
		return name
	}
	return a.namespace + "/" + name
}

// readOwn reads the pods that a user may list who lacks another right to see the cluster: all, or those of the own namespaces. Narrowed reports that the user
// has asked for all, and gets those of the own namespace.
func (a *advice) readOwn(ctx context.Context, client kube.Interface) (c *judge.Cluster, narrowed bool, err error) {
	namespaces := map[string]bool{}
	for _, name := range a.names {
		namespace, _, _ := strings.Cut(a.named(name), "/")
		namespaces[namespace] = true
	}
	if len(a.names) == 0 {
		namespaces[a.only] = true
	}
	c = &judge.Cluster{}
	for _, namespace := range slices.Sorted(maps.Keys(namespaces)) {
		list, err := client.Pods(namespace).List(ctx, metav1.ListOptions{ResourceVersion: "0"})
		if namespace == "" && apierrors.IsForbidden(err) {
			narrowed, namespace = true, a.namespace
			list, err = client.Pods(namespace).List(ctx, metav1.ListOptions{ResourceVersion: "0"})
		}
		if err != nil {
			return nil, false, fmt.Errorf("listing pods of namespace %s: %w", namespace, err)
		}
		c.Pods = append(c.Pods, list.Items...)
	}
	return c, narrowed, nil
}

// find returns the pending pods, and notes which of the named pods are not pending. The lists come from a cache, which a new pod may not have reached.
func (a *advice) find(ctx context.Context, client kube.Interface, c *judge.Cluster, out *advised) (pending []corev1.Pod, err error) {
	for i := range c.Pods {
		if isPending(&c.Pods[i]) {
			pending = append(pending, c.Pods[i])
		}
	}
	seen := map[string]bool{}
	for _, name := range a.names {
		name = a.named(name)
		if seen[name] {
			continue
		}
		seen[name] = true
		at := slices.IndexFunc(c.Pods, func(p corev1.Pod) bool { return p.Namespace+"/"+p.Name == name })
		if at < 0 {
			namespace, short, _ := strings.Cut(name, "/")
			p, err := client.Pods(namespace).Get(ctx, short, metav1.GetOptions{})
			switch {
			case apierrors.IsNotFound(err):
				return nil, fmt.Errorf("there is no pod %s; see kubectl get pods -A", name)
			case err != nil:
				return nil, fmt.Errorf("reading pod %s: %w", name, err)
			}
			at, c.Pods = len(c.Pods), append(c.Pods, *p)
			if isPending(p) {
				pending = append(pending, *p)
			}
		}
		if p := &c.Pods[at]; !isPending(p) {
			out.note("%s is not pending: %s", name, whereabouts(p))
		}
	}
	return pending, nil
}

// whereabouts says why a pod is not pending.
func whereabouts(p *corev1.Pod) string {
	node := sanitize.Cut(p.Spec.NodeName, longestPod)
	switch {
	case judge.Ended(p):
		return "it has ended, " + string(p.Status.Phase)
	case p.DeletionTimestamp != nil:
		return "it is being deleted"
	case p.Status.Phase == corev1.PodPending && node != "":
		return "it has node " + node + ", which starts it"
	case node != "":
		return "it is on node " + node
	default:
		return "its phase is " + sanitize.Cut(string(p.Status.Phase), cluster.LongestWord)
	}
}

// statusOf has the report of a node's agent. Of an agent that is silent, does not see its GPUs, or has not answered the node's labels yet, the report is of an
// earlier state: it counts for nothing.
func (out *advised) statusOf(now time.Time) func(n *corev1.Node) (api.Status, string) {
	return func(n *corev1.Node) (api.Status, string) {
		r := cluster.ReportOf(n)
		switch silent := r.Silence(now); {
		case silent > 0:
			out.silent, out.longest = append(out.silent, n.Name), max(out.longest, silent)
			return api.Status{}, "its agent has been silent for " + age(now.Add(-silent), now)
		case r.StandsAlone():
			out.blind = append(out.blind, n.Name)
			return api.Status{}, "its agent does not see the GPUs now"
		case r.AnswersAnother(n):
			return api.Status{}, "its agent has not answered yet what its labels ask for"
		default:
			return r.Status, ""
		}
	}
}

// whatIfs are the pods of --what-if. They come after all others, and tolerate what keeps other pods off nodes with GPUs.
func (a *advice) whatIfs(nodes []corev1.Node) (pods []corev1.Pod) {
	var tolerations []corev1.Toleration
	for i := range nodes {
		for _, t := range nodes[i].Spec.Taints {
			domain, _, _ := strings.Cut(t.Key, "/")
			own := domain == "gpuslice.io" || domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io")
			if !own && !slices.ContainsFunc(tolerations, func(o corev1.Toleration) bool { return o.Key == t.Key }) {
				tolerations = append(tolerations, corev1.Toleration{Key: t.Key, Operator: corev1.TolerationOpExists})
			}
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(a.whatIf)) {
		name := strings.ReplaceAll(kind, "+", ".")
		asks := nvml.ResourceMIGPrefix + name
		if kind == whatIfGPU {
			asks = nvml.ResourceGPU
		}
		for i := range a.whatIf[kind] {
			pods = append(pods, corev1.Pod{
				// They are tried in the order of these times.
				ObjectMeta: metav1.ObjectMeta{Namespace: whatIfNamespace, Name: fmt.Sprintf("%s-%d", name, i+1), CreationTimestamp: metav1.NewTime(a.now.Add(time.Duration(len(pods))))},
				Spec: corev1.PodSpec{
					Priority: new(int32(math.MinInt32)), PreemptionPolicy: new(corev1.PreemptNever), Tolerations: tolerations,
					Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceName(asks): resource.MustParse("1")}}}},
				},
				Status: corev1.PodStatus{Phase: corev1.PodPending},
			})
		}
	}
	return pods
}

// isWhatIf reports whether the pod is one of --what-if.
func isWhatIf(p *corev1.Pod) bool { return p.Namespace == whatIfNamespace && p.UID == "" }

// add adds what the pods need. It leaves out pods that request no GPU, unless the user has named them.
func (a *advice) add(out *advised, q judge.Question, moves []judge.Move, lacks string) {
	pods, nodes := map[string]*corev1.Pod{}, map[string]*corev1.Node{}
	for i := range q.Pending {
		pods[q.Pending[i].Namespace+"/"+q.Pending[i].Name] = &q.Pending[i]
	}
	for i := range q.Cluster.Nodes {
		nodes[q.Cluster.Nodes[i].Name] = &q.Cluster.Nodes[i]
	}
	others := 0
	for _, m := range moves {
		p := pods[m.Pod]
		hidden := !isWhatIf(p) && !a.asks(p)
		if m.Verdict == judge.NotGPU && len(m.Requests) == 0 && len(a.names) == 0 {
			if !hidden {
				others++
			}
			continue
		}
		if lacks != "" && len(m.Requests) > 0 && m.Verdict != judge.Gated {
			m = judge.Move{Pod: m.Pod, Since: m.Since, Requests: m.Requests, Notes: m.Notes, Verdict: judge.NotKnown, Reason: lacks + " needs rights that you lack"}
		}
		one := adviceFor{Move: m, namespace: p.Namespace, whatIf: isWhatIf(p), hidden: hidden, Scheduler: schedulerOf(p)}
		if one.whatIf {
			one.Since = time.Time{}
		}
		one.command(nodes[m.Node])
		one.sanitize()
		out.Moves = append(out.Moves, one)
	}
	if others > 0 {
		out.note("%s without a request for GPUs: name a pod to see what is said of it", sanitize.Counted(others, "more pending pod"))
	}
	out.noteAgents(a.now)
	out.sum()
}

// noteAgents names the nodes with agents that are silent, or do not see the GPUs.
func (out *advised) noteAgents(now time.Time) {
	if len(out.blind) > 0 {
		out.note("the agents of these nodes do not see the GPUs now: %s; kubectl gpuslice status NODE says why", sanitize.Listed(out.blind))
	}
	if line := cluster.SilentAgents(out.silent, age(now.Add(-out.longest), now)); line != "" {
		out.note("%s", line)
	}
}

// schedulerOf is what the scheduler says of the pod; empty if it has said nothing.
func schedulerOf(p *corev1.Pod) string {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status != corev1.ConditionTrue {
			return sanitize.Message(cmp.Or(c.Message, c.Reason), sanitize.Longest)
		}
	}
	return ""
}
