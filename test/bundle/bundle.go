// Package bundle packs programs, and what they need, into one archive for machines where nothing can be fetched.
package bundle

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/renameio/v2"
)

// compressor packs programs into as few bytes as possible. Its first filter makes addresses of jumps in x86 code alike. Its dictionary is so
// large that code which two programs have in common is stored once. Unpacking takes a tenth of a gigabyte of memory.
var compressor = []string{"xz", "--stdout", "--threads=1", "--x86", "--lzma2=preset=9e,dict=96MiB"}

// Possible reports what the packing needs and this machine lacks.
func Possible() error {
	if _, err := exec.LookPath(compressor[0]); err != nil {
		return fmt.Errorf("%w: on Debian, apt-get install xz-utils", err)
	}
	return nil
}

// Link puts files, and the files of folders, into a directory as links, by their names there.
func Link(dir string, files map[string]string) error {
	for name, source := range files {
		err := filepath.WalkDir(source, func(file string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			below, err := filepath.Rel(source, file)
			if err != nil {
				return err
			}
			at := filepath.Join(dir, name, below)
			if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
				return err
			}
			return os.Symlink(file, at)
		})
		if err != nil {
			return fmt.Errorf("putting the programs together: %w", err)
		}
	}
	return nil
}

// Pack writes the files of a directory, and those that its links lead to, as one compressed archive of at most so many bytes. In it they are in a
// folder of that name. It says how large the archive is, and how to run it by run.sh.
func Pack(ctx context.Context, w io.Writer, dir, name, to string, most int64) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return fmt.Errorf("making the folder of the archive: %w", err)
	}
	began := time.Now()
	fmt.Fprintln(os.Stderr, "compressing: some minutes")
	packed, unpacked, err := archiver{compressor, name, most}.write(ctx, dir, to)
	if err != nil {
		return fmt.Errorf("writing %s: %w", to, err)
	}
	fmt.Fprintf(w, "%s: %.1f MB of %.1f MB, compressed in %s; unpack it by tar -xJf, and run %s/run.sh\n", to, megabytes(packed), megabytes(unpacked),
		time.Since(began).Round(time.Second), name)
	return nil
}

func megabytes(bytes int64) float64 { return float64(bytes) / 1e6 }

// archiver writes archives.
type archiver struct {
	compressor []string
	name       string // of the folder in the archive
	most       int64  // bytes of an archive
}

// write writes the directory's files as one compressed archive, and returns how long it is, and how long the files are together. The archive gets its name
// when all of it is there: a run that fails, or is ended, keeps the former file of that name, and leaves no other.
func (a archiver) write(ctx context.Context, dir, to string) (packed, unpacked int64, err error) {
	file, err := renameio.NewPendingFile(to, renameio.WithTempDir(filepath.Dir(to)), renameio.WithPermissions(0o644))
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, file.Cleanup()) }()
	if unpacked, err = a.compress(ctx, dir, file.File); err != nil {
		return 0, 0, err
	}
	info, err := file.Stat()
	if err != nil {
		return 0, 0, err
	}
	if info.Size() > a.most {
		return 0, 0, fmt.Errorf("the archive has %d bytes, and may have %d", info.Size(), a.most)
	}
	return info.Size(), unpacked, file.CloseAtomicallyReplace()
}

// compress writes the directory's files into the file, through the compressor.
func (a archiver) compress(ctx context.Context, dir string, to *os.File) (unpacked int64, err error) {
	c := exec.CommandContext(ctx, a.compressor[0], a.compressor[1:]...)
	c.Stdout, c.Stderr = to, os.Stderr
	in, err := c.StdinPipe()
	if err != nil {
		return 0, err
	}
	if err := c.Start(); err != nil {
		return 0, err
	}
	unpacked, err = Archive(dir, a.name, in)
	err = errors.Join(err, in.Close(), c.Wait())
	if ctx.Err() != nil {
		return 0, context.Cause(ctx) // the compressor was ended, and what it left undone is no news
	}
	return unpacked, err
}

// Archive writes the directory's files as an archive. Names that lead to one file are links to the first of them. Nothing of this machine is in it,
// neither users nor times.
func Archive(dir, folder string, to io.Writer) (unpacked int64, err error) {
	var paths []string
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			paths = append(paths, path)
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	slices.Sort(paths)
	w := tar.NewWriter(to)
	first := map[string]string{} // the name in the archive of each file
	for _, path := range paths {
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return 0, err
		}
		real, err := filepath.EvalSymlinks(path)
		if err != nil {
			return 0, err
		}
		header := &tar.Header{Name: filepath.Join(folder, name), Mode: 0o755, Format: tar.FormatPAX}
		if at, again := first[real]; again {
			header.Typeflag = tar.TypeSymlink
			if header.Linkname, err = filepath.Rel(filepath.Dir(name), at); err != nil {
				return 0, err
			}
			if err := w.WriteHeader(header); err != nil {
				return 0, err
			}
			continue
		}
		first[real] = name
		n, err := put(w, header, real)
		if err != nil {
			return 0, fmt.Errorf("packing %s: %w", name, err)
		}
		unpacked += n
	}
	return unpacked, w.Close()
}

// put writes a file into the archive.
func put(w *tar.Writer, header *tar.Header, path string) (int64, error) {
	file, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return 0, err
	}
	header.Size, header.Typeflag = info.Size(), tar.TypeReg
	if info.Mode()&0o111 == 0 {
		header.Mode = 0o644
	}
	if err := w.WriteHeader(header); err != nil {
		return 0, err
	}
	return io.Copy(w, file)
}
