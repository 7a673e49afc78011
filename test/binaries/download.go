package binaries

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	_ "embed" // the checksums that maintainers have pinned
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"
)

// KubeFrom is the environment variable by which Kubernetes' programs are not built where neither GPUSLICE_KUBE_BIN nor PATH has them: "download" takes the
// archives that Kubernetes and etcd publish, for Linux on amd64.
const KubeFrom = "GPUSLICE_KUBE"

const (
	// maxArchive and maxChecksums bound what is downloaded, in bytes. Kubernetes' archive has half a gigabyte.
	maxArchive, maxChecksums = 2 << 30, 1 << 20
	// answersIn bounds how long a server may take to begin its answer.
	answersIn = 30 * time.Second
)

// The servers of what is published; tests have their own.
var (
	kubernetesAt = "https://dl.k8s.io"
	etcdAt       = "https://github.com/etcd-io/etcd/releases/download"
	transport    = http.DefaultTransport
)

// pinned has the checksums that an archive must have, whatever its server publishes: lines as of sha512sum and sha256sum, by the archive's name with its
// version.
//
//go:embed pinned.txt
var pinned string

// published is an archive with programs.
type published struct {
	name      string // with its version, as pinned.txt has it
	url       string
	checksums string // the URL of its checksum: alone, or in lines with the names of files
	hash      func() hash.Hash
	programs  map[string]bool // taken from it, by the last element of their names
}

// publishedKube are the archives of these versions.
func publishedKube(kubernetes, etcd string) []published {
	server, store := "kubernetes-server-linux-amd64.tar.gz", "etcd-"+etcd+"-linux-amd64.tar.gz"
	return []published{
		{
			name: strings.Replace(server, "server-", "server-"+kubernetes+"-", 1), url: kubernetesAt + "/" + kubernetes + "/" + server,
			checksums: kubernetesAt + "/" + kubernetes + "/" + server + ".sha512", hash: sha512.New,
			programs: map[string]bool{"kube-apiserver": true, "kube-controller-manager": true, "kube-scheduler": true, "kubelet": true, "kubectl": true},
		},
		{
			name: store, url: etcdAt + "/" + etcd + "/" + store, checksums: etcdAt + "/" + etcd + "/SHA256SUMS", hash: sha256.New,
			programs: map[string]bool{"etcd": true},
		},
	}
}

// downloaded returns the directory with the programs that Kubernetes and etcd publish, or "" where they cannot be had: the log says why.
func (b Builder) downloaded(ctx context.Context, wanted map[string]string) (string, error) {
	switch from := os.Getenv(KubeFrom); from {
	case "":
		return "", nil
	case "download":
	default:
		return "", fmt.Errorf("%s=%s: set it to download, or unset it", KubeFrom, from)
	}
	b.keepOutOfTestCache()
	cache, err := b.cache()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "kube-published-"+wanted[kubernetes]+"-"+wanted[etcd])
	unlock, err := b.lock(ctx, dir+".lock", "kube")
	if err != nil {
		return "", err
	}
	defer unlock()
	if exists(dir) {
		b.logf("kube: cached from the download")
		return dir, nil
	}
	if err := b.download(ctx, dir, wanted); err != nil {
		if ctx.Err() != nil {
			return "", err
		}
		b.logf("kube: building it, for the download failed: %v", err)
		return "", nil
	}
	return dir, nil
}

