package realkubelet

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// Image is a container image of programs of this machine. What they are linked with dynamically comes with them.
type Image struct {
	Name       string            // with its tag, as pods name it
	Files      map[string]string // file of this machine by its path in the image
	Entrypoint []string
	Env        []string // "KEY=value"
}

// importImage gives the image to containerd.
func (k *Kubelet) importImage(ctx context.Context, image Image) error {
	archive, err := image.archive()
	if err != nil {
		return err
	}
	file := k.file("image.tar")
	if err := os.WriteFile(file, archive, 0o600); err != nil {
		return err
	}
	if _, err := k.ctr(ctx, "images", "import", file); err != nil {
		return err
	}
	return os.Remove(file)
}

// archive is the image as `docker save` writes one, with a single layer.
func (i Image) archive() ([]byte, error) {
	layer, err := i.layer()
	if err != nil {
		return nil, err
	}
	hash := sha256.Sum256(layer)
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Entrypoint": i.Entrypoint, "Env": i.Env},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(hash[:])}},
	})
	if err != nil {
		return nil, err
	}
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "RepoTags": []string{i.Name}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return nil, err
	}
	return tarOf(map[string]content{"manifest.json": {manifest, 0o644}, "config.json": {config, 0o644}, "layer.tar": {layer, 0o644}})
}

type content struct {
	text []byte
	mode int64
}

// layer holds the files, and the libraries that they need.
func (i Image) layer() ([]byte, error) {
	files := map[string]content{}
	for target, source := range i.Files {
		text, err := os.ReadFile(source)
		if err != nil {
			return nil, err
		}
		files[target] = content{text, 0o755}
		if !bytes.HasPrefix(text, []byte(elf.ELFMAG)) {
			continue // a script
		}
		needed, err := libraries(source)
		if err != nil {
			return nil, fmt.Errorf("looking for the libraries of %s: %w", source, err)
		}
		for _, library := range needed {
			text, err := os.ReadFile(library)
			if err != nil {
				return nil, err
			}
			files[library] = content{text, 0o755}
		}
	}
	return tarOf(files)
}

func tarOf(files map[string]content) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, f := range files {
		if err := w.WriteHeader(&tar.Header{Name: strings.TrimPrefix(name, "/"), Mode: f.mode, Size: int64(len(f.text)), Typeflag: tar.TypeReg}); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.text); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// libraryDirs are where distributions keep the libraries of the C compiler's target.
var libraryDirs = []string{"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"}

// libraries are the files that the loader needs to start a program, its own among them: none for a static one.
func libraries(program string) ([]string, error) {
	var all []string
	for open := []string{program}; len(open) > 0; {
		f, err := elf.Open(open[0])
		if err != nil {
			return nil, err
		}
		names, err := f.ImportedLibraries()
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if interpreter := interpreterOf(f); interpreter != "" && !slices.Contains(all, interpreter) {
			all = append(all, interpreter)
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
		open = open[1:]
		for _, name := range names {
			file, err := find(name)
			if err != nil {
				return nil, err
			}
			if !slices.Contains(all, file) {
				all, open = append(all, file), append(open, file)
			}
		}
	}
	return all, nil
}

func interpreterOf(f *elf.File) string {
	section := f.Section(".interp")
	if section == nil {
		return ""
	}
	text, err := section.Data()
	if err != nil {
		return ""
	}
	return strings.TrimRight(string(text), "\x00")
}

func find(library string) (string, error) {
	for _, dir := range libraryDirs {
		if _, err := os.Stat(filepath.Join(dir, library)); err == nil {
			return filepath.Join(dir, library), nil
		}
	}
	return "", fmt.Errorf("%s is in none of %s: %w", library, strings.Join(libraryDirs, ", "), fs.ErrNotExist)
}
