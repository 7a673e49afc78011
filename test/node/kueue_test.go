package node_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// kueueConfig is what Kueue's manifests configure, but for certificates, leases and ports, with Jobs alone.
const kueueConfig = `apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
namespace: kueue-system
health: {healthProbeBindAddress: %[1]q}
metrics: {bindAddress: %[4]q, enableClusterQueueResources: true}
webhook: {host: 127.0.0.1, port: %[2]d, certDir: %[3]q}
leaderElection: {leaderElect: false}
internalCertManagement: {enable: false}
featureGates: {VisibilityOnDemand: false}
clientConnection: {qps: 300, burst: 500}
integrations: {frameworks: [batch/job]}
`

// kueueManager is Kueue's manager as it runs.
type kueueManager struct {
	ended   <-chan struct{} // closed once it has
	metrics rest.Interface  // by which Prometheus asks for them
}

// startKueue installs Kueue's kinds and webhooks, and runs its manager.
func startKueue(t *testing.T, c *cluster.Cluster) (m kueueManager) {
	t.Helper()
	programs, err := binaries.Builder{Log: os.Stderr}.Kueue(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	manifests := filepath.Join(pinnedModule(t, "kueue", "sigs.k8s.io/kueue"), "config", "components")
	for _, args := range [][]string{
		{"create", "namespace", "kueue-system"},
		{"create", "-f", filepath.Join(manifests, "crd", "bases")}, // of the pinned module: its files never change
		{"wait", "--for=condition=Established", "--timeout=2m", "crd", "--all"},
	} {
		if _, err := c.RunKubectl(t.Context(), args...); err != nil {
			t.Fatal(err)
		}
	}

	dir := t.TempDir()
	pem, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ports := freePorts(t, 3)
	health, webhooks, metrics := fmt.Sprintf("127.0.0.1:%d", ports[0]), fmt.Sprintf("127.0.0.1:%d", ports[1]), fmt.Sprintf("127.0.0.1:%d", ports[2])
	config := filepath.Join(dir, "config.yaml")
	for file, text := range map[string][]byte{
		filepath.Join(dir, "tls.crt"): pem, filepath.Join(dir, "tls.key"): key, config: fmt.Appendf(nil, kueueConfig, health, ports[1], dir, metrics),
	} {
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// Whoever asks for metrics needs a token, and the right that the account of the component for Prometheus has.
	if err := c.Apply(t.Context(), filepath.Join("..", "..", "deploy", "components", "prometheus", "rbac.yaml")); err != nil {
		t.Fatal(err)
	}
	reader, err := c.ServiceAccountConfig(t.Context(), "gpuslice", "gpuslice-metrics")
	if err != nil {
		t.Fatal(err)
	}
	reader.Host, reader.CAData = "https://"+metrics, pem
	client, err := kubernetes.NewForConfig(reader)
	if err != nil {
		t.Fatal(err)
	}
	m.metrics = client.CoreV1().RESTClient()
	// It looks for a certificate of its metrics at this path.
	m.ended = startManager(t, "Kueue", health, sandbox.Command(t.Context(), common.parts.Sandbox,
		sandbox.Options{Mounts: []sandbox.Mount{{Source: dir, Target: "/etc/kueue/metrics/certs"}}, Env: []string{"KUBECONFIG=" + c.AdminKubeconfig()}},
		filepath.Join(programs, "kueue"), "--config", config))
	installWebhooks(t, c, filepath.Join(manifests, "webhook", "manifests.yaml"), "https://"+webhooks, pem)
	return m
}

// startManager runs a program with controllers until the test ends, and waits until it is ready. health is where it says so. The channel is closed once the
// program has ended.
func startManager(t *testing.T, name, health string, manager *exec.Cmd) <-chan struct{} {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	manager.Stdout, manager.Stderr = log, log
	manager.SysProcAttr.Pdeathsig = syscall.SIGKILL // with a test that is ended from outside
	started, over := make(chan error), make(chan struct{})
	go func() {
		// The kernel sends that signal when the thread that started it ends, and other tests end threads: this goroutine keeps one until then.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := manager.Start()
		started <- err
		if err == nil {
			_ = manager.Wait() // the log says why
		}
		close(over)
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = manager.Process.Signal(syscall.SIGKILL)
		<-over
		if text, err := os.ReadFile(log.Name()); t.Failed() && err == nil {
			t.Logf("%s's log ends so:\n%s", name, text[max(0, len(text)-8<<10):])
		}
		_ = log.Close()
	})
	ready := func(ctx context.Context) (bool, error) {
		select {
		case <-over:
			return false, errors.New("it has ended")
		default:
			return answersWell(ctx, "http://"+health+"/readyz"), nil
		}
	}
	if err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, patience, true, ready); err != nil {
		t.Fatalf("waiting for %s: %v", name, err)
	}
	return over
}

