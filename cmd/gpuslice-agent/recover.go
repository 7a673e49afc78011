package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/gofrs/flock"
	"github.com/spf13/cobra"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/show"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// exitNotOurs is the exit code if nothing is left to restore on the node, and another tool or user keeps it closed.
const exitNotOurs = 3

// recovery has the flags of the command.
type recovery struct {
	dryRun  bool
	output  string
	timeout time.Duration
	adopt   []string
}

func (o *options) recover() *cobra.Command {
	var r recovery
	c := &cobra.Command{
		Use:         "recover",
		Annotations: map[string]string{annotationGrace: gracePeriod.String()},
		Short:       "Say why this node is kept from pods, and give back what is ours",
		Long: `Says why this node is kept from pods: whose cordon it is, what is to be restored, who is in the way, and what to do.

Then what is ours is given back: by the agent that runs on the node, which is watched, or by this command if none runs.
A cordon of another user or tool is never lifted.

Exit codes: 0 the node is given back, or with --dry-run: it was read; 3 nothing of ours keeps it closed, another
user or tool does, and it is said who; 1 anything else, as when the timeout has come first.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if r.output != "text" && r.output != "json" {
				return fmt.Errorf("flag --output is %q: it must be text or json", r.output)
			}
			for _, name := range r.adopt {
				if name != config.AdoptMIGManager {
					return fmt.Errorf("flag --adopt is %q: it must be %s", name, config.AdoptMIGManager)
				}
			}
			return o.giveBack(cmd.Context(), cmd.OutOrStdout(), r)
		},
	}
	c.Flags().BoolVar(&r.dryRun, "dry-run", false, "print the diagnosis, and change nothing")
	c.Flags().StringVarP(&r.output, "output", "o", "text", "text or json")
	c.Flags().DurationVar(&r.timeout, "timeout", 10*time.Minute, "how long to wait until the node is restored")
	c.Flags().StringSliceVar(&r.adopt, "adopt", nil, "restore also the remains of another program: "+config.AdoptMIGManager)
	return c
}

// giveBack prints the diagnosis, and has the node given back.
func (o *options) giveBack(ctx context.Context, w io.Writer, r recovery) error {
	running, err := o.agentRuns(r.dryRun)
	if err != nil {
		return err
	}
	log := zap.NewNop()
	if !running && !r.dryRun {
		if log, err = o.logger(); err != nil {
			return err
		}
		if !o.debug { // the node's condition says what the agent does
			log = log.WithOptions(zap.IncreaseLevel(zap.WarnLevel))
		}
	}
	if !running { // an agent that runs has settings of its own
		o.adopt = r.adopt
	}
	a, err := o.agent(ctx, log, metrics.New(clock.RealClock{}))
	if err != nil {
		return err
	}
	first := a.Diagnose(ctx, running)
	out := &progress{out: cli.Printer{W: w}, json: r.output == "json", last: nodeMessage{Reason: first.Agent.Reason, Message: first.Agent.Message}}
	out.say(first)
	if r.dryRun {
		return out.out.Err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, r.timeout, fmt.Errorf("not given back in %s", r.timeout))
	defer cancel()
	if running {
		err = o.watch(ctx, a, out, len(r.adopt) > 0)
	} else {
		err = a.Recover(ctx, out.node)
	}
	switch {
	case errors.Is(err, nvml.ErrReplaced):
		return replaceProcess()
	case err != nil:
		return err
	}
	return o.conclude(ctx, a, running, first.Outcome, out)
}

// watch waits while the agent that runs gives the node back. If adopt is set, it then restores what mig-manager has left.
func (o *options) watch(ctx context.Context, a *agent.Agent, out *progress, adopt bool) error {
	if err := a.AwaitRecovered(ctx, out.node); err != nil || !adopt {
		return err
	}
	restored, err := a.Restore(ctx)
	if err != nil {
		return err
	}
	out.restored(restored)
	return nil
}

// conclude says whether the node takes pods, once the agent has restored all.
func (o *options) conclude(ctx context.Context, a *agent.Agent, running bool, first api.Outcome, out *progress) error {
	end := a.Diagnose(ctx, running).Outcome
	closed := end.Verdict != api.VerdictFree
	out.outcome(end, !closed && end.Text != first.Text)
	switch {
	case out.out.Err != nil:
		return out.out.Err
	case closed:
		return &cli.ExitError{Err: errors.New(end.Text), Code: exitNotOurs}
	default:
		return nil
	}
}

// agentRuns reports whether an agent runs on this machine, by the lock that it holds. If none does, it takes the lock for the rest
// of this process, unless checkOnly is set.
func (o *options) agentRuns(checkOnly bool) (running bool, err error) {
	if _, err := os.Stat(o.lockFile); errors.Is(err, os.ErrNotExist) && checkOnly {
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(o.lockFile), 0o755); err != nil { //nolint:gosec // holds nothing but the lock
		return false, fmt.Errorf("finding the agent of this machine: %w", err)
	}
	file := flock.New(o.lockFile)
	free, err := file.TryLock()
	switch {
	case err != nil:
		return false, fmt.Errorf("finding the agent of this machine by %s: %w", o.lockFile, err)
	case free && checkOnly:
		return false, file.Unlock()
	case free:
		processLock = file
		return false, nil
	default:
		return true, nil
	}
}

// progress prints what happens: as text for users, or as one JSON document after the other for programs.
type progress struct {
	out  cli.Printer
	json bool
	last nodeMessage
}

// nodeMessage is reason and message of the node's condition.
type nodeMessage struct {
	At      time.Time     `json:"at"`
	Reason  config.Reason `json:"reason"`
	Message string        `json:"message"`
}

func (p *progress) say(d api.Diagnosis) {
	if p.json {
		p.encode(d)
		return
	}
	p.line(show.Diagnosis(d))
}

// restored lists the labels that have their value again.
func (p *progress) restored(labels []string) {
	switch {
	case len(labels) == 0:
	case p.json:
		p.encode(map[string][]string{"restored": labels})
	default:
		p.line("restored: " + strings.Join(labels, ", "))
	}
}

// outcome prints how the node is in the end. As text it prints that only if it has changed, and is not the command's error.
func (p *progress) outcome(end api.Outcome, changed bool) {
	switch {
	case p.json:
		p.encode(end)
	case changed:
		p.line(end.Text)
	}
}

// node prints the node's condition, if it has changed.
func (p *progress) node(n *corev1.Node) {
	for _, c := range n.Status.Conditions {
		if c.Type != config.ConditionGPUPartitionReady {
			continue
		}
		now := nodeMessage{At: c.LastHeartbeatTime.UTC(), Reason: config.Reason(c.Reason), Message: c.Message}
		if now.Reason == p.last.Reason && now.Message == p.last.Message {
			return
		}
		p.last = now
		if p.json {
			p.encode(now)
			return
		}
		p.line(fmt.Sprintf("%s  %s: %s", now.At.Format(time.TimeOnly+"Z"), now.Reason, sanitize.Message(now.Message, sanitize.Longest)))
	}
}

func (p *progress) encode(what any) {
	if p.out.Err != nil {
		return
	}
	e := json.NewEncoder(printableWriter{p.out.W})
	e.SetIndent("", "  ")
	p.out.Err = e.Encode(what)
}

func (p *progress) line(text string) { p.out.Printf("%s\n", text) }
