package kube_test

import (
	"context"
	"crypto/tls"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"golang.org/x/net/http2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/test/receive"
)

// Each connection keeps a buffer as long as the longest frame that the API server has sent.
func TestTheAPIServerIsAskedToSendShortFrames(t *testing.T) {
	allowed := make(chan uint32, 1)
	server := httptest.NewUnstartedServer(nil)
	server.TLS = &tls.Config{NextProtos: []string{http2.NextProtoTLS}, MinVersion: tls.VersionTLS12}
	server.Config.TLSNextProto = map[string]func(*http.Server, *tls.Conn, http.Handler){
		http2.NextProtoTLS: func(_ *http.Server, conn *tls.Conn, _ http.Handler) {
			if _, err := io.CopyN(io.Discard, conn, int64(len(http2.ClientPreface))); err != nil {
				t.Error(err)
			}
			frame, err := http2.NewFramer(io.Discard, conn).ReadFrame()
			settings, is := frame.(*http2.SettingsFrame)
			if err != nil || !is {
				t.Errorf("the first frame is %v: %v", frame, err)
				return
			}
			longest, _ := settings.Value(http2.SettingMaxFrameSize)
			select {
			case allowed <- longest:
			default: // the client tries again
			}
		},
	}
	server.StartTLS()
	defer server.Close()
	client, err := kube.New(&rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{Insecure: true}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { _, _ = client.Nodes().Get(ctx, "gpu-1", metav1.GetOptions{}) }() // the server answers nothing
	if longest := receive.From(t, allowed); longest == 0 || longest > 64<<10 {
		t.Errorf("frames may have %d bytes", longest)
	}
}
