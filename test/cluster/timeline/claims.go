package timeline

import (
	"context"
	_ "embed" // for GoldenClaims
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpuslice/gpuslice/test/cluster/claimdriver"
)

// GoldenClaims is the time line of claims of Kubernetes 1.37.1.
//
//go:embed claims.txt
var GoldenClaims string

const (
	driverName = "gpu.example.com"
	byDriver   = "example.com/gpu" // the extended resource of the driver's class
	// wiped is when kubelet has deleted the slices of a driver that is gone; wiping is when it has not yet.
	wiping, wiped = 10 * time.Second, 32 * time.Second
	// claimStepTime is stepTime for claims: a real kubelet takes more than a minute to retry after a driver's refusal.
	claimStepTime = 3 * time.Minute
)

// ClaimSubject is a node that the script of claims is run on. Nothing else may use DRA drivers on it.
type ClaimSubject struct {
	View
	KubeletDir string                                     // where kubelet has its directories for plugins
	Image      string                                     // of a container that runs until it is asked to end
	Restart    func(context.Context) error                // of kubelet
	Pass       func(context.Context, time.Duration) error // lets kubelet's clock go on
}

// claimScript is a run of the script.
type claimScript struct {
	ClaimSubject
	driver *claimdriver.Driver
	gone   time.Duration // how long the driver has been
	out    strings.Builder
}

// claimStep is one event, and how its effect is recognised.
type claimStep struct {
	says  string
	does  func(*claimScript, context.Context) error
	until func(claimState) bool
}

// claimState is what the node says of drivers, slices and claims at one moment.
type claimState struct {
	driver string
	slices int
	pods   map[string]claimPod
}

type claimPod struct {
	Pod
	listed bool // by PodResources
	has    []string
}

