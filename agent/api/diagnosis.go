package api

import (
	"encoding/json"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
)

// Diagnosis is what can be said of a node that is kept from pods, or may be: the facts in the order in which a person
// would check them, what follows from them, and who has to act. It is plain data. What was not seen is in Unseen, and
// nothing is concluded from its absence.
type Diagnosis struct {
	Node      string        `json:"node"`
	At        time.Time     `json:"at"`
	Kubelet   KubeletSeen   `json:"kubelet"`
	Agent     AgentSeen     `json:"agent"`
	Cordon    *CordonSeen   `json:"cordon,omitempty"` // nil: pods may be scheduled, as far as a cordon goes
	Owed      *Owed         `json:"owed,omitempty"`   // from the journal
	Left      []string      `json:"left,omitempty"`   // what is ours and in no journal
	Others    []ToolSeen    `json:"others,omitempty"` // other tools at work on the node
	Taints    []TaintSeen   `json:"taints,omitempty"`
	Pods      []PodSeen     `json:"pods,omitempty"`
	Processes []ProcessSeen `json:"processes,omitempty"` // that hold what the plan changes
	Operands  []OperandSeen `json:"operands,omitempty"`  // that are paused
	GPUs      GPUsSeen      `json:"gpus"`
	Capacity  []string      `json:"capacity,omitempty"` // how hardware, kubelet and node disagree
	Failed    *Failure      `json:"failed,omitempty"`   // a wish that is not tried again
	Unseen    []string      `json:"unseen,omitempty"`   // what could not be looked at, and why
	Causes    []Finding     `json:"causes"`
	Outcome   Outcome       `json:"outcome"`
}

// KubeletSeen is whether the node's kubelet is at work.
type KubeletSeen struct {
	Ready  corev1.ConditionStatus `json:"ready"`
	Since  time.Time              `json:"since,omitzero"`
	Says   string                 `json:"says,omitempty"`   // where it is not ready
	Silent string                 `json:"silent,omitempty"` // why it does not say which pod has which device
}

// AgentSeen is whether an agent runs on the machine, and what it said last.
type AgentSeen struct {
	Runs    bool          `json:"runs"`
	Wrote   time.Time     `json:"wrote,omitzero"`
	Phase   Phase         `json:"phase,omitempty"`
	Reason  config.Reason `json:"reason,omitempty"`
	Message string        `json:"message,omitempty"`
}

// CordonSeen is whose the cordon is.
type CordonSeen struct {
	By    string    `json:"by"` // field manager; empty if nobody knows
	Ours  bool      `json:"ours"`
	Kept  bool      `json:"kept,omitempty"` // people have asked to keep it
	Since time.Time `json:"since,omitzero"`
}

// Owed is the journal, for people.
type Owed struct {
	Unreadable  string            `json:"unreadable,omitempty"` // why there is nothing else
	Operation   string            `json:"operation,omitempty"`
	Target      string            `json:"target,omitempty"`
	Since       time.Time         `json:"since,omitzero"`
	Phase       Phase             `json:"phase,omitempty"`
	Deadline    time.Time         `json:"deadline,omitzero"` // of the pods that have to leave
	Cordon      bool              `json:"cordon"`
	WasCordoned bool              `json:"wasCordoned"`
	Paused      map[string]string `json:"paused,omitempty"`
	Stopped     []string          `json:"stopped,omitempty"`
	Before      []StatusGPU       `json:"before,omitempty"`
	Undo        *Failure          `json:"undo,omitempty"`
}

// ToolSeen is another tool at work on the node.
type ToolSeen struct {
	Tool    string    `json:"tool"`
	Sign    string    `json:"sign"` // by which it is recognised
	Since   time.Time `json:"since,omitzero"`
	Cordons bool      `json:"cordons"`        // it keeps pods off the node until it is done
	Planned bool      `json:"planned"`        // it has announced something, and begun nothing
	Ends    string    `json:"ends,omitempty"` // what ends it
}

