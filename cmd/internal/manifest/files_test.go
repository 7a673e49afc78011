package manifest_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
)

// A folder is read as kubectl reads it, as one that kubelet has mounted with links into ..data.
func TestFilesOfAFolder(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		make func(t *testing.T, folder string)
		want []string
		err  string // of Files, or of ReadFile
	}{
		"by their names": {func(t *testing.T, folder string) {
			t.Helper()
			for _, file := range []string{"b.yaml", "a.yml", "c.json", "d.txt", ".yaml.swp"} {
				write(t, filepath.Join(folder, file), 1)
			}
			if err := os.Mkdir(filepath.Join(folder, "e.yaml"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, []string{"a.yml", "b.yaml", "c.json"}, ""},
		"links": {func(t *testing.T, folder string) {
			t.Helper()
			if err := os.Mkdir(filepath.Join(folder, "..data"), 0o700); err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(folder, "..data", "a.yaml"), 1)
			link(t, filepath.Join("..data", "a.yaml"), filepath.Join(folder, "a.yaml"))
		}, []string{"a.yaml"}, ""},
		"a link to nothing":  {func(t *testing.T, folder string) { t.Helper(); link(t, "none", filepath.Join(folder, "a.yaml")) }, []string{"a.yaml"}, "no such file"},
		"a link to a folder": {func(t *testing.T, folder string) { t.Helper(); link(t, ".", filepath.Join(folder, "a.yaml")) }, []string{"a.yaml"}, "is a directory"},
		"a pipe": {func(t *testing.T, folder string) {
			t.Helper()
			if err := unix.Mkfifo(filepath.Join(folder, "a.yaml"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, nil, "a.yaml is no regular file"},
		"nothing":  {func(t *testing.T, folder string) { t.Helper(); write(t, filepath.Join(folder, "a.txt"), 1) }, nil, "has no file of YAML or JSON"},
		"too much": {func(t *testing.T, folder string) { t.Helper(); write(t, filepath.Join(folder, "a.yaml"), 1<<30) }, nil, "have 1073741824 bytes, and at most"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			folder := t.TempDir()
			row.make(t, folder)
			files, err := manifest.Files(folder)
			var got []string
			for _, file := range files {
				got = append(got, filepath.Base(file))
				if err == nil {
					_, err = manifest.ReadFile(file, nil)
				}
			}
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if (err == nil) != (row.err == "") || err != nil && !strings.Contains(err.Error(), row.err) {
				t.Errorf("error %v, want %q", err, row.err)
			}
		})
	}
}

// write makes a file of so many bytes, without taking their room.
func write(t *testing.T, file string, size int64) {
	t.Helper()
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, size); err != nil {
		t.Fatal(err)
	}
}

func link(t *testing.T, to, file string) {
	t.Helper()
	if err := os.Symlink(to, file); err != nil {
		t.Fatal(err)
	}
}
