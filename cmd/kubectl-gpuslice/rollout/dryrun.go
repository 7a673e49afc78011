package rollout

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/show"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// planTime is how long agents have to answer: an agent in the middle of a step, as a reset, answers after that.
const planTime = 30 * time.Second

// judgeTime bounds the look at the rest of the cluster: it has any number of nodes, and users write the selectors of claims.
const judgeTime = 30 * time.Second

// plans are the agents' answers to what a request would do, with what the rest of the cluster adds to them.
type plans struct {
	*cluster.Inquiry
	target cluster.Target
	silent string                     // why agents have not answered
	ends   map[string]judge.Judgement // of the pods that leave, by the node
	notes  []string                   // what a user should know of these that no verdict says
}

// preview prints what the request would do to each node.
func (a *application) preview(ctx context.Context, client kube.Interface, nodes []corev1.Node, w cluster.Target, out *cli.Printer) error {
	p, err := a.forecast(ctx, client, nodes, w, out)
	if err != nil {
		return err
	}
	if p.print(out, a.verbose); out.Err != nil {
		return out.Err
	}
	return p.verdicts()
}

// forecast asks the agents, and judges what they answer.
func (a *application) forecast(ctx context.Context, client kube.Interface, nodes []corev1.Node, w cluster.Target, out *cli.Printer) (*plans, error) {
	p, err := a.ask(ctx, client, nodes, w, planTime, out)
	switch {
	case apierrors.IsForbidden(err):
		p.unasked(nodes)
		return p, nil
	case err != nil:
		return nil, err
	}
	p.notes = p.judge(ctx, client)
	return p, nil
}

// ask asks the agents of the nodes what the request would do, with all that is allowed for it.
func (a *application) ask(ctx context.Context, client kube.Interface, nodes []corev1.Node, w cluster.Target, patience time.Duration, out *cli.Printer) (*plans, error) {
	q, err := cluster.Inquire(ctx, client, nodes, func(n *corev1.Node) string { return a.question(n, w) }, patience, out)
	if ctx.Err() != nil {
		err = &cli.ExitError{Code: cli.ExitInterrupted, Err: errors.New("interrupted; nothing was labelled")}
	}
	silent := fmt.Sprintf("its agent has not answered within %s", patience)
	if err != nil {
		silent = fmt.Sprintf("cannot ask the agents: %v", err)
	}
	return &plans{Inquiry: q, target: w, silent: silent, ends: map[string]judge.Judgement{}}, err
}

// judge judges the pods that leave, and returns what a user should know of them that no verdict says. A list that the user has no right to leaves the judgement
// unknown.
func (p *plans) judge(ctx context.Context, client kube.Interface) (notes []string) {
	var changing []*cluster.Asked
	var leaving []judge.Leaving
	var pods []string
	some := false
	for _, a := range p.Nodes {
		if changes(a.Answer) {
			changing = append(changing, a)
			leaving = append(leaving, judge.Leaving{Node: a.Name, Pods: a.Answer.Pods, More: a.Answer.MorePods})
			pods, some = append(pods, a.Answer.Pods...), some || podsLeave(a)
		}
	}
	if !some || ctx.Err() != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, judgeTime)
	defer cancel()
	c, err := judge.Read(ctx, client, pods)
	if err != nil {
		return p.unread(changing, err)
	}
	if c.Unknown != nil {
		notes = append(notes, fmt.Sprintf("which devices claims have is not known: %v", c.Unknown))
	}
	for i, end := range judge.Judge(ctx, c, leaving...) {
		a := changing[i]
		p.ends[a.Name] = end
		verdict := p.verdict(a).String()
		for _, line := range end.Lines() {
			if !strings.HasSuffix(verdict, ": "+line) {
				notes = append(notes, a.Name+": "+line)
			}
		}
	}
	return notes
}

// unread notes for the nodes with pods that leave why the rest of the cluster is not known. It returns that if not all verdicts say it.
func (p *plans) unread(changing []*cluster.Asked, err error) (notes []string) {
	for _, a := range changing {
		if !podsLeave(a) {
			continue
		}
		p.ends[a.Name] = judge.Judgement{Unknown: err.Error()}
		if !strings.HasSuffix(p.verdict(a).String(), ": "+err.Error()) {
			notes = []string{fmt.Sprintf("whether the pods that leave fit elsewhere is not known: %v", err)}
		}
	}
	return notes
}

// podsLeave reports whether pods have to leave the node.
func podsLeave(a *cluster.Asked) bool { return len(a.Answer.Pods)+a.Answer.MorePods > 0 }

// verdict is the one judgement of the request on the node, which every command says.
func (p *plans) verdict(a *cluster.Asked) show.Verdict {
	switch {
	case a.Lost != "":
		return show.Unanswered(a.Lost)
	case a.Answer == nil:
		return show.Unanswered(p.silent)
	}
	end := p.ends[a.Name]
	return show.Judge(a.Answer, end.Stuck, end.Unknown)
}

// said are texts about nodes. Nodes with the same text are joined.
type said struct {
	order []string
	names map[string][]string
}

func (s *said) add(node, text string) {
	if s.names == nil {
		s.names = map[string][]string{}
	}
	if s.names[text] == nil {
		s.order = append(s.order, text)
	}
	s.names[text] = append(s.names[text], node)
}

