package kubelet

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/test/sandbox"
)

// realProc is the mount point of this machine's /proc within the /proc of the containers. Their entries are links into
// it.
const realProc = ".host"

// sharedProcesses is the /proc of a pod with shareProcessNamespace: its containers see only the processes of the pod.
// They see them under their pids on this machine, since there is no namespace: a signal to such a pid arrives.
type sharedProcesses struct {
	dir string
	log *zap.Logger

	mu   sync.Mutex
	made bool
}

func newSharedProcesses(w *worker) *sharedProcesses {
	if share := w.pod.Spec.ShareProcessNamespace; share == nil || !*share {
		return nil
	}
	return &sharedProcesses{dir: filepath.Join(w.k.Dir, "pods", string(w.uid), "proc"), log: w.log}
}

// mounts show the pod's processes to a container. They make room below /proc for its further mounts.
func (s *sharedProcesses) mounts(further []sandbox.Mount) ([]sandbox.Mount, error) {
	if s == nil {
		return nil, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.make(); err != nil {
		return nil, fmt.Errorf("sharing the pod's processes: %w", err)
	}
	for _, m := range further {
		if below, ok := strings.CutPrefix(m.Target, "/proc/"); ok {
			if err := s.makeRoom(below, m.Source); err != nil {
				return nil, fmt.Errorf("making room for %s among the pod's processes: %w", m.Target, err)
			}
		}
	}
	return []sandbox.Mount{{Source: s.dir, Target: "/proc"}, {Source: "/proc", Target: filepath.Join("/proc", realProc)}}, nil
}

// make fills the directory with all of /proc but the processes. Those of an earlier kubelet ended with it.
func (s *sharedProcesses) make() error {
	if s.made {
		return nil
	}
	if err := os.RemoveAll(s.dir); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(s.dir, realProc), 0o755); err != nil {
		return err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err == nil {
			continue
		}
		if err := os.Symlink(filepath.Join(realProc, e.Name()), filepath.Join(s.dir, e.Name())); err != nil {
			return err
		}
	}
	s.made = true
	return nil
}

// makeRoom creates mount points that replace this machine's entry of that name.
func (s *sharedProcesses) makeRoom(below, source string) error {
	top, _, _ := strings.Cut(below, "/")
	if info, err := os.Lstat(filepath.Join(s.dir, top)); err == nil && info.Mode()&fs.ModeSymlink != 0 {
		if err := os.Remove(filepath.Join(s.dir, top)); err != nil {
			return err
		}
	}
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	target := filepath.Join(s.dir, below)
	if info.IsDir() {
		return os.MkdirAll(target, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	return os.WriteFile(target, nil, 0o644)
}

// add shows a process that has started.
func (s *sharedProcesses) add(pid int) {
	if s == nil {
		return
	}
	name := strconv.Itoa(pid)
	if err := os.Symlink(filepath.Join(realProc, name), filepath.Join(s.dir, name)); err != nil {
		s.log.Warn("process not shown to its pod", zap.Int("pid", pid), zap.Error(err))
	}
}

// remove takes away one that has ended.
func (s *sharedProcesses) remove(pid int) {
	if s == nil {
		return
	}
	if err := os.Remove(filepath.Join(s.dir, strconv.Itoa(pid))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("process of a pod still shown", zap.Int("pid", pid), zap.Error(err))
	}
}
