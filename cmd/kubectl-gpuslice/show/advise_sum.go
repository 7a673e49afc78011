package show

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// advised is what advise prints.
type advised struct {
	Moves     []adviceFor `json:"moves"`
	Proposals []proposal  `json:"proposals"`
	Waiting   []waiting   `json:"waiting"`
	Notes     []string    `json:"notes,omitempty"`

	none    string        // that no pod is pending; empty if one is
	blind   []string      // nodes with agents that do not see the GPUs
	silent  []string      // nodes with silent agents
	longest time.Duration // for how long one of these has been silent
}

// adviceFor is what one pod needs, and how to ask for it.
type adviceFor struct {
	judge.Move

	Config    string `json:"config,omitempty"`    // the name that spells the change out
	Command   string `json:"command,omitempty"`   // asks for it
	Scheduler string `json:"scheduler,omitempty"` // what the scheduler says of the pod

	namespace string
	whatIf    bool     // the pod is not there
	hidden    bool     // the user has not asked for it: it counts for what the others need
	about     []string // notes on the command
}

// proposal is one change of a node that serves several pods.
type proposal struct {
	Node    string `json:"node"`
	Config  string `json:"config"`
	Command string `json:"command"`
	Pods    int    `json:"pods"`                // that run after it
	Others  int    `json:"otherPods,omitempty"` // that run after it, too, and are not in the moves
	Leave   int    `json:"leave"`               // pods that have to leave
	Lost    int    `json:"slicesLost"`          // memory slices that these have
	// Begins is when the change may begin; zero for now, or where it never may.
	Begins time.Time `json:"begins,omitzero"`
	Notes  []string  `json:"notes,omitempty"` // on the command

	Cuts []judge.Cut `json:"-"` // its GPUs before the first of its moves and after the last
}

func (out *advised) note(format string, args ...any) {
	out.Notes = append(out.Notes, sanitize.Message(fmt.Sprintf(format, args...), sanitize.Longest))
}

const noSpelling = "no label can spell this change: carry out the changes before it, and ask again"

// command adds the config that spells the change out, and the command that asks for it.
func (m *adviceFor) command(n *corev1.Node) {
	if len(m.Request) == 0 || n == nil {
		return
	}
	name, missed, ok := spelled(n, m.Request)
	if !ok {
		m.Notes = append(slices.Clip(m.Notes), noSpelling)
		return
	}
	profile := n.Labels[config.LabelProfile]
	m.Config, m.Command = name, fmt.Sprintf("kubectl gpuslice apply %s --mig-config %s", n.Name, name)
	if profile != "" {
		m.Command = fmt.Sprintf("kubectl gpuslice apply %s --profile %s", n.Name, name)
		if !catalog.IsSpelled(profile) {
			m.about = append(m.about, fmt.Sprintf("the command takes node %s out of profile %s: the labels and taints of that go", n.Name, profile))
		}
	}
	if missed != "" {
		m.about = append(m.about, fmt.Sprintf("the command replaces what the labels of node %s ask for now: its agent has not carried that out, for reason %s", n.Name, missed))
	}
	m.Notes = slices.Concat(m.Notes, m.about)
}

// spelled is the name by which a label of the node asks for the GPUs. Missed is why its agent has not done what the present name asks for; empty if it has.
func spelled(n *corev1.Node, requests map[int]nvml.Request) (name string, missed config.Reason, ok bool) {
	present := cmp.Or(n.Labels[config.LabelProfile], n.Labels[config.LabelMIGConfig])
	if present != "" {
		missed = notDone(n)
	}
	if missed == "" {
		name, ok = catalog.Spell(beside(requests, present))
	}
	if !ok { // GPUs that the name leaves out stay as they are
		name, ok = catalog.Spell(requests)
	}
	return name, missed, ok && len(validation.IsDNS1123Subdomain(n.Name)) == 0
}

