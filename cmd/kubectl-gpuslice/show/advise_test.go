package show

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
	"unicode"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/jedib0t/go-pretty/v6/text"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/agenttest"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// h100 is what an agent reports of the model.
var h100 = api.Model{Name: "NVIDIA H100 80GB HBM3", Profiles: []api.Profile{
	{Name: "1g.10gb", Slices: 1, Size: 1, At: []int{0, 1, 2, 3, 4, 5, 6}, Max: 7},
	{Name: "2g.20gb", Slices: 2, Size: 2, At: []int{0, 2, 4}, Max: 3},
	{Name: "3g.40gb", Slices: 3, Size: 4, At: []int{0, 4}, Max: 2},
	{Name: "7g.80gb", Slices: 7, Size: 8, At: []int{0}, Max: 1},
}}

// adviser is a world with a pool whose pods wait.
type adviser struct{ *world }

// pool makes a node with GPUs that are each cut and held as the text says: "off", "1g.10gb@0:team/a 3g.40gb@4". The pods that it names run there.
func (w adviser) pool(name string, gpus ...string) {
	w.T.Helper()
	s := api.Status{Phase: api.PhaseIdle, Reason: config.ReasonNotRequested, Models: []api.Model{h100}, Held: []api.Held{}}
	offers := corev1.ResourceList{corev1.ResourcePods: resource.MustParse("110"), corev1.ResourceCPU: resource.MustParse("64")}
	offer := func(of, on, pod string) {
		n := offers[corev1.ResourceName(of)]
		n.Add(resource.MustParse("1"))
		offers[corev1.ResourceName(of)] = n
		if pod != "" {
			s.Held = append(s.Held, api.Held{Pod: types.UID(pod), On: []string{on}})
			w.pod(pod, of, func(p *corev1.Pod) {
				p.Spec.NodeName, p.Status.Phase = name, corev1.PodRunning
				p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "set", Controller: new(true)}}
			})
		}
	}
	for index, gpu := range gpus {
		g := api.StatusGPU{Index: index, UUID: "GPU-x", Slices: 8}
		s.Models[0].GPUs = append(s.Models[0].GPUs, index)
		if mode, pod, _ := strings.Cut(gpu, ":"); mode == "off" {
			offer("nvidia.com/gpu", fmt.Sprint(index), pod)
		} else {
			g.MIG = true
			for word := range strings.FieldsSeq(gpu) {
				place, pod, _ := strings.Cut(word, ":")
				profile, start, _ := strings.Cut(place, "@")
				i := api.StatusInstance{Is: place, At: int(start[0] - '0')}
				for _, p := range h100.Profiles {
					if p.Name == profile {
						i.Size = p.Size
					}
				}
				g.Instances = append(g.Instances, i)
				g.Geometry = strings.TrimSpace(g.Geometry + " " + place)
				offer("nvidia.com/mig-"+profile, fmt.Sprintf("%d/%s", index, start), pod)
			}
		}
		s.GPUs = append(s.GPUs, g)
	}
	n := agenttest.GPUNode(name)
	agenttest.Says(n, s, "no config is asked for")
	n.Status.Allocatable = offers
	n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue})
	w.Create(n)
}

// pod makes a pod that requests one of the resource, and waits for a node.
func (w adviser) pod(name, asks string, change ...func(p *corev1.Pod)) {
	w.T.Helper()
	namespace, short, _ := strings.Cut(name, "/")
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: short, UID: types.UID(name), Labels: map[string]string{"app": short}, CreationTimestamp: metav1.NewTime(time.Now().Add(-3 * time.Minute))},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceName(asks): resource.MustParse("1")}},
		}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/2 nodes are available: 2 Insufficient " + asks + ".",
		}}},
	}
	for _, c := range change {
		c(p)
	}
	if _, err := w.Client.CoreV1().Pods(namespace).Create(w.T.Context(), p, metav1.CreateOptions{}); err != nil {
		w.T.Fatal(err)
	}
}

// inPool runs a test of advise. The command may write nothing.
func inPool(t *testing.T, test func(w adviser)) {
	t.Helper()
	inWorld(t, func(w *world) { test(adviser{w}) })
}

// advises runs the command, and fails the test if that writes.
func (w adviser) advises(args ...string) (said string, code int) {
	w.T.Helper()
	w.Client.ClearActions()
	said, code = w.Run(append([]string{"advise"}, args...)...)
	for _, a := range w.Client.Actions() {
		if verb := a.GetVerb(); verb != "get" && verb != "list" {
			w.T.Errorf("advise %q: %s of %s", args, verb, a.GetResource().Resource)
		}
	}
	return said, code
}

// onePool is the begin of a maintenance file with a pool of all nodes.
const onePool = "apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\npools: [{name: all, selector: \"!outside\", "

// noEvictions is a maintenance file that lets no change evict pods outside of pools.
const noEvictions = "apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nmaxUnavailable: 0\n"

// pauses makes the Lease of a pool that is paused.
func (w adviser) pauses(pool, why string) {
	w.T.Helper()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Namespace: cluster.AgentNamespace, Name: config.LeasePrefix + pool, Annotations: map[string]string{config.AnnotationPaused: why},
	}}
	if _, err := w.Client.CoordinationV1().Leases(lease.Namespace).Create(w.T.Context(), lease, metav1.CreateOptions{}); err != nil {
		w.T.Fatal(err)
	}
}

const mig3 = "nvidia.com/mig-3g.40gb"