// download makes the directory when all programs are there and fit.
func (b Builder) download(ctx context.Context, dir string, wanted map[string]string) (err error) {
	partial, err := os.MkdirTemp(filepath.Dir(dir), ".downloading-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(partial)) }()
	programs := filepath.Join(partial, "programs")
	if err := os.Mkdir(programs, 0o755); err != nil {
		return err
	}
	for _, p := range publishedKube(wanted[kubernetes], wanted[etcd]) {
		b.logf("kube: downloading %s", p.url)
		if err := p.into(ctx, partial, programs); err != nil {
			return fmt.Errorf("%s: %w", p.url, err)
		}
	}
	found := locate(ctx, kubePrograms, wanted, func(name string) (string, error) {
		file := filepath.Join(programs, name)
		_, err := os.Stat(file)
		return file, err
	})
	if !found.fits() {
		return fmt.Errorf("the downloaded programs cannot be used: %s", found.reason(true))
	}
	return os.Rename(programs, dir)
}

// into downloads the archive, compares its checksum, and only then unpacks the programs.
func (p published) into(ctx context.Context, temp, programs string) (err error) {
	want, err := p.checksum(ctx)
	if err != nil {
		return err
	}
	file, err := os.CreateTemp(temp, "archive-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close(), os.Remove(file.Name())) }()
	sum := p.hash()
	if err := get(ctx, p.url, maxArchive, io.MultiWriter(file, sum)); err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want {
		return fmt.Errorf("the checksum is %s, and is to be %s", got, want)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return p.unpack(file, programs)
}

// checksum is the pinned one, or else the published one.
func (p published) checksum(ctx context.Context) (string, error) {
	if sum := sumOf(pinned, p.name, p.hash().Size()); sum != "" {
		return sum, nil
	}
	var text bytes.Buffer
	if err := get(ctx, p.checksums, maxChecksums, &text); err != nil {
		return "", fmt.Errorf("its checksum: %w", err)
	}
	sum := sumOf(text.String(), path.Base(p.url), p.hash().Size())
	if sum == "" {
		return "", fmt.Errorf("%s has no checksum of it", p.checksums)
	}
	return sum, nil
}

// sumOf finds a checksum of so many bytes in lines "SUM  NAME", or in a text that is a checksum alone; "" if it is not there.
func sumOf(text, name string, size int) string {
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) == 0 || len(words) > 2 || len(words) == 2 && strings.TrimPrefix(words[1], "*") != name {
			continue
		}
		if sum, err := hex.DecodeString(words[0]); err == nil && len(sum) == size {
			return strings.ToLower(words[0])
		}
	}
	return ""
}

// unpack writes the programs of the archive into a directory.
func (p published) unpack(archive io.Reader, programs string) error {
	unpacked, err := gzip.NewReader(archive)
	if err != nil {
		return fmt.Errorf("unpacking: %w", err)
	}
	files := tar.NewReader(unpacked)
	for {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("unpacking: %w", err)
		}
		name := path.Base(header.Name)
		if header.Typeflag != tar.TypeReg || !p.programs[name] {
			continue
		}
		if err := writeProgram(filepath.Join(programs, name), io.LimitReader(files, maxArchive)); err != nil {
			return fmt.Errorf("unpacking %s: %w", name, err)
		}
	}
}

func writeProgram(file string, from io.Reader) error {
	to, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, to.Close())
}

var errPlain = errors.New("it leads to a server without TLS")

// get writes what is at the URL, of at most so many bytes. It comes by TLS, also where the server sends the client elsewhere.
func get(ctx context.Context, url string, most int64, to io.Writer) error {
	ctx, giveUp := context.WithCancel(ctx)
	defer giveUp()
	late := time.AfterFunc(answersIn, giveUp)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	client := http.Client{Transport: transport, CheckRedirect: func(r *http.Request, before []*http.Request) error {
		if r.URL.Scheme != "https" {
			return errPlain
		}
		if len(before) > 5 {
			return http.ErrUseLastResponse
		}
		return nil
	}}
	answer, err := client.Do(request)
	if !late.Stop() && err != nil {
		return fmt.Errorf("no answer within %s: %w", answersIn, err)
	}
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("the server says %s", answer.Status)
	}
	n, err := io.Copy(to, io.LimitReader(answer.Body, most+1))
	if err != nil {
		return fmt.Errorf("after %d bytes: %w", n, err)
	}
	if n > most {
		return fmt.Errorf("it has more than %d bytes", most)
	}
	return nil
}
