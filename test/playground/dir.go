package main

import (
	"embed"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/gofrs/flock"
)

// tries are the files that a user applies, and what the playground has applied.
//
//go:embed try
var tries embed.FS

// dirPrefix begins the names of directories of playgrounds. It is short, since Unix sockets are below.
const dirPrefix = "gpuslice-play-"

// lockFile is locked for as long as the playground of its directory runs.
const lockFile = "lock"

// inDir calls do with a new directory, which it removes, unless do fails: its logs may say why.
func inDir(out io.Writer, do func(dir string) error) error {
	dir, err := os.MkdirTemp("", dirPrefix)
	if err != nil {
		return fmt.Errorf("making a directory for the playground: %w", err)
	}
	lock := flock.New(filepath.Join(dir, lockFile))
	if err := lock.Lock(); err != nil {
		return fmt.Errorf("locking %s: %w", dir, err)
	}
	defer lock.Close()
	if err := do(dir); err != nil {
		fmt.Fprintf(out, "the logs are in %s; the next playground removes it\n", dir)
		return err
	}
	return os.RemoveAll(dir)
}

// young is the age up to which a directory may have no lock yet.
const young = time.Minute

// removeStale removes what playgrounds have left that were killed. Their processes have ended with them.
func removeStale(temp string) {
	dirs, err := filepath.Glob(filepath.Join(temp, dirPrefix+"*"))
	if err != nil {
		return
	}
	for _, dir := range dirs {
		if info, err := os.Lstat(dir); err != nil || !info.IsDir() || time.Since(info.ModTime()) < young {
			continue
		}
		lock := flock.New(filepath.Join(dir, lockFile))
		if locked, err := lock.TryLock(); err != nil || !locked {
			continue // another user's, or it runs
		}
		_ = os.RemoveAll(dir) // what cannot be removed is the next one's
		_ = lock.Close()
	}
}

// tries is a file or folder of those that a user has.
func (w *world) tries(name string) string { return filepath.Join(w.dir, "try", name) }

// later is when the window of pool "night" opens, from the start of the playground on.
const later = 6 * time.Hour

// writeTries writes the files that a user applies.
func (w *world) writeTries(now time.Time) error {
	window := now.Add(later).UTC().Format("15:04")
	if err := os.MkdirAll(w.tries("deploy/mine"), 0o755); err != nil {
		return fmt.Errorf("making the playground's files: %w", err)
	}
	err := fs.WalkDir(tries, "try", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := tries.ReadFile(path)
		if err != nil {
			return err
		}
		name := filepath.Base(path)
		if name == "mine.yaml" {
			name = "deploy/mine/kustomization.yaml"
		}
		return os.WriteFile(w.tries(name), []byte(strings.ReplaceAll(string(text), "WINDOW", window)), 0o644)
	})
	if err == nil {
		err = copyMissing(filepath.Join(w.root, "deploy"), w.tries("deploy"))
	}
	if err != nil {
		return fmt.Errorf("making the playground's files: %w", err)
	}
	return nil
}

// copyMissing copies a folder into another.
func copyMissing(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		below, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.MkdirAll(filepath.Join(to, below), 0o755)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, below), text, 0o644)
	})
}

// tools puts on the PATH of the shell what it needs.
func (w *world) tools() error {
	bin := filepath.Join(w.dir, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	for name, program := range map[string]string{
		"kubectl": w.cluster.Kubectl(), "kubectl-gpuslice": w.plugin, "playground": w.self, "gpuslice-agent": w.parts.Agent,
	} {
		if err := os.Symlink(program, filepath.Join(bin, name)); err != nil {
			return err
		}
	}
	names := make([]string, len(w.nodes))
	for i, n := range w.nodes {
		names[i] = n.Name
	}
	for name, text := range map[string]string{
		"gpusim": fmt.Sprintf(gpusimScript, w.dir, strings.Join(names, ", "), w.parts.GPUSim),
		"menu":   "#!/bin/sh\nexec playground menu \"$@\"\n",
	} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte(text), 0o755); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(w.dir, "env"), []byte(w.exports()), 0o644)
}

// gpusimScript runs gpusim on a node by its name.
const gpusimScript = `#!/bin/sh
# Does to the simulated GPUs of a node what happens to real ones.
gpus=%[1]s/${1:-none}/gpus
if [ ! -d "$gpus" ]; then
	echo "use gpusim NODE COMMAND; the nodes are %[2]s, and gpusim NODE --help lists the commands" >&2
	exit 2
fi
shift
exec %[3]s --node "$gpus" "$@"
`
