package agent_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// The driver itself holds a GPU in persistence mode, so that it cannot be reset.
func TestPersistenceModeIsOffForAResetAndGivenBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: A100-80GB, count: 2, persistence: true}]")
		w.converge("all-balanced")
		for _, gpu := range w.snapshot() {
			if !gpu.Persistent || !gpu.Enabled {
				t.Errorf("GPU %d: persistence mode is %t, MIG mode %t", gpu.Index, gpu.Persistent, gpu.Enabled)
			}
		}
	})
	t.Run("also when the change fails after the reset", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "gpus: [{model: A100-80GB, count: 2, persistence: true}]")
			before := w.gpus.String()
			w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
			w.label("all-balanced")
			w.settle(config.ReasonHardwareFailure)
			w.expectGivenBack()
			w.expectGPUs(before)
		})
	})
}

// obedient accepts persistence mode and turns nothing on, as drivers of virtual machines do.
type obedient struct{ nvml.Driver }

func (d obedient) SetPersistence(ctx context.Context, gpu nvml.UUID, on bool) error {
	if on {
		return nil
	}
	return d.Driver.SetPersistence(ctx, gpu, on)
}

// unwilling refuses to turn persistence mode on.
type unwilling struct {
	nvml.Driver
	why error
}

func (d unwilling) SetPersistence(ctx context.Context, gpu nvml.UUID, on bool) error {
	if on {
		return &nvml.Error{Op: "turning persistence mode on", GPU: gpu, Err: d.why}
	}
	return d.Driver.SetPersistence(ctx, gpu, on)
}

// The GPUs are as asked by then, and work as well without.
func TestPersistenceModeThatCannotBeGivenBackUndoesNothingAndKeepsNoNode(t *testing.T) {
	t.Parallel()
	drivers := map[string]func(nvml.Driver) nvml.Driver{
		"without effect": func(d nvml.Driver) nvml.Driver { return obedient{d} },
	}
	for _, why := range []error{nvml.ErrPermission, nvml.ErrInUse, nvml.ErrUnresponsive, nvml.ErrNotSupported, errors.New("unknown error")} {
		drivers[why.Error()] = func(d nvml.Driver) nvml.Driver { return unwilling{d, why} }
	}
	for name, driver := range drivers {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "gpus: [{model: A100-80GB, count: 2, persistence: true}]")
				w.wrapDriver = driver
				o, recorder := w.optionsFor(&w.host), record.NewFakeRecorder(1000)
				o.Events = recorder
				w.agent = agent.New(o)
				w.converge("all-balanced")
				if done := counters(t, o.Metrics)["gpuslice_steps_total RestorePersistence done"]; name != "without effect" && done != 0 {
					t.Errorf("what the driver refuses counts %v times as done", done)
				}
				if n := heard(recorder.Events, "Warning", "persistence mode of GPU", "cannot be turned on again"); n != 2 {
					t.Errorf("%d Events say of 2 GPUs that persistence mode stays off", n)
				}
				for _, gpu := range w.snapshot() {
					if gpu.Persistent || !gpu.Enabled {
						t.Errorf("GPU %d: persistence mode is %t, MIG mode %t", gpu.Index, gpu.Persistent, gpu.Enabled)
					}
				}
			})
		})
	}
}

// flickering is a GPU that another short-lived process holds at each observation, as of nvidia-smi in a loop.
type flickering struct {
	slow
	pid, tries int
}

func (f *flickering) Snapshot(ctx context.Context) ([]nvml.GPU, error) {
	gpus, err := f.slow.Snapshot(ctx)
	for i := range gpus {
		f.pid++
		gpus[i].Processes = []nvml.Process{{PID: f.pid}}
	}
	return gpus, err
}

func (f *flickering) SetMode(_ context.Context, gpu nvml.UUID, _ bool) error {
	f.tries++
	return &nvml.Error{Op: "turning MIG mode on", GPU: gpu, Err: nvml.ErrInUse}
}

// Promise 12.
func TestProcessesThatComeAndGoAreNoReasonToWriteAgainAndAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		f := &flickering{slow: slow{w.gpus.Driver(), time.Second}, pid: 4194304} // the largest pid of Linux
		w.wrapDriver = func(nvml.Driver) nvml.Driver { return f }
		w.restart()
		w.label("all-balanced")
		w.untilCordoned()
		w.spend(time.Minute)
		w.untilReason(config.ReasonGPUInUse)
		first := w.condition().Message
		const minutes = 10
		if n := w.countWrites(minutes * time.Minute); n > minutes+1 {
			t.Errorf("%d writes in %d minutes", n, minutes)
		}
		if w.condition().Message == first {
			t.Errorf("who holds the GPU is not reported any more; the node says %s", first)
		}
	})
}

