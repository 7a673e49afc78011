package health

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	strictjson "sigs.k8s.io/json"

	"github.com/gpuslice/gpuslice/agent/hostfile"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// The record is a file of this host that only root can write: what the node object says could have been written by others.
const (
	// recordName is the file's name.
	recordName = "health.json"
	// longestRecord is more than all GPUs with all that is remembered of them take.
	longestRecord = 512 << 10 // bytes
	recordVersion = 1
)

// Store keeps the record. *hostfile.File does.
type Store interface {
	// Read gives what was last written, or nil if nothing was.
	Read(ctx context.Context) ([]byte, error)
	Write(ctx context.Context, data []byte) error
}

// record is what a next process of the agent goes on from.
type record struct {
	Version int         `json:"version"`
	Boot    string      `json:"boot"`
	Told    string      `json:"told,omitempty"` // gist of the last verdict that was told
	Hung    time.Time   `json:"hung,omitzero"`
	Away    bool        `json:"away,omitempty"` // no driver was loaded: the next time it is, it was loaded anew
	GPUs    []gpuRecord `json:"gpus,omitempty"`
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
	Errors       uint64          `json:"errors,omitempty"` // volatile ones, by which a reset shows
	Action       int             `json:"action,omitempty"`
	Erred        time.Time       `json:"erred,omitzero"`
	Asked        bool            `json:"asked,omitempty"`
	Rows         *rowsRecord     `json:"rows,omitempty"`
	Rises        []time.Time     `json:"rises,omitempty"`
	FlapUntil    time.Time       `json:"flapUntil,omitzero"`
}

type findingRecord struct {
	Reason    string    `json:"reason"`
	Action    string    `json:"action"`
	Detail    string    `json:"detail,omitempty"`
	Instances []int     `json:"instances,omitempty"`
	Since     time.Time `json:"since"`
}

type xidRecord struct {
	Xid   uint64    `json:"xid"`
	GI    int       `json:"gi"`
	CI    int       `json:"ci"`
	Count int       `json:"count"`
	First time.Time `json:"first"`
	Last  time.Time `json:"last"`
	Holds bool      `json:"holds,omitempty"`
	Told  time.Time `json:"told,omitzero"`
}

type rowsRecord struct {
	Corrected   uint64    `json:"corrected"`
	Uncorrected uint64    `json:"uncorrected"`
	Read        time.Time `json:"read"`
}

// encode is the record of what is known now.
func (n *node) encode(boot, told string) record {
	r := record{Version: recordVersion, Boot: boot, Told: told, Hung: n.hung, Away: n.away}
	for _, g := range n.gpus {
		out := gpuRecord{
			UUID: string(g.uuid), PCI: g.pci, Index: g.index, Old: g.old, Pending: g.pending, Failed: g.failed, SRAM: g.sram, Unrepairable: g.unrepairable,
			Erred: g.erredAt, Asked: g.asked, Rises: g.rises, FlapUntil: g.flapUntil, Errors: g.reading.ECC.UncorrectedVolatile.Value,
			Action: int(g.reading.Action.Value),
		}
		for _, f := range g.findings {
			out.Findings = append(out.Findings, findingRecord{string(f.reason), string(f.action), f.detail, f.instances, f.since})
		}
		for key, o := range g.xids {
			out.Xids = append(out.Xids, xidRecord{key.xid, key.gi, key.ci, o.count, o.first, o.last, o.holds, o.told})
		}
		slices.SortFunc(out.Xids, func(a, b xidRecord) int { return a.First.Compare(b.First) })
		if g.rows != nil {
			out.Rows = &rowsRecord{g.rows.corrected, g.rows.uncorrected, g.rows.at}
		}
		r.GPUs = append(r.GPUs, out)
	}
	return r
}

