package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/renameio/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim/pods"
	"github.com/gpuslice/gpuslice/test/hardware/cut"
)

// cutOptions are the flags of a run that cuts GPUs.
type cutOptions struct {
	cut, restore bool
	confirm      []string // UUIDs
	profile      string   // file
	kept         string   // directory of what was found
}

const (
	// rounds is how often each call is made: a GPU with a slow SetMigMode takes half a minute for them.
	rounds = 5
	// restoreTime bounds the restoration of all GPUs.
	restoreTime = 10 * time.Minute
	kubeletAt   = "/var/lib/kubelet/pod-resources/kubelet.sock"
	// keptAt is the same for all runs on a machine: one at a time has it.
	keptAt = "/var/lib/gpuslice-hardware"
)

var (
	errTwoOrders = errors.New("--cut measures and then restores, --restore only restores: use one of both")
	errNothing   = errors.New("simulated GPUs go with the run that made them: there is nothing to restore")
	errNotRoot   = errors.New("only root changes MIG mode: run it as root")
)

// cutting is a run that cuts GPUs.
type cutting struct {
	*trial
	cutOptions
	raw   nvml.Driver // that no guard keeps from anything
	store *cut.Store
	users cut.Machine
	bench *cut.Bench
	found *cut.Found // what is to be restored; nil if nothing is
	fixed error      // why MIG mode does not change on this machine; nil if it does
}

// runCut measures what it takes to cut the confirmed GPUs, or only restores what an earlier run has left.
func (o options) runCut(ctx context.Context, dir string) (err error) {
	switch {
	case o.cut && o.restore:
		return errTwoOrders
	case o.simulated && o.restore:
		return errNothing
	case !o.simulated && os.Geteuid() != 0:
		return errNotRoot
	}
	c, err := o.cutting(ctx, dir)
	if err != nil {
		return err
	}
	defer c.close()
	if c.store, err = cut.Open(c.kept); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.store.Close(ctx)) }()
	if err := c.restoreFormer(ctx); err != nil || o.restore {
		return err
	}
	gpus, err := c.vacant(ctx)
	if err != nil {
		return err
	}
	if !o.simulated {
		programs, err := o.programs(ctx, dir)
		if err != nil {
			return err
		}
		c.programs = tree(programs)
	}
	return c.all(ctx, gpus)
}

// cutting finds the GPUs. A simulated machine is apart from this one: no process or kubelet of this one uses its GPUs.
func (o options) cutting(ctx context.Context, dir string) (*cutting, error) {
	users := cut.Machine{Processes: "/proc", Kubelet: kubeletAt}
	var programs string
	if o.simulated { // the simulated driver is one of the programs
		var err error
		if programs, err = o.programs(ctx, dir); err != nil {
			return nil, err
		}
		o.kept = filepath.Join(dir, "found")
		users = cut.Machine{Processes: filepath.Join(dir, "processes"), Kubelet: filepath.Join(dir, "none.sock")}
	}
	m, err := o.machine(programs, dir)
	if err != nil {
		return nil, err
	}
	if o.simulated {
		if _, err := pods.MakeTable(users.Processes, m.bootID); err != nil {
			m.close()
			return nil, err
		}
	}
	calls := &cut.Calls{}
	driver := lib.Open(lib.Options{DriverRoot: m.driverRoot, Logger: m.log, Wrap: calls.Wrap})
	m.driver = &guard{reader: driver}
	return &cutting{
		trial: &trial{machine: m, report: newReport(os.Stderr, m.simulated)}, cutOptions: o.cutOptions, raw: driver, users: users,
		bench: &cut.Bench{Driver: m.driver, Calls: calls, Rounds: rounds, Figures: &cut.Figures{}},
	}, nil
}

