// Package timeline has scripts of events that happen to device plugins and DRA drivers, and the node's state after each
// event: capacity, allocatable, PodResources, slices, pods. The real kubelet wrote Golden and GoldenClaims; the
// stand-in must match them.
//
// The script cannot show time. Kubelet still counts the devices of a lost plugin for five minutes; only a test with
// the stand-in's clock covers that.
package timeline

import (
	"context"
	_ "embed" // for Golden
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Golden is the time line of Kubernetes 1.37.1.
//
//go:embed golden.txt
var Golden string

// Subject is a node that the script is run on. Nothing else may use its device plugins.
type Subject struct {
	View
	PluginDir string                                   // where kubelet has its registration socket
	Image     string                                   // of a container that runs until it is asked to end
	Restart   func(context.Context) error              // of kubelet
	Reboot    func(context.Context) error              // of the node, after which no container runs
	Kill      func(context.Context, *corev1.Pod) error // the processes of the pod
}

const (
	whole  = "nvidia.com/gpu"
	shared = "nvidia.com/gpu.shared"
	// stepTime bounds the wait for the effect of a step. Without an effect by then, the current state is recorded.
	stepTime     = 30 * time.Second
	observeEvery = 50 * time.Millisecond
)

func ticks() <-chan time.Time { return time.After(observeEvery) }

// script is a run of the script.
type script struct {
	Subject
	plugin *Plugin
	second *Plugin
	out    strings.Builder
}

// step is one event, and how its effect is recognised.
type step struct {
	says  string
	does  func(*script, context.Context) error
	until func(State) bool
}

// Run goes through the script and returns the time line.
func Run(ctx context.Context, on Subject) (string, error) {
	s := &script{Subject: on}
	defer func() {
		for _, p := range []*Plugin{s.plugin, s.second} {
			if p != nil {
				p.Stop()
			}
		}
	}()
	for _, step := range steps {
		if err := step.does(s, ctx); err != nil {
			return s.out.String(), fmt.Errorf("%s: %w", step.says, err)
		}
		waiting, cancel := context.WithTimeout(ctx, stepTime)
		state, err := s.Await(waiting, step.until)
		cancel()
		fmt.Fprintf(&s.out, "%s\n%s", step.says, state)
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			fmt.Fprintf(&s.out, "  (not as expected)\n")
		} else if err != nil {
			return s.out.String(), fmt.Errorf("%s: %w", step.says, err)
		}
	}
	return s.out.String(), nil
}

var steps = []step{
	{"a plugin registers two devices", serve(whole, "GPU-0", "GPU-1"), amount(whole, 2, 2)},
	{"a pod asks for one", create("first"), runs("first")},
	{"the plugin finds one unhealthy", report(sick("GPU-1"), "GPU-0"), amount(whole, 2, 1)},
	{"it is well again", report(nil, "GPU-0", "GPU-1"), amount(whole, 2, 2)},
	{"the plugin dies", (*script).die, amount(whole, 2, 0)},
	{"a pod that the scheduler is not asked about comes in the meantime", bind("hasty"), ended("hasty")},
	{"a container ends in the meantime", restart("first"), restarted("first")},
	{"the plugin is back", serve(whole, "GPU-0", "GPU-1"), amount(whole, 2, 2)},
	{"the plugin comes back with four shares of each", serve(whole, shares(2, 4)...), amount(whole, 8, 8)},
	{"a container ends", restart("first"), restarted("first")},
	{"pods ask for shares", create("second", "third"), runs("second", "third")},
	{"the plugin comes back with one share of each", serve(whole, shares(2, 1)...), amount(whole, 2, 2)},
	{"one more pod is too many for the scheduler", create("fourth"), pending("fourth")},
	{"pods leave", remove("second", "fourth", "hasty"), gone("second", "fourth", "hasty")},
	{"kubelet restarts under a plugin that does not", (*script).restartKubelet, amount(whole, 0, 0)},
	{"a container ends in the meantime", restart("third"), restarted("third")},
	{"the plugin registers again", serve(whole, shares(2, 4)...), amount(whole, 8, 8)},
	{"the plugin comes back under another name", serve(shared, shares(2, 4)...), both(amount(whole, 8, 0), amount(shared, 8, 8))},
	{"a container ends that has devices of the old name", restart("third"), restarted("third")},
	{"the new name is asked for", createOf(shared, "fifth"), runs("fifth")},
	{"kubelet restarts, and no plugin comes", (*script).dieAndRestartKubelet, both(amount(whole, 0, 0), amount(shared, 0, 0))},
	{"the plugin is back under the old name", serve(whole, "GPU-0", "GPU-1"), amount(whole, 2, 2)},
	{"a second plugin offers the same", serveSecond("GPU-0", "GPU-1"), amount(whole, 2, 2)},
	{"the first one dies", (*script).die, amount(whole, 2, 2)},
	{"the second one dies", (*script).dieSecond, amount(whole, 2, 0)},
	{"the node is rebooted, and no plugin comes", (*script).rebootNode, ended("first", "third", "fifth")},
	{"the plugin is back", serve(whole, "GPU-0", "GPU-1"), amount(whole, 2, 2)},
	{"a pod asks for one", create("last"), runs("last")},
}

// shares are the ids that NVIDIA's plugin gives to replicas.
func shares(gpus, replicas int) []string {
	var ids []string
	for g := range gpus {
		for r := range replicas {
			ids = append(ids, fmt.Sprintf("GPU-%d::%d", g, r))
		}
	}
	return ids
}

