package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// result is what one run of one program in one scenario came to. Every figure in it was measured.
type result struct {
	calls  map[string]int // of functions of NVML that change something, those among them that failed
	bound  time.Duration  // what these calls take, one after the other
	looked int            // how many handles of MIG devices all programs of the node have taken
	said   time.Duration  // from the request until the program says that it is done, or has failed; 0 for one that says nothing
	ready  time.Duration  // from the request until the node offers what the GPUs have, for good
	noNode bool           // there is no cluster: ready and what follows have no meaning

	evicted int // pods of users that left through the Eviction API
	ended   int // pods of users that ended in another way
	plugins int // restarts of the device plugin

	cost cost // of a program that watches the label; nothing is known of others

	spent spent // of gpuslice alone

	requests requests // to the API server; nothing is known of those of programs without an account

	outcome string
}

func (r result) mutations() int {
	n := 0
	for function, calls := range r.calls {
		if function != gpusim.Reset { // nvidia-smi does it, and no function of NVML
			n += calls
		}
	}
	return n
}

// count takes over the calls that the GPUs have seen since they forgot those before, and what these take.
func (r *result) count(gpus *gpusim.Node) {
	r.calls = gpus.Calls()
	r.bound = bound(r.calls, gpus.Delays())
	reads := gpus.Reads()
	r.looked = reads[gpusim.ComputeInstanceGetInfo] + reads[gpusim.GetMigDeviceHandleByIndex] + reads[gpusim.WalkMIGDevice]
}

// bound is the time of all calls. No program can be faster that makes these calls: the driver's kernel module has one lock for them, so those
// about several GPUs are taken to be serial too.
func bound(calls map[string]int, takes map[string]time.Duration) (sum time.Duration) {
	for function, n := range calls {
		sum += time.Duration(n) * takes[function]
	}
	return sum
}

// own is what the program took beyond its calls; 0 if it says nothing.
func (r result) own() time.Duration {
	if r.said == 0 {
		return 0
	}
	return r.said - r.bound
}

// judge says in words what became of the GPUs. The word is what the program says itself: success, failed.
func judge(s scenario, word string, before, after []nvml.GPU) (string, error) {
	want, err := s.want(before)
	if err != nil {
		return "", err
	}
	got := cuts(after)
	text := "as asked"
	switch right := slices.EqualFunc(got, want, cut.equal); {
	case right && word != success:
		text += ", but it says " + word
	case !right:
		text = word + ", not as asked"
		for i := range got {
			if !got[i].equal(want[i]) {
				text += fmt.Sprintf("; GPU %d is left with %s", i, got[i])
			}
		}
		text += losses(before, after)
	}
	for i := range after {
		if before[i].Persistent != after[i].Persistent {
			text += fmt.Sprintf("; persistence mode of GPU %d is another", i)
		}
	}
	return text, nil
}

// losses says how many former instances no longer exist. It is for changes that have failed; others lose what they must.
func losses(before, after []nvml.GPU) string {
	used, idle := gone(before, after)
	text := ""
	if idle > 0 {
		text += fmt.Sprintf("; %d idle instances lost", idle)
	}
	if used > 0 {
		text += fmt.Sprintf("; %d instances lost that were in use", used)
	}
	return cmp.Or(text, "; nothing lost")
}

// What programs say at the end, in the label nvidia.com/mig.config.state. It is said here for those without a label too.
const (
	success = "success"
	failed  = "failed"
)

// String is the cut in words: "2x 1g.10gb", "MIG off".
func (c cut) String() string {
	var parts []string
	if c.Pending {
		parts = append(parts, "a mode change that is pending")
	} else if !c.MIG {
		parts = append(parts, "MIG off")
	}
	for _, profile := range slices.Sorted(maps.Keys(c.Devices)) {
		parts = append(parts, fmt.Sprintf("%dx %s", c.Devices[profile], profile))
	}
	return cmp.Or(strings.Join(parts, " "), "nothing")
}

// median is the middle of the values, the higher one of two.
func median[T cmp.Ordered](runs []result, of func(result) T) T {
	var values []T
	for _, r := range runs {
		values = append(values, of(r))
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// outcomes are the different ones, the commonest first, with how often each was seen if there are several.
func outcomes(runs []result) string {
	seen := map[string]int{}
	for _, r := range runs {
		seen[r.outcome]++
	}
	texts := slices.SortedFunc(maps.Keys(seen), func(a, b string) int {
		return cmp.Or(cmp.Compare(seen[b], seen[a]), cmp.Compare(a, b))
	})
	if len(texts) == 1 {
		return texts[0]
	}
	for i, text := range texts {
		texts[i] = fmt.Sprintf("%d times: %s", seen[text], text)
	}
	return strings.Join(texts, "\n")
}
