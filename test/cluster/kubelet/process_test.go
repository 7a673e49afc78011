package kubelet_test

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/wait"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
)

func (j *joined) configMap(t *testing.T, name string, values map[string]string) {
	t.Helper()
	if _, err := j.admin.CoreV1().ConfigMaps(j.namespace).Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Data: values,
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func named(name string) corev1.LocalObjectReference { return corev1.LocalObjectReference{Name: name} }

func field(path string) *corev1.EnvVarSource {
	return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
}

func TestAProcessGetsItsArgumentsAndVariablesAsAContainerDoes(t *testing.T) {
	t.Setenv("OF_THE_KUBELET", "must not be seen")
	j := joinWithProgram(t, kubelet.Options{})
	servePlugin(t, j.DevicePluginDir(), "gpu.sock", gpu, "GPU-a")
	j.expect(t, gpu, 1, 1)
	j.configMap(t, "settings", map[string]string{"ONE": "1", "TWO": "2"})
	if _, err := j.admin.CoreV1().Secrets(j.namespace).Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "hidden"}, Data: map[string][]byte{"word": []byte("open sesame")},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	yes := true
	pod := j.pod(t, "env", func(pod *corev1.Pod) {
		running(pod)
		wanting(gpu, 1)(pod)
		c := &pod.Spec.Containers[0]
		c.Command = []string{"/entrypoint", "serve"}
		c.Args = []string{"--node=$(NODE)", "--price=$$(NODE)", "--other=$(NOBODY)"}
		c.EnvFrom = []corev1.EnvFromSource{{Prefix: "SET_", ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: named("settings")}}}
		c.Env = append(c.Env,
			corev1.EnvVar{Name: "PLAIN", Value: "pod"},
			corev1.EnvVar{Name: "NODE", ValueFrom: field("spec.nodeName")},
			corev1.EnvVar{Name: "NAME", ValueFrom: field("metadata.name")},
			corev1.EnvVar{Name: "SPACE", ValueFrom: field("metadata.namespace")},
			corev1.EnvVar{Name: "ID", ValueFrom: field("metadata.uid")},
			corev1.EnvVar{Name: "IP", ValueFrom: field("status.podIP")},
			corev1.EnvVar{Name: "LABEL", ValueFrom: field("metadata.labels['app']")},
			corev1.EnvVar{Name: "BOTH", Value: "$(NAME).$(SPACE)"},
			corev1.EnvVar{Name: "KEY", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: named("settings"), Key: "TWO"}}},
			corev1.EnvVar{Name: "WORD", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: named("hidden"), Key: "word"}}},
			corev1.EnvVar{Name: "ABSENT", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: named("nowhere"), Key: "x", Optional: &yes}}},
		)
	})
	if diff := cmp.Diff("serve|--node="+j.options.Node+"|--price=$(NODE)|--other=$(NOBODY)", j.ask(t, "env", "/args")); diff != "" {
		t.Errorf("arguments (-want +got):\n%s", diff)
	}
	got := strings.Split(j.ask(t, "env", "/env"), "\n")
	for _, want := range []string{
		"FROM_IMAGE=yes", "PLAIN=pod", "SET_ONE=1", "SET_TWO=2", "NODE=" + j.options.Node, "NAME=env", "SPACE=" + j.namespace,
		"ID=" + string(pod.UID), "IP=127.0.0.1", "LABEL=env", "BOTH=env." + j.namespace, "KEY=2", "WORD=open sesame",
		"VISIBLE_DEVICES=GPU-a", "KUBERNETES_SERVICE_HOST=127.0.0.1", "HOSTNAME=env",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("variable %s is missing in:\n%s", want, strings.Join(got, "\n"))
		}
	}
	for _, v := range got {
		if strings.HasPrefix(v, "OF_THE_KUBELET") || strings.HasPrefix(v, "ABSENT") {
			t.Errorf("variable %s should not be there", v)
		}
	}
	text, err := os.ReadFile(filepath.Join(j.options.Dir, "logs", j.namespace+"_env_main.log"))
	if err != nil || !strings.Contains(string(text), "listening") {
		t.Errorf("log %q, %v", text, err)
	}
}

func TestAProcessReachesTheAPIServerAsItsServiceAccount(t *testing.T) {
	t.Parallel()
	j := joinWithProgram(t, kubelet.Options{})
	j.pod(t, "client", running)
	want := "system:serviceaccount:" + j.namespace + ":default client"
	if got := j.ask(t, "client", "/whoami"); got != want {
		t.Errorf("the API server sees %q, want %q", got, want)
	}
}

