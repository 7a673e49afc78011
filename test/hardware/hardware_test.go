package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// The whole run, as on a machine with a real GPU: from the archive, without the checkout, Go, or a variable of the user's.
func TestTheBundleRunsOnSimulatedGPUs(t *testing.T) {
	if err := sandbox.Possible(); err != nil {
		t.Skip(err)
	}
	b := binaries.Builder{Log: os.Stderr}
	filled := tree(filepath.Join(t.TempDir(), "tree"))
	if err := filled.fill(t.Context(), b, func(ctx context.Context) (string, error) { return b.Tool(ctx, "./test/hardware") }); err != nil {
		t.Fatal(err)
	}
	archive, into := io.Pipe()
	go func() {
		_, err := filled.archive(into)
		_ = into.CloseWithError(err) // which the reader gets
	}()
	dir := t.TempDir()
	unpack(t, archive, dir)
	c := exec.CommandContext(t.Context(), filepath.Join(dir, archiveName, "run.sh"), "--simulated")
	c.Env = []string{"PATH=/usr/bin:/bin"}
	c.Dir = dir
	var said, told bytes.Buffer
	c.Stdout, c.Stderr = &said, &told
	if err := c.Run(); err != nil {
		t.Fatalf("%v\n%s%s", err, &told, &said)
	}
	t.Logf("\n%s", &said)
	for where, words := range map[*bytes.Buffer][]string{
		&said: {"on SIMULATED GPUs"}, // the table
		&told: {"10 configs, 68 steps", "Xid 31", "names the process", "kubelet gives out 4", "shared by default/greedy", "1 of 2 pods left"},
	} {
		for _, want := range words {
			if !strings.Contains(where.String(), want) {
				t.Errorf("%q is missing in\n%s", want, where)
			}
		}
	}
	const checks = 14
	if n := strings.Count(said.String(), "│ ok "); n != checks || strings.Contains(said.String(), string(notRun)) {
		t.Errorf("%d checks have passed, want %d", n, checks)
	}
}

func unpack(t *testing.T, from io.Reader, dir string) {
	t.Helper()
	for r := tar.NewReader(from); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, header.Name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if header.Typeflag == tar.TypeSymlink {
			if err := os.Symlink(header.Linkname, path); err != nil {
				t.Fatal(err)
			}
			continue
		}
		file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, header.FileInfo().Mode())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(file, r); err != nil {
			t.Fatal(err)
		}
		if err := file.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestACheckThatFailsEndsWhatRestsOnItAndTheRunHasFailed(t *testing.T) {
	wrong := errors.New("wrong")
	r := newReport(io.Discard, false)
	r.check("first", func() (string, error) { return "seen", nil })
	r.check("absent", func() (string, error) { return "", notHere("not on this machine") })
	if r.failed() || r.broken {
		t.Error("what is not on this machine has failed")
	}
	r.check("second", func() (string, error) { return "", wrong })
	r.check("third", func() (string, error) { t.Error("it is made though what it rests on has failed"); return "", nil })
	r.alone("last", func() (string, error) { return "is made", nil })
	if !r.failed() {
		t.Error("the run has not failed")
	}
	for _, want := range []string{"first", "not on this machine", "FAILED", "rests on has not passed", "is made"} {
		if !strings.Contains(r.table(), want) {
			t.Errorf("%q is not in the table:\n%s", want, r.table())
		}
	}
}
