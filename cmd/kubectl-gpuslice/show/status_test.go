package show

import (
	"cmp"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/jedib0t/go-pretty/v6/text"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

func TestStatusShowsANodePerLine(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Edit("gpu-1", func(n *corev1.Node) {
			n.Labels[config.LabelProfile] = "research"
			s := agenttest.Done()
			s.Capacity = "nvidia.com/gpu 24 = 8 x 3 time-slicing"
			agenttest.Says(n, s, "research: as asked")
		})
		w.Edit("gpu-2", func(n *corev1.Node) {
			n.Labels[config.LabelMIGConfig], n.Labels[config.LabelDevicePluginConfig] = "all-1g.10gb", "slices"
			s := agenttest.Research(api.PhaseDraining, config.ReasonEvictionBlocked, 9, "team/a: PDB team/a", "team/b: PDB team/b", "team/c: PDB", "team/d: PDB")
			s.Desired, s.Label = "all-1g.10gb"+api.DesiredSeparator+"slices", config.LabelMIGConfig
			s.Next = time.Date(2000, 1, 1, 22, 0, 0, 0, time.UTC)
			agenttest.Says(n, s, "waiting")
			n.Annotations[config.AnnotationHold] = "audit " + strings.Repeat("x", 400)
		})
		<-time.After(3 * time.Minute)
		w.Start("status")
		w.Is(`
NODE    ASKED FOR              PHASE      REASON            SINCE   CAPACITY                                 BLOCKERS
gpu-1   research               Idle       Converged         3m      nvidia.com/gpu 24 = 8 x 3 time-slicing
gpu-2   all-1g.10gb + slices   Draining   EvictionBlocked   3m                                               held: audit `+strings.Repeat("x", 57)+`…; begins at 2000-01-01 22:00:00Z; team/a: PDB team/a; team/b: PDB team/b; and 2 others
`, 0)
		w.Start("status", "-l", "pool=none")
		w.Is(`
error: no node fits the selector "pool=none"; see the nodes' labels by: kubectl get nodes --show-labels
`, 1)
		w.Start("status", "cpu-1")
		w.Is(`
NODE    ASKED FOR   PHASE   REASON     SINCE   CAPACITY   BLOCKERS
cpu-1                       no agent
`, 0)
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"), agenttest.Bare("cpu-1"))
}

// Without the agent's word, the pod says which claims it has, and not of which driver.
func TestStatusNamesPodsThatAskByClaims(t *testing.T) {
	for _, c := range []struct {
		change func(p *corev1.Pod)
		want   string
	}{
		{agenttest.ByClaim["a claim of the spec"], "by claim gpu, perhaps of no GPU"},
		{func(p *corev1.Pod) {
			agenttest.ByClaim["a claim of the spec"](p)
			p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: new("p-gpu-x")}}
		}, "by claim p-gpu-x, perhaps of no GPU"},
		{func(p *corev1.Pod) {
			agenttest.ByClaim["a claim of the spec"](p)
			p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu"}} // it takes none
		}, ""},
		{func(p *corev1.Pod) {
			agenttest.ByClaim["a claim of the spec"](p)
			p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new("shared")}}
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
		}, "nvidia.com/gpu 1, by claim shared"},
		{agenttest.ByClaim["a claim by the scheduler"], "nvidia.com/mig-1g.10gb 1"},
		{func(p *corev1.Pod) {
			agenttest.ByClaim["a resource that a class names"](p)
			agenttest.ByClaim["a claim by the scheduler"](p)
		}, "by claim made, perhaps of no GPU"},
		{agenttest.ByClaim["a resource of a class's own name"], "deviceclass.resource.kubernetes.io/gpu.nvidia.com 1"},
		{func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"deviceclass.resource.kubernetes.io/net": resource.MustParse("2")}
		}, "deviceclass.resource.kubernetes.io/net 2, perhaps of no GPU"},
	} {
		inWorld(t, func(w *world) {
			w.AsksBy("p", c.change)
			w.Edit("gpu-1", func(n *corev1.Node) { agenttest.Says(n, agenttest.Done(), "as asked") })
			said, code := w.Run("status", "--ask=false", "gpu-1")
			_, pods, found := strings.Cut(said, "pods that request GPUs: ")
			pods, _, _ = strings.Cut(pods, "\n")
			want := ""
			if c.want != "" {
				want = "team/p (" + c.want + ")"
			}
			if code != 0 || found != (want != "") || pods != want {
				t.Errorf("exit code %d, want %q:\n%s", code, want, said)
			}
		}, agenttest.GPU("gpu-1"))
	}
}

