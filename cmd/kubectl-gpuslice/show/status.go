// Package show has the commands that show what agents report: status, top and explain; and advise, which shows what follows from it for pending pods.
package show

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// statusRequest has the flags of status.
type statusRequest struct {
	nodes  cluster.Selection
	format string
	watch  bool
	ask    bool
	// namespace is the user's own.
	namespace string
}

// Status is the command.
func Status(o *cluster.Options) *cobra.Command {
	var s statusRequest
	c := &cobra.Command{
		Use:   "status [-l SELECTOR | NODE...] [-o wide|json|yaml|html] [--watch]",
		Short: "Show what each node's labels request, how far it is, and how its GPUs are cut",
		Long: `Shows the selected nodes, or without a selection all on which an agent has ever run, each on a line.

Of nodes that you name, it also draws the memory slices of each GPU, with the instances, their numbers and the pods that use them. The
agent of the node lists the pods: the command asks it by an annotation, which needs the verb patch on nodes. Without that right, or with
--ask=false, the drawing shows the agent's last report. With -o html it is a page for a browser, which loads nothing else.`,
		Example: `  # All nodes
  kubectl gpuslice status
  # How the GPUs of one are cut, and who uses them
  kubectl gpuslice status gpu-1`,
		ValidArgsFunction: o.CompleteNodes,
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains([]string{"", output.Wide, output.JSON, output.YAML, output.HTML}, s.format) {
				return fmt.Errorf("flag --output is %q: it must be %s, %s, %s or %s", s.format, output.Wide, output.JSON, output.YAML, output.HTML)
			}
			if s.watch && s.format == output.HTML {
				return errors.New("--output html is one page: leave out --watch")
			}
			client, err := o.Client()
			if err != nil {
				return err
			}
			found, err := s.nodes.OrAll(cmd.Context(), client, args)
			if err != nil {
				return err
			}
			if s.watch {
				return s.follow(cmd.Context(), client, found, len(args) > 0, cmd.OutOrStdout())
			}
			if s.namespace, _, err = o.Namespace(); err != nil {
				return fmt.Errorf("finding the namespace: %w", err)
			}
			return s.print(cmd.Context(), client, found, len(args) > 0, cmd.OutOrStdout())
		},
	}
	s.nodes.Bind(c)
	c.Flags().StringVarP(&s.format, "output", "o", "", output.Wide+", "+output.JSON+", "+output.YAML+" or "+output.HTML+", a page for a browser")
	c.Flags().BoolVarP(&s.watch, "watch", "w", false, "go on showing the nodes as they change")
	c.Flags().BoolVar(&s.ask, "ask", true, "ask the agents of the named nodes which pods use the GPUs")
	cluster.CompleteFlag(c, "output", output.Wide, output.JSON, output.YAML, output.HTML)
	return c
}

// print writes the nodes once.
func (s *statusRequest) print(ctx context.Context, client kube.Interface, nodes []corev1.Node, named bool, w io.Writer) error {
	var views []nodeView
	for i := range nodes {
		views = append(views, viewOf(&nodes[i], time.Now()))
	}
	if named {
		if err := s.seePods(ctx, client, nodes, views); err != nil {
			return err
		}
	} else {
		for i := range views {
			views[i].Pods.Why = "name the node to have them"
		}
	}
	text, err := s.text(views, named, output.PaperOf(w))
	if err != nil {
		return err
	}
	_, err = io.WriteString(w, text)
	return err
}

// text returns the nodes in the format of the flag.
func (s *statusRequest) text(views []nodeView, drawn bool, p output.Paper) (string, error) {
	switch s.format {
	case output.JSON:
		text, err := json.MarshalIndent(map[string]any{"nodes": views}, "", "  ")
		return string(text) + "\n", err
	case output.YAML:
		text, err := yaml.Marshal(map[string]any{"nodes": views})
		return string(text), err
	case output.HTML:
		return statusPage(views, drawn, p.Sheet()), nil
	}
	parts := []string{tabulate(views, nodeColumns, s.format == output.Wide, p)}
	for i := range views {
		if drawn && views[i].Agent {
			parts = append(parts, draw(&views[i], p))
		}
	}
	if line := silences(views, p); line != "" {
		parts[len(parts)-1] += "\n" + line
	}
	return strings.Join(parts, "\n\n") + "\n", nil
}

// leastPause is the time between two pictures on a terminal.
const leastPause = 100 * time.Millisecond

// statusWatch shows nodes as they change: all of them again and again on a terminal, otherwise those that have changed.
type statusWatch struct {
	request *statusRequest
	w       io.Writer
	named   bool // the user has named the nodes: then it draws their GPUs
	views   map[string]nodeView
	reports map[string]cluster.Report // of the nodes of the views: an agent falls silent without a change of its node
	printed map[string]string
	drawn   time.Time
	stale   bool // something has changed since
	out     cli.Printer
}