// on writes each text for the paper: the names, the separator, the text. Its further lines are indented.
func (s *said) on(p output.Paper, between string) (lines []string) {
	for _, text := range s.order {
		first, more, _ := strings.Cut(strings.Join(s.names[text], ", ")+between+text, "\n")
		lines = append(lines, p.Hanging(first)...)
		for line := range strings.Lines(more) {
			lines = append(lines, p.Block("      ", strings.TrimSpace(line))...)
		}
	}
	return lines
}

// print writes each text, as on does.
func (s *said) print(out *cli.Printer, between string) {
	for _, line := range s.on(output.PaperOf(out.W), between) {
		out.Printf("%s\n", line)
	}
}

// tell writes a text in lines of the terminal's width, if it is one.
func tell(out *cli.Printer, format string, args ...any) {
	out.Printf("%s\n", strings.Join(output.PaperOf(out.W).Hanging(fmt.Sprintf(format, args...)), "\n"))
}

// print writes the answers, and counts them.
func (p *plans) print(out *cli.Printer, steps bool) {
	if out.Err == nil {
		_, out.Err = io.WriteString(out.W, p.text(steps, output.PaperOf(out.W)))
	}
}

// text has the answers, with nodes of the same answer joined, and their count.
func (p *plans) text(steps bool, on output.Paper) string {
	var answers said
	verdicts := map[string]show.Verdict{}
	for _, a := range p.Nodes {
		v := p.verdict(a)
		said := []string{v.String()}
		if a.Answer != nil && (v.Ruling == show.NothingToDo || v.Ruling == show.NotKnown || changes(a.Answer)) {
			said = append(said, describe(a.Answer, steps, on)...)
		}
		text := strings.Join(said, "\n")
		answers.add(a.Name, text)
		verdicts[text] = v
	}
	var lines []string
	for _, text := range answers.order {
		v := verdicts[text]
		for _, line := range on.Hanging(strings.Join(answers.names[text], ", ") + ": " + v.String()) {
			lines = append(lines, printed(line, on, colourOf(v.Ruling)))
		}
		if _, below, more := strings.Cut(text, "\n"); more {
			lines = append(lines, printed(below, on))
		}
	}
	if silent := p.silentNodes(); len(silent) > 0 {
		lines = append(lines, "to see whether an agent runs there: "+cluster.PodsOfAgents(silent...))
	}
	for _, line := range append(p.notes, p.counted()) {
		lines = append(lines, printed(strings.Join(on.Hanging(line), "\n"), on))
	}
	return strings.Join(lines, "\n") + "\n"
}

// silentNodes are those with agents that have not answered.
func (p *plans) silentNodes() (out []string) {
	for _, a := range p.Nodes {
		if a.Answer == nil && a.Lost == "" {
			out = append(out, a.Name)
		}
	}
	return out
}

// counted says how many of the nodes would change, and of how many that is not known.
func (p *plans) counted() string {
	changed, unknown := 0, 0
	for _, a := range p.Nodes {
		switch {
		case p.verdict(a).Ruling == show.NotKnown:
			unknown++
		case changes(a.Answer):
			changed++
		}
	}
	said := fmt.Sprintf("%s: %d of %s would change", p.target.Kind(), changed, cli.Counted(len(p.Nodes), "node"))
	if unknown > 0 {
		said += fmt.Sprintf(", of %d it is not known", unknown)
	}
	return said + "; nothing was labelled"
}

// verdicts is an error if a node refuses, would wait or give up, or keeps silent.
func (p *plans) verdicts() error {
	nodes := map[show.Ruling]int{}
	for _, a := range p.Nodes {
		nodes[p.verdict(a).Ruling]++
	}
	var parts []string
	worst := show.NothingToDo
	for _, part := range []struct {
		ruling show.Ruling
		text   string
	}{
		{show.Refused, "would be refused by "},
		{show.HeldUp, "would be held up on "},
		{show.GivesUp, "would be given up on "},
		{show.BeginsUnsure, "would begin, and perhaps not end, on "},
		{show.NotKnown, "is not answered by "},
	} {
		if n := nodes[part.ruling]; n > 0 {
			parts, worst = append(parts, part.text+cli.Counted(n, "node")), max(worst, part.ruling)
		}
	}
	if len(parts) == 0 {
		return nil
	}
	return &cli.ExitError{Code: worst.ExitCode(), Err: fmt.Errorf("%s %s", p.target.Kind(), strings.Join(parts, ", "))}
}

// lost names what is lost for good; empty if nothing is.
func lost(a *api.Answer) string {
	text := strings.Join(a.Lost, "; ")
	if len(a.Lost) > 0 && a.MoreLost > 0 {
		text += fmt.Sprintf(" and %d more", a.MoreLost)
	}
	return text
}

// leavers names the pods that have to leave.
func leavers(a *api.Answer) string {
	var text string
	switch n := len(a.Pods) + a.MorePods; n {
	case 0:
		return "no pod has to leave"
	case 1:
		text = "1 pod has to leave"
	default:
		text = fmt.Sprintf("%d pods have to leave", n)
	}
	if len(a.Pods) > 0 {
		text += ": " + strings.Join(a.Pods, ", ")
		if a.MorePods > 0 {
			text += fmt.Sprintf(" and %d more", a.MorePods)
		}
	}
	return text
}
