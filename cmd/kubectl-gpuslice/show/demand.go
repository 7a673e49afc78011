package show

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// demanded is what advise --demand prints.
type demanded struct {
	Waiting []waiting `json:"waiting"`
	Notes   []string  `json:"notes,omitempty"`

	none    string // that nothing waits; empty if something does
	columns []column[waiting]
}

// waiting are the pods of a namespace that wait for a resource.
type waiting struct {
	Resource  string    `json:"resource"`
	Namespace string    `json:"namespace"`
	Pods      int       `json:"pods"`              // with those that Kueue has not let be made
	Devices   int       `json:"devices,omitempty"` // that they ask for together; 0 for claims
	Oldest    time.Time `json:"oldest"`
	Queue     *queue    `json:"queue,omitempty"` // nil without Kueue
}

// queue is a LocalQueue of Kueue, as far as one resource goes.
type queue struct {
	Name     string `json:"name"`
	Pending  int    `json:"pending"` // workloads
	Admitted int    `json:"admitted"`
	Quota    *quota `json:"quota,omitempty"` // nil if it is not known
}

// quota is how much of a resource a ClusterQueue has of its own, over all flavors.
type quota struct {
	ClusterQueue string `json:"clusterQueue"`
	Nominal      int    `json:"nominal"`
	Reserved     int    `json:"reserved"` // by workloads; more than nominal where the queue borrows
	Full         bool   `json:"full"`
}

// waitFor is what pods wait for.
type waitFor struct{ resource, namespace, queue string }

// waits has who waits for what.
type waits map[waitFor]*waiting

// add counts pods that ask for so many devices together.
func (w waits) add(what waitFor, pods, devices int, since time.Time) {
	one := w[what]
	if one == nil {
		one = &waiting{Resource: sanitize.Cut(what.resource, 2*longestPod), Namespace: sanitize.Cut(what.namespace, longestPod), Oldest: since}
		if what.queue != "" {
			one.Queue = &queue{Name: sanitize.Cut(what.queue, longestPod)}
		}
		w[what] = one
	}
	one.Pods, one.Devices = one.Pods+pods, one.Devices+devices
	if since.Before(one.Oldest) {
		one.Oldest = since
	}
}

// sorted has those first for whom most pods wait.
func (w waits) sorted() []waiting {
	out := []waiting{}
	for _, one := range w {
		out = append(out, *one)
	}
	name := func(w *waiting) string {
		if w.Queue == nil {
			return ""
		}
		return w.Queue.Name
	}
	slices.SortFunc(out, func(a, b waiting) int {
		return cmp.Or(cmp.Compare(b.Pods, a.Pods), cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(name(&a), name(&b)))
	})
	return out
}

// mostDevices bounds what one pod counts for: users write requests of any size.
const mostDevices = 1 << 20

// devicesOf is the number of a request, as 1 in "nvidia.com/mig-3g.40gb 1"; 0 for claims, which do not say it.
func devicesOf(request string) int {
	n, err := resource.ParseQuantity(request[strings.LastIndex(request, " ")+1:])
	if err != nil || strings.Contains(request, " claim ") {
		return 0
	}
	return int(min(max(n.Value(), 0), mostDevices))
}

// demand reads pending pods and the queues of Kueue: in all namespaces, or in the one that -n names. Where the user may not list all, it reads those of the user's own.
func (a *advice) demand(ctx context.Context, client kube.Interface) (*demanded, error) {
	var out demanded
	namespace := a.only
	pods, err := waitingPods(ctx, client, namespace)
	if apierrors.IsForbidden(err) && namespace == "" {
		namespace = a.namespace
		out.note("of namespace %s alone: listing pods of all namespaces needs rights that you lack", namespace)
		pods, err = waitingPods(ctx, client, namespace)
	}
	if err != nil {
		return nil, fmt.Errorf("listing pods: %w", err)
	}
	k := readKueue(ctx, client, namespace)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	all, otherDevices := waits{}, false
	for i := range pods {
		if !isPending(&pods[i]) {
			continue
		}
		for _, r := range judge.Asked(&pods[i]) {
			if name := resourceOf(r); name != "" {
				all.add(waitFor{name, pods[i].Namespace, k.queueOf(&pods[i])}, 1, devicesOf(r), pods[i].CreationTimestamp.Time)
				k.has(&pods[i], name, devicesOf(r))
			}
			otherDevices = otherDevices || r == judge.PerhapsNone
		}
	}
	if otherDevices {
		out.note("pods that ask by claims, or by a DeviceClass of another driver than NVIDIA's, may wait for other devices than GPUs: kubectl gpuslice advise POD reads the claims")
	}
	k.count(all)
	out.Waiting, out.columns = all.sorted(), k.columns()
	for _, note := range k.notes {
		out.note("%s", note)
	}
	if len(out.Waiting) == 0 {
		out.none = "no pod that requests a GPU is pending"
		if k.workloads != nil {
			out.none += ", and no workload of Kueue"
		}
		if namespace != "" {
			out.none += " in namespace " + sanitize.Cut(namespace, longestPod)
		}
	}
	return &out, nil
}

