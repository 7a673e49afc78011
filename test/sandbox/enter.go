package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// maxRebuilt bounds how many entries a directory may have that is rebuilt to give room to a new one: each costs a mount.
const maxRebuilt = 1000

// hostProc is where the real proc stands under a rebuilt /proc.
const hostProc = ".host"

// Enter gives the calling thread its own mount namespace, which shows what the options say. The caller must have locked
// its goroutine to the thread and must replace the process afterwards: other threads still see the old mounts.
//
// Enter makes room for a target that does not exist without touching this machine's file systems. It covers the nearest
// directory above that exists by a tmpfs that shows the same entries and the target. Entries that are added to the
// covered directory later are not seen; under a rebuilt /proc, these are the processes that start later.
func Enter(o Options) error {
	if err := o.Validate(); err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("making a mount namespace: %w", err)
	}
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private to the sandbox: %w", err)
	}
	sources, err := takeAll(o.Mounts)
	defer closeAll(sources)
	if err != nil {
		return err
	}
	var v view
	for _, dir := range o.Tmpfs {
		target, err := v.place(dir, true)
		if err != nil {
			return err
		}
		if err := v.cover(target, 0o755); err != nil {
			return err
		}
	}
	for i, m := range o.Mounts {
		target, err := v.place(m.Target, sources[i].dir)
		if err != nil {
			return fmt.Errorf("showing %s: %w", m.Source, err)
		}
		if err := sources[i].attach(target); err != nil {
			return fmt.Errorf("mounting %s on %s: %w", m.Source, target, err)
		}
	}
	return nil
}

// tree is a detached copy of the mounts at and below a path: a bind mount that has no target yet.
type tree struct {
	fd  int
	dir bool
}

// take copies the mounts at name, which is relative to the directory at. It is recursive, since a namespace of an
// ordinary user may not uncover what other mounts hide.
func take(at int, name string, flags uint) (tree, error) {
	fd, err := unix.OpenTree(at, name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE|flags)
	if err != nil {
		return tree{fd: -1}, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return tree{fd: -1}, errors.Join(err, unix.Close(fd))
	}
	return tree{fd: fd, dir: st.Mode&unix.S_IFMT == unix.S_IFDIR}, nil
}

