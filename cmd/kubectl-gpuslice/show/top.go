package show

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/nvml"
)

// Orders of what top prints.
const (
	byMemory = "memory"
	byBusy   = "busy"
)

// topRequest has the flags of top.
type topRequest struct {
	nodes  cluster.Selection
	format string
	order  string
	// namespace is the user's own.
	namespace string
	only      bool // the pods of the namespace alone
}

// Top is the command.
func Top(o *cluster.Options) *cobra.Command {
	var r topRequest
	c := &cobra.Command{
		Use:   "top [-l SELECTOR | NODE...] [-o wide|json|yaml] [--sort-by memory|busy]",
		Short: "Show how much each pod uses of its GPU or instance",
		Long: `Shows each pod that has a GPU or an instance of one, with the memory of its processes there and how busy they keep it. Without a selection, of
all nodes on which an agent has ever run; with -n NAMESPACE, the pods of that namespace alone.

The agents answer: the command asks each by an annotation, which needs the verb patch on nodes. Without that right it shows which pods have what
by the agents' last reports; without the right to list nodes, which pods of your namespace request GPUs. Not every GPU reports how busy a pod is:
a question mark shows that, and the line below the table says why.`,
		Example: `  # Who has the GPUs of the pool, the largest first
  kubectl gpuslice top -l pool=research
  # Who has one and does not use it
  kubectl gpuslice top --sort-by busy`,
		ValidArgsFunction: o.CompleteNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains([]string{"", output.Wide, output.JSON, output.YAML}, r.format) {
				return fmt.Errorf("flag --output is %q: it must be %s, %s or %s", r.format, output.Wide, output.JSON, output.YAML)
			}
			if r.order != byMemory && r.order != byBusy {
				return fmt.Errorf("flag --sort-by is %q: it must be %s or %s", r.order, byMemory, byBusy)
			}
			client, err := o.Client()
			if err != nil {
				return err
			}
			if r.namespace, r.only, err = o.Namespace(); err != nil {
				return fmt.Errorf("finding the namespace: %w", err)
			}
			found, err := r.nodes.OrAll(cmd.Context(), client, args)
			if apierrors.IsForbidden(err) && len(args) == 0 && r.nodes.Selector == "" {
				return r.printOwn(cmd.Context(), client, cmd.OutOrStdout())
			}
			if err != nil {
				return err
			}
			return r.print(cmd.Context(), client, found, cmd.OutOrStdout())
		},
	}
	r.nodes.Bind(c)
	c.Flags().StringVarP(&r.format, "output", "o", "", output.Wide+", "+output.JSON+" or "+output.YAML)
	c.Flags().StringVar(&r.order, "sort-by", byMemory, byMemory+", the most first, or "+byBusy+", the least first")
	cluster.CompleteFlag(c, "output", output.Wide, output.JSON, output.YAML)
	cluster.CompleteFlag(c, "sort-by", byMemory, byBusy)
	return c
}

// use is how much one pod uses of a GPU of a node.
type use struct {
	Node string `json:"node"`
	api.Use
}

// silent is a node without an answer of its agent.
type silent struct {
	Node string `json:"node"`
	Why  string `json:"why"`
}

// holding is a GPU or an instance that a pod has, by an agent's last report.
type holding struct {
	Node     string `json:"node"`
	Pod      string `json:"pod"` // by namespace and name
	GPU      int    `json:"gpu"` // index
	Instance string `json:"instance,omitempty"`
}

// uses are what top prints.
type uses struct {
	Uses []use     `json:"uses"`
	Held []holding `json:"held,omitempty"` // in place of Uses, where the user may not ask the agents
	// Requested is in place of Uses where the user may not read nodes.
	Requested []requesting `json:"requested,omitempty"`
	More      int          `json:"more,omitempty"` // uses that the agents have left out
	Silent    []silent     `json:"silent,omitempty"`
	Notes     []string     `json:"notes,omitempty"` // what is not known, and why
}

// keep drops the pods of other namespaces. It keeps pods without a known name: they may be of this namespace.
func (u *uses) keep(namespace string) {
	u.Uses = slices.DeleteFunc(u.Uses, func(one use) bool { return one.Namespace != namespace })
	u.Held = slices.DeleteFunc(u.Held, func(one holding) bool {
		of, _, named := strings.Cut(one.Pod, "/")
		return named && of != namespace
	})
}

// none says that no pod has a GPU, as far as that is known.
func (r *topRequest) none(all uses) string {
	namespace := "of namespace " + sanitize.Cut(r.namespace, longestPod) + " "
	if all.Requested != nil {
		return "no pod " + namespace + "requests a GPU"
	}
	said := "no pod has a GPU"
	if r.only {
		said = "no pod " + namespace + "has a GPU"
	}
	if all.Held != nil {
		said += ", as the agents last reported: a pod that has just started is not in it"
	}
	return said
}

