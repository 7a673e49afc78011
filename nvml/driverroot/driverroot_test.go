package driverroot_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpuslice/gpuslice/nvml/driverroot"
)

// host is a file system with these files below its root, by their text.
func host(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for path, text := range files {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestTheLibraryIsFoundWhereTheDriverIs(t *testing.T) {
	const ready = "run/nvidia/validations/driver-ready"
	for name, test := range map[string]struct {
		files map[string]string
		want  string
	}{
		"on the host":                    {map[string]string{"usr/lib64/libnvidia-ml.so.1": ""}, "usr/lib64/libnvidia-ml.so.1"},
		"in the driver's container":      {map[string]string{"run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": ""}, "run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"},
		"where the operator says it is":  {map[string]string{ready: "IS_HOST_DRIVER=false\nNVIDIA_DRIVER_ROOT=/opt/driver\nNVIDIA_DEV_ROOT=/\n", "opt/driver/usr/lib64/libnvidia-ml.so.1": "", "usr/lib64/libnvidia-ml.so.1": "", "run/nvidia/driver/lib/libnvidia-ml.so.1": ""}, "opt/driver/usr/lib64/libnvidia-ml.so.1"},
		"the container's before another": {map[string]string{ready: "NVIDIA_DRIVER_ROOT=/run/nvidia/driver\n", "usr/lib64/libnvidia-ml.so.1": "", "run/nvidia/driver/lib/libnvidia-ml.so.1": ""}, "run/nvidia/driver/lib/libnvidia-ml.so.1"},
		"the host's, by the operator":    {map[string]string{ready: "IS_HOST_DRIVER=true\nNVIDIA_DRIVER_ROOT=/\n", "usr/lib64/libnvidia-ml.so.1": "", "run/nvidia/driver/lib/libnvidia-ml.so.1": ""}, "usr/lib64/libnvidia-ml.so.1"},
		"not where the operator says":    {map[string]string{ready: "NVIDIA_DRIVER_ROOT=/opt/driver", "run/nvidia/driver/lib/libnvidia-ml.so.1": ""}, "run/nvidia/driver/lib/libnvidia-ml.so.1"},
		"beside a word that is none":     {map[string]string{ready: "NVIDIA_DRIVER_ROOT=\nx", "usr/lib64/libnvidia-ml.so.1": ""}, "usr/lib64/libnvidia-ml.so.1"},
		"below the root, wherever to":    {map[string]string{ready: "NVIDIA_DRIVER_ROOT=/../../a", "a/lib/libnvidia-ml.so.1": ""}, "a/lib/libnvidia-ml.so.1"},
	} {
		t.Run(name, func(t *testing.T) {
			root := host(t, test.files)
			if got, err := driverroot.Find(root, nil); err != nil || got != filepath.Join(root, test.want) {
				t.Errorf("found %q, error %v; want %s", got, err, test.want)
			}
		})
	}
}

// No one would ever write into the pipe.
func TestAPipeUnderTheNameOfTheOperatorsWordIsNone(t *testing.T) {
	root := host(t, map[string]string{"run/nvidia/validations/other": "", "usr/lib64/libnvidia-ml.so.1": ""})
	if err := syscall.Mkfifo(filepath.Join(root, "run/nvidia/validations/driver-ready"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := driverroot.Find(root, nil); err != nil || got != filepath.Join(root, "usr/lib64/libnvidia-ml.so.1") {
		t.Errorf("found %q, error %v", got, err)
	}
}

func TestALibraryThatIsNowhereIsMissedByThePlaces(t *testing.T) {
	for ready, want := range map[string]string{
		"":                               "",
		"NVIDIA_DRIVER_ROOT=/opt/driver": "; the GPU Operator says that it is under /opt/driver of the host: mount that below ROOT",
		"NVIDIA_DRIVER_ROOT=/":           "; the GPU Operator says that the driver is the host's own, so mount the host's /usr below ROOT",
	} {
		root := host(t, map[string]string{"run/nvidia/validations/driver-ready": ready})
		_, err := driverroot.Find(root, nil)
		if !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("error %v", err)
		}
		got := strings.ReplaceAll(err.Error(), root, "ROOT")
		for _, text := range []string{"there is no libnvidia-ml.so.1 under ROOT", "ROOT/run/nvidia/driver", want} {
			if !strings.Contains(got, text) {
				t.Errorf("%q: error %q, want %q in it", ready, got, text)
			}
		}
	}
}
