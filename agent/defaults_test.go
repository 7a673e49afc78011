package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

func bare(p *corev1.Pod) { p.OwnerReferences = nil }

func files(medium corev1.StorageMedium) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: medium}}}}
	}
}

// What kubectl drain evicts only by --force and --delete-emptydir-data, the agent evicts only if a user has said so.
func TestWhatWouldBeLostIsNamedBeforeTheCordon(t *testing.T) {
	t.Parallel()
	const asked = "nvidia.com/mig.config=all-1g.10gb"
	const command = "to let this change evict what would be lost: kubectl gpuslice apply gpu-1 --mig-config all-1g.10gb "
	const unmanaged, emptyDir = command + "--force-unmanaged; ", command + "--delete-emptydir-data; "
	for name, c := range map[string]struct {
		pod     func(*corev1.Pod)
		allowed string
		set     func(w *world)
		refused string // what the message names; the change is made if empty
	}{
		"a bare pod":                       {pod: bare, refused: unmanaged},
		"files on a disk":                  {pod: files(corev1.StorageMediumDefault), refused: emptyDir},
		"files in memory":                  {pod: files(corev1.StorageMediumMemory)},
		"both":                             {pod: func(p *corev1.Pod) { bare(p); files("")(p) }, refused: command + "--delete-emptydir-data --force-unmanaged; "},
		"both, allowed":                    {pod: func(p *corev1.Pod) { bare(p); files("")(p) }, allowed: asked + " unmanagedPods emptyDir"},
		"both, and one is allowed":         {pod: func(p *corev1.Pod) { bare(p); files("")(p) }, allowed: asked + " unmanagedPods", refused: emptyDir},
		"a bare pod, allowed":              {pod: bare, allowed: asked + " unmanagedPods"},
		"a bare pod, and files are":        {pod: bare, allowed: asked + " emptyDir", refused: unmanaged},
		"a bare pod, allowed for another":  {pod: bare, allowed: "nvidia.com/mig.config=all-balanced unmanagedPods", refused: unmanaged},
		"files, allowed":                   {pod: files(corev1.StorageMediumDefault), allowed: asked + " emptyDir"},
		"a bare pod that has ended":        {pod: func(p *corev1.Pod) { bare(p); p.Status.Phase = corev1.PodSucceeded }},
		"a bare pod, by the settings":      {pod: bare, set: func(w *world) { w.settings.Drain.UnmanagedPods = config.DrainEvict }},
		"a rule refuses, whatever allowed": {pod: bare, allowed: asked + " unmanagedPods emptyDir", set: refuseTeam, refused: "drain.rules[0]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, oneH100)
				if c.set != nil {
					c.set(w)
					w.restart()
				}
				w.pod("notebook", w.gpus.UUIDs()[0], c.pod)
				cordons := w.recordCordons()
				w.edit(func(n *corev1.Node) {
					metav1.SetMetaDataAnnotation(&n.ObjectMeta, config.AnnotationAllowEviction, c.allowed)
				})
				w.label("all-1g.10gb")
				if c.refused == "" {
					w.reach("all-1g.10gb")
					w.isSpent()
					return
				}
				message := w.untilReason(config.ReasonEvictionBlocked).Message
				w.spend(time.Minute)
				if !strings.Contains(message, c.refused) || !w.runs("notebook") || len(*cordons) > 0 {
					t.Errorf("runs: %t, cordons: %d, and the node says %s", w.runs("notebook"), len(*cordons), message)
				}
			})
		})
	}
}

func refuseTeam(w *world) {
	w.settings.Drain.Rules = []config.DrainRule{{Namespaces: []string{"team"}, Selector: labels.Everything(), Action: config.DrainRefuse}}
}

func (w *world) isSpent() {
	w.t.Helper()
	if text, there := w.node().Annotations[config.AnnotationAllowEviction]; there {
		w.t.Errorf("the node still allows %q", text)
	}
}

// An allowance is for one change, however it ends.
func TestAnAllowanceEndsWithItsChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, oneH100)
		w.pod("notebook", w.gpus.UUIDs()[0], bare)
		w.setFault(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{Return: gpusim.Unknown, Times: 10})
		w.edit(func(n *corev1.Node) {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, config.AnnotationAllowEviction, config.Allowance(config.LabelMIGConfig, "all-1g.10gb", config.FieldUnmanagedPods))
		})
		w.label("all-1g.10gb")
		w.settle(config.ReasonHardwareFailure)
		w.spend(time.Minute)
		w.isSpent()
	})
}

// Without a maintenance file a mistake that is asked of all nodes takes a tenth of them away, and no more.
func TestNodesThatAreAskedForTheSameTakeTurns(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		file  string
		other string // what another node is asked for, which is not Ready; there is none if empty
		empty bool   // no pod has to leave
		waits bool
	}{
		"another is away":                     {other: "all-1g.10gb", waits: true},
		"no pod has to leave":                 {other: "all-1g.10gb", empty: true},
		"another is asked for something else": {other: "all-balanced"},
		"the only node":                       {},
		"a file of windows":                   {file: "estimate: 1m\n", other: "all-1g.10gb", waits: true},
		"a file that says none":               {file: "maxUnavailable: none\n", other: "all-1g.10gb"},
		"a file that says more":               {file: "maxUnavailable: 2\n", other: "all-1g.10gb"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, oneH100)
				if c.file != "" {
					w.setMaintenance(c.file)
				}
				if !c.empty {
					w.pod("holder", w.gpus.UUIDs()[0])
				}
				if c.other != "" {
					other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-2", UID: "other-uid", Labels: map[string]string{config.LabelMIGConfig: c.other}}, Status: withGPUs()}
					if _, err := w.client.CoreV1().Nodes().Create(t.Context(), other, metav1.CreateOptions{}); err != nil {
						t.Fatal(err)
					}
				}
				runs := w.ask(config.LabelMIGConfig + "=all-1g.10gb").Runs
				if strings.Contains(runs, "pool mig.all-1g.10gb changes at most ") != (c.waits && !c.empty) {
					t.Fatalf("the plan says that it runs %q", runs)
				}
				cordons := w.recordCordons()
				w.label("all-1g.10gb")
				if !c.waits {
					w.reach("all-1g.10gb")
					return
				}
				message := w.untilReason(config.ReasonAwaitingSlot).Message
				w.spend(time.Minute)
				if !strings.Contains(message, "; gpu-2 counts until it is available, or you delete its node object or ") || len(*cordons) > 0 {
					t.Errorf("%d cordons, and the node says %s", len(*cordons), message)
				}
				w.ready("gpu-2")
				w.reach("all-1g.10gb")
			})
		})
	}
}