// printOwn writes what the user's namespace shows.
func (r *topRequest) printOwn(ctx context.Context, client kube.Interface, w io.Writer) error {
	all, err := requested(ctx, client, r.namespace)
	if err != nil {
		return err
	}
	said, err := r.text(all, output.PaperOf(w))
	if err != nil {
		return err
	}
	_, err = io.WriteString(w, said)
	return err
}

// reported are what pods have by the agents' last reports.
func reported(ctx context.Context, client kube.Interface, nodes []corev1.Node, namespace string) uses {
	all := uses{Uses: []use{}, Held: []holding{}, Notes: []string{"how much they use is not known: asking the agents needs the verb patch on nodes, which you lack"}}
	var names []string
	for i := range nodes {
		names = append(names, nodes[i].Name)
	}
	pods, other := podsOn(ctx, client, names, namespace)
	for i := range nodes {
		v := viewOf(&nodes[i], time.Now())
		if !v.addReported(&nodes[i], pods, other) {
			all.Silent = append(all.Silent, silent{v.Node, "its agent has not reported which pods have its GPUs"})
			continue
		}
		for _, g := range v.GPUs {
			for _, pod := range g.Pods {
				all.Held = append(all.Held, holding{Node: v.Node, Pod: pod, GPU: g.Index})
			}
			for _, instance := range g.Instances {
				for _, pod := range instance.Pods {
					all.Held = append(all.Held, holding{Node: v.Node, Pod: pod, GPU: g.Index, Instance: instance.Is})
				}
			}
		}
		for _, pod := range v.Pods.Anywhere {
			all.Notes = append(all.Notes, fmt.Sprintf("%s has devices of %s, and it is not known which", pod, v.Node))
		}
	}
	return all
}

// print asks the agents, and writes their answers. It is an error if none answers.
func (r *topRequest) print(ctx context.Context, client kube.Interface, nodes []corev1.Node, w io.Writer) error {
	q, err := cluster.Inquire(ctx, client, nodes, cluster.Of(config.RequestTop), viewTime, &cli.Printer{W: io.Discard}) // a request that stays on a node does no harm
	switch {
	case ctx.Err() != nil:
		return &cli.ExitError{Code: cli.ExitInterrupted, Err: errors.New("interrupted")}
	case err != nil && !apierrors.IsForbidden(err):
		return err
	}
	all := usesOf(q)
	if err != nil {
		all = reported(ctx, client, nodes, r.namespace)
	}
	if r.only {
		all.keep(r.namespace)
	}
	all.sort(r.order)
	said, err := r.text(all, output.PaperOf(w))
	if err != nil {
		return err
	}
	if _, err := io.WriteString(w, said); err != nil {
		return err
	}
	if n := len(all.Silent); n == len(nodes) {
		return fmt.Errorf("no agent of %s has answered", cli.Counted(n, "node"))
	}
	return nil
}

// usesOf returns the answers, fit to be shown: any user who can write the node can write the annotation.
func usesOf(q *cluster.Inquiry) uses {
	all := uses{Uses: []use{}}
	for _, a := range q.Nodes {
		switch {
		case a.Lost != "":
			all.Silent = append(all.Silent, silent{a.Name, a.Lost})
		case a.Answer == nil:
			all.Silent = append(all.Silent, silent{a.Name, fmt.Sprintf("the agent has not answered within %s", viewTime)})
		case a.Answer.Refused != "": // it is too long for the annotation
			all.Silent = append(all.Silent, silent{a.Name, "the agent does not say: " + a.Answer.Refused})
		default:
			for _, u := range a.Answer.Uses {
				all.Uses = append(all.Uses, use{a.Name, sanitizedUse(u)})
			}
			all.More += a.Answer.MoreUses
		}
	}
	return all
}

// longestPod bounds the characters of a pod's name and of its namespace. The API server accepts no longer ones.
const longestPod = 253

func sanitizedUse(u api.Use) api.Use {
	u.Namespace, u.Pod = sanitize.Cut(u.Namespace, longestPod), sanitize.Cut(u.Pod, longestPod)
	u.UUID, u.Instance = nvml.UUID(sanitize.Cut(string(u.UUID), cluster.LongestWord)), sanitize.Cut(u.Instance, cluster.LongestWord)
	u.Unknown = sanitize.Message(u.Unknown, sanitize.Longest)
	u.Since = u.Since.UTC()
	if u.Busy != nil {
		within := min(max(*u.Busy, 0), 100)
		u.Busy = &within
	}
	return u
}

// sort sorts the uses. Uses without a known busy time come last.
func (all uses) sort(order string) {
	slices.SortStableFunc(all.Uses, func(a, b use) int {
		memory := cmp.Or(cmp.Compare(b.MemoryMiB, a.MemoryMiB), cmp.Compare(a.Node, b.Node), cmp.Compare(a.name(), b.name()), cmp.Compare(a.device(), b.device()))
		switch {
		case order == byMemory || a.Busy == nil && b.Busy == nil:
			return memory
		case a.Busy == nil:
			return 1
		case b.Busy == nil:
			return -1
		default:
			return cmp.Or(cmp.Compare(*a.Busy, *b.Busy), memory)
		}
	})
}

