package agent

import (
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// journalVersion is the version of the journal's format. A higher one was written by a newer agent.
const journalVersion = 1

// Journal is what must be given back to the node: an annotation that is written before the first change and goes in the
// same write as the last one. It holds no progress; how far a change has come is observed, never remembered.
//
// It consists of types of this package alone, so that no library's update can make an old journal unreadable.
type Journal struct {
	Version          int       `json:"version"`
	Operation        string    `json:"operation"`            // identifies this change in the logs of all agents that work on it
	Target           string    `json:"target"`               // the config that was asked for when it began
	BootID           string    `json:"bootID"`               // the node's boot when it began
	Started          time.Time `json:"started"`              // when it began
	Cordoned         bool      `json:"cordoned"`             // the change has fenced the node
	WasUnschedulable bool      `json:"wasUnschedulable"`     // somebody had cordoned the node before us
	Proven           bool      `json:"proven"`               // kubelet offered what the GPUs had when it began
	Previous         []cut     `json:"previous"`             // how the GPUs that it changes were cut
	Operands         []string  `json:"operands"`             // UIDs of the device plugin pods from before the change
	Startup          *startup  `json:"startup,omitempty"`    // the taint that the node had been registered with
	NoReset          *noReset  `json:"noReset,omitempty"`    // which GPUs the driver has refused to reset
	Reboots          []string  `json:"reboots,omitempty"`    // boots in which a reboot was asked for
	RebootAsked      time.Time `json:"rebootAsked,omitzero"` // when the last of them was
	Undo             *Failure  `json:"undo,omitempty"`       // the change has failed: back to Previous
}

// cut is how one GPU was cut.
type cut struct {
	GPU        nvml.UUID `json:"gpu"`
	MIG        bool      `json:"mig"`
	Persistent bool      `json:"persistent,omitempty"` // it was in persistence mode
	Foreign    bool      `json:"foreign,omitempty"`    // nothing is asked of it, but a reboot of ours takes its instances away
	Instances  []piece   `json:"instances,omitempty"`
}

// startup is the taint of a node that has just been registered, without its key.
type startup struct {
	Value  string `json:"value,omitempty"`
	Effect string `json:"effect"`
}

func (s startup) taint() corev1.Taint {
	return corev1.Taint{Key: config.TaintNotReady, Value: s.Value, Effect: corev1.TaintEffect(s.Effect)}
}

// noReset names the GPUs that the driver has refused to reset during one boot of the node.
type noReset struct {
	Boot string      `json:"boot"`
	GPUs []nvml.UUID `json:"gpus"`
}

// piece is one instance of a cut.
type piece struct {
	Profile string `json:"profile"`
	Start   int    `json:"start"`
	Size    int    `json:"size"`
	Compute string `json:"compute,omitempty"`
}

// note adds how the GPU is cut, unless that is in the journal already. Half-made instances are not worth giving back.
func (j *Journal) note(gpu nvml.GPU) {
	for i := range j.Previous {
		if j.Previous[i].GPU == gpu.UUID { // persistence mode may have been turned on since; only we turn it off
			j.Previous[i].Persistent = j.Previous[i].Persistent || gpu.Persistent
			return
		}
	}
	c := cut{GPU: gpu.UUID, MIG: gpu.Enabled, Persistent: gpu.Persistent}
	for _, i := range gpu.Instances {
		if !i.HalfMade() {
			c.Instances = append(c.Instances, piece{i.Profile, i.Start, i.Size, i.Compute})
		}
	}
	j.Previous = append(j.Previous, c)
}

// cuts are the GPUs whose former cut is in the journal.
func (j *Journal) cuts() map[nvml.UUID]bool {
	out := map[nvml.UUID]bool{}
	for _, c := range j.Previous {
		out[c.GPU] = true
	}
	return out
}

// persistent are the GPUs that were in persistence mode.
func (j *Journal) persistent() map[nvml.UUID]bool {
	out := map[nvml.UUID]bool{}
	for _, c := range j.Previous {
		out[c.GPU] = c.Persistent
	}
	return out
}

// previous is the journal's record as a target of the planner. GPUs that were lost meanwhile are left out: the others
// must not wait for them.
func (j *Journal) previous(gpus []nvml.GPU) plan.Desired {
	want := plan.Desired{}
	for _, c := range j.Previous {
		want[c.GPU] = c.target()
	}
	for _, gpu := range gpus {
		if gpu.Lost {
			delete(want, gpu.UUID)
		}
	}
	return want
}

// target is the cut as the planner brings it back.
func (c cut) target() plan.Target {
	target := plan.Target{Wish: nvml.Wish{MIG: c.MIG}, Undo: true}
	for _, p := range c.Instances {
		target.Exact = append(target.Exact,
			nvml.Placed{Profile: p.Profile, Span: nvml.Span{Start: p.Start, Size: p.Size}, Compute: p.Compute})
	}
	return target
}

// ranBefore reports whether the pod was there before the change.
func (j *Journal) ranBefore(uid string) bool {
	for _, o := range j.Operands {
		if o == uid {
			return true
		}
	}
	return false
}

func (j *Journal) encode() (string, error) {
	b, err := json.Marshal(j)
	if err != nil {
		return "", fmt.Errorf("encoding the journal: %w", err)
	}
	return string(b), nil
}

// parseJournal reads the annotation; nil is the journal of a node to which nothing is owed.
func parseJournal(annotation string) (*Journal, error) {
	if annotation == "" {
		return nil, nil
	}
	var j Journal
	if err := json.Unmarshal([]byte(annotation), &j); err != nil {
		return nil, fmt.Errorf("reading the journal: %w", err)
	}
	if j.Version < 1 || j.Version > journalVersion {
		return nil, fmt.Errorf("reading the journal: version %d, this agent knows 1 to %d", j.Version, journalVersion)
	}
	return &j, nil
}
