package agent_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	k8swatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// apiServer answers the requests of the client that the agent has on a node, by the objects of the world. So reflectors, the recorder of Events and
// client-go's own repetitions are part of what a test sees.
type apiServer struct {
	w      *world
	kinds  *runtime.Scheme
	codecs serializer.CodecFactory

	lock     sync.Mutex
	fails    func(n int, r *http.Request) *http.Response // the answer to the n-th request of an outage; nil to perform it, nil func for no outage
	asked    map[string][]time.Time                      // the requests of the outage
	cut      chan struct{}                               // closed at the end of the present watches
	versions map[string]version
}

// version is the version of an object: the fake API server of client-go keeps none.
type version struct {
	content string
	number  int
}

func newAPIServer(w *world) *apiServer {
	w.t.Helper()
	kinds, err := kube.Kinds()
	if err != nil {
		w.t.Fatal(err)
	}
	return &apiServer{w: w, kinds: kinds, codecs: serializer.NewCodecFactory(kinds), cut: make(chan struct{}), versions: map[string]version{}}
}

// begin begins an outage, which may cut the watches.
func (s *apiServer) begin(fails func(n int, r *http.Request) *http.Response, cuts bool) {
	s.lock.Lock()
	defer s.lock.Unlock()
	s.fails, s.asked = fails, map[string][]time.Time{}
	if cuts {
		close(s.cut)
		s.cut = make(chan struct{})
	}
}

// end ends the outage, and returns when each request came.
func (s *apiServer) end() map[string][]time.Time {
	s.lock.Lock()
	defer s.lock.Unlock()
	s.fails = nil
	return s.asked
}

// target is what a request is about.
type target struct {
	of                           schema.GroupVersionResource
	namespace, name, subresource string
}

func targetOf(path string) target {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	var out target
	if parts[0] == "api" {
		out.of.Version, parts = parts[1], parts[2:]
	} else {
		out.of.Group, out.of.Version, parts = parts[1], parts[2], parts[3:]
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		out.namespace, parts = parts[1], parts[2:]
	}
	parts = append(parts, "", "")
	out.of.Resource, out.name, out.subresource = parts[0], parts[1], parts[2]
	return out
}

// RoundTrip implements http.RoundTripper.
func (s *apiServer) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	at := targetOf(r.URL.Path)
	watches := r.URL.Query().Get("watch") != ""
	s.lock.Lock()
	if s.fails != nil {
		verb := r.Method
		if watches {
			verb = "WATCH"
		}
		key := strings.TrimSuffix(verb+" "+at.of.Resource+"/"+at.subresource, "/")
		s.asked[key] = append(s.asked[key], time.Now())
		n := 0
		for _, times := range s.asked {
			n += len(times)
		}
		if answer := s.fails(n, r); answer != nil {
			s.lock.Unlock()
			if answer == silence {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			answer.Request = r
			return answer, nil
		}
	}
	cut := s.cut
	s.lock.Unlock()
	if watches {
		return s.watch(r, at, cut), nil
	}
	object, err := s.perform(r, at)
	return s.answer(r, object, err), nil
}

// perform has the fake API server perform the request.
func (s *apiServer) perform(r *http.Request, at target) (runtime.Object, error) {
	var body []byte
	if r.Body != nil {
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
	}
	var sent runtime.Object
	if r.Method == http.MethodPost || r.Method == http.MethodPut {
		var err error
		if sent, _, err = s.codecs.UniversalDeserializer().Decode(body, nil, nil); err != nil {
			return nil, err
		}
	}
	var action k8stesting.Action
	switch {
	case r.Method == http.MethodPost:
		action = k8stesting.NewCreateSubresourceAction(at.of, at.name, at.subresource, at.namespace, sent)
		if at.name == "" {
			action = k8stesting.NewCreateAction(at.of, at.namespace, sent)
		}
	case r.Method == http.MethodPut:
		action = k8stesting.NewUpdateAction(at.of, at.namespace, sent)
	case r.Method == http.MethodPatch:
		var subresources []string
		if at.subresource != "" {
			subresources = []string{at.subresource}
		}
		action = k8stesting.NewPatchSubresourceAction(at.of, at.namespace, at.name, types.PatchType(r.Header.Get("Content-Type")), body, subresources...)
	case at.name != "":
		action = k8stesting.NewGetAction(at.of, at.namespace, at.name)
	default:
		return s.list(r, at)
	}
	object, err := s.w.client.Invokes(action, &metav1.Status{Status: metav1.StatusSuccess})
	if err == nil && object == nil {
		object = &metav1.Status{Status: metav1.StatusSuccess}
	}
	return object, err
}

