package main

import (
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// targets are what C compilers and Debian call an architecture.
var targets = map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}

// libraries are the C library itself and those that NVIDIA's library brings into the process, as in the Dockerfile.
var libraries = []string{"libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0"}

// compiler is a C compiler of this machine and what it compiles for.
type compiler struct {
	arch   string
	target string // such as x86_64-linux-gnu: the folder of its libraries on Debian
	path   string
	says   string // its own name and version
}

// noCompilerError is that this machine has no C compiler for an architecture.
type noCompilerError struct{ program, debian string }

func (e *noCompilerError) Error() string {
	return fmt.Sprintf("there is no %s here: install it, on Debian by the packages %s", e.program, e.debian)
}

// compilerFor finds the C compiler for an architecture: $CC or gcc for this machine's own, Debian's cross compiler for another.
func compilerFor(ctx context.Context, arch string) (compiler, error) {
	target, known := targets[arch]
	if !known {
		return compiler{}, fmt.Errorf("there is no image of the architecture %q, only of amd64 and arm64", arch)
	}
	program, debian := target+"-gcc", "gcc-"+strings.ReplaceAll(target, "_", "-")+" and libc6-dev-"+arch+"-cross"
	if arch == runtime.GOARCH {
		program, debian = "gcc", "gcc and libc6-dev"
		if own := os.Getenv("CC"); own != "" {
			program = own
		}
	}
	file, err := exec.LookPath(program)
	if err != nil {
		return compiler{}, &noCompilerError{program, debian}
	}
	says, err := output(ctx, file, "--version")
	if err != nil {
		return compiler{}, fmt.Errorf("asking the C compiler for its version: %w", err)
	}
	says, _, _ = strings.Cut(says, "\n")
	return compiler{arch: arch, target: target, path: file, says: says}, nil
}

// compile makes the program as the Dockerfile does, which says why by each flag.
func (o order) compile(ctx context.Context, c compiler, program string) error {
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildmode=pie", "-buildvcs=false", "-tags", "netgo,osusergo,grpcnotrace",
		"-ldflags", "-s -w -X main.version="+o.version+" -extldflags=-Wl,-z,lazy,-z,relro",
		"-o", program, "./cmd/gpuslice-agent")
	build.Dir = o.checkout
	build.Env = append(os.Environ(), "GOFLAGS=", "GOOS=linux", "GOARCH="+c.arch, "CGO_ENABLED=1", "CC="+c.path,
		"CGO_CFLAGS=-O2 -g -Wno-deprecated-declarations")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return fmt.Errorf("building the agent: %w", err)
	}
	return nil
}

// file is one of the image.
type file struct {
	path    string // in the image, without the slash in front
	from    string // where its content is from on this machine
	content []byte
}

// files are those of the image: the program, the loader where the program names it, and the C library where the loader looks.
func (c compiler) files(ctx context.Context, program string) ([]file, error) {
	loader, needed, err := linked(program)
	if err != nil {
		return nil, err
	}
	at := map[string]string{"usr/bin/gpuslice-agent": program}
	if at[strings.TrimPrefix(loader, "/")], err = c.find(ctx, path.Base(loader)); err != nil {
		return nil, err
	}
	for _, name := range libraries {
		if at["lib/"+c.target+"/"+name], err = c.find(ctx, name); err != nil {
			return nil, err
		}
	}
	for _, name := range needed {
		if !slices.Contains(libraries, name) && name != path.Base(loader) {
			return nil, fmt.Errorf("the agent is linked with %s, which the image does not have", name)
		}
	}
	var all []file
	for to, from := range at {
		content, err := os.ReadFile(from)
		if err != nil {
			return nil, fmt.Errorf("reading what goes into the image: %w", err)
		}
		all = append(all, file{path: to, from: from, content: content})
	}
	slices.SortFunc(all, func(a, b file) int { return strings.Compare(a.path, b.path) })
	return all, nil
}

// linked gives the loader that a program names, and the libraries that it is linked with.
func linked(program string) (loader string, needed []string, err error) {
	f, err := elf.Open(program)
	if err != nil {
		return "", nil, fmt.Errorf("reading the program: %w", err)
	}
	defer f.Close()
	if needed, err = f.ImportedLibraries(); err != nil {
		return "", nil, fmt.Errorf("reading the program's libraries: %w", err)
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		name := make([]byte, p.Filesz)
		if _, err := p.ReadAt(name, 0); err != nil {
			return "", nil, fmt.Errorf("reading the program's loader: %w", err)
		}
		return string(bytes.TrimRight(name, "\x00")), needed, nil
	}
	return "", nil, fmt.Errorf("%s names no loader: it is linked statically, and could not open NVIDIA's library", filepath.Base(program))
}

// find gives the file of a library that the compiler would link with.
func (c compiler) find(ctx context.Context, name string) (string, error) {
	found, err := output(ctx, c.path, "-print-file-name="+name)
	if err != nil {
		return "", fmt.Errorf("asking %s for %s: %w", c.path, name, err)
	}
	if !filepath.IsAbs(found) { // the compiler gives the name back for what it does not find
		return "", fmt.Errorf("%s has no %s", c.path, name)
	}
	found, err = filepath.EvalSymlinks(found)
	if err != nil {
		return "", fmt.Errorf("looking at %s: %w", name, err)
	}
	return found, nil
}

// debian is a package of this machine.
type debian struct{ name, version string }

func (d debian) String() string {
	if d.name == "" {
		return "this machine, which is of no Debian package"
	}
	return "Debian's package " + d.name + " " + d.version
}

// origin is the package that the C library is from.
func (c compiler) origin(ctx context.Context, files []file) debian {
	for _, f := range files {
		if path.Base(f.path) != "libc.so.6" {
			continue
		}
		// Where /lib is a link to /usr/lib, the package may have the file by either name.
		for _, name := range []string{f.from, strings.TrimPrefix(f.from, "/usr")} {
			owner, err := output(ctx, "dpkg-query", "--search", name)
			if err != nil {
				continue
			}
			owner, _, _ = strings.Cut(owner, ": ")
			version, err := output(ctx, "dpkg-query", "--show", "--showformat=${Version}", owner)
			if err == nil {
				owner, _, _ = strings.Cut(owner, ":")
				return debian{owner, version}
			}
		}
	}
	return debian{}
}

func output(ctx context.Context, program string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, program, args...).Output()
	return strings.TrimSpace(string(out)), err
}
