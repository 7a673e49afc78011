package openfiles_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/drain/holders/openfiles"
)

// The device files of the driver that stands in for NVIDIA's, which is not loaded here: the kernel's own for memory. /dev/null
// is thus that of GPU 3, and /dev/full that of GPU 7.
const (
	standIn  = 1
	fullGPU  = 7
	fullPath = "/dev/full"
)

// observe finds what GPUs a process of this machine holds.
func observe(t *testing.T, pid int) map[int]string {
	t.Helper()
	held := map[int]string{}
	l := openfiles.Scan{
		Root: "/proc",
		Found: func(of int, file openfiles.File) {
			if of == pid {
				held[file.GPU] = file.Path
			}
		},
		// Without CAP_SYS_PTRACE, which root need not have either, the test cannot see the files of other processes, but its own.
		Failed: func(err error) {
			if !errors.Is(err, fs.ErrPermission) {
				t.Errorf("not looked at: %v", err)
			}
		},
	}
	l.SetMajor(standIn)
	if err := l.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	return held
}

// childWith starts a process that has the file open until the test is over, and closes it here.
func childWith(t *testing.T, path string, flags int) (pid int) {
	t.Helper()
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatalf("opening %s: %v", path, err)
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	child := exec.Command("cat")
	child.ExtraFiles = []*os.File{file}
	input, err := child.StdinPipe() // it reads until we close this
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sync.OnceFunc(func() {
		_ = input.Close()
		if err := child.Wait(); err != nil {
			t.Errorf("waiting for the child: %v", err)
		}
	}))
	return child.Process.Pid
}

// onTmpfs is a folder of a tmpfs, as the one that a container runtime makes device files on.
func onTmpfs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Skipf("a tmpfs cannot be mounted here: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func makeDevice(t *testing.T, path string) {
	t.Helper()
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(standIn, fullGPU))); err != nil {
		t.Skipf("device files cannot be made here: %v", err)
	}
}

func TestADeviceFileIsFoundByItsNumber(t *testing.T) {
	if got := observe(t, childWith(t, fullPath, unix.O_RDWR))[fullGPU]; got != fullPath {
		t.Errorf("got %q, want %s", got, fullPath)
	}
}

// A pod may rename the files that it is given, and make others where its runtime leaves it CAP_MKNOD.
func TestADeviceFileIsFoundByWhateverName(t *testing.T) {
	for name, dir := range map[string]func(*testing.T) string{"tmpfs": onTmpfs, "the disk": (*testing.T).TempDir} {
		t.Run("on "+name, func(t *testing.T) {
			made := filepath.Join(dir(t), "nvidia0")
			makeDevice(t, made)
			renamed := filepath.Join(filepath.Dir(made), "notes.txt")
			if err := os.Rename(made, renamed); err != nil {
				t.Fatal(err)
			}
			if got := observe(t, childWith(t, renamed, unix.O_RDWR))[fullGPU]; got == "" {
				t.Errorf("the GPU that is open as %s is found free", renamed)
			}
		})
	}
}

// Linux shows no path of more than a page.
func TestADeviceFileIsFoundWithALongPath(t *testing.T) {
	folder, err := unix.Open(onTmpfs(t), unix.O_DIRECTORY, 0)
	for range 20 {
		if err != nil {
			t.Fatal(err)
		}
		name := strings.Repeat("x", 250)
		if err := unix.Mkdirat(folder, name, 0o700); err != nil {
			t.Fatal(err)
		}
		above := folder
		folder, err = unix.Openat(above, name, unix.O_DIRECTORY, 0)
		_ = unix.Close(above)
	}
	defer unix.Close(folder)
	if err := unix.Mknodat(folder, "x", unix.S_IFCHR|0o600, int(unix.Mkdev(standIn, fullGPU))); err != nil {
		t.Skipf("device files cannot be made here: %v", err)
	}
	fd, err := unix.Openat(folder, "x", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd)); !errors.Is(err, unix.ENAMETOOLONG) {
		t.Skipf("this kernel shows long paths: %v", err)
	}
	if got := observe(t, os.Getpid())[fullGPU]; got == "" {
		t.Error("the GPU is found free")
	}
}

