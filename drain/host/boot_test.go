package host_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/drain/host"
)

func TestTheBootIsTheKernels(t *testing.T) {
	t.Parallel()
	const boot = "0f3c7f5e-7f5b-4c38-a4e6-4a8f3f0d2b11"
	for name, c := range map[string]struct {
		text *string
		want string
		fail string
	}{
		"as the kernel writes it": {text: new(boot + "\n"), want: boot},
		"not there":               {fail: "boot_id"},
		"empty":                   {text: new(""), fail: "no boot id"},
		"another form":            {text: new("urn:uuid:" + boot + "\n"), fail: "no boot id"},
		"two lines":               {text: new(boot + "\n\n"), fail: "no boot id"},
		"escapes":                 {text: new("\x1b[2J" + boot[4:] + "\n"), fail: "no boot id"},
		"endless":                 {text: new(strings.Repeat("0", 1<<20)), fail: "longer than"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			if c.text != nil {
				writeFile(t, filepath.Join(root, "sys", "kernel", "random", "boot_id"), *c.text)
			}
			got, err := (&host.Kernel{Proc: root}).Boot(t.Context())
			switch {
			case got != c.want:
				t.Errorf("got %q, %v", got, err)
			case c.fail == "" && err != nil, c.fail != "" && (err == nil || !strings.Contains(err.Error(), c.fail)):
				t.Errorf("error is %v", err)
			case c.text == nil && !errors.Is(err, fs.ErrNotExist):
				t.Errorf("error is %v, want one of a file that is not there", err)
			}
		})
	}
}

func TestTheBootOfThisMachine(t *testing.T) {
	t.Parallel()
	got, err := new(host.Kernel).Boot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if again, err := new(host.Kernel).Boot(t.Context()); err != nil || again != got {
		t.Errorf("%q at first and then %q, %v", got, again, err)
	}
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
}