// list lists the objects that the field selector names; the pods are all of the node.
func (s *apiServer) list(r *http.Request, at target) (runtime.Object, error) {
	kind := map[string]string{
		"nodes": "Node", "pods": "Pod", "configmaps": "ConfigMap", "poddisruptionbudgets": "PodDisruptionBudget", "resourceslices": "ResourceSlice",
		"devicetaintrules": "DeviceTaintRule",
	}[at.of.Resource]
	list, err := s.w.client.Invokes(k8stesting.NewListAction(at.of, at.of.GroupVersion().WithKind(kind), at.namespace, metav1.ListOptions{}), nil)
	if err != nil {
		return nil, err
	}
	list = list.DeepCopyObject()
	items, err := meta.ExtractList(list)
	if err != nil {
		return nil, err
	}
	items = slices.DeleteFunc(items, func(o runtime.Object) bool { return !s.selected(r, o) })
	for i := range items {
		items[i] = s.versioned(items[i])
	}
	if err := meta.SetList(list, items); err != nil {
		return nil, err
	}
	of, err := meta.ListAccessor(list)
	if err != nil {
		return nil, err
	}
	of.SetResourceVersion("1000000")
	return list, nil
}

// selected reports whether the request, for a list or a watch, is for the object.
func (s *apiServer) selected(r *http.Request, object runtime.Object) bool {
	of, err := meta.Accessor(object)
	name, byName := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name=")
	return err == nil && (!byName || of.GetName() == name)
}

// versioned returns the object with a version that grows with each change of it.
func (s *apiServer) versioned(object runtime.Object) runtime.Object {
	out := object.DeepCopyObject()
	of, err := meta.Accessor(out)
	if err != nil {
		return out
	}
	of.SetResourceVersion("")
	text, err := json.Marshal(out)
	if err != nil {
		s.w.t.Error(err)
	}
	s.lock.Lock()
	defer s.lock.Unlock()
	key := fmt.Sprintf("%T %s/%s", out, of.GetNamespace(), of.GetName())
	v := s.versions[key]
	if v.content != string(text) {
		v = version{content: string(text), number: v.number + 1}
		s.versions[key] = v
	}
	of.SetResourceVersion(fmt.Sprint(v.number))
	return out
}

// answer writes the object, or the error, as an API server does.
func (s *apiServer) answer(r *http.Request, object runtime.Object, err error) *http.Response {
	if err != nil {
		var status apierrors.APIStatus
		if !errors.As(err, &status) {
			status = apierrors.NewInternalError(err)
		}
		return failure(status)
	}
	if _, isList := object.(metav1.ListInterface); !isList {
		object = s.versioned(object)
	}
	if gvks, _, err := s.kinds.ObjectKinds(object); err == nil {
		object.GetObjectKind().SetGroupVersionKind(gvks[0])
	}
	out := &http.Response{StatusCode: http.StatusOK, Request: r, Header: http.Header{"Content-Type": {runtime.ContentTypeJSON}}}
	var body bytes.Buffer
	if strings.HasPrefix(r.Header.Get("Accept"), runtime.ContentTypeProtobuf) {
		out.Header.Set("Content-Type", runtime.ContentTypeProtobuf)
		err = protobuf.NewSerializer(s.kinds, s.kinds).Encode(object, &body)
	} else {
		err = json.NewEncoder(&body).Encode(object)
	}
	if err != nil {
		s.w.t.Error(err)
	}
	out.Body, out.ContentLength = io.NopCloser(&body), int64(body.Len())
	return out
}

