package timeline

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// View is where to look at a node from.
type View struct {
	Client       kubernetes.Interface
	Node         string
	Namespace    string // of the pods
	PodResources string // path of kubelet's socket
	Domain       string // of the resources, such as nvidia.com
	Rename       *strings.Replacer
}

// State is what a node says of its devices and pods at one moment.
type State struct {
	Resources map[string]Amount   // in the Node's status
	Devices   map[string][]string // healthy ones, of GetAllocatableResources
	Pods      map[string]Pod
}

// Amount is capacity and allocatable of a resource.
type Amount struct{ Capacity, Allocatable int64 }

// Pod is how one pod is.
type Pod struct {
	Phase    corev1.PodPhase
	Reason   string   // why it does not run
	Restarts int32    // of its containers; none of a pod that kubelet rejected
	Devices  []string // "resource id", of PodResources List
	settled  bool
	listed   bool // by PodResources List, which for a moment lists none after kubelet has started
}

// Observe asks the API server and kubelet.
func (v View) Observe(ctx context.Context) (State, error) {
	s := State{Resources: map[string]Amount{}, Devices: map[string][]string{}, Pods: map[string]Pod{}}
	node, err := v.Client.CoreV1().Nodes().Get(ctx, v.Node, metav1.GetOptions{})
	if err != nil {
		return s, fmt.Errorf("looking at node %s: %w", v.Node, err)
	}
	for name, capacity := range node.Status.Capacity {
		if strings.HasPrefix(string(name), v.Domain+"/") {
			allocatable := node.Status.Allocatable[name]
			s.Resources[string(name)] = Amount{capacity.Value(), allocatable.Value()}
		}
	}
	pods, err := v.Client.CoreV1().Pods(v.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return s, fmt.Errorf("looking at the pods of node %s: %w", v.Node, err)
	}
	for _, p := range pods.Items {
		s.Pods[p.Name] = podOf(&p)
	}
	return s, v.askKubelet(ctx, &s)
}

// askKubelet adds what PodResources says.
func (v View) askKubelet(ctx context.Context, s *State) error {
	conn, err := grpc.NewClient("unix://"+v.PodResources, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", v.PodResources, err)
	}
	defer conn.Close()
	kubelet := podresourcesv1.NewPodResourcesListerClient(conn)
	all, err := kubelet.GetAllocatableResources(ctx, &podresourcesv1.AllocatableResourcesRequest{})
	if err != nil {
		return fmt.Errorf("asking kubelet for allocatable resources: %w", err)
	}
	for _, d := range all.Devices {
		s.Devices[d.ResourceName] = append(s.Devices[d.ResourceName], v.ids(d.DeviceIds)...)
	}
	given, err := kubelet.List(ctx, &podresourcesv1.ListPodResourcesRequest{})
	if err != nil {
		return fmt.Errorf("asking kubelet for the resources of pods: %w", err)
	}
	for _, p := range given.PodResources {
		pod, known := s.Pods[p.Name]
		if !known || p.Namespace != v.Namespace {
			continue
		}
		for _, c := range p.Containers {
			for _, d := range c.Devices {
				for _, id := range v.ids(d.DeviceIds) {
					pod.Devices = append(pod.Devices, d.ResourceName+" "+id)
				}
			}
		}
		slices.Sort(pod.Devices)
		pod.listed = true
		s.Pods[p.Name] = pod
	}
	return nil
}

// ids are those of devices, as the reader is to see them.
func (v View) ids(of []string) []string {
	if v.Rename == nil {
		return of
	}
	var all []string
	for _, id := range of {
		all = append(all, v.Rename.Replace(id))
	}
	return all
}

func podOf(p *corev1.Pod) Pod {
	pod := Pod{Phase: p.Status.Phase, Reason: strings.TrimSpace(p.Status.Reason + " " + p.Status.Message)}
	pod.settled = p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded
	rejected := p.Status.Phase == corev1.PodFailed && p.Status.Reason == "UnexpectedAdmissionError"
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			pod.Reason, pod.settled = c.Reason, true
		}
	}
	for _, c := range p.Status.ContainerStatuses {
		if !rejected { // of the containers that such a pod had before a reboot, kubelet reports them or does not
			pod.Restarts += c.RestartCount
		}
		if c.State.Running != nil {
			pod.settled = true
		}
		if w := c.State.Waiting; w != nil && w.Reason != "ContainerCreating" {
			pod.Reason = strings.TrimSuffix(w.Reason+" "+w.Message, " ")
			pod.settled = w.Reason == "CreateContainerConfigError"
		}
	}
	if p.DeletionTimestamp != nil {
		pod.Reason, pod.settled = "Terminating", false
	}
	return pod
}

// consistent reports whether the Node's status says what kubelet says, and no pod is on its way from one state to another.
func (s State) consistent() bool {
	for name, a := range s.Resources {
		if int(a.Allocatable) != len(s.Devices[name]) {
			return false
		}
	}
	for name := range s.Devices {
		if _, shown := s.Resources[name]; !shown {
			return false
		}
	}
	for _, p := range s.Pods {
		if !p.settled || (p.Phase == corev1.PodRunning && !p.listed) {
			return false
		}
	}
	return true
}

// String is the state for people: a line for each resource and each pod.
func (s State) String() string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(s.Resources)) {
		a := s.Resources[name]
		slices.Sort(s.Devices[name])
		fmt.Fprintf(&b, "  %s %d/%d: %s\n", name, a.Allocatable, a.Capacity, cmp.Or(strings.Join(s.Devices[name], " "), "none"))
	}
	for _, name := range slices.Sorted(maps.Keys(s.Pods)) {
		p := s.Pods[name]
		fmt.Fprintf(&b, "  pod %s %s", name, p.Phase)
		if p.Restarts > 0 {
			fmt.Fprintf(&b, ", restarted")
		}
		if len(p.Devices) > 0 {
			fmt.Fprintf(&b, ", has %s", strings.Join(p.Devices, ", "))
		}
		if p.Reason != "" {
			fmt.Fprintf(&b, ": %s", p.Reason)
		}
		b.WriteString("\n")
	}
	return b.String()
}

// Await looks until the goal is reached and the node is consistent. It always returns the last state; if that never
// happens, with the context's error.
func (v View) Await(ctx context.Context, goal func(State) bool) (State, error) {
	return v.observeUntil(ctx, func(s State) bool { return s.consistent() && (goal == nil || goal(s)) })
}

// awaitLost looks until kubelet advertises no device of a resource, because it has noticed that their plugin ended.
func (v View) awaitLost(ctx context.Context, resource string) error {
	if _, err := v.observeUntil(ctx, func(s State) bool { return len(s.Devices[resource]) == 0 }); err != nil {
		return fmt.Errorf("waiting until kubelet has lost the plugin of %s: %w", resource, err)
	}
	return nil
}

// observeUntil looks until reached is satisfied with an observation that did not fail. When the context ends before, its error is that and the last look's.
func (v View) observeUntil(ctx context.Context, reached func(State) bool) (State, error) {
	for {
		s, err := v.Observe(ctx)
		if err == nil && reached(s) {
			return s, nil
		}
		select {
		case <-ctx.Done():
			return s, errors.Join(ctx.Err(), err)
		case <-ticks():
		}
	}
}