// follow shows the nodes until the user interrupts it.
func (s *statusRequest) follow(ctx context.Context, client kube.Interface, nodes []corev1.Node, named bool, w io.Writer) error {
	f := &statusWatch{
		request: s, w: w, named: named, views: map[string]nodeView{}, reports: map[string]cluster.Report{},
		printed: map[string]string{}, out: cli.Printer{W: w},
	}
	var names []string
	for i := range nodes {
		names = append(names, nodes[i].Name)
		f.See(&nodes[i])
	}
	err := cluster.Follow(ctx, client, names, watchOf{f, names})
	if ctx.Err() != nil {
		return f.out.Err
	}
	return err
}

// watchOf ignores nodes that are not selected: the watch is of all nodes if several are selected.
type watchOf struct {
	*statusWatch
	names []string
}

// See implements cluster.Watcher.
func (w watchOf) See(n *corev1.Node) {
	if slices.Contains(w.names, n.Name) {
		w.statusWatch.See(n)
	}
}

// Gone implements cluster.Watcher.
func (w watchOf) Gone(name string) {
	if slices.Contains(w.names, name) {
		w.statusWatch.Gone(name)
	}
}

// See implements cluster.Watcher.
func (w *statusWatch) See(n *corev1.Node) {
	v := viewOf(n, time.Now())
	v.Pods.Why = "a watch does not ask the agents"
	w.views[n.Name], w.reports[n.Name] = v, cluster.ReportOf(n)
	w.changed(n.Name, v)
}

// Gone implements cluster.Watcher.
func (w *statusWatch) Gone(name string) {
	if _, there := w.views[name]; !there {
		return
	}
	delete(w.views, name)
	if _, _, is := cli.Terminal(w.w); !is && w.printed[name] != "" {
		w.out.Printf("%s  %s  was deleted\n", time.Now().UTC().Format(time.TimeOnly+"Z"), name)
	}
	delete(w.printed, name)
	w.stale = true
}

// changed shows the node, if what is shown of it has changed.
func (w *statusWatch) changed(name string, v nodeView) {
	if _, _, is := cli.Terminal(w.w); is {
		w.stale = true
		w.picture(time.Now())
		return
	}
	line := func(p output.Paper) string {
		return strings.Join([]string{v.Node, v.AskedFor, string(v.Phase), reason(&v, p), v.Capacity, blockers(&v, p)}, "  ")
	}
	key := line(output.Paper{}) // without a time, since ages change by themselves
	if w.printed[name] == key {
		return
	}
	w.printed[name] = key
	switch w.request.format {
	case output.JSON:
		line, err := json.Marshal(v)
		w.raw(string(line)+"\n", err)
	case output.YAML:
		document, err := yaml.Marshal(v)
		w.raw("---\n"+string(document), err)
	default:
		w.out.Printf("%s  %s\n", time.Now().UTC().Format(time.TimeOnly+"Z"), line(output.Paper{Now: time.Now()}))
	}
}

func (w *statusWatch) raw(text string, err error) {
	if w.out.Err == nil {
		w.out.Err = err
	}
	if w.out.Err == nil {
		_, w.out.Err = io.WriteString(w.w, text)
	}
}

// clearScreen moves to the top of a terminal, and clears it.
const clearScreen = "\x1b[H\x1b[2J"

// picture draws all nodes again, unless it has just done so.
func (w *statusWatch) picture(now time.Time) {
	if now.Sub(w.drawn) < leastPause {
		return
	}
	w.drawn, w.stale = now, false
	var views []nodeView
	for name, v := range w.views {
		v.Silent = w.reports[name].Silence(now) > 0
		views = append(views, v)
	}
	slices.SortFunc(views, func(a, b nodeView) int { return strings.Compare(a.Node, b.Node) })
	text, err := w.request.text(views, w.named, output.PaperOf(w.w))
	if w.request.format != output.JSON && w.request.format != output.YAML {
		text = clearScreen + text
	}
	w.raw(text, err)
}

// Passed implements cluster.Watcher.
func (w *statusWatch) Passed(now time.Time) {
	if _, _, is := cli.Terminal(w.w); is && w.request.format != output.JSON && w.request.format != output.YAML {
		w.picture(now) // the ages have changed
	}
}

// Trouble implements cluster.Watcher.
func (w *statusWatch) Trouble(err error) { w.out.Printf("%v; trying again\n", err) }

// Settled implements cluster.Watcher.
func (w *statusWatch) Settled() (bool, error) { return false, w.out.Err }
