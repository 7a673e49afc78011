package kubelet

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/renameio/v2"
)

// dataLink is the link that kubelet turns from one state of a volume to the next.
const dataLink = "..data"

// writeAtomically makes the files appear in dir all at once, in kubelet's layout. Each state is its own directory,
// "..data" links to the current one, and each file is a link through "..data". It does not touch unchanged files.
func writeAtomically(dir string, files map[string]string) error {
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
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(state, name), []byte(text), 0o644); err != nil {
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

// linkFiles gives each name its link, and removes the links of files that are gone.
func linkFiles(dir string, files map[string]string) error {
	for name := range files {
		err := os.Symlink(filepath.Join(dataLink, name), filepath.Join(dir, name))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if _, stays := files[e.Name()]; !stays && !strings.HasPrefix(e.Name(), "..") {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// holds reports whether the directory has exactly these files.
func holds(dir string, files map[string]string) bool {
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != len(files) {
		return false
	}
	for name, text := range files {
		if found, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(found) != text {
			return false
		}
	}
	return true
}
