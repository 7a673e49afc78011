package rollout

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/show"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// planTime is how long agents have to answer: an agent in the middle of a step, as a reset, answers after that.
const planTime = 30 * time.Second

// plans are the agents' answers to what a request would do, with what the other nodes and the budgets add to them.
type plans struct {
	*cluster.Inquiry
	target cluster.Target
	ends   map[string]judge.Judgement // of the pods that leave, by the node
}

// preview prints what the request would do to each node, if the change is allowed to evict what these fields are about.
func preview(ctx context.Context, client kube.Interface, nodes []corev1.Node, w cluster.Target, allowed []string, out *cli.Printer) error {
	q, err := cluster.Inquire(ctx, client, nodes, config.Allowance(w.Label, w.Name, allowed...), planTime, out)
	if err != nil {
		return interrupted(ctx, err)
	}
	p := &plans{Inquiry: q, target: w, ends: map[string]judge.Judgement{}}
	notes := p.judge(ctx, client)
	p.print(out)
	for _, note := range notes {
		out.Printf("%s\n", note)
	}
	return p.conclude(out)
}

// judge judges the pods that leave, and returns what a user should know of them. A list that the user has no right to leaves the judgement unknown.
func (p *plans) judge(ctx context.Context, client kube.Interface) (notes []string) {
	var leaving []judge.Leaving
	var pods []string
	for _, a := range p.Nodes {
		if a.Answer != nil && len(a.Answer.Pods) > 0 {
			leaving = append(leaving, judge.Leaving{Node: a.Name, Pods: a.Answer.Pods, More: a.Answer.MorePods})
			pods = append(pods, a.Answer.Pods...)
		}
	}
	if len(leaving) == 0 || ctx.Err() != nil {
		return nil
	}
	c, err := judge.Read(ctx, client, pods)
	if err != nil {
		for _, l := range leaving {
			p.ends[l.Node] = judge.Judgement{Unknown: err.Error()}
		}
		return []string{fmt.Sprintf("whether the pods that leave fit elsewhere is not known: %v", err)}
	}
	if c.Unknown != nil {
		notes = append(notes, fmt.Sprintf("which devices claims have is not known: %v", c.Unknown))
	}
	for i, end := range judge.Judge(ctx, c, leaving...) {
		p.ends[leaving[i].Node] = end
		for _, line := range end.Lines() {
			notes = append(notes, leaving[i].Node+": "+line)
		}
	}
	return notes
}

func interrupted(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return &cli.ExitError{Code: cli.ExitInterrupted, Err: errors.New("interrupted; nothing was labelled")}
}

// print writes the answers. It joins nodes with the same answer.
func (p *plans) print(out *cli.Printer) {
	var order []string
	same := map[string][]string{}
	for _, a := range p.Nodes {
		text := p.describe(a)
		if same[text] == nil {
			order = append(order, text)
		}
		same[text] = append(same[text], a.Name)
	}
	for _, text := range order {
		names := same[text]
		if text == noAnswer {
			text += cluster.PodsOfAgents(names...)
		}
		out.Printf("%s: %s\n", strings.Join(names, ", "), text)
	}
}