// notDone is the reason in the report of an agent that has not carried out the node's labels; empty if it has. A new name would carry along what the agent
// refuses, or what pods hold up.
func notDone(n *corev1.Node) config.Reason {
	r := cluster.ReportOf(n)
	if r.Answers(n) && r.Phase() == api.PhaseIdle {
		return ""
	}
	return cmp.Or(config.Reason(r.Condition.Reason), r.Status.Reason, "Unknown")
}

// beside are the requests, and those of the label's present name for other GPUs.
func beside(requests map[int]nvml.Request, label string) map[int]nvml.Request {
	if !catalog.IsSpelled(label) {
		return requests
	}
	present, err := catalog.Spelled(label)
	if err != nil {
		return requests
	}
	out := maps.Clone(requests)
	for _, rule := range present {
		for _, index := range rule.Indices {
			if _, named := requests[index]; !named {
				out[index] = nvml.Request{MIG: rule.MIG, Devices: rule.Devices}
			}
		}
	}
	return out
}

// mostNotes bounds the lists of one pod.
const mostNotes = 16

// sanitize makes the texts fit to be shown: users write them, and any user who can write a node can write its status.
func (m *adviceFor) sanitize() {
	m.Pod, m.Node = sanitize.Cut(m.Pod, 2*longestPod), sanitize.Cut(m.Node, longestPod)
	m.Reason = sanitize.Message(m.Reason, sanitize.Longest)
	m.Requests, m.Budgets, m.Notes = bounded(m.Requests), bounded(m.Budgets), bounded(m.Notes)
	m.about = bounded(m.about)
	m.Leave, m.Rivals, m.Cuts = names(m.Leave), names(m.Rivals), drawableCuts(m.Cuts)
}

func bounded(texts []string) (out []string) {
	for _, t := range texts[:min(len(texts), mostNotes)] {
		out = append(out, sanitize.Message(t, sanitize.Longest))
	}
	return out
}

func names(pods []string) (out []string) {
	for _, p := range pods {
		out = append(out, sanitize.Cut(p, 2*longestPod))
	}
	return out
}

func drawableCuts(cuts []judge.Cut) []judge.Cut {
	out := slices.Clone(cuts)
	for i := range out {
		out[i].Before, out[i].After = drawable(out[i].Before), drawable(out[i].After)
	}
	return out
}

func drawable(instances []judge.Instance) []judge.Instance {
	out := slices.Clone(instances)
	for i := range out {
		out[i].Is, out[i].Pods = sanitize.Cut(out[i].Is, cluster.LongestWord), names(out[i].Pods)
	}
	return out
}

// sum adds the proposals, and who waits for what, and leaves out the pods that are not shown.
func (out *advised) sum() {
	nodes := map[string]*nodeSum{}
	var order []string
	for i := range out.Moves {
		m := &out.Moves[i]
		if len(m.Request) > 0 { // also where a change for another pod is enough
			s := nodes[m.Node]
			if s == nil {
				s = &nodeSum{}
				nodes[m.Node], order = s, append(order, m.Node)
			}
			s.add(m)
		}
	}
	out.Moves = slices.DeleteFunc(out.Moves, func(m adviceFor) bool { return m.hidden })
	for _, name := range order {
		if p := nodes[name].spelled; p.Command != "" {
			out.Proposals = append(out.Proposals, p)
		}
	}
	slices.SortStableFunc(out.Proposals, func(a, b proposal) int { return cmp.Or(cmp.Compare(b.Pods, a.Pods), cmp.Compare(a.Lost, b.Lost)) })
	out.wait()
}

// wait adds who waits for what.
func (out *advised) wait() {
	all := waits{}
	for i := range out.Moves {
		m := &out.Moves[i]
		for _, r := range m.Requests {
			if name := resourceOf(r); name != "" && !m.whatIf {
				all.add(waitFor{resource: name, namespace: m.namespace}, 1, devicesOf(r), m.Since)
			}
		}
	}
	out.Waiting = all.sorted()
}