// screen is a pool whose pods wait, and the agents' maintenance file.
func (w adviser) screen() {
	w.pool("gpu-1", "3g.40gb@0:team-a/train-7 2g.20gb@4:team-b/serve-0 1g.10gb@6:team-b/notebook-1")
	w.pool("gpu-2", "off:team-a/whole-0", "1g.10gb@0:team-a/small-0 1g.10gb@1 1g.10gb@4")
	w.pool("gpu-3", "off")
	w.Edit("gpu-2", func(n *corev1.Node) {
		n.Labels[config.LabelProfile] = "research"
		s := cluster.ReportOf(n).Status
		s.Label, s.Desired = config.LabelProfile, "research"
		agenttest.States(n, s)
	})
	w.Edit("gpu-3", func(n *corev1.Node) { n.Labels["night"] = "true" })
	w.maintenance(`
apiVersion: gpuslice.io/v1alpha1
kind: Maintenance
pools:
- {name: night, selector: night=true, windows: [{days: [Mon], start: "22:00", duration: 4h}]}
`)
	w.budget("team-a", 0)
	w.pod("team-a/trainer-0", mig3)
	w.pod("team-a/trainer-1", mig3, func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(time.Now().Add(-2 * time.Minute)) })
	w.pod("team-b/gated-0", mig3, func(p *corev1.Pod) {
		p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
		p.Status.Conditions[0].Reason, p.Status.Conditions[0].Message = "SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates"
	})
}

// maintenance writes the agents' file.
func (w adviser) maintenance(file string) {
	w.T.Helper()
	m := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "gpuslice", Name: config.DefaultMaintenance}, Data: map[string]string{config.DefaultMaintenanceKey: file},
	}
	if _, err := w.Client.CoreV1().ConfigMaps("gpuslice").Create(w.T.Context(), m, metav1.CreateOptions{}); err != nil {
		w.T.Fatal(err)
	}
}

// budget lets so many pods of the namespace go.
func (w adviser) budget(namespace string, allowed int32) {
	w.T.Helper()
	b := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "all"}, Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{}},
		Status: policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: allowed, DesiredHealthy: 3, CurrentHealthy: 3},
	}
	if _, err := w.Client.PolicyV1().PodDisruptionBudgets(namespace).Create(w.T.Context(), b, metav1.CreateOptions{}); err != nil {
		w.T.Fatal(err)
	}
}

// ready makes a running pod one that its budgets count.
func (w adviser) ready(name string) {
	w.T.Helper()
	namespace, short, _ := strings.Cut(name, "/")
	w.editPod(namespace, short, func(p *corev1.Pod) {
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue})
	})
}

// editPod changes a pod.
func (w adviser) editPod(namespace, name string, change func(p *corev1.Pod)) {
	w.T.Helper()
	p, err := w.Client.CoreV1().Pods(namespace).Get(w.T.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.T.Fatal(err)
	}
	change(p)
	if _, err := w.Client.CoreV1().Pods(namespace).Update(w.T.Context(), p, metav1.UpdateOptions{}); err != nil {
		w.T.Fatal(err)
	}
}

// more makes pods beside those of the screen, so that a table shows them.
func (w adviser) more() {
	w.pod("team-b/huge-with-a-name-that-is-so-long-that-no-line-of-eighty-columns-has-room-for-it-all", "nvidia.com/mig-4g.71gb")
	for i := range 3 {
		w.pod(fmt.Sprintf("team-c/notebook-%d", i), "nvidia.com/mig-1g.10gb")
	}
}

// read is what the command finds.
func (w adviser) read(a *advice) *advised {
	w.T.Helper()
	a.now, a.namespace, a.agents = time.Now(), "default", config.Default().Beside(cluster.AgentNamespace)
	out, err := a.read(w.T.Context(), clientset.Of(w.Client))
	if err != nil {
		w.T.Fatal(err)
	}
	return out
}

// ofNodes is what the command finds of nodes.
func (w adviser) ofNodes(a *advice) *fragmented {
	w.T.Helper()
	a.now = time.Now()
	out, err := a.fragments(w.T.Context(), clientset.Of(w.Client))
	if err != nil {
		w.T.Fatal(err)
	}
	return out
}

func TestScreensOfAdvice(t *testing.T) {
	text.EnableColors()
	t.Cleanup(text.DisableColors)
	inPool(t, func(w adviser) {
		w.screen()
		few := w.read(&advice{})
		w.more()
		many := w.read(&advice{whatIf: map[string]int{"3g.40gb": 2}, pending: true})
		explained, together := w.ofNodes(&advice{explain: true, names: []string{"gpu-2", "gpu-1"}}), w.ofNodes(&advice{defrag: true})
		for _, width := range []int{160, 80} {
			for name, out := range map[string]answer{"advise": few, "advise-many": many, "advise-explain": explained, "advise-defrag": together} {
				plain, err := out.text("", output.Paper{Width: width, Now: time.Now()})
				if err != nil {
					t.Fatal(err)
				}
				golden(t, fmt.Sprintf("testdata/%s-%d.txt", name, width), plain)
				for line := range strings.SplitSeq(plain, "\n") {
					if n := text.StringWidthWithoutEscSequences(line); n > width && !strings.Contains(line, "$ kubectl") {
						t.Errorf("%s: %d columns: %s", name, n, line)
					}
				}
				if coloured, err := out.text("", output.Paper{Width: width, Colour: true, Now: time.Now()}); err != nil || coloured == plain || text.StripEscape(coloured) != plain {
					t.Errorf("%s: colours say something that the words do not, or there are none: %v\n%s", name, err, coloured)
				}
			}
		}
		for _, format := range []string{output.JSON, output.YAML} {
			said, err := many.text(format, output.Paper{})
			if err != nil {
				t.Fatal(err)
			}
			golden(t, "testdata/advise."+format, said)
			if said, err = explained.text(format, output.Paper{}); err != nil {
				t.Fatal(err)
			}
			golden(t, "testdata/advise-explain."+format, said)
		}
	})
}

// The page of the command shows what the command says.
func TestTheExampleOfThePageIsWhatAdviseSays(t *testing.T) {
	page, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	inPool(t, func(w adviser) {
		w.screen()
		for _, args := range []string{"team-a/trainer-0", "--explain gpu-2"} {
			said, _ := w.advises(strings.Fields(args)...)
			if example := "$ kubectl gpuslice advise " + args + "\n" + said; !strings.Contains(string(page), example) {
				t.Errorf("the page lacks:\n%s", example)
			}
		}
	})
}

