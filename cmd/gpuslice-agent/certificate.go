package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"math/big"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
)

const (
	// rereadAfter is how often the files of a certificate are read again. Kubelet brings a Secret's change to a pod within a minute or two.
	rereadAfter = 10 * time.Second
	// longestPEM is for a chain of certificates, or a key.
	longestPEM = 256 << 10 // bytes
	// ownValidity is how long a certificate is valid that the agent makes for itself. It makes another when the half is over.
	ownValidity = 365 * 24 * time.Hour
)

// certificate is the server's certificate for metrics: read from a folder, again at each change, or signed by the agent itself. With the latter an
// eavesdropper reads nothing, but a client takes a server in between for the agent, which would get the client's token. It is the default, since
// Prometheus as a rule does not check the names of pods that it finds by their addresses.
type certificate struct {
	dir string // of tls.crt and tls.key; empty for one of its own
	log *zap.Logger

	mu        sync.Mutex
	readAt    time.Time
	text, key []byte // of the last reading
	current   *tls.Certificate
}

// config is for a server. Prometheus has spoken TLS 1.3 for years, and nothing here needs HTTP/2.
func (c *certificate) config() (*tls.Config, error) {
	if _, err := c.get(nil); err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{"http/1.1"}, GetCertificate: c.get}, nil
}

// get gives the certificate of a handshake. While the files cannot be used, for instance half written, the former one stays.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current != nil && time.Since(c.readAt) < rereadAfter {
		return c.current, nil
	}
	c.readAt = time.Now()
	renew := c.read
	if c.dir == "" {
		renew = c.sign
	}
	err := renew()
	switch {
	case c.current == nil:
		return nil, err
	case err != nil:
		c.log.Warn("keeping the former certificate for metrics", zap.Error(err))
	}
	return c.current, nil
}

func (c *certificate) read() error {
	text, err := readPEM(filepath.Join(c.dir, corev1.TLSCertKey))
	if err != nil {
		return err
	}
	key, err := readPEM(filepath.Join(c.dir, corev1.TLSPrivateKeyKey))
	if err != nil {
		return err
	}
	if c.current != nil && bytes.Equal(text, c.text) && bytes.Equal(key, c.key) {
		return nil
	}
	pair, err := tls.X509KeyPair(text, key)
	if err != nil {
		return fmt.Errorf("reading the certificate of %s: %w", c.dir, err)
	}
	c.current, c.text, c.key = &pair, text, key
	return nil
}

func readPEM(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, longestPEM))
}

func (c *certificate) sign() error {
	now := time.Now()
	if c.current != nil && now.Before(c.current.Leaf.NotAfter.Add(-ownValidity/2)) {
		return nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("making a key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return fmt.Errorf("making a serial number: %w", err)
	}
	leaf := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "gpuslice-agent"}, DNSNames: []string{"gpuslice-agent"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(ownValidity), // clocks of a cluster differ
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
	}
	text, err := x509.CreateCertificate(rand.Reader, leaf, leaf, key.Public(), key)
	if err != nil {
		return fmt.Errorf("signing a certificate: %w", err)
	}
	c.current = &tls.Certificate{Certificate: [][]byte{text}, PrivateKey: key, Leaf: leaf}
	return nil
}
