package gpusim

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Sequence is a fault's effect on a GPU, step by step, and its cure.
type Sequence struct {
	Name  string
	Means string // one line
	// Harmless sequences do not change the GPU: no one has to do anything.
	Harmless bool

	fault, cure []step
}

// step is one of a sequence.
type step struct {
	after time.Duration // since the step before
	do    func(*scene)
}

// scene is a GPU that something happens to, on one of its instances or on all of it.
type scene struct {
	*state
	gpu   *gpu
	index int
	at    *instance
}

func (s *scene) xid(numbers ...uint64) {
	for _, n := range numbers {
		s.emit(s.index, EventXid, n, nil)
	}
}

func (s *scene) xidHere(numbers ...uint64) {
	for _, n := range numbers {
		s.emit(s.index, EventXid, n, s.at)
	}
}

// news is an event of the driver's own, if it knows such.
func (s *scene) news(kind uint64) {
	if s.eventTypes(s.gpu)&kind != 0 {
		s.emit(s.index, kind, 0, nil)
	}
}

// recommend has the driver recommend an action, and say so.
func (s *scene) recommend(action int) {
	if s.generation() < withAction {
		return
	}
	s.gpu.Health.RecoveryAction = action
	s.xid(154)
	s.news(EventAction)
}

// uncorrectable counts an error of memory.
func (s *scene) uncorrectable() {
	s.gpu.Health.UncorrectableECC++
	s.gpu.Health.Volatile.Uncorrectable++
	s.news(EventDoubleBitECC)
}

func (s *scene) killChannels(n int) {
	for range n {
		s.xidHere(45)
	}
}

const (
	soon  = 50 * time.Millisecond
	later = 500 * time.Millisecond
)

// Cures: what people, or their tools, do.
var (
	resetIt = step{later, func(s *scene) {
		if s.gpu.Health.Lost {
			return
		}
		was := s.gpu.Health.RecoveryAction
		s.gpu.Current, s.gpu.Instances, s.gpu.ComputeMode = s.gpu.Pending, nil, 0
		s.gpu.Processes = nil
		if s.gpu.Health = s.gpu.Health.reset(); was != s.gpu.Health.RecoveryAction {
			s.recommend(s.gpu.Health.RecoveryAction)
		}
	}}
	rebootIt = step{later, func(s *scene) {
		s.BootID = identity(s.Seed, "boot", s.next())
		s.forget()
	}}
	nothing = step{}
)