// failure is an answer with a status.
func failure(of apierrors.APIStatus) *http.Response {
	status := of.Status()
	status.APIVersion, status.Kind = "v1", "Status"
	body, err := json.Marshal(status)
	if err != nil {
		panic(err)
	}
	header := http.Header{"Content-Type": {runtime.ContentTypeJSON}}
	if d := status.Details; d != nil && d.RetryAfterSeconds > 0 {
		header.Set("Retry-After", fmt.Sprint(d.RetryAfterSeconds))
	}
	return &http.Response{StatusCode: int(status.Code), Header: header, Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body))}
}

// silence stands for no answer before the request's deadline.
var silence = &http.Response{}

// watch sends the changes until the outage, or the end of the test.
func (s *apiServer) watch(r *http.Request, at target, cut <-chan struct{}) *http.Response {
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		return failure(apierrors.NewInvalid(schema.GroupKind{Kind: "ListOptions"}, "", nil))
	}
	changes, err := s.w.client.InvokesWatch(k8stesting.NewWatchAction(at.of, at.namespace, metav1.ListOptions{}))
	if err != nil {
		return failure(apierrors.NewInternalError(err))
	}
	in, out := io.Pipe()
	go func() {
		defer changes.Stop()
		for {
			var change k8swatch.Event
			select {
			case <-r.Context().Done():
				_ = out.CloseWithError(r.Context().Err()) // never fails
				return
			case <-cut:
				_ = out.Close() // never fails
				return
			case change = <-changes.ResultChan():
			}
			if change.Object == nil || !s.selected(r, change.Object) {
				continue
			}
			object := s.versioned(change.Object)
			if gvks, _, err := s.kinds.ObjectKinds(object); err == nil {
				object.GetObjectKind().SetGroupVersionKind(gvks[0])
			}
			raw, err := json.Marshal(object)
			if err != nil {
				s.w.t.Error(err)
			}
			if err := json.NewEncoder(out).Encode(metav1.WatchEvent{Type: string(change.Type), Object: runtime.RawExtension{Raw: raw}}); err != nil {
				return // the client has ended the watch
			}
		}
	}()
	return &http.Response{StatusCode: http.StatusOK, Request: r, Header: http.Header{"Content-Type": {runtime.ContentTypeJSON}}, Body: in, ContentLength: -1}
}

// oneAtATime keeps kubelet's answers apart from the turns of the cluster, which go on beside the agent.
type oneAtATime struct {
	lock sync.Mutex
	*world

	passes int // that the agent has begun; the polls of its monitors while it waits count too
}

// edited counts the passes: the agent asks before each whether its settings were edited, and at each poll.
func (o *oneAtATime) edited() (bool, string) {
	o.lock.Lock()
	defer o.lock.Unlock()
	o.passes++
	return false, ""
}

func (o *oneAtATime) begun() int {
	o.lock.Lock()
	defer o.lock.Unlock()
	return o.passes
}

func (o *oneAtATime) Assignments(ctx context.Context) (holders.Assignments, error) {
	o.lock.Lock()
	defer o.lock.Unlock()
	return o.world.Assignments(ctx)
}

func (o *oneAtATime) Allocatable(ctx context.Context) (map[string][]string, error) {
	o.lock.Lock()
	defer o.lock.Unlock()
	return maps.Clone(o.offered), nil
}

// turns has the cluster take a turn each second until stop returns true, and reports whether it has within d.
func (o *oneAtATime) turns(d time.Duration, stop func() bool) bool {
	o.t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); {
		<-time.After(1003 * time.Millisecond)
		o.lock.Lock()
		o.turn()
		o.lock.Unlock()
		synctest.Wait()
		if stop() {
			return true
		}
	}
	return false
}

// runs starts the agent, with the client that it has on a node, and returns what waits for its end.
func (o *oneAtATime) runs(ctx context.Context, s *apiServer) (ended func()) {
	o.t.Helper()
	client, err := kube.New(&rest.Config{Host: "http://server.example", Transport: s, QPS: 50, Burst: 100})
	if err != nil {
		o.t.Fatal(err)
	}
	events := record.NewBroadcaster()
	events.StartRecordingToSink(kube.EventSink{Client: client})
	options := o.optionsFor(&o.host)
	options.Client, options.Pods, options.Kubelet = client, watch.Lister{Client: client, Node: nodeName}, o
	options.Driver = mute{options.Driver}
	options.Edited = o.edited
	options.Events = events.NewRecorder(s.kinds, corev1.EventSource{Component: config.FieldManager, Host: nodeName})
	a := agent.New(options)
	all := sync.WaitGroup{}
	all.Go(func() {
		if err := a.Run(ctx); err != nil {
			o.t.Error(err)
		}
	})
	return func() {
		all.Wait()
		events.Shutdown()
	}
}

