package gpusim

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// lockFile is in the directory of each node: flock for writers. Its content is the generation.
const lockFile = "lock"

// stateFiles are written in turn, each over its old content, so that one is always whole. Replacing a file would make
// the file system wait for the disk, at each call that a program makes.
var stateFiles = [2]string{"state-0.json", "state-1.json"}

// store keeps the state of one node in a directory. A read that finds nothing new costs one look at a mapped word.
//
// The word counts up by two for each write, and is odd during a write. A writer that dies leaves it odd. The next
// reader then takes the lock and reads the other file, which the dead writer did not touch.
type store struct {
	dir        string
	lock       *os.File
	generation *uint64
	reads      *tally

	mu      sync.Mutex // one writer or reloader in this process
	current atomic.Pointer[snapshot]
	closed  chan struct{}

	watchers sync.Mutex
	changed  chan struct{} // closed at each change made by this process
}

type snapshot struct {
	generation uint64
	*state
}

const wordSize = 8

// openStore opens the node in dir. With first set, it creates it: a node that exists is replaced.
func openStore(dir string, first *state) (*store, error) {
	flags := os.O_RDWR
	if first != nil {
		flags |= os.O_CREATE
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}
	lock, err := os.OpenFile(filepath.Join(dir, lockFile), flags, 0o666)
	if err != nil {
		return nil, err
	}
	s := &store{dir: dir, lock: lock, closed: make(chan struct{}), changed: make(chan struct{})}
	if err := s.start(first); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return s, nil
}

func (s *store) start(first *state) error {
	if err := s.acquire(); err != nil {
		return err
	}
	defer s.release()
	if first != nil {
		at, err := s.lock.Stat()
		if err != nil {
			return err
		}
		if at.Size() != wordSize {
			if err := s.lock.Truncate(wordSize); err != nil {
				return err
			}
		}
	}
	word, err := mapFile(s.lock, wordSize)
	if err != nil {
		return err
	}
	s.generation = (*uint64)(word)
	if s.reads, err = openTally(s.dir); err != nil {
		return err
	}
	if first != nil {
		s.reads.forget()
		return s.write(first)
	}
	return s.reload()
}

// mapFile maps the beginning of a file, for as long as the process runs.
func mapFile(f *os.File, size int) (unsafe.Pointer, error) {
	bytes, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mapping %s: %w", f.Name(), err)
	}
	return unsafe.Pointer(&bytes[0]), nil
}

// close lets waiting calls go. The mapping stays: a call may still be looking at it, and it is one page.
func (s *store) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.closed:
		return nil
	default:
		close(s.closed)
		return s.lock.Close()
	}
}

// present reports whether the directory still has the file that this store locks.
func (s *store) present() bool {
	mine, err1 := s.lock.Stat()
	there, err2 := os.Stat(s.lock.Name())
	return err1 == nil && err2 == nil && os.SameFile(mine, there)
}

// load returns the newest state; the caller must not change it.
func (s *store) load() (*state, error) {
	if snap := s.current.Load(); snap != nil && snap.generation == atomic.LoadUint64(s.generation) {
		return snap.state, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.acquire(); err != nil {
		return nil, err
	}
	defer s.release()
	if err := s.reload(); err != nil {
		return nil, err
	}
	return s.current.Load().state, nil
}

// update lets change work on a copy of the state and keeps the copy if it returns true. No other process is at it.
func (s *store) update(change func(*state) bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.acquire(); err != nil {
		return err
	}
	defer s.release()
	if snap := s.current.Load(); snap == nil || snap.generation != atomic.LoadUint64(s.generation) {
		if err := s.reload(); err != nil {
			return err
		}
	}
	before := s.current.Load()
	next := before.clone()
	if !change(next) {
		return nil
	}
	if err := s.write(next); err != nil {
		return err
	}
	return next.listCapabilities(before.state)
}

// reload reads the file. The caller holds the lock.
func (s *store) reload() error {
	g := atomic.LoadUint64(s.generation)
	if g%2 == 1 { // a writer died over the next file
		g += 3 // a generation that no one has seen, of the file before it
		atomic.StoreUint64(s.generation, g)
	}
	file := stateFiles[g/2%2]
	text, err := os.ReadFile(filepath.Join(s.dir, file))
	if err != nil {
		return err
	}
	st := &state{}
	if err := json.Unmarshal(text, st); err != nil {
		return fmt.Errorf("reading %s: %w", file, err)
	}
	if st.Format != stateFormat {
		return fmt.Errorf("reading %s: format is %d, this program knows %d: create the node again", file, st.Format, stateFormat)
	}
	s.current.Store(&snapshot{g, st})
	return nil
}

// write writes the next file. The caller holds the lock.
func (s *store) write(st *state) error {
	text, err := json.Marshal(st)
	if err != nil {
		return err
	}
	g := atomic.LoadUint64(s.generation) | 1
	atomic.StoreUint64(s.generation, g)
	if err := overwrite(filepath.Join(s.dir, stateFiles[(g+1)/2%2]), text); err != nil {
		return err
	}
	s.current.Store(&snapshot{g + 1, st})
	atomic.StoreUint64(s.generation, g+1)
	s.watchers.Lock()
	defer s.watchers.Unlock()
	close(s.changed)
	s.changed = make(chan struct{})
	return nil
}

// overwrite makes text the content of a file. It is not emptied first, which would make the file system wait as well.
func overwrite(name string, text []byte) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(text, 0)
	return errors.Join(err, f.Truncate(int64(len(text))), f.Close())
}

// change returns a channel that is closed at the next change made through this store. Changes by other processes, or
// through another store, have to be looked for.
func (s *store) change() <-chan struct{} {
	s.watchers.Lock()
	defer s.watchers.Unlock()
	return s.changed
}

func (s *store) acquire() error {
	for {
		err := unix.Flock(int(s.lock.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (s *store) release() {
	// An error here means that the file is closed, and with it the lock is gone.
	_ = unix.Flock(int(s.lock.Fd()), unix.LOCK_UN)
}