// A table of what was so is no answer to what is asked now.
func TestStatusSaysWhereTheNodeHasNoAnswerToWhatIsAsked(t *testing.T) {
	asked := func(label, name string) func(n *corev1.Node) { return func(n *corev1.Node) { n.Labels[label] = name } }
	joined := api.Status{Desired: "all-1g.10gb" + api.DesiredSeparator + "slices", Label: config.LabelMIGConfig, Phase: api.PhaseIdle, Reason: config.ReasonConverged}
	byDefault := api.Status{Desired: "slices", Label: config.LabelDevicePluginConfig, Phase: api.PhaseIdle, Reason: config.ReasonConverged}
	alone := api.Status{Desired: "all-1g.10gb", Label: config.LabelMIGConfig, Phase: api.PhaseIdle, Reason: config.ReasonConverged}
	by := func(s api.Status, settings bool) api.Status { s.ByDefault = settings; return s }
	mig, shared := asked(config.LabelMIGConfig, "all-1g.10gb"), asked(config.LabelDevicePluginConfig, "slices")
	other, own := asked(config.LabelDevicePluginConfig, "other"), asked(config.LabelDevicePluginConfig, config.OwnPluginKey+"x")
	ours := agenttest.Done()
	ours.Desired = config.OwnPluginKey + "research"
	often := agenttest.Done()
	often.Heartbeat = api.Duration(time.Minute)
	odd := agenttest.Done()
	odd.Heartbeat = api.Duration(-time.Hour)
	for name, c := range map[string]struct {
		status api.Status
		labels []func(n *corev1.Node)
		after  time.Duration
		want   string // in the column of reasons
	}{
		"as asked":                                {agenttest.Done(), []func(*corev1.Node){asked(config.LabelProfile, "research")}, time.Minute, "Converged"},
		"asked for another one":                   {agenttest.Done(), []func(*corev1.Node){asked(config.LabelProfile, "training")}, time.Minute, "NotSeenYet"},
		"the same name by another label":          {agenttest.Done(), []func(*corev1.Node){asked(config.LabelMIGConfig, "research")}, time.Minute, "NotSeenYet"},
		"the label was removed":                   {agenttest.Done(), nil, time.Minute, "NotSeenYet"},
		"by two labels":                           {joined, []func(*corev1.Node){mig, shared}, time.Minute, "Converged"},
		"by one label and the settings":           {by(joined, true), []func(*corev1.Node){mig}, time.Minute, "Converged"},
		"the second label was changed":            {joined, []func(*corev1.Node){mig, other}, time.Minute, "NotSeenYet"},
		"a second label was added":                {alone, []func(*corev1.Node){mig, other}, time.Minute, "NotSeenYet"},
		"one was added beside the settings":       {by(joined, true), []func(*corev1.Node){mig, other}, time.Minute, "NotSeenYet"},
		"the second label was removed":            {by(joined, false), []func(*corev1.Node){mig}, time.Minute, "NotSeenYet"},
		"the second label was emptied":            {by(joined, false), []func(*corev1.Node){mig, asked(config.LabelDevicePluginConfig, "")}, time.Minute, "NotSeenYet"},
		"the first of two labels was removed":     {joined, []func(*corev1.Node){shared}, time.Minute, "NotSeenYet"},
		"a config of the plugin, its label gone":  {by(byDefault, false), nil, time.Minute, "NotSeenYet"},
		"a key of ours in place of a config":      {by(byDefault, false), []func(*corev1.Node){own}, time.Minute, "NotSeenYet"},
		"a profile over two labels":               {by(joined, false), []func(*corev1.Node){mig, shared, asked(config.LabelProfile, "research")}, time.Minute, "NotSeenYet"},
		"a profile named as a key of ours":        {ours, []func(*corev1.Node){asked(config.LabelProfile, config.OwnPluginKey+"research")}, time.Minute, "Converged"},
		"by the settings alone":                   {by(byDefault, true), nil, time.Minute, "Converged"},
		"by the settings, through a key of ours":  {by(byDefault, true), []func(*corev1.Node){own}, time.Minute, "Converged"},
		"after two heartbeats":                    {agenttest.Done(), []func(*corev1.Node){asked(config.LabelProfile, "research")}, 12 * time.Minute, "Converged"},
		"after three heartbeats":                  {agenttest.Done(), []func(*corev1.Node){asked(config.LabelProfile, "research")}, 15 * time.Minute, "AgentSilent (15m)"},
		"silent, and asked for another one":       {agenttest.Done(), []func(*corev1.Node){asked(config.LabelProfile, "training")}, 15 * time.Minute, "AgentSilent (15m)"},
		"after three of the settings' heartbeats": {often, []func(*corev1.Node){asked(config.LabelProfile, "research")}, 3 * time.Minute, "AgentSilent (3m)"},
		"a heartbeat that none has":               {odd, []func(*corev1.Node){asked(config.LabelProfile, "research")}, 12 * time.Minute, "Converged"},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.Edit("gpu-1", func(n *corev1.Node) {
					for _, label := range c.labels {
						label(n)
					}
					agenttest.Says(n, c.status, "as asked")
				})
				<-time.After(c.after)
				said, _ := w.Run("status")
				if !strings.Contains(said, " "+c.want) {
					t.Errorf("want %q:\n%s", c.want, said)
				}
				const who = "\nthe agent of gpu-1 has said nothing for "
				if silent := strings.HasPrefix(c.want, agentSilent); strings.Contains(said, who) != silent {
					t.Errorf("a line about the silent agent: %t, want %t:\n%s", !silent, silent, said)
				}
			}, agenttest.GPU("gpu-1"))
		})
	}
	inWorld(t, func(w *world) {
		<-time.After(time.Hour)
		said, _ := w.Run("status")
		if want := "\n2 agents, of gpu-1; gpu-2, have said nothing for 60m: kubectl get pods -A -l app.kubernetes.io/name=gpuslice -o wide\n"; !strings.HasSuffix(said, want) {
			t.Errorf("want %q:\n%s", want, said)
		}
		said, code := w.Run("status", "-o", "json")
		if code != 0 || strings.Count(said, `"silent": true`) != 2 {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
}

// An agent writes the condition before the status, and may die between the two. The condition stands alone only where the agent could not look.
func TestAConditionAheadOfItsStatusAnswersNoOtherRequest(t *testing.T) {
	for reason, want := range map[config.Reason]string{
		config.ReasonConverged:             "NotSeenYet",
		config.ReasonEvictionBlocked:       "NotSeenYet",
		config.ReasonDriverNotLoaded:       "DriverNotLoaded",
		config.ReasonRetrying:              "Retrying",
		config.ReasonJournalUnreadable:     "JournalUnreadable",
		config.ReasonHostRecordUnavailable: "HostRecordUnavailable",
	} {
		n := agenttest.GPUNode("gpu-1")
		n.Labels[config.LabelProfile] = "training"
		agenttest.Concludes(agenttest.States(n, agenttest.Research(api.PhaseDraining, config.ReasonFencing, 3)), agenttest.Research(api.PhaseIdle, reason, 0), "of research")
		if v := viewOf(n, time.Now()); reasonOf(v) != want {
			t.Errorf("%s ahead of the status: %s is said, want %s", reason, reasonOf(v), want)
		}
		n.Labels[config.LabelProfile] = "research"
		if v := viewOf(n, time.Now()); reasonOf(v) != string(reason) {
			t.Errorf("%s ahead of the status about the same: %s is said", reason, reasonOf(v))
		}
	}
}

// A pass that ends early leaves the status of an earlier one. Its phase beside the reason of the condition would say that the agent does nothing more,
// where it waits.
func TestThePhaseIsThatOfTheCondition(t *testing.T) {
	for reason, want := range map[config.Reason]api.Phase{
		config.ReasonUnknownConfig:         api.PhaseStalled, // the same pass has written both
		config.ReasonConverged:             api.PhaseIdle,    // the status is about to follow, and is of a pass before
		config.ReasonEvicting:              "",               // so it is, and the condition does not show the phase
		config.ReasonDriverNotLoaded:       api.PhaseWaiting,
		config.ReasonRetrying:              api.PhaseWaiting,
		config.ReasonHostRecordUnavailable: api.PhaseWaiting,
		config.ReasonJournalUnreadable:     api.PhaseStalled,
	} {
		n := agenttest.GPUNode("gpu-1")
		agenttest.Concludes(agenttest.States(n, agenttest.Research(api.PhaseStalled, config.ReasonUnknownConfig, 0, "team/trainer")), agenttest.Research("", reason, 0), "as it is")
		v := viewOf(n, time.Now())
		if former := reason == config.ReasonUnknownConfig; v.Phase != want || (len(v.Blockers) > 0) != former {
			t.Errorf("%s stands beside the phase %s and the blockers %v, want %s", reason, v.Phase, v.Blockers, want)
		}
	}
}

func reasonOf(v nodeView) string { return reason(&v, output.Paper{Now: time.Now()}) }

func TestWhatOthersWroteOnANodeMovesNoCursor(t *testing.T) {
	const hostile = "\x1b[2J\x1b[1;1Hgpu-9   research   Idle\r\ngpu-8\u202e"
	n := agenttest.GPUNode("gpu-1")
	s := agenttest.Research(api.PhaseDraining, config.ReasonEvictionBlocked, 9, hostile)
	s.Capacity = hostile
	agenttest.Says(n, s, hostile)
	n.Annotations[config.AnnotationHold] = hostile
	n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: config.ConditionGPUUnhealthy, Status: corev1.ConditionTrue, Reason: hostile, Message: hostile})
	v := viewOf(n, time.Now())
	v.addDiagnosis(&api.Diagnosis{
		Pods:      []api.PodSeen{{Namespace: hostile, Name: hostile, Devices: []string{hostile, "GPU 0"}, State: hostile}},
		Processes: []api.ProcessSeen{{Name: hostile, Holds: []string{hostile, "GPU 0"}, FoundBy: []string{hostile, foundByNVML}}},
		Unseen:    []string{hostile},
		GPUs: api.GPUsSeen{Now: []api.StatusGPU{{UUID: hostile, Health: &api.GPUHealth{
			Reason: hostile, Severity: hostile, Action: hostile, Instances: []string{hostile, "1g@0"}, Xids: []api.XidSeen{{Number: 1 << 60, GI: -1 << 60}},
		}, MIG: true, Slices: 1 << 40, Geometry: hostile, Instances: []api.StatusInstance{
			{Is: hostile, At: -5, Size: 1 << 40}, {Is: hostile, At: 1 << 62, Size: 1 << 62}, {Is: "1g@0", At: 0, Size: 1, ID: -1 << 60},
		}}}},
	})
	table := tabulate([]nodeView{v}, nodeColumns, true, output.Paper{Now: time.Now()})
	if lines := strings.Count(table, "\n") + 1; lines != 2 {
		t.Errorf("%d lines for one node", lines)
	}
	for _, r := range table + draw(&v, output.Paper{Width: 80}) {
		if r != '\n' && !unicode.IsPrint(r) {
			t.Errorf("raw %q", r)
		}
	}
	top := &cluster.Inquiry{Nodes: []*cluster.Asked{{Identity: cluster.Identify(n), Answer: &api.Answer{MoreUses: -1, Uses: []api.Use{
		{Namespace: hostile, Pod: hostile, GPU: -1 << 60, UUID: hostile, Instance: hostile, MemoryMiB: 1 << 62, TotalMiB: 1, UsedMiB: -1 << 62, Unknown: hostile},
	}}}}}
	screen, err := (&topRequest{format: output.Wide}).text(usesOf(top), output.Paper{Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range screen {
		if r != '\n' && !unicode.IsPrint(r) {
			t.Errorf("raw %q", r)
		}
	}
	if lines := strings.Count(screen, "\n"); lines != 3 {
		t.Errorf("%d lines for one pod: %s", lines, screen)
	}
}

// A node that takes no pods is not green, whatever its GPUs are.
func TestTheTableSaysWhoHasCordonedANode(t *testing.T) {
	for name, c := range map[string]struct {
		by      string // field manager; empty if it is not known
		change  bool   // one of the agent is under way
		reason  string
		colour  text.Color
		changes func(n *corev1.Node)
	}{
		"a user":                      {by: "kubectl", reason: "Converged, cordoned by kubectl 28s", colour: text.FgYellow},
		"not known":                   {reason: "Converged, cordoned 28s", colour: text.FgYellow},
		"a user, during a change":     {by: "kubectl", change: true, reason: "Converged, cordoned by kubectl 28s", colour: text.FgYellow},
		"the agent, during a change":  {by: config.FieldManager, change: true, reason: "Converged", colour: text.FgGreen},
		"not known, during a change":  {change: true, reason: "Converged", colour: text.FgGreen},
		"a user, and it is lifted":    {by: "kubectl", changes: func(n *corev1.Node) { n.Spec.Unschedulable = false }, reason: "Converged", colour: text.FgGreen},
		"a user, and another request": {by: "kubectl", changes: func(n *corev1.Node) { n.Labels[config.LabelProfile] = "training" }, reason: "NotSeenYet, cordoned by kubectl 28s", colour: text.FgYellow},
	} {
		n := onScreen("gpu-1", config.LabelProfile, "research", agenttest.Done(), time.Hour, "as asked")
		n.Spec.Unschedulable = true
		n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule, TimeAdded: &metav1.Time{Time: screenTime.Add(-28 * time.Second)}}}
		if c.by != "" {
			n.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: c.by, FieldsV1: metav1.NewFieldsV1(`{"f:spec":{"f:unschedulable":{}}}`)}}
		}
		if c.change {
			n.Annotations[config.AnnotationJournal] = "{}"
		}
		if c.changes != nil {
			c.changes(n)
		}
		v := viewOf(n, screenTime)
		if said := reason(&v, output.Paper{Now: screenTime}); said != c.reason || v.colour() != c.colour {
			t.Errorf("%s: %q in colour %d, want %q in %d", name, said, v.colour(), c.reason, c.colour)
		}
	}
}

