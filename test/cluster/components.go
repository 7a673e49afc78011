package cluster

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"

	"golang.org/x/mod/semver"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// Files of a control plane, in its directory.
const (
	etcdData    = "etcd"
	caCert      = "ca.crt"
	caKey       = "ca.key"
	serverCert  = "kube-apiserver.crt"
	serverKey   = "kube-apiserver.key"
	accountKey  = "service-accounts.key"
	kubeletCert = "kube-apiserver-kubelet-client.crt"
	kubeletKey  = "kube-apiserver-kubelet-client.key"
	auditPolicy = "audit-policy.yaml"
	auditLog    = "audit.log"
)

// serviceRange holds the addresses of services; the API server's own is its first.
const (
	serviceRange = "10.96.0.0/16"
	serviceIP    = "10.96.0.1"
)

// component is a program to be run with its arguments.
type component struct {
	name string // of the program and of its log
	path string
	args []string
}

func (c *Cluster) component(name string, args ...string) component {
	return component{name: name, path: filepath.Join(c.binaries, name), args: args}
}

func (c *Cluster) file(name string) string { return filepath.Join(c.dir, name) }

func (c *Cluster) kubeconfigOf(name string) string { return c.file(name + ".kubeconfig") }

func (c *Cluster) etcd(port int) component {
	client := fmt.Sprintf("http://127.0.0.1:%d", port)
	const peer = "http://127.0.0.1:0" // alone, it has no peers
	return c.component("etcd",
		"--name=etcd",
		"--data-dir="+c.file(etcdData),
		"--unsafe-no-fsync",                // nothing here outlives the machine
		"--quota-backend-bytes=8589934592", // 8 GiB, as many as etcd advises at most: tests that fill objects with text share it
		"--listen-client-urls="+client,
		"--advertise-client-urls="+client,
		"--listen-peer-urls="+peer,
		"--initial-advertise-peer-urls="+peer,
		"--initial-cluster=etcd="+peer,
		// etcd gives a request up after 5 s and two election timeouts, to allow an election. There is no other member,
		// and the machine may be busy.
		"--heartbeat-interval=500",
		"--election-timeout=5000",
		"--socket-reuse-port",
		"--log-level=warn",
	)
}

func etcdReady(port int) func(context.Context) error {
	url := fmt.Sprintf("http://127.0.0.1:%d/readyz", port)
	return func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(io.LimitReader(response.Body, 1<<10))
		if err != nil {
			return err
		}
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("etcd answers %s: %s", response.Status, body)
		}
		return nil
	}
}

func (c *Cluster) apiServer(etcdPort int) component {
	return c.component("kube-apiserver", append([]string{
		fmt.Sprintf("--etcd-servers=http://127.0.0.1:%d", etcdPort),
		"--bind-address=127.0.0.1",
		"--advertise-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", c.port),
		"--permit-port-sharing",
		"--endpoint-reconciler-type=none", // loopback is no legal endpoint of the kubernetes service
		"--service-cluster-ip-range=" + serviceRange,
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
		"--client-ca-file=" + c.file(caCert),
		"--tls-cert-file=" + c.file(serverCert),
		"--tls-private-key-file=" + c.file(serverKey),
		"--kubelet-client-certificate=" + c.file(kubeletCert),
		"--kubelet-client-key=" + c.file(kubeletKey),
		"--kubelet-preferred-address-types=InternalIP", // no one resolves the nodes' names
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + c.file(accountKey),
		"--service-account-signing-key-file=" + c.file(accountKey),
		"--audit-policy-file=" + c.file(auditPolicy),
		"--audit-log-path=" + c.file(auditLog),
		"--audit-log-maxsize=0",     // one file
		"--audit-log-mode=blocking", // an event is written before the next request of the same client
		"--profiling=false",
	}, append(gates(), c.apiServerFlags...)...)...)
}

// gates are features that an earlier API server has but disables by default. NodeConfig issues tokens of nodes, which
// are on by default since 1.31; tokens of pods name their node since 1.30.
func gates() []string {
	if version := os.Getenv(binaries.KubeVersion); version != "" && semver.Compare(version, "v1.31.0") < 0 {
		return []string{"--feature-gates=ServiceAccountTokenNodeBinding=true"}
	}
	return nil
}

// controllerManager has no port: the objects it creates show that it works.
func (c *Cluster) controllerManager() component {
	return c.component("kube-controller-manager", append([]string{
		"--kubeconfig=" + c.kubeconfigOf("kube-controller-manager"),
		"--secure-port=0",
		"--leader-elect=false",
		"--use-service-account-credentials=true",
		"--service-account-private-key-file=" + c.file(accountKey),
		"--root-ca-file=" + c.file(caCert),
		"--cluster-signing-cert-file=" + c.file(caCert),
		"--cluster-signing-key-file=" + c.file(caKey),
		"--kube-api-qps=500", // at the default the first service account comes 5 s later
		"--kube-api-burst=1000",
		"--profiling=false",
	}, c.controllerManagerFlags...)...)
}

func (c *Cluster) scheduler() component {
	return c.component("kube-scheduler",
		"--kubeconfig="+c.kubeconfigOf("kube-scheduler"),
		"--secure-port=0",
		"--leader-elect=false",
		"--profiling=false",
	)
}

// writeCertificates makes the authority, and what the components read: keys, kubeconfigs and the audit policy.
func (c *Cluster) writeCertificates() error {
	var err error
	if c.authority, err = newAuthority(); err != nil {
		return err
	}
	server, err := c.authority.issue(serverSubject())
	if err != nil {
		return err
	}
	kubelets, err := c.authority.issue(userSubject("kube-apiserver-kubelet-client", []string{"system:masters"}))
	if err != nil {
		return err
	}
	accounts, err := newKey()
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{
		caCert:      c.authority.cert,
		caKey:       c.authority.key,
		serverCert:  server.cert,
		serverKey:   server.key,
		kubeletCert: kubelets.cert,
		kubeletKey:  kubelets.key,
		accountKey:  accounts.pem,
		auditPolicy: []byte(policy),
	} {
		if err := writeFile(c.file(name), content); err != nil {
			return err
		}
	}
	if c.admin, err = c.ConfigFor("admin", "system:masters"); err != nil {
		return err
	}
	for user, config := range map[string]func() (*rest.Config, error){
		"admin":                   func() (*rest.Config, error) { return c.admin, nil },
		"kube-controller-manager": func() (*rest.Config, error) { return c.ConfigFor("system:kube-controller-manager") },
		"kube-scheduler":          func() (*rest.Config, error) { return c.ConfigFor("system:kube-scheduler") },
	} {
		config, err := config()
		if err != nil {
			return err
		}
		if err := WriteKubeconfig(c.kubeconfigOf(user), config); err != nil {
			return err
		}
	}
	return nil
}
