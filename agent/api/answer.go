package api

import (
	"time"

	"github.com/gpuslice/gpuslice/nvml"
)

// Answer is what config.AnnotationPlan says: what a label would do, or how the node is, as config.AnnotationPreview has asked.
type Answer struct {
	For      string    `json:"for"` // the request
	At       time.Time `json:"at"`
	Steps    []string  `json:"steps,omitempty"`
	More     int       `json:"more,omitempty"` // steps beyond those that are listed
	Pods     []string  `json:"pods,omitempty"` // that have to leave, each by namespace and name
	MorePods int       `json:"morePods,omitempty"`
	Reboot   bool      `json:"reboot,omitempty"`  // it takes a reboot of the node, or goes on after one
	Runs     string    `json:"runs,omitempty"`    // when it would begin
	Refused  string    `json:"refused,omitempty"` // why it cannot be, or cannot be told; then nothing else is said
	// Diagnosis is the answer to config.RequestDiagnosis.
	Diagnosis *Diagnosis `json:"diagnosis,omitempty"`
	// Uses are the answer to config.RequestTop, most memory first.
	Uses     []Use `json:"uses,omitempty"`
	MoreUses int   `json:"moreUses,omitempty"` // beyond those that are listed
}

// Use is what one pod has of a GPU, or of one instance of one, and what it makes of it.
type Use struct {
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod"`
	GPU       int       `json:"gpu"` // index
	UUID      nvml.UUID `json:"uuid"`
	Instance  string    `json:"instance,omitempty"` // profile and place, as StatusInstance.Is; empty for a GPU that is not cut
	Pods      int       `json:"pods"`               // how many pods have it, this one included
	MemoryMiB int       `json:"memoryMiB"`          // of this pod's processes there
	UsedMiB   int       `json:"usedMiB"`            // of all pods and others there
	TotalMiB  int       `json:"totalMiB"`
	// Busy is the percentage of the last minutes in which the pod's processes computed there; nil where it cannot be had, for which
	// Unknown says why. That is not 0: such a pod may be as busy as any.
	Busy    *float64 `json:"busy,omitempty"`
	Unknown string   `json:"unknown,omitempty"`
	// Since is when the agent first saw the pod have it; an agent that was started later says so from its start on.
	Since time.Time `json:"since,omitzero"`
}
