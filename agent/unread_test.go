package agent_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
)

// One mistake in a file that all nodes read is no reason to say of a node that it is not as asked.
func TestAMistakeInTheCatalogThatIsNotOfThisNodeKeepsItConverged(t *testing.T) {
	t.Parallel()
	const wrong = "  other: {mig: [{gpus: {all: true}, enabled: perhaps}]}\n"
	const alike = "  alike: {mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]}\n"
	for name, row := range map[string]struct {
		text  string
		asks  string // another profile, from then on
		stays bool
	}{
		"another profile":                                          {onePart + wrong, "", true},
		"no YAML at all":                                           {onePart + "\t- nonsense\n", "", true},
		"this very profile":                                        {strings.Replace(onePart, "7}", "many}", 1), "", false},
		"another profile, and this one edited":                     {strings.Replace(onePart, "7}", "6}", 1) + wrong, "", false},
		"another profile, and this one is gone":                    {strings.Replace(onePart, "seven", "six", 1) + wrong, "", false},
		"another profile, and one is asked for that says the same": {onePart + alike + wrong, "alike", false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.profiles(onePart)
				events := w.restartWithEvents()
				w.profile("seven")
				w.reach("seven")
				cut := w.gpus.String()
				w.setFile("profiles", row.text)
				if row.asks != "" {
					w.profile(row.asks)
				}
				w.passes("a word about the file", func() bool { return strings.Contains(w.condition().Message, "ConfigMap gpuslice/profiles") })
				c := w.condition()
				if stays := c.Status == corev1.ConditionTrue; stays != row.stays || stays == (c.Reason == string(config.ReasonInvalidCatalog)) {
					t.Errorf("the node says %s %s: %s", c.Status, c.Reason, c.Message)
				}
				w.passesWithin(20, func() bool { return false })
				if n := heard(events, "Warning "+string(config.ReasonInvalidCatalog), "ConfigMap gpuslice/profiles"); n != 1 {
					t.Errorf("%d Events name the file, want 1", n)
				}
				w.expectGPUs(cut)
				w.profile("seven")
				w.setFile("profiles", onePart)
				w.passes("no word about the file", func() bool { return !strings.Contains(w.condition().Message, "ConfigMap") })
				w.untilReason(config.ReasonConverged)
			})
		})
	}
}

// A new process knows of the file what it can read, and by the host's record what was verified.
func TestANewProcessKeepsAGeneratedConfigWhileTheFileIsNoYAML(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.setConfigs(firstOnly)
		w.converge("all-1g.10gb")
		w.fileError = errors.New("line 3: is no YAML")
		w.restart()
		w.passes("a word about the file", func() bool { return strings.Contains(w.condition().Message, "line 3") })
		if c := w.condition(); c.Status != corev1.ConditionTrue {
			t.Errorf("the node says %s %s: %s", c.Status, c.Reason, c.Message)
		}
		w.label("first-1g")
		w.settle(config.ReasonInvalidCatalog)
	})
}

// While the file cannot be read, a node that is no longer as it was verified is not cut again by it.
func TestNoChangeBeginsByAFileWithAMistake(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.setConfigs(firstOnly)
		w.converge("all-1g.10gb")
		w.fileError = errors.New("line 3: is no YAML")
		w.reboot()
		w.passes("a refusal", func() bool {
			if w.hasJournal() {
				t.Fatalf("a change has begun: %s: %s", w.reason(), w.condition().Message)
			}
			return w.reason() == config.ReasonInvalidCatalog
		})
		if n := len(w.snapshot()[0].Instances); n != 0 {
			t.Errorf("the GPU was cut into %d instances", n)
		}
	})
}

// A program, or the change itself, may alter what the request is judged by: without an end to it, pods would leave again and again.
func TestARequestThatIsRefusedDuringEachOfItsChangesIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		const with = "apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\nprofiles: {small: {mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]}}\n"
		without := strings.ReplaceAll(with, "small", "other")
		w.profiles(with)
		began, underway := 0, false
		turn := func() {
			if is := w.hasJournal(); is != underway {
				underway = is
				if w.setFile("profiles", with); is {
					began++
					w.setFile("profiles", without)
				}
			}
		}
		w.set(config.LabelProfile, "small")
		const want = "the change to small was refused 3 times after it had begun"
		w.passes("the end of it", func() bool { turn(); return strings.Contains(w.condition().Message, want) && !w.hasJournal() })
		before := w.gpus.String()
		for ends := time.Now().Add(time.Hour); time.Now().Before(ends); w.pass() {
			turn()
		}
		if began != 3 || w.gpus.String() != before || w.reason() != config.ReasonUnknownConfig || stateOf(w.node()) != config.StateFailed {
			t.Errorf("it began %d times, and the node says %s", began, w.condition().Message)
		}
		w.expectGivenBack()
		w.unset(config.LabelProfile)
		w.settle(config.ReasonNotRequested)
		w.set(config.LabelProfile, "small")
		w.reach("small")
	})
}
