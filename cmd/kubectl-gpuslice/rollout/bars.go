package rollout

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/progress"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/mattn/go-runewidth"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
)

const (
	// headroom is the lines of a terminal that are not for single nodes: the request, the other nodes, the total, and the cursor.
	headroom = 5
	// leastRows is the number of rows on the smallest terminal.
	leastRows = 3
	// refresh is how often the picture is drawn; what it shows comes from the watch.
	refresh = 200 * time.Millisecond
	// barLength is the length of a bar with its ends.
	barLength = 22
	// beside is the number of columns of a row for its node: without the bar and the percentage.
	beside = output.PaperWidth - 29
	// longestInRow is the number of characters of a node's name in a row.
	longestInRow = 24
)

// bars shows a roll-out on a terminal: a bar for each node that is under way, as many as there is room for, and one for all of
// them. Nodes that are done or have failed move up, and stay.
type bars struct {
	writer progress.Writer
	rows   []*progress.Tracker
	total  *progress.Tracker
	header string
	paper  output.Paper
	height int
	shown  map[string]bool // nodes that have moved up
	ended  chan struct{}
}

// newBars begins to draw.
func newBars(w progress.Writer, header string, nodes, height int, p output.Paper) *bars {
	p.Width = min(cmp.Or(p.Width, output.PaperWidth), output.PaperWidth)
	b := &bars{writer: w, header: header, paper: p, height: height, shown: map[string]bool{}, ended: make(chan struct{})}
	w.SetUpdateFrequency(refresh)
	w.SetTrackerLength(barLength)
	w.SetTrackerPosition(progress.PositionLeft)
	style := w.Style()
	style.Visibility = progress.StyleVisibility{Percentage: true, Pinned: true, Tracker: true}
	style.Options.PercentFormat, style.Options.Separator = "%3.0f%%", "  "
	for range min(nodes, max((height-headroom)*2/3, leastRows)) { // the rest is for why nodes wait
		b.rows = append(b.rows, b.row(100))
	}
	b.total = b.row(100 * int64(nodes))
	go func() {
		defer close(b.ended)
		w.Render()
	}()
	return b
}

func (b *bars) row(total int64) *progress.Tracker {
	t := &progress.Tracker{Total: total, AutoStopDisabled: true, RemoveOnCompletion: true}
	b.writer.AppendTracker(t)
	return t
}

func (b *bars) say(line string) { b.log(line) }

// log writes a text above the picture.
func (b *bars) log(what string, with ...text.Color) {
	for _, line := range b.paper.Hanging(what) {
		b.writer.Log(b.paper.Paint(line, with...))
	}
}

// close draws the last picture, without the bars if nothing is under way. Before the first picture, Stop does nothing.
func (b *bars) close() {
	for {
		b.writer.Stop()
		select {
		case <-b.ended:
			return
		case <-time.After(refresh):
		}
	}
}

func (b *bars) show(nodes []*followed) {
	var left []*followed
	percent := 0
	for _, f := range nodes {
		if f.stage != pending {
			percent += 100
			if !b.shown[f.Name] {
				b.shown[f.Name] = true
				b.log(sentence(f), stageColours[f.stage])
			}
			continue
		}
		percent += f.percent
		left = append(left, f)
	}
	slices.SortStableFunc(left, byInterest)
	b.total.SetValue(int64(percent))
	b.total.UpdateMessage(totals(nodes))
	b.room(left)
	b.writer.SetPinnedMessages(b.pinned(left)...)
}

// room gives each row its node, and removes rows that no node needs any more.
func (b *bars) room(left []*followed) {
	width := 0
	for _, f := range left[:min(len(left), len(b.rows))] {
		width = min(max(width, len(f.Name)), longestInRow)
	}
	for i, row := range b.rows {
		if i >= len(left) {
			row.MarkAsDone()
			continue
		}
		row.SetValue(int64(left[i].percent))
		row.UpdateMessage(brief(left[i], width))
	}
	b.rows = b.rows[:min(len(b.rows), len(left))]
	if len(left) == 0 {
		b.total.MarkAsDone()
	}
}

