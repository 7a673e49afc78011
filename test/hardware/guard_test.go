package main

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// reads are the methods of nvml.Driver that change nothing of a GPU.
var reads = []string{"Snapshot", "Events", "Release"}

// none answers to reads, and has no other methods: a call that the guard let pass would find nothing.
type none struct{}

func (none) Snapshot(context.Context) ([]nvml.GPU, error)                     { return nil, nil }
func (none) Health(context.Context, bool) ([]nvml.Health, error)              { return nil, nil }
func (none) Usage(context.Context, map[nvml.UUID][]int) ([]nvml.Usage, error) { return nil, nil }
func (none) Events(context.Context) (<-chan nvml.Event, error)                { return nil, nil }
func (none) Release(context.Context) error                                    { return nil }

func TestEachCallThatWouldChangeAGPUIsRefusedAndFailsTheRun(t *testing.T) {
	var ended []error
	g := &guard{reader: none{}, stop: func(err error) { ended = append(ended, err) }}
	methods := reflect.TypeFor[nvml.Driver]()
	var changing []string
	for i := range methods.NumMethod() {
		name := methods.Method(i).Name
		call := reflect.ValueOf(g).MethodByName(name)
		in := []reflect.Value{reflect.ValueOf(t.Context())}
		for n := 1; n < call.Type().NumIn(); n++ {
			in = append(in, reflect.Zero(call.Type().In(n)))
		}
		out := call.Call(in)
		err, _ := out[len(out)-1].Interface().(error)
		if slices.Contains(reads, name) {
			if err != nil {
				t.Errorf("%s, which only reads: %v", name, err)
			}
			continue
		}
		changing = append(changing, name)
		if !errors.Is(err, errForbidden) {
			t.Errorf("%s: %v", name, err)
		}
	}
	want := []string{"Create", "CreatePart", "Destroy", "DestroyPart", "Reset", "SetComputeMode", "SetMode", "SetPersistence"}
	if diff := cmp.Diff(want, changing); diff != "" {
		t.Errorf("methods that change a GPU (-want +got):\n%s", diff)
	}
	trial := &trial{machine: &machine{driver: g}, before: []nvml.GPU{}}
	if _, err := trial.unchanged(t.Context()); err == nil || !strings.Contains(err.Error(), "refused: creating @0 on ; ") {
		t.Errorf("the run has not failed by them: %v", err)
	}
	if len(g.calls()) != len(changing) || len(ended) != len(changing) {
		t.Errorf("%d calls were refused, %d are remembered, %d have ended the run", len(changing), len(g.calls()), len(ended))
	}
}

func TestARunThatCutsChangesItsOwnGPUsAlone(t *testing.T) {
	n, err := gpusim.Create(t.TempDir(), spec(t, "gpus: [{model: H100-80GB, count: 2}]"))
	must(t, err)
	t.Cleanup(func() { _ = n.Close() })
	g := &guard{reader: none{}}
	g.cuts(n.Driver(), []nvml.UUID{nvml.UUID(n.UUIDs()[1])})
	for index, want := range []error{errForbidden, nil} {
		if err := g.SetMode(t.Context(), nvml.UUID(n.UUIDs()[index]), true); !errors.Is(err, want) {
			t.Errorf("GPU %d: %v, want %v", index, err, want)
		}
	}
	if calls := n.Calls(); calls[gpusim.SetMigMode] != 1 {
		t.Errorf("the driver was called: %v", calls)
	}
}