// restoreFormer restores what an earlier run was killed before it could restore.
func (c *cutting) restoreFormer(ctx context.Context) error {
	left, err := c.store.Load(ctx)
	if err != nil {
		return err
	}
	if left == nil {
		if c.restore {
			fmt.Println("there is nothing to restore: no run has left a GPU other than it was")
		}
		return nil
	}
	began := left.Began.Format(time.DateTime)
	if !c.restore && len(c.confirm) == 0 {
		return fmt.Errorf("no GPU was changed. The run of %s ended before it could restore its GPUs: restore them by CUT=restore (run.sh --restore)", began)
	}
	if err := c.unused(ctx, left); err != nil {
		return fmt.Errorf("the run of %s has left its GPUs changed, and they are in use now, so nothing was restored:\n%w", began, err)
	}
	c.found = left
	saw, err := c.bringBack(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("restored what the run of %s has left: %s\n", began, saw)
	return nil
}

// unused returns what uses the GPUs of an earlier run.
func (c *cutting) unused(ctx context.Context, left *cut.Found) error {
	call, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	all, err := c.bench.Driver.Snapshot(call)
	if err != nil {
		return err
	}
	gpus := slices.DeleteFunc(slices.Clone(all), func(g nvml.GPU) bool {
		return !slices.ContainsFunc(left.GPUs, func(was nvml.GPU) bool { return was.UUID == g.UUID })
	})
	if len(gpus) == 0 {
		return nil // no GPU is changed, and the restoration says what is absent
	}
	return c.users.Unused(call, all, gpus)
}

// vacant reads the GPUs that are confirmed, and refuses those that anything uses.
func (c *cutting) vacant(ctx context.Context) ([]nvml.GPU, error) {
	call, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	all, err := c.bench.Driver.Snapshot(call)
	if err != nil {
		return nil, err
	}
	if len(c.confirm) == 0 {
		return nil, unconfirmed(all)
	}
	var chosen []nvml.UUID
	for _, uuid := range c.confirm {
		chosen = append(chosen, nvml.UUID(uuid))
	}
	gpus, err := c.users.Vacant(call, all, chosen)
	if err != nil {
		return nil, fmt.Errorf("no GPU was changed:\n%w", err)
	}
	return gpus, nil
}

// unconfirmed says what a run would do, and how to confirm it.
func unconfirmed(all []nvml.GPU) error {
	words := []string{"no GPU was changed. This run turns MIG mode on and off, and makes and destroys instances. It takes some minutes. Nothing else can use the " +
		"GPU until then, and the GPU is then what it was. Confirm it with the UUIDs of the GPUs, as CONFIRM=UUID[,UUID] (run.sh --cut --confirm=UUID[,UUID]):"}
	for _, g := range all {
		words = append(words, fmt.Sprintf("GPU %d: CONFIRM=%s (%s; now %s)", g.Index, g.UUID, g.Model, cut.Shape(g)))
	}
	return errors.New(strings.Join(words, "\n"))
}

// all measures everything, brings the GPUs back, and prints the tables.
func (c *cutting) all(ctx context.Context, gpus []nvml.GPU) error {
	ctx, cancel := context.WithTimeout(ctx, patience*time.Duration(len(gpus)))
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	c.driver.stop = stop
	title := ""
	c.report.check("the GPUs are free still, and what they are is written down", func() (string, error) {
		var err error
		if gpus, err = c.vacant(ctx); err != nil {
			return "", err
		}
		title = c.bench.Calls.Title(ctx, gpus[0], c.simulated)
		return c.begin(ctx, gpus)
	})
	for _, step := range c.bench.Steps() {
		c.report.check(step.Name, func() (string, error) {
			saw, err := step.Do(ctx)
			if absent, is := errors.AsType[*cut.NotHereError](err); is {
				c.fixed = absent
				return "", notHere("%v", absent)
			}
			return saw, err
		})
	}
	c.change(ctx)
	c.report.alone("GPUs are as they were found", func() (string, error) {
		if calls := c.driver.calls(); len(calls) > 0 {
			return "", fmt.Errorf("refused: %s", strings.Join(calls, "; "))
		}
		return c.bringBack(ctx)
	})
	fmt.Println(c.report.table())
	if c.report.failed() {
		fmt.Println("\n" + c.bench.Figures.Markdown("INCOMPLETE: "+title))
		return errFailed
	}
	return c.publish(title, gpus[0])
}

// begin writes down what the GPUs are, and then lets them be changed.
func (c *cutting) begin(ctx context.Context, gpus []nvml.GPU) (string, error) {
	found := cut.Found{Began: time.Now(), GPUs: gpus}
	if err := c.store.Save(ctx, found); err != nil {
		return "", err
	}
	c.found, c.bench.GPUs = &found, gpus
	var may []nvml.UUID
	for _, g := range gpus {
		may = append(may, g.UUID)
	}
	c.driver.cuts(c.raw, may)
	return "in " + c.store.Path(), nil
}

// bringBack restores what was found. A signal does not end it.
func (c *cutting) bringBack(ctx context.Context) (string, error) {
	if c.found == nil {
		return "nothing was changed", nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), restoreTime)
	defer cancel()
	renamed, err := c.store.Restore(ctx, c.raw, *c.found)
	if err != nil {
		return "", err
	}
	var words []string
	for _, g := range c.found.GPUs {
		words = append(words, fmt.Sprintf("GPU %d: %s", g.Index, cut.Shape(g)))
	}
	if len(renamed) > 0 {
		words = append(words, "the MIG devices have new UUIDs: "+strings.Join(renamed, ", "))
	}
	c.found = nil
	return strings.Join(words, "; "), nil
}

