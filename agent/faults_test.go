package agent_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// venture is a change of a node's GPUs in which faults happen.
type venture struct {
	name    string
	models  string            // of the simulated node
	stands  [][]nvml.Placed   // on each GPU before the change; its MIG mode is on if the models say so
	config  catalog.MIGConfig // the desired config; nil for the generated one that request names
	request string
}

func placedAt(profile string, start, size int, compute string) nvml.Placed {
	return nvml.Placed{Profile: profile, Span: nvml.Span{Start: start, Size: size}, Compute: compute}
}

// ventures are changes of every kind: between them they make every call that the driver has for a change.
var ventures = []venture{
	{
		// On the first GPU one instance makes room for another and two more, and the other one is divided otherwise: it keeps a part,
		// loses one and gets one.
		name:   "a H100 is re-cut beside another",
		models: "gpus: [{model: H100-80GB, count: 2, mig: true}]",
		stands: [][]nvml.Placed{
			{placedAt("3g.40gb", 0, 4, "1c+2c"), placedAt("3g.40gb", 4, 4, "")},
			{placedAt("7g.80gb", 0, 8, "")},
		},
		config:  catalog.MIGConfig{{Indices: []int{0}, MIG: true, Devices: map[string]int{"1c.2g.20gb": 2, "1g.10gb": 2, "1c.3g.40gb": 2}}},
		request: "mine",
	},
	{name: "a H100 is cut", models: "gpus: [{model: H100-80GB}]", request: "all-balanced"},
	{name: "an A100 is cut", models: "gpus: [{model: A100-80GB, persistence: true}]", request: "all-balanced"},
	{
		name:    "an A100 is made whole",
		models:  "gpus: [{model: A100-80GB, persistence: true, mig: true}]",
		stands:  [][]nvml.Placed{{placedAt("3g.40gb", 4, 4, ""), placedAt("1g.10gb", 0, 1, "")}},
		request: "all-disabled",
	},
}

// prepare makes the world of the venture, with the node's GPUs in dir, up to the moment before the label is set.
func (v venture) prepare(t *testing.T, dir string) *world {
	t.Helper()
	w := newWorld(t, v.models)
	if dir != "" {
		spec, err := gpusim.ParseSpec([]byte(v.models))
		if err != nil {
			t.Fatal(err)
		}
		w.replaceGPUs(gpusim.Create(dir, spec))
	}
	d := w.gpus.Driver()
	for n, gpu := range w.snapshot() {
		if n >= len(v.stands) {
			break
		}
		for _, p := range v.stands[n] {
			if err := d.Create(t.Context(), gpu.UUID, p); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.gpus.ForgetCalls(); err != nil {
		t.Fatal(err)
	}
	w.restart()
	if v.config != nil {
		w.setConfigs(map[string]catalog.MIGConfig{v.request: v.config})
	}
	w.turn() // the device plugin has read what stands
	for n := 1; n < len(v.stands); n++ {
		w.pod(fmt.Sprintf("bystander-%d", n), w.gpus.MIGDevice(n, v.stands[n][0].Start))
	}
	return w
}

// replaceGPUs gives the world other GPUs.
func (w *world) replaceGPUs(gpus *gpusim.Node, err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
	w.gpus = gpus
	w.t.Cleanup(func() {
		if err := gpus.Close(); err != nil {
			w.t.Error(err)
		}
	})
}

// end is how a change has come out.
type end string

const (
	asRequested end = "as requested"
	previous    end = "as before"
)

// outcome returns the end of the change by the node's condition, empty while there is none. The agent tries again what the node does not keep as
// a failure.
func (w *world) outcome(requested string) end {
	w.t.Helper()
	if w.hasJournal() {
		return ""
	}
	c := w.condition()
	var status struct {
		Failed *struct{ Message string }
	}
	n := w.node()
	if text := n.Annotations[config.AnnotationStatus]; text != "" {
		if err := json.Unmarshal([]byte(text), &status); err != nil {
			w.t.Fatal(err)
		}
	}
	state := n.Labels[config.LabelMIGConfigState]
	switch {
	case c.Reason == string(config.ReasonConverged) && strings.HasPrefix(c.Message, requested+":") && state == string(config.StateSuccess):
		return asRequested
	case status.Failed != nil && c.Status == corev1.ConditionFalse && state == string(config.StateFailed):
		return previous
	default:
		return ""
	}
}

// stage is what a node looked like before a change, and what it looks like when nothing comes in between.
type stage struct {
	before, after string
	kept          map[string]string // UUIDs of the MIG devices that the change must not touch, by GPU and place
}

func (w *world) devicesByPlace() map[string]string {
	out := map[string]string{}
	for _, gpu := range w.snapshot() {
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				out[fmt.Sprintf("GPU %d %s@%d %v", gpu.Index, i.Profile, i.Start, d.Part)] = d.UUID
			}
		}
	}
	return out
}