// RunClaims goes through the script and returns the time line.
func RunClaims(ctx context.Context, on ClaimSubject) (string, error) {
	s := &claimScript{ClaimSubject: on}
	defer func() {
		if s.driver != nil {
			s.driver.Stop()
		}
	}()
	if err := s.prepare(ctx); err != nil {
		return "", fmt.Errorf("preparing the cluster: %w", err)
	}
	for _, step := range claimSteps {
		if err := step.does(s, ctx); err != nil {
			return s.out.String(), fmt.Errorf("%s: %w", step.says, err)
		}
		waiting, cancel := context.WithTimeout(ctx, claimStepTime)
		state, err := s.await(waiting, step.until)
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

var claimSteps = []claimStep{
	{"a driver registers", (*claimScript).start, func(s claimState) bool { return s.driver == "registered" }},
	{"it publishes its devices", (*claimScript).publish, hasSlices(1)},
	{"a pod asks for one by a claim", explicit("first"), havingClaims("first")},
	{"a pod asks for one by an extended resource", implicit("second"), havingClaims("second")},
	{"the driver cannot prepare what a pod asks for", refused("third"), func(s claimState) bool { return s.pods["third"].listed && len(s.pods["third"].has) > 0 }},
	{"it can again", (*claimScript).accept, havingClaims("third")},
	{"the driver dies", (*claimScript).die, func(s claimState) bool { return s.driver == "gone" }},
	{"a pod is deleted in the meantime", leave("second"), func(s claimState) bool { return s.pods["second"].Reason == "Terminating" }},
	{"10 seconds are over", passed(wiping), hasSlices(1)},
	{"30 seconds are over", passed(wiped), hasSlices(0)},
	{"the driver is back", (*claimScript).start, func(s claimState) bool { _, known := s.pods["second"]; return !known && s.driver == "registered" }},
	{"it publishes its devices", (*claimScript).publish, hasSlices(1)},
	{"the driver ends and comes back at once", (*claimScript).startAgain, func(s claimState) bool { return s.driver == "registered" }},
	{"30 seconds are over", passed(wiped), hasSlices(1)},
	{"kubelet restarts", func(s *claimScript, ctx context.Context) error { return s.Restart(ctx) }, func(s claimState) bool {
		return s.slices == 0 && s.pods["first"].listed && s.driver == "registered"
	}},
	{"the driver publishes its devices", (*claimScript).publish, hasSlices(1)},
	{"a pod asks for one", implicit("fourth"), havingClaims("fourth")},
	{"pods leave", leave("first", "third", "fourth"), func(s claimState) bool { return len(s.pods) == 0 }},
}

func hasSlices(n int) func(claimState) bool { return func(s claimState) bool { return s.slices == n } }

// havingClaims recognises that a pod runs on what the driver has prepared.
func havingClaims(name string) func(claimState) bool {
	return func(s claimState) bool {
		p := s.pods[name]
		return p.Phase == corev1.PodRunning && p.Reason == "" && len(p.has) > 0
	}
}

// prepare makes the class of the driver's devices.
func (s *claimScript) prepare(ctx context.Context) error {
	_, err := s.Client.ResourceV1().DeviceClasses().Create(ctx, &resourcev1.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: driverName},
		Spec: resourcev1.DeviceClassSpec{
			ExtendedResourceName: new(byDriver),
			Selectors:            []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{Expression: "device.driver == '" + driverName + "'"}}},
		},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

func (s *claimScript) start(ctx context.Context) (err error) {
	s.driver, err = claimdriver.Start(ctx, s.KubeletDir, driverName)
	s.gone = 0
	return err
}

func (s *claimScript) die(context.Context) error { s.driver.Stop(); s.driver = nil; return nil }

func (s *claimScript) startAgain(ctx context.Context) error {
	if err := s.die(ctx); err != nil {
		return err
	}
	return s.start(ctx)
}

func (s *claimScript) accept(context.Context) error { s.driver.Refuse(""); return nil }

// publish does what drivers do, which have a library for it.
func (s *claimScript) publish(ctx context.Context) error {
	_, err := s.Client.ResourceV1().ResourceSlices().Create(ctx, &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: s.Node + "-"},
		Spec: resourcev1.ResourceSliceSpec{
			Driver: driverName, NodeName: &s.Node, Pool: resourcev1.ResourcePool{Name: s.Node, ResourceSliceCount: 1},
			Devices: []resourcev1.Device{{Name: "gpu-0"}, {Name: "gpu-1"}, {Name: "gpu-2"}},
		},
	}, metav1.CreateOptions{})
	return err
}

// passed lets so much time go by since the driver's end.
func passed(d time.Duration) func(*claimScript, context.Context) error {
	return func(s *claimScript, ctx context.Context) error {
		before := s.gone
		s.gone = d
		return s.Pass(ctx, d-before)
	}
}

func explicit(name string) func(*claimScript, context.Context) error {
	return func(s *claimScript, ctx context.Context) error {
		if _, err := s.Client.ResourceV1().ResourceClaims(s.Namespace).Create(ctx, &resourcev1.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Name: "claim-of-" + name},
			Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{
				Requests: []resourcev1.DeviceRequest{{Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: driverName}}},
			}},
		}, metav1.CreateOptions{}); err != nil {
			return err
		}
		pod := s.pod(name)
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new("claim-of-" + name)}}
		pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
		_, err := s.Client.CoreV1().Pods(s.Namespace).Create(ctx, pod, metav1.CreateOptions{})
		return err
	}
}

func implicit(name string) func(*claimScript, context.Context) error {
	return func(s *claimScript, ctx context.Context) error {
		pod := s.pod(name)
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{byDriver: resource.MustParse("1")}
		_, err := s.Client.CoreV1().Pods(s.Namespace).Create(ctx, pod, metav1.CreateOptions{})
		return err
	}
}

func refused(name string) func(*claimScript, context.Context) error {
	return func(s *claimScript, ctx context.Context) error {
		s.driver.Refuse("no such device")
		return explicit(name)(s, ctx)
	}
}

