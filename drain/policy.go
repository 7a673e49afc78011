package drain

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/drain/holders"
)

// Policy says which pods may be evicted or deleted, and when. The zero Policy evicts them all, and has no deadline.
type Policy struct {
	Rules     []Rule // the first that fits a pod counts, also over Unmanaged and EmptyDir unless its action is Ask
	Unmanaged Choice // for pods that no controller recreates
	EmptyDir  Choice // for pods with files on the node's disk, which are lost with them

	// EndFor is how long after the fence an ordinary pod without a rule may take to end by itself; 0 for not at all.
	EndFor   time.Duration
	EndField string // field of the settings that EndFor comes from: "drain.mode"

	// AskFor is how long after the fence a pod may take that is asked behind it: by a rule without a time, or because its program is known to react to
	// cordons or requests. If it is 0, no program is known.
	AskFor   time.Duration
	AskField string // field of the settings that AskFor comes from: "drain.gradualFor"

	// Granted are the times that Grant returned before for pods behind the same fence. Without them a pod that no longer shows when its work ends has only
	// AskFor, and the pods that leave after it have no time of their own.
	Granted map[types.UID]time.Duration

	Deadline    time.Duration // how long a pod may take to leave, from the fence or the end of its own time on; 0 for any time
	Delete      bool          // delete pods that are there after the deadline
	DeleteGrace time.Duration // longest grace of such a deletion

	// Fence is the taint of the fence. A DaemonSet that tolerates it recreates its pod at once, so Evict refuses to evict that pod unless a rule
	// names it. Without a key it does not refuse: for pods that are to be replaced, not to leave.
	Fence corev1.Taint
	// Daemons are the namespaces with DaemonSets that serve the node. Pods of other DaemonSets are ordinary ones: otherwise whoever may create a
	// DaemonSet in their own namespace could forbid each change.
	Daemons []string

	// KubeletSilent is why kubelet will not end a pod: "node gpu-1 is not Ready since 03:12Z". Empty while kubelet works.
	KubeletSilent string
	// ClaimDriverAway says why holders.ClaimDriver does not run on the node; empty if it does. Without it kubelet ends no pod that has a claim of it.
	ClaimDriverAway string
	// Keeps is the key of the fence's taint while the node has it; empty otherwise. Pods of DaemonSets that do not tolerate it cannot start.
	Keeps string
}

// Choice says whether certain pods are refused, and names the field of the settings: "drain.emptyDir".
type Choice struct {
	Refuse bool
	Field  string
	Flag   string // of kubectl gpuslice apply, to allow it for one change: "--delete-emptydir-data"
}

// Rule says how certain pods are treated.
type Rule struct {
	Field      string   // its place in the settings: "drain.rules[0]"
	Namespaces []string // none for all
	Selector   labels.Selector
	Action     Action
	For        time.Duration // how long after the fence a pod may end by itself, or take to leave if it is asked; of Ask 0 for Policy.AskFor
}

// Action says how a rule treats a pod.
type Action string

// The actions.
const (
	Evict  Action = "evict"  // as any other pod
	Wait   Action = "wait"   // the pod may end by itself for a time
	Ask    Action = "ask"    // what refuses its eviction does not hold up the fence: its eviction is requested behind it, up to a deadline
	Refuse Action = "refuse" // the pod stays
)

func (r Rule) fits(pod holders.Pod) bool {
	return (len(r.Namespaces) == 0 || slices.Contains(r.Namespaces, pod.Namespace)) && r.Selector.Matches(labels.Set(pod.Labels))
}

// tier orders pods: a tier is evicted when no pod of an earlier tier is left.
type tier int

const (
	ordinary tier = iota
	critical      // pods that ordinary pods may need while they end
	daemons       // pods that serve the other pods of the node
	tiers         // the number of tiers
)

func (p Policy) tierOf(pod holders.Pod) tier {
	switch {
	case p.daemon(pod):
		return daemons
	case pod.Critical:
		return critical
	default:
		return ordinary
	}
}

// daemon reports whether the pod is of a DaemonSet that serves the node.
func (p Policy) daemon(pod holders.Pod) bool {
	return pod.Daemon && slices.Contains(p.Daemons, pod.Namespace)
}

// deletionSlack is the time beyond a pod's grace that kubelet gets to end it and to unmount its volumes.
const deletionSlack = time.Minute