// It is not known whether a GPU that the agent cannot see is cut or free.
func TestNothingIsSaidOfAGPUThatIsNotSeen(t *testing.T) {
	lost := api.StatusGPU{Index: 1, UUID: "GPU-lost", Slices: 8, Lost: true}
	whole := api.StatusGPU{Index: 1, UUID: "GPU-whole"}
	for name, c := range map[string]struct {
		gpu    api.StatusGPU
		reason config.Reason
		now    []api.StatusGPU // of the agent's answer
		unseen []string
		says   string
		never  []string
	}{
		"it is lost":                            {gpu: lost, reason: config.ReasonConverged, says: "GPU 1 GPU-lost not known", never: []string{"whole", "free"}},
		"it is lost, by the answer":             {gpu: whole, reason: config.ReasonConverged, now: []api.StatusGPU{lost}, says: "GPU 1 GPU-lost not known", never: []string{"whole", "free"}},
		"the driver is away":                    {gpu: whole, reason: config.ReasonDriverNotLoaded, unseen: []string{"the GPUs: no driver"}, says: "GPU 1 GPU-whole whole when last seen", never: []string{"free"}},
		"the driver is away, and it was cut":    {gpu: seven(1), reason: config.ReasonDriverNotLoaded, unseen: []string{"the GPUs: no driver"}, says: " MIG when last seen", never: []string{"free\n"}},
		"the driver was away, and it shows now": {gpu: seven(1), reason: config.ReasonDriverNotLoaded, now: []api.StatusGPU{whole}, says: "GPU 1 GPU-whole whole\n  free"},
		"all is well":                           {gpu: whole, reason: config.ReasonConverged, says: "GPU 1 GPU-whole whole\n  free"},
	} {
		n := agenttest.GPUNode("gpu-1")
		s := agenttest.Done()
		s.GPUs = []api.StatusGPU{c.gpu}
		agenttest.Concludes(agenttest.States(n, s), agenttest.Research("", c.reason, 0), "as it is")
		v := viewOf(n, time.Now())
		v.addDiagnosis(&api.Diagnosis{GPUs: api.GPUsSeen{Now: c.now}, Unseen: c.unseen})
		said := draw(&v, output.Paper{Now: time.Now()})
		if !strings.Contains(said, c.says) {
			t.Errorf("%s: want %q:\n%s", name, c.says, said)
		}
		for _, never := range c.never {
			if strings.Contains(said, never) {
				t.Errorf("%s: it says %q:\n%s", name, never, said)
			}
		}
	}
}