// The watches may wake the loop at any moment.
func TestWhatIsInUseIsNotTriedAgainAtEachWake(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		f := &flickering{slow: slow{Driver: w.gpus.Driver()}, pid: 4194304}
		w.wrapDriver = func(nvml.Driver) nvml.Driver { return f }
		w.restart()
		w.label("all-balanced")
		w.untilReason(config.ReasonGPUInUse)
		before := f.tries
		for range 100 {
			w.agent.Pass(t.Context())
		}
		if n := f.tries - before; n > 1 {
			t.Errorf("%d tries at 100 observations in no time", n)
		}
		w.spend(time.Minute)
		if f.tries == before {
			t.Error("it was not tried again")
		}
	})
}

// A driver holds an instance for some tenths of a second after its last process has ended. Who reads GPUInUse would look for a process that is not there.
func TestAnInstanceThatNoProcessHoldsAnyMoreDelaysTheChangeForAMoment(t *testing.T) {
	t.Parallel()
	for _, function := range []string{gpusim.ComputeInstanceDestroy, gpusim.GpuInstanceDestroy} {
		t.Run(function, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.converge("all-1g.10gb")
				const refused = 400 * time.Millisecond
				if err := w.gpus.Fail(function, gpusim.Fault{Return: gpusim.InUse, For: refused}); err != nil {
					t.Fatal(err)
				}
				var reasons []config.Reason
				see := func() { reasons = append(reasons, w.reason()) }
				w.label("all-balanced")
				w.passes("a refusal", func() bool { see(); return !w.gpus.Faults()[function][0].Until.IsZero() })
				began, at := w.gpus.Faults()[function][0].Until.Add(-refused), len(w.snapshot()[0].Instances)
				w.passes("the end of it", func() bool { see(); return len(w.snapshot()[0].Instances) < at })
				if took := time.Since(began); took > time.Second {
					t.Errorf("a destroy that was refused for %s has held up the change for %s", refused, took)
				}
				w.passes("all-balanced", func() bool { see(); return w.done("all-balanced")() })
				if slices.Contains(reasons, config.ReasonGPUInUse) {
					t.Error("the node said GPUInUse")
				}
			})
		})
	}
	t.Run("that another client of the driver holds for good", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.converge("all-1g.10gb")
			if err := w.gpus.Fail(gpusim.ComputeInstanceDestroy, gpusim.Fault{Return: gpusim.InUse, For: time.Hour}); err != nil {
				t.Fatal(err)
			}
			w.label("all-balanced")
			if c := w.untilReason(config.ReasonGPUInUse); !strings.Contains(c.Message, "no process of this node has GPU 0 open") {
				t.Errorf("the node says %s", c.Message)
			}
		})
	})
}

func TestCDISpecsFollowTheGeometry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.specs = specs{used: true, describes: geometries(w.snapshot())}
		w.converge("all-balanced")
		if w.specs.describes != geometries(w.snapshot()) || w.specs.written != 1 {
			t.Errorf("specs were written %d times and describe %s", w.specs.written, w.specs.describes)
		}
	})
	t.Run("and a change is undone where they cannot", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			before := w.gpus.String()
			w.specs = specs{used: true, describes: geometries(w.snapshot()), broken: errors.New("read-only file system")}
			w.label("all-balanced")
			c := w.settle(config.ReasonStepFailed)
			w.expectGivenBack()
			if diff := cmp.Diff(before, w.gpus.String()); diff != "" || !strings.Contains(c.Message, "read-only") {
				t.Errorf("message %q; GPUs (-before +after):\n%s", c.Message, diff)
			}
		})
	})
}

// An undo may have no failure to report: a user may have withdrawn the request.
func TestCDISpecsThatCannotBeWrittenKeepNoNodeOnTheWayBack(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]func(n *corev1.Node){
		"from a label that was removed": func(n *corev1.Node) { delete(n.Labels, config.LabelMIGConfig) },
		"from a label without meaning":  func(n *corev1.Node) { n.Labels[config.LabelMIGConfig] = "nonsense" },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				before := w.gpus.String()
				w.specs = specs{used: true, describes: "what was before the agent", broken: errors.New("read-only file system")}
				w.startChange("all-1g.10gb")
				w.edit(edit)
				w.passes("an end of the undo", func() bool { return !w.hasJournal() })
				w.expectGivenBack()
				w.expectGPUs(before)
			})
		})
	}
}

