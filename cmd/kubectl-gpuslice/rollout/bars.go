package rollout

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/progress"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
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
)

// bars shows a roll-out on a terminal: a bar for each node that is under way, as many as there is room for, and one for all of
// them. Nodes that are done or have failed move up, and stay.
type bars struct {
	writer progress.Writer
	rows   []*progress.Tracker
	total  *progress.Tracker
	header string
	shown  map[string]bool // nodes that have moved up
	ended  chan struct{}
}

// newBars begins to draw. Without a width lines are cut where the terminal ends.
func newBars(w progress.Writer, header string, nodes, height int) *bars {
	b := &bars{writer: w, header: header, shown: map[string]bool{}, ended: make(chan struct{})}
	w.SetUpdateFrequency(refresh)
	w.SetTrackerLength(barLength)
	w.SetTrackerPosition(progress.PositionLeft)
	style := w.Style()
	style.Visibility = progress.StyleVisibility{Percentage: true, Pinned: true, Tracker: true}
	style.Options.PercentFormat, style.Options.Separator = "%3.0f%%", "  "
	for range min(nodes, max(height-headroom, leastRows)) {
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

func (b *bars) say(line string) { b.writer.Log(line) }

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
				b.say(sentence(f))
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
		width = max(width, len(f.Name))
	}
	for i, row := range b.rows {
		if i >= len(left) {
			row.MarkAsDone()
			continue
		}
		row.SetValue(int64(left[i].percent))
		row.UpdateMessage(fmt.Sprintf("%-*s  %-11s  %s", width, left[i].Name, left[i].state(), brief(left[i])))
	}
	b.rows = b.rows[:min(len(b.rows), len(left))]
	if len(left) == 0 {
		b.total.MarkAsDone()
	}
}

// pinned names the request, and counts the nodes without a row by their states.
func (b *bars) pinned(left []*followed) []string {
	out := []string{b.header}
	if len(left) > len(b.rows) {
		rest := left[len(b.rows):]
		out = append(out, fmt.Sprintf("and %s: %s", cli.Counted(len(rest), "more node"), tally(rest)))
	}
	return out
}

// byInterest sorts nodes with a change under way first.
func byInterest(a, b *followed) int {
	idle := func(f *followed) int {
		if f.phase == "" || f.phase == api.PhaseWaiting {
			return 1
		}
		return 0
	}
	return idle(a) - idle(b)
}

// brief returns why the node waits: its first blocker, or the message of its condition.
func brief(f *followed) string {
	if len(f.blockers) == 0 {
		return f.words()
	}
	text := fmt.Sprintf("%s: %s", f.reason, f.blockers[0])
	if more := len(f.blockers) - 1; more > 0 {
		text += fmt.Sprintf(" (and %d more)", more)
	}
	return text
}

// totals says how many nodes are done.
func totals(nodes []*followed) string {
	by := map[stage]int{}
	for _, f := range nodes {
		by[f.stage]++
	}
	text := fmt.Sprintf("%d of %s converged", by[converged], cli.Counted(len(nodes), "node"))
	if by[failed] > 0 {
		text += fmt.Sprintf(", %d failed", by[failed])
	}
	return text
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
