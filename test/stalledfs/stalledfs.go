// Package stalledfs mounts a file system whose server can be made to answer no more, as an NFS or FUSE server does that has
// gone away: whoever asks it anything then waits. It is a real mount, of FUSE, by which tests see what the kernel does.
package stalledfs

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// FS is a mounted file system. Each file in it is empty, and the kernel may keep nothing that it has learnt of one.
type FS struct {
	Dir string // where it is mounted

	mu    sync.Mutex
	until chan struct{} // closed when the server answers again; nil while it does
	asked chan struct{} // closed when somebody waits
}

// Mount mounts one with the files, by their paths below it. Where this process may not mount, the test is skipped. It answers
// again, and goes, at the end of the test.
func Mount(t testing.TB, files ...string) *FS {
	t.Helper()
	f := &FS{Dir: filepath.Join(t.TempDir(), "mnt")}
	if err := os.Mkdir(f.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	server, err := fs.Mount(f.Dir, &node{of: f}, &fs.Options{
		MountOptions: fuse.MountOptions{DirectMountStrict: true, FsName: "stalledfs", Name: "stalledfs"},
	})
	if err != nil {
		t.Skipf("a FUSE file system cannot be mounted here: %v", err)
	}
	t.Cleanup(func() {
		f.Answer()
		if err := server.Unmount(); err != nil {
			t.Errorf("unmounting %s: %v", f.Dir, err)
		}
	})
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

// Stall makes the server silent. The channel is closed when somebody waits for an answer.
func (f *FS) Stall() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.until, f.asked = make(chan struct{}), make(chan struct{})
	return f.asked
}

// Answer makes it answer again, also those who wait.
func (f *FS) Answer() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.until != nil {
		close(f.until)
		f.until = nil
	}
}

func (f *FS) wait() {
	f.mu.Lock()
	until := f.until
	if until != nil {
		select {
		case <-f.asked:
		default:
			close(f.asked)
		}
	}
	f.mu.Unlock()
	if until != nil {
		<-until
	}
}

// node is a file or folder.
type node struct {
	fs.Inode
	of *FS
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
func (n *node) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	n.of.wait()
	out.Mode = n.Mode() | 0o700
	return fs.OK
}

// Setattr takes everything, and changes nothing.
func (n *node) Setattr(ctx context.Context, file fs.FileHandle, _ *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	return n.Getattr(ctx, file, out)
}

// Lookup finds a file in a folder.
func (n *node) Lookup(_ context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	n.of.wait()
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
func (n *node) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	n.of.wait()
	return nil, 0, fs.OK
}