func TestAdvice(t *testing.T) {
	forbidden := func(verb, resource string) func(w adviser) {
		return func(w adviser) {
			w.Client.PrependReactor(verb, resource, func(a k8stesting.Action) (bool, runtime.Object, error) {
				if resource == "pods" && a.GetNamespace() != "" {
					return false, nil, nil
				}
				return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("no"))
			})
		}
	}
	then := func(all ...func(w adviser)) func(w adviser) {
		return func(w adviser) {
			for _, f := range all {
				f(w)
			}
		}
	}
	idle := func(w adviser) { w.pool("gpu-1", "1g.10gb@0 1g.10gb@4") }
	edit := func(change func(n *corev1.Node)) func(w adviser) { return func(w adviser) { w.Edit("gpu-1", change) } }
	waits := func(w adviser) { w.pod("team/a", mig3) }
	gate := func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/wait"}} }
	silent := func(w adviser) {
		w.Edit("gpu-1", func(n *corev1.Node) {
			n.Status.Conditions[0].LastHeartbeatTime = metav1.NewTime(time.Now().Add(-time.Hour))
		})
	}
	taint := func(key string) func(w adviser) {
		return edit(func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: key, Effect: corev1.TaintEffectNoSchedule}} })
	}
	older := func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(time.Now().Add(-time.Hour)) }
	labelled := func(key, value string, phase api.Phase, reason config.Reason) func(w adviser) {
		return edit(func(n *corev1.Node) {
			n.Labels[key] = value
			s := cluster.ReportOf(n).Status
			s.Label, s.Desired, s.Phase, s.Reason = key, value, phase, reason
			agenttest.States(n, s)
			n.Status.Conditions[0].Reason = string(reason)
		})
	}
	// fills is a pool that one unavailable node fills.
	fills := func(change func(n *corev1.Node)) func(w adviser) {
		return func(w adviser) {
			w.pool("gpu-9", "off:team/other")
			w.Edit("gpu-9", change)
			w.maintenance(onePool + "maxUnavailable: 1}]\n")
		}
	}
	four := func(w adviser) {
		for _, name := range []string{"team/a", "team/b", "team/c", "team/d"} {
			w.pod(name, mig3)
		}
	}
	cut := "$ kubectl gpuslice apply gpu-1 --mig-config gpu0_3g.40gb_1g.10gb\n"
	for name, row := range map[string]struct {
		build func(w adviser)
		args  string
		code  int
		says  []string
		not   string
	}{
		"nothing waits":         {build: idle, says: []string{"no pod that requests a GPU is pending\n"}},
		"nothing waits there":   {build: then(idle, waits), args: "-n other", says: []string{"no pod that requests a GPU is pending in namespace other\n"}},
		"a change":              {build: then(idle, waits), says: []string{"team/a  NeedsRecut\n", cut, "the scheduler says: 0/2 nodes are available"}},
		"by its name":           {build: then(idle, waits), args: "pod/a -n team", says: []string{cut}},
		"by all of its name":    {build: then(idle, waits), args: "team/a", says: []string{cut}},
		"by its label":          {build: then(idle, waits, func(w adviser) { w.pod("team/b", mig3) }), args: "-l app=a", says: []string{"team/a"}, not: "team/b"},
		"by no label":           {build: then(idle, waits), args: "-l app=b", says: []string{"no pod"}, not: "team/a"},
		"no such pod":           {build: idle, args: "team/a", code: 1, says: []string{"there is no pod team/a"}},
		"pods and who waits":    {build: idle, args: "team/a --demand", code: 1, says: []string{"--demand counts all that wait"}},
		"two ways":              {build: idle, args: "team/a --pending", code: 1, says: []string{"only one of these"}},
		"a wrong format":        {build: idle, args: "-o wide", code: 1, says: []string{"json, yaml or html"}},
		"a wrong selector":      {build: idle, args: "-l a==b==c", code: 1, says: []string{"reading the selector"}},
		"what if nothing":       {build: idle, args: "--what-if 3g.40gb=0", code: 1, says: []string{"from 1 to 1000"}},
		"what if no profile":    {build: idle, args: "--what-if cpu=1", code: 1, says: []string{"neither a profile"}},
		"what if too many":      {build: idle, args: "--what-if 3g.40gb=600,gpu=600", code: 1, says: []string{"it may have 1000"}},
		"what if":               {build: then(idle, waits), args: "--what-if 3g.40gb=1", says: []string{"what-if/3g.40gb-1  NeedsRecut", "gpu0_2x3g.40gb", "note: the command also serves 1 pod before it, not shown here\n"}},
		"what if, and the rest": {build: then(idle, waits), args: "--pending --what-if 3g.40gb=1", says: []string{"team/a", "gpu0_2x3g.40gb"}},
		"what if, after pods of the least priority": {
			build: func(w adviser) {
				w.pool("gpu-1", "3g.40gb@0")
				w.pod("team/a", mig3, func(p *corev1.Pod) { p.Spec.Priority = new(int32(-1000)) })
			},
			args: "--pending --what-if 3g.40gb=1", says: []string{"team/a  WillFit\n"},
		},
		"what if, after pods that are not shown": {
			build: func(w adviser) {
				w.pool("gpu-1", "1g.10gb@0:team/x 2g.20gb@2:team/y")
				w.pod("team/first", mig3, older)
			},
			args: "--what-if 3g.40gb=1", says: []string{"what-if/3g.40gb-1  NeedsDrain", "has to leave: team/x, team/y"},
		},
		"what if behind a taint of Kubernetes": {
			build: then(idle, taint("node-role.kubernetes.io/control-plane")), args: "--what-if gpu=1", code: 4, says: []string{"NotGPU", "taint node-role.kubernetes.io"},
		},
		"by its name, after a pod of another name": {
			build: func(w adviser) {
				w.pool("gpu-1", "1g.10gb@0:team/x 2g.20gb@2:team/y")
				w.pod("team/first", mig3, older)
				w.pod("team/second", mig3)
			},
			args: "team/second", says: []string{"team/second  NeedsDrain", "has to leave: team/x, team/y"}, not: "team/first  NeedsRecut",
		},
		"of a namespace, after a pod of another": {
			build: func(w adviser) {
				w.pool("gpu-1", "1g.10gb@0:team/x 3g.40gb@4:team/z", "2g.20gb@0:team/y 3g.40gb@4:team/w")
				w.pod("other/first", mig3, older)
				w.pod("team/second", mig3)
			},
			args: "-n team", says: []string{"has to leave: team/y", "note: the command also serves 1 pod before it, not shown here; pods that would have to leave for that: team/x"},
		},
		"four of a namespace, after a pod of another": {
			build: then(func(w adviser) {
				w.pool("gpu-1", "off", "off", "1g.10gb@0:team/x 2g.20gb@2:team/y 3g.40gb@4:team/z")
				w.pod("other/first", mig3, older)
			}, four),
			args: "-n team", says: []string{"gpu-1: serves 4 pods, and 1 not shown here; "}, not: "other/first",
		},
		"what if behind a taint": {
			build: then(idle, taint("nvidia.com/gpu")), args: "--what-if gpu=1", says: []string{"what-if/gpu-1  NeedsRecut", "gpu0_off"},
		},
		"what if behind a taint of the agents": {
			build: then(idle, taint("gpuslice.io/not-ready")), args: "--what-if gpu=1", code: 4, says: []string{"what-if/gpu-1  NotGPU", "taint gpuslice.io/not-ready"},
		},
		"it runs": {
			build: func(w adviser) { w.pool("gpu-1", "3g.40gb@0:team/a") }, args: "team/a", says: []string{"note: team/a is not pending: it is on node gpu-1\n"},
		},
		"it goes": {
			build: then(idle, func(w adviser) {
				w.pod("team/a", mig3, func(p *corev1.Pod) { p.DeletionTimestamp, p.Finalizers = new(metav1.Now()), []string{"a/b"} })
			}), args: "team/a", says: []string{"note: team/a is not pending: it is being deleted\n"},
		},
		"it requests no GPU": {
			build: then(idle, func(w adviser) { w.pod("team/a", "cpu") }), args: "team/a", code: 4, says: []string{"NotGPU", "it requests no GPU"},
		},
		"others request no GPU": {
			build: then(idle, waits, func(w adviser) { w.pod("team/b", "cpu") }), says: []string{cut, "1 more pending pod without a request for GPUs"}, not: "NotGPU",
		},
		"too large": {build: then(idle, func(w adviser) { w.pod("team/a", "nvidia.com/mig-4g.71gb") }), code: 4, says: []string{"TooLarge", "no change that may begin lets 1 pod run"}},
		"none is worse than not known": {
			build: then(idle, silent, waits, func(w adviser) { w.pod("team/b", mig3, gate) }), code: 4, says: []string{"NotKnown", "Gated"},
		},
		"one has to end": {build: then(func(w adviser) { w.pool("gpu-1", "3g.40gb@0:team/x 3g.40gb@4:team/y") }, waits), code: 4, says: []string{"NeedsDrain", "one has to end"}},
		"fragments, where an agent is silent": {
			build: then(idle, silent, func(w adviser) { w.pool("gpu-2", "7g.80gb@0:team/x") }), args: "--defrag", says: []string{"note: the agent of gpu-1 has said nothing for 60m"},
		},
		"fragments, where no agent has reported GPUs": {
			build: then(idle, edit(func(n *corev1.Node) { delete(n.Annotations, config.AnnotationStatus) }), func(w adviser) { w.pool("gpu-2", "7g.80gb@0:team/x") }),
			args:  "--defrag", says: []string{"note: nothing is known of these nodes: gpu-1 ("},
		},
		"a node beside a silent agent": {
			build: then(idle, silent, func(w adviser) { w.pool("gpu-2", "7g.80gb@0:team/x") }), args: "--explain gpu-2", says: []string{"8 free"}, not: "gpu-1",
		},
		"who waits for what, by claims": {
			build: then(func(w adviser) {
				w.pool("gpu-1", "off")
				w.pod("team/a", mig3, agenttest.ByClaim["a claim of the spec"])
			}),
			args: "-o json", code: 5, says: []string{`"resource": "by claim"`}, not: `"perhaps of no"`,
		},
		"a change that is held up on another GPU": {
			build: then(func(w adviser) { w.pool("gpu-1", "1g.10gb@0", "3g.40gb@0:team/x 3g.40gb@4:team/y") }, waits,
				labelled(config.LabelMIGConfig, "gpu1_7g.80gb", api.PhaseWaiting, config.ReasonEvictionBlocked)),
			says: []string{"has not carried that out, for reason EvictionBlocked", "$ kubectl gpuslice apply gpu-1 --mig-config gpu0_"}, not: "gpu1_",
		},
		"a name that the agent has refused": {
			build: then(idle, waits, labelled(config.LabelMIGConfig, "gpu9_off", api.PhaseStalled, config.ReasonImpossibleGeometry)),
			says:  []string{"has not carried that out, for reason ImpossibleGeometry", cut}, not: "gpu9_off",
		},
		"a table, of a node with a profile": {
			build: then(func(w adviser) { w.pool("gpu-1", "off", "off") }, four, labelled(config.LabelProfile, "research", api.PhaseIdle, config.ReasonConverged)),
			says:  []string{"--profile gpu0.1_2x3g.40gb", "note: the command takes node gpu-1 out of profile research"},
		},
		"a table, where a budget keeps the pods": {
			build: then(func(w adviser) {
				w.pool("gpu-1", "3g.40gb@0:other/x 2g.20gb@4:team/y 1g.10gb@6:team/z")
				w.budget("team", 1)
				w.ready("team/y")
				w.ready("team/z")
			}, four), code: 4, not: "serves",
		},
		"a silent agent": {
			build: then(idle, silent, waits), code: 5, says: []string{"NotKnown", "the agent of gpu-1 has said nothing for 60m", "what 1 pod would need is not known"}, not: "$ kubectl gpuslice",
		},
		"an agent that sees no GPUs": {
			build: then(idle, waits, edit(func(n *corev1.Node) {
				n.Status.Conditions[0].Status, n.Status.Conditions[0].Reason, n.Status.Conditions[0].Message = corev1.ConditionUnknown, "DriverNotLoaded", "there is no driver"
			})), code: 5, says: []string{"NotKnown", "the agents of these nodes do not see the GPUs now: gpu-1; kubectl gpuslice status NODE says why"}, not: "$ kubectl",
		},
		"no right to list nodes": {
			build: then(idle, func(w adviser) { w.pod("default/a", mig3); w.pod("team/b", mig3) }, forbidden("list", "nodes")), code: 5,
			says: []string{"default/a  NotKnown\n", "team/b  NotKnown\n", "listing nodes needs rights that you lack", "the scheduler says: 0/2 nodes", mig3 + " 1, for 3m"},
			not:  "left out",
		},
		"no right to list nodes and all pods": {
			build: then(idle, func(w adviser) { w.pod("default/a", mig3); w.pod("team/b", mig3) }, forbidden("list", "nodes"), forbidden("list", "pods")), code: 5,
			says: []string{"default/a  NotKnown\n", "pods of other namespaces than default are left out: listing pods of all namespaces needs rights that you lack"}, not: "team/b",
		},
		"no right to list budgets": {
			build: then(idle, waits, forbidden("list", "poddisruptionbudgets")), code: 5,
			says: []string{"team/a  NotKnown\n", "listing poddisruptionbudgets needs rights that you lack"}, not: "no pod",
		},
		"no right to list all pods, and nothing waits there": {
			build: then(idle, waits, forbidden("list", "pods")),
			says: []string{
				"no pod that requests a GPU is pending in namespace default\n", "note: pods of other namespaces than default are left out: listing pods of all namespaces needs rights",
			}, not: "team/a",
		},
		"no right to list all pods": {
			build: then(idle, waits, forbidden("list", "pods")), args: "-n team", code: 5, says: []string{"team/a  NotKnown\n", "listing pods needs rights that you lack"},
		},
		"a claim, and no right to list nodes": {
			build: then(idle, func(w adviser) { w.pod("default/a", mig3, agenttest.ByClaim["a claim of the spec"]) }, forbidden("list", "nodes")),
			args:  "--pending", code: 5, says: []string{"NotKnown", "listing nodes needs rights that you lack"},
		},
		"gated, and no right to list nodes": {
			build: then(idle, func(w adviser) { w.pod("default/a", mig3, gate) }, forbidden("list", "nodes")), code: 4, says: []string{"Gated", "example.com/wait"},
		},
		"no right to read windows": {
			build: then(idle, waits, forbidden("get", "configmaps")), says: []string{cut, "when windows let changes begin is not known"},
		},
		"windows that cannot be read": {
			build: then(idle, waits, func(w adviser) { w.maintenance("kind: X") }), code: 4, says: []string{"NeedsWindow", cut, "no change begins before ConfigMap gpuslice/gpuslice-maintenance can be read"},
		},
		"a later window": {
			build: then(idle, waits, func(w adviser) {
				w.maintenance("apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nwindows: [{days: [Mon], start: \"22:00\", duration: 4h}]\n")
			}), says: []string{"NeedsWindow", "may begin at 2000-01-03 22:00:00Z, in 2d22h", cut},
		},
		"an open window": {
			build: then(idle, waits, func(w adviser) {
				w.maintenance("apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nwindows: [{days: [Fri], start: \"23:00\", duration: 75m}]\n")
			}), says: []string{"NeedsRecut", cut}, not: "may begin",
		},
		"a window that closes before a change ends": {
			build: then(idle, waits, func(w adviser) {
				w.maintenance("apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nwindows: [{days: [Fri], start: \"23:00\", duration: 70m}]\n")
			}), says: []string{"NeedsWindow", "may begin at 2000-01-07 23:00:00Z"},
		},
		"a node without GPUs is no node that could have them": {
			build: then(func(w adviser) {
				w.pool("gpu-1", "3g.40gb@0:team/x 3g.40gb@4:team/y")
				w.pool("cpu-1")
				w.Edit("cpu-1", func(n *corev1.Node) {
					delete(n.Annotations, config.AnnotationStatus)
					n.Status.Conditions = n.Status.Conditions[len(n.Status.Conditions)-1:]
				})
			}, waits), code: 4, says: []string{"NeedsDrain", "one has to end"},
		},
		"a node that is labelled as one with GPUs, without an agent": {
			build: then(func(w adviser) {
				w.pool("gpu-1", "3g.40gb@0:team/x 3g.40gb@4:team/y")
				w.pool("gpu-2")
				w.Edit("gpu-2", func(n *corev1.Node) {
					delete(n.Annotations, config.AnnotationStatus)
					n.Status.Conditions = n.Status.Conditions[len(n.Status.Conditions)-1:]
					n.Labels["feature.node.kubernetes.io/pci-10de.present"] = "true"
				})
			}, waits), code: 5, says: []string{"NotKnown"},
		},
		"a resource that only a DeviceClass names": {
			build: func(w adviser) {
				w.pool("gpu-1", "off")
				class := &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu.nvidia.com"}, Spec: resourcev1.DeviceClassSpec{ExtendedResourceName: new("example.com/a100")}}
				if _, err := w.Client.ResourceV1().DeviceClasses().Create(w.T.Context(), class, metav1.CreateOptions{}); err != nil {
					w.T.Fatal(err)
				}
				w.pod("team/a", "example.com/a100")
			}, args: "team/a", code: 4, says: []string{"requests: example.com/a100 1"}, not: "it requests no GPU",
		},
		"a pool that is full": {
			build: then(idle, waits, func(w adviser) {
				w.pool("gpu-9", "off:team/other")
				w.Edit("gpu-9", func(n *corev1.Node) { n.Spec.Unschedulable = true })
				w.maintenance(onePool + "maxUnavailable: 1}]\n")
			}), code: 4, says: []string{"NeedsWindow", "pool all lets 1 node be unavailable at once, and no further change begins before one is back: gpu-9: cordoned"},
		},
		"a pool that a node fills by the agent's taint alone": {
			build: then(idle, waits, fills(func(n *corev1.Node) {
				n.Spec.Taints = []corev1.Taint{{Key: config.TaintRepartitioning, Effect: corev1.TaintEffectNoSchedule}}
			})), code: 4, says: []string{"NeedsWindow", "gpu-9: being changed by gpuslice"},
		},
		"a pool that a node fills with the condition alone": {
			build: then(idle, waits, fills(func(n *corev1.Node) {
				n.Spec.Unschedulable, n.Status.Allocatable = true, nil
				delete(n.Annotations, config.AnnotationStatus)
			})), code: 4, says: []string{"NeedsWindow", "gpu-9: cordoned"},
		},
		"a pool that a node fills with the capacity alone": {
			build: then(idle, waits, fills(func(n *corev1.Node) {
				n.Spec.Unschedulable, n.Status.Capacity, n.Status.Allocatable, n.Status.Conditions = true, n.Status.Allocatable, nil, nil
				delete(n.Annotations, config.AnnotationStatus)
			})), code: 4, says: []string{"NeedsWindow", "gpu-9: cordoned"},
		},
		"a pool that is full, and a node outside of it": {
			build: then(idle, waits, fills(func(n *corev1.Node) { n.Spec.Unschedulable = true }), func(w adviser) {
				w.pool("gpu-3", "off")
				w.Edit("gpu-3", func(n *corev1.Node) { n.Labels["outside"] = "true" })
			}), says: []string{"NeedsRecut", "$ kubectl gpuslice apply gpu-3 "}, not: "gpu-1",
		},
		"a node on hold, and another on which pods have to leave": {
			build: then(idle, waits, edit(func(n *corev1.Node) { n.Annotations[config.AnnotationHold] = "audit" }), func(w adviser) {
				w.pool("gpu-3", "1g.10gb@0:team/x 1g.10gb@4:team/y")
			}), says: []string{"NeedsDrain", "$ kubectl gpuslice apply gpu-3 "}, not: "on hold",
		},
		"a pool with room": {
			build: then(idle, waits, func(w adviser) {
				w.pool("gpu-9", "off:team/other")
				w.Edit("gpu-9", func(n *corev1.Node) { n.Spec.Unschedulable = true })
				w.maintenance(onePool + "maxUnavailable: 2}]\n")
			}), says: []string{"NeedsRecut"},
		},
		"a pool without any room": {
			build: then(idle, waits, func(w adviser) { w.maintenance(onePool + "maxUnavailable: 0}]\n") }),
			code:  4, says: []string{"NeedsWindow", "no node of pool all may be unavailable: its maxUnavailable is 0"},
		},
		"no evictions outside of pools": {
			build: func(w adviser) {
				w.pool("gpu-1", "1g.10gb@0:team/x 3g.40gb@4:team/y")
				w.pod("team/a", mig3)
				w.maintenance(noEvictions)
			},
			code: 4, says: []string{"NeedsWindow", "no change outside of pools begins that evicts pods: maxUnavailable of ConfigMap gpuslice/gpuslice-maintenance is 0"},
		},
		"no evictions outside of pools, and none needed": {
			build: then(idle, waits, func(w adviser) { w.maintenance(noEvictions) }), says: []string{"NeedsRecut"},
		},
		"a pool that is paused": {
			build: then(idle, waits, func(w adviser) {
				w.maintenance(onePool + "}]\n")
				w.pauses("all", "3 nodes failed\nforged")
			}), code: 4, says: []string{
				"NeedsWindow", "pool all is paused, and no change begins before annotation gpuslice.io/paused of Lease gpuslice/gpuslice-pool-all is removed: 3 nodes failed",
			},
		},
		"no right to read the pool": {
			build: then(idle, waits, func(w adviser) { w.maintenance(onePool + "}]\n") }, forbidden("get", "leases")),
			says:  []string{"NeedsRecut", "whether pool all is paused is not known"},
		},
		"a later window, and a budget that lets no pod go": {
			build: func(w adviser) {
				w.pool("gpu-1", "1g.10gb@0:other/x 3g.40gb@4:other/z")
				w.budget("other", 0)
				w.ready("other/x")
				w.maintenance("apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nwindows: [{days: [Mon], start: \"22:00\", duration: 4h}]\n")
				w.pod("team/a", mig3)
			}, code: 5, says: []string{"NeedsWindow", "budget other/all lets none of 1 pod go now"},
		},
		"a budget whose pods may have no place": {
			build: func(w adviser) {
				w.pool("gpu-1", "1g.10gb@0:other/x 2g.20gb@2:other/y 3g.40gb@4:other/z")
				w.pool("gpu-2", "2g.20gb@0 1g.10gb@2 1g.10gb@3")
				w.Edit("gpu-2", func(n *corev1.Node) {
					n.Spec.Taints = []corev1.Taint{{Key: "dedicated", Effect: corev1.TaintEffectNoSchedule}}
				})
				w.budget("other", 1)
				for _, name := range []string{"x", "y"} {
					w.ready("other/" + name)
					w.editPod("other", name, func(p *corev1.Pod) {
						p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
						p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: corev1.DoNotSchedule}}
					})
				}
				w.pod("team/a", mig3)
			}, code: 5, says: []string{"NeedsDrain", "whether they would all leave is not known: pods with a budget may have no place: other/x (its topology spread is not checked)"},
		},
		"no window any more": {
			build: then(idle, waits, func(w adviser) {
				w.maintenance("apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nwindows: [{notBefore: \"1998-01-01T00:00:00Z\", notAfter: \"1999-01-01T00:00:00Z\"}]\n")
			}), code: 4, says: []string{"NeedsWindow", "no window of node gpu-1 opens again"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			inPool(t, func(w adviser) {
				row.build(w)
				said, code := w.advises(strings.Fields(row.args)...)
				flat := strings.Join(strings.Fields(said), " ")
				for _, says := range row.says {
					if !strings.Contains(said, says) && !strings.Contains(flat, says) {
						t.Errorf("%q is not said", says)
					}
				}
				if code != row.code || row.not != "" && strings.Contains(said, row.not) || t.Failed() {
					t.Errorf("exit code %d, want %d:\n%s", code, row.code, said)
				}
			})
		})
	}
}

