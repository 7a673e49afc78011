package kubelet

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// probe follows the container's probes until ctx ends: those of httpGet, and those of exec whose program its image has. The channel tells
// of a liveness or startup probe that has failed too often. A container without a readiness probe is ready at once; other probes count as
// passed.
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
					default: // told already
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

func (c *container) canBeAsked(p *corev1.Probe) bool {
	return p != nil && (p.HTTPGet != nil || p.Exec != nil && c.probed(p.Exec.Command))
}

// probed reports whether the image has the program that an exec probe names.
func (c *container) probed(command []string) bool {
	return len(command) > 0 && c.image != nil && c.image.Exec[command[0]].Path != ""
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

// ask asks the probe's question once.
func (w *worker) ask(ctx context.Context, c *container, p *corev1.Probe) error {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(cmp.Or(p.TimeoutSeconds, 1))*time.Second)
	defer cancel()
	if p.Exec != nil {
		return w.askProgram(ctx, c, p.Exec.Command)
	}
	return w.askPage(ctx, c, p)
}

// askProgram runs a program in the container: it passes if that ends with 0.
func (w *worker) askProgram(ctx context.Context, c *container, command []string) error {
	program := c.image.Exec[command[0]]
	cmd, err := w.command(ctx, c, command[0], program.Path, func(environment) []string { return append(afterFirst(command), program.Args...) })
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

// askPage sends the probe's request.
func (w *worker) askPage(ctx context.Context, c *container, p *corev1.Probe) error {
	port, err := portOf(c, p.HTTPGet.Port)
	if err != nil {
		return err
	}
	scheme, host := "http", cmp.Or(p.HTTPGet.Host, w.k.Address)
	if p.HTTPGet.Scheme == corev1.URISchemeHTTPS {
		scheme = "https"
	}
	url := scheme + "://" + net.JoinHostPort(host, strconv.Itoa(port)) + p.HTTPGet.Path
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return fmt.Errorf("probing %s: %w", url, err)
	}
	for _, h := range p.HTTPGet.HTTPHeaders {
		request.Header.Add(h.Name, h.Value)
	}
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}}
	answer, err := client.Do(request)
	if err != nil {
		return fmt.Errorf("probing %s: %w", url, err)
	}
	if err := answer.Body.Close(); err != nil {
		return fmt.Errorf("probing %s: %w", url, err)
	}
	if answer.StatusCode < 200 || answer.StatusCode >= 400 {
		return fmt.Errorf("probing %s: status %s", url, answer.Status)
	}
	return nil
}

func portOf(c *container, port intstr.IntOrString) (int, error) {
	if port.Type == intstr.Int {
		return port.IntValue(), nil
	}
	for _, p := range c.spec.Ports {
		if p.Name == port.StrVal {
			return int(p.ContainerPort), nil
		}
	}
	return 0, errors.New("probing port " + port.StrVal + ": the container names no such port")
}
