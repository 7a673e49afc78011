package rollout

import (
	"encoding/json"
	"flag"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/mattn/go-runewidth"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
	"github.com/gpuslice/gpuslice/test/browser"
)

var update = flag.Bool("update", false, "write the files of testdata again")

// recuts are those of eight GPUs of which seven change, and of some that cannot.
func recuts() []api.Recut {
	small := []api.Place{{Is: "1g.10gb@0", At: 0, Size: 1}, {Is: "1g.10gb@1", At: 1, Size: 1}}
	balanced := append(small, api.Place{Is: "2g.20gb@2", At: 2, Size: 2}, api.Place{Is: "3g.40gb@4", At: 4, Size: 4})
	const h100 = "NVIDIA H100 80GB HBM3"
	return []api.Recut{
		{GPUs: []int{0, 1, 2, 3, 5, 6}, Model: h100, Slices: 8, After: api.Layout{MIG: true, Instances: balanced}},
		{GPUs: []int{4}, Model: h100, Slices: 8, Before: api.Layout{MIG: true, Instances: small}, After: api.Layout{MIG: true, Instances: balanced}},
		{GPUs: []int{7}, Model: h100, Slices: 8, Before: api.Layout{MIG: true, Instances: balanced}, After: api.Layout{MIG: true, Instances: balanced}},
		{GPUs: []int{8, 9}, Model: "NVIDIA L40S"},
		{GPUs: []int{10}, Model: h100, Before: api.Layout{Lost: true}, After: api.Layout{Lost: true}},
		{GPUs: []int{11}, Model: "NVIDIA A100-SXM4-80GB", Slices: 8, After: api.Layout{MIG: true}, AtReboot: true},
	}
}