// The mount is in no process's table any more.
func TestADeviceFileIsFoundWhoseMountIsGone(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Skipf("a tmpfs cannot be mounted here: %v", err)
	}
	unmount := sync.OnceValue(func() error { return unix.Unmount(dir, unix.MNT_DETACH) })
	t.Cleanup(func() { _ = unmount() })
	makeDevice(t, filepath.Join(dir, "x"))
	pid := childWith(t, filepath.Join(dir, "x"), unix.O_RDWR)
	if err := unmount(); err != nil {
		t.Fatal(err)
	}
	if got := observe(t, pid)[fullGPU]; got == "" {
		t.Error("the GPU is found free")
	}
}

// A tenant without any GPU may name a file as it likes.
func TestAFileIsNoDeviceByItsName(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dev")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "nvidia7")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := observe(t, childWith(t, path, unix.O_RDWR)); got[fullGPU] != "" {
		t.Errorf("a plain file is GPU %d, %s", fullGPU, got[fullGPU])
	}
}

// O_PATH needs no right to the device, and does not open it.
func TestAProcessWithOnlyTheNameOfADeviceOpenHoldsNothing(t *testing.T) {
	if got := observe(t, childWith(t, fullPath, unix.O_PATH)); got[fullGPU] != "" {
		t.Errorf("%s counts, of which only the name is open", got[fullGPU])
	}
}

// A program hides a file from its own list of open files by a thread that does not share it.
func TestADeviceFileIsFoundThatOnlyOneThreadHasOpen(t *testing.T) {
	opened, end, ended := make(chan error), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // and not unlocked: the thread ends with this goroutine
		err := unix.Unshare(unix.CLONE_FILES)
		if err == nil {
			_, err = unix.Open(fullPath, unix.O_RDWR, 0)
		}
		opened <- err
		<-end
	}()
	if err := <-opened; err != nil {
		t.Skipf("a thread cannot have files of its own here: %v", err)
	}
	if got := observe(t, os.Getpid())[fullGPU]; got == "" {
		t.Error("the GPU is found free")
	}
	close(end)
	<-ended
}

// Promise 16. A file of memory without a name is on a mount that no process shows, and a process may have it open a million times, under a
// long name. So the look must not remember each.
func TestFilesOnAMountThatNoProcessShowsTakeNoMemory(t *testing.T) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	n := int(min(limit.Cur, 15_200)) - 200
	fd, err := unix.MemfdCreate(strings.Repeat("x", 240), unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	fds := []int{fd}
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	for range n {
		fd, err := unix.FcntlInt(uintptr(fds[0]), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
	}
	self := fmt.Sprintf("/proc/%d/", os.Getpid()) // or of a thread: a test before may have parted the files of the first one
	asked, most := 0, uint64(0)
	var before, now runtime.MemStats
	l := openfiles.Scan{Root: "/proc", Found: func(int, openfiles.File) {}, Failed: func(error) {}, At: func(what string) {
		if !strings.HasPrefix(what, self) {
			return
		}
		if asked++; asked%2000 == 1 {
			runtime.GC()
			runtime.ReadMemStats(&now)
			most = max(most, now.HeapAlloc)
		}
	}}
	runtime.GC()
	runtime.ReadMemStats(&before)
	if err := l.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if asked < n {
		t.Errorf("%d of %d files were asked what they are", asked, n)
	}
	if more := int64(most) - int64(before.HeapAlloc); more > 2<<20 {
		t.Errorf("%d files have taken %d KiB, %d bytes each", n, more>>10, more/int64(n))
	}
}

func TestAReadEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	l := openfiles.Scan{Root: "/proc", Found: func(int, openfiles.File) {}, Failed: func(error) {}}
	if err := l.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// All processes of this machine, and 20,000 files of the test's own: half of them sockets, as on most nodes, and half files.
func BenchmarkScan(b *testing.B) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		b.Fatal(err)
	}
	n := int(min(limit.Cur, 20_200)) - 200
	for i := range n {
		var fd int
		var err error
		if i%2 == 0 {
			fd, err = unix.Open("/etc/passwd", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		} else {
			fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		}
		if err != nil {
			b.Fatal(err)
		}
		defer unix.Close(fd)
	}
	b.ReportAllocs()
	for b.Loop() {
		l := openfiles.Scan{Root: "/proc", Found: func(int, openfiles.File) {}, Failed: func(error) {}}
		if err := l.Run(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(n), "files")
}