// terms are those of a policy for one pod.
type terms struct {
	by      string        // the field of the settings that says more than "evict"; empty if none does
	source  string        // the same for users: "rule drain.rules[0]"
	refusal string        // why the policy forbids its eviction; empty if it allows it
	allow   []Choice      // those that refuse it, which a user may allow for one change
	wait    time.Duration // how long after the fence it may take to end by itself, or to leave if it is asked
	ask     bool          // its eviction is requested all the time that it may take
	reactor *reactor      // the program that lets it go; nil if none is known
	ends    time.Time     // when its own work has ended at the latest; zero if that is not known

	// These are zero before the fence is up, and the last two also without a deadline. They follow from the fence's time, the settings, the pod and
	// Policy.Granted, so that a restart of the agent moves none of them.
	until    time.Time // until when it may end by itself; of one that is asked, its deadline
	deadline time.Time // from when on the policy deletes it, if it deletes
	end      time.Time // when it has to be gone, evicted or deleted
}

// terms returns the terms of a pod behind a fence raised at since; zero means that no fence is up.
func (p Policy) terms(pod holders.Pod, since, now time.Time) terms {
	if since.IsZero() {
		return p.ruling(pod, now)
	}
	t := p.ruling(pod, since)
	if t.ask {
		t.wait = max(t.wait, p.Granted[pod.UID])
	}
	t.until = since.Add(t.wait)
	if p.Deadline == 0 {
		return t
	}
	mine := p.tierOf(pod)
	stays := t.wait + p.Deadline
	if t.ask {
		stays = t.wait
	}
	if mine != ordinary {
		// It is evicted when the ordinary pods have left. Rules may let these stay for hours.
		stays = max(stays, p.longestWait()+p.Deadline, p.longestGrant()+p.Deadline)
	}
	t.deadline = since.Add(stays)
	if t.ask {
		t.until = t.deadline
	}
	t.end = t.deadline
	if p.Delete {
		// Each tier is deleted when the one before is gone.
		t.end = t.deadline.Add(time.Duration(mine+1) * (p.DeleteGrace + deletionSlack))
	}
	return t
}

// Patience is how long the last of the pods may stay behind a fence raised at since, until the policy's deadline for it; 0 if there is none.
func (p Policy) Patience(pods []holders.Pod, since time.Time) time.Duration {
	longest := p.Deadline
	p.Granted = p.Grant(pods, since)
	for _, pod := range pods {
		if t := p.terms(pod, since, since); !t.deadline.IsZero() {
			longest = max(longest, t.deadline.Sub(since))
		}
	}
	return longest
}

func (p Policy) longestWait() time.Duration {
	longest := p.EndFor
	for _, rule := range p.Rules {
		if rule.Action == Wait {
			longest = max(longest, rule.For)
		}
	}
	return longest
}

// Grant returns Granted with the times of these pods: for each one that is asked behind a fence raised at since, how long after the fence it may take to
// leave. It shortens none and forgets none: pods no longer show their time when their work has ended, and the pods of later tiers leave after those that are
// gone. Each pod has its own time, so that no pod gains any by another's.
func (p Policy) Grant(pods []holders.Pod, since time.Time) map[types.UID]time.Duration {
	if since.IsZero() {
		return p.Granted
	}
	granted := map[types.UID]time.Duration{}
	maps.Copy(granted, p.Granted)
	for _, pod := range pods {
		if t := p.ruling(pod, since); t.ask {
			granted[pod.UID] = max(granted[pod.UID], t.wait)
		}
	}
	return granted
}

func (p Policy) longestGrant() time.Duration {
	var longest time.Duration
	for _, wait := range p.Granted {
		longest = max(longest, wait)
	}
	return longest
}

// Asked says of each pod that is asked behind the cordon until when it may stay, without a request: "asked behind the cordon, up to 8h (drain.gradualFor)".
func (p Policy) Asked(pod holders.Pod, now time.Time) (text string, is bool) {
	t := p.ruling(pod, now)
	if !t.ask {
		return "", false
	}
	return t.upTo(now), true
}

