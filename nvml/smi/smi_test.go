package smi_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/smi"
)

// installed is a root with a library and a program that does this, and the paths of both.
func installed(t *testing.T, script string) (program, library string) {
	t.Helper()
	root := t.TempDir()
	program, library = filepath.Join(root, "usr/bin/nvidia-smi"), filepath.Join(root, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")
	for path, text := range map[string]string{program: "#!/bin/sh\n" + script, library: ""} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return program, library
}

func TestTheProgramIsTheOneOfTheLibrary(t *testing.T) {
	program, library := installed(t, "")
	if got, err := smi.Find(library); err != nil || got != program {
		t.Errorf("found %q, error %v; want %q", got, err, program)
	}
	if err := os.Remove(program); err != nil {
		t.Fatal(err)
	}
	if got, err := smi.Find(library); !errors.Is(err, nvml.ErrNotSupported) && !strings.HasPrefix(got, "/usr/") {
		t.Errorf("found %q, error %v; want none", got, err)
	}
}

func TestItIsAskedForOneGPU(t *testing.T) {
	said := filepath.Join(t.TempDir(), "said")
	t.Setenv("SAID", said)
	program, _ := installed(t, `echo "$@" > "$SAID"`)
	if err := smi.Reset(t.Context(), program, "libnvidia-ml.so.1", "GPU-1"); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(said); err != nil || string(text) != "--gpu-reset -i GPU-1\n" {
		t.Errorf("it was run with %q, error %v", text, err)
	}
}

func TestWhatItAnswersIsAnError(t *testing.T) {
	for script, want := range map[string]error{
		"exit 3":  nvml.ErrNotSupported,
		"exit 4":  nvml.ErrPermission,
		"exit 9":  nvml.ErrNoDriver,
		"exit 15": nvml.ErrLost,
		"echo 'GPU 00000000:01:00.0 is currently In Use by another process.'; exit 255": nvml.ErrInUse,
		"echo 'Resetting GPU 00000000:01:00.0 is not supported.' >&2; exit 255":         nvml.ErrNotSupported,
	} {
		program, _ := installed(t, script)
		err := smi.Reset(t.Context(), program, "", "GPU-1")
		if !errors.Is(err, want) || !strings.Contains(err.Error(), "GPU-1") {
			t.Errorf("%s: %v, want %v", script, err, want)
		}
	}
	program, _ := installed(t, "yes 'a lot' | head -c 100000; exit 255")
	err := smi.Reset(t.Context(), program, "", "GPU-1")
	if err == nil || len(err.Error()) > 2048 || strings.Contains(err.Error(), "\n") {
		t.Errorf("%d bytes: %.100v", len(err.Error()), err)
	}
}

func TestAProgramThatHangsIsKilled(t *testing.T) {
	program, _ := installed(t, "exec sleep 600")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	began := time.Now()
	if err := smi.Reset(ctx, program, "", "GPU-1"); err == nil || time.Since(began) > time.Minute {
		t.Errorf("it ended after %v: %v", time.Since(began), err)
	}
}