// gist is the record without what changes by itself: another one is worth a write.
func (r record) gist() string {
	r.Hung, r.GPUs = time.Time{}, slices.Clone(r.GPUs)
	for i := range r.GPUs {
		g := &r.GPUs[i]
		g.Xids, g.FlapUntil, g.Erred = slices.Clone(g.Xids), time.Time{}, time.Time{}
		for k := range g.Xids {
			g.Xids[k].Count, g.Xids[k].Last, g.Xids[k].Told = 0, time.Time{}, time.Time{}
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

var errRecord = errors.New("it is no record of GPUs' health that this agent can read")

// parse reads a record strictly, and holds it to its bounds.
func parse(data []byte) (record, error) {
	var r record
	if len(data) > longestRecord {
		return r, fmt.Errorf("%w: it is longer than %d bytes", errRecord, longestRecord)
	}
	strict, err := strictjson.UnmarshalStrict(data, &r)
	if err := errors.Join(append(strict, err)...); err != nil {
		return record{}, fmt.Errorf("%w: %s", errRecord, legible.Cut(err.Error(), 256))
	}
	if r.Version != recordVersion || len(r.GPUs) > mostGPUs || !legal(r.Boot, 64) || !legal(r.Told, 64<<10) {
		return record{}, fmt.Errorf("%w: version %d, %d GPUs", errRecord, r.Version, len(r.GPUs))
	}
	for _, g := range r.GPUs {
		if err := g.check(); err != nil {
			return record{}, fmt.Errorf("%w: %w", errRecord, err)
		}
	}
	return r, nil
}

func legal(text string, longest int) bool { return len(text) <= longest && legible.Text(text) == text }

func (g gpuRecord) check() error {
	if !legal(g.UUID, 80) || !legal(g.PCI, 32) || g.Index < -1 || g.Index > 1<<10 {
		return fmt.Errorf("a GPU is not one: index %d", g.Index)
	}
	if len(g.Findings) > len(reasons) || len(g.Xids) > 2*mostXids || len(g.Rises) > flapRises {
		return fmt.Errorf("GPU %d has %d findings, %d Xids and %d times", g.Index, len(g.Findings), len(g.Xids), len(g.Rises))
	}
	for _, f := range g.Findings {
		if rank(config.Reason(f.Reason)) == len(reasons) || !legal(f.Action, 32) || !legal(f.Detail, 256) || len(f.Instances) > 16 {
			return fmt.Errorf("GPU %d has a finding %q", g.Index, legible.Cut(f.Reason, 64))
		}
	}
	return nil
}

// recall goes on from a record. What only a boot keeps is not taken over from another one: memory that is used up stays so.
func (n *node) recall(r record, boot string) {
	same := boot != "" && r.Boot == boot
	for _, was := range r.GPUs {
		g := newGPU(nvml.UUID(was.UUID), was.PCI, was.Index)
		g.old, g.failed, g.sram, g.unrepairable = was.Old, was.Failed, was.SRAM, was.Unrepairable
		if was.Rows != nil {
			g.rows = &rowsRead{was.Rows.Corrected, was.Rows.Uncorrected, was.Rows.Read}
		}
		if same {
			g.recall(was)
		}
		n.gpus = append(n.gpus, g)
	}
	if same {
		n.hung, n.away = r.Hung, r.Away
	}
}

func (g *gpu) recall(was gpuRecord) {
	g.pending, g.erredAt, g.asked, g.rises, g.flapUntil = was.Pending, was.Erred, was.Asked, was.Rises, was.FlapUntil
	g.read = true // with what shows a reset
	g.reading.ECC.UncorrectedVolatile = nvml.Told(was.Errors)
	g.reading.Action = nvml.Told(nvml.RecoveryAction(was.Action))
	for _, f := range was.Findings {
		reason := config.Reason(f.Reason)
		g.lost = g.lost || reason == config.ReasonGPULost
		g.missing = g.missing || reason == config.ReasonGPUMissing
		g.findings = append(g.findings, finding{reason: reason, action: Action(f.Action), detail: f.Detail, instances: f.Instances, since: f.Since})
	}
	for _, x := range was.Xids {
		g.xids[xidKey{x.Xid, x.GI, x.CI}] = &occurrence{count: x.Count, first: x.First, last: x.Last, holds: x.Holds, told: x.Told}
	}
}

// In is the Store below a directory of the host, beside the host's record.
func In(stateDir string) Store { return hostfile.In(stateDir, recordName, longestRecord) }