// The cluster is read once, by few lists.
func TestAdviceReadsTheClusterOnce(t *testing.T) {
	inPool(t, func(w adviser) {
		w.screen()
		w.more()
		w.advises()
		want := map[string]int{"list nodes": 1, "list pods": 1, "list poddisruptionbudgets": 1, "list deviceclasses": 1, "get configmaps": 1, "get leases": 1}
		if diff := gocmp.Diff(want, w.Asked()); diff != "" {
			t.Errorf("-want +asked:\n%s", diff)
		}
		class := &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "mig"}, Spec: resourcev1.DeviceClassSpec{ExtendedResourceName: new(mig3)}}
		if _, err := w.Client.ResourceV1().DeviceClasses().Create(t.Context(), class, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, kind := range []string{"resourceslices", "resourceclaims", "devicetaintrules"} {
			want["list "+kind] = 1
		}
		w.advises("--what-if", "3g.40gb=1") // its resource is one of claims now
		if diff := gocmp.Diff(want, w.Asked()); diff != "" {
			t.Errorf("-want +asked:\n%s", diff)
		}
	})
}

func TestTheCommandOfAChange(t *testing.T) {
	three := map[int]nvml.Request{3: {MIG: true, Devices: map[string]int{"3g.40gb": 1, "1g.10gb+me": 1}}}
	long := map[int]nvml.Request{}
	for i := range 8 {
		long[i] = nvml.Request{MIG: true, Devices: map[string]int{"1g.10gb": i + 1}}
	}
	for name, row := range map[string]struct {
		node    string
		labels  map[string]string
		request map[int]nvml.Request
		command string
		note    string
	}{
		"no label":             {command: "--mig-config gpu3_3g.40gb_1g.10gb.me"},
		"a MIG config":         {labels: map[string]string{config.LabelMIGConfig: "all-1g.10gb"}, command: "--mig-config gpu3_3g.40gb_1g.10gb.me"},
		"a spelled MIG config": {labels: map[string]string{config.LabelMIGConfig: "gpu0_off-gpu3_7g.80gb"}, command: "--mig-config gpu0_off-gpu3_3g.40gb_1g.10gb.me"},
		"a profile": {
			labels: map[string]string{config.LabelProfile: "research", config.LabelMIGConfig: "gpu0_off"}, command: "--profile gpu3_3g.40gb_1g.10gb.me",
			note: "the command takes node gpu-1 out of profile research: the labels and taints of that go",
		},
		"a spelled profile":        {labels: map[string]string{config.LabelProfile: "gpu0_off"}, command: "--profile gpu0_off-gpu3_3g.40gb_1g.10gb.me"},
		"a wrong spelled config":   {labels: map[string]string{config.LabelMIGConfig: "gpu0_off-gpu0_off"}, command: "--mig-config gpu3_3g.40gb_1g.10gb.me"},
		"too much beside it":       {labels: map[string]string{config.LabelMIGConfig: "gpu0_2g.20gb_5x1g.10gb-gpu1_3g.40gb_4x1g.10gb-gpu2_7g.80gb"}, command: "--mig-config gpu3_3g.40gb_1g.10gb.me"},
		"more than a label can be": {request: long, note: noSpelling},
		"no name of a node":        {node: "a;b", note: noSpelling},
	} {
		t.Run(name, func(t *testing.T) {
			request := row.request
			if request == nil {
				request = three
			}
			node := cmp.Or(row.node, "gpu-1")
			m := adviceFor{Move: judge.Move{Node: node, Request: request}}
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node, Labels: row.labels, Annotations: map[string]string{}}}
			done := api.Status{Phase: api.PhaseIdle, Reason: config.ReasonConverged}
			if all := cluster.TargetsOf(n); len(all) > 0 {
				done.Label, done.Desired = all[0].Label, all[0].Name
			}
			m.command(agenttest.Says(n, done, ""))
			want := ""
			if row.command != "" {
				want = "kubectl gpuslice apply gpu-1 " + row.command
			}
			if note := strings.Join(m.Notes, "; "); m.Command != want || note != row.note || !strings.HasSuffix(want, m.Config) {
				t.Errorf("%s, config %s, want %s; note %s, want %s", m.Command, m.Config, want, note, row.note)
			}
		})
	}
}

