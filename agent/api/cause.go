package api

// Cause is why a node is kept from pods, or from the config that is asked of it.
type Cause string

// Causes of what is under way.
const (
	// CauseChangeUnderWay: nothing is stuck. An agent is at work, and the node is fenced for that.
	CauseChangeUnderWay Cause = "ChangeUnderWay"
	// CauseAgentDiedInDrain: a change has fenced the node, pods have yet to leave, and no agent runs.
	CauseAgentDiedInDrain Cause = "AgentDiedInDrain"
	// CauseAgentDiedInChange: the pods have left, the GPUs or the capacity are not as they shall be, and no agent runs.
	CauseAgentDiedInChange Cause = "AgentDiedInChange"
	// CauseRebootInTheMiddle: the node was booted since the change began.
	CauseRebootInTheMiddle Cause = "RebootInTheMiddle"
	// CauseRebootAwaited: a MIG mode is pending, and only a reboot makes it current.
	CauseRebootAwaited Cause = "RebootAwaited"
	// CauseWishGone: nobody asks any more for what the change was for, or what is asked for cannot be.
	CauseWishGone Cause = "WishGone"
	// CauseChangeFailed: the change was given up.
	CauseChangeFailed Cause = "ChangeFailed"
	// CauseJournalUnreadable: a newer agent wrote the journal, or somebody has edited it.
	CauseJournalUnreadable Cause = "JournalUnreadable"
)

// Causes for which a change does not come to its end.
const (
	// CauseNotAllowedYet: a change waits for its window, for its turn, or for people.
	CauseNotAllowedYet Cause = "NotAllowedYet"
	// CauseBudgetBlocks: a PodDisruptionBudget does not let a pod go.
	CauseBudgetBlocks Cause = "BudgetBlocks"
	// CausePodNotEvictable: a pod cannot be evicted for another reason, as a static one.
	CausePodNotEvictable Cause = "PodNotEvictable"
	// CauseRuleWaits: a rule of the settings lets a pod end by itself for a time.
	CauseRuleWaits Cause = "RuleWaits"
	// CausePolicyRefuses: the settings say that a pod is not to be sent away.
	CausePolicyRefuses Cause = "PolicyRefuses"
	// CausePodKeepsTerminating: a pod is past its grace and does not go.
	CausePodKeepsTerminating Cause = "PodKeepsTerminating"
	// CauseClaimDriverGone: such a pod has resource claims, and the driver that has to unprepare them is not there.
	CauseClaimDriverGone Cause = "ClaimDriverGone"
	// CauseNodeNotReady: kubelet is away, so that pods do not go and nothing can be proven.
	CauseNodeNotReady Cause = "NodeNotReady"
	// CauseProcessHoldsGPU: a process of no pod that leaves holds what the plan changes.
	CauseProcessHoldsGPU Cause = "ProcessHoldsGPU"
	// CauseDriverAway: NVIDIA's driver is not loaded, does not answer, or is being upgraded.
	CauseDriverAway Cause = "DriverAway"
	// CauseCapacityMissing: kubelet does not offer what the GPUs have.
	CauseCapacityMissing Cause = "CapacityMissing"
)

// Causes of a cordon, a taint or a label that belongs to nothing that is under way.
const (
	// CauseOwnCordonLeft: a cordon or a taint is ours, and no journal says what it is for.
	CauseOwnCordonLeft Cause = "OwnCordonLeft"
	// CauseKeepCordoned: people have asked that the node stays cordoned.
	CauseKeepCordoned Cause = "KeepCordoned"
	// CauseCordonedByPerson: somebody has cordoned the node by hand.
	CauseCordonedByPerson Cause = "CordonedByPerson"
	// CauseCordonedByTool: another tool has.
	CauseCordonedByTool Cause = "CordonedByTool"
	// CauseUnschedulableTaintLeft: the node is not cordoned, and still has the taint of a cordon.
	CauseUnschedulableTaintLeft Cause = "UnschedulableTaintLeft"
	// CauseOperandsPaused: the labels of operands are paused and nobody seems to be at work, so that there are no GPUs on a
	// node that takes pods.
	CauseOperandsPaused Cause = "OperandsPaused"
)
