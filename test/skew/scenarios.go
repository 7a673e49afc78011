package main

import (
	"maps"
	"slices"
	"strings"
)

// scenario is what a version has to let happen, and the tests that show it.
type scenario struct {
	name  string
	tests []string // "package: test"
	kube  bool     // NVIDIA's plugin has no part in it: it is run for each Kubernetes alone
}

// scenarios are run with each version. A test holds the names to the code.
var scenarios = []scenario{
	{name: "says what it lacks", kube: true, tests: []string{"test/node: TestAnAgentSaysAtItsStartWhatItsKubernetesLacks"}},
	{name: "label, cut, prove, release", tests: []string{
		"test/node: TestALabelDrainsRepartitionsAndGivesTheNodeBack",
		"test/node: TestOne3gAndTwo2gWorkAtTheFirstTry",
	}},
	{name: "drain with a budget", tests: []string{
		"test/node: TestABudgetIsAskedBeforeTheCordon",
		"test/node: TestCauseDrainBlockedByABudget",
	}},
	{name: "share: by file, restart, label, ConfigMap", tests: []string{
		"test/node: TestSharingIsHandedToThePluginInEachWay",
		"test/node: TestOnlyHoldersOfReplicasThatGoLeave",
	}},
	{name: "share: every mode", tests: []string{"test/node: TestEachWayOfSharingIsReachedByAProfile"}},
	{name: "prove: what gives no capacity is taken back", tests: []string{"test/node: TestAConfigByWhichThePluginEndsIsTakenBack"}},
	{name: "release: a request is withdrawn, a cordon stays", tests: []string{"test/node: TestAWithdrawnRequestIsUndoneAndACordonStays"}},
	{name: "killed in the middle", tests: []string{
		"test/node: TestKilledAfterAnyStepItEndsTheSame",
		"test/node: TestKilledAtEachBorderOfAFullChangeItEndsTheSame",
	}},
	{name: "policies refuse a stolen token", kube: true, tests: []string{"test/policy: TestOneAgentsTokenIsGoodForItsOwnNodeOnly"}},
	{name: "who may ask for which profile", kube: true, tests: []string{"test/policy: TestWhoMayAskForWhatIsSaidByRBAC"}},
}

// selected gives the pattern that -run takes for the scenarios, and the packages of their tests.
func selected(all []scenario) (pattern string, packages []string) {
	names, folders := map[string]bool{}, map[string]bool{}
	for _, s := range all {
		for _, test := range s.tests {
			folder, name, _ := strings.Cut(test, ": ")
			names[name], folders["./"+folder] = true, true
		}
	}
	return "^(" + strings.Join(slices.Sorted(maps.Keys(names)), "|") + ")$", slices.Sorted(maps.Keys(folders))
}
