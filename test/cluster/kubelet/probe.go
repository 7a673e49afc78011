package kubelet

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// probe follows the container's probes until ctx ends: exec probes if its image has their program. The channel receives a
// failure when a liveness or startup probe has failed too often. A container without a readiness probe is ready at
// once; other probes count as passed.
func (w *worker) probe(ctx context.Context, c *container) <-chan error {
	unhealthy := make(chan error, 2)
	ready := func(is bool) {
		w.set(c, func(s *corev1.ContainerStatus) { s.Ready = is && s.State.Running != nil })
	}
	startup, liveness, readiness := c.canBeAsked(c.spec.StartupProbe), c.canBeAsked(c.spec.LivenessProbe), c.canBeAsked(c.spec.ReadinessProbe)
	if !readiness && !startup {
		ready(true)
	}
	go func() {
		if startup {
			if err := w.untilPassed(ctx, c, c.spec.StartupProbe); err != nil {
				unhealthy <- err
				return
			}
			if !readiness && ctx.Err() == nil {
				ready(true)
			}
		}
		if liveness {
			go w.follow(ctx, c, c.spec.LivenessProbe, func(passes bool, why error) {
				if !passes {
					select {
					case unhealthy <- why:
					default: // notified already
					}
				}
			})
		}
		if readiness {
			w.follow(ctx, c, c.spec.ReadinessProbe, func(passes bool, _ error) { ready(passes) })
		}
	}()
	return unhealthy
}

// canBeAsked reports whether the probe runs a program that the image has.
func (c *container) canBeAsked(p *corev1.Probe) bool {
	return p != nil && p.Exec != nil && len(p.Exec.Command) > 0 && c.image.Exec[p.Exec.Command[0]].Path != ""
}

// untilPassed returns nil when the probe has passed, or ctx ended, and an error when it failed too often.
func (w *worker) untilPassed(ctx context.Context, c *container, p *corev1.Probe) error {
	probing, done := context.WithCancel(ctx)
	defer done()
	var failed error
	w.follow(probing, c, p, func(passes bool, why error) {
		if !passes {
			failed = why
		}
		done()
	})
	return failed
}

// follow asks once a period, and calls changed whenever the thresholds say that the answer has changed.
func (w *worker) follow(ctx context.Context, c *container, p *corev1.Probe, changed func(passes bool, why error)) {
	var known, passes bool
	var in int32 // how many of the same answers came in a row
	if !w.sleep(ctx, time.Duration(p.InitialDelaySeconds)*time.Second) {
		return
	}
	for {
		why := w.ask(ctx, c, p)
		if ctx.Err() != nil {
			return
		}
		if now := why == nil; now == passes {
			in++
		} else {
			passes, in = now, 1
		}
		threshold := max(p.SuccessThreshold, 1)
		if !passes {
			threshold = cmp.Or(p.FailureThreshold, 3)
		}
		if in == threshold || (in > threshold && !known) {
			known = true
			changed(passes, why)
		}
		if !w.sleep(ctx, time.Duration(cmp.Or(p.PeriodSeconds, 10))*time.Second) {
			return
		}
	}
}

// ask runs the probe's program in the container once: it passes if that ends with 0.
func (w *worker) ask(ctx context.Context, c *container, p *corev1.Probe) error {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(cmp.Or(p.TimeoutSeconds, 1))*time.Second)
	defer cancel()
	command := p.Exec.Command
	program := c.image.Exec[command[0]]
	cmd, err := w.command(ctx, c, command[0], program.Path, append(afterFirst(command), program.Args...))
	if err != nil {
		return fmt.Errorf("probing by %v: %w", command, err)
	}
	var says strings.Builder
	cmd.Stdout, cmd.Stderr = &says, &says
	ended, err := launch(cmd)
	if err == nil {
		err = <-ended
	}
	if err != nil {
		return fmt.Errorf("probing by %v: %w: %s", command, err, says.String())
	}
	return nil
}
