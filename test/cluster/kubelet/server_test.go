package kubelet_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/creack/pty"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
)

// By kubectl, so through the API server and its own protocols.
func TestLogsExecAndPortForward(t *testing.T) {
	t.Parallel()
	box, err := binaries.Builder{Log: os.Stderr}.Tool(t.Context(), "./test/sandbox/cmd/sandbox")
	if err != nil {
		t.Fatal(err)
	}
	j := join(t, kubelet.Options{SandboxBinary: box, Images: map[string]kubelet.Image{
		"shell": {
			Path: "/bin/sh", Env: []string{"PATH=/usr/bin:/bin", "OF_IMAGE=yes"},
			Exec:  map[string]kubelet.Program{"/usr/bin/says": {Path: "/bin/echo", Args: []string{"by", "the", "image"}}},
			Ports: map[int32]int32{80: served(t)},
		},
		"shell -c": {Path: "/bin/sh", Args: []string{"entry", "by its arguments"}},
	}})
	sleeps := "for i in 1 2 3; do echo line $i; done; exec sleep 1000"
	j.pod(t, "real", func(p *corev1.Pod) {
		p.Spec.Containers[0].Image, p.Spec.Containers[0].Command = "shell", []string{"sh", "-c", sleeps}
	})
	j.pod(t, "by-args", func(p *corev1.Pod) {
		p.Spec.Containers[0].Image, p.Spec.Containers[0].Args = "shell", []string{"-c", "echo $1; exec sleep 1000"}
	})
	j.pod(t, "simulated", nil)
	for _, name := range []string{"real", "by-args", "simulated"} {
		j.until(t, name, isReady)
	}
	t.Run("logs and exec", func(t *testing.T) { j.answers(t) })
	t.Run("a terminal", func(t *testing.T) { j.terminal(t) })
	t.Run("a port", func(t *testing.T) { j.port(t) })
	t.Run("others are not let in", func(t *testing.T) { j.closed(t) })
}

// served is a port of this machine that says "served".
func served(t *testing.T) (port int32) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(listener.Addr().String(), "127.0.0.1:%d", &port); err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "served") })}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	return port
}

// kubectl is a command in the test's namespace.
func (j *joined) kubectl(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	plane := clustertest.Start(t)
	cmd := exec.CommandContext(t.Context(), plane.Kubectl(), append([]string{"--kubeconfig", plane.AdminKubeconfig(), "-n", j.namespace}, args...)...)
	cmd.Env = append(os.Environ(), "KUBERC=off")
	return cmd
}

func (j *joined) answers(t *testing.T) {
	t.Helper()
	for _, row := range []struct {
		args []string
		in   string
		want string
		code int
	}{
		{args: []string{"logs", "real"}, want: "line 1\nline 2\nline 3\n"},
		{args: []string{"logs", "real", "--tail=2"}, want: "line 2\nline 3\n"},
		{args: []string{"logs", "real", "--tail=0"}, want: ""},
		{args: []string{"logs", "real", "--tail=9"}, want: "line 1\nline 2\nline 3\n"},
		{args: []string{"logs", "real", "--limit-bytes=4"}, want: "line"},
		{args: []string{"logs", "real", "--since=1h"}, want: "without times", code: 1},
		{args: []string{"logs", "by-args"}, want: "by its arguments\n"},
		{args: []string{"logs", "simulated"}, want: "this container is simulated: no process runs in it"},
		{args: []string{"exec", "real", "--", "sh", "-c", "echo $OF_IMAGE $HOSTNAME"}, want: "yes real\n"},
		{args: []string{"exec", "-i", "real", "--", "cat"}, in: "what is given", want: "what is given"},
		{args: []string{"exec", "real", "--", "says", "said"}, want: "said by the image\n"},
		{args: []string{"exec", "real", "--", "sh", "-c", "echo out; echo err >&2; exit 7"}, want: "out\nerr\n", code: 7},
		{args: []string{"exec", "real", "--", "no-such-program"}, want: "executable file not found", code: 1},
		{args: []string{"exec", "simulated", "--", "true"}, want: "this container is simulated", code: 1},
	} {
		t.Run(strings.Join(row.args, " "), func(t *testing.T) {
			cmd := j.kubectl(t, row.args...)
			var out, errs strings.Builder // apart: nothing orders what comes by the two
			cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(row.in), &out, &errs
			err := cmd.Run()
			said := out.String() + errs.String()
			if code := cmd.ProcessState.ExitCode(); code != row.code || !strings.Contains(said, row.want) || row.code == 0 && strings.HasSuffix(row.want, "\n") && said != row.want {
				t.Errorf("exit code %d (%v), want %d, and\n%s\nwant\n%s", code, err, row.code, said, row.want)
			}
		})
	}
}

func (j *joined) terminal(t *testing.T) {
	t.Helper()
	cmd := j.kubectl(t, "exec", "-it", "real", "--", "sh", "-c", "stty size; tty")
	terminal, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 33, Cols: 77})
	if err != nil {
		t.Fatal(err)
	}
	said, _ := io.ReadAll(terminal) // ends with EIO
	if err := cmd.Wait(); err != nil || !strings.Contains(string(said), "/dev/pts/") {
		t.Errorf("%v: %s", err, said)
	}
}

func (j *joined) port(t *testing.T) {
	t.Helper()
	forward := j.kubectl(t, "port-forward", "pod/real", ":80")
	said, err := forward.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := forward.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = forward.Process.Kill(); _ = forward.Wait() }()
	var port int
	if _, err := fmt.Fscanf(said, "Forwarding from 127.0.0.1:%d -> 80", &port); err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d", port), nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	var text string
	if _, err := fmt.Fscan(answer.Body, &text); err != nil || text != "served" {
		t.Errorf("the port says %q, %v", text, err)
	}
}

func (j *joined) closed(t *testing.T) {
	t.Helper()
	object, err := j.admin.CoreV1().Nodes().Get(context.WithoutCancel(t.Context()), j.options.Node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for name, config := range map[string]*rest.Config{"a node": j.options.Config, "no one": {}} {
		c := rest.Config{Host: fmt.Sprintf("https://127.0.0.1:%d", object.Status.DaemonEndpoints.KubeletEndpoint.Port)}
		c.CertData, c.KeyData, c.Insecure = config.CertData, config.KeyData, true
		client, err := rest.HTTPClientFor(&c)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := client.Get(c.Host + "/containerLogs/" + j.namespace + "/real/main")
		if err == nil && answer.StatusCode != http.StatusForbidden {
			t.Errorf("%s: %s", name, answer.Status)
		}
		if err == nil {
			_ = answer.Body.Close()
		}
	}
}
