package machine

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// hierarchies is where the kernel's cgroups are mounted: one hierarchy for each controller, or a single one (v2).
const hierarchies = "/sys/fs/cgroup"

// removalTime is how long processes that were killed may take to leave their cgroup.
const removalTime = 5 * time.Second

// cgroup is the name of a cgroup below the root of each hierarchy.
type cgroup string

// dirs are the directories of the cgroup. Some may not exist.
func (g cgroup) dirs() ([]string, error) {
	if _, err := os.Stat(filepath.Join(hierarchies, "cgroup.controllers")); err == nil {
		return []string{filepath.Join(hierarchies, string(g))}, nil
	}
	roots, err := filepath.Glob(hierarchies + "/*")
	if err != nil {
		return nil, fmt.Errorf("looking for cgroups: %w", err)
	}
	var all []string
	for _, root := range roots {
		if info, err := os.Lstat(root); err == nil && info.IsDir() { // others are links, cpu -> cpu,cpuacct
			all = append(all, filepath.Join(root, string(g)))
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("looking for cgroups: nothing is mounted below %s", hierarchies)
	}
	return all, nil
}

func (g cgroup) create() error {
	dirs, err := g.dirs()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("making a cgroup: %w", err)
		}
		// A new cpuset of v1 has neither processors nor memory, and takes no process.
		for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
			if err := inherit(dir, name); err != nil {
				return fmt.Errorf("making a cgroup: %w", err)
			}
		}
	}
	return nil
}

func inherit(dir, name string) error {
	own, err := os.ReadFile(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) || len(bytes.TrimSpace(own)) > 0 {
		return nil
	}
	if err != nil {
		return err
	}
	parents, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the root of v2 has none, and needs none
	}
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name), parents, 0o644)
}

// RemoveCgroups removes what is below the cgroup of the machine, as a reboot of it does. No process may be left in it.
func RemoveCgroups() error {
	own, err := cgroup(Cgroup()).dirs()
	if err != nil {
		return err
	}
	var below []string
	for _, dir := range own {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return fmt.Errorf("looking for cgroups: %w", err)
		}
		for _, e := range entries {
			if e.IsDir() {
				below = append(below, filepath.Join(dir, e.Name()))
			}
		}
	}
	return removeAll(below)
}

// remove removes the cgroup and those below it, as soon as the last process has left.
func (g cgroup) remove() error {
	dirs, err := g.dirs()
	if err != nil {
		return err
	}
	return removeAll(dirs)
}

func removeAll(dirs []string) error {
	deadline := time.Now().Add(removalTime)
	for _, dir := range dirs {
		err := removeTree(dir)
		for ; err != nil && time.Now().Before(deadline); err = removeTree(dir) {
			<-time.After(50 * time.Millisecond) // the kernel says nothing when the last one leaves a v1 cgroup
		}
		if err != nil {
			return fmt.Errorf("removing a cgroup: %w", err)
		}
	}
	return nil
}

func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return os.Remove(dir) // rmdir: its files are the kernel's
}
