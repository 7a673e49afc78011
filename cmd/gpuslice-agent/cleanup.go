package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/monitor/health"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/cleanup"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/nvml"
)

var errAgentRuns = errors.New("an agent runs on this node, and would write again what is removed: run the command in its place, as deploy/README.md says")

// cleaning has the flags of the command.
type cleaning struct {
	dryRun, stay bool
	output       string
	timeout      time.Duration
}

func (o *options) cleanup() *cobra.Command {
	var c cleaning
	cmd := &cobra.Command{
		Use:         "cleanup",
		Annotations: map[string]string{annotationGrace: gracePeriod.String()},
		Short:       "Remove from this node and its host what agents have left there, before gpuslice is uninstalled",
		Long: `Restores what an agent has taken from the node, as recover does, and then removes what agents have written: their labels, annotations,
taints and conditions from the node, and their records from the host. GPUs stay cut and shared as they are, and labels that users have
set stay. It prints what it has removed, and what stays with what you can do.

It runs where no agent runs. deploy/README.md says how to run it on all nodes, in place of the agents.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.output != "text" && c.output != "json" {
				return fmt.Errorf("flag --output is %q: it must be text or json", c.output)
			}
			return o.clean(cmd.Context(), cmd.OutOrStdout(), c)
		},
	}
	cmd.Flags().BoolVar(&c.dryRun, "dry-run", false, "print what would be removed, and change nothing")
	cmd.Flags().BoolVar(&c.stay, "stay", false, "for a DaemonSet: wait for an agent that runs to end, be ready when the node is clean, and do not exit")
	cmd.Flags().StringVarP(&c.output, "output", "o", "text", "text or json")
	cmd.Flags().DurationVar(&c.timeout, "timeout", 10*time.Minute, "how long to wait until the node is restored")
	return cmd
}

// clean gives the node back, and removes what agents have left.
func (o *options) clean(ctx context.Context, w io.Writer, c cleaning) error {
	var done atomic.Bool
	if err := o.replaceAgent(ctx, c, &done); err != nil {
		return err
	}
	log := zap.NewNop()
	if !c.dryRun {
		var err error
		if log, err = o.logger(); err != nil {
			return err
		}
	}
	a, err := o.agent(ctx, log, metrics.New(clock.RealClock{}))
	if err != nil {
		return err
	}
	if !c.dryRun {
		bounded, cancel := context.WithTimeoutCause(ctx, c.timeout, fmt.Errorf("not given back in %s", c.timeout))
		err := a.Recover(bounded, func(*corev1.Node) {})
		cancel()
		if errors.Is(err, nvml.ErrReplaced) {
			return replaceProcess()
		}
		if err != nil {
			return err
		}
	}
	cleaner, err := o.cleaner()
	if err != nil {
		return err
	}
	report, failed := cleaner.Clean(ctx, c.dryRun)
	if errors.Is(failed, cleanup.ErrPendingRestore) && c.dryRun {
		return fmt.Errorf("%w; without --dry-run the command restores the node first, as recover does, and then removes what the agent has left; "+
			"it can list that when the node is restored", failed)
	}
	if err := errors.Join(failed, writeCleaning(w, report, c)); err != nil {
		return err
	}
	done.Store(true)
	if c.stay && !c.dryRun {
		<-ctx.Done()
	}
	return nil
}

// replaceAgent makes sure that no agent runs on this machine, and answers kubelet's probes in its place.
func (o *options) replaceAgent(ctx context.Context, c cleaning, done *atomic.Bool) error {
	switch {
	case c.dryRun:
		return nil
	case !c.stay:
		running, err := o.agentRuns(false)
		if err == nil && running {
			return errAgentRuns
		}
		return err
	}
	log, err := o.logger()
	if err != nil {
		return err
	}
	o.answerHealth(ctx, func() report.LoopState {
		if done.Load() {
			return report.LoopState{Alive: true, Ready: true, Says: "the node is clean"}
		}
		return report.LoopState{Alive: true, Says: "the node is not clean yet"}
	}, log)
	return o.lock(ctx, log)
}

func (o *options) cleaner() (*cleanup.Cleaner, error) {
	client, err := o.client()
	if err != nil {
		return nil, err
	}
	settings, err := o.load()
	if err != nil {
		return nil, err
	}
	record := journal.RecordIn(o.stateDir)
	files := []cleanup.File{health.In(o.stateDir), lastSettings(o.stateDir), record}
	var plugin *deviceplugin.File
	if name := settings.DevicePlugin.ConfigFile; name != "" {
		plugin = deviceplugin.NewFile(cmp.Or(o.pluginConfig, name), name)
		files = append(files, plugin.Notes())
	}
	return &cleanup.Cleaner{
		Client: client, Node: o.node, Timeout: settings.Timeouts.APICall, Startup: settings.StartupTaints(), Files: files, Plugin: plugin,
		Published: func(ctx context.Context) (nodekeys.Keys, error) {
			r, err := record.Read(ctx)
			if err != nil || r == nil {
				return nodekeys.Keys{}, err
			}
			return r.Learnt.Published, nil
		},
	}, nil
}

func writeCleaning(w io.Writer, r cleanup.Report, c cleaning) error {
	if c.output == "json" {
		e := json.NewEncoder(printableWriter{w})
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	verb := "removed"
	if c.dryRun {
		verb = "would remove"
	}
	out := &cli.Printer{W: w}
	for _, what := range r.Removed {
		out.Printf("%s: %s\n", verb, what)
	}
	for _, what := range r.Left {
		out.Printf("left: %s\n", what)
	}
	if len(r.Removed)+len(r.Left) == 0 {
		out.Printf("nothing of gpuslice is on this node\n")
	}
	return out.Err
}