// planned is what plan says in the format of four nodes: two alike, one that keeps silent, one that another label asks for something impossible.
func planned(t *testing.T, format string) (said string) {
	t.Helper()
	inWorld(t, func(w *world) {
		for _, name := range []string{"gpu-1", "gpu-2", "gpu-3"} {
			w.Edit(name, func(n *corev1.Node) { n.Labels[config.LabelMIGConfig] = "all-balanced" })
		}
		w.Edit("gpu-4", func(n *corev1.Node) { n.Labels[config.LabelProfile] = "research" })
		w.Start("plan", "-l", "pool=research", "-o", format)
		some := api.Answer{
			Steps: []string{"fence: journal, cordon, taint", "evict team/a", "GPU 0: turn MIG on"}, More: 7, Pods: []string{"team/a"}, MorePods: 1, Runs: "at once: no window restricts it",
			Reboot: true, Lost: []string{"the files of team/a on emptyDir scratch"}, Asked: []string{"team/a: asked behind the cordon, up to 8h (drain.gradualFor)"},
			Notes: []string{"the node has 24 MIG devices"}, Patience: api.Duration(time.Hour), GPUs: recuts(), Takes: api.Duration(4 * time.Minute), Measured: true,
			Offers: "nvidia.com/gpu 1, nvidia.com/mig-1g.10gb 16, nvidia.com/mig-2g.20gb 8, nvidia.com/mig-3g.40gb 8",
		}
		w.Answers("gpu-1", some)
		w.Answers("gpu-2", some)
		<-time.After(planTime)
		w.Answers("gpu-4", api.Answer{Refused: "there is no research", Reason: config.ReasonUnknownConfig})
		code := 0
		if said, code = w.Ended(); code != 1 {
			t.Errorf("exit code %d", code)
		}
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"), agenttest.GPU("gpu-3"), agenttest.GPU("gpu-4"))
	said, _, _ = strings.Cut(said, "error: ") // which is on stderr
	return said
}

func TestAPlanInEachFormat(t *testing.T) {
	for _, format := range []string{output.JSON, output.YAML, output.HTML} {
		agenttest.Golden(t, "testdata/plan."+format, planned(t, format), *update)
	}
	var fromJSON, fromYAML forecasts
	if err := json.Unmarshal([]byte(planned(t, output.JSON)), &fromJSON); err != nil || len(fromJSON.Nodes) != 4 {
		t.Errorf("%v in %+v", err, fromJSON)
	}
	if err := yaml.UnmarshalStrict([]byte(planned(t, output.YAML)), &fromYAML); err != nil || len(fromYAML.Nodes) != 4 {
		t.Errorf("%v in %+v", err, fromYAML)
	}
	inWorld(t, func(w *world) {
		if said, code := w.Run("plan", "gpu-1", "-o", "wide"); code != 1 || !strings.Contains(said, `flag --output is "wide": it must be json, yaml or html`) {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"))
}

// The screens: a drawing of the GPUs by groups, and the single steps on request. A pipe has them whole.
func TestScreensOfAPlan(t *testing.T) {
	text.EnableColors()
	t.Cleanup(text.DisableColors)
	p := &plans{Inquiry: &cluster.Inquiry{}, target: cluster.Target{Label: config.LabelMIGConfig, Name: "all-balanced"}, silent: "its agent has not answered within 30s"}
	add := func(name string, a *api.Answer) {
		p.Nodes = append(p.Nodes, &cluster.Asked{Identity: cluster.Identity{Name: name}, Answer: a})
	}
	begins := api.Answer{
		Steps: []string{"fence: journal, cordon, taint", "GPU 0: turn MIG on"}, More: 36, GPUs: recuts(), Runs: "at once: no window restricts it", Takes: api.Duration(4 * time.Minute), Measured: true,
		Offers: "nvidia.com/gpu 1, nvidia.com/mig-1g.10gb 16, nvidia.com/mig-2g.20gb 8, nvidia.com/mig-3g.40gb 8",
	}
	held := begins
	held.GPUs, held.Reason, held.HeldUp = begins.GPUs[:1], config.ReasonEvictionBlocked, "make room in PDB team-a/trainer: it needs 2 healthy pods and has 2, and keeps team-a/trainer-0"
	held.Pods, held.Lost, held.Takes, held.Measured = []string{"team-a/trainer-0"}, []string{"the files of team-a/trainer-0 on emptyDir scratch"}, api.Duration(15*time.Minute), false
	add("gpu-1", &begins)
	add("gpu-2", &held)
	add("gpu-3", &begins)
	add("gpu-4", nil)
	add("gpu-5", &api.Answer{Notes: []string{"the node is cordoned by kubectl; the agent does not lift that cordon"}})
	p.notes = []string{"gpu-2: team-a/trainer-0 fits on no other node: 2 nodes: too little free nvidia.com/mig-3g.40gb"}
	for _, width := range []int{80, 160} {
		on := output.Paper{Width: width}
		for name, steps := range map[string]bool{"plan": false, "plan-steps": true} {
			said := p.text(steps, on)
			agenttest.Golden(t, fmt.Sprintf("testdata/%s-%d.txt", name, width), said, *update)
			for line := range strings.SplitSeq(said, "\n") {
				if n := runewidth.StringWidth(line); n > width && !strings.Contains(line, "kubectl") {
					t.Errorf("%d columns: %s", n, line)
				}
			}
			on.Colour = true
			if coloured := p.text(steps, on); coloured == said || text.StripEscape(coloured) != said {
				t.Errorf("in colour it says something else:\n%s", coloured)
			}
			on.Colour = false
		}
	}
	if piped := p.text(false, output.Paper{}); strings.Contains(piped, "…") || !strings.Contains(piped, held.HeldUp+"\n") {
		t.Errorf("in a pipe:\n%s", piped)
	}
}

// Whoever can write the node writes text into the page, and nothing else.
func TestAPlansPageShowsWhatOthersWroteAsText(t *testing.T) {
	const evil = `</style><script>alert(1)</script>"><img src="http://evil.invalid/x">&lt;b&gt;`
	inWorld(t, func(w *world) {
		w.Start("plan", "gpu-1", "gpu-2", "--profile", "research", "-o", "html")
		texts := []string{evil}
		w.Answers("gpu-1", api.Answer{Steps: texts, Pods: texts, Runs: evil, Lost: texts, Notes: texts, Asked: texts, Unsure: evil})
		w.Answers("gpu-2", api.Answer{Refused: evil, Reason: evil})
		said, code := w.Ended()
		page, _, _ := strings.Cut(said, "error: ")
		browser.Harmless(t, page)
		if code != cli.ExitHeldUp || strings.Contains(page, evil) || strings.Count(page, string(output.Say(evil))) < 8 {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
}

func TestAPlansPageIsBounded(t *testing.T) {
	var out forecasts
	for range 1000 {
		out.Nodes = append(out.Nodes, forecast{Node: "gpu", Verdict: strings.Repeat("x", len(out.Nodes))})
	}
	if page := out.page(output.Paper{}); strings.Count(page, "<section") != mostSections || !strings.Contains(page, "and 800 more: -o json has them all") {
		t.Errorf("%d sections", strings.Count(page, "<section"))
	}
}

// Whoever can write the node can have it name as many steps as an annotation has room for.
func TestThePageOfManyStepsTakesLittle(t *testing.T) {
	f := forecast{Answer: &api.Answer{Steps: make([]string, 20_000), Notes: slices.Repeat([]string{"x"}, 20_000)}}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	page := f.section()
	runtime.ReadMemStats(&after)
	if mib := (after.TotalAlloc - before.TotalAlloc) >> 20; mib > 100 {
		t.Errorf("%d MiB for a page of %d KiB", mib, len(page)>>10)
	}
}

func TestABrowserShowsAPlan(t *testing.T) {
	browser.Shows(t, map[string]string{"plan": planned(t, output.HTML)})
}
