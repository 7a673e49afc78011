package watch_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// sliceServer is an API server that lists the slices of node gpu-1, and has a watch that shows nothing. Before it may, it refuses.
type sliceServer struct {
	t *testing.T

	mu     sync.Mutex
	status int // 0 if it answers
	list   resourcev1.ResourceSliceList
	asked  []string // "list" and "watch", by what was answered
}

// ServeHTTP implements http.Handler.
func (s *sliceServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if !strings.HasSuffix(r.URL.Path, "/resourceslices") {
		s.t.Errorf("asked for %s", r.URL)
	}
	if got := q.Get("fieldSelector"); got != "spec.nodeName=gpu-1" {
		s.t.Errorf("selected by %q, of which a node may read", got)
	}
	verb := "list"
	if q.Has("watch") {
		verb = "watch"
	}
	s.mu.Lock()
	status, list := s.status, s.list
	if verb == "watch" && q.Has("sendInitialEvents") {
		status = http.StatusUnprocessableEntity // as a server without the feature: the informer lists then
	}
	s.asked = append(s.asked, verb)
	s.mu.Unlock()
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	if status != 0 {
		w.WriteHeader(status)
		return
	}
	if verb == "watch" {
		w.WriteHeader(http.StatusOK)
		if f, is := w.(http.Flusher); is {
			f.Flush()
		}
		<-r.Context().Done()
		return
	}
	var b bytes.Buffer
	if err := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(&list, &b); err != nil {
		s.t.Error(err)
	}
	_, _ = io.Copy(w, &b)
}

// serve starts the server, and returns what reads it until it is cancelled.
func (s *sliceServer) serve() (*watch.Objects, context.Context, context.CancelFunc) {
	s.t.Helper()
	server := httptest.NewServer(s)
	s.t.Cleanup(server.Close)
	client, err := kube.New(&rest.Config{Host: server.URL})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(s.t.Context())
	return watch.NewObjects(watch.Options{Node: "gpu-1", Client: client, Pods: &listed{}}), ctx, cancel
}

func (s *sliceServer) answers(status int, list resourcev1.ResourceSliceList) (asked []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	asked, s.asked = s.asked, nil
	s.status, s.list = status, list
	return asked
}

func offering(devices ...string) resourcev1.ResourceSliceList {
	slice := resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "s", Annotations: map[string]string{"a": strings.Repeat("x", 1<<20)}}}
	slice.Spec.Driver, slice.Spec.Pool = "gpu.nvidia.com", resourcev1.ResourcePool{Name: "gpu-1", ResourceSliceCount: 1}
	for _, d := range devices {
		slice.Spec.Devices = append(slice.Spec.Devices, resourcev1.Device{Name: d})
	}
	return resourcev1.ResourceSliceList{
		TypeMeta: metav1.TypeMeta{Kind: "ResourceSliceList", APIVersion: "resource.k8s.io/v1"}, ListMeta: metav1.ListMeta{ResourceVersion: "7"},
		Items: []resourcev1.ResourceSlice{slice},
	}
}

// The slices are asked for when the first observation needs them, and by a watch from then on.
func TestSlicesAreWatchedFromTheFirstObservationOn(t *testing.T) {
	t.Parallel()
	s := &sliceServer{t: t, status: http.StatusForbidden}
	o, ctx, cancel := s.serve()
	defer cancel() // before the server closes, which waits for the watch
	changed := make(chan struct{}, 8)
	o.ShowNode(ctx, node("1", nil), func() { changed <- struct{}{} })
	if asked := s.answers(http.StatusForbidden, offering()); len(asked) > 0 {
		t.Errorf("before anything asks for slices, the API server was asked to %v", asked)
	}

	o.ReadAgain()
	o.Begin(false)
	if slices, err := o.Slices(t.Context()); !apierrors.IsForbidden(err) || slices != nil || !strings.HasPrefix(err.Error(), "grant the agent list and watch on resourceslices") {
		t.Errorf("without the right: %v, %v", slices, err)
	}
	o.Begin(false)
	if slices, err := o.Slices(t.Context()); err == nil || slices != nil {
		t.Errorf("by a watch that has shown nothing: %v, %v", slices, err)
	}

	s.answers(0, offering("gpu-0"))
	select { // the watch begins again by itself
	case <-changed:
	case <-time.After(time.Minute):
		t.Fatal("the watch shows no slice")
	}
	for {
		o.Begin(false)
		slices, err := o.Slices(t.Context())
		if err != nil { // shown, and not all yet
			continue
		}
		shown(t, "by the watch", slices, nil, 1)
		break
	}
	s.answers(0, offering("gpu-0", "gpu-1"))
	o.Begin(false)
	slices, err := o.Slices(t.Context())
	shown(t, "by the watch again", slices, err, 1)
	if asked := s.answers(0, offering("gpu-0", "gpu-1")); len(asked) > 1 { // the watch itself
		t.Errorf("for what the watch shows, the API server was asked to %v", asked)
	}
	o.ReadAgain()
	o.Begin(false)
	slices, err = o.Slices(t.Context())
	shown(t, "read from the API server", slices, err, 2)
	cancel()
}

