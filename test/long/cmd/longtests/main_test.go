package main

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../../../.."

func printed(t *testing.T, args ...string) string {
	t.Helper()
	var out strings.Builder
	if err := run(&out, root, args); err != nil {
		t.Fatal(err)
	}
	return strings.TrimSuffix(out.String(), "\n")
}

func TestBothKindsOfLongTestsAreInThePattern(t *testing.T) {
	tests, leftOut := regexp.MustCompile(printed(t, "tests")), regexp.MustCompile(printed(t, "left-out"))
	for name, want := range map[string]struct{ tests, leftOut bool }{
		"TestRandomWalk":                           {true, false},  // shorter in make test
		"TestCauseNodeUnreachable":                 {true, true},   // not in make test
		"TestKilledAtAnyInstantItEndsTheSame":      {true, true},   // not in make test, and asks test/long
		"TestKilledAtAnyInstantItEndsTheSameAgain": {false, false}, // begins like another
	} {
		if got := tests.MatchString(name); got != want.tests {
			t.Errorf("tests: %s %t", name, got)
		}
		if got := leftOut.MatchString(name); got != want.leftOut {
			t.Errorf("left-out: %s %t", name, got)
		}
	}
}

func TestPackagesComeOnceAndTheNamedOnesFirst(t *testing.T) {
	got := strings.Fields(printed(t, "packages", "./test/node", "./no/such", "./agent"))
	if len(got) < 3 || got[0] != "./test/node" || got[1] != "./agent" {
		t.Errorf("got %v", got)
	}
	if slices.Contains(got, "./no/such") || len(slices.Compact(slices.Sorted(slices.Values(got)))) != len(got) {
		t.Errorf("got %v", got)
	}
	if got, sorted := got[2:], slices.Sorted(slices.Values(got[2:])); !slices.Equal(got, sorted) {
		t.Errorf("the others are %v", got)
	}
}

func TestWhatItDoesNotKnowIsAnError(t *testing.T) {
	for _, args := range [][]string{nil, {"more"}, {"tests", "packages"}} {
		if err := run(&strings.Builder{}, root, args); err == nil {
			t.Errorf("%v is no error", args)
		}
	}
	if err := run(&strings.Builder{}, t.TempDir(), []string{"tests"}); err == nil || !strings.Contains(err.Error(), "top of the repository") {
		t.Errorf("elsewhere: error %v", err)
	}
}

func TestAFolderMayBeRunWhole(t *testing.T) {
	const in = "TestTheTableOfLongTestsIsTrue" // of test/repo, none of which is long
	if regexp.MustCompile(printed(t, "tests")).MatchString(in) || strings.Contains(printed(t, "packages"), "./test/repo") {
		t.Error("test/repo is run without -whole")
	}
	tests := regexp.MustCompile(printed(t, "-whole", "test/repo|config/document", "tests"))
	for name, want := range map[string]bool{in: true, "FuzzJSON": true, "TestRandomWalk": true, "TestWindowsOpen": false} {
		if got := tests.MatchString(name); got != want {
			t.Errorf("%s: %t", name, got)
		}
	}
	packages := strings.Fields(printed(t, "-whole", "test/repo|config/document", "packages", "./test/repo"))
	if packages[0] != "./test/repo" || !slices.Contains(packages, "./config/document") || !slices.Contains(packages, "./test/node") {
		t.Errorf("packages: %v", packages)
	}
	if err := run(&strings.Builder{}, root, []string{"-whole", "test/repo|no/such", "tests"}); err == nil || !strings.Contains(err.Error(), `"no/such"`) {
		t.Errorf("a folder without tests: error %v", err)
	}
}
