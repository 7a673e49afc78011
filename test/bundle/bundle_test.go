package bundle

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

const (
	script    = "#!/bin/sh\nexec true with a line that is longer than a hundred bytes, so that no archive of it has less than these\n"
	mostBytes = 1 << 20
)

// oneProgram is a directory with one program.
func oneProgram(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "run.sh"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// content is what the directory has, by name.
func content(t *testing.T, dir string) map[string]string {
	t.Helper()
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		out[f.Name()] = string(text)
	}
	return out
}

func TestAnArchiveThatIsNotWholeLeavesTheFormerOneAndNothingElse(t *testing.T) {
	for name, c := range map[string]struct {
		by   string // what the compressor does
		most int64
		want string
	}{
		"the compressor fails": {"head -c 100; exit 3", mostBytes, "exit status 3"},
		"it is too large":      {"cat", 100, "bytes, and may have 100"},
		"it is ended":          {"head -c 100; kill -TERM $PPID; exec sleep 60", mostBytes, "terminated"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			to := filepath.Join(dir, "bundle.tar.xz")
			if err := os.WriteFile(to, []byte("former"), 0o600); err != nil {
				t.Fatal(err)
			}
			ctx, stop := signal.NotifyContext(t.Context(), syscall.SIGTERM) // as program.Main has it
			defer stop()
			_, _, err := archiver{[]string{"sh", "-c", c.by}, "bundle", c.most}.write(ctx, oneProgram(t), to)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
			if got := content(t, dir); len(got) != 1 || got["bundle.tar.xz"] != "former" {
				t.Errorf("the folder has %q", got)
			}
		})
	}
}

func TestAnArchiveGetsItsNameWhenItIsWhole(t *testing.T) {
	dir := t.TempDir()
	to := filepath.Join(dir, "bundle.tar")
	packed, unpacked, err := archiver{[]string{"sh", "-c", `test ! -e "$0" && cat`, to}, "bundle", mostBytes}.write(t.Context(), oneProgram(t), to)
	if err != nil {
		t.Fatal(err)
	}
	got := content(t, dir)
	if len(got) != 1 || int64(len(got["bundle.tar"])) != packed || unpacked != int64(len(script)) || !strings.Contains(got["bundle.tar"], script) {
		t.Errorf("of %d bytes %d were written, and the folder has %q", unpacked, packed, got)
	}
	info, err := os.Stat(to)
	if err != nil || info.Mode().Perm()&0o044 == 0 {
		t.Errorf("others cannot read it: %v, %v", info.Mode(), err)
	}
	if _, _, err := (archiver{[]string{"cat"}, "bundle", mostBytes}).write(t.Context(), oneProgram(t), filepath.Join(dir, "none", "x")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("into a folder that is not there: %v", err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if _, _, err := (archiver{[]string{"cat"}, "bundle", mostBytes}).write(ended, oneProgram(t), to); !errors.Is(err, context.Canceled) {
		t.Errorf("when it has been ended: %v", err)
	}
}