// pinned names the request, says why nodes wait, and counts the nodes without a row by their states.
func (b *bars) pinned(left []*followed) []string {
	out := b.paper.Hanging(b.header)
	room := b.height - headroom - len(b.rows) - len(out) + 1
	for _, f := range left[:min(len(left), len(b.rows))] {
		why := b.why(f)
		if len(why) > room {
			break
		}
		out, room = append(out, why...), room-len(why)
	}
	if len(left) > len(b.rows) {
		rest := left[len(b.rows):]
		out = append(out, fmt.Sprintf("and %s: %s", cli.Counted(len(rest), "more node"), tally(rest)))
	}
	return out
}

// why is the agent's message, with the time that is left. The message names the blocker, the user's command and the next event. The lines below the first
// begin with a sign, since the writer drops spaces. Those of a command do not: users paste it.
func (b *bars) why(f *followed) []string {
	const sign = "│ "
	said := f.words()
	if len(f.blockers) > 0 && !strings.Contains(said, f.blockers[0]) {
		said += ": " + strings.Join(f.blockers, "; ")
	}
	narrow := output.Paper{Width: b.paper.Width - len(output.Indent)}
	lines := narrow.Lines(f.Name + ": " + said)
	if next := f.next(time.Now()); next != "" {
		lines = append(lines, narrow.Lines(next)...)
	}
	var out []string
	for i, line := range lines {
		if i > 0 && !line.Command {
			line.Text = sign + line.Text
		}
		if idle(f) || len(f.blockers) > 0 {
			line.Text = b.paper.Paint(line.Text, text.FgYellow)
		}
		out = append(out, line.Text)
	}
	return out
}

// byInterest sorts nodes with a change under way first.
func byInterest(a, b *followed) int {
	switch {
	case idle(a) == idle(b):
		return 0
	case idle(a):
		return 1
	default:
		return -1
	}
}

// idle reports whether no change is under way on the node.
func idle(f *followed) bool { return f.phase == "" || f.phase == api.PhaseWaiting }

// brief is the row of a node: its name, its state, the reason, and how long until something happens.
func brief(f *followed, width int) string {
	said := fmt.Sprintf("%-*s  %-11s", width, output.Shortened(f.Name, longestInRow), f.state())
	if f.reason != "" && string(f.reason) != f.state() {
		said += "  " + string(f.reason)
	}
	if left := time.Until(f.until); left > 0 {
		said += ", " + duration.HumanDuration(left) + " left"
	}
	return runewidth.Truncate(strings.TrimRight(said, " "), beside, "…")
}

// stageColours are those of a node that is no longer waited for.
var stageColours = map[stage]text.Color{converged: text.FgGreen, failed: text.FgRed, deleted: text.FgHiBlack}

// totals says how many nodes are done.
func totals(nodes []*followed) string {
	by := map[stage]int{}
	for _, f := range nodes {
		by[f.stage]++
	}
	said := fmt.Sprintf("%d of %s converged", by[converged], cli.Counted(len(nodes), "node"))
	if by[failed] > 0 {
		said += fmt.Sprintf(", %d failed", by[failed])
	}
	return said
}

// tally counts nodes by their reason, the most frequent first.
func tally(nodes []*followed) string {
	by := map[string]int{}
	for _, f := range nodes {
		by[cmp.Or(string(f.reason), f.state())]++
	}
	reasons := slices.SortedFunc(maps.Keys(by), func(a, b string) int { return cmp.Or(by[b]-by[a], cmp.Compare(a, b)) })
	var out []string
	for _, r := range reasons {
		out = append(out, fmt.Sprintf("%d %s", by[r], r))
	}
	return strings.Join(out, ", ")
}
