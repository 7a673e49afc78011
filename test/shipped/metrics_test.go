package shipped_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/kustomize"
)

// The agent runs with the account and the rights of the component, and asks a real API server about the tokens.
func TestMetricsAreForThoseWhomTheAPIServerNames(t *testing.T) {
	t.Parallel()
	c, client := clustertest.Start(t), clustertest.Client(t)
	applyRights(t, c)
	var prometheus string
	clustertest.Eventually(t, "the token in the Secret", func(ctx context.Context) (bool, error) {
		secret, err := client.CoreV1().Secrets("gpuslice").Get(ctx, "gpuslice-metrics-token", metav1.GetOptions{})
		if err == nil {
			prometheus = string(secret.Data["token"])
		}
		return prometheus != "", err
	})
	own, err := c.ServiceAccountConfig(t.Context(), "gpuslice", "gpuslice-agent")
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := cluster.WriteKubeconfig(kubeconfig, own); err != nil {
		t.Fatal(err)
	}
	address := serving(t, "--kubeconfig", kubeconfig, "--node", clustertest.Node(t).Name)

	if status, text := scrape(t.Context(), t, "https://"+address, prometheus); status != http.StatusOK {
		t.Errorf("Prometheus gets %d: %s", status, text)
	} else {
		describedMetrics(t, text)
	}
	for token, want := range map[string]int{
		own.BearerToken: http.StatusForbidden, "": http.StatusUnauthorized, "made-up": http.StatusUnauthorized,
		prometheus[:len(prometheus)-4] + "AAAA": http.StatusUnauthorized,
	} {
		if status, text := scrape(t.Context(), t, "https://"+address, token); status != want || strings.Contains(text, "gpuslice_") {
			t.Errorf("the token %.10q… gets %d, want %d: %s", token, status, want, text)
		}
	}
	if status, text := scrape(t.Context(), t, "http://"+address, prometheus); status == http.StatusOK || strings.Contains(text, "gpuslice_") {
		t.Errorf("in plain text it answers %d: %s", status, text)
	}

	// A right that is taken away: the answer is good for a minute, so there is no need to ask often.
	if err := client.RbacV1().ClusterRoleBindings().Delete(t.Context(), "gpuslice-metrics-reader", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := wait.PollUntilContextTimeout(t.Context(), 2*time.Second, 5*time.Minute, true, func(ctx context.Context) (bool, error) {
		status, _ := scrape(ctx, t, "https://"+address, prometheus)
		return status == http.StatusForbidden, nil
	}); err != nil {
		t.Errorf("one without the right is answered: %v", err)
	}
}

// applyRights gives the cluster the accounts and rights of the base and the component.
func applyRights(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	var rights []string
	for _, doc := range documents(t, build(t, kustomize.Over("base", "prometheus"))) {
		if regexp.MustCompile(`(?m)^kind: (Namespace|ServiceAccount|Secret|(Cluster)?Role(Binding)?)$`).Match(doc) {
			rights = append(rights, string(doc))
		}
	}
	run := exec.CommandContext(t.Context(), c.Kubectl(), "--kubeconfig", c.AdminKubeconfig(), "apply", "-f", "-")
	run.Stdin = strings.NewReader(strings.Join(rights, "\n---\n"))
	if said, err := run.CombinedOutput(); err != nil || len(rights) < 10 {
		t.Fatalf("applying %d objects: %v\n%s", len(rights), err, said)
	}
}

// describedMetrics fails the test if the agent reports what the queries are not held to.
func describedMetrics(t *testing.T, text string) {
	t.Helper()
	known := descriptors()
	names := regexp.MustCompile(`(?m)^(gpuslice_\w+)`).FindAllString(text, -1)
	for _, name := range slices.Compact(names) {
		if _, described := known[name]; !described {
			t.Errorf("it exports %s, which no descriptor has", name)
		}
	}
	if len(names) < 3 {
		t.Errorf("the metrics are:\n%s", text)
	}
}

// serving runs an agent that serves metrics to those who have the right, and returns where.
func serving(t *testing.T, flags ...string) (address string) {
	t.Helper()
	agent, err := binaries.Builder{Log: os.Stderr}.Tool(t.Context(), "./cmd/gpuslice-agent")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	run := exec.CommandContext(t.Context(), agent, append([]string{
		"run", "--metrics-address=127.0.0.1:0", "--metrics-secure", "--driver-root=" + dir, "--dev-root=" + dir, "--lock=" + dir + "/lock", "--state-dir=" + dir,
		"--plugin-config=" + dir + "/plugin", "--proc=" + dir, "--pci-devices=" + dir, "--system-bus=unix:path=" + dir + "/bus", "--pod-resources=" + dir + "/kubelet",
	}, flags...)...)
	run.Cancel = func() error { return run.Process.Signal(syscall.SIGTERM) }
	log, err := run.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = run.Wait() }) // the test's context has ended it by then
	lines := bufio.NewScanner(log)
	var said strings.Builder
	for lines.Scan() {
		var entry struct{ Msg, Address string }
		if err := json.Unmarshal(lines.Bytes(), &entry); err == nil && entry.Address != "" {
			go func() { _, _ = io.Copy(io.Discard, log) }() // a pipe that no one reads would hold up the agent; it ends when the agent does
			return entry.Address
		}
		fmt.Fprintln(&said, lines.Text())
	}
	t.Fatalf("the agent serves no metrics:\n%s", said.String())
	return ""
}

// scrape asks for metrics as Prometheus does, and returns the status and the text of the answer; 0 and the error where there is none.
func scrape(ctx context.Context, t *testing.T, address, token string) (int, string) {
	t.Helper()
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // the certificate is the agent's own, as the PodMonitor has it
	}}
	defer client.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := client.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err.Error()
	}
	return response.StatusCode, string(text)
}