// rehearse makes the change without a fault.
func (v venture) rehearse(t *testing.T, w *world) stage {
	t.Helper()
	s := stage{before: w.gpus.String(), kept: w.devicesByPlace()}
	w.converge(v.request)
	s.after = w.gpus.String()
	after := w.devicesByPlace()
	maps.DeleteFunc(s.kept, func(place, uuid string) bool { return after[place] != uuid })
	if s.before == s.after {
		t.Fatal("nothing has changed")
	}
	return s
}

// scout makes the change without a fault in a world of its own, and returns the calls of the library that it takes.
func (v venture) scout(t *testing.T) (s stage, spots []spot) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := v.prepare(t, "")
		heard := w.recordCalls()
		w.restart()
		s = v.rehearse(t, w)
		spots = *heard
	})
	return s, spots
}

// conclude lets turns pass to the end of the change, checks that it is one, and that it stays.
func (v venture) conclude(w *world, s stage) end {
	w.t.Helper()
	w.passes("end", func() bool { return w.outcome(v.request) != "" })
	got := w.outcome(v.request)
	w.spend(10 * time.Minute)
	w.turn()
	if again := w.outcome(v.request); again != got {
		w.t.Errorf("it came out %s, and ten minutes later %q: %s", got, again, w.condition().Message)
	}
	v.check(w, s, got)
	return got
}

// check fails the test unless the GPUs are as desired or as before, whichever the node reports, and nothing is
// left of the change.
func (v venture) check(w *world, s stage, got end) {
	w.t.Helper()
	want := map[end]string{asRequested: s.after, previous: s.before}[got]
	if diff := cmp.Diff(want, w.gpus.String()); diff != "" {
		w.t.Errorf("the node says %q, but the GPUs are not %s (-want +got):\n%s", w.condition().Message, got, diff)
	}
	now := w.devicesByPlace()
	for place, uuid := range s.kept {
		if now[place] != uuid {
			w.t.Errorf("%s was made again", place)
		}
	}
	for n := 1; n < len(v.stands); n++ {
		if name := fmt.Sprintf("bystander-%d", n); !w.runs(name) {
			w.t.Errorf("pod %s on a GPU that does not change was evicted", name)
		}
	}
	if diff := cmp.Diff(w.devices(), w.offered); diff != "" {
		w.t.Errorf("the plugin does not offer what stands (-stands +offered):\n%s", diff)
	}
	if w.host.held != 0 {
		w.t.Errorf("%d shutdown inhibitors are left", w.host.held)
	}
	w.expectGivenBack()
}

// around is a driver that calls a function before and after each of its calls.
type around struct {
	nvml.Driver
	before, after func()
}

// Snapshot implements nvml.Driver.
func (a around) Snapshot(ctx context.Context) ([]nvml.GPU, error) {
	a.before()
	defer a.after()
	return a.Driver.Snapshot(ctx)
}

func (a around) call(call func() error) error {
	a.before()
	defer a.after()
	return call()
}

// SetMode implements nvml.Driver.
func (a around) SetMode(ctx context.Context, gpu nvml.UUID, on bool) error {
	return a.call(func() error { return a.Driver.SetMode(ctx, gpu, on) })
}