// waitingPods lists the pods without a node from the API server's cache.
func waitingPods(ctx context.Context, client kube.Interface, namespace string) ([]corev1.Pod, error) {
	list, err := client.Pods(namespace).List(ctx, metav1.ListOptions{ResourceVersion: "0", FieldSelector: "spec.nodeName=,status.phase=" + string(corev1.PodPending)})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

func (out *demanded) note(format string, args ...any) {
	out.Notes = append(out.Notes, sanitize.Message(fmt.Sprintf(format, args...), sanitize.Longest))
}

var waitingColumns = []column[waiting]{
	{name: "waited for", of: func(w *waiting, _ output.Paper) string { return w.Resource }},
	{name: "namespace", folds: true, of: func(w *waiting, _ output.Paper) string { return w.Namespace }},
	{name: "pods", folds: true, of: func(w *waiting, _ output.Paper) string { return fmt.Sprint(w.Pods) }},
	{name: "devices", folds: true, of: func(w *waiting, _ output.Paper) string {
		if w.Devices == 0 {
			return ""
		}
		return fmt.Sprint(w.Devices)
	}},
	{name: "oldest", folds: true, of: func(w *waiting, p output.Paper) string { return age(w.Oldest, p.Now) }},
}

// queueColumns are those with Kueue's workloads.
var queueColumns = []column[waiting]{
	{name: "queue", folds: true, of: ofQueue(func(q *queue) string { return q.Name })},
	{name: "workloads", folds: true, of: ofQueue(func(q *queue) string { return fmt.Sprintf("%d pending, %d admitted", q.Pending, q.Admitted) })},
}

// quotaColumn is there where the user may read ClusterQueues.
var quotaColumn = column[waiting]{name: "quota", folds: true, of: ofQueue(func(q *queue) string {
	switch {
	case q.Quota == nil:
		return ""
	case q.Quota.Full:
		return fmt.Sprintf("full, %d of %d", q.Quota.Reserved, q.Quota.Nominal)
	default:
		return fmt.Sprintf("%d of %d", q.Quota.Reserved, q.Quota.Nominal)
	}
})}

// ofQueue is a cell that is empty for pods without a queue.
func ofQueue(of func(q *queue) string) func(w *waiting, _ output.Paper) string {
	return func(w *waiting, _ output.Paper) string {
		if w.Queue == nil {
			return ""
		}
		return of(w.Queue)
	}
}

// text returns it in the format of the flag.
func (out *demanded) text(format string, p output.Paper) (string, error) {
	switch format {
	case output.JSON, output.YAML:
		return output.ForPrograms(format, out)
	case output.HTML:
		said := output.Element("p", "", output.Say(out.none))
		if out.none == "" {
			said = grid(out.Waiting, out.columns, mostRows, p.Sheet())
		}
		return output.Page("Who waits for what", p.Sheet(), said, output.Noted(out.Notes)), nil
	}
	p.Whole, p.Width = p.Width == 0, cmp.Or(p.Width, output.PaperWidth)
	lines := p.Block("", out.none)
	if out.none == "" {
		lines = []string{tabulate(out.Waiting[:min(len(out.Waiting), mostRows)], out.columns, false, p)}
	}
	if more := len(out.Waiting) - mostRows; more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more: -o %s has them all", more, output.JSON))
	}
	for i, note := range out.Notes {
		if i == 0 {
			lines = append(lines, "")
		}
		lines = append(lines, p.Block("note: ", note)...)
	}
	return strings.Join(lines, "\n") + "\n", nil
}

// verdict is always nil: who waits is no failure of the command.
func (out *demanded) verdict() error { return nil }
