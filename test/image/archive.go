package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"time"

	"github.com/distribution/reference"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// image is the files in one layer, with the Dockerfile's config.
func (o order) image(arch string, files []file) (v1.Image, error) {
	packed, err := o.pack(files)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(packed)), nil },
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
	if err != nil {
		return nil, fmt.Errorf("making the layer: %w", err)
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	if image, err = mutate.ConfigFile(image, o.config(arch)); err != nil {
		return nil, fmt.Errorf("writing the config: %w", err)
	}
	image, err = mutate.Append(image, mutate.Addendum{
		Layer: layer, History: v1.History{Created: v1.Time{Time: o.created}, CreatedBy: "COPY --from=build /rootfs /"},
	})
	if err != nil {
		return nil, fmt.Errorf("adding the layer: %w", err)
	}
	return image, nil
}

// config is the image config, the same as from the Dockerfile.
func (o order) config(arch string) *v1.ConfigFile {
	return &v1.ConfigFile{
		OS: "linux", Architecture: arch, Created: v1.Time{Time: o.created}, RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{
			User:       "0:0", // the driver asks for CAP_SYS_ADMIN and for its capability device files
			Entrypoint: []string{"/usr/bin/gpuslice-agent"},
			Cmd:        []string{"run"},
			Labels: map[string]string{
				"org.opencontainers.image.title":       "gpuslice-agent",
				"org.opencontainers.image.description": "Keeps a node's GPUs partitioned the way the node's labels ask",
				"org.opencontainers.image.source":      "https://github.com/gpuslice/gpuslice",
				"org.opencontainers.image.licenses":    "Apache-2.0",
				"org.opencontainers.image.version":     o.version,
				"org.opencontainers.image.revision":    o.revision,
			},
		},
	}
}

// pack puts the files into a tar, each folder before what is in it. All are root's.
func (o order) pack(files []file) ([]byte, error) {
	var packed bytes.Buffer
	w := tar.NewWriter(&packed)
	there := map[string]bool{".": true}
	var folder func(string) error
	folder = func(name string) error {
		if there[name] {
			return nil
		}
		there[name] = true
		if err := folder(path.Dir(name)); err != nil {
			return err
		}
		return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, ModTime: o.created})
	}
	for _, f := range files {
		if err := folder(path.Dir(f.path)); err != nil {
			return nil, fmt.Errorf("packing %s: %w", f.path, err)
		}
		if err := put(w, f.path, f.content, 0o755, o.created); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("packing the layer: %w", err)
	}
	return packed.Bytes(), nil
}

func put(w *tar.Writer, name string, content []byte, mode int64, at time.Time) error {
	err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(content)), ModTime: at})
	if err == nil {
		_, err = w.Write(content)
	}
	if err != nil {
		return fmt.Errorf("packing %s: %w", name, err)
	}
	return nil
}

// archive writes the images as one file, in OCI's image layout. It includes a name that lets containerd and podman import it.
// It returns the digest of the index, which is the image's digest in a registry.
func (o order) archive(to string, images []platformImage) (v1.Hash, error) {
	name, err := fullName(o.name, o.version)
	if err != nil {
		return v1.Hash{}, err
	}
	all := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, one := range images {
		all = mutate.AppendManifests(all, mutate.IndexAddendum{
			Add: one.image, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: one.arch}},
		})
	}
	digest, err := all.Digest()
	if err != nil {
		return v1.Hash{}, fmt.Errorf("making the index of the images: %w", err)
	}
	folder, err := os.MkdirTemp("", "gpuslice-layout-")
	if err != nil {
		return v1.Hash{}, fmt.Errorf("making a folder for the layout: %w", err)
	}
	defer os.RemoveAll(folder)
	at, err := layout.Write(folder, empty.Index)
	if err != nil {
		return v1.Hash{}, fmt.Errorf("writing the layout: %w", err)
	}
	// The name that containerd gives the image, in full as kubelet asks for it, and the tag that the layout's own format has.
	names := map[string]string{"io.containerd.image.name": name, "org.opencontainers.image.ref.name": o.version}
	if err := at.AppendIndex(all, layout.WithAnnotations(names)); err != nil {
		return v1.Hash{}, fmt.Errorf("writing the layout: %w", err)
	}
	if err := tarFolder(to, folder, o.created); err != nil {
		return v1.Hash{}, fmt.Errorf("writing the archive: %w", err)
	}
	return digest, nil
}

// fullName is the name of an image with its registry, which a pod need not name.
func fullName(name, tag string) (string, error) {
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		return "", fmt.Errorf("-name %q: %w", name, err)
	}
	tagged, err := reference.WithTag(named, tag)
	if err != nil {
		return "", fmt.Errorf("-version %q: it must be fit for a tag: %w", tag, err)
	}
	return tagged.String(), nil
}

// tarFolder packs the files of a folder in the order of their names.
func tarFolder(to, folder string, at time.Time) error {
	out, err := os.Create(to)
	if err != nil {
		return err //nolint:wrapcheck // it names the file
	}
	w := tar.NewWriter(out)
	err = filepath.WalkDir(folder, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := os.ReadFile(name)
		if err != nil {
			return err //nolint:wrapcheck // it names the file
		}
		short, err := filepath.Rel(folder, name)
		if err != nil {
			return err //nolint:wrapcheck // it names the file
		}
		return put(w, filepath.ToSlash(short), content, 0o644, at)
	})
	if err == nil {
		err = w.Close()
	}
	if closed := out.Close(); err == nil {
		err = closed
	}
	return err
}