// Create implements nvml.Driver.
func (a around) Create(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	return a.call(func() error { return a.Driver.Create(ctx, gpu, p) })
}

// Destroy implements nvml.Driver.
func (a around) Destroy(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	return a.call(func() error { return a.Driver.Destroy(ctx, gpu, p) })
}

// CreatePart implements nvml.Driver.
func (a around) CreatePart(ctx context.Context, gpu nvml.UUID, p nvml.Placed, part nvml.Part) error {
	return a.call(func() error { return a.Driver.CreatePart(ctx, gpu, p, part) })
}

// DestroyPart implements nvml.Driver.
func (a around) DestroyPart(ctx context.Context, gpu nvml.UUID, p nvml.Placed, part nvml.Part) error {
	return a.call(func() error { return a.Driver.DestroyPart(ctx, gpu, p, part) })
}

// Reset implements nvml.Driver.
func (a around) Reset(ctx context.Context, gpu nvml.UUID) error {
	return a.call(func() error { return a.Driver.Reset(ctx, gpu) })
}

// SetPersistence implements nvml.Driver.
func (a around) SetPersistence(ctx context.Context, gpu nvml.UUID, on bool) error {
	return a.call(func() error { return a.Driver.SetPersistence(ctx, gpu, on) })
}

// SetComputeMode implements nvml.Driver.
func (a around) SetComputeMode(ctx context.Context, gpu nvml.UUID, mode nvml.ComputeMode) error {
	return a.call(func() error { return a.Driver.SetComputeMode(ctx, gpu, mode) })
}

// spot is one call of the library, by the agent alone: the call of the driver that it is a part of, counted from the
// start of the agent, and how many calls of the same function within that come before it.
type spot struct {
	function string
	call     int
	skip     int
}

func (s spot) String() string { return fmt.Sprintf("%s %d.%d", s.function, s.call, s.skip) }

// never is a number of calls that no change makes.
const never = 1 << 30

// recordCalls notes every call of the library that the agent makes from its next start on.
func (w *world) recordCalls() *[]spot {
	w.t.Helper()
	for _, f := range gpusim.Functions() {
		w.setFault(f, gpusim.Fault{After: never}) // counts the calls, of the plugin, too
	}
	spots, call := &[]spot{}, 0
	var before map[string][]gpusim.Fault
	inner := w.wrapDriver
	w.wrapDriver = func(d nvml.Driver) nvml.Driver {
		return around{
			Driver: inner(d),
			before: func() { before = w.gpus.Faults() },
			after: func() {
				after := w.gpus.Faults()
				for _, f := range gpusim.Functions() {
					for n := range before[f][0].After - after[f][0].After {
						*spots = append(*spots, spot{f, call, n})
					}
				}
				call++
			},
		}
	}
	return spots
}

// setFault sets a fault of a function of the GPUs' library; the zero Fault removes it.
func (w *world) setFault(function string, f gpusim.Fault) {
	w.t.Helper()
	if err := w.gpus.Fail(function, f); err != nil {
		w.t.Fatal(err)
	}
}

// failAt lets the call at the spot fail, and as many calls after it as the fault has times, of the agent that
// starts next. Only the agent's calls fail: between them failAt removes the fault, so that the plugin does not see it.
// It returns what is left of the fault, by which the caller sees that it happened.
func (w *world) failAt(at spot, f gpusim.Fault) *[]gpusim.Fault {
	f.After = at.skip
	left, call := &[]gpusim.Fault{f}, 0
	inner := w.wrapDriver
	w.wrapDriver = func(d nvml.Driver) nvml.Driver {
		return around{
			Driver: inner(d),
			before: func() {
				if call < at.call {
					return
				}
				for _, f := range *left {
					w.setFault(at.function, f)
				}
			},
			after: func() {
				if call++; call <= at.call {
					return
				}
				*left = w.gpus.Faults()[at.function]
				w.setFault(at.function, gpusim.Fault{})
			},
		}
	}
	return left
}

// of returns the spots of one function.
func of(function string, spots []spot) []spot {
	var out []spot
	for _, s := range spots {
		if s.function == function {
			out = append(out, s)
		}
	}
	return out
}

