package kubelet_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
)

// programImage is the image whose program is this test binary itself, in the role below.
const programImage = "example.com/program"

const roleVariable = "KUBELET_TEST_ROLE"

func runsAsProgram() bool { return os.Getenv(roleVariable) != "" }

// program answers questions about itself over a socket in a directory of the host, so that a test sees what a container
// would.
func program() {
	if os.Getenv("IGNORE_TERM") != "" {
		signal.Ignore(syscall.SIGTERM)
	}
	var unready atomic.Bool
	mux := http.NewServeMux()
	answer := func(path string, f func(*http.Request) (string, error)) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			text, err := f(r)
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			_, _ = io.WriteString(w, text)
		})
	}
	answer("/args", func(*http.Request) (string, error) { return strings.Join(os.Args[1:], "|"), nil })
	answer("/env", func(*http.Request) (string, error) { return strings.Join(os.Environ(), "\n"), nil })
	answer("/pid", func(*http.Request) (string, error) { return strconv.Itoa(os.Getpid()), nil })
	answer("/file", func(r *http.Request) (string, error) {
		text, err := os.ReadFile(r.FormValue("path"))
		return string(text), err
	})
	answer("/processes", func(*http.Request) (string, error) { return processes() })
	answer("/whoami", func(r *http.Request) (string, error) { return whoAmI(r.Context()) })
	answer("/exit", func(r *http.Request) (string, error) {
		code, err := strconv.Atoi(r.FormValue("code"))
		if err == nil {
			os.Exit(code)
		}
		return "", err
	})
	answer("/unready", func(*http.Request) (string, error) { unready.Store(true); return "", nil })
	answer("/ready", func(*http.Request) (string, error) {
		if unready.Load() {
			return "", fmt.Errorf("not ready")
		}
		return "", nil
	})
	if address := os.Getenv("LISTEN"); address != "" {
		listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", address)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		go func() { _ = http.Serve(listener, mux) }()
	}
	socket := filepath.Join("/run/program", os.Getenv(roleVariable))
	_ = os.Remove(socket) // of the run before
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", socket)
	if err == nil {
		fmt.Println("listening")
		err = http.Serve(listener, mux)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// processes are the pids in /proc, with the names by which the programs were started.
func processes() (string, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return "", err
	}
	var lines []string
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		cmdline, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err != nil {
			return "", err
		}
		name, _, _ := strings.Cut(string(cmdline), "\x00")
		lines = append(lines, e.Name()+" "+name)
	}
	return strings.Join(lines, "\n"), nil
}

// whoAmI asks the API server, with what a pod finds at the usual place.
func whoAmI(ctx context.Context) (string, error) {
	config, err := rest.InClusterConfig()
	if err != nil {
		return "", err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return "", err
	}
	review, err := client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	user := review.Status.UserInfo
	return user.Username + " " + strings.Join(user.Extra["authentication.kubernetes.io/pod-name"], ","), nil
}

// joinWithProgram joins a node that runs the program.
func joinWithProgram(t *testing.T, o kubelet.Options) *joined {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	o.SandboxBinary, err = binaries.Builder{}.Tool(t.Context(), "./test/sandbox/cmd/sandbox")
	if err != nil {
		t.Fatal(err)
	}
	o.Images = map[string]kubelet.Image{programImage: {Path: self, Env: []string{"FROM_IMAGE=yes", "PLAIN=image"}, Exec: map[string]kubelet.Program{"/bin/sh": {Path: "/bin/sh"}}}}
	return join(t, o)
}

// running turns a pod into one that runs the program.
func running(pod *corev1.Pod) {
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "run", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/run/program"}}})
	c := &pod.Spec.Containers[0]
	c.Image = programImage
	c.Env = append(c.Env, corev1.EnvVar{Name: roleVariable, Value: pod.Name})
	c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "run", MountPath: "/run/program"})
}

// ask puts a question to the program of the pod, as soon as it listens.
func (j *joined) ask(t *testing.T, pod, question string) string {
	t.Helper()
	text, err := j.tryAsk(t.Context(), t, pod, question)
	if err != nil {
		t.Fatalf("asking the program of %s for %s: %v", pod, question, err)
	}
	return text
}

func (j *joined) tryAsk(ctx context.Context, t *testing.T, pod, question string) (string, error) {
	t.Helper()
	socket := filepath.Join(j.options.Dir, "root/run/program", pod)
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var text string
	err := wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://program"+question, nil)
		if err != nil {
			return false, err
		}
		answer, err := client.Do(request)
		if err != nil {
			return strings.HasPrefix(question, "/exit") && strings.Contains(err.Error(), "EOF"), nil // not yet listening
		}
		defer answer.Body.Close() // read to its end
		body, err := io.ReadAll(answer.Body)
		if text = string(body); err == nil && answer.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s: %s", answer.Status, text)
		}
		return err == nil, err
	})
	return text, err
}