// The condition alone does not say which GPUs are well.
func TestAGPUIsWellOnlyWhereItsHealthIsReported(t *testing.T) {
	critical := &api.GPUHealth{Reason: config.ReasonXidCritical, Severity: severityCritical}
	for name, c := range map[string]struct {
		status corev1.ConditionStatus // of GPUUnhealthy
		health *api.GPUHealth         // of GPU 1
		reason config.Reason          // of GPUPartitionReady
		silent bool
		says   string // of GPU 0
	}{
		"all are well":                          {status: corev1.ConditionFalse, says: "GPU 0-1 whole, well"},
		"one is not, as its status says":        {status: corev1.ConditionTrue, health: critical, says: "GPU 0 GPU-0 whole, well"},
		"one is not, and no status says which":  {status: corev1.ConditionTrue, says: "GPU 0-1 whole"},
		"one has had Xids, another one is sick": {status: corev1.ConditionTrue, health: &api.GPUHealth{Xids: []api.XidSeen{{Number: 31}}}, says: "GPU 0 GPU-0 whole"},
		"not known":                             {status: corev1.ConditionUnknown, says: "GPU 0-1 whole"},
		"the agent is silent":                   {status: corev1.ConditionFalse, silent: true, says: "GPU 0-1 whole when last seen"},
		"the driver is away":                    {status: corev1.ConditionFalse, reason: config.ReasonDriverNotLoaded, says: "GPU 0-1 whole when last seen"},
	} {
		n := agenttest.GPUNode("gpu-1")
		s := agenttest.Done()
		s.GPUs = []api.StatusGPU{{Index: 0, UUID: "GPU-0"}, {Index: 1, UUID: "GPU-1", Health: c.health}}
		agenttest.Concludes(agenttest.States(n, s), agenttest.Research("", cmp.Or(c.reason, s.Reason), 0), "as it is")
		n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: config.ConditionGPUUnhealthy, Status: c.status, Reason: string(config.ReasonXidCritical), Message: "GPU 1"})
		now := time.Now()
		if c.silent {
			now = now.Add(time.Hour)
		}
		v := viewOf(n, now)
		if said := draw(&v, output.Paper{Now: now}); !strings.Contains(said+"\n", c.says+"\n") {
			t.Errorf("%s: want %q:\n%s", name, c.says, said)
		}
		if page := string(v.section(output.Paper{Now: now})); strings.Contains(page, "well") != strings.Contains(c.says, "well") {
			t.Errorf("%s: the page says otherwise:\n%s", name, page)
		}
	}
}

// The device plugin opens all GPUs, and uses none.
func TestOperandsAreNoUsers(t *testing.T) {
	n := agenttest.GPUNode("gpu-1")
	s := agenttest.Done()
	s.GPUs = []api.StatusGPU{{Index: 0, UUID: "GPU-0"}, {Index: 1, UUID: "GPU-1"}}
	agenttest.Says(n, s, "as asked")
	v := viewOf(n, time.Now())
	v.addDiagnosis(&api.Diagnosis{Pods: []api.PodSeen{
		{Namespace: "kube-system", Name: "plugin", Devices: []string{"GPU 0", "GPU 1"}, Operand: true},
		{Namespace: "kube-system", Name: "exporter", Devices: []string{"unknown; it counts as holding everything"}, Operand: true},
		{Namespace: "team", Name: "trainer", Devices: []string{"GPU 1"}},
	}})
	if said := draw(&v, output.Paper{Now: time.Now()}); strings.Contains(said, "kube-system") || !strings.HasSuffix(said, "GPU 0-1 whole, 1 of 2 free\n  GPU 1  team/trainer") {
		t.Error(said)
	}
}