func TestFilesOfAConfigMapFollowItsChanges(t *testing.T) {
	t.Parallel()
	j := joinWithProgram(t, kubelet.Options{})
	j.configMap(t, "files", map[string]string{"a.yaml": "first", "b.yaml": "stays"})
	j.pod(t, "reader", func(pod *corev1.Pod) {
		running(pod)
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "files", VolumeSource: corev1.VolumeSource{
			ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: named("files")},
		}}, corev1.Volume{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
		pod.Spec.Containers[0].VolumeMounts = append(pod.Spec.Containers[0].VolumeMounts,
			corev1.VolumeMount{Name: "files", MountPath: "/etc/program"}, corev1.VolumeMount{Name: "scratch", MountPath: "/mnt/scratch"})
	})
	if got := j.ask(t, "reader", "/file?path=/etc/program/a.yaml"); got != "first" {
		t.Errorf("before the change: %q", got)
	}
	if _, err := j.admin.CoreV1().ConfigMaps(j.namespace).Update(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "files"}, Data: map[string]string{"a.yaml": "second", "c.yaml": "new"},
	}, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		text, err := j.tryAsk(ctx, t, "reader", "/file?path=/etc/program/c.yaml")
		return text == "new", ignoreStatus(err)
	})
	if err != nil {
		t.Fatalf("waiting for the new file: %v", err)
	}
	if got := j.ask(t, "reader", "/file?path=/etc/program/..data/a.yaml"); got != "second" {
		t.Errorf("after the change: %q", got)
	}
	if text, err := j.tryAsk(t.Context(), t, "reader", "/file?path=/etc/program/b.yaml"); err == nil {
		t.Errorf("a file that left the ConfigMap still says %q", text)
	}
}

func ignoreStatus(err error) error {
	if err != nil && strings.HasPrefix(err.Error(), "500") {
		return nil
	}
	return err
}

func TestContainersThatShareTheirProcessesSeeThoseOfThePodAlone(t *testing.T) {
	t.Parallel()
	j := joinWithProgram(t, kubelet.Options{})
	j.pod(t, "other", running)
	j.pod(t, "first", func(pod *corev1.Pod) {
		running(pod)
		yes := true
		pod.Spec.ShareProcessNamespace = &yes
		first := &pod.Spec.Containers[0]
		first.Command = []string{"one"}
		second := *first.DeepCopy()
		second.Name, second.Command = "second", []string{"two"}
		second.Env = []corev1.EnvVar{{Name: roleVariable, Value: "second"}}
		pod.Spec.Containers = append(pod.Spec.Containers, second)
	})
	_ = j.ask(t, "other", "/pid") // it runs
	want := []string{j.ask(t, "first", "/pid") + " one", j.ask(t, "second", "/pid") + " two"}
	slices.Sort(want)
	for _, role := range []string{"first", "second"} {
		seen := strings.Split(j.ask(t, role, "/processes"), "\n")
		slices.Sort(seen)
		if diff := cmp.Diff(want, seen); diff != "" {
			t.Errorf("processes that container %s sees (-want +got):\n%s", role, diff)
		}
	}
	j.ask(t, "second", "/exit?code=3")
	j.until(t, "first", func(p *corev1.Pod) bool { return isReady(p) && p.Status.ContainerStatuses[1].RestartCount == 1 })
	again := []string{j.ask(t, "first", "/pid") + " one", j.ask(t, "second", "/pid") + " two"}
	slices.Sort(again)
	seen := strings.Split(j.ask(t, "first", "/processes"), "\n")
	slices.Sort(seen)
	if diff := cmp.Diff(again, seen); diff != "" {
		t.Errorf("processes after one was started again (-want +got):\n%s", diff)
	}
}

func TestAProcessThatEndsIsStartedAgain(t *testing.T) {
	t.Parallel()
	j := joinWithProgram(t, kubelet.Options{})
	j.pod(t, "crash", running)
	j.ask(t, "crash", "/exit?code=3")
	pod := j.until(t, "crash", func(p *corev1.Pod) bool { return isReady(p) && p.Status.ContainerStatuses[0].RestartCount == 1 })
	last := pod.Status.ContainerStatuses[0].LastTerminationState.Terminated
	if last == nil || last.ExitCode != 3 || last.Reason != "Error" {
		t.Errorf("last state %+v, want exit code 3", last)
	}
	j.ask(t, "crash", "/exit?code=0")
	j.until(t, "crash", func(p *corev1.Pod) bool { return isReady(p) && p.Status.ContainerStatuses[0].RestartCount == 2 })
}