// conclude counts the answers. It is an error if a node refuses, would wait or give up, or keeps silent.
func (p *plans) conclude(out *cli.Printer) error {
	refused, held, givenUp, unknown, silent, changed := 0, 0, 0, 0, 0, 0
	for _, a := range p.Nodes {
		if a.Answer != nil && len(a.Answer.Steps) > 0 {
			changed++
		}
		switch {
		case a.Answer == nil:
			silent++
		case a.Answer.Refused != "":
			refused++
		case a.Answer.HeldUp != "":
			held++
		case p.endOf(a).Stuck != "":
			givenUp++
		case p.endOf(a).Unknown != "":
			unknown++
		}
	}
	out.Printf("%s: %d of %s would change; nothing was labelled\n", p.target.Kind(), changed, cli.Counted(len(p.Nodes), "node"))
	if out.Err != nil {
		return out.Err
	}
	var parts []string
	for _, part := range []struct {
		nodes int
		text  string
	}{
		{refused, "would be refused by "},
		{held, "would be held up on "},
		{givenUp, "would be given up on "},
		{unknown, "would begin, and perhaps not end, on "},
		{silent, "is not answered by "},
	} {
		if part.nodes > 0 {
			parts = append(parts, part.text+cli.Counted(part.nodes, "node"))
		}
	}
	if len(parts) == 0 {
		return nil
	}
	err := fmt.Errorf("%s %s", p.target.Kind(), strings.Join(parts, ", "))
	switch {
	case silent > 0:
		return err
	case refused+held+givenUp == 0:
		return &cli.ExitError{Code: cli.ExitUnknown, Err: err}
	}
	return &cli.ExitError{Code: cli.ExitHeldUp, Err: err}
}

// endOf says whether a change of the node that begins would end, or be given up.
func (p *plans) endOf(a *cluster.Asked) judge.Judgement {
	if a.Answer.Patience <= 0 { // the agent deletes the pods at the end
		return judge.Judgement{}
	}
	return p.ends[a.Name]
}

// noAnswer describes nodes whose agents have not answered. The command that shows the agents of all these nodes follows it.
var noAnswer = fmt.Sprintf("no answer within %s; see whether an agent runs there: ", planTime)

// describe says what one node would do, the verdict first.
func (p *plans) describe(a *cluster.Asked) string {
	switch {
	case a.Lost != "":
		return a.Lost
	case a.Answer == nil:
		return noAnswer
	}
	verdict := p.verdict(a)
	switch {
	case verdict == "":
		return strings.Join(append([]string{"nothing to do"}, a.Answer.Notes...), "\n      ")
	case len(a.Answer.Steps) == 0:
		return verdict
	}
	var b strings.Builder
	b.WriteString(verdict)
	fmt.Fprintf(&b, "\n      %s; %s", cli.Counted(len(a.Answer.Steps)+a.Answer.More, "step"), leavers(a.Answer))
	if a.Answer.Reboot {
		b.WriteString("; it takes a reboot of the node")
	}
	if len(a.Answer.Lost) > 0 {
		b.WriteString("\n      lost for good: " + strings.Join(a.Answer.Lost, "; "))
		if a.Answer.MoreLost > 0 {
			fmt.Fprintf(&b, " and %d more", a.Answer.MoreLost)
		}
	}
	for _, line := range slices.Concat(a.Answer.Asked, a.Answer.Notes) {
		b.WriteString("\n      " + line)
	}
	for i, step := range a.Answer.Steps {
		fmt.Fprintf(&b, "\n%4d  %s", i+1, step)
	}
	if a.Answer.More > 0 {
		fmt.Fprintf(&b, "\n      and %d more", a.Answer.More)
	}
	return b.String()
}

// verdict is the agent's, with what other nodes and budgets show of the end of the change.
func (p *plans) verdict(a *cluster.Asked) string {
	verdict, now := show.Verdict(a.Answer)
	switch end := p.endOf(a); {
	case !now:
	case end.Stuck != "":
		return show.GivesUp(a.Answer, end.Stuck)
	case end.Unknown != "" && verdict != "":
		return show.EndUnknown(verdict, end.Unknown)
	}
	return verdict
}

// leavers names the pods that have to leave.
func leavers(a *api.Answer) string {
	switch n := len(a.Pods) + a.MorePods; n {
	case 0:
		return "no pod has to leave"
	case 1:
		return "1 pod has to leave: " + a.Pods[0]
	default:
		text := fmt.Sprintf("%d pods have to leave: %s", n, strings.Join(a.Pods, ", "))
		if a.MorePods > 0 {
			text += fmt.Sprintf(" and %d more", a.MorePods)
		}
		return text
	}
}
