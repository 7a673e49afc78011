package cdi_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/aside"
	"github.com/gpuslice/gpuslice/nvml/cdi"
	"github.com/gpuslice/gpuslice/test/stalledfs"
)

// The folder of the specs is the host's, and may be behind a mount that does not answer.
func TestSpecsBehindAMountThatDoesNotAnswerAreLeftAlone(t *testing.T) {
	mounted := stalledfs.Mount(t, "nvidia.yaml")
	s := cdi.New(cdi.Options{Dirs: []string{mounted.Dir}})
	if _, err := s.Stale(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	asked := mounted.Stall()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	if _, err := s.Stale(ctx, nil); !aside.Hangs(err) || !strings.Contains(err.Error(), mounted.Dir) {
		t.Errorf("looking: %v", err)
	}
	if err := s.Write(t.Context(), nil); !aside.Hangs(err) {
		t.Errorf("writing: %v", err)
	}
}

// So is the node's /dev, where the device files of instances are looked for.
func TestDeviceFilesBehindAMountThatDoesNotAnswerAreNamed(t *testing.T) {
	mounted := stalledfs.Mount(t, "dev/nvidiactl")
	o := cdi.Options{Dirs: []string{t.TempDir()}, DevRoot: mounted.Dir}
	spec := `{"cdiVersion": "0.5.0", "kind": "management.nvidia.com/gpu", "devices": [{"name": "all", "containerEdits": {"env": ["A=b"]}}]}`
	must(t, os.WriteFile(filepath.Join(o.Dirs[0], "management.json"), []byte(spec), 0o600))
	asked := mounted.Stall()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	if _, err := cdi.New(o).Stale(ctx, []nvml.GPU{{UUID: "GPU-1", Capable: true}}); !aside.Hangs(err) || !strings.Contains(err.Error(), "hangs at "+filepath.Join(mounted.Dir, "dev")) {
		t.Errorf("error is %v", err)
	}
}

// So is the folder of the driver, which NVIDIA's library is looked for in and opened from. The error names the file.
func TestALibraryBehindAMountThatDoesNotAnswerIsNamed(t *testing.T) {
	const library = "usr/lib64/libnvidia-ml.so.1"
	for name, options := range map[string]func(root string) cdi.Options{
		"while it is looked for": func(root string) cdi.Options { return cdi.Options{DriverRoot: root} },
		"while it is opened":     func(root string) cdi.Options { return cdi.Options{Library: filepath.Join(root, library)} },
	} {
		t.Run(name, func(t *testing.T) {
			mounted := stalledfs.Mount(t, library)
			o := options(mounted.Dir)
			o.Dirs, o.DevRoot = []string{t.TempDir()}, t.TempDir()
			// Instances that another test has left in the simulated kernel have their device files made first.
			must(t, errors.Join(os.Mkdir(filepath.Join(o.DevRoot, "dev"), 0o700), os.WriteFile(filepath.Join(o.DevRoot, "dev/nvidiactl"), nil, 0o600)))
			t.Cleanup(cdi.SetMknod(func(string, uint32, int) error { return nil }))
			// A spec without the GPU is to be rewritten, by NVIDIA's library.
			stale := `{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "none", "containerEdits": {"env": ["A=b"]}}]}`
			must(t, os.WriteFile(filepath.Join(o.Dirs[0], "nvidia.json"), []byte(stale), 0o600))
			gpus := []nvml.GPU{{UUID: "GPU-1", Capable: true}}
			bounded, give := context.WithTimeout(t.Context(), 5*time.Minute) // for what must not wait at all, on a machine with much to do
			defer give()
			ctx, cancel := context.WithCancel(bounded)
			defer cancel()
			asked := mounted.Stall()
			go func() {
				<-asked
				cancel()
			}()
			s := cdi.New(o)
			wants := func(err error, want string) {
				t.Helper()
				if !errors.Is(err, nvml.ErrUnresponsive) || !strings.Contains(err.Error(), want+"; it hangs at "+mounted.Dir) {
					t.Errorf("error is %v", err)
				}
			}
			wants(s.Write(ctx, gpus), "context canceled")
			wants(s.Write(bounded, gpus), "an earlier call has not returned")
			mounted.Answer() // there is no library in the file
			for errors.Is(s.Write(bounded, gpus), nvml.ErrUnresponsive) && bounded.Err() == nil {
				<-time.After(time.Millisecond)
			}
			if err := s.Write(bounded, gpus); !errors.Is(err, nvml.ErrNoDriver) {
				t.Errorf("then %v", err)
			}
		})
	}
}
