package main

import (
	"context"
	"fmt"
	"reflect"
	"strings"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
)

// trial is one run on a machine.
type trial struct {
	*machine
	report *report

	before []nvml.GPU // as they were found
}

// all makes all checks.
func (t *trial) all(ctx context.Context) {
	// A call that would change a GPU ends the run at once.
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	t.driver.stop = stop

	t.report.check("what the driver reports is what nvidia-smi says", func() (string, error) { return t.compare(ctx) })
	t.report.check("each generated config is planned", func() (string, error) { return t.plans() })
	t.report.check("impossible configs are refused", func() (string, error) { return t.refusals() })
	t.report.check("health is read, and what that costs", func() (string, error) { return t.health(ctx) })
	t.report.alone("a program's faulting kernel is an application's Xid 31", func() (string, error) { return t.fault(ctx) })
	t.share(ctx)
	t.report.alone("GPUs are as they were found, and no call would have changed them", func() (string, error) {
		return t.unchanged(context.WithoutCancel(ctx))
	})
}

// unchanged compares the GPUs with what they were.
func (t *trial) unchanged(ctx context.Context) (string, error) {
	if calls := t.driver.calls(); len(calls) > 0 {
		return "", fmt.Errorf("refused: %s", strings.Join(calls, "; "))
	}
	if t.gpus != nil {
		if calls := t.gpus.Calls(); len(calls) > 0 {
			return "", fmt.Errorf("the simulated driver was asked to change something: %v", calls)
		}
	}
	if t.before == nil {
		return "", notHere("it is not known how they were: " + unmet)
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	after, err := t.driver.Snapshot(ctx)
	if err != nil {
		return "", err
	}
	was, is := lasting(t.before), lasting(after)
	if !reflect.DeepEqual(was, is) {
		return "", fmt.Errorf("before and after (-+):\n%s", cmp.Diff(was, is))
	}
	return fmt.Sprintf("%s: MIG mode, instances, persistence and compute mode are the same", counted(len(after), "GPU")), nil
}

// lasting is what stays of GPUs when programs come and go.
func lasting(gpus []nvml.GPU) []nvml.GPU {
	var out []nvml.GPU
	for _, g := range gpus {
		g.UsedMiB, g.Processes = 0, nil
		instances := g.Instances
		g.Instances = nil
		for _, i := range instances {
			i.Processes, i.UsedMiB = nil, 0
			devices := i.Devices
			i.Devices = nil
			for _, d := range devices {
				d.Processes = nil
				i.Devices = append(i.Devices, d)
			}
			g.Instances = append(g.Instances, i)
		}
		out = append(out, g)
	}
	return out
}

func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
