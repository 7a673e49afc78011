package drain

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/drain/holders"
)

// blocked names the PodDisruptionBudget that keeps a pod, and the budget's state.
func (r *round) blocked(ctx context.Context, pod holders.Pod, refusal error) Verdict {
	budgets := r.matching(ctx, pod)
	cause := budgetCause(refusal)
	switch len(budgets) {
	case 0:
		name := budgetName(cause)
		if name == "" {
			return Verdict{State: Blocked, Message: cause}
		}
		name = pod.Namespace + "/" + name
		return Verdict{State: Blocked, PDB: name, keeps: keeps{do: "make room in PDB " + name, why: cause}, Message: fmt.Sprintf("PDB %s: %s", name, cause)}
	case 1:
		name := pod.Namespace + "/" + budgets[0].Name
		state, until, said := budgetState(name, &budgets[0], cause)
		v := Verdict{State: Blocked, PDB: name, Message: fmt.Sprintf("PDB %s: %s%s", name, state, until)}
		if awaited := r.awaited(ctx, pod.Namespace, &budgets[0]); awaited.name != "" {
			v.Awaits, said.do, said.why = awaited.name, awaited.do, fmt.Sprintf("%sPDB %s %s", awaited.why, name, state)
			v.Message += "; " + awaited.text
		}
		hint := unreadyHint(&budgets[0], pod)
		v.keeps, v.unready, v.lacks = said, hint != "", lacksPods(&budgets[0])
		v.Message += hint
		return v
	default:
		names := make([]string, len(budgets))
		for i, b := range budgets {
			names[i] = pod.Namespace + "/" + b.Name
		}
		all := strings.Join(names, ", ")
		const why = "the API server evicts no pod that more than one PodDisruptionBudget selects"
		return Verdict{
			State: Blocked, PDB: all, keeps: keeps{do: "change the selectors of PDBs " + all, why: why},
			Message: fmt.Sprintf("PDBs %s: %s; change their selectors", all, why),
		}
	}
}

// keeps is a message's text about a budget, once for all pods that it keeps.
type keeps struct {
	do  string // what to do: "make room in PDB web/api"
	why string // "it needs 2 healthy pods and has 2"
}

// budgetState says how many healthy pods a budget needs and has, or why it never allows an eviction, and until when. It quotes the API server only if
// it knows nothing else, since that text repeats the name.
func budgetState(name string, b *policyv1.PodDisruptionBudget, cause string) (state, until string, said keeps) {
	s := b.Status
	sync := meta.FindStatusCondition(s.Conditions, policyv1.DisruptionAllowedCondition)
	switch {
	case sync != nil && sync.Reason == policyv1.SyncFailedReason: // with it the controller manager leaves ObservedGeneration as it was, 0 for a new budget
		why := shortened(sync.Message)
		return "its pods cannot be counted: " + why, "", keeps{"fix PDB " + name, "it cannot count its pods (" + why + ")"}
	case s.ObservedGeneration < b.Generation:
		state = "was changed, and the controller manager has not counted its pods since"
		return state, "", keeps{"see why the controller manager does not count PDB " + name, "it " + state}
	case s.ExpectedPods > 0 && s.DesiredHealthy >= s.ExpectedPods:
		state = fmt.Sprintf("needs %s and has %d of %d", healthy(s.DesiredHealthy), s.CurrentHealthy, s.ExpectedPods)
		return state, ": it allows no eviction until it is changed or has more pods", keeps{"change PDB " + name + " or add pods to it", "it " + state}
	case s.CurrentHealthy <= s.DesiredHealthy:
		state = fmt.Sprintf("needs %s and has %d", healthy(s.DesiredHealthy), s.CurrentHealthy)
		return state, "", keeps{"make room in PDB " + name, "it " + state}
	default:
		return cause, "", keeps{"make room in PDB " + name, cause}
	}
}

// lacksPods reports whether a budget allows evictions as soon as more of its pods are healthy.
func lacksPods(b *policyv1.PodDisruptionBudget) bool {
	s := b.Status
	return s.ObservedGeneration >= b.Generation && s.CurrentHealthy <= s.DesiredHealthy && s.DesiredHealthy < s.ExpectedPods
}

// awaited is the pod that a budget lacks to allow an eviction, and why it has not started. Without a name none is seen.
type awaited struct {
	name string
	text string
	do   string // what to do about it
	why  string // with what follows it; empty if do says all
}

const (
	pendingAtOnce  = 8   // pods that are read to find it
	longestCause   = 200 // characters of what the scheduler says, which names each kind of node
	blindness      = 10 * time.Minute
	preemptionText = " preemption:" // what follows says the same of preemption
)

