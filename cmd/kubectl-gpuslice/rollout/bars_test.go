package rollout

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jedib0t/go-pretty/v6/progress"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

// shown is what a terminal shows of a roll-out after the next refresh.
func shown(o *agenttest.Output) string {
	<-time.After(2 * refresh)
	lines := []string{""}
	text := o.String()
	for text != "" {
		switch {
		case strings.HasPrefix(text, "\x1b[A"): // up
			lines = lines[:len(lines)-1]
			text = text[3:]
		case strings.HasPrefix(text, "\x1b[K"): // erase the line
			lines[len(lines)-1] = ""
			text = text[3:]
		case text[0] == '\n':
			lines = append(lines, "")
			text = text[1:]
		default:
			lines[len(lines)-1] += text[:1]
			text = text[1:]
		}
	}
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n")
}

func drawn(nodes, height int) (*bars, *agenttest.Output) {
	o := &agenttest.Output{}
	w := progress.NewWriter()
	w.SetOutputWriter(o)
	w.SetTerminalWidth(90)
	return newBars(w, "profile research on the nodes", nodes, height, output.Paper{}), o
}

func followedBy(name string, phase api.Phase, reason config.Reason, percent int, message string, blockers ...string) *followed {
	return &followed{Identity: cluster.Identity{Name: name}, phase: phase, reason: reason, percent: percent, message: message, blockers: blockers}
}

func TestATerminalShowsABarForEachNodeAndForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, o := drawn(4, 24)
		nodes := []*followed{
			followedBy("gpu-1", api.PhaseWaiting, config.ReasonAwaitingWindow, 0, "research: the next window opens at 2026-12-01 20:00:00Z, for 6 hours"),
			followedBy("gpu-2", api.PhaseDraining, config.ReasonEvictionBlocked, 10, "make room in PDB team-a/inference: it needs 2 healthy pods and has 2, and keeps team-a/inference-server-0", "team/a: PDB team/a: needs 2", "team/b"),
			followedBy("gpu-10", api.PhaseApplying, config.ReasonRepartitioning, 50, "research: 7 steps left"),
			followedBy("gpu-11", "", "", 0, "no agent has answered for 2m0s; see whether its pod runs: kubectl get pods -A -l app.kubernetes.io/name=gpuslice --field-selector spec.nodeName=gpu-11"),
		}
		nodes[1].until, nodes[1].then = time.Now().Add(41*time.Minute+time.Second), "the change is given up and undone"
		b.show(nodes)
		want := `profile research on the nodes
gpu-2: EvictionBlocked: make room in PDB team-a/inference: it needs 2 healthy
│ pods and has 2, and keeps team-a/inference-server-0: team/a: PDB team/a: needs
│ 2; team/b
│ in 41m: the change is given up and undone
gpu-10: Repartitioning: research: 7 steps left
gpu-1: AwaitingWindow: research: the next window opens at 2026-12-01
│ 20:00:00Z, for 6 hours
gpu-11: no agent has answered for 2m0s; see whether its pod runs:
kubectl get pods -A -l app.kubernetes.io/name=gpuslice --field-selector \
spec.nodeName=gpu-11
 10% [##..................]  gpu-2   Draining     EvictionBlocked, 41m left
 50% [##########..........]  gpu-10  Applying     Repartitioning
  0% [....................]  gpu-1   Waiting      AwaitingWindow
  0% [....................]  gpu-11  Asked
 15% [###.................]  0 of 4 nodes converged
`
		if diff := cmp.Diff(want, shown(o)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		nodes[1].end(failed, config.ReasonCancelled, "a user has uncordoned it in the middle of the change, and it is undone; nothing else was changed")
		nodes[2].percent = 100
		nodes[2].end(converged, config.ReasonConverged, "research: as asked")
		b.show(nodes)
		want = `gpu-2 Failed Cancelled: a user has uncordoned it in the middle of the change,
  and it is undone; nothing else was changed
gpu-10  Converged  research: as asked
profile research on the nodes
gpu-1: AwaitingWindow: research: the next window opens at 2026-12-01
│ 20:00:00Z, for 6 hours
gpu-11: no agent has answered for 2m0s; see whether its pod runs:
kubectl get pods -A -l app.kubernetes.io/name=gpuslice --field-selector \
spec.nodeName=gpu-11
  0% [....................]  gpu-1   Waiting      AwaitingWindow
  0% [....................]  gpu-11  Asked
 50% [##########..........]  1 of 4 nodes converged, 1 failed
`
		if diff := cmp.Diff(want, shown(o)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		for _, f := range nodes {
			f.end(converged, config.ReasonConverged, "research: as asked")
		}
		b.show(nodes)
		b.close()
		want = `gpu-2 Failed Cancelled: a user has uncordoned it in the middle of the change,
  and it is undone; nothing else was changed
gpu-10  Converged  research: as asked
gpu-1  Converged  research: as asked
gpu-11  Converged  research: as asked
`
		if diff := cmp.Diff(want, shown(o)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

func TestTheFirstLinesOfARollOutAreAsWideAsTheTerminal(t *testing.T) {
	var lines said
	for _, node := range []string{"gpu-1", "gpu-2"} {
		lines.add(node, "labelled gpuslice.io/profile=research: begins at once\n      the longest of the node's last changes took 15m0s, and no pod has to leave the node for it")
	}
	lines.add("gpu-3", "labelled gpuslice.io/profile=research: held up: OnHold: to go on: kubectl annotate node gpu-3 gpuslice.io/hold-; or wait")
	want := []string{
		"gpu-1, gpu-2  labelled gpuslice.io/profile=research: begins at once",
		"      the longest of the node's last changes took 15m0s, and no pod has to leave",
		"      the node for it",
		"gpu-3 labelled gpuslice.io/profile=research: held up: OnHold: to go on:",
		"  kubectl annotate node gpu-3 gpuslice.io/hold-; or wait",
	}
	if diff := cmp.Diff(want, lines.on(output.Paper{Width: 80}, "  ")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A cursor cannot go up beyond the top of the screen: a longer picture would be drawn over and over again.
func TestThePictureIsNoHigherThanTheTerminal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, o := drawn(400, 12)
		var nodes []*followed
		for i := range 400 {
			phase, reason := api.PhaseWaiting, config.ReasonAwaitingSlot
			switch {
			case i >= 398:
				phase, reason = api.PhaseApplying, config.ReasonRepartitioning
			case i%4 == 0:
				reason = config.ReasonAwaitingWindow
			}
			nodes = append(nodes, followedBy(fmt.Sprintf("gpu-%03d", i), phase, reason, 0, "…"))
		}
		b.show(nodes)
		got := shown(o)
		b.close()
		if n := strings.Count(got, "\n"); n >= 12 {
			t.Errorf("the picture has %d lines:\n%s", n, got)
		}
		for _, want := range []string{"gpu-398  Applying", "gpu-399  Applying", "and 396 more nodes: 297 AwaitingSlot, 99 AwaitingWindow", "0 of 400 nodes converged"} {
			if !strings.Contains(got, want) {
				t.Errorf("the picture lacks %q:\n%s", want, got)
			}
		}
	})
}

func TestPercentAreOfTheStepsThatWereEverLeft(t *testing.T) {
	f := &followed{}
	var got []int
	for _, s := range []api.Status{
		agenttest.Research(api.PhaseWaiting, config.ReasonAwaitingWindow, 20), agenttest.Research(api.PhaseDraining, config.ReasonEvicting, 20),
		agenttest.Research(api.PhaseApplying, config.ReasonRepartitioning, 10), agenttest.Research(api.PhaseRollingBack, config.ReasonRollingBack, 8),
		agenttest.Research(api.PhaseRollingBack, config.ReasonRollingBack, 2), agenttest.Research(api.PhaseRollingBack, config.ReasonRollingBack, 0),
	} {
		f.progress(s)
		f.phase = s.Phase
		got = append(got, f.percent)
	}
	if diff := cmp.Diff([]int{0, 0, 50, 0, 75, 100}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestWhatHappensNextIsCountedDown(t *testing.T) {
	now := time.Date(2026, 11, 21, 3, 4, 5, 0, time.UTC)
	for name, row := range map[string]struct {
		status api.Status
		says   string
	}{
		"a deadline":    {api.Status{Until: now.Add(90 * time.Second), Then: "the change is given up and undone"}, "in 90s: the change is given up and undone"},
		"a window":      {api.Status{Next: now.Add(7 * time.Hour)}, "in 7h: the change begins"},
		"one that was":  {api.Status{Until: now.Add(-time.Second), Then: "the agent stops waiting"}, "now: the agent stops waiting"},
		"none":          {},
		"a moment only": {api.Status{Until: now.Add(time.Hour)}, ""},
	} {
		row.status.Desired, row.status.Label = "research", config.LabelProfile
		row.status.Phase, row.status.Reason = api.PhaseDraining, config.ReasonEvictionBlocked
		n := agenttest.Says(agenttest.GPUNode("gpu-1"), row.status, "research: waiting")
		n.Labels[config.LabelProfile] = "research"
		f := waitFor(n, cluster.Target{Label: config.LabelProfile, Name: "research"}, false, now)
		if got := f.next(now); got != row.says {
			t.Errorf("%s: %q, want %q", name, got, row.says)
		}
		if f.gone(); f.next(now) != "" {
			t.Errorf("%s: of a node that was deleted: %q", name, f.next(now))
		}
	}
}
