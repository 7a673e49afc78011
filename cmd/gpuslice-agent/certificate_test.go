package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/report/metrics"
)

// put writes a certificate with that number into the folder.
func put(t *testing.T, dir string, number int64) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	of := &x509.Certificate{SerialNumber: big.NewInt(number)}
	text, err := x509.CreateCertificate(rand.Reader, of, of, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for name, block := range map[string]*pem.Block{"tls.crt": {Type: "CERTIFICATE", Bytes: text}, "tls.key": {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// number is that of the certificate which is shown now.
func number(t *testing.T, config *tls.Config) string {
	t.Helper()
	c, err := config.GetCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	return c.Leaf.SerialNumber.String()
}

func TestACertificateIsReadAgainWhenItChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		core, logged := observer.New(zapcore.WarnLevel)
		shown := &certificate{dir: dir, log: zap.New(core)}
		if _, err := shown.config(); err == nil {
			t.Error("a folder without a certificate does")
		}
		put(t, dir, 1)
		config, err := shown.config()
		if err != nil {
			t.Fatal(err)
		}
		put(t, dir, 2)
		if got := number(t, config); got != "1" {
			t.Errorf("at once it is number %s", got)
		}
		<-time.After(rereadAfter)
		if got := number(t, config); got != "2" {
			t.Errorf("after %v it is number %s", rereadAfter, got)
		}
		if err := os.WriteFile(filepath.Join(dir, "tls.key"), []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
		<-time.After(rereadAfter)
		if got := number(t, config); got != "2" || logged.Len() != 1 {
			t.Errorf("with a broken key it is number %s, and %d lines report it", got, logged.Len())
		}
	})
}

func TestACertificateOfItsOwnIsRenewedBeforeItEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config, err := (&certificate{log: zap.NewNop()}).config()
		if err != nil {
			t.Fatal(err)
		}
		first := number(t, config)
		<-time.After(ownValidity / 3)
		if got := number(t, config); got != first {
			t.Error("it is another after a third of its time")
		}
		<-time.After(ownValidity / 3)
		if got := number(t, config); got == first {
			t.Error("it is the same after two thirds of its time")
		}
	})
}

func TestBeyondLoopbackNothingIsServedInTheOpen(t *testing.T) {
	for address, want := range map[string]bool{
		"127.0.0.1:9400": true, "127.3.2.1:0": true, "[::1]:9400": true, "[::ffff:127.0.0.1]:9400": true, "localhost:9400": true,
		":9400": false, "0.0.0.0:9400": false, "[::]:9400": false, "10.0.0.1:9400": false, "localhost.example.com:9400": false, "9400": false, "": false,
	} {
		if got := loopback(address); got != want {
			t.Errorf("%q is loopback: %t", address, got)
		}
	}
	core, logged := observer.New(zapcore.InfoLevel)
	o := options{metricsAddress: ":0"}
	o.serve(t.Context(), nil, zap.New(core))
	if all := logged.All(); len(all) != 1 || all[0].Level != zapcore.ErrorLevel || all[0].ContextMap()["error"] != errNeedsTLS.Error() {
		t.Errorf("logged: %v", all)
	}
}

// Any client that reaches the port may begin a handshake, and go on with it at leisure.
func TestPromise16NoHandshakeKeepsAConnection(t *testing.T) {
	t.Parallel()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	text := "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\ncontexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n"
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	core, logged := observer.New(zapcore.InfoLevel)
	o := options{metricsAddress: "127.0.0.1:0", metricsSecure: true, kubeconfig: kubeconfig}
	o.serve(t.Context(), metrics.New(clock.RealClock{}).Handler(), zap.New(core))
	address, ok := logged.All()[0].ContextMap()["address"].(string)
	if !ok {
		t.Fatalf("logged: %v", logged.All())
	}
	for name, said := range map[string]string{"nothing": "", "half a greeting": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"} {
		c := intrude(t, "127.0.0.2", address)
		if _, err := c.Write([]byte(said)); err != nil {
			t.Fatal(err)
		}
		if err := c.SetReadDeadline(time.Now().Add(5 * time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); isTimeout(err) {
			t.Errorf("who says %s keeps the connection", name)
		}
	}
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // the agent has signed the certificate itself
	}}
	defer client.CloseIdleConnections()
	for token, want := range map[string]int{"": http.StatusUnauthorized, "any": http.StatusServiceUnavailable} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+address+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Authorization", "Bearer "+token)
		response, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		if response.StatusCode != want {
			t.Errorf("without an API server the token %q gets %s, want %d", token, response.Status, want)
		}
	}
}
