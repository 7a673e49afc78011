package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/test/incumbent"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// drained is what people do by hand. With the device plugin all pods leave the node, nvidia-mig-parted cuts the GPUs, the device plugin starts
// again, and the node is uncordoned. No one pauses between the commands.
type drained struct {
	*stage
	programs incumbent.Programs
	plugin   deployment
	cut      func(person, context.Context) error
}

func fullDrain(st *stage, programs incumbent.Programs) contender {
	return drained{st, programs, operators, person.drainAndCut}
}

// byHand is what people do by hand on a node of NVIDIA's DRA driver, which reads the geometry once, at its start.
func byHand(st *stage, programs incumbent.Programs) contender {
	return drained{st, programs, draDriver, person.cutAndRestart}
}

func (d drained) run(ctx context.Context, dir string, s scenario) (r result, err error) {
	at, err := d.open(ctx, dir, s, d.plugin)
	if err != nil {
		return r, err
	}
	defer func() {
		err = errors.Join(err, at.close(ctx))
	}()
	log, err := os.Create(filepath.Join(dir, "commands.log"))
	if err != nil {
		return r, fmt.Errorf("making a log: %w", err)
	}
	defer func() {
		err = errors.Join(err, log.Close())
	}()
	p := person{at: at, programs: d.programs, cut: d.cut, log: log, config: filepath.Join(dir, "config.yaml"), tools: filepath.Join(dir, "tools")}
	if err := os.WriteFile(p.config, s.file(), 0o600); err != nil {
		return r, fmt.Errorf("writing the config: %w", err)
	}
	if err := d.programs.InstallTools(p.tools); err != nil {
		return r, err
	}
	return at.measure(ctx, p.change)
}

// person is someone at a terminal, with kubectl and a shell on the node.
type person struct {
	at            *site
	cut           func(person, context.Context) error // the commands
	programs      incumbent.Programs
	log           *os.File // commands and what they say
	config, tools string   // the file with the config, and the directory with NVIDIA's tools
}

// change makes the change. A command that fails ends it, but the node is always uncordoned.
func (p person) change(ctx context.Context) (end ending, err error) {
	began := time.Now()
	end.word = success
	if err := p.cut(p, ctx); err != nil {
		end.word = failed
		fmt.Fprintln(p.log, err)
	}
	end.said = time.Since(began)
	if ctx.Err() != nil {
		return end, ctx.Err()
	}
	end.over, err = p.at.awaitEnd(ctx, func(*corev1.Node) bool { return true })
	return end, err
}

// cutAndRestart cuts the GPUs, and has the DaemonSet of the DRA driver recreate its pod.
func (p person) cutAndRestart(ctx context.Context) error {
	if err := p.migParted(ctx, "apply"); err != nil {
		return err
	}
	return p.kubectl(ctx, "delete", "pod", "--namespace", draDriver.namespace, "--selector", draDriver.selector, "--field-selector", "spec.nodeName="+p.at.Name)
}

// drainAndCut drains the node only if its GPUs are otherwise than asked.
func (p person) drainAndCut(ctx context.Context) (err error) {
	if p.migParted(ctx, "assert") == nil {
		return nil
	}
	defer func() { err = errors.Join(err, p.kubectl(ctx, "uncordon", p.at.Name)) }()
	if err := p.kubectl(ctx, "drain", p.at.Name, "--ignore-daemonsets", "--delete-emptydir-data", "--force",
		"--timeout", patience.String()); err != nil {
		return err
	}
	return p.withoutPlugin(ctx, func() error { return p.migParted(ctx, "apply") })
}

// withoutPlugin does something while the device plugin is not running: the plugin keeps GPUs open and reads their layout
// only when it starts. The label of the GPU Operator removes it.
func (p person) withoutPlugin(ctx context.Context, do func() error) (err error) {
	plugin := func(value string) error {
		return p.kubectl(ctx, "label", "node", p.at.Name, labelPlugin+"="+value, "--overwrite")
	}
	defer func() { err = errors.Join(err, plugin("true")) }()
	if err := plugin("false"); err != nil {
		return err
	}
	err = p.kubectl(ctx, "wait", "--for=delete", "pod", "--namespace", operatorNamespace,
		"--selector", labelApp+"="+pluginApp, "--field-selector", "spec.nodeName="+p.at.Name, "--timeout", patience.String())
	if err != nil {
		return err
	}
	return do()
}

func (p person) migParted(ctx context.Context, verb string) error {
	inside := p.at.Sandbox()
	inside.Env = append(inside.Env, incumbent.PathWith(p.tools))
	return p.enter(sandbox.Command(ctx, p.programs.Sandbox, inside, filepath.Join(p.programs.MIGParted, "nvidia-mig-parted"),
		verb, "-f", p.config, "-c", p.at.scenario.config))
}

func (p person) kubectl(ctx context.Context, args ...string) error {
	args = append([]string{"--kubeconfig", p.at.cluster.AdminKubeconfig()}, args...)
	return p.enter(exec.CommandContext(ctx, p.at.cluster.Kubectl(), args...))
}

// enter runs a command and returns when it has ended.
func (p person) enter(cmd *exec.Cmd) error {
	fmt.Fprintln(p.log, "$", cmd)
	cmd.Stdout, cmd.Stderr = p.log, p.log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("running %s: %w", cmd, err)
	}
	return nil
}
