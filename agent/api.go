package agent

import "github.com/gpuslice/gpuslice/agent/api"

// What other programs read of an agent has its names in package api.
type (
	Phase       = api.Phase
	Status      = api.Status
	StatusGPU   = api.StatusGPU
	Failure     = api.Failure
	Answer      = api.Answer
	Diagnosis   = api.Diagnosis
	KubeletSeen = api.KubeletSeen
	AgentSeen   = api.AgentSeen
	CordonSeen  = api.CordonSeen
	Owed        = api.Owed
	ToolSeen    = api.ToolSeen
	TaintSeen   = api.TaintSeen
	PodSeen     = api.PodSeen
	ProcessSeen = api.ProcessSeen
	OperandSeen = api.OperandSeen
	GPUsSeen    = api.GPUsSeen
	Finding     = api.Finding
	Cause       = api.Cause
	Verdict     = api.Verdict
	Outcome     = api.Outcome
	Duration    = api.Duration

	noReset  = api.NoReset
	askedFor = api.AskedFor
	took     = api.Took
)

// The constants of those types.
const (
	PhaseIdle                   = api.PhaseIdle
	PhaseWaiting                = api.PhaseWaiting
	PhaseDraining               = api.PhaseDraining
	PhaseApplying               = api.PhaseApplying
	PhaseVerifying              = api.PhaseVerifying
	PhaseRollingBack            = api.PhaseRollingBack
	PhaseStalled                = api.PhaseStalled
	CauseChangeUnderWay         = api.CauseChangeUnderWay
	CauseAgentDiedInDrain       = api.CauseAgentDiedInDrain
	CauseAgentDiedInChange      = api.CauseAgentDiedInChange
	CauseRebootInTheMiddle      = api.CauseRebootInTheMiddle
	CauseRebootAwaited          = api.CauseRebootAwaited
	CauseWishGone               = api.CauseWishGone
	CauseChangeFailed           = api.CauseChangeFailed
	CauseJournalUnreadable      = api.CauseJournalUnreadable
	CauseNotAllowedYet          = api.CauseNotAllowedYet
	CauseBudgetBlocks           = api.CauseBudgetBlocks
	CausePodNotEvictable        = api.CausePodNotEvictable
	CauseRuleWaits              = api.CauseRuleWaits
	CausePolicyRefuses          = api.CausePolicyRefuses
	CausePodKeepsTerminating    = api.CausePodKeepsTerminating
	CauseClaimDriverGone        = api.CauseClaimDriverGone
	CauseNodeNotReady           = api.CauseNodeNotReady
	CauseProcessHoldsGPU        = api.CauseProcessHoldsGPU
	CauseDriverAway             = api.CauseDriverAway
	CauseCapacityMissing        = api.CauseCapacityMissing
	CauseOwnCordonLeft          = api.CauseOwnCordonLeft
	CauseKeepCordoned           = api.CauseKeepCordoned
	CauseCordonedByPerson       = api.CauseCordonedByPerson
	CauseCordonedByTool         = api.CauseCordonedByTool
	CauseUnschedulableTaintLeft = api.CauseUnschedulableTaintLeft
	CauseOperandsPaused         = api.CauseOperandsPaused
	VerdictFree                 = api.VerdictFree
	VerdictGivesBack            = api.VerdictGivesBack
	VerdictWaitsForYou          = api.VerdictWaitsForYou
	VerdictNotOurs              = api.VerdictNotOurs
	VerdictUnknown              = api.VerdictUnknown
)
