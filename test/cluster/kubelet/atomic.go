package kubelet

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/renameio/v2"
)

// dataLink is the link that kubelet turns from one state of a volume to the next.
const dataLink = "..data"

// file is one file of a volume.
type file struct {
	text string
	mode os.FileMode
}

// writeAtomically makes the files appear in dir all at once, laid out as kubelet does: each state is a directory of its
// own, "..data" links to the one that holds, and each file is a link through it. Unchanged files are not touched.
func writeAtomically(dir string, files map[string]file) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	before, err := os.Readlink(filepath.Join(dir, dataLink))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if before != "" && holds(filepath.Join(dir, before), files) {
		return nil
	}
	state, err := os.MkdirTemp(dir, "..state_")
	if err != nil {
		return err
	}
	if err := os.Chmod(state, 0o755); err != nil {
		return err
	}
	for name, f := range files {
		if err := writeFile(state, name, f); err != nil {
			return err
		}
	}
	if err := renameio.Symlink(filepath.Base(state), filepath.Join(dir, dataLink)); err != nil {
		return fmt.Errorf("showing the new files: %w", err)
	}
	if err := linkFiles(dir, files); err != nil {
		return err
	}
	if before == "" {
		return nil
	}
	return os.RemoveAll(filepath.Join(dir, before))
}

func writeFile(dir, name string, f file) error {
	path := filepath.Join(dir, filepath.Join("/", name))
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path, []byte(f.text), f.mode); err != nil {
		return err
	}
	return os.Chmod(path, f.mode) // whatever the umask
}

// linkFiles gives each top-level name its link, and takes away those of files that are gone.
func linkFiles(dir string, files map[string]file) error {
	wanted := map[string]bool{}
	for name := range files {
		top, _, _ := strings.Cut(strings.TrimPrefix(filepath.Join("/", name), "/"), "/")
		wanted[top] = true
		err := os.Symlink(filepath.Join(dataLink, top), filepath.Join(dir, top))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !wanted[e.Name()] && !strings.HasPrefix(e.Name(), "..") {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// holds reports whether the directory has exactly these files.
func holds(dir string, files map[string]file) bool {
	found := map[string]file{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		found[name] = file{string(text), info.Mode().Perm()}
		return err
	})
	return err == nil && maps.Equal(found, files)
}
