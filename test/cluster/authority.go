package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"time"
)

// validity of all certificates: longer than anyone keeps a test cluster.
const validity = 365 * 24 * time.Hour

// authority signs every certificate of one control plane.
type authority struct {
	pair
	parsed *x509.Certificate
	signer *ecdsa.PrivateKey
}

// pair is a certificate and its key in PEM.
type pair struct{ cert, key []byte }

// privateKey is a key and its PEM form.
type privateKey struct {
	*ecdsa.PrivateKey
	pem []byte
}

func newKey() (privateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return privateKey{}, fmt.Errorf("making a key: %w", err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return privateKey{}, fmt.Errorf("making a key: %w", err)
	}
	return privateKey{key, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})}, nil
}

func newAuthority() (*authority, error) {
	key, err := newKey()
	if err != nil {
		return nil, err
	}
	template := certificate(pkix.Name{CommonName: "gpuslice-test-ca"})
	template.IsCA = true
	template.BasicConstraintsValid = true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key.PrivateKey)
	if err != nil {
		return nil, fmt.Errorf("making a certificate authority: %w", err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("making a certificate authority: %w", err)
	}
	return &authority{
		pair:   pair{cert: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), key: key.pem},
		parsed: parsed,
		signer: key.PrivateKey,
	}, nil
}

// serverSubject is the API server, under every name that clients know it by.
func serverSubject() *x509.Certificate {
	template := certificate(pkix.Name{CommonName: "kube-apiserver"})
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP(serviceIP)}
	template.DNSNames = []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}
	return template
}

func userSubject(name string, groups []string) *x509.Certificate {
	template := certificate(pkix.Name{CommonName: name, Organization: groups})
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	return template
}

func certificate(subject pkix.Name) *x509.Certificate {
	now := time.Now()
	return &x509.Certificate{
		Subject:   subject,
		NotBefore: now.Add(-time.Hour), // clocks are set back now and then
		NotAfter:  now.Add(validity),
		KeyUsage:  x509.KeyUsageDigitalSignature,
	}
}

// issue signs the template for a new key.
func (a *authority) issue(template *x509.Certificate) (pair, error) {
	subject := template.Subject.CommonName
	key, err := newKey()
	if err != nil {
		return pair{}, fmt.Errorf("issuing a certificate to %s: %w", subject, err)
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120)); err != nil {
		return pair{}, fmt.Errorf("issuing a certificate to %s: %w", subject, err)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.parsed, key.Public(), a.signer)
	if err != nil {
		return pair{}, fmt.Errorf("issuing a certificate to %s: %w", subject, err)
	}
	return pair{cert: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), key: key.pem}, nil
}
