package rollout

import (
	"encoding/json"
	"flag"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
	"github.com/gpuslice/gpuslice/test/browser"
)

var update = flag.Bool("update", false, "write the files of testdata again")

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
			Notes: []string{"the node has 24 MIG devices"}, Patience: api.Duration(time.Hour),
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

func TestABrowserShowsAPlan(t *testing.T) {
	browser.Shows(t, map[string]string{"plan": planned(t, output.HTML)})
}