// The last change that a label can spell counts for the proposal, before one whose pods would not all leave. Changes for pods that are not shown count.
func TestAProposalEndsWhereNoLabelCanSpellMore(t *testing.T) {
	was, one, two := []judge.Instance{{Is: "1g.10gb@0"}}, []judge.Instance{{Is: "1g.10gb@1"}}, []judge.Instance{{Is: "1g.10gb@2"}}
	move := func(command string, lost int, cuts []judge.Cut, leave ...string) adviceFor {
		return adviceFor{Move: judge.Move{Node: "gpu-1", Request: map[int]nvml.Request{0: {}}, Leave: leave, Lost: lost, Cuts: cuts}, Config: command, Command: command}
	}
	with := func(m adviceFor, change func(m *adviceFor)) adviceFor { change(&m); return m }
	hidden, stuck := func(m *adviceFor) { m.hidden = true }, func(m *adviceFor) { m.Stuck = true }
	first := with(move("one", 1, []judge.Cut{{GPU: 3, Before: was, After: one}}, "team/a"), func(m *adviceFor) { m.Begins = screenTime })
	second := move("two", 2, []judge.Cut{{GPU: 3, Before: one, After: two}, {GPU: 1, After: one}}, "team/a", "team/b")
	for name, row := range map[string]struct {
		moves []adviceFor
		want  []proposal
		stuck int
	}{
		"no spelling": {
			moves: []adviceFor{first, second, move("", 4, []judge.Cut{{GPU: 1, Before: one, After: was}, {GPU: 2}}, "team/c")},
			want: []proposal{{
				Node: "gpu-1", Config: "two", Command: "two", Pods: 2, Leave: 2, Lost: 3, Begins: screenTime,
				Cuts: []judge.Cut{{GPU: 3, Before: was, After: two}, {GPU: 1, After: one}},
			}},
		},
		"stuck": {
			moves: []adviceFor{first, with(second, stuck), move("three", 4, nil)}, stuck: 2,
			want: []proposal{{
				Node: "gpu-1", Config: "one", Command: "one", Pods: 1, Leave: 1, Lost: 1, Begins: screenTime,
				Cuts: []judge.Cut{{GPU: 3, Before: was, After: one}},
			}},
		},
		"not shown": {
			moves: []adviceFor{with(first, hidden), second, with(move("three", 4, nil, "team/c"), hidden)},
			want: []proposal{{
				Node: "gpu-1", Config: "two", Command: "two", Pods: 1, Others: 1, Leave: 2, Lost: 3, Begins: screenTime,
				Cuts: []judge.Cut{{GPU: 3, Before: was, After: two}, {GPU: 1, After: one}},
			}},
		},
		"stuck, and not shown": {moves: []adviceFor{with(first, func(m *adviceFor) { hidden(m); stuck(m) }), second}, stuck: 1},
		"all not shown":        {moves: []adviceFor{with(first, hidden), with(second, hidden)}},
	} {
		t.Run(name, func(t *testing.T) {
			out := advised{Moves: row.moves}
			out.sum()
			kept := 0
			for _, m := range out.Moves {
				if m.none() {
					kept++
				}
			}
			if diff := gocmp.Diff(row.want, out.Proposals); diff != "" || kept != row.stuck {
				t.Errorf("%d stuck, want %d; -want +got:\n%s", kept, row.stuck, diff)
			}
		})
	}
}

