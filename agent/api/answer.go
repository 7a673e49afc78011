package api

import "time"

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
}
