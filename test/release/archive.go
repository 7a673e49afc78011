package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// archive is kubectl's plugin for one system.
type archive struct {
	system, arch string
	program      string // its name in the archive
	file         string
	sum          string // SHA-256
}

type packedFile struct {
	name    string
	content []byte
	mode    os.FileMode
}

// pack makes what people of the system unpack without another program: a zip on Windows, else a tar.gz. It adds the ending to the name.
func (a *archive) pack(files []packedFile, at time.Time) ([]byte, error) {
	var out bytes.Buffer
	write, end := tarred(&out, at)
	if a.file += ".tar.gz"; a.system == "windows" {
		a.file = strings.TrimSuffix(a.file, ".tar.gz") + ".zip"
		write, end = zipped(&out, at)
	}
	for _, f := range files {
		if err := write(f); err != nil {
			return nil, fmt.Errorf("packing %s: %w", f.name, err)
		}
	}
	if err := end(); err != nil {
		return nil, fmt.Errorf("packing %s: %w", a.file, err)
	}
	return out.Bytes(), nil
}

func tarred(out *bytes.Buffer, at time.Time) (write func(packedFile) error, end func() error) {
	compressed := gzip.NewWriter(out)
	w := tar.NewWriter(compressed)
	write = func(f packedFile) error {
		err := w.WriteHeader(&tar.Header{Name: f.name, Mode: int64(f.mode), Size: int64(len(f.content)), ModTime: at})
		if err == nil {
			_, err = w.Write(f.content)
		}
		return err //nolint:wrapcheck // pack says what of
	}
	end = func() error {
		if err := w.Close(); err != nil {
			return err //nolint:wrapcheck // as above
		}
		return compressed.Close() //nolint:wrapcheck // as above
	}
	return write, end
}

func zipped(out *bytes.Buffer, at time.Time) (write func(packedFile) error, end func() error) {
	w := zip.NewWriter(out)
	write = func(f packedFile) error {
		header := &zip.FileHeader{Name: f.name, Method: zip.Deflate, Modified: at}
		header.SetMode(f.mode)
		to, err := w.CreateHeader(header)
		if err == nil {
			_, err = to.Write(f.content)
		}
		return err //nolint:wrapcheck // pack says what of
	}
	return write, w.Close
}

// digestIn is the digest that the image of an archive in OCI's image layout has in every registry.
func digestIn(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err //nolint:wrapcheck // it names the file
	}
	defer f.Close()
	for r := tar.NewReader(f); ; {
		header, err := r.Next()
		if err != nil {
			return "", fmt.Errorf("looking for index.json in %s: %w", file, err)
		}
		if header.Name != "index.json" {
			continue
		}
		var index struct{ Manifests []struct{ Digest string } }
		if err := json.NewDecoder(r).Decode(&index); err != nil || len(index.Manifests) != 1 {
			return "", fmt.Errorf("reading index.json in %s: it names %d images, want 1 (%w)", file, len(index.Manifests), err)
		}
		return index.Manifests[0].Digest, nil
	}
}

// krew writes the manifest that "kubectl krew install" needs to find the plugin:
// krew.googlecontainertools.github.com/v1alpha2.
func (r *release) krew(archives []archive) error {
	type selector struct {
		MatchLabels map[string]string `json:"matchLabels"`
	}
	type file struct {
		From string `json:"from"`
		To   string `json:"to"`
	}
	type platform struct {
		Selector selector `json:"selector"`
		URI      string   `json:"uri"`
		SHA256   string   `json:"sha256"`
		Bin      string   `json:"bin"`
		Files    []file   `json:"files"`
	}
	var platforms []platform
	for _, a := range archives {
		platforms = append(platforms, platform{
			Selector: selector{map[string]string{"os": a.system, "arch": a.arch}},
			URI:      r.source + "/releases/download/" + r.version + "/" + a.file, SHA256: a.sum, Bin: a.program,
			Files: []file{{a.program, "."}, {"LICENSE", "."}},
		})
	}
	text, err := yaml.Marshal(map[string]any{
		"apiVersion": "krew.googlecontainertools.github.com/v1alpha2", "kind": "Plugin", "metadata": map[string]string{"name": "gpuslice"},
		"spec": map[string]any{
			"version": r.version, "homepage": r.source, "shortDescription": "Roll out MIG and sharing configs to GPU nodes",
			"description": "Sets the labels by which gpuslice's agents cut and share the NVIDIA GPUs of nodes, for a whole pool at once;\n" +
				"shows beforehand which pods would have to leave, and follows the roll-out. Checks configs, settings, queues and quotas\n" +
				"before they reach a cluster, and writes what goes with them.\n",
			"caveats": "Needs gpuslice's agent on the nodes: " + r.source + "\n", "platforms": platforms,
		},
	})
	if err != nil {
		return fmt.Errorf("writing krew's manifest: %w", err)
	}
	return os.WriteFile(filepath.Join(r.out, "gpuslice.yaml"), text, 0o644) //nolint:wrapcheck // it names the file
}