func TestAPodThatIsNotRestartedEndsWithItsProcess(t *testing.T) {
	t.Parallel()
	j := joinWithProgram(t, kubelet.Options{})
	for name, c := range map[string]struct {
		code  string
		phase corev1.PodPhase
	}{"good": {"0", corev1.PodSucceeded}, "bad": {"4", corev1.PodFailed}} {
		j.pod(t, name, func(pod *corev1.Pod) {
			running(pod)
			pod.Spec.RestartPolicy = corev1.RestartPolicyNever
		})
		j.ask(t, name, "/exit?code="+c.code)
		pod := j.until(t, name, func(p *corev1.Pod) bool { return p.Status.Phase == c.phase })
		if code := pod.Status.ContainerStatuses[0].State.Terminated.ExitCode; strconv.Itoa(int(code)) != c.code {
			t.Errorf("%s: exit code %d, want %s", name, code, c.code)
		}
	}
}

func TestADeletedPodsProcessIsTerminatedAndThenKilled(t *testing.T) {
	t.Parallel()
	j := joinWithProgram(t, kubelet.Options{})
	for name, c := range map[string]struct {
		ignores string
		grace   int64
		code    int32
	}{"polite": {"", 30, 143}, "stubborn": {"yes", 1, 137}} {
		j.pod(t, name, func(pod *corev1.Pod) {
			running(pod)
			pod.Finalizers = []string{"example.com/keep"} // to see how it ended
			pod.Spec.Containers[0].Env = append(pod.Spec.Containers[0].Env, corev1.EnvVar{Name: "IGNORE_TERM", Value: c.ignores})
			pod.Spec.TerminationGracePeriodSeconds = &c.grace
		})
		j.ask(t, name, "/pid")
		j.remove(t, name, metav1.DeleteOptions{})
		pod := j.until(t, name, func(p *corev1.Pod) bool { return p.Status.ContainerStatuses[0].State.Terminated != nil })
		if code := pod.Status.ContainerStatuses[0].State.Terminated.ExitCode; code != c.code {
			t.Errorf("%s: exit code %d, want %d", name, code, c.code)
		}
	}
}

func TestReadinessFollowsTheProbe(t *testing.T) {
	t.Parallel()
	j := joinWithProgram(t, kubelet.Options{})
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().(*net.TCPAddr)
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	j.pod(t, "probed", func(pod *corev1.Pod) {
		running(pod)
		c := &pod.Spec.Containers[0]
		c.Env = append(c.Env, corev1.EnvVar{Name: "LISTEN", Value: address.String()})
		c.Ports = []corev1.ContainerPort{{Name: "health", ContainerPort: int32(address.Port)}}
		c.ReadinessProbe = &corev1.Probe{PeriodSeconds: 1, FailureThreshold: 1, ProbeHandler: corev1.ProbeHandler{
			HTTPGet: &corev1.HTTPGetAction{Path: "/ready", Port: intstr.FromString("health")},
		}}
	})
	j.until(t, "probed", isReady)
	j.ask(t, "probed", "/unready")
	j.until(t, "probed", func(p *corev1.Pod) bool { return !isReady(p) && p.Status.ContainerStatuses[0].State.Running != nil })
}

// A program that does not come back counts as one that fails.
func TestAContainerIsStartedAnewWhoseProbeFails(t *testing.T) {
	t.Parallel()
	j := joinWithProgram(t, kubelet.Options{})
	sick := filepath.Join(t.TempDir(), "sick")
	for _, row := range []struct{ name, script string }{{"fails", "! test -e " + sick}, {"hangs", "test -e " + sick + " && sleep 100 || true"}} {
		if err := os.RemoveAll(sick); err != nil {
			t.Fatal(err)
		}
		j.pod(t, row.name, func(pod *corev1.Pod) {
			running(pod)
			pod.Spec.Containers[0].LivenessProbe = &corev1.Probe{PeriodSeconds: 1, FailureThreshold: 2, TimeoutSeconds: 1, ProbeHandler: corev1.ProbeHandler{
				Exec: &corev1.ExecAction{Command: []string{"/bin/sh", "-c", row.script}},
			}}
		})
		j.until(t, row.name, isReady)
		if err := os.WriteFile(sick, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		j.until(t, row.name, func(p *corev1.Pod) bool { return p.Status.ContainerStatuses[0].RestartCount > 0 })
	}
}

func TestAnImageThatCannotStartIsReportedAndTriedAgain(t *testing.T) {
	t.Parallel()
	j := joinWithProgram(t, kubelet.Options{})
	j.pod(t, "early", func(pod *corev1.Pod) {
		running(pod)
		pod.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: named("later")}}}
	})
	pod := j.until(t, "early", func(p *corev1.Pod) bool {
		return len(p.Status.ContainerStatuses) == 1 && p.Status.ContainerStatuses[0].State.Waiting != nil &&
			p.Status.ContainerStatuses[0].State.Waiting.Reason == "CreateContainerConfigError"
	})
	if message := pod.Status.ContainerStatuses[0].State.Waiting.Message; !strings.Contains(message, "later") {
		t.Errorf("message %q does not name the ConfigMap", message)
	}
	j.configMap(t, "later", nil)
	j.until(t, "early", isReady)
}