// An agent that has just started knows the slices from its first observation on: it would report a node of NVIDIA's DRA driver False until its watch shows them.
func TestTheFirstObservationHasTheSlices(t *testing.T) {
	t.Parallel()
	s := &sliceServer{t: t, list: offering("gpu-0")}
	o, ctx, cancel := s.serve()
	defer cancel() // before the server closes, which waits for the watch
	o.ShowNode(ctx, node("1", nil), func() {})
	o.Begin(false)
	slices, err := o.Slices(t.Context())
	shown(t, "at once", slices, err, 1)
}

// Whoever writes slices for the node decides how many there are: of those that are too many the agent keeps that they are there. NVIDIA's driver and others do not
// take each other's place.
func TestOfTooManySlicesLittleIsKept(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct{ many, one string }{
		"of NVIDIA's driver": {holders.ClaimDriver, "example.com"}, "of another": {"example.com", holders.ClaimDriver},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testTooManySlices(t, row.many, row.one)
		})
	}
}

func testTooManySlices(t *testing.T, manyOf, oneOf string) {
	t.Helper()
	var names []string
	for i := range resourcev1.ResourceSliceMaxDevices {
		names = append(names, fmt.Sprintf("gpu-%d", i))
	}
	one := offering(names...)
	one.Items[0].Annotations, one.Items[0].Spec.Driver = nil, manyOf
	for i := range one.Items[0].Spec.Devices {
		one.Items[0].Spec.Devices[i].Attributes = map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"uuid": {StringValue: new("GPU-a")}}
	}
	many := one
	many.Items = nil
	for i := range 1024 {
		s := *one.Items[0].DeepCopy()
		s.Name, s.Spec.Pool.ResourceSliceCount = fmt.Sprintf("s-%d", i), 1024
		many.Items = append(many.Items, s)
	}
	last := *one.Items[0].DeepCopy()
	last.Name, last.Spec.Driver = "last", oneOf
	many.Items = append(many.Items, last)
	s := &sliceServer{t: t, list: many}
	o, ctx, cancel := s.serve()
	defer cancel() // before the server closes, which waits for the watch
	changed := make(chan struct{}, len(many.Items))
	o.ShowNode(ctx, node("1", nil), func() { changed <- struct{}{} })
	expect := func(how string) {
		t.Helper()
		o.Begin(false)
		got, err := o.Slices(t.Context())
		size, of := 0, map[string][]resourcev1.ResourceSlice{}
		for i := range got {
			size += got[i].Size()
			of[got[i].Spec.Driver] = append(of[got[i].Spec.Driver], got[i])
		}
		if _, complete := holders.CurrentSlices(of[manyOf]); err != nil || complete || len(got) != len(many.Items) || size > 1<<21 {
			t.Errorf("%s: %d slices of %d bytes, complete %t: %v", how, len(got), size, complete, err)
		}
		if len(of[oneOf]) != 1 || len(of[oneOf][0].Spec.Devices) != len(names) {
			t.Errorf("%s: of the other driver there are %d slices", how, len(of[oneOf]))
		}
	}
	expect("at once")
	for range many.Items {
		<-changed
	}
	expect("by the watch")
}

// shown fails the test unless there is one slice with so many devices, without what does not count.
func shown(t *testing.T, how string, slices []resourcev1.ResourceSlice, err error, devices int) {
	t.Helper()
	if err != nil || len(slices) != 1 || len(slices[0].Spec.Devices) != devices || slices[0].Annotations != nil {
		t.Errorf("%s: %v, %v", how, slices, err)
	}
}