// awaited finds a pod of the budget that has not started, such as the successor of an evicted one.
func (r *round) awaited(ctx context.Context, namespace string, b *policyv1.PodDisruptionBudget) awaited {
	s := b.Status
	if s.CurrentHealthy >= s.ExpectedPods || s.ExpectedPods <= s.DesiredHealthy || b.Spec.Selector == nil || r.now.Before(r.blind) {
		return awaited{}
	}
	key := namespace + "/" + b.Name
	if found, read := r.successors[key]; read {
		return found
	}
	selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	if err != nil {
		return awaited{}
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	list, err := r.client.Pods(namespace).List(ctx, metav1.ListOptions{
		LabelSelector: selector.String(), FieldSelector: "status.phase=" + string(corev1.PodPending), Limit: pendingAtOnce,
	})
	var out awaited
	switch {
	case apierrors.IsForbidden(err): // the identity of the node sees the node's pods only
		r.blind = r.now.Add(blindness)
	case err != nil:
		r.log.Debug("successors not readable", zap.String("namespace", namespace), zap.Error(err))
	default:
		out = firstPending(list.Items)
	}
	if r.successors == nil {
		r.successors = map[string]awaited{}
	}
	r.successors[key] = out
	return out
}

// firstPending is the first pod without room on any node, or else the first that has not started on its node.
func firstPending(pods []corev1.Pod) awaited {
	var out awaited
	for i := range pods {
		p := &pods[i]
		name := p.Namespace + "/" + p.Name
		if p.Status.Phase != corev1.PodPending || p.DeletionTimestamp != nil {
			continue
		}
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				why, _, _ := strings.Cut(c.Message, preemptionText)
				why = strings.TrimSuffix(shortened(why), ".")
				return awaited{
					name, fmt.Sprintf("one of its pods, %s, is Pending: %s", name, why), fmt.Sprintf("give %s room on another node", name),
					fmt.Sprintf("it is Pending (%s), and ", why),
				}
			}
		}
		if out.name == "" && p.Spec.NodeName != "" {
			not := "has not started on node " + p.Spec.NodeName
			out = awaited{name: name, text: fmt.Sprintf("one of its pods, %s, %s", name, not), do: fmt.Sprintf("see why %s %s", name, not)}
		}
	}
	return out
}

// shortened bounds another program's text.
func shortened(text string) string {
	if all := []rune(text); len(all) > longestCause {
		return string(all[:longestCause]) + "…"
	}
	return text
}

func healthy(pods int32) string {
	if pods == 1 {
		return "1 healthy pod"
	}
	return fmt.Sprintf("%d healthy pods", pods)
}

// unreadyHint names a little-known field of the budget: with it the API server evicts pods that are not ready.
func unreadyHint(b *policyv1.PodDisruptionBudget, pod holders.Pod) string {
	if pod.Ready || ptr.Deref(b.Spec.UnhealthyPodEvictionPolicy, policyv1.IfHealthyBudget) == policyv1.AlwaysAllow {
		return ""
	}
	return "; this pod is not ready, and would go if the PDB had unhealthyPodEvictionPolicy: AlwaysAllow"
}

// matching lists the budgets that select the pod. It is empty if they cannot be read: the message then has less detail.
func (r *round) matching(ctx context.Context, pod holders.Pod) []policyv1.PodDisruptionBudget {
	all, read := r.budgets[pod.Namespace]
	if !read {
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		var err error
		if all, err = r.readBudgets(ctx, pod.Namespace); err != nil {
			r.log.Debug("budgets not readable", zap.String("namespace", pod.Namespace), zap.Error(err))
		}
		if r.budgets == nil {
			r.budgets = map[string][]policyv1.PodDisruptionBudget{}
		}
		r.budgets[pod.Namespace] = all
	}
	var out []policyv1.PodDisruptionBudget
	for _, b := range all {
		// A selector that is not valid selects nothing, for the API server too.
		if s, err := metav1.LabelSelectorAsSelector(b.Spec.Selector); err == nil && s.Matches(labels.Set(pod.Labels)) {
			out = append(out, b)
		}
	}
	return out
}

// A tenant may write any number of budgets into a namespace, each as large as the API server takes.
const (
	budgetsAtOnce   = 8
	longestSelector = 64 << 10 // bytes; one that is longer counts as selecting nothing, and the message has less detail
)

// readBudgets reads the fields of a namespace's budgets that matter here.
func (r *round) readBudgets(ctx context.Context, namespace string) ([]policyv1.PodDisruptionBudget, error) {
	var out []policyv1.PodDisruptionBudget
	for page := (metav1.ListOptions{Limit: budgetsAtOnce}); ; {
		list, err := r.client.PodDisruptionBudgets(namespace).List(ctx, page)
		if err != nil {
			return nil, err
		}
		for i := range list.Items {
			b := &list.Items[i]
			kept := policyv1.PodDisruptionBudget{Status: b.Status}
			kept.Name, kept.Generation, kept.Spec.UnhealthyPodEvictionPolicy = b.Name, b.Generation, b.Spec.UnhealthyPodEvictionPolicy
			if b.Spec.Selector.Size() <= longestSelector {
				kept.Spec.Selector = b.Spec.Selector
			}
			out = append(out, kept)
		}
		if page.Continue = list.Continue; page.Continue == "" {
			return out, nil
		}
	}
}

// budgetCause returns the API server's message about the budget, or else the whole message.
func budgetCause(err error) string {
	var status apierrors.APIStatus
	if errors.As(err, &status) && status.Status().Details != nil {
		for _, c := range status.Status().Details.Causes {
			if c.Type == policyv1.DisruptionBudgetCause {
				return c.Message
			}
		}
	}
	return err.Error()
}

// budgetName finds the name in the API server's "The disruption budget api needs 2 healthy pods and has 2 currently".
func budgetName(cause string) string {
	rest, ok := strings.CutPrefix(cause, "The disruption budget ")
	if !ok {
		return ""
	}
	name, _, _ := strings.Cut(rest, " ")
	return name
}
