package driverroot_test

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/nvml/driverroot"
	"github.com/gpuslice/gpuslice/test/stalledfs"
)

// Any of the files that are asked for may be on a server of its own. Which one does not answer is said before it is asked for.
func TestAFileThatDoesNotAnswerWasNamedBefore(t *testing.T) {
	for _, file := range []string{"run/nvidia/validations/driver-ready", "usr/lib64/libnvidia-ml.so.1", "run/nvidia/driver/usr/lib64/libnvidia-ml.so.1"} {
		t.Run(file, func(t *testing.T) {
			root, mounted := t.TempDir(), stalledfs.Mount(t, filepath.Base(file))
			link := filepath.Join(root, filepath.Dir(file))
			if err := os.MkdirAll(filepath.Dir(link), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(mounted.Dir, link); err != nil {
				t.Fatal(err)
			}
			asked := mounted.Stall()
			at := make(chan string, 100)
			ended := make(chan error, 1)
			go func() {
				_, err := driverroot.Find(root, func(path string) { at <- path })
				ended <- err
			}()
			select {
			case <-asked:
			case err := <-ended:
				t.Fatalf("it was not asked for: %v", err)
			case <-time.After(5 * time.Minute):
				t.Fatal("it was not asked for")
			}
			last := ""
			for len(at) > 0 {
				last = <-at
			}
			if want := filepath.Join(root, file); last != want {
				t.Errorf("it stands at %s, want %s", last, want)
			}
			mounted.Answer()
			if err := <-ended; err != nil && file != "run/nvidia/validations/driver-ready" { // which names no driver here
				t.Error(err)
			}
		})
	}
}

// The call that waits is one that the Go runtime knows to wait: the program goes on, its garbage collector too.
func TestALibraryThatDoesNotAnswerStopsNothingElse(t *testing.T) {
	mounted := stalledfs.Mount(t, driverroot.Library)
	path := filepath.Join(mounted.Dir, driverroot.Library)
	asked := mounted.Stall()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		driverroot.Touch(path)
	}()
	<-asked
	for range 3 {
		runtime.GC()
	}
	select {
	case <-ended:
		t.Error("it was not read")
	default:
	}
	mounted.Answer()
	<-ended
	driverroot.Touch(filepath.Join(mounted.Dir, "none"))
	driverroot.Touch(driverroot.Library) // a name, which is the loader's to look up
}