// change has the agent cut the GPUs, with NVIDIA's device plugin and then its DRA driver.
func (c *cutting) change(ctx context.Context) {
	var p *plane
	defer func() {
		if p != nil {
			c.report.alone("everything ends", func() (string, error) { return "", p.stop() })
		}
	}()
	c.report.check("a control plane, NVIDIA's device plugin and the agent", func() (saw string, err error) {
		snapshot, cancel := context.WithTimeout(ctx, callTime)
		defer cancel()
		if c.before, err = c.driver.Snapshot(snapshot); err != nil {
			return "", err
		}
		if _, err := c.free(); err != nil {
			return "", err
		}
		if p, err = c.start(ctx); err != nil {
			return "", err
		}
		return p.begin(ctx)
	})
	c.report.check("the agent cuts the GPUs, and uncuts them", func() (string, error) {
		switch {
		case p == nil:
			return "", notHere(unmet)
		case c.fixed != nil:
			return "", notHere("%v", c.fixed)
		}
		return c.recut(ctx, p)
	})
	c.report.check("the device plugin's restart", func() (string, error) {
		if p == nil {
			return "", notHere(unmet)
		}
		return c.bench.Time("restart of NVIDIA's device plugin, until its GPUs are advertised", func() error { return p.restartPlugin(ctx) })
	})
	c.report.check("NVIDIA's DRA driver in the plugin's place", func() (string, error) {
		if p == nil {
			return "", notHere(unmet)
		}
		return c.bench.Time("from the plugin's end to the slices of NVIDIA's DRA driver", func() error {
			_, err := p.replacePlugin(ctx)
			return err
		})
	})
}

// The MIG configs of the cut GPUs.
const cutConfig, uncutConfig = "cut", "uncut"

// recut has the agent cut the GPUs into as many slices as they can have, by the node's label, and uncut them.
func (c *cutting) recut(ctx context.Context, p *plane) (string, error) {
	var index []string
	for _, g := range c.bench.GPUs {
		index = append(index, fmt.Sprint(g.Index))
	}
	small := cut.Smallest(c.bench.GPUs[0])
	devices := "devices: [" + strings.Join(index, ", ") + "]"
	file := fmt.Sprintf("version: v1\nmig-configs:\n  %s: [{%s, mig-enabled: true, mig-devices: {%q: %d}}]\n  %s: [{%s, mig-enabled: false}]\n",
		cutConfig, devices, small.Name, small.Max, uncutConfig, devices)
	if _, err := p.client.CoreV1().ConfigMaps(own).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: config.DefaultMIGConfigMap}, Data: map[string]string{config.DefaultMIGConfigMapKey: file},
	}, metav1.CreateOptions{}); err != nil {
		return "", err
	}
	whole, slice := len(p.before), corev1.ResourceName("nvidia.com/mig-"+strings.ReplaceAll(small.Name, "+", "."))
	cuts := len(c.bench.GPUs)
	var saw []string
	for _, to := range []struct {
		config, what  string
		slices, whole int
	}{
		{cutConfig, fmt.Sprintf("the agent: MIG mode on and %d x %s, on %s", small.Max, small.Name, counted(cuts, "GPU")), small.Max * cuts, whole - cuts},
		{uncutConfig, "the agent: all of that undone", 0, whole},
	} {
		said, err := c.bench.Change(to.what, func() error {
			if err := p.patch(ctx, "labels", config.LabelMIGConfig, to.config); err != nil {
				return err
			}
			return p.await(ctx, "the agent to have made "+to.config, func(n *corev1.Node) bool {
				slices := n.Status.Allocatable[slice]
				return p.converged(n, to.config) && offered(n) == to.whole && int(slices.Value()) == to.slices
			})
		})
		if err != nil {
			return "", err
		}
		saw = append(saw, said)
	}
	return strings.Join(saw, "; "), p.patch(ctx, "labels", config.LabelMIGConfig, nil)
}

// restartPlugin deletes the plugin's pod, and waits until the next one advertises the GPUs. The kubelet takes them for unhealthy in between.
func (p *plane) restartPlugin(ctx context.Context) error {
	of := metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=nvidia-device-plugin"}
	before, err := p.client.CoreV1().Pods(own).List(ctx, of)
	if err != nil {
		return err
	}
	for _, pod := range before.Items {
		if err := p.client.CoreV1().Pods(own).Delete(ctx, pod.Name, metav1.DeleteOptions{}); err != nil {
			return err
		}
	}
	if err := p.poll(ctx, "another pod of the device plugin", func(ctx context.Context) (bool, error) {
		now, err := p.client.CoreV1().Pods(own).List(ctx, of)
		return err == nil && slices.ContainsFunc(now.Items, func(pod corev1.Pod) bool {
			return pod.Status.Phase == corev1.PodRunning && !slices.ContainsFunc(before.Items, func(o corev1.Pod) bool { return o.UID == pod.UID })
		}), err
	}); err != nil {
		return err
	}
	return p.await(ctx, "its GPUs", func(n *corev1.Node) bool { return offered(n) == len(p.before) })
}

// publish prints the table for a pull request, and writes the profile for the simulator.
func (c *cutting) publish(title string, g nvml.GPU) error {
	text, err := c.bench.Figures.Profile(title+", "+time.Now().Format(time.DateOnly), g)
	if err != nil {
		return err
	}
	if err := renameio.WriteFile(c.profile, []byte(text), 0o644); err != nil {
		return fmt.Errorf("writing the profile for the simulator: %w; it is:\n%s", err, text)
	}
	fmt.Printf("\n%s\n\nThe profile for the simulator is in %s. Please send both: by the form \"Figures of a GPU\", or in a pull request.\n",
		c.bench.Figures.Markdown(title), c.profile)
	return nil
}