// serve starts a plugin like NVIDIA's does for a new config: the old one ends first. Kubelet refuses a plugin that
// registers before kubelet has noticed that end.
func serve(name string, ids ...string) func(*script, context.Context) error {
	return func(s *script, ctx context.Context) (err error) {
		if s.plugin != nil {
			s.plugin.Stop()
			waiting, cancel := context.WithTimeout(ctx, stepTime)
			defer cancel()
			if err := s.awaitLost(waiting, s.plugin.resource); err != nil {
				return err
			}
		}
		s.plugin, err = ServePlugin(ctx, s.PluginDir, strings.ReplaceAll(name, "/", "-")+".sock", name, ids...)
		return err
	}
}

func serveSecond(ids ...string) func(*script, context.Context) error {
	return func(s *script, ctx context.Context) (err error) {
		s.second, err = ServePlugin(ctx, s.PluginDir, "second.sock", whole, ids...)
		return err
	}
}

func (s *script) die(context.Context) error       { s.plugin.Stop(); s.plugin = nil; return nil }
func (s *script) dieSecond(context.Context) error { s.second.Stop(); s.second = nil; return nil }

func (s *script) restartKubelet(ctx context.Context) error { return s.Restart(ctx) }

func (s *script) dieAndRestartKubelet(ctx context.Context) error {
	if err := s.die(ctx); err != nil {
		return err
	}
	return s.Restart(ctx)
}

func (s *script) rebootNode(ctx context.Context) error { return s.Reboot(ctx) }

// sick are devices that are there and unhealthy.
func sick(ids ...string) []*v1beta1.Device {
	all := healthy(ids...)
	for _, d := range all {
		d.Health = v1beta1.Unhealthy
	}
	return all
}

func report(unhealthy []*v1beta1.Device, ids ...string) func(*script, context.Context) error {
	return func(s *script, _ context.Context) error {
		s.plugin.report(append(healthy(ids...), unhealthy...))
		return nil
	}
}

func create(names ...string) func(*script, context.Context) error { return createOf(whole, names...) }

// createOf makes one pod after the other, so that each is placed before the next asks.
func createOf(of string, names ...string) func(*script, context.Context) error {
	return func(s *script, ctx context.Context) error {
		for _, name := range names {
			if _, err := s.Client.CoreV1().Pods(s.Namespace).Create(ctx, s.pod(name, of), metav1.CreateOptions{}); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(ctx, stepTime)
			_, err := s.Await(ctx, func(st State) bool { _, known := st.Pods[name]; return known })
			cancel()
			if err != nil {
				return fmt.Errorf("waiting for pod %s: %w", name, err)
			}
		}
		return nil
	}
}

// bind makes a pod that is already placed, so that kubelet alone decides.
func bind(name string) func(*script, context.Context) error {
	return func(s *script, ctx context.Context) error {
		pod := s.pod(name, whole)
		pod.Spec.NodeName = s.Node
		_, err := s.Client.CoreV1().Pods(s.Namespace).Create(ctx, pod, metav1.CreateOptions{})
		return err
	}
}

func (s *script) pod(name, of string) *corev1.Pod {
	grace := int64(1)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeSelector:                  map[string]string{corev1.LabelHostname: s.Node},
			TerminationGracePeriodSeconds: &grace,
			Tolerations:                   []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			Containers: []corev1.Container{{
				Name: "main", Image: s.Image,
				Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceName(of): resource.MustParse("1")}},
			}},
		},
	}
}

func remove(names ...string) func(*script, context.Context) error {
	return func(s *script, ctx context.Context) error {
		for _, name := range names {
			if err := s.Client.CoreV1().Pods(s.Namespace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
				return err
			}
		}
		return nil
	}
}

// restart ends the processes of a pod. Its container then starts again.
func restart(name string) func(*script, context.Context) error {
	return func(s *script, ctx context.Context) error {
		pod, err := s.Client.CoreV1().Pods(s.Namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if err := s.Kill(ctx, pod); err != nil {
			return err
		}
		before := restarts(pod)
		for ctx.Err() == nil {
			if pod, err = s.Client.CoreV1().Pods(s.Namespace).Get(ctx, name, metav1.GetOptions{}); err != nil {
				return err
			}
			if restarts(pod) > before || pod.Status.Phase == corev1.PodFailed {
				return nil
			}
			<-ticks()
		}
		return ctx.Err()
	}
}

func restarts(p *corev1.Pod) (n int32) {
	for _, c := range p.Status.ContainerStatuses {
		n += c.RestartCount
	}
	return n
}

func amount(name string, capacity, allocatable int64) func(State) bool {
	return func(s State) bool { return s.Resources[name] == Amount{capacity, allocatable} }
}

func both(a, b func(State) bool) func(State) bool { return func(s State) bool { return a(s) && b(s) } }

func are(wanted func(Pod) bool, names []string) func(State) bool {
	return func(s State) bool {
		for _, name := range names {
			if p, known := s.Pods[name]; !known || !wanted(p) {
				return false
			}
		}
		return true
	}
}

func runs(names ...string) func(State) bool {
	return are(func(p Pod) bool { return p.Phase == corev1.PodRunning && p.Reason == "" }, names)
}

func restarted(name string) func(State) bool {
	return are(func(p Pod) bool { return p.Restarts > 0 && p.Reason == "" }, []string{name})
}

func pending(names ...string) func(State) bool {
	return are(func(p Pod) bool { return p.Phase == corev1.PodPending }, names)
}

func ended(names ...string) func(State) bool {
	return are(func(p Pod) bool { return p.Phase == corev1.PodFailed }, names)
}

func gone(names ...string) func(State) bool {
	return func(s State) bool {
		for _, name := range names {
			if _, known := s.Pods[name]; known {
				return false
			}
		}
		return true
	}
}
