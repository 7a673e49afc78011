package main

var faults = []fault{
	{
		"an owner reference to a DaemonSet that is not there is believed", "return a.observers.sets.Believe(call, node, pods)", "return pods, nil",
		"TestATenantsPodIsNoDevicePlugin",
	},
	{
		"what an agent has left without a journal is not given back", "Orphaned: seen.Leftovers.Orphan.Exists()", "Orphaned: false",
		"TestWhatAnAgentHasLeftIsGivenBack",
	},
	{
		"the run goes on with a driver that was replaced", "a.driverReplaced = errors.Is(err, nvml.ErrReplaced)",
		"a.driverReplaced = errors.Is(err, nvml.ErrReplaced) && false",
		"TestAReplacedDriverEndsTheRunSoThatANewProcessLoadsIt",
	},
	{
		"a preview does not ask the budgets", "err := a.actors.fencing.Foresee(ctx, in)", "var err error",
		"TestAPreviewSaysWhatTheAgentThenDoes",
	},
	{
		"a key of the device plugin's config that cannot be written again holds up nothing",
		"if err := a.actors.handover.RequireKey(in); err != nil {", "if err := a.actors.handover.RequireKey(in); err != nil && false {",
		"TestAKeyThatCannotBeWrittenAgainHoldsUpWhatNeedsIt",
	},
	{
		"a reboot takes the instances of GPUs that the label does not name", "want.Restore(seen)\n\t\terr =", "err =",
		"TestARebootByTheAgentTakesNothingFromOtherGPUs",
	},
	{
		"the deadline for capacity runs while the agent cannot see it", "a.actors.verifier.Pause() // the deadline", "// the deadline",
		"TestADriverUpgradeDoesNotUseUpTheTimeForCapacity",
	},
	{
		"labels that a MIG manager has paused are given back beside it", "a.observers.leftovers.SawMIGManager()", "",
		"TestWhatAMIGManagerHasPausedIsLeftToItForAMinute",
	},
	{
		"a step of the host's clock moves the deadlines of a change under way", "if seen.Journal != nil {\n\t\treturn\n\t}\n\tstep := ", "step := ",
		"TestAStepOfTheClockInAnyPhaseHarmsNoChange",
	},
	{
		"the next agent performs a step before it corrects a condition that is True", "if !resumes || ready == nil", "if !resumes || true || ready == nil",
		"TestAnAgentThatIsKilledAfterEachStepReportsWhatItDoes",
	},
	{
		"a pod that has GPUs by admin access alone is not paused before a mode changes", "&& !claimed.AsAdmin(pod) {", "&& (true || !claimed.AsAdmin(pod)) {",
		"TestAPodWithAdminAccessIsPausedBeforeAModeChanges",
	},
	{
		"a GPU that NVIDIA's DRA driver cuts is drained for a reset", "if !seen.Owner.MayCut() {\n\t\tseen.Sick", "if !seen.Owner.MayCut() && false {\n\t\tseen.Sick",
		"TestAGPUThatTheDRADriverCutsIsNotReset",
	},
	{
		"a kubelet that has just started and lists no pod is believed", "if assigned.Premature(pods) {", "if assigned.Premature(pods) && false {",
		"TestAKubeletThatHasJustStartedIsNoReasonToEvictFromOtherGPUs",
	},
	{
		"the rules of a GPU that is not well are deleted while the next process does not know its health",
		"if critical, known = a.health.Critical(); !known {", "if critical, known = a.health.Critical(); !known && false {",
		"TestClaimsGetNoDeviceOfAGPUThatIsNotWell",
	},
}