func answersWell(ctx context.Context, url string) bool {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return false
	}
	response, err := http.DefaultClient.Do(request)
	return err == nil && response.Body.Close() == nil && response.StatusCode == http.StatusOK
}

// installWebhooks has the API server ask Kueue about its own kinds and about Jobs. The others belong to integrations that are off.
func installWebhooks(t *testing.T, c *cluster.Cluster, file, url string, ca []byte) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	client := clustertest.ClientOf(t, c).AdmissionregistrationV1()
	longest := int32(30) // seconds that an API server waits for a webhook: a machine may be busy with much else
	reach := func(of *admissionv1.WebhookClientConfig, timeout **int32) {
		at := url + *of.Service.Path
		*of, *timeout = admissionv1.WebhookClientConfig{URL: &at, CABundle: ca}, &longest
	}
	// With the manager gone, no Job could be deleted any more, nor the namespace that has one.
	gone := func(remove func(context.Context, string, metav1.DeleteOptions) error, name string) {
		t.Cleanup(func() {
			if err := remove(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil {
				t.Errorf("removing Kueue's webhooks: %v", err)
			}
		})
	}
	foreign := func(rules []admissionv1.RuleWithOperations) bool {
		return slices.ContainsFunc(rules, func(r admissionv1.RuleWithOperations) bool {
			return !slices.Contains(r.APIGroups, "kueue.x-k8s.io") && !slices.Contains(r.APIGroups, "batch")
		})
	}
	for part := range bytes.SplitSeq(text, []byte("\n---\n")) {
		if !bytes.Contains(part, []byte("kind:")) {
			continue
		}
		var mutating admissionv1.MutatingWebhookConfiguration
		var validating admissionv1.ValidatingWebhookConfiguration
		if bytes.Contains(part, []byte("kind: Mutating")) {
			if err = yaml.Unmarshal(part, &mutating); err == nil {
				mutating.Webhooks = slices.DeleteFunc(mutating.Webhooks, func(w admissionv1.MutatingWebhook) bool { return foreign(w.Rules) })
				for i := range mutating.Webhooks {
					reach(&mutating.Webhooks[i].ClientConfig, &mutating.Webhooks[i].TimeoutSeconds)
				}
				_, err = client.MutatingWebhookConfigurations().Create(t.Context(), &mutating, metav1.CreateOptions{})
				gone(client.MutatingWebhookConfigurations().Delete, mutating.Name)
			}
		} else if err = yaml.Unmarshal(part, &validating); err == nil {
			validating.Webhooks = slices.DeleteFunc(validating.Webhooks, func(w admissionv1.ValidatingWebhook) bool { return foreign(w.Rules) })
			for i := range validating.Webhooks {
				reach(&validating.Webhooks[i].ClientConfig, &validating.Webhooks[i].TimeoutSeconds)
			}
			_, err = client.ValidatingWebhookConfigurations().Create(t.Context(), &validating, metav1.CreateOptions{})
			gone(client.ValidatingWebhookConfigurations().Delete, validating.Name)
		}
		if err != nil {
			t.Fatalf("installing Kueue's webhooks: %v", err)
		}
	}
}

// pinnedModule is the folder of a module at the version that a module of the tests pins.
func pinnedModule(t *testing.T, by, path string) string {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", path)
	list.Dir = filepath.Join("..", by)
	out, err := list.Output()
	if err != nil {
		t.Fatalf("asking the Go command for %s: %v", path, err)
	}
	return strings.TrimSpace(string(out))
}

// freePorts are different ones of loopback that no program has at the moment.
func freePorts(t *testing.T, n int) (ports []int) {
	t.Helper()
	for range n {
		listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close() // once all are known, so that none is given twice
		address, ok := listener.Addr().(*net.TCPAddr)
		if !ok {
			t.Fatalf("the listener has an address of type %T", listener.Addr())
		}
		ports = append(ports, address.Port)
	}
	return ports
}
