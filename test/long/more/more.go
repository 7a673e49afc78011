// Package more lists the tests that "make test" leaves to "make test-long".
package more

// Tests are those that "make test" leaves out, as "package: test", each with the test of "make test" that shows most of the same in less time.
// A test in test/repo holds the names to the code.
var Tests = map[string]string{
	"agent: TestEveryGeneratedConfigIsReachedFromEveryOther": "test/geometry: TestRandomWalk",

	"agent: TestEachCallOfTheLibraryFailsOnce":                      "agent: TestAHardwareFailureBringsBackWhatWas",
	"agent: TestACallOfTheLibraryThatHangsIsLeftAloneUntilItIsBack": "agent: TestACallThatHangsIsReportedAndTheChangeGoesOnAfterIt",

	// Why a node is found cordoned.
	"test/node: TestCauseAgentDiedBetweenCordonAndDrainEnd":      "test/node: TestCauseAgentDiedWhileMutating",
	"test/node: TestCauseRebootInTheMiddle":                      "agent: TestAChangeGoesOnAfterAReboot",
	"test/node: TestCausePodTerminatingForEverByAFinalizer":      "drain: TestClusterSaysThatAFinalizerKeepsAPod",
	"test/node: TestCausePodTerminatingForEverWithItsContainers": "drain: TestATerminatingPodSaysWhatKeepsIt",
	"test/node: TestCauseNodeUnreachable":                        "agent: TestWhatARebootTakesAwayIsMadeAgain",
	"test/node: TestCauseDRADriverStoppedBeforeClaimHolders":     "agent: TestTheDriverOfClaimsIsNeverPaused",
	"test/node: TestADRADriverIsKnownByItsDaemonSet":             "agent: TestAPodThatSaysItIsTheDriverOfClaimsKeepsNoOperand",
	"test/node: TestCausePolicyRefusesAPod":                      "drain: TestEvictSaysWhatBecameOfEachRequest",
	"test/node: TestCauseLabelRemovedAndCordonLeft":              "test/node: TestAWithdrawnWishIsUndoneAndACordonStays",
	"test/node: TestCauseAdministratorCordoned":                  "agent: TestACordonOfOthersIsReported",
	"test/node: TestCauseAnotherControllerCordoned":              "agent: TestOtherToolsAreWaitedForByName",
	"test/node: TestCauseOwnCordonWithoutAJournal":               "agent: TestATaintThatNoJournalBelongsToIsTakenAway",
	"test/node: TestCauseUncordonDidNotStick":                    "drain/fence: TestClusterNamesAControllerThatUncordonsAndNotesIt",
	"test/node: TestCauseTaintOutlivesTheCordon":                 "agent: TestATaintThatNoJournalBelongsToIsTakenAway",
	"test/node: TestCauseRepartitionFailedForGood":               "agent: TestAHardwareFailureBringsBackWhatWas",
	"test/node: TestCauseOperandsLeftPaused":                     "agent: TestLabelsOfOperandsAreGivenBackByTheNextAgent",
	"test/node: TestCauseTheWayBackCordonsAgain":                 "agent: TestAnUndoNamesThePodThatKeepsIt",
	"test/node: TestCauseWindowClosedInTheMiddle":                "agent: TestADrainThatOutlastsItsWindowIsPutOff",
	"test/node: TestCauseALeaseIsLostOrItsHolderIsAGhost":        "agent/fleet: TestASlotWhoseNodeIsGoneIsFreeAtOnce",

	// Installing.
	"test/shipped: TestComponentsGoTogetherInEveryOrder":  "test/shipped: TestAssigningByRightStaysWithoutTheAgentsPolicies",
	"test/shipped: TestTheImageIsTheSameWhereverItIsMade": "test/shipped: TestTheImageIsWhatTheDockerfileMakes",

	// What the tests run on, and what they compare with.
	"test/cluster: TestAControlPlaneDiesWithItsParent":                                "test/cluster: TestStopLeavesNoProcessAndNoFile",
	"test/cluster: TestAComponentKilledLaterIsReported":                               "test/cluster: TestAComponentThatDiesIsReportedWithTheEndOfItsLog",
	"test/bench/fleet: TestRequestsAreCountedAsTheAPIServerDoesAndIdleAgentsSendNone": "agent/watched: TestAChangeThatDecidesNothingWakesNoLoop",
	"test/incumbent: TestNVIDIAEmptiesTheGPUsForAnExampleOfAnotherModel":              "test/incumbent: TestAnExampleForAnotherModelIsRefused",
	"test/hardware: TestTheBundleRunsOnSimulatedGPUs":                                 "test/node: TestALabelDrainsRepartitionsAndGivesTheNodeBack",

	// Kubelet's probes.
	"test/node: TestKubeletStartsAnAgentAnewThatStandsStill": "agent/alive: TestPromise14APassThatDoesNotEndIsNoticed",

	// Cordons of others.
	"test/node: TestACordonFromBeforeStaysAndIsNamed":                 "agent: TestACordonFromBeforeStays",
	"test/node: TestACordonThatIsToBeKeptStaysUntilTheAnnotationGoes": "drain/fence: TestFenceGivesTheNodeBackAsItWas",
	"test/node: TestAnotherControllerIsWaitedFor":                     "agent: TestOtherToolsAreWaitedForByName",
	"test/node: TestNothingIsLostBetweenManyWritersOfTheNode":         "agent: TestAChangeComesToItsEndWhileOthersWriteTheNode",
	"test/node: TestAnUncordonInTheMiddle":                            "agent: TestAnUncordonInTheMiddleCallsTheChangeOff",

	// Windows and pools.
	"test/node: TestAMaintenanceFileThatIsEditedInTheMiddle":   "agent: TestAnEditOfTheFileCountsAtOnce",
	"test/node: TestAnAnnotationForcesOneChangeOutOfItsWindow": "agent: TestForceLetsOneChangeBeginOutsideOfItsWindow",
	"test/node: TestAHeldNodeBeginsNothing":                    "agent: TestAHoldKeepsTheNodeFromWhatIsNotBegun",
	"test/node: TestAPoolPausesItselfAfterFailuresInARow":      "agent: TestAPoolPausesItselfAfterTooManyFailures",
	"test/node: TestARollOutGoesOnWithoutTheCommand":           "test/node: TestARollOutEndsWhenAllNodesAreAsAskedOrRefuse",
	"test/node: TestARollOutTellsOfAnotherWish":                "test/node: TestARollOutEndsWhenAllNodesAreAsAskedOrRefuse",

	// Sharing.
	"test/node: TestEachWayOfSharingIsReachedByAProfile":                    "test/node: TestSharingIsHandedToThePluginInEachWay",
	"test/node: TestEachWayOfSharingIsReachedFromEachOther":                 "agent: TestEachSharingIsReachedFromEachOther",
	"test/node: TestSharingThatGivesNoCapacityIsTakenBack":                  "agent: TestCapacityThatNeverComesIsUndone",
	"test/node: TestAConfigByWhichThePluginEndsIsTakenBack":                 "agent: TestAConfigThatThePluginDoesNotRunByIsTakenBack",
	"test/node: TestThePluginOffersWhatItsConfigSays":                       "test/node: TestSharingIsHandedToThePluginInEachWay",
	"test/node: TestConfigsOfGuidesGiveWhatTheyPromise":                     "test/node: TestSharingIsHandedToThePluginInEachWay",
	"test/node: TestEachOverlayIsTheDefaultOfANodeWithoutLabels":            "agent: TestTheSettingsDefaultIsHandedToAConfigManager",
	"test/node: TestAnOverlayIsTheDefaultBesideAConfigManager":              "agent: TestTheSettingsDefaultIsHandedToAConfigManager",
	"test/node: TestAConfigWhoseMIGStrategyHasNoEffectIsRefused":            "agent: TestPromise1APluginThatIsToldNoStrategyIsNotGuessed",
	"test/node: TestAPluginThatIsToldNoMIGStrategyKeepsALabelFromBeginning": "agent: TestPromise1APluginThatIsToldNoStrategyIsNotGuessedForALabelOfMIGAlone",
	"test/node: TestKilledAtEachBorderOfAChangeOfSharingItEndsTheSame":      "agent: TestAnAgentThatForgetsEverythingSharesAllTheSame",
	"test/node: TestOnlyHoldersOfReplicasThatGoLeave":                       "agent: TestHoldersLeaveOnlyWhenTheirReplicaGoes",
	"test/node: TestWrongWishesAboutSharingDisturbNothing":                  "agent: TestASharingThatCannotBeDisturbsNothing",
	"test/node: TestKilledAtAnyInstantItEndsTheSame":                        "test/node: TestKilledAtEachBorderOfAFullChangeItEndsTheSame",

	// Attacks and bounds.
	"test/node: TestPromise16PodsFullOfTextTakeNoMemory":                       "agent/podlist: TestOfALargePodWhatCountsIsKept",
	"test/node: TestPromise16BudgetsFullOfTextTakeNoMemory":                    "agent/wake: TestOfAListTheNamesAreKept",
	"test/node: TestATenantsPodWithAnOwnerThatNobodyCanAskForHoldsUpNoChange":  "drain/holders: TestAPodIsOfADaemonSetThatExists",
	"test/node: TestFilesThatWouldFillTheMemoryAreRefusedAndTheNextWishObeyed": "agent: TestPromise16ThousandsOfMistakesAreToldInOneMessage",
	"test/node: TestConfigsThatNothingPicksAreNamedWithTheLabelThatWould":      "agent: TestConfigsOfThePluginThatNothingAsksForAreNamed",
	"test/node: TestThePoliciesRefuseAnAgentNothing":                           "test/policy: TestOneAgentsTokenIsGoodForItsOwnNodeOnly",
	"test/node: TestUnitsComeBackThoughTheJournalIsTakenAway":                  "agent: TestTheHostIsGivenBackWithoutTheJournal",
	"test/node: TestAnEndlessCountIsRefusedAndTheNextWishObeyed":               "test/node: TestABadWishDisturbsNothing",
	"test/node: TestAChangeEndsDespiteOthersWritesAndAFailingAPIServer":        "agent: TestPromise16AServerThatFailsEverySecondRequestStopsNoChange",

	// The host, its processes and its GPUs.
	"test/node: TestServicesOfTheHostMakeWayForAReset":                        "agent: TestUnitsAreStoppedForAResetAndStartedAgain",
	"test/node: TestTheAgentRebootsAVirtualMachineThroughLogind":              "agent: TestTheAgentRebootsTheNodeItselfAfterTheDrainAndOnce",
	"test/node: TestAProcessOfTheHostIsNamedAndWaitedFor":                     "agent: TestAProcessOfTheHostIsWaitedForBeforeTheFence",
	"test/node: TestPodsThatWereGivenNoGPUAreFoundByTheirProcesses":           "agent: TestAPodThatIsKnownByItsProcessAloneIsEvicted",
	"test/node: TestAProgramsErrorIsToldOnItsPod":                             "test/node: TestAProgramsErrorOnASharedGPUIsToldOnItsPodAlone",
	"test/node: TestAPodThatFillsAGPUThatItSharesIsNamedUntilItLeaves":        "agent: TestASharedGPUThatFillsUpIsToldWithItsPods",
	"test/node: TestAnAgentSaysAtItsStartWhatItsKubernetesLacks":              "agent/access: TestWhatAnOlderKubernetesLacksIsSaidAtTheStart",
	"test/node: TestServicesOfTheHostStayWhereNothingIsReset":                 "agent: TestUnitsAreStoppedForAResetAndStartedAgain",
	"test/node: TestTwoAgentsOfOneMachineDoNotActAtOnce":                      "cmd/gpuslice-agent: TestRecoverKnowsTheAgentByItsLock",
	"test/node: TestADriverOfAnotherVersionIsLoadedByTheSameProcess":          "nvml/lib: TestADriverThatIsInstalledLaterIsFound",
	"test/node: TestAShutdownWaitsForTheStepThatRunsAndForNoOther":            "agent: TestNoGPUIsTouchedWhileTheHostShutsDown",
	"test/node: TestNVIDIAsToolAgreesWithEveryConfig":                         "test/incumbent: TestEveryExampleIsMetAsNVIDIAMeetsItWithNoMoreCalls",
	"test/node: TestAPartComesAndAnIdleOneGoesBesideABusyOne":                 "agent: TestOnlyPartsThatGoAreTakenWhereverTheAgentIsKilled",
	"test/node: TestAKubeletThatHasJustStartedIsNoReasonToEvictFromOtherGPUs": "agent: TestASilentKubeletIsNoReasonToEvictFromOtherGPUs",
	"test/node: TestAGPUThatTheDriverHasNotFoundIsNamedByItsPlace":            "agent/health: TestGPUsThatNoDriverAnswersForAreFoundOnTheBus",

	"test/node: TestAForgedJournalStartsAndStopsNoUnitOfTheHost":             "agent: TestAForgedJournalAddsNoUnitToThoseThatStopForAReset",
	"test/node: TestTheNodesCDISpecFollowsTheGeometry":                       "agent: TestCDISpecsFollowTheGeometry",
	"test/node: TestAPodThatDoesNotUseItsInstanceIsToldAndOneThatWorksIsNot": "agent/idle: TestAPodThatDoesNotUseWhatItHasIsToldOnceInAWhile",
	"test/node: TestANodeWithBothStartupTaintsIsAsItWasOrOpen":               "agent: TestAFreshNodeWithStartupTaintsOfTwoKeysIsOpenedOrIsAsItWas",

	// Commands on a node.
	"test/node: TestRecoverWatchesTheAgentThatRuns":       "agent: TestAwaitRecoveredReturnsWhenTheNodeIsGivenBack",
	"test/node: TestRecoverBeginsNoChange":                "test/node: TestRecoverFinishesWhatADeadAgentHasBegun",
	"test/node: TestRecoverNamesWhoHasCordoned":           "agent: TestACordonOfOthersIsReported",
	"test/node: TestRecoverRestoresWhatMIGManagerHasLeft": "agent: TestWhatMIGManagerHasLeftIsRestored",
}
