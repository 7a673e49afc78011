package verdict

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	strictjson "sigs.k8s.io/json"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// LongestRecord is more than the record of the most GPUs takes.
	LongestRecord = 512 << 10 // bytes
	recordVersion = 1
)

// Record is what the next process of the agent continues from.
type Record struct {
	Version  int         `json:"version"`
	Boot     string      `json:"boot"`
	Reported string      `json:"reported,omitempty"` // key of the verdict that was last reported
	Hung     time.Time   `json:"hung,omitzero"`
	Unloaded bool        `json:"away,omitempty"` // no driver was loaded: the next one is newly loaded
	GPUs     []gpuRecord `json:"gpus,omitempty"`
}

type gpuRecord struct {
	UUID         string          `json:"uuid,omitempty"`
	PCI          string          `json:"pci,omitempty"`
	Index        int             `json:"index"`
	Old          bool            `json:"old,omitempty"`
	Findings     []findingRecord `json:"findings,omitempty"`
	Xids         []xidRecord     `json:"xids,omitempty"`
	Pending      bool            `json:"pending,omitempty"`
	Failed       bool            `json:"failed,omitempty"`
	SRAM         bool            `json:"sram,omitempty"`
	Unrepairable bool            `json:"unrepairable,omitempty"`
	Errors       uint64          `json:"errors,omitempty"` // volatile ones: a reset lowers their number
	Action       int             `json:"action,omitempty"`
	Erred        time.Time       `json:"erred,omitzero"`
	Asked        bool            `json:"asked,omitempty"`
	Rows         *rowsRecord     `json:"rows,omitempty"`
	Rises        []time.Time     `json:"rises,omitempty"`
	FlapUntil    time.Time       `json:"flapUntil,omitzero"`
	Trouble      time.Time       `json:"trouble,omitzero"`
	Resets       []resetRecord   `json:"resets,omitempty"` // by the agent
}

type resetRecord struct {
	At   time.Time `json:"at"`
	Over bool      `json:"over,omitempty"`
}

type findingRecord struct {
	Reason    string    `json:"reason"`
	Action    string    `json:"action"`
	Detail    string    `json:"detail,omitempty"`
	Instances []int     `json:"instances,omitempty"`
	Since     time.Time `json:"since"`
}

type xidRecord struct {
	Xid      uint64    `json:"xid"`
	GI       int       `json:"gi"`
	CI       int       `json:"ci"`
	Count    int       `json:"count"`
	First    time.Time `json:"first"`
	Last     time.Time `json:"last"`
	Holds    bool      `json:"holds,omitempty"`
	Reported time.Time `json:"reported,omitzero"`
}

type rowsRecord struct {
	Corrected   uint64    `json:"corrected"`
	Uncorrected uint64    `json:"uncorrected"`
	Read        time.Time `json:"read"`
}

// Record returns what is known now, with the id of the host's boot and the key of the verdict that was last reported.
func (n *Node) Record(boot, reported string) Record {
	r := Record{Version: recordVersion, Boot: boot, Reported: reported, Hung: n.hangXidAt, Unloaded: n.driverUnloaded}
	for _, g := range n.gpus {
		out := gpuRecord{
			UUID: string(g.uuid), PCI: g.pci, Index: g.index, Old: g.beforeAmpere, Pending: g.rowPending, Failed: g.rowFailed,
			SRAM: g.sramExceeded, Unrepairable: g.memoryUnrepairable,
			Erred: g.eccErrorAt, Asked: g.awaitsMIGMode, Rises: g.rises, FlapUntil: g.flappingUntil, Errors: g.reading.ECC.UncorrectedVolatile.Value,
			Action: int(g.reading.Action.Value), Trouble: g.lastTroubleAt,
		}
		for _, f := range g.findings {
			out.Findings = append(out.Findings, findingRecord{string(f.Reason), string(f.Action), f.Detail, f.Instances, f.Since})
		}
		for _, x := range g.resets {
			out.Resets = append(out.Resets, resetRecord{x.at, x.over})
		}
		for key, o := range g.xids {
			out.Xids = append(out.Xids, xidRecord{key.xid, key.gi, key.ci, o.count, o.first, o.last, o.unsettled, o.eventAt})
		}
		slices.SortFunc(out.Xids, func(a, b xidRecord) int { return a.First.Compare(b.First) })
		if g.lastRows != nil {
			out.Rows = &rowsRecord{g.lastRows.Corrected, g.lastRows.Uncorrected, g.lastRows.readAt}
		}
		r.GPUs = append(r.GPUs, out)
	}
	return r
}