// text returns the uses in the format of the flag.
func (r *topRequest) text(all uses, p output.Paper) (string, error) {
	switch r.format {
	case output.JSON:
		said, err := json.MarshalIndent(all, "", "  ")
		return string(said) + "\n", err
	case output.YAML:
		said, err := yaml.Marshal(all)
		return string(said), err
	}
	var parts []string
	switch {
	case len(all.Held) > 0:
		parts = append(parts, tabulate(all.Held, heldColumns, false, p))
	case len(all.Requested) > 0:
		parts = append(parts, tabulate(all.Requested, requestedColumns, false, p))
	case len(all.Uses) > 0:
		parts = append(parts, tabulate(all.Uses, useColumns, r.format == output.Wide, p))
	case len(all.Silent) == 0:
		parts = append(parts, r.none(all))
	}
	if all.More > 0 {
		parts = append(parts, fmt.Sprintf("and %d more, which have less memory", all.More))
	}
	notes := slices.Concat(all.Notes, all.unmeasured())
	for _, s := range all.Silent {
		notes = append(notes, s.Node+": "+s.Why)
	}
	for _, note := range notes {
		parts = append(parts, strings.Join(p.Block("", note), "\n"))
	}
	return strings.Join(parts, "\n") + "\n", nil
}

// unmeasured says why it is not known how busy pods are, each cause once.
func (all uses) unmeasured() []string {
	nodes := map[string][]string{}
	var causes []string
	for _, u := range all.Uses {
		if u.Busy != nil || u.Unknown == "" || slices.Contains(nodes[u.Unknown], u.Node) {
			continue
		}
		if nodes[u.Unknown] == nil {
			causes = append(causes, u.Unknown)
		}
		nodes[u.Unknown] = append(nodes[u.Unknown], u.Node)
	}
	var out []string
	for _, cause := range causes {
		out = append(out, fmt.Sprintf("busy ?: %s (%s)", cause, sanitize.Listed(nodes[cause])))
	}
	return out
}

func (u *use) name() string { return u.Namespace + "/" + u.Pod }

// device names the GPU, and its instance if there is one: "0", "0 1g.10gb@2".
func (u *use) device() string { return strings.TrimSpace(fmt.Sprintf("%d %s", u.GPU, u.Instance)) }

// share writes a size as a share of the device's memory.
func (u *use) share(mib int) string {
	if u.TotalMiB <= 0 {
		return fmt.Sprintf("%d MiB", mib)
	}
	return fmt.Sprintf("%d/%d MiB %.0f%%", mib, u.TotalMiB, 100*float64(mib)/float64(u.TotalMiB))
}

// leastBusy is the percentage below which a pod does not use what it has.
const leastBusy = 1

// colour marks pods that have a GPU or instance and do not use it.
func (u *use) colour() text.Color {
	switch {
	case u.Busy == nil:
		return text.FgHiBlack
	case *u.Busy < leastBusy:
		return text.FgYellow
	default:
		return text.FgGreen
	}
}

func (u *use) busy() string {
	if u.Busy == nil {
		return "?"
	}
	return fmt.Sprintf("%.0f%%", *u.Busy)
}

// leastPodName is the number of columns of a pod's name on a narrow terminal.
const leastPodName = 20

var heldColumns = []column[holding]{
	{name: "pod", shrinks: leastPodName, of: func(h *holding, _ output.Paper) string { return h.Pod }},
	{name: "node", folds: true, of: func(h *holding, _ output.Paper) string { return h.Node }},
	{name: "gpu", folds: true, of: func(h *holding, _ output.Paper) string {
		return strings.TrimSpace(fmt.Sprintf("%d %s", h.GPU, h.Instance))
	}},
}

var useColumns = []column[use]{
	{name: "pod", shrinks: leastPodName, of: func(u *use, _ output.Paper) string { return u.name() }},
	{name: "node", folds: true, of: func(u *use, _ output.Paper) string { return u.Node }},
	{name: "gpu", folds: true, of: func(u *use, _ output.Paper) string { return u.device() }},
	{name: "memory", folds: true, of: func(u *use, _ output.Paper) string { return u.share(u.MemoryMiB) }},
	{name: "busy", folds: true, of: func(u *use, _ output.Paper) string { return u.busy() }, colour: (*use).colour},
	{name: "for", folds: true, of: func(u *use, p output.Paper) string { return age(u.Since, p.Now) }},
	{name: "shared by", wide: true, folds: true, of: func(u *use, _ output.Paper) string {
		if u.Pods < 2 {
			return ""
		}
		return cli.Counted(u.Pods, "pod")
	}},
	{name: "all of it", wide: true, folds: true, of: func(u *use, _ output.Paper) string { return u.share(u.UsedMiB) }},
	{name: "uuid", wide: true, folds: true, of: func(u *use, _ output.Paper) string { return string(u.UUID) }},
}
