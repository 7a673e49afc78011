package plan_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/agent/plan"
)

// declared returns the constants of type Kind, as the source has them.
func declared(t *testing.T) []plan.Kind {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "kinds.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out []plan.Kind
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if kind, ok := spec.Type.(*ast.Ident); !ok || kind.Name != "Kind" {
			return true
		}
		literal, ok := spec.Values[0].(*ast.BasicLit)
		if !ok {
			t.Fatalf("%s is no literal", spec.Names[0])
		}
		value, err := strconv.Unquote(literal.Value)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, plan.Kind(value))
		return true
	})
	slices.Sort(out)
	return out
}

func TestEachKindHasARow(t *testing.T) {
	kinds := declared(t)
	if len(kinds) < 20 {
		t.Fatalf("the source declares %d kinds: %v", len(kinds), kinds)
	}
	if have := plan.Kinds(); !slices.Equal(kinds, have) {
		t.Errorf("the source declares %v, and there are rows for %v", kinds, have)
	}
	for _, kind := range kinds {
		step := plan.Step{Kind: kind}
		if step.Traits().Text == nil || step.String() == string(kind) || step.Traits().Stage == 0 {
			t.Errorf("nothing says what a step %s does, or in which stage of a change", kind)
		}
	}
}

// The agent can undo only what the journal or the host's record notes before, so the traits of a row must not contradict each other.
func TestTraitsAgree(t *testing.T) {
	for _, kind := range plan.Kinds() {
		has := plan.Step{Kind: kind}.Traits()
		if has.TouchesGPU() && (!has.Begins || !has.ReachesTarget) {
			t.Errorf("%s touches a GPU, which begins a change, reaches for its target, and comes after the drain: %+v", kind, has)
		}
		if has.HoldersKnown && !(has.TouchesGPU() && has.Disrupts) {
			t.Errorf("%s has to know who holds the GPU, and takes nothing from it: %+v", kind, has)
		}
		if has.ShapesPlugin && !has.TouchesGPU() {
			t.Errorf("%s changes what the device plugin reads when it starts, and no GPU: %+v", kind, has)
		}
		if names := (plan.Step{Kind: kind, Pods: []plan.Pod{{Namespace: "team", Name: "pod"}}}).String(); strings.Contains(names, "team/pod") && !has.AsksBudgets {
			t.Errorf("%s sends pods away, and does not watch the budgets that may keep them: %+v", kind, has)
		}
	}
}

func TestAKindThatOpensAChangeDisturbsNothing(t *testing.T) {
	for _, kind := range plan.Kinds() {
		has := plan.Step{Kind: kind}.Traits()
		if has.Stage == plan.StageOpen && (has.Disrupts || has.TouchesGPU() || !has.AsksBudgets) {
			t.Errorf("%s comes before anything is disturbed, and is checked by asking whether the pods may be evicted: %+v", kind, has)
		}
	}
}

func TestAKindThatOnlyObservesHasNoTraitOfAChange(t *testing.T) {
	for _, kind := range plan.Kinds() {
		has := plan.Step{Kind: kind}.Traits()
		changes := []bool{has.Apply != nil, has.TouchesGPU(), has.Disrupts, has.Begins, has.Stage == plan.StageDrain, has.AsksBudgets, has.ReachesTarget, has.TakesFromHost}
		if has.OnlyObserves && slices.Contains(changes, true) {
			t.Errorf("%s only observes, and changes something: %+v", kind, has)
		}
	}
}

func TestAKindThatRestoresOrOnlyAddsTakesNothing(t *testing.T) {
	for _, kind := range plan.Kinds() {
		has := plan.Step{Kind: kind}.Traits()
		takes := []bool{has.TouchesGPU(), has.Disrupts, has.Begins, has.Stage == plan.StageOpen, has.Stage == plan.StageDrain, has.TakesFromHost, has.HoldersKnown, has.OnlyObserves}
		if has.Restores && slices.Contains(takes, true) {
			t.Errorf("%s rests on what may be out of date, and takes something: %+v", kind, has)
		}
		if has.OnlyAdds && (has.Disrupts || has.Stage == plan.StageDrain || has.HoldersKnown || has.TakesFromHost || !has.TouchesGPU()) {
			t.Errorf("%s rests on what may be out of date, and does more than add to a GPU: %+v", kind, has)
		}
		for _, forward := range []bool{false, true} {
			if got := plan.NeedFresh([]plan.Step{{Kind: kind}}, forward); got != !(has.Restores || has.OnlyObserves) {
				t.Errorf("%s, alone, needs a fresh observation: %t", kind, got)
			}
		}
	}
	if !plan.NeedFresh(nil, true) {
		t.Error("the end of a change is known by what the watches have shown")
	}
}

func TestAnInstanceIsCreatedByWhatTheWatchesHaveShownInTheMiddleOfAChangeAlone(t *testing.T) {
	create, destroy, resume := plan.Step{Kind: plan.Create}, plan.Step{Kind: plan.Destroy}, plan.Step{Kind: plan.ResumeOperands}
	for name, row := range map[string]struct {
		steps   []plan.Step
		forward bool
		want    bool
	}{
		"more are to be created":                     {[]plan.Step{create, create, resume}, true, false},
		"another GPU is to be changed":               {[]plan.Step{create, destroy, create}, true, false},
		"it is the last":                             {[]plan.Step{create, resume}, true, true},
		"no GPU is changed yet, or this is the undo": {[]plan.Step{create, create}, false, true},
	} {
		if got := plan.NeedFresh(row.steps, row.forward); got != row.want {
			t.Errorf("%s: it needs a fresh observation: %t, want %t", name, got, row.want)
		}
	}
}

func TestStepsNameTheClaimsThatLeaveAndTheDriver(t *testing.T) {
	t.Parallel()
	driver := []plan.Pod{{Namespace: "dra", Name: "driver", Driver: true}}
	for want, step := range map[string]plan.Step{
		"evict team/a (claim team/a-gpu, team/b), team/c": {Kind: plan.Evict, Pods: []plan.Pod{
			{Namespace: "team", Name: "a", Claims: []string{"a-gpu", "b"}}, {Namespace: "team", Name: "c"},
		}},
		"restart NVIDIA's DRA driver dra/driver":                                                 {Kind: plan.RestartOperands, Pods: driver},
		"restart NVIDIA's DRA driver dra/driver, which does not advertise the current GPUs":      {Kind: plan.RestartPlugin, Pods: driver},
		"restart NVIDIA's DRA driver dra/driver: its ResourceSlices still do not match the GPUs": {Kind: plan.RestartLatePlugin, Pods: driver},
		"remove the taint, so that NVIDIA's DRA driver can start":                                {Kind: plan.ResumeOperands, ByClaims: true},
		"pause clients of the driver team/metrics":                                               {Kind: plan.PauseOperands, Pods: []plan.Pod{{Namespace: "team", Name: "metrics", Client: true}}},
		"pause NVIDIA's DRA driver dra/driver":                                                   {Kind: plan.PauseOperands, Pods: driver},
	} {
		if got := step.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