// pick chooses the first of the spots, the one in the middle, and the last.
func pick(spots []spot) []spot {
	if len(spots) < 3 {
		return spots
	}
	return []spot{spots[0], spots[len(spots)/2], spots[len(spots)-1]}
}

// hangAt lets the call at the spot hang, of the agent that starts next, until setFault removes the fault.
func (w *world) hangAt(at spot) {
	call := 0
	inner := w.wrapDriver
	w.wrapDriver = func(d nvml.Driver) nvml.Driver {
		return around{
			Driver: inner(d),
			before: func() {
				if call == at.call {
					w.setFault(at.function, gpusim.Fault{Hang: true, After: at.skip})
				}
				call++
			},
			after: func() {},
		}
	}
}

// isHanging reports whether a call hangs.
func (w *world) isHanging(function string) bool {
	left := w.gpus.Faults()[function]
	return len(left) > 0 && left[0].After == 0
}

// expectDriverUnresponsive checks that the agent reports that the driver does not answer, and leaves all else as it is. No plugin may look
// at the GPUs until then: it would hang as well.
func (w *world) expectDriverUnresponsive() {
	w.t.Helper()
	gpus, calls, node := w.gpus.String(), w.gpus.Calls(), w.node()
	for range 5 {
		if c := w.condition(); c.Reason != string(config.ReasonDriverUnresponsive) || c.Status != corev1.ConditionUnknown {
			w.t.Errorf("the node says %s %s: %s", c.Status, c.Reason, c.Message)
		}
		w.agent.Pass(w.t.Context())
	}
	now := w.node()
	if diff := cmp.Diff(gpus, w.gpus.String()) + cmp.Diff(calls, w.gpus.Calls()) + cmp.Diff(node.Spec, now.Spec) +
		cmp.Diff(node.Annotations, now.Annotations) + cmp.Diff(node.Labels, now.Labels); diff != "" {
		w.t.Errorf("something was done while the driver was silent (-before +after):\n%s", diff)
	}
}

// changing are the functions that change something. Their calls may do their work and fail all the same.
var changing = []string{
	gpusim.SetMigMode, gpusim.SetPersistenceMode, gpusim.SetComputeMode, gpusim.CreateGpuInstanceWithPlacement, gpusim.GpuInstanceDestroy,
	gpusim.CreateComputeInstance, gpusim.CreateComputeInstanceWithPlacement, gpusim.ComputeInstanceDestroy,
}

// Promise 14, if the call returns later, and if only a new process helps.
func TestACallThatHangsIsReportedAndTheChangeGoesOnAfterIt(t *testing.T) {
	for _, v := range ventures {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			s, spots := v.scout(t)
			for n, function := range gpusim.Functions() {
				picked := pick(of(function, spots))
				if len(picked) > 1 && !slices.Contains(changing, function) {
					picked = picked[n%2 : n%2+1] // all observations are alike
				}
				for _, at := range picked {
					n++
					t.Run(at.String(), func(t *testing.T) { v.wait(t, s, at, n%2 == 0) })
				}
			}
		})
	}
}

// wait makes the change with a call that hangs, and either returns, or ends with its process.
func (v venture) wait(t *testing.T, s stage, at spot, returns bool) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := v.prepare(t, "")
		w.hangAt(at)
		w.restart()
		w.label(v.request)
		var took time.Duration
		for turns := 0; !w.isHanging(at.function); turns++ {
			if turns == 1000 {
				t.Fatal("the call is not made")
			}
			w.turn()
			began := time.Now()
			pause := w.agent.Pass(t.Context())
			took = time.Since(began)
			<-time.After(pause)
		}
		if took > w.settings.Timeouts.DriverCall {
			t.Errorf("the call was given up after %s, want %s", took, w.settings.Timeouts.DriverCall)
		}
		w.expectDriverUnresponsive()
		if returns {
			w.setFault(at.function, gpusim.Fault{})
			synctest.Wait()
		} else {
			w.replaceProcess(at.function)
		}
		v.conclude(w, s)
	})
}

