package binaries_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// archived is an archive of programs that print what they say.
func archived(t *testing.T, folder string, says map[string]string) []byte {
	t.Helper()
	var out bytes.Buffer
	compressed := gzip.NewWriter(&out)
	w := tar.NewWriter(compressed)
	for name, text := range says {
		script := "#!/bin/sh\ncat <<'END'\n" + text + "\nEND\n"
		if err := w.WriteHeader(&tar.Header{Name: folder + name, Mode: 0o644, Size: int64(len(script)), Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(script)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := compressed.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

const (
	serverAt = "/v1.37.1/kubernetes-server-linux-amd64.tar.gz"
	storeAt  = "/v3.7.0/etcd-v3.7.0-linux-amd64.tar.gz"
	sumsAt   = "/v3.7.0/SHA256SUMS"
)

// What cannot be had, or is not what it is to be, is said, and Kubernetes is built.
func TestPublishedProgramsAreTakenWhereTheyAreWhatTheyAreToBe(t *testing.T) {
	programs := says()
	etcd := map[string]string{"etcd": programs["etcd"]}
	delete(programs, "etcd")
	server, store := archived(t, "kubernetes/server/bin/", programs), archived(t, "etcd-v3.7.0-linux-amd64/", etcd)
	sum512, sum256 := sha512.Sum512(server), sha256.Sum256(store)
	good := map[string][]byte{
		serverAt: server, serverAt + ".sha512": []byte(hex.EncodeToString(sum512[:]) + "\n"), storeAt: store,
		sumsAt: []byte("00  other.tar.gz\n" + hex.EncodeToString(sum256[:]) + "  etcd-v3.7.0-linux-amd64.tar.gz\n"),
	}
	for name, row := range map[string]struct {
		change func(files map[string][]byte)
		pinned string
		cut    string // the path whose answer ends early
		plain  bool   // everything is elsewhere, without TLS
		want   string // in the log; "" where the programs are taken
	}{
		"all is well":     {},
		"pinned":          {pinned: hex.EncodeToString(sum512[:]) + "  kubernetes-server-v1.37.1-linux-amd64.tar.gz\n"},
		"pinned to other": {pinned: strings.Repeat("ab", 64) + "  kubernetes-server-v1.37.1-linux-amd64.tar.gz\n", want: "is to be abab"},
		"a wrong checksum": {change: func(f map[string][]byte) {
			f[sumsAt] = []byte(strings.Repeat("cd", 32) + "  etcd-v3.7.0-linux-amd64.tar.gz\n")
		}, want: "is to be cdcd"},
		"no checksum":      {change: func(f map[string][]byte) { f[sumsAt] = []byte("none\n") }, want: "has no checksum of it"},
		"nothing there":    {change: func(f map[string][]byte) { delete(f, serverAt) }, want: "404"},
		"a cut connection": {cut: storeAt, want: "unexpected EOF"},
		"without TLS":      {plain: true, want: "without TLS"},
		"other versions": {change: func(f map[string][]byte) {
			programs["kubectl"] = "Client Version: v1.20.0"
			f[serverAt] = archived(t, "kubernetes/server/bin/", programs)
			sum := sha512.Sum512(f[serverAt])
			f[serverAt+".sha512"] = []byte(hex.EncodeToString(sum[:]))
		}, want: "v1.37 is needed"},
	} {
		t.Run(name, func(t *testing.T) {
			files := map[string][]byte{}
			for at, content := range good {
				files[at] = content
			}
			if row.change != nil {
				row.change(files)
			}
			published := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				content, there := files[r.URL.Path]
				switch {
				case row.plain:
					http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusFound)
				case !there:
					http.NotFound(w, r)
				case r.URL.Path == row.cut:
					w.Header().Set("Content-Length", "1000000")
					_, _ = w.Write(content)
				default:
					_, _ = w.Write(content)
				}
			}))
			t.Cleanup(published.Close)
			t.Cleanup(binaries.SetPublished(published.URL, published.Client().Transport, row.pinned))
			b, _ := newBuilder(t)
			var lines log
			b.Log = &lines
			t.Setenv(binaries.KubeFrom, "download")
			dir, err := b.Kube(t.Context())
			taken := err == nil && strings.Contains(dir, "kube-published-v1.37.1-v3.7.0")
			if taken != (row.want == "") || !strings.Contains(lines.String(), row.want) {
				t.Errorf("Kube returned %q, %v, want %q in\n%s", dir, err, row.want, lines.String())
			}
			if row.want != "" && !strings.Contains(lines.String(), "kube: building it, for the download failed") {
				t.Errorf("it is not said that it is built:\n%s", lines.String())
			}
		})
	}
}
