package api

import (
	"encoding/json"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Diagnosis explains a node that takes no pods, or may not. It has the facts in the order of a user's checks, the conclusions, and whether a
// user has to act. It is plain data. Unseen lists what the agent could not see: it concludes nothing from the absence of that.
type Diagnosis struct {
	Node           string          `json:"node"`
	At             time.Time       `json:"at"`
	Kubelet        KubeletSeen     `json:"kubelet"`
	Agent          AgentSeen       `json:"agent"`
	Cordon         *CordonSeen     `json:"cordon,omitempty"`         // nil if the node is not cordoned
	PendingRestore *PendingRestore `json:"pendingRestore,omitempty"` // from the journal
	Left           []string        `json:"left,omitempty"`           // marks of the agent that are in no journal
	Others         []ToolSeen      `json:"others,omitempty"`         // other tools at work on the node
	Taints         []TaintSeen     `json:"taints,omitempty"`
	Pods           []PodSeen       `json:"pods,omitempty"`
	Processes      []ProcessSeen   `json:"processes,omitempty"` // processes that hold what the plan changes, and others that compute on a GPU
	Operands       []OperandSeen   `json:"operands,omitempty"`  // operands that are paused
	GPUs           GPUsSeen        `json:"gpus"`
	Owner          Owner           `json:"owner,omitempty"`    // who advertises the GPUs; empty if a device plugin does, or nothing
	Capacity       []string        `json:"capacity,omitempty"` // how hardware, kubelet and node disagree
	Failed         *Failure        `json:"failed,omitempty"`   // a request that the agent does not try again
	Unseen         []string        `json:"unseen,omitempty"`   // what the agent could not see, and why
	Causes         []Finding       `json:"causes"`
	Outcome        Outcome         `json:"outcome"`
}

// KubeletSeen is whether the node's kubelet is at work.
type KubeletSeen struct {
	Ready  corev1.ConditionStatus `json:"ready"`
	Since  time.Time              `json:"since,omitzero"`
	Says   string                 `json:"says,omitempty"`   // message of the condition Ready, if that is not True
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

// CordonSeen is the node's cordon.
type CordonSeen struct {
	By    string    `json:"by"` // field manager; empty if it is not known
	Ours  bool      `json:"ours"`
	Kept  bool      `json:"kept,omitempty"` // a user has asked to keep it
	Since time.Time `json:"since,omitzero"`
}

// PendingRestore is the journal for users: everything that the agent must restore.
type PendingRestore struct {
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
	Sign    string    `json:"sign"` // the mark on the node that shows it
	Since   time.Time `json:"since,omitzero"`
	Cordons bool      `json:"cordons"`        // it keeps pods off the node until it is done
	Planned bool      `json:"planned"`        // it has announced its work, and not begun it
	Ends    string    `json:"ends,omitempty"` // what ends it
}

// TaintSeen is a taint of a node that keeps pods away and that gpuslice sets, lifts or explains.
type TaintSeen struct {
	Key    string             `json:"key"`
	Effect corev1.TaintEffect `json:"effect"`
	Since  time.Time          `json:"since,omitzero"`
	Means  string             `json:"means"`
	// Startup: the node was registered with it, and the agent removes it when the capacity is verified.
	Startup bool `json:"startup,omitempty"`
}

// PodSeen is a pod that holds a GPU, or has to leave.
type PodSeen struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	Devices   []string  `json:"devices,omitempty"` // "GPU 0" or "GPU 0 1g.10gb@3"; "unknown"
	FoundBy   []string  `json:"foundBy,omitempty"`
	Leaves    bool      `json:"leaves"`            // the plan needs it to leave
	Operand   bool      `json:"operand,omitempty"` // it advertises or watches the GPUs, or a label deploys it: it uses none for itself, and plans have steps of their own for it
	State     string    `json:"state,omitempty"`   // if it has to leave: a state of package drain, or MayGo; Withdrawn if it holds devices that kubelet allocates to others, and no plan makes it leave
	Budget    string    `json:"budget,omitempty"`
	Message   string    `json:"message,omitempty"`
	Since     time.Time `json:"since,omitzero"`
}

// ProcessSeen is a process that holds a GPU that the plan changes, outside of the pods that leave.
type ProcessSeen struct {
	PID     int      `json:"pid"`
	Name    string   `json:"name"` // with its pod, unit or container
	Holds   []string `json:"holds"`
	FoundBy []string `json:"foundBy"`
	Unit    string   `json:"unit,omitempty"`
	Remedy  string   `json:"remedy,omitempty"`
}

// OperandSeen is a label that pauses an operand.
type OperandSeen struct {
	Label          string `json:"label"`
	Value          string `json:"value"`
	By             string `json:"by"`
	PendingRestore bool   `json:"pendingRestore"` // the journal holds the former value
}

// GPUsSeen is the request of the labels, and the steps that are left.
type GPUsSeen struct {
	Unasked string      `json:"unasked,omitempty"` // existing configs of the device plugin that no label or setting names
	Asked   string      `json:"asked,omitempty"`
	Label   string      `json:"label,omitempty"`
	Refused string      `json:"refused,omitempty"` // why it is impossible
	Steps   []string    `json:"steps,omitempty"`
	Now     []StatusGPU `json:"now,omitempty"`
}

// Finding is one cause of the node's state.
type Finding struct {
	Cause    Cause     `json:"cause"`
	GPU      nvml.UUID `json:"gpu,omitempty"` // of a cause that is about one GPU
	Evidence string    `json:"evidence"`
	Agent    string    `json:"agent"`             // what the agent does by itself
	You      string    `json:"you,omitempty"`     // what a user can do
	Command  string    `json:"command,omitempty"` // for the user to paste
	Waits    bool      `json:"waits"`             // the agent cannot restore the node before a user has done it
}

// Verdict is whether the agent or a user has to act.
type Verdict string

// The verdicts.
const (
	// VerdictFree: the node takes pods, and no mark of the agent is on it.
	VerdictFree Verdict = "Free"
	// VerdictGivesBack: the agent restores the node by itself.
	VerdictGivesBack Verdict = "GivesBack"
	// VerdictWaitsForYou: the agent cannot restore the node before a user has done something.
	VerdictWaitsForYou Verdict = "WaitsForYou"
	// VerdictNotOurs: another tool or a user keeps pods away, not the agent.
	VerdictNotOurs Verdict = "NotOurs"
	// VerdictUnknown: the agent could see too little.
	VerdictUnknown Verdict = "Unknown"
)

// Outcome is the conclusion of a diagnosis.
type Outcome struct {
	Verdict Verdict  `json:"verdict"`
	Within  Duration `json:"within,omitempty"` // of VerdictGivesBack
	Text    string   `json:"text"`
}

// Duration is a time.Duration that JSON shows as Go writes it: "33m0s".
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