// ruling finds the rule, the program or the choice that applies to a pod. base is when the fence was raised, or would be.
func (p Policy) ruling(pod holders.Pod, base time.Time) terms {
	if i := slices.IndexFunc(p.Rules, func(r Rule) bool { return r.fits(pod) }); i >= 0 {
		t := p.Rules[i].ruling()
		if t.ask {
			if lost, refused := p.loss(pod); refused {
				return lost
			}
			t.reactor = reactorOf(pod)
			if t.wait == 0 {
				p.grant(&t, pod, base)
			}
		}
		return t
	}
	if p.comesBack(pod) {
		kind, name, _ := strings.Cut(pod.Controller, "/")
		return terms{refusal: fmt.Sprintf("%s %s tolerates the taint %s and would recreate it at once: remove that toleration, "+
			"or, if a label of the node deploys it, add the label to the operands", kind, name, p.Fence.Key)}
	}
	if t, refused := p.loss(pod); refused {
		return t
	}
	if known := reactorOf(pod); p.AskFor > 0 && known != nil {
		t := terms{by: p.AskField, source: p.AskField, ask: true, reactor: known}
		p.grant(&t, pod, base)
		return t
	}
	if p.EndFor > 0 && p.tierOf(pod) == ordinary {
		return terms{by: p.EndField, source: p.EndField, wait: p.EndFor}
	}
	return terms{}
}

// grant sets how long a pod may take that is asked, where no rule has a time. If the end of its work is known, it has until then and the usual time to leave;
// else AskFor.
func (p Policy) grant(t *terms, pod holders.Pod, base time.Time) {
	t.wait = p.AskFor
	if t.reactor == nil || t.reactor.ends == nil {
		return
	}
	if ends, known := t.reactor.ends(pod); known {
		t.ends, t.source = ends, "as its annotation says"
		t.wait = min(max(0, ends.Sub(base)), longestAsked-p.Deadline) + p.Deadline
	}
}

// busy says why the program that owns the pod does not have it evicted yet; empty if it may be.
func (t terms) busy(pod holders.Pod) string {
	if !t.ask || t.reactor == nil || t.reactor.busy == nil {
		return ""
	}
	return t.reactor.busy(pod)
}

// upTo says before the fence until when a pod may stay that is asked behind it.
func (t terms) upTo(now time.Time) string {
	text := "asked behind the cordon, up to " + period(t.wait)
	if now.Before(t.ends) {
		text = "asked behind the cordon, up to " + t.ends.UTC().Format("2006-01-02T15:04Z")
	}
	text += " (" + t.source + ")"
	if t.reactor != nil {
		text += ": " + t.reactor.may + " until then"
	}
	return text
}

// period writes a duration without the parts that are zero: 8h, 1h30m.
func period(d time.Duration) string {
	text := d.Round(time.Second).String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = text[:len(text)-len(zero)+1]
		}
	}
	return text
}

// loss refuses a pod that no controller would recreate, or that would lose files.
func (p Policy) loss(pod holders.Pod) (terms, bool) {
	var t terms
	var lost []string
	refuse := func(c Choice, why string) {
		t.by = cmp.Or(t.by, c.Field)
		t.allow, lost = append(t.allow, c), append(lost, fmt.Sprintf("%s (%s: refuse)", why, c.Field))
	}
	if p.Unmanaged.Refuse && pod.Controller == "" {
		refuse(p.Unmanaged, "no controller would recreate it")
	}
	if p.EmptyDir.Refuse && len(pod.EmptyDirs) > 0 {
		refuse(p.EmptyDir, "its files on emptyDir "+strings.Join(pod.EmptyDirs, ", ")+" would be lost")
	}
	t.refusal = strings.Join(lost, ", and ")
	return t, lost != nil
}

// Flags lists the flags of kubectl gpuslice apply that let one change evict what the policy refuses, each once.
func Flags(verdicts []Verdict) []string {
	var out []string
	for _, v := range verdicts {
		for _, c := range v.Allow {
			out = append(out, c.Flag)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func (r Rule) ruling() terms {
	switch r.Action {
	case Refuse:
		return terms{by: r.Field, refusal: r.Field + " forbids its eviction: delete it yourself, or change the rule"}
	case Wait:
		return terms{by: r.Field, source: "rule " + r.Field, wait: r.For}
	case Ask:
		return terms{by: r.Field, source: "rule " + r.Field, wait: r.For, ask: true}
	case Evict:
	}
	return terms{}
}

// comesBack reports whether the pod would be evicted for ever: its DaemonSet recreates it as long as the node's taints allow it, and always tolerates
// the cordon.
func (p Policy) comesBack(pod holders.Pod) bool {
	return p.daemon(pod) && p.Fence.Key != "" && holders.Tolerates(pod.Tolerations, p.Fence)
}
