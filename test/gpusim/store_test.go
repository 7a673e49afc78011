package gpusim_test

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

func open(t *testing.T, dir string) *gpusim.Node {
	t.Helper()
	n, err := gpusim.Open(dir)
	must(t, err)
	t.Cleanup(func() { must(t, n.Close()) })
	return n
}

func TestOneSeesAtOnceWhatAnotherHasDone(t *testing.T) {
	a := node(t, one("A100-80GB"))
	b := open(t, a.Dir())
	for range 50 {
		must(t, a.Driver().Create(t.Context(), nvml.UUID(a.UUIDs()[0]), placed("7g.80gb@0:8")))
		if got := geometry(t, b.Driver(), 0).String(); got != "7g.80gb@0" {
			t.Fatalf("after creating: got %s", got)
		}
		must(t, b.Driver().Destroy(t.Context(), nvml.UUID(a.UUIDs()[0]), placed("7g.80gb@0:8")))
		if got := geometry(t, a.Driver(), 0).String(); got != "-" {
			t.Fatalf("after destroying: got %s", got)
		}
	}
}

func TestCountsAreExactWithManyWritersAtOnce(t *testing.T) {
	n := node(t, "gpus: [{model: H100-80GB, count: 4}]")
	const writers, times = 8, 50
	var wg sync.WaitGroup
	for range writers {
		l := library(t, open(t, n.Dir()))
		wg.Go(func() {
			for i := range times {
				d, r := l.DeviceByIndex(i % 4)
				expectReturn(t, "finding", r, gpusim.Success)
				expectReturn(t, "setting", l.SetPersistence(d, i%2 == 0), gpusim.Success)
			}
		})
	}
	wg.Wait()
	if got := n.Calls()[gpusim.SetPersistenceMode]; got != writers*times {
		t.Errorf("%d calls were counted, want %d", got, writers*times)
	}
}

// A writer that dies between the two marks leaves the generation odd, and the file that was to be the next in pieces.
func TestAWriterThatDiedInTheMiddleHarmsNoReader(t *testing.T) {
	n := node(t, one("A100-80GB"))
	for _, profile := range []string{"3g.40gb@0:4", "3g.40gb@4:4"} { // whichever file is the next
		die(t, n)
		must(t, n.Driver().Create(t.Context(), nvml.UUID(n.UUIDs()[0]), placed(profile)))
		die(t, n)
		if got, want := geometry(t, open(t, n.Dir()).Driver(), 0), geometry(t, n.Driver(), 0); got.String() != want.String() {
			t.Errorf("one sees %s, and another %s", got, want)
		}
	}
	if got := geometry(t, open(t, n.Dir()).Driver(), 0).String(); got != "3g.40gb@0 3g.40gb@4" {
		t.Errorf("got %s", got)
	}
}

// die leaves the node as a writer does that dies in the middle.
func die(t *testing.T, n *gpusim.Node) {
	t.Helper()
	lock, err := os.OpenFile(filepath.Join(n.Dir(), "lock"), os.O_RDWR, 0)
	must(t, err)
	defer lock.Close()
	word := make([]byte, 8)
	_, err = lock.ReadAt(word, 0)
	must(t, err)
	generation := binary.NativeEndian.Uint64(word)
	binary.NativeEndian.PutUint64(word, generation+1)
	_, err = lock.WriteAt(word, 0)
	must(t, err)
	next := fmt.Sprintf("state-%d.json", (generation+2)/2%2)
	must(t, os.WriteFile(filepath.Join(n.Dir(), next), []byte(`{"half`), 0o600))
}

func TestTheSameSeedGivesTheSameIdentities(t *testing.T) {
	walk := func() (ids []string) {
		n := node(t, "seed: 7\n"+one("A100-80GB"))
		for range 2 {
			must(t, n.Driver().Create(t.Context(), nvml.UUID(n.UUIDs()[0]), placed("3g.40gb@4:4")))
			ids = append(ids, n.UUIDs()[0], n.MIGDevice(0, 4))
			must(t, n.Driver().Destroy(t.Context(), nvml.UUID(n.UUIDs()[0]), placed("3g.40gb@4:4")))
		}
		return ids
	}
	first, second := walk(), walk()
	for i := range first {
		if first[i] != second[i] {
			t.Errorf("%s became %s", first[i], second[i])
		}
	}
	if first[1] == first[3] {
		t.Errorf("two MIG devices, one after the other, are %s", first[1])
	}
}

func TestAProcessThatHasEndedHoldsNothing(t *testing.T) {
	n := node(t, "gpus: [{model: H100-80GB}]")
	sleeper := exec.CommandContext(t.Context(), "sleep", "60")
	must(t, sleeper.Start())
	must(t, n.HoldReal(n.UUIDs()[0], sleeper.Process.Pid, "sleeper", 1))
	l := library(t, n)
	_, r := l.SetMIGMode(gpusim.Device{}, true)
	expectReturn(t, "with the process", r, gpusim.InUse)
	must(t, sleeper.Process.Kill())
	_ = sleeper.Wait() // it says that it was killed
	_, r = l.SetMIGMode(gpusim.Device{}, true)
	expectReturn(t, "after the process", r, gpusim.Success)
}

func BenchmarkSnapshotOfEightFullGPUs(b *testing.B) {
	s, err := gpusim.ParseSpec([]byte("gpus: [{model: H100-80GB, count: 8, mig: true}]"))
	if err != nil {
		b.Fatal(err)
	}
	n, err := gpusim.Create(b.TempDir(), s)
	if err != nil {
		b.Fatal(err)
	}
	defer n.Close()
	d := n.Driver()
	for _, gpu := range n.UUIDs() {
		for i := range 7 {
			if err := d.Create(b.Context(), nvml.UUID(gpu), nvml.Placed{Profile: "1g.10gb", Span: nvml.Span{Start: i, Size: 1}}); err != nil {
				b.Fatal(err)
			}
		}
	}
	for b.Loop() {
		if _, err := d.Snapshot(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