// nodeSum is what the moves of a node come to.
type nodeSum struct {
	pods, others int // that are shown, and that are not
	lost         int
	leave        map[string]bool
	unseen       []string  // pods that leave for those that are not shown
	stuck        bool      // not all would leave for one of the moves: no move after it can be had
	begins       time.Time // the latest of the moves: each needs those before it
	cuts         []judge.Cut
	spelled      proposal // by the last move that a label can spell
}

func (s *nodeSum) add(m *adviceFor) {
	if s.leave == nil {
		s.leave = map[string]bool{}
	}
	s.lost += m.Lost
	for _, p := range m.Leave {
		s.leave[p] = true
	}
	if m.Begins.After(s.begins) {
		s.begins = m.Begins
	}
	for _, c := range m.Cuts {
		if at := slices.IndexFunc(s.cuts, func(before judge.Cut) bool { return before.GPU == c.GPU }); at >= 0 {
			s.cuts[at].After = c.After
		} else {
			s.cuts = append(s.cuts, c)
		}
	}
	if s.stuck && !m.Stuck {
		m.Notes = append(m.Notes, "the change comes after another of the node, and the pods of that would not all leave")
	}
	s.stuck = s.stuck || m.Stuck
	m.Stuck = s.stuck
	if m.hidden {
		s.others, s.unseen = s.others+1, append(s.unseen, m.Leave...)
		return
	}
	s.pods++
	if m.Command == "" {
		return
	}
	if s.others > 0 {
		m.Notes = append(m.Notes, s.unseenServed())
	}
	if !s.stuck {
		s.spelled = proposal{
			Node: m.Node, Config: m.Config, Command: m.Command, Pods: s.pods, Others: s.others, Leave: len(s.leave), Lost: s.lost, Begins: s.begins, Notes: m.about,
			Cuts: slices.Clone(s.cuts),
		}
	}
}

// unseenServed says what the command does for pods that are not shown.
func (s *nodeSum) unseenServed() string {
	said := "the command also serves " + cli.Counted(s.others, "pod") + " before it, not shown here"
	if len(s.unseen) > 0 {
		said += "; pods that would have to leave for that: " + output.Names(s.unseen)
	}
	return sanitize.Message(said, sanitize.Longest)
}

// resourceOf is the resource of a request, as "nvidia.com/mig-3g.40gb 1"; empty for "perhaps of no GPU", which names none.
func resourceOf(request string) string {
	if request == judge.PerhapsNone {
		return ""
	}
	if claims, _, is := strings.Cut(request, " claim "); is { // each pod has claims of its own names
		return claims + " claim"
	}
	if at := strings.LastIndex(request, " "); at > 0 {
		return request[:at]
	}
	return request
}

// none reports whether nothing that is known lets the pod run.
func (m *adviceFor) none() bool {
	never := []judge.Verdict{judge.TooLarge, judge.Gated, judge.NotGPU}
	return m.Stuck || slices.Contains(never, m.Verdict) || m.Verdict == judge.NeedsDrain && m.Node == "" || m.Verdict == judge.NeedsWindow && m.Begins.IsZero()
}

// verdict is the error that the command ends with; nil if each pod can run.
func (out *advised) verdict() error {
	none, unknown := 0, 0
	for i := range out.Moves {
		switch m := &out.Moves[i]; {
		case m.none():
			none++
		case m.Verdict == judge.NotKnown, m.Unsure: // as whether a budget opens behind the cordon
			unknown++
		}
	}
	switch {
	case none > 0:
		return &cli.ExitError{Code: cli.ExitHeldUp, Err: fmt.Errorf("no change that may begin lets %s run", cli.Counted(none, "pod"))}
	case unknown > 0:
		return &cli.ExitError{Code: cli.ExitUnknown, Err: errors.New("what " + cli.Counted(unknown, "pod") + " would need is not known")}
	default:
		return nil
	}
}