// All comes from the API server, which tenants and stolen nodes write.
func TestNamesInAdviceForgeNothing(t *testing.T) {
	const evil, word = "x\x1b[2J\nFAKE\u202e", "x\x1b[2J\u202e"
	inPool(t, func(w adviser) {
		w.pool("gpu-"+evil, "3g.40gb@0:team/a"+word+" 1g.10gb@4:team/b"+word)
		w.pool("cpu-"+evil, "1g.10gb@0:team/lost")
		w.pool("old-"+evil, "1g.10gb@0:team/old")
		w.Edit("old-"+evil, func(n *corev1.Node) {
			n.Status.Conditions[0].LastHeartbeatTime = metav1.NewTime(time.Now().Add(-time.Hour))
		})
		w.Edit("cpu-"+evil, func(n *corev1.Node) {
			n.Labels[config.LabelProfile] = evil
			n.Status.Conditions[0].Status, n.Status.Conditions[0].Reason, n.Status.Conditions[0].Message = corev1.ConditionUnknown, evil, evil+strings.Repeat(" $ kubectl evil", 1000)
		})
		w.Edit("gpu-"+evil, func(n *corev1.Node) {
			s := cluster.ReportOf(n).Status
			s.Models[0].Profiles[0].Name, s.GPUs[0].Instances[1].Is = evil, evil+"@4"
			agenttest.States(n, s)
		})
		w.budget("team", 0)
		for i, asks := range []string{mig3, "nvidia.com/mig-" + evil, mig3, mig3} {
			w.pod(fmt.Sprintf("team%s/%d%s", evil, i, evil), asks, func(p *corev1.Pod) {
				p.Status.Conditions[0].Message = strings.Repeat("$ kubectl evil ", 1000)
				p.Spec.SchedulerName = evil
			})
		}
		for _, args := range [][]string{{}, {"-o", "json"}, {"-o", "yaml"}, {"team" + evil + "/0" + evil}, {"-l", "app=0" + evil}, {"none" + evil}, {"--explain"}, {"--defrag"}, {"--explain", "-o", "json"}, {"--defrag", "-o", "yaml"}} {
			said, _ := w.advises(args...)
			said, _, _ = strings.Cut(said, "error: ") // main escapes errors
			for _, r := range said {
				if r != '\n' && !unicode.IsPrint(r) {
					t.Errorf("%q: %q in %s", args, r, said)
				}
			}
			forged := strings.Contains(said, "\n  $") && !strings.HasPrefix(strings.Join(args, " "), "-o") // YAML has all on lines of its own
			if forged || strings.Contains(said, "\nFAKE") || strings.Contains(said, "\n$") || len(said) > 20000 {
				t.Errorf("%q: a line is forged, or %d bytes:\n%s", args, len(said), said)
			}
		}
	})
}

// A pool of any size fits on a screen.
func TestListsOfAdviceAreBounded(t *testing.T) {
	out := &advised{}
	var leave []string
	for i := range 1000 {
		leave = append(leave, fmt.Sprintf("team/p%d", i))
		out.Moves = append(out.Moves, adviceFor{Move: judge.Move{Pod: fmt.Sprintf("team/p%d", i), Verdict: judge.WillFit}})
		out.Proposals, out.Waiting = append(out.Proposals, proposal{}), append(out.Waiting, waiting{})
	}
	said, err := out.text("", output.Paper{})
	if n := strings.Count(said, "\n"); err != nil || n > mostRows+3*mostSums+16 || strings.Count(said, "more: -o json has them all") != 3 {
		t.Errorf("%v: %d lines:\n%s", err, n, said)
	}
	out.Moves = []adviceFor{{Move: judge.Move{Pod: "team/p", Verdict: judge.NeedsDrain, Node: "gpu-1", Leave: leave}}}
	if said, err := out.text("", output.Paper{}); err != nil || !strings.Contains(said, "team/p9 and 990 more\n") {
		t.Errorf("%v:\n%s", err, said)
	}
}