// pod has a second container, which asks for nothing.
func (s *claimScript) pod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeSelector:                  map[string]string{corev1.LabelHostname: s.Node},
			TerminationGracePeriodSeconds: new(int64(1)),
			Tolerations:                   []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			Containers:                    []corev1.Container{{Name: "main", Image: s.Image}, {Name: "beside", Image: s.Image}},
		},
	}
}

func leave(names ...string) func(*claimScript, context.Context) error {
	return func(s *claimScript, ctx context.Context) error {
		for _, name := range names {
			if err := s.Client.CoreV1().Pods(s.Namespace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
				return err
			}
		}
		return nil
	}
}

// await looks until the goal is reached, and twice in a row the same.
func (s *claimScript) await(ctx context.Context, goal func(claimState) bool) (claimState, error) {
	last := ""
	for {
		state, err := s.observe(ctx)
		if err == nil && goal(state) {
			if state.String() == last {
				return state, nil
			}
			last = state.String()
		}
		select {
		case <-ctx.Done():
			return state, errors.Join(ctx.Err(), err)
		case <-time.After(4 * observeEvery):
		}
	}
}

func (s *claimScript) observe(ctx context.Context) (claimState, error) {
	state := claimState{driver: "gone", pods: map[string]claimPod{}}
	if s.driver != nil {
		state.driver = "not registered"
		if s.driver.Registered() {
			state.driver = "registered"
		}
	}
	list, err := s.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + driverName + ",spec.nodeName=" + s.Node})
	if err != nil {
		return state, fmt.Errorf("listing slices: %w", err)
	}
	state.slices = len(list.Items)
	pods, err := s.Client.CoreV1().Pods(s.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return state, fmt.Errorf("listing pods: %w", err)
	}
	implicit := map[string]string{}
	for _, p := range pods.Items {
		state.pods[p.Name] = claimPod{Pod: podOf(&p)}
		if of := p.Status.ExtendedResourceClaimStatus; of != nil {
			implicit[of.ResourceClaimName] = "a claim made for it"
		}
	}
	conn, err := grpc.NewClient("unix://"+s.PodResources, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return state, fmt.Errorf("connecting to %s: %w", s.PodResources, err)
	}
	defer conn.Close()
	given, err := podresourcesv1.NewPodResourcesListerClient(conn).List(ctx, &podresourcesv1.ListPodResourcesRequest{})
	if err != nil {
		return state, fmt.Errorf("asking kubelet for the resources of pods: %w", err)
	}
	for _, p := range given.PodResources {
		pod, known := state.pods[p.Name]
		if !known || p.Namespace != s.Namespace {
			continue
		}
		pod.listed = true
		for _, c := range p.Containers {
			for _, claim := range c.DynamicResources {
				name := claim.ClaimName
				if made := implicit[name]; made != "" {
					name = made
				}
				pod.has = append(pod.has, fmt.Sprintf("%s has %s of %s", c.Name, devicesOf(claim), name))
			}
		}
		state.pods[p.Name] = pod
	}
	return state, nil
}

// devicesOf are those of a claim that are prepared.
func devicesOf(claim *podresourcesv1.DynamicResource) string {
	var all []string
	for _, r := range claim.ClaimResources {
		all = append(all, r.DriverName+"/"+r.PoolName+"/"+r.DeviceName)
	}
	if len(all) == 0 {
		return "nothing yet"
	}
	return strings.Join(all, ", ")
}

// String is the state for people: a line for the driver and each pod.
func (s claimState) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "  driver %s, slices %d\n", s.driver, s.slices)
	for _, name := range slices.Sorted(maps.Keys(s.pods)) {
		p := s.pods[name]
		says := append([]string{string(p.Phase)}, p.has...)
		if p.Reason != "" {
			says[0] += ": " + p.Reason
		}
		if !p.listed {
			says = append(says, "not listed")
		}
		fmt.Fprintf(&b, "  pod %s %s\n", name, strings.Join(says, ", "))
	}
	return b.String()
}