// client-go's reflectors share a pause between errors by the time of the last one, which in another bubble may be years ahead.
var _ = func() struct{} { utilruntime.ErrorHandlers = nil; return struct{}{} }()

// outage is how long the API server fails in a test.
const outage = 150 * time.Second

// failing is an API server that fails.
type failing struct {
	name    string
	fails   func(n int, r *http.Request) *http.Response
	watches bool // those that are there go on, and show another state of a pod each second

	all, last float64 // requests in a second at most, over the outage, and in its last minute
	passes    int     // over the outage at most, where watches wake the agent
	renews    bool    // the slot is renewed as ever
}

// failsFor has the API server fail in the middle of a change. It returns when each request came, by verb and resource, when the outage began and ended, and
// how long after it the change has ended; negative if it has not.
func (o *oneAtATime) failsFor(c failing) (asked map[string][]time.Time, began, ended time.Time, took time.Duration) {
	o.t.Helper()
	ctx, cancel := context.WithCancel(o.t.Context())
	server := newAPIServer(o.world)
	join := o.runs(ctx, server)
	defer func() { cancel(); join() }()
	o.label("all-1g.10gb")
	if !o.turns(10*time.Minute, func() bool { return o.reason() == config.ReasonEvicting && o.holdsSlot() }) {
		o.t.Fatalf("the node says %s: %s", o.condition().Reason, o.condition().Message)
	}
	o.turns(10*time.Second, func() bool { return false })
	server.begin(c.fails, !c.watches)
	began = time.Now()
	before := o.begun()
	o.turns(outage, func() bool {
		if c.watches {
			o.restartContainer("team", "holder")
		}
		return false
	})
	asked, ended = server.end(), time.Now()
	if n := o.begun() - before; c.watches && n > c.passes {
		o.t.Errorf("%s: the agent has begun %d passes, want at most %d", c.name, n, c.passes)
	}
	if !o.turns(10*time.Minute, o.done("all-1g.10gb")) {
		return asked, began, ended, -1
	}
	return asked, began, ended, time.Since(ended)
}

// live is an agent that runs as on a node: watches show it what has changed, and wake it.
type live struct {
	node   *oneAtATime
	server *apiServer
	stop   func()
}

// goLive has the agent run from now on, in place of one that observes everything afresh in each pass of the test.
func (w *world) goLive() *live {
	w.t.Helper()
	l := &live{node: &oneAtATime{world: w}, server: newAPIServer(w)}
	l.start()
	w.live = l
	w.t.Cleanup(func() { l.stop() })
	return l
}

func (l *live) start() {
	l.node.t.Helper()
	ctx, cancel := context.WithCancel(l.node.t.Context())
	join := l.node.runs(ctx, l.server)
	l.stop = func() { cancel(); join() }
}

// pass lets a second pass.
func (l *live) pass() {
	l.node.t.Helper()
	l.node.turns(time.Second, func() bool { return true })
}

// counts counts the requests of the agent until the test has spent d, by verb and resource.
func (l *live) counts(d time.Duration) map[string]int {
	l.node.t.Helper()
	l.countRequests()
	l.node.spend(d)
	return l.requests()
}

// countRequests counts requests from now on.
func (l *live) countRequests() {
	l.server.begin(func(int, *http.Request) *http.Response { return nil }, false)
}

// requests are those since countRequests, by verb and resource.
func (l *live) requests() map[string]int {
	out := map[string]int{}
	for what, times := range l.server.end() {
		out[what] = len(times)
	}
	return out
}