// Key is the record without values that change by themselves. A record with another key has to be written.
func (r Record) Key() string {
	r.Hung, r.GPUs = time.Time{}, slices.Clone(r.GPUs)
	for i := range r.GPUs {
		g := &r.GPUs[i]
		g.Xids, g.FlapUntil, g.Erred = slices.Clone(g.Xids), time.Time{}, time.Time{}
		g.Trouble = time.Time{}
		for k := range g.Xids {
			g.Xids[k].Count, g.Xids[k].Last, g.Xids[k].Reported = 0, time.Time{}, time.Time{}
		}
		slices.SortFunc(g.Xids, func(a, b xidRecord) int { return int(a.Xid) - int(b.Xid) }) //nolint:gosec // three digits
		if g.Rows != nil {
			g.Rows = &rowsRecord{g.Rows.Corrected, g.Rows.Uncorrected, time.Time{}}
		}
	}
	text, err := json.Marshal(r)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

var errRecord = errors.New("not a record of GPU health that this agent can read")

// ParseRecord reads a record strictly, and checks its bounds.
func ParseRecord(data []byte) (Record, error) {
	var r Record
	if len(data) > LongestRecord {
		return r, fmt.Errorf("%w: it is longer than %d bytes", errRecord, LongestRecord)
	}
	strict, err := strictjson.UnmarshalStrict(data, &r)
	if err := errors.Join(append(strict, err)...); err != nil {
		return Record{}, fmt.Errorf("%w: %s", errRecord, sanitize.Cut(err.Error(), 256))
	}
	if r.Version != recordVersion || len(r.GPUs) > mostGPUs || !legal(r.Boot, 64) || !legal(r.Reported, 64<<10) {
		return Record{}, fmt.Errorf("%w: version %d, %d GPUs", errRecord, r.Version, len(r.GPUs))
	}
	for _, g := range r.GPUs {
		if err := g.check(); err != nil {
			return Record{}, fmt.Errorf("%w: %w", errRecord, err)
		}
	}
	return r, nil
}

func legal(text string, longest int) bool { return len(text) <= longest && sanitize.Text(text) == text }

func (g gpuRecord) check() error {
	if !legal(g.UUID, 80) || !legal(g.PCI, 32) || g.Index < -1 || g.Index > 1<<10 {
		return fmt.Errorf("invalid GPU: index %d", g.Index)
	}
	if len(g.Findings) > len(reasons) || len(g.Xids) > 2*mostXids || len(g.Rises) > flapRises || len(g.Resets) > mostResets {
		return fmt.Errorf("GPU %d has %d findings, %d Xids and %d times", g.Index, len(g.Findings), len(g.Xids), len(g.Rises))
	}
	for _, f := range g.Findings {
		if rank(config.Reason(f.Reason)) == len(reasons) || !legal(f.Action, 32) || !legal(f.Detail, 256) || len(f.Instances) > 16 {
			return fmt.Errorf("GPU %d has an invalid finding %q", g.Index, sanitize.Cut(f.Reason, 64))
		}
	}
	return nil
}

// Recall continues from a record. From a record of another boot it takes only what outlasts a reboot: memory that is used up stays so.
func (n *Node) Recall(r Record, boot string) {
	same := boot != "" && r.Boot == boot
	for _, was := range r.GPUs {
		g := newGPU(nvml.UUID(was.UUID), was.PCI, was.Index)
		g.beforeAmpere, g.rowFailed, g.sramExceeded, g.memoryUnrepairable = was.Old, was.Failed, was.SRAM, was.Unrepairable
		if was.Rows != nil {
			g.lastRows = &Rows{was.Rows.Corrected, was.Rows.Uncorrected, was.Rows.Read}
		}
		for _, x := range was.Resets {
			g.resets = append(g.resets, reset{x.At, x.Over})
		}
		if same {
			g.recall(was)
		}
		n.gpus = append(n.gpus, g)
	}
	if same {
		n.hangXidAt, n.driverUnloaded = r.Hung, r.Unloaded
	}
}

func (g *GPU) recall(was gpuRecord) {
	g.rowPending, g.eccErrorAt, g.awaitsMIGMode, g.rises, g.flappingUntil = was.Pending, was.Erred, was.Asked, was.Rises, was.FlapUntil
	g.lastTroubleAt = was.Trouble
	g.hasReading = true // with the values that show a reset
	g.reading.ECC.UncorrectedVolatile = nvml.Answered(was.Errors)
	g.reading.Action = nvml.Answered(nvml.RecoveryAction(was.Action))
	for _, f := range was.Findings {
		reason := config.Reason(f.Reason)
		g.lost = g.lost || reason == config.ReasonGPULost
		g.missing = g.missing || reason == config.ReasonGPUMissing
		g.findings = append(g.findings, Finding{Reason: reason, Action: Action(f.Action), Detail: f.Detail, Instances: f.Instances, Since: f.Since})
	}
	sortFindings(g.findings)
	for _, x := range was.Xids {
		g.xids[xidKey{x.Xid, x.GI, x.CI}] = &Occurrence{count: x.Count, first: x.First, last: x.Last, unsettled: x.Holds, eventAt: x.Reported}
	}
}

// LimitTimes sets times that lie after now, from a clock that was ahead, to now. Otherwise their findings would hold until that time: a person
// could not acknowledge them, and they would never settle.
func (n *Node) LimitTimes(now time.Time) {
	limit := func(times ...*time.Time) {
		for _, t := range times {
			if t.Round(0).After(now.Round(0)) { // by the time of day, not by what has elapsed
				*t = now
			}
		}
	}
	limit(&n.hangXidAt, &n.silentSince)
	for _, g := range n.gpus {
		limit(&g.eccErrorAt, &g.lastXidAt, &g.lastTroubleAt, &g.agentChangedAt)
		if latest := now.Add(flapHold); g.flappingUntil.Round(0).After(latest.Round(0)) {
			g.flappingUntil = latest
		}
		for i := range g.findings {
			limit(&g.findings[i].Since, &g.findings[i].lastWithout)
		}
		for _, o := range g.xids {
			limit(&o.first, &o.last, &o.eventAt)
		}
		g.rises, g.resets = slices.Clone(g.rises), slices.Clone(g.resets) // a record may have them
		for i := range g.rises {
			limit(&g.rises[i])
		}
		for i := range g.resets {
			limit(&g.resets[i].at)
		}
		for pod, at := range g.podErrors {
			limit(&at)
			g.podErrors[pod] = at
		}
	}
}
