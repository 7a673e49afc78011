// Command skew takes the core scenarios of the tests through earlier versions. They are those of test/node and test/policy that scenarios
// names. It runs them once with each Kubernetes and the plugin of all tests, and once with each of NVIDIA's device plugins and the Kubernetes
// of all tests. It prints a table of what passed, and what the agent has said. It builds missing binaries: all of them take one core an hour.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/program"
)

func main() {
	var o options
	command := program.New("skew", "Take the core scenarios through earlier versions of Kubernetes and of NVIDIA's device plugin",
		func(ctx context.Context) error { return o.run(ctx) })
	command.Flags().StringSliceVar(&o.only, "only", nil, `versions to run, as "kubernetes v1.30.14" or "plugin v0.17.4"; all if none is named`)
	command.Flags().BoolVar(&o.build, "build", false, "only build what is missing")
	command.Flags().IntVar(&o.parallel, "parallel", 8, "tests that run at a time")
	program.Main(command)
}

type options struct {
	only     []string
	build    bool
	parallel int
}

// version is one run: a version other than those that all tests run with, or neither.
type version struct {
	title        string
	kube, plugin string // "" for the one that all tests run with
}

var errFailed = errors.New("not all has passed")

func (o options) run(ctx context.Context) error {
	b := program.Builder(os.Stderr, os.Stderr)
	versions, err := o.versions(b)
	if err != nil {
		return err
	}
	var columns []column
	for _, v := range versions {
		fmt.Fprintf(os.Stderr, "== %s\n", v.title)
		c, err := o.one(ctx, b, v)
		if err != nil {
			return fmt.Errorf("%s: %w", v.title, err)
		}
		columns = append(columns, c)
	}
	if !o.build && !write(os.Stdout, columns) {
		return errFailed
	}
	return nil
}

// versions are those to run, the oldest Kubernetes first and the oldest plugin last.
func (o options) versions(b binaries.Builder) ([]version, error) {
	kube, plugins, err := b.Versions()
	if err != nil {
		return nil, err
	}
	now := len(kube) - 1
	var all []version
	for i, v := range kube {
		one := version{title: "kubernetes " + v, kube: v}
		if i == now {
			one = version{title: "kubernetes " + v + ", plugin " + plugins[len(plugins)-1]}
		}
		all = append(all, one)
	}
	for _, v := range slices.Backward(plugins[:len(plugins)-1]) {
		all = append(all, version{title: "plugin " + v, plugin: v})
	}
	if len(o.only) == 0 {
		return all, nil
	}
	chosen := slices.DeleteFunc(slices.Clone(all), func(v version) bool {
		return !slices.ContainsFunc(o.only, func(name string) bool { return strings.Contains(v.title, name) })
	})
	if len(chosen) == 0 {
		return nil, fmt.Errorf("--only=%s is none of %v", strings.Join(o.only, ","), all)
	}
	return chosen, nil
}

// one builds what a version takes, and runs the tests of the scenarios with it.
func (o options) one(ctx context.Context, b binaries.Builder, v version) (column, error) {
	c := column{title: v.title, plugin: v.plugin != ""}
	for variable, value := range map[string]string{binaries.KubeVersion: v.kube, binaries.DevicePluginVersion: v.plugin} {
		if err := os.Setenv(variable, value); err != nil {
			return c, err
		}
	}
	for _, build := range []func(context.Context) (string, error){b.Kube, b.DevicePlugin} {
		if _, err := build(ctx); err != nil {
			return c, err
		}
	}
	if o.build {
		return c, nil
	}
	taken := slices.DeleteFunc(slices.Clone(scenarios), func(s scenario) bool { return s.kube && c.plugin })
	pattern, packages := selected(taken)
	args := append([]string{
		"test", "-json", "-short", "-count=1", "-vet=off", "-ldflags=-s -w", "-p=1", fmt.Sprintf("-parallel=%d", o.parallel), "-timeout=60m", "-run=" + pattern,
	}, packages...)
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	out, err := cmd.StdoutPipe()
	if err != nil {
		return c, err
	}
	if err := cmd.Start(); err != nil {
		return c, err
	}
	c.results, err = read(out, os.Stderr)
	var exit *exec.ExitError
	if waited := cmd.Wait(); waited != nil && (!errors.As(waited, &exit) || ctx.Err() != nil) { // a failed test is reported in the table
		return c, waited
	}
	return c, err
}
