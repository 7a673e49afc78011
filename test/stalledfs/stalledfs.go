// Package stalledfs mounts a file system with a server that can stop answering, like a lost NFS or FUSE server. Every call to
// it then waits. It is a real FUSE mount, so tests see what the kernel does.
//
// The server is a separate process. The kernel releases a thread that waits for an answer only when the server has
// closed its device. A process does not close its files while one of its threads waits, so a server in the test's own
// process could wait forever. However the test ends, its server is killed, and nothing waits any more.
package stalledfs

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// serverOf names the environment variable that makes this program a server, and says where it mounts.
const serverOf = "STALLEDFS_SERVER_OF"

// patience is how long a test waits until its call reaches the server: a busy machine may take minutes.
const patience = 5 * time.Minute

// The lines that the two processes send to each other.
const (
	sayStall   = "stall"   // to the server, which says it back when it is silent
	sayAnswer  = "answer"  // to the server, which says it back when it answers again
	sayMounted = "mounted" // by the server
	sayAsked   = "asked "  // by the server: someone waits, the thread of this id
	sayCannot  = "cannot " // by the server: it cannot mount, and why
)

// A second start of the test's program is the server, and does nothing else.
func init() {
	if dir := os.Getenv(serverOf); dir != "" {
		serve(dir)
		os.Exit(0)
	}
}

// FS is a mounted file system. Each file in it is empty, and the kernel may keep nothing that it has learnt of one.
type FS struct {
	Dir string // where it is mounted

	t      testing.TB
	server io.Writer   // takes commands
	said   chan string // what it says to them
	others chan int    // ids of threads of other processes that wait; those that no one takes are left out
	mu     sync.Mutex
	asked  chan struct{} // closed when someone waits; nil while it answers
}

// Mount mounts one with the files, by their paths below it. It skips the test if this process may not mount, which
// takes root. At the end of the test the server is killed, so that every waiting call gets an error.
func Mount(t testing.TB, files ...string) *FS {
	t.Helper()
	dir, err := os.MkdirTemp("", "stalled") //nolint:usetesting // a socket may be in it: t.TempDir's paths are too long
	if err != nil {
		t.Fatal(err)
	}
	f := &FS{Dir: filepath.Join(dir, "mnt"), t: t, said: make(chan string, 1), others: make(chan int, 64)}
	t.Cleanup(func() {
		if err := errors.Join(os.Remove(f.Dir), os.Remove(dir)); err != nil { // never what is below a mount that is still there
			t.Error(err)
		}
	})
	if err := os.Mkdir(f.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	f.start()
	switch said := <-f.said; {
	case strings.HasPrefix(said, sayCannot):
		t.Skipf("a FUSE file system cannot be mounted here: %s", strings.TrimPrefix(said, sayCannot))
	case said != sayMounted:
		t.Fatalf("the server of %s has ended before it has mounted", f.Dir)
	}
	for _, path := range files {
		path = filepath.Join(f.Dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

// start runs the server until the test is over.
func (f *FS) start() {
	f.t.Helper()
	self, err := os.Executable()
	if err != nil {
		f.t.Fatal(err)
	}
	server := exec.CommandContext(context.WithoutCancel(f.t.Context()), self)
	server.Env = append(os.Environ(), serverOf+"="+f.Dir)
	server.Stderr = os.Stderr
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err1 := server.StdinPipe()
	out, err2 := server.StdoutPipe()
	if err := errors.Join(err1, err2); err != nil {
		f.t.Fatal(err)
	}
	f.server = in
	started, ended := make(chan error), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // with whose end the kernel kills the server; it waits for nothing else
		err := server.Start()
		started <- err
		if err == nil {
			f.listen(out)
			_ = server.Wait() // it was killed
		}
	}()
	if err := <-started; err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		if err := server.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			f.t.Errorf("killing the server of %s: %v", f.Dir, err)
		}
		<-ended
		if err := unix.Unmount(f.Dir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) { // which it is if nothing was mounted
			f.t.Errorf("unmounting %s: %v", f.Dir, err)
		}
	})
}

// listen reads the server's lines until the server has ended. The test waits only for calls of its own process: any
// other process of the machine may call the mount, too.
func (f *FS) listen(out io.Reader) {
	defer close(f.said)
	for lines := bufio.NewScanner(out); lines.Scan(); {
		who, asks := strings.CutPrefix(lines.Text(), sayAsked)
		if !asks {
			f.said <- lines.Text()
			continue
		}
		thread, err := strconv.Atoi(who)
		if _, gone := os.Stat(fmt.Sprintf("/proc/self/task/%d", thread)); err != nil || gone != nil {
			select {
			case f.others <- thread:
			default:
			}
			continue
		}
		f.release()
	}
}