// restartContainer restarts a container of the pod.
func (w *world) restartContainer(namespace, name string) {
	w.t.Helper()
	object, err := w.client.Tracker().Get(podResource, namespace, name)
	if err != nil {
		w.t.Fatal(err)
	}
	p := object.DeepCopyObject().(*corev1.Pod) //nolint:errcheck // it is a pod
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", RestartCount: int32(time.Now().Unix() % 1000)}}
	if err := w.client.Tracker().Update(podResource, p, namespace); err != nil {
		w.t.Fatal(err)
	}
}

// check compares what the agent has asked with what it may.
func (f failing) check(t *testing.T, asked map[string][]time.Time, began, ended time.Time) {
	t.Helper()
	all, last := 0, 0
	for _, what := range slices.Sorted(maps.Keys(asked)) {
		late := len(slices.DeleteFunc(slices.Clone(asked[what]), func(at time.Time) bool { return ended.Sub(at) > time.Minute }))
		all, last = all+len(asked[what]), last+late
		t.Logf("%s: %s: %d, %.2f in a second; in the last minute %d", f.name, what, len(asked[what]), float64(len(asked[what]))/ended.Sub(began).Seconds(), late)
	}
	rate, lastRate := float64(all)/ended.Sub(began).Seconds(), float64(last)/time.Minute.Seconds()
	t.Logf("%s: all: %d, %.2f in a second; in the last minute %.2f", f.name, all, rate, lastRate)
	if rate > f.all || lastRate > f.last {
		t.Errorf("%s: the agent asks %.2f times in a second, in the last minute %.2f, want at most %.2f and %.2f", f.name, rate, lastRate, f.all, f.last)
	}
	if !f.renews {
		return
	}
	before := began
	for _, at := range append(asked["PUT leases"], ended) {
		if pause := at.Sub(before); pause > fleet.Duration-fleet.RenewAfter+5*time.Second {
			t.Errorf("%s: the slot is not renewed for %s", f.name, pause)
		}
		before = at
	}
}

// serverError is the answer to all requests that such says.
func serverError(such func(n int, r *http.Request) bool) func(int, *http.Request) *http.Response {
	return func(n int, r *http.Request) *http.Response {
		if !such(n, r) {
			return nil
		}
		return failure(apierrors.NewInternalError(io.EOF))
	}
}

// TestPromise16AServerThatFailsIsAskedEverLessOften: all that the agent asks counts, its reflectors' requests and Events too. Without the pauses it asks two to
// five times a second for as long as the server fails.
func TestPromise16AServerThatFailsIsAskedEverLessOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []failing{
			{
				name:  "429 with Retry-After",
				fails: func(int, *http.Request) *http.Response { return failure(apierrors.NewTooManyRequests("wait", 1)) },
				all:   1.1, last: 0.5,
			},
			{name: "500", fails: serverError(func(int, *http.Request) bool { return true }), all: 1, last: 0.7},
			{name: "two of three fail", fails: serverError(func(n int, _ *http.Request) bool { return n%3 > 0 }), all: 1.8, last: 1.7, renews: true},
			{name: "writes fail", fails: serverError(func(_ int, r *http.Request) bool { return r.Method != http.MethodGet }), all: 0.8, last: 0.5},
			{name: "no answer", fails: func(int, *http.Request) *http.Response { return silence }, all: 0.3, last: 0.3},
			{name: "500 beside watches that wake the agent", fails: serverError(func(int, *http.Request) bool { return true }), watches: true, all: 0.8, last: 0.5, passes: 60},
		} {
			w := newWorld(t, oneH100)
			w.turn()
			w.pool()
			w.pod("holder", w.gpus.UUIDs()[0])
			w.grace = 15*time.Second + outage
			if err := w.terminate("team", "holder"); err != nil { // for the end of this pod the change waits all through the outage
				t.Fatal(err)
			}
			w.grace = 0
			asked, began, ended, took := (&oneAtATime{world: w}).failsFor(c)
			c.check(t, asked, began, ended)
			t.Logf("%s: well again, the change took %s", c.name, took)
			if took < 0 || took > 90*time.Second {
				t.Errorf("%s: well again, the change took %s: %s: %s", c.name, took, w.condition().Reason, w.condition().Message)
			}
		}
	})
}
