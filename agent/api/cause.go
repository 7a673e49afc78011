package api

// Cause is why a node takes no pods, or does not have the config that its labels request. Besides those below, it is the
// reason of GPUUnhealthy for a GPU that cannot be used or trusted: GPULost, XidCritical.
type Cause string

// Causes of a node with a journal.
const (
	// CauseChangeUnderWay: an agent is at work, and has fenced the node for that. Nothing is stuck.
	CauseChangeUnderWay Cause = "ChangeUnderWay"
	// CauseAgentDiedInDrain: a change has fenced the node, pods have yet to leave, and no agent runs.
	CauseAgentDiedInDrain Cause = "AgentDiedInDrain"
	// CauseAgentDiedInChange: the pods have left, the GPUs or the capacity are not yet as desired, and no agent runs.
	CauseAgentDiedInChange Cause = "AgentDiedInChange"
	// CauseRebootInTheMiddle: the node was booted since the change began.
	CauseRebootInTheMiddle Cause = "RebootInTheMiddle"
	// CauseRebootAwaited: a MIG mode is pending, and only a reboot makes it current.
	CauseRebootAwaited Cause = "RebootAwaited"
	// CauseRequestGone: no label requests the config of the change any more, or that config is impossible.
	CauseRequestGone Cause = "RequestGone"
	// CauseChangeFailed: the agent has given up the change.
	CauseChangeFailed Cause = "ChangeFailed"
	// CauseJournalUnreadable: a newer agent wrote the journal, or a user has edited it.
	CauseJournalUnreadable Cause = "JournalUnreadable"
)

// Causes that keep a change from beginning, or from ending.
const (
	// CauseNotAllowedYet: a change waits for its window, for a slot of its pool, or for users who keep the node from changes.
	CauseNotAllowedYet Cause = "NotAllowedYet"
	// CauseRequestRefused: the agent refuses what the labels request, and changes nothing for it.
	CauseRequestRefused Cause = "RequestRefused"
	// CauseBudgetBlocks: a PodDisruptionBudget does not let a pod go.
	CauseBudgetBlocks Cause = "BudgetBlocks"
	// CausePodNotEvictable: a pod cannot be evicted for another reason, as a static one.
	CausePodNotEvictable Cause = "PodNotEvictable"
	// CauseRuleWaits: a rule of the settings lets a pod end by itself for a time.
	CauseRuleWaits Cause = "RuleWaits"
	// CausePolicyRefuses: the settings forbid the agent to evict a pod.
	CausePolicyRefuses Cause = "PolicyRefuses"
	// CausePodKeepsTerminating: a pod is past its grace period and does not go.
	CausePodKeepsTerminating Cause = "PodKeepsTerminating"
	// CauseClaimDriverGone: such a pod has resource claims, and the driver that has to unprepare them is not running.
	CauseClaimDriverGone Cause = "ClaimDriverGone"
	// CauseNodeNotReady: kubelet is not running, so that pods do not end and the agent cannot verify the capacity.
	CauseNodeNotReady Cause = "NodeNotReady"
	// CauseProcessHoldsGPU: a process that belongs to no leaving pod holds what the plan changes.
	CauseProcessHoldsGPU Cause = "ProcessHoldsGPU"
	// CauseDriverAway: NVIDIA's driver is not loaded, does not answer, or is being upgraded.
	CauseDriverAway Cause = "DriverAway"
	// CauseCapacityMissing: kubelet does not advertise everything that the GPUs have.
	CauseCapacityMissing Cause = "CapacityMissing"
)

// Causes of a cordon, a taint or a label that belongs to no change that is under way.
const (
	// CauseOwnCordonLeft: a cordon or a taint is the agent's, and there is no journal.
	CauseOwnCordonLeft Cause = "OwnCordonLeft"
	// CauseKeepCordoned: a user has asked that the node stays cordoned.
	CauseKeepCordoned Cause = "KeepCordoned"
	// CauseCordonedByPerson: a user has cordoned the node by hand.
	CauseCordonedByPerson Cause = "CordonedByPerson"
	// CauseCordonedByTool: another tool has cordoned the node.
	CauseCordonedByTool Cause = "CordonedByTool"
	// CauseUnschedulableTaintLeft: the node is not cordoned, and still has the taint of a cordon.
	CauseUnschedulableTaintLeft Cause = "UnschedulableTaintLeft"
	// CauseOperandsPaused: the labels of operands are paused and no tool seems to be at work, so that no plugin advertises GPUs on a
	// node that takes pods.
	CauseOperandsPaused Cause = "OperandsPaused"
)
