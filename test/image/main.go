// Command image makes the agent's container image without a container engine: an archive in OCI's image layout with an image for each
// platform, and a software bill of materials (CycloneDX) for each. The image holds the same files as the Dockerfile's; test/shipped
// holds both to the same.
//
// The same sources, compilers and C library give the same archive, byte for byte.
//
// It is a separate module so that its requirements never decide the versions that the agent is built with.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// order is what someone wants an image of.
type order struct {
	checkout  string    // root of the sources
	out       string    // folder of the results
	name      string    // of the image, without a tag
	version   string    // its tag, and what the program says with "version"
	revision  string    // commit of the sources
	created   time.Time // of each file in it, and of the image
	platforms []string  // by Go's names of architectures
	each      bool      // each platform is wanted: a missing compiler is an error
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	o, err := read(os.Args[1:])
	if err == nil {
		err = o.run(ctx)
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func read(args []string) (o order, err error) {
	flags := flag.NewFlagSet("image", flag.ContinueOnError)
	flags.StringVar(&o.checkout, "checkout", ".", "root of the sources")
	flags.StringVar(&o.out, "out", "bin/image", "folder of the results")
	flags.StringVar(&o.name, "name", "gpuslice/gpuslice-agent", "name of the image, without a tag")
	flags.StringVar(&o.version, "version", "unknown", "tag of the image")
	flags.StringVar(&o.revision, "revision", "unknown", "commit of the sources")
	created := flags.String("created", os.Getenv("SOURCE_DATE_EPOCH"), "time of each file, in seconds since 1970; SOURCE_DATE_EPOCH, or 0")
	platforms := flags.String("platforms", "", "architectures, separated by commas: amd64, arm64; those that a compiler is here for")
	if err := flags.Parse(args); err != nil {
		return o, err //nolint:wrapcheck // it says which flag
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("%q is no flag", flags.Arg(0))
	}
	seconds := int64(0)
	if *created != "" {
		if seconds, err = strconv.ParseInt(*created, 10, 64); err != nil {
			return o, fmt.Errorf("-created %q: it must be a number of seconds", *created)
		}
	}
	o.created = time.Unix(seconds, 0).UTC()
	o.platforms, o.each = []string{"amd64", "arm64"}, *platforms != ""
	if o.each {
		o.platforms = strings.Split(*platforms, ",")
	}
	if _, err := fullName(o.name, o.version); err != nil { // before anything is compiled
		return o, err
	}
	if o.checkout, err = filepath.Abs(o.checkout); err != nil {
		return o, fmt.Errorf("finding the sources: %w", err)
	}
	return o, nil
}

// run makes the archive and its bills of materials, and says what it made and what of.
func (o order) run(ctx context.Context) error {
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return fmt.Errorf("making the folder of the results: %w", err)
	}
	var images []platformImage
	for _, arch := range o.platforms {
		made, err := o.platform(ctx, arch)
		var missing *noCompilerError
		if errors.As(err, &missing) && !o.each && arch != runtime.GOARCH {
			fmt.Printf("linux/%s: left out: %v\n", arch, missing)
			continue
		}
		if err != nil {
			return fmt.Errorf("linux/%s: %w", arch, err)
		}
		images = append(images, made)
	}
	file := o.file(".tar")
	digest, err := o.archive(file, images)
	if err != nil {
		return err
	}
	info, err := os.Stat(file)
	if err != nil {
		return fmt.Errorf("looking at the archive: %w", err)
	}
	fmt.Printf("%s: %s:%s, %s, %s\n", file, o.name, o.version, megabytes(info.Size()), digest)
	return nil
}

// platform makes the image of one architecture.
func (o order) platform(ctx context.Context, arch string) (platformImage, error) {
	c, err := compilerFor(ctx, arch)
	if err != nil {
		return platformImage{}, err
	}
	work, err := os.MkdirTemp("", "gpuslice-image-")
	if err != nil {
		return platformImage{}, fmt.Errorf("making a folder for the program: %w", err)
	}
	defer os.RemoveAll(work)
	program := filepath.Join(work, "gpuslice-agent")
	if err := o.compile(ctx, c, program); err != nil {
		return platformImage{}, err
	}
	files, err := c.files(ctx, program)
	if err != nil {
		return platformImage{}, err
	}
	library := c.origin(ctx, files)
	image, err := o.image(arch, files)
	if err != nil {
		return platformImage{}, err
	}
	bill := o.file("-linux-" + arch + ".cdx.json")
	if err := o.writeBill(bill, arch, program, library); err != nil {
		return platformImage{}, err
	}
	layers, err := image.Layers()
	if err != nil {
		return platformImage{}, fmt.Errorf("reading the image: %w", err)
	}
	compressed, err := layers[0].Size()
	if err != nil {
		return platformImage{}, fmt.Errorf("reading the image: %w", err)
	}
	size := int64(0)
	for _, f := range files {
		size += int64(len(f.content))
	}
	fmt.Printf("linux/%s: %s, %s compressed; by %s, with the C library of %s\n", arch, megabytes(size), megabytes(compressed), c.says, library)
	return platformImage{arch: arch, image: image}, nil
}

type platformImage struct {
	arch  string
	image v1.Image
}

// file is the path of a result. A version may have any character that git allows in a tag.
func (o order) file(end string) string {
	return filepath.Join(o.out, "gpuslice-agent-"+strings.ReplaceAll(o.version, "/", "-")+end)
}

func megabytes(bytes int64) string { return fmt.Sprintf("%.1f MB", float64(bytes)/1e6) }