// The agent tries to write the specs again in the next change: containers cannot use GPUs that no spec describes.
func TestAChangeDoesNotEndWithCDISpecsThatWereGivenUpBeforeIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.specs = specs{used: true, describes: geometries(w.snapshot()), broken: errors.New("read-only file system")}
		w.label("all-balanced")
		w.settle(config.ReasonStepFailed)
		w.label("all-1g.10gb")
		w.settle(config.ReasonStepFailed)
		w.specs.broken = nil
		w.converge("all-enabled")
		if w.specs.describes != geometries(w.snapshot()) {
			t.Errorf("the specs describe %s", w.specs.describes)
		}
	})
}

// Promise 14.
func TestNothingThatDoesNotAnswerIsWaitedForWithoutADeadline(t *testing.T) {
	t.Parallel()
	t.Run("logind, which every step asks", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "gpus: [{model: H100-80GB, count: 8}]")
			w.host.silent = true
			w.label("all-1g.10gb")
			began := time.Now()
			w.passes("the last instance", func() bool { return len(w.snapshot()[7].Instances) == 7 })
			if took := time.Since(began); took > time.Minute {
				t.Errorf("the change took %s of the bubble's time", took)
			}
			w.reach("all-1g.10gb")
			w.host.silent = false
			w.spend(10 * time.Minute)
			w.converge("all-balanced")
			if w.host.took == 0 {
				t.Error("a logind that answers again is not asked")
			}
		})
	})
	t.Run("the disk of the CDI specs", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.specs.silent = true
			w.converge("all-balanced")
		})
	})
	t.Run("the process table", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.holdDevice(string(w.snapshot()[1].UUID), 4194305)
			w.wrapDriver = func(d nvml.Driver) nvml.Driver { return patient{d} }
			w.settings.Timeouts.DriverCall = 0
			w.restart()
			w.label("all-balanced")
			w.untilReason(config.ReasonHoldersUnknown)
			if c := w.condition(); !strings.Contains(c.Message, context.DeadlineExceeded.Error()) || w.node().Spec.Unschedulable {
				t.Errorf("the search was not ended, or the node is cordoned: %s", c.Message)
			}
		})
	})
}

// patient is a driver that ignores deadlines.
type patient struct{ nvml.Driver }

func (d patient) Snapshot(ctx context.Context) ([]nvml.GPU, error) {
	return d.Driver.Snapshot(context.WithoutCancel(ctx))
}

func (d patient) SetMode(ctx context.Context, gpu nvml.UUID, on bool) error {
	return d.Driver.SetMode(context.WithoutCancel(ctx), gpu, on)
}

func (d patient) Create(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	return d.Driver.Create(context.WithoutCancel(ctx), gpu, p)
}

// replaced is a driver of another version than the one that this process has loaded.
type replaced struct{ nvml.Driver }

func (replaced) Snapshot(context.Context) ([]nvml.GPU, error) { return nil, nvml.ErrReplaced }

func (replaced) Events(context.Context) (<-chan nvml.Event, error) { return nil, nvml.ErrReplaced }

func TestAReplacedDriverEndsTheRunSoThatANewProcessLoadsIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.wrapDriver = func(d nvml.Driver) nvml.Driver { return replaced{d} }
		w.restart()
		w.agent.Pass(t.Context())
		if c := w.condition(); c.Reason != string(config.ReasonDriverNotLoaded) {
			t.Errorf("the node says %s: %s", c.Reason, c.Message)
		}
		if !w.agent.Replaced() {
			t.Error("the run goes on")
		}
	})
}

// leaving is a driver that counts how often the agent has released it.
type leaving struct {
	nvml.Driver
	released int
	observed int
}

func (d *leaving) Release(context.Context) error {
	d.released++
	return nil
}

func (d *leaving) Snapshot(ctx context.Context) ([]nvml.GPU, error) {
	d.observed++
	return d.Driver.Snapshot(ctx)
}

func TestTheAgentLetsGoOfADriverThatIsBeingUpgraded(t *testing.T) {
	t.Parallel()
	const plugin = config.LabelDevicePlugin
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		d := &leaving{Driver: w.gpus.Driver()}
		w.wrapDriver = func(nvml.Driver) nvml.Driver { return d }
		w.restart()
		w.converge("all-balanced")
		before := d.observed
		w.set(plugin, fence.PausedForDriverUpgrade)
		w.spend(time.Minute)
		if c := w.condition(); d.released == 0 || d.observed != before || c.Status != corev1.ConditionUnknown {
			t.Errorf("let go %d times, observed %d times more; the node says %s %s: %s", d.released, d.observed-before, c.Status, c.Reason, c.Message)
		}
		w.set(plugin, "true")
		w.reach("all-balanced")
	})
}