func (t tree) attach(target string) error {
	return unix.MoveMount(t.fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

func (t tree) close() {
	_ = unix.Close(t.fd) // a mount that was attached stays, one that was not is meant to go
}

func takeAll(mounts []Mount) ([]tree, error) {
	var all []tree
	for _, m := range mounts {
		t, err := take(unix.AT_FDCWD, m.Source, 0)
		if err != nil {
			return all, fmt.Errorf("taking %s to show it at %s: %w", m.Source, m.Target, err)
		}
		all = append(all, t)
	}
	return all, nil
}

func closeAll(trees []tree) {
	for _, t := range trees {
		t.close()
	}
}

// view is the file system as the sandbox has changed it so far.
type view struct {
	ours map[uint64]bool // device numbers of the tmpfs mounted here: new files in them touch nothing outside
}

// place returns the path, free of symlinks, where target can be mounted, and makes it when it does not exist.
func (v *view) place(target string, dir bool) (string, error) {
	parent, missing, err := nearest(target)
	if err != nil {
		return "", fmt.Errorf("looking for %s: %w", target, err)
	}
	if missing == "" {
		return parent, sameKind(parent, dir)
	}
	ours, err := v.isOurs(parent)
	if err != nil {
		return "", fmt.Errorf("making room for %s: %w", target, err)
	}
	if !ours {
		if err := v.rebuild(parent); err != nil {
			return "", fmt.Errorf("making room for %s: %w", target, err)
		}
	}
	path := filepath.Join(parent, missing)
	if err := create(path, dir); err != nil {
		return "", fmt.Errorf("making room for %s: %w", target, err)
	}
	return path, nil
}

// nearest splits target into the deepest directory that exists, free of symlinks, and the rest.
func nearest(target string) (existing, missing string, err error) {
	existing = filepath.Clean(target)
	for {
		real, err := filepath.EvalSymlinks(existing)
		if err == nil {
			return real, missing, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", "", err
		}
		missing = filepath.Join(filepath.Base(existing), missing)
		existing = filepath.Dir(existing)
	}
}

func sameKind(path string, dir bool) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.IsDir() != dir {
		return fmt.Errorf("mounting on %s: one is a directory and the other is not", path)
	}
	return nil
}

func create(path string, dir bool) error {
	if dir {
		return os.MkdirAll(path, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	return f.Close()
}

func (v *view) isOurs(dir string) (bool, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return false, err
	}
	return v.ours[st.Dev], nil
}

// cover mounts an empty tmpfs over dir.
func (v *view) cover(dir string, mode fs.FileMode) error {
	options := fmt.Sprintf("mode=%o", mode.Perm())
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mounting a tmpfs on %s: %w", dir, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return fmt.Errorf("looking at the tmpfs on %s: %w", dir, err)
	}
	if v.ours == nil {
		v.ours = map[uint64]bool{}
	}
	v.ours[st.Dev] = true
	return nil
}

// rebuild covers dir by a tmpfs with the same entries, so that others can be added.
func (v *view) rebuild(dir string) error {
	if dir == "/" {
		return v.rebuildRoot()
	}
	covered, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer covered.Close()
	info, err := covered.Stat()
	if err != nil {
		return err
	}
	entries, err := covered.ReadDir(-1)
	if err != nil {
		return err
	}
	proc, err := isProcRoot(dir)
	if err != nil {
		return err
	}
	if proc {
		return v.rebuildProc(dir, covered, entries)
	}
	if len(entries) > maxRebuilt {
		return fmt.Errorf("%s has %d entries, more than the %d that are rebuilt: create the missing directory in it", dir, len(entries), maxRebuilt)
	}
	if err := v.cover(dir, info.Mode()); err != nil {
		return err
	}
	for _, entry := range entries {
		if err := show(covered, dir, entry); err != nil && !errors.Is(err, fs.ErrNotExist) { // some come and go
			return fmt.Errorf("keeping %s: %w", filepath.Join(dir, entry.Name()), err)
		}
	}
	return nil
}

// rebuildRoot moves the calling thread to its own root with the same entries. A tmpfs over / would not be seen: paths
// begin below it. So rebuildRoot mounts it on some directory of /, shows that directory in it like the others, and
// makes it the root.
func (v *view) rebuildRoot() error {
	root, err := os.Open("/")
	if err != nil {
		return err
	}
	defer root.Close()
	entries, err := root.ReadDir(-1)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(entries, fs.DirEntry.IsDir)
	if i < 0 {
		return errors.New("/ has no directory")
	}
	place := filepath.Join("/", entries[i].Name())
	covered, err := take(unix.AT_FDCWD, place, 0)
	if err != nil {
		return err
	}
	defer covered.close()
	if err := v.cover(place, 0o755); err != nil {
		return err
	}
	for _, entry := range slices.Delete(entries, i, i+1) {
		if err := show(root, place, entry); err != nil {
			return fmt.Errorf("keeping /%s: %w", entry.Name(), err)
		}
	}
	again := filepath.Join(place, filepath.Base(place))
	if err := os.Mkdir(again, 0o755); err != nil {
		return err
	}
	if err := covered.attach(again); err != nil {
		return fmt.Errorf("keeping %s: %w", place, err)
	}
	working, err := os.Getwd()
	if err != nil {
		return err
	}
	if err := unix.Chroot(place); err != nil {
		return fmt.Errorf("changing the root: %w", err)
	}
	return unix.Chdir(working)
}

// show makes an entry of the covered directory visible in the tmpfs over it.
func show(covered *os.File, dir string, entry fs.DirEntry) error {
	at, path := int(covered.Fd()), filepath.Join(dir, entry.Name())
	if entry.Type()&fs.ModeSymlink != 0 {
		text := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(at, entry.Name(), text)
		if err != nil {
			return err
		}
		return os.Symlink(string(text[:n]), path)
	}
	t, err := take(at, entry.Name(), unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return err
	}
	defer t.close()
	if err := create(path, t.dir); err != nil {
		return err
	}
	return t.attach(path)
}

func isProcRoot(dir string) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return false, err
	}
	_, err := os.Lstat(filepath.Join(dir, "self"))
	return st.Type == unix.PROC_SUPER_MAGIC && err == nil, nil
}

// rebuildProc moves the whole of proc aside and links each entry to it: entries such as "self" mean another process for
// each reader, so their text cannot be copied.
func (v *view) rebuildProc(dir string, covered *os.File, entries []fs.DirEntry) error {
	host, err := take(int(covered.Fd()), "", unix.AT_EMPTY_PATH)
	if err != nil {
		return fmt.Errorf("taking %s: %w", dir, err)
	}
	defer host.close()
	if err := v.cover(dir, 0o555); err != nil {
		return err
	}
	aside := filepath.Join(dir, hostProc)
	if err := os.Mkdir(aside, 0o755); err != nil {
		return err
	}
	if err := host.attach(aside); err != nil {
		return fmt.Errorf("mounting the real %s on %s: %w", dir, aside, err)
	}
	for _, entry := range entries {
		if err := os.Symlink(filepath.Join(hostProc, entry.Name()), filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

// ParseMount reads what Command passes on: "source=target".
func ParseMount(text string) (Mount, error) {
	source, target, found := strings.Cut(text, "=")
	if !found {
		return Mount{}, fmt.Errorf("mount %q is not of the form source=target", text)
	}
	m := Mount{Source: source, Target: target}
	return m, Options{Mounts: []Mount{m}}.Validate()
}
