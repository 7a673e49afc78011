package agent

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Pass is one pass of the loop, for tests that are the loop themselves.
func (a *Agent) Pass(ctx context.Context) time.Duration { return a.pass(ctx) }

// WatchParts has the parts watch until ctx ends, as Run does, and returns when they do.
func (a *Agent) WatchParts(ctx context.Context) {
	var all sync.WaitGroup
	for _, m := range a.monitors {
		all.Go(func() { m.Watch(ctx, func() {}) })
	}
	all.Wait()
}

// Begin does what Run does first.
func (a *Agent) Begin() { a.observers.leftovers.Forget(a.env.Clock.Now()) }

// Replaced reports whether the run ends, since the driver is another one than this process has loaded.
func (a *Agent) Replaced() bool { return a.driverReplaced }

// Edited reports whether the run ends, since the settings are other ones.
func (a *Agent) Edited() bool { other, _ := a.checkSettings(); return other }

// Rest waits as the loop does between two passes, with nothing to wake it.
func (a *Agent) Rest(ctx context.Context, d time.Duration) { a.waitForNextPass(ctx, nil, d) }

// NextStep is the kind of the step that the next pass begins with; empty if there is none.
func (a *Agent) NextStep(ctx context.Context) plan.Kind {
	seen, err := a.observe(ctx)
	if err != nil {
		return ""
	}
	to, err := a.plan(ctx, seen)
	if err != nil || len(to.steps) == 0 {
		return ""
	}
	return to.steps[0].Kind
}

// Sees takes over another state of the node, as its watch does between two passes.
func (a *Agent) Sees(before, after *corev1.Node) { a.observers.objects.NoteRequest(before, after) }

// Settle waits as the loop does after a pass, before anything can wake it.
func (a *Agent) Settle(ctx context.Context, rest time.Duration) time.Duration {
	return a.pauseAfterPass(ctx, rest)
}

// Performs reports whether there is an executor for the kind of step, and which reason and phase the agent reports for it.
func Performs(kind plan.Kind) (performed bool, reason config.Reason, phase api.Phase) {
	reason, phase = report.Progress([]plan.Step{{Kind: kind}}, state.Desired{})
	return (&Agent{}).executors()[kind] != nil, reason, phase
}

// HangSentinel lets every call on the sentinel file hang until the channel is closed.
func (a *Agent) HangSentinel(until <-chan struct{}) error {
	ctx, cancel := context.WithCancel(context.Background())
	return aside.Run(ctx, &a.actors.rebooter.Sentinel.Calls, "looking at "+a.actors.rebooter.Sentinel.Path, func(context.Context, aside.At) error {
		cancel()
		<-until
		return nil
	})
}

// keepsTimes are parts that remember times and have nothing to forget, each with the reason.
var keepsTimes = map[string]string{
	"Clock":    "it finds out that the clock was set",
	"metrics":  "a metric says when the last pass was, for people",
	"liveness": "it goes by the monotonic clock of its reader",
	"reporter": "what a change has taught is written with the next status, and decides nothing",
}

// Unforgotten names the parts of the agent that remember times, or have a Forget, and are not among the forgetters.
func (a *Agent) Unforgotten() []string {
	listed := map[reflect.Type]bool{}
	for _, part := range a.forgetters() {
		listed[reflect.TypeOf(part)] = true
	}
	var out []string
	for _, field := range partsOfAgent() {
		forgets := field.Type.Implements(reflect.TypeFor[forgetter]()) || reflect.PointerTo(field.Type).Implements(reflect.TypeFor[forgetter]())
		if listed[field.Type] || listed[reflect.PointerTo(field.Type)] || !ofThisModule(field.Type) && !forgets {
			continue
		}
		if _, keeps := keepsTimes[field.Name]; keeps && !forgets {
			continue
		}
		if times := timesIn(field.Type, map[reflect.Type]bool{}); forgets || times != "" {
			out = append(out, field.Name+times)
		}
	}
	return out
}

// partsOfAgent are the fields of the agent, with those of the groups in place of these.
func partsOfAgent() []reflect.StructField {
	var fields []reflect.StructField
	for field := range reflect.TypeFor[Agent]().Fields() {
		if group := field.Type; group.Kind() == reflect.Struct && group.PkgPath() == reflect.TypeFor[Agent]().PkgPath() || group == reflect.TypeFor[act.Env]() {
			fields = slices.AppendSeq(fields, group.Fields()) // the parts of a phase of the loop
			continue
		}
		fields = append(fields, field)
	}
	return fields
}

// ofThisModule reports whether the type, or what it points to, is declared in this module.
func ofThisModule(of reflect.Type) bool {
	if of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	return strings.HasPrefix(of.PkgPath(), "github.com/gpuslice/gpuslice/")
}

// timesIn is how a value of the type comes to hold a time by fields that only its package sets; empty if it holds none. Exported fields of a
// part are what it is given, or another part that is among the forgetters itself.
func timesIn(of reflect.Type, seen map[reflect.Type]bool) string {
	if of == reflect.TypeFor[time.Time]() {
		return " holds a time"
	}
	if seen[of] {
		return ""
	}
	seen[of] = true
	switch of.Kind() { //nolint:exhaustive // the others hold none
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return timesIn(of.Elem(), seen)
	case reflect.Struct:
		if !ofThisModule(of) {
			return ""
		}
		for field := range of.Fields() {
			if field.IsExported() && field.Type != reflect.TypeFor[time.Time]() && !isData(field.Type) {
				continue
			}
			if at := timesIn(field.Type, seen); at != "" {
				return "." + field.Name + at
			}
		}
	}
	return ""
}

// isData reports whether the type is a map or a slice, in which a part remembers, rather than another part.
func isData(of reflect.Type) bool { return of.Kind() == reflect.Map || of.Kind() == reflect.Slice }

// Observe observes, as each pass begins with.
func (a *Agent) Observe(ctx context.Context) error {
	_, err := a.observe(ctx)
	return err
}