// release releases the test that waits for a call, and reports whether one was waiting.
func (f *FS) release() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.asked == nil {
		return false
	}
	close(f.asked)
	f.asked = nil
	return true
}

// Stall makes the server silent. The channel is closed when a call waits for an answer. If none ever does, it is closed
// too, and the test fails.
func (f *FS) Stall() <-chan struct{} {
	f.t.Helper()
	asked := make(chan struct{})
	f.mu.Lock()
	f.asked = asked
	f.mu.Unlock()
	f.command(sayStall)
	late := time.AfterFunc(patience, func() {
		if f.release() {
			f.t.Errorf("no call of the test has reached %s for %s", f.Dir, patience)
		}
	})
	f.t.Cleanup(func() { late.Stop() })
	return asked
}

// Answer makes it answer again, also those who wait.
func (f *FS) Answer() {
	f.t.Helper()
	f.command(sayAnswer)
}

// command has the server do something, and returns when it is done.
func (f *FS) command(what string) {
	f.t.Helper()
	if _, err := fmt.Fprintln(f.server, what); err != nil {
		f.t.Fatalf("having the server of %s %s: %v", f.Dir, what, err)
	}
	if said := <-f.said; said != what {
		f.t.Fatalf("asked to %s, the server of %s said %q", what, f.Dir, said)
	}
}

// serve is the server: it does what it reads from its standard input, until that ends.
func serve(dir string) {
	s := &server{}
	mounted, err := fs.Mount(dir, &node{of: s}, &fs.Options{
		MountOptions: fuse.MountOptions{DirectMountStrict: true, FsName: "stalledfs", Name: "stalledfs"},
	})
	if err != nil {
		s.say(sayCannot + err.Error())
		return
	}
	s.say(sayMounted)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); s.say(lines.Text()) {
		s.set(lines.Text() == sayStall)
	}
	s.set(false)
	_ = mounted.Unmount() // the test has ended without killing us
}

// server is the state of the server.
type server struct {
	mu    sync.Mutex
	until chan struct{} // closed when it answers again; nil while it does
}

func (s *server) say(what string) { _, _ = fmt.Fprintln(os.Stdout, what) } // to no one, if the test has ended

func (s *server) set(silent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.until != nil {
		close(s.until)
		s.until = nil
	}
	if silent {
		s.until = make(chan struct{})
	}
}

// wait waits while the server is silent, and says to the test who does.
func (s *server) wait(ctx context.Context) {
	s.mu.Lock()
	until := s.until
	if caller, ok := fuse.FromContext(ctx); ok && until != nil {
		s.say(sayAsked + strconv.Itoa(int(caller.Pid)))
	}
	s.mu.Unlock()
	if until != nil {
		<-until
	}
}

// node is a file or folder.
type node struct {
	fs.Inode
	of *server
}

var (
	_ fs.NodeGetattrer = (*node)(nil)
	_ fs.NodeSetattrer = (*node)(nil)
	_ fs.NodeLookuper  = (*node)(nil)
	_ fs.NodeMkdirer   = (*node)(nil)
	_ fs.NodeCreater   = (*node)(nil)
	_ fs.NodeOpener    = (*node)(nil)
)

// Getattr says what the file is.
func (n *node) Getattr(ctx context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	n.of.wait(ctx)
	out.Mode = n.Mode() | 0o700
	return fs.OK
}

// Setattr takes everything, and changes nothing.
func (n *node) Setattr(ctx context.Context, file fs.FileHandle, _ *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	return n.Getattr(ctx, file, out)
}

// Lookup finds a file in a folder.
func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	n.of.wait(ctx)
	child := n.GetChild(name)
	if child == nil {
		return nil, syscall.ENOENT
	}
	out.Mode = child.Mode() | 0o700
	return child, fs.OK
}

// Mkdir makes a folder.
func (n *node) Mkdir(ctx context.Context, name string, _ uint32, _ *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return n.make(ctx, name, syscall.S_IFDIR), fs.OK
}

// Create makes a file.
func (n *node) Create(ctx context.Context, name string, _, _ uint32, _ *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	return n.make(ctx, name, syscall.S_IFREG), nil, 0, fs.OK
}

func (n *node) make(ctx context.Context, name string, kind uint32) *fs.Inode {
	child := n.NewPersistentInode(ctx, &node{of: n.of}, fs.StableAttr{Mode: kind})
	n.AddChild(name, child, true)
	return child
}

// Open opens a file.
func (n *node) Open(ctx context.Context, _ uint32) (fs.FileHandle, uint32, syscall.Errno) {
	n.of.wait(ctx)
	return nil, 0, fs.OK
}