func TestAPodWhoseInitContainerFailsNeverRuns(t *testing.T) {
	t.Parallel()
	j := joinWithProgram(t, kubelet.Options{})
	j.pod(t, "init", func(pod *corev1.Pod) {
		running(pod)
		pod.Spec.RestartPolicy = corev1.RestartPolicyNever
		pod.Spec.InitContainers, pod.Spec.Containers = pod.Spec.Containers, []corev1.Container{{Name: "after", Image: "example.com/after"}}
	})
	j.ask(t, "init", "/exit?code=5")
	pod := j.until(t, "init", hasFailed)
	if pod.Status.InitContainerStatuses[0].State.Terminated.ExitCode != 5 || pod.Status.ContainerStatuses[0].State.Waiting == nil {
		t.Errorf("status after a failed init container: %+v", pod.Status)
	}
}

func TestTokensAreRenewedBeforeTheyExpire(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	box, err := binaries.Builder{}.Tool(t.Context(), "./test/sandbox/cmd/sandbox")
	if err != nil {
		t.Fatal(err)
	}
	dir, issued, now := shortDir(t), 0, time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)
	asked := make(chan int, 10)
	issue := &clienttesting.SimpleReactor{Verb: "create", Resource: "serviceaccounts", Reaction: func(clienttesting.Action) (bool, runtime.Object, error) {
		issued++
		asked <- issued
		return true, &authenticationv1.TokenRequest{Status: authenticationv1.TokenRequestStatus{
			Token: "token-" + strconv.Itoa(issued), ExpirationTimestamp: metav1.NewTime(now.Add(time.Duration(issued) * time.Hour)),
		}}, nil
	}}
	l := startLone(t, kubelet.Options{Dir: dir, SandboxBinary: box, Images: map[string]kubelet.Image{programImage: {Path: self}}}, issue)
	l.pod(t, "holder", func(pod *corev1.Pod) {
		pod.Spec.Volumes = []corev1.Volume{{Name: "token", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
			Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}}},
		}}}}
		running(pod)
	})
	l.until(t, "holder", isReady)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if got := <-asked; got != 1 {
		t.Fatalf("%d tokens were asked for", got)
	}
	l.clock.Step(47 * time.Minute) // not yet: the token is good for 60
	if len(asked) != 0 {
		t.Error("a token was renewed after 47 of its 60 minutes")
	}
	l.clock.Step(2 * time.Minute)
	select {
	case <-asked:
	case <-ctx.Done():
		t.Fatal("the token was not renewed")
	}
	file := filepath.Join(dir, "pods", "uid-holder", "volumes", "token", "token")
	if err := wait.PollUntilContextCancel(ctx, 10*time.Millisecond, true, func(context.Context) (bool, error) {
		text, err := os.ReadFile(file)
		return string(text) == "token-2", err
	}); err != nil {
		t.Errorf("waiting for the second token in its file: %v", err)
	}
}

// The command is tried as people run it, and then killed: nothing of the node may outlive it.
func TestProcessesDieWithTheKubeletThatRunsThem(t *testing.T) {
	j := joinWithProgram(t, kubelet.Options{})
	j.Stop() // the command takes its place
	command, err := binaries.Builder{}.Tool(t.Context(), "./test/cluster/kubelet/cmd/kubelet")
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig, config := filepath.Join(j.options.Dir, "kubeconfig"), filepath.Join(j.options.Dir, "config.yaml")
	if err := cluster.WriteKubeconfig(kubeconfig, j.options.Config); err != nil {
		t.Fatal(err)
	}
	text := "images:\n  " + programImage + ":\n    path: " + j.options.Images[programImage].Path + "\n"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	node := exec.CommandContext(t.Context(), command, "--node", j.options.Node, "--dir", j.options.Dir,
		"--kubeconfig", kubeconfig, "--sandbox", j.options.SandboxBinary, "--config", config)
	node.Stdout, node.Stderr = os.Stdout, os.Stderr
	if err := node.Start(); err != nil {
		t.Fatal(err)
	}
	j.pod(t, "child", running)
	pid, err := strconv.Atoi(j.ask(t, "child", "/pid"))
	if err != nil {
		t.Fatal(err)
	}
	watched, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(watched) // nothing was written
	if err := node.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = node.Wait() // it was killed
	ready, err := unix.Poll([]unix.PollFd{{Fd: int32(watched), Events: unix.POLLIN}}, 10_000)
	if err != nil || ready != 1 {
		t.Errorf("process %d outlives its kubelet by 10 s (%v)", pid, err)
		_ = unix.Kill(pid, unix.SIGKILL) // it may end just now
	}
}