// replaceProcess ends the agent's process, with the call that hangs in it, and starts the next one.
func (w *world) replaceProcess(hung string) {
	w.t.Helper()
	if err := w.gpus.Close(); err != nil {
		w.t.Fatal(err)
	}
	synctest.Wait()
	w.replaceGPUs(gpusim.Open(w.gpus.Dir()))
	w.setFault(hung, gpusim.Fault{})
	w.wrapDriver = func(d nvml.Driver) nvml.Driver { return d }
	w.restart()
}

// astray is a driver that creates an instance at another place than the agent asks for, a number of times.
type astray struct {
	nvml.Driver
	from, to nvml.Placed
	times    *int
}

// Create implements nvml.Driver.
func (a astray) Create(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	if p == a.from && *a.times > 0 {
		*a.times--
		p = a.to
	}
	return a.Driver.Create(ctx, gpu, p)
}

func TestAnInstanceThatIsMadeElsewhereIsTakenOrMovedBack(t *testing.T) {
	t.Parallel()
	v := venture{
		models:  "gpus: [{model: H100-80GB, mig: true}]",
		stands:  [][]nvml.Placed{{placedAt("2g.20gb", 0, 2, ""), placedAt("3g.40gb", 4, 4, "")}},
		config:  catalog.MIGConfig{{All: true, MIG: true, Devices: map[string]int{"1g.10gb": 4, "3g.40gb": 1}}},
		request: "mine",
	}
	for _, row := range []struct {
		name     string
		from, to nvml.Placed
		fails    gpusim.Fault // of making the last one
		end      end
	}{
		{"a requested one is where it can be", placedAt("1g.10gb", 0, 1, ""), placedAt("1g.10gb", 3, 1, ""), gpusim.Fault{}, asRequested},
		{
			"one of before must be where it was", placedAt("2g.20gb", 0, 2, ""), placedAt("2g.20gb", 2, 2, ""),
			gpusim.Fault{Return: gpusim.NotSupported, After: 3},
			previous,
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := v.prepare(t, "")
				times := 1
				w.wrapDriver = func(d nvml.Driver) nvml.Driver { return astray{d, row.from, row.to, &times} }
				w.restart()
				s := stage{before: w.gpus.String(), after: strings.Replace(w.gpus.String(),
					"  2g.20gb@0\n", "  1g.10gb@0\n  1g.10gb@1\n  1g.10gb@2\n  1g.10gb@3\n", 1)}
				w.setFault(gpusim.CreateGpuInstanceWithPlacement, row.fails)
				w.label(v.request)
				if got := v.conclude(w, s); got != row.end || times != 0 {
					t.Errorf("it came out %s, want %s; %d instances have still to go astray", got, row.end, times)
				}
			})
		})
	}
}

// The GPU comes back as it was when it was lost. The tests of reboots have GPUs that come back after a reset.
func TestAGPUThatIsLostInTheMiddleAndComesBackIsBroughtToAnEnd(t *testing.T) {
	t.Parallel()
	v := venture{models: "gpus: [{model: H100-80GB, count: 2}]", request: "all-balanced"}
	s, spots := v.scout(t)
	last := spots[len(spots)-1].call
	for at := 0; at < last; at += 2 {
		for _, away := range []time.Duration{time.Second, time.Hour} {
			if away == time.Hour && at%8 > 0 {
				continue // which of them is lost for good makes no difference
			}
			t.Run(fmt.Sprintf("from call %d on, for %s", at, away), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := v.prepare(t, "")
					call := 0
					w.wrapDriver = func(d nvml.Driver) nvml.Driver {
						return around{d, func() {
							if call == at {
								w.setLost(1, true)
							}
							call++
						}, func() {}}
					}
					w.restart()
					w.label(v.request)
					w.passes("loss", func() bool { return call > at })
					w.spend(away)
					w.setLost(1, false)
					if got := v.conclude(w, s); got != asRequested {
						t.Errorf("it came out %s: %s", got, w.condition().Message)
					}
				})
			})
		}
	}
}
