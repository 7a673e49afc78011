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
	// lookedAt is how often the files of a certificate are read again. Kubelet brings a Secret's change to a pod within a minute or two.
	lookedAt = 10 * time.Second
	// longestPEM is for a chain of certificates, or a key.
	longestPEM = 256 << 10 // bytes
	// ownValidity is that of a certificate which the agent makes for itself. It makes another when the half is over.
	ownValidity = 365 * 24 * time.Hour
)

// certificate is what the agent shows to those who ask for metrics: that of a folder, read again when it changes, or one that the agent has
// signed itself. The latter keeps those out who only listen, and proves nobody's name: whoever stands in between gets the token of who asks.
// Nobody who asks checks names of pods by their addresses as a rule, so it is what there is where nobody has given another.
type certificate struct {
	dir string // of tls.crt and tls.key; empty for one of its own
	log *zap.Logger

	mu        sync.Mutex
	looked    time.Time
	text, key []byte // as they were read last
	now       *tls.Certificate
}

// config is for a server. Prometheus has spoken TLS 1.3 for years, and nothing here needs HTTP/2.
func (c *certificate) config() (*tls.Config, error) {
	if _, err := c.get(nil); err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{"http/1.1"}, GetCertificate: c.get}, nil
}

// get is for each handshake. Files that cannot be used, as while they are being written, leave the certificate as it is.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.now != nil && time.Since(c.looked) < lookedAt {
		return c.now, nil
	}
	c.looked = time.Now()
	renew := c.read
	if c.dir == "" {
		renew = c.sign
	}
	err := renew()
	switch {
	case c.now == nil:
		return nil, err
	case err != nil:
		c.log.Warn("the certificate for metrics stays as it was", zap.Error(err))
	}
	return c.now, nil
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
	if c.now != nil && bytes.Equal(text, c.text) && bytes.Equal(key, c.key) {
		return nil
	}
	pair, err := tls.X509KeyPair(text, key)
	if err != nil {
		return fmt.Errorf("reading the certificate of %s: %w", c.dir, err)
	}
	c.now, c.text, c.key = &pair, text, key
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
	if c.now != nil && now.Before(c.now.Leaf.NotAfter.Add(-ownValidity/2)) {
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
	c.now = &tls.Certificate{Certificate: [][]byte{text}, PrivateKey: key, Leaf: leaf}
	return nil
}