// sequences are reported of real machines, or read in the driver: see the columns of NVIDIA's Xid catalog.
var sequences = []Sequence{
	{
		Name: "fallen-off", Means: "the GPU falls off the bus, and a reboot brings it back",
		fault: []step{
			{0, func(s *scene) { s.xid(79); s.news(EventUnavailable) }},
			{soon, func(s *scene) { s.killChannels(2); s.xid(79, 79) }},
			{soon, func(s *scene) { s.recommend(recoverByReboot); s.gpu.Health.Lost = true }},
		},
		cure: []step{rebootIt},
	},
	{
		Name: "fallen-off-silently", Means: "the same, and the driver reports no Xid",
		fault: []step{{0, func(s *scene) { s.gpu.Health.Lost = true }}},
		cure:  []step{rebootIt},
	},
	{
		Name: "dead", Means: "the GPU falls off the bus, and the driver does not find it when it is loaded again",
		fault: []step{
			{0, func(s *scene) { s.xid(79); s.gpu.Health.Lost, s.gpu.Health.Dead = true, true }},
			{later, rebootIt.do},
		},
		cure: []step{{0, func(s *scene) { s.gpu.Health.Dead = false }}, rebootIt},
	},
	{
		Name: "contained-ecc", Means: "an uncorrectable memory error that hits one instance; its row is replaced at the next reset",
		fault: []step{
			{0, func(s *scene) { s.xid(171, 48); s.uncorrectable() }},
			{soon, func(s *scene) { s.xid(63); s.news(EventRetired); s.gpu.Health.RemapPending = true }},
			{soon, func(s *scene) { s.news(EventPoison); s.xidHere(94); s.killChannels(3) }},
		},
		cure: []step{resetIt},
	},
	{
		Name: "contained-ecc-drain", Means: "the same, and the driver asks for a drain and a reset",
		fault: []step{
			{0, func(s *scene) { s.xid(171, 48); s.uncorrectable() }},
			{soon, func(s *scene) { s.xid(63); s.news(EventRetired); s.gpu.Health.RemapPending = true }},
			{soon, func(s *scene) { s.xidHere(94); s.killChannels(3); s.recommend(recoverByDrainAndReset) }},
		},
		cure: []step{resetIt},
	},
	{
		Name: "uncontained-ecc", Means: "an uncorrectable memory error that hits the whole GPU, which needs a reset",
		fault: []step{
			{0, func(s *scene) { s.xid(48); s.uncorrectable() }},
			{soon, func(s *scene) { s.xid(95); s.news(EventFatalPoison); s.killChannels(4) }},
			{soon, func(s *scene) { s.recommend(recoverByReset) }},
		},
		cure: []step{resetIt},
	},
	{
		Name: "uncontained-ecc-settled", Means: "the same Xid, and the driver needs no reset", Harmless: true,
		fault: []step{{0, func(s *scene) { s.xid(95); s.killChannels(2) }}},
		cure:  []step{nothing},
	},
	{
		Name: "remap-failure", Means: "a row of memory cannot be replaced: nothing but another GPU helps",
		fault: []step{
			{0, func(s *scene) { s.xid(48); s.uncorrectable() }},
			{soon, func(s *scene) { s.xid(64); s.news(EventRetireFailed); s.gpu.Health.RemapFailed = true }},
		},
		cure: []step{{0, func(s *scene) {
			s.gpu.UUID = "GPU-" + identity(s.Seed, "another gpu", s.next()) // which none of those has that the node began with
			s.gpu.Health = Health{}
		}}, rebootIt},
	},
	{
		Name: "gsp-hang", Means: "the GPU's firmware does not answer: every call into the driver hangs",
		fault: []step{
			{0, func(s *scene) { s.xid(119) }},
			{soon, func(s *scene) { s.xid(120); s.hang(true) }},
		},
		cure: []step{{0, func(s *scene) { s.hang(false) }}, rebootIt},
	},
	{
		Name: "gsp-hiccup", Means: "one timeout of the GPU's firmware, then all is well", Harmless: true,
		fault: []step{{0, func(s *scene) { s.xid(119) }}},
		cure:  []step{nothing},
	},
	{
		Name: "application", Means: "a program accesses memory that is not its own; all its channels go", Harmless: true,
		fault: []step{
			{0, func(s *scene) { s.xidHere(31) }},
			{soon, func(s *scene) { s.killChannels(40) }},
		},
		cure: []step{nothing},
	},
	{
		Name: "context-switch-timeout", Means: "a context does not let go of the GPU, which needs a reset",
		fault: []step{{0, func(s *scene) { s.xidHere(109); s.recommend(recoverByReset) }}},
		cure:  []step{resetIt},
	},
	{
		Name: "context-switch-timeout-settled", Means: "the same Xid, and the driver needs no reset", Harmless: true,
		fault: []step{{0, func(s *scene) { s.xidHere(109) }}},
		cure:  []step{nothing},
	},
	{
		Name: "nvlink", Means: "an error of NVLink, after which the driver asks for a reset",
		fault: []step{{0, func(s *scene) { s.xid(74); s.recommend(recoverByReset) }}},
		cure:  []step{resetIt},
	},
	{
		Name: "nvlink5", Means: "an error of NVLink 5, by which programs lose their channels; the driver asks for a drain and a reset",
		fault: []step{{0, func(s *scene) { s.xid(149); s.killChannels(4) }}, {soon, func(s *scene) { s.recommend(recoverByDrainAndReset) }}},
		cure:  []step{resetIt},
	},
	{
		Name: "init-failure", Means: "the driver cannot initialise the GPU when it is loaded, and does not count it",
		fault: []step{{0, func(s *scene) { rebootIt.do(s); s.xid(143); s.gpu.Health.Absent = true }}},
		cure:  []step{rebootIt},
	},
	{
		Name: "pmu-halt", Means: "the GPU's power management has stopped; the driver asks for a reset a little later",
		fault: []step{{0, func(s *scene) { s.xid(62) }}, {later, func(s *scene) { s.recommend(recoverByReset) }}},
		cure:  []step{resetIt},
	},
	{
		Name: "users-reset", Means: "the driver asks for a reset, and someone resets the GPU at once",
		fault: []step{{0, func(s *scene) { s.recommend(recoverByReset) }}},
		cure:  []step{resetIt},
	},
}

// hang makes every call of an observation hang, or continue.
func (s *scene) hang(on bool) {
	for _, function := range []string{Init, GetCount, GetHandleByIndex, GetUUID, GetFieldValues, GetHealth, GetMigMode, GetRunningProcesses, GetMemoryInfo} {
		delete(s.Faults, function)
		if !on {
			continue
		}
		if s.Faults == nil {
			s.Faults = map[string][]Fault{}
		}
		s.Faults[function] = []Fault{{Hang: true}}
	}
}

// Sequences are those that Play knows, in order of name.
func Sequences() []Sequence {
	return slices.SortedFunc(slices.Values(sequences), func(a, b Sequence) int { return strings.Compare(a.Name, b.Name) })
}

func find(name string) (Sequence, error) {
	byName := map[string]Sequence{}
	for _, s := range sequences {
		byName[s.Name] = s
	}
	s, ok := byName[name]
	if !ok {
		return s, fmt.Errorf("sequence %q is not known: use one of %s", name, strings.Join(slices.Sorted(maps.Keys(byName)), ", "))
	}
	return s, nil
}

// Play lets a sequence of faults happen to a GPU, on the instance that stands at start where it is about one, or NoInstance.
func (n *Node) Play(ctx context.Context, gpuIndex, start int, name string) error {
	s, err := find(name)
	if err != nil {
		return err
	}
	return n.play(ctx, gpuIndex, start, s.fault)
}

// Cure simulates what ends a sequence: a reset, a reboot, another GPU.
func (n *Node) Cure(ctx context.Context, gpuIndex int, name string) error {
	s, err := find(name)
	if err != nil {
		return err
	}
	return n.play(ctx, gpuIndex, NoInstance, s.cure)
}

func (n *Node) play(ctx context.Context, gpuIndex, start int, steps []step) error {
	for _, st := range steps {
		if st.do == nil {
			continue
		}
		t := time.NewTimer(st.after)
		select {
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-t.C:
		}
		if err := n.onGPU("playing", gpuIndex, func(s *state, g *gpu) error {
			at, err := g.instanceAt(start)
			if err == nil {
				st.do(&scene{state: s, gpu: g, index: gpuIndex, at: at})
			}
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}