// TaintSeen is a taint of a node that keeps pods away and that gpuslice has a word on.
type TaintSeen struct {
	Key    string             `json:"key"`
	Effect corev1.TaintEffect `json:"effect"`
	Since  time.Time          `json:"since,omitzero"`
	Means  string             `json:"means"`
}

// PodSeen is a pod that holds a GPU, or has to leave.
type PodSeen struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	Devices   []string  `json:"devices,omitempty"` // "GPU 0" or "GPU 0 1g.10gb@3"; "unknown"
	FoundBy   []string  `json:"foundBy,omitempty"`
	Leaves    bool      `json:"leaves"`          // the plan needs it to leave
	State     string    `json:"state,omitempty"` // of one that leaves: one of drain's, or MayGo
	Budget    string    `json:"budget,omitempty"`
	Message   string    `json:"message,omitempty"`
	Since     time.Time `json:"since,omitzero"`
}

// ProcessSeen is a process that holds a GPU that the plan changes, outside of the pods that leave.
type ProcessSeen struct {
	PID     int      `json:"pid"`
	Name    string   `json:"name"` // with the pod, unit or container that it is of
	Holds   []string `json:"holds"`
	FoundBy []string `json:"foundBy"`
	Unit    string   `json:"unit,omitempty"`
	Remedy  string   `json:"remedy,omitempty"`
}

// OperandSeen is a label by which an operand is kept away.
type OperandSeen struct {
	Label string `json:"label"`
	Value string `json:"value"`
	By    string `json:"by"`
	Owed  bool   `json:"owed"` // the journal holds what it was before
}

// GPUsSeen is what the labels ask for, and what is left to do.
type GPUsSeen struct {
	Unasked string      `json:"unasked,omitempty"` // which configs of the device plugin there are that nothing asks for
	Asked   string      `json:"asked,omitempty"`
	Label   string      `json:"label,omitempty"`
	Refused string      `json:"refused,omitempty"` // why it cannot be
	Steps   []string    `json:"steps,omitempty"`
	Now     []StatusGPU `json:"now,omitempty"`
}

// Finding is one cause for which the node is as it is.
type Finding struct {
	Cause    Cause  `json:"cause"`
	Evidence string `json:"evidence"`
	Agent    string `json:"agent"`             // what the agent does by itself
	You      string `json:"you,omitempty"`     // what a person can do
	Command  string `json:"command,omitempty"` // to be pasted
	Waits    bool   `json:"waits"`             // the node is not given back before somebody has done it
}

// Verdict is who has to act.
type Verdict string

// The verdicts.
const (
	// VerdictFree: pods may be scheduled, and nothing of ours is on the node.
	VerdictFree Verdict = "Free"
	// VerdictGivesBack: the agent gives the node back by itself.
	VerdictGivesBack Verdict = "GivesBack"
	// VerdictWaitsForYou: it cannot, before somebody has done something.
	VerdictWaitsForYou Verdict = "WaitsForYou"
	// VerdictNotOurs: nothing of ours keeps pods away. Somebody else does.
	VerdictNotOurs Verdict = "NotOurs"
	// VerdictUnknown: too little could be seen.
	VerdictUnknown Verdict = "Unknown"
)

// Outcome is the bottom line.
type Outcome struct {
	Verdict Verdict  `json:"verdict"`
	Within  Duration `json:"within,omitempty"` // of VerdictGivesBack
	Text    string   `json:"text"`
}

// Duration is a time.Duration that JSON shows as people write it.
type Duration time.Duration

// MarshalJSON writes "33m0s".
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

// UnmarshalJSON reads what MarshalJSON writes.
func (d *Duration) UnmarshalJSON(text []byte) error {
	var s string
	if err := json.Unmarshal(text, &s); err != nil {
		return err
	}
	parsed, err := time.ParseDuration(s)
	*d = Duration(parsed)
	return err
}
