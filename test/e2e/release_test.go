package e2e_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpuslice/gpuslice/config"
)

// registryAddress is on the machine's own loopback.
const registryAddress = "127.0.0.1:5000"

// makeRelease makes what "make release" makes, for this machine alone, and the program that pushes it.
func makeRelease(ctx context.Context) error {
	root, err := filepath.Abs("../..")
	if err != nil {
		return err
	}
	programs.Release = filepath.Join(root, "bin", "e2e", "release")
	if err := os.RemoveAll(programs.Release); err != nil {
		return err
	}
	release := exec.CommandContext(ctx, "go", "run", "./test/release", "-version", imageVersion, "-image", registryAddress+"/gpuslice/gpuslice-agent",
		"-images", runtime.GOARCH, "-platforms", "linux/"+runtime.GOARCH, "-out", programs.Release)
	release.Dir, release.Stdout, release.Stderr = root, os.Stderr, os.Stderr
	if err := release.Run(); err != nil {
		return fmt.Errorf("making a release: %w", err)
	}
	crane := exec.CommandContext(ctx, "go", "tool", "-n", "-modfile=test/image/go.mod", "crane")
	crane.Dir, crane.Stderr = root, os.Stderr
	path, err := crane.Output()
	if err != nil {
		return fmt.Errorf("building crane: %w", err)
	}
	programs.Crane = strings.TrimSpace(string(path))
	return nil
}

// What deploy/README begins with: one command for the agents and NVIDIA's plugin, of an image that containerd pulls by its digest, and one for
// kubectl's plugin, which here is unpacked.
func TestAReleaseIsInstalledByTwoCommands(t *testing.T) {
	if testing.Short() {
		t.Skip("a release is made at full length (without -short) alone")
	}
	i := bare(t, "gpus: [{model: H100-80GB, count: 2}]")
	i.servesTheRelease()
	i.did("")
	file := filepath.Join(programs.Release, "install-device-plugin.yaml")
	t.Cleanup(func() {
		i.kubectl(context.WithoutCancel(t.Context()), "delete", "--ignore-not-found", "--wait=false", "-f", file)
	})
	i.kubectl(t.Context(), "apply", "-f", file) // the first command
	bin := t.TempDir()
	i.runs("tar", "-xzf", filepath.Join(programs.Release, "kubectl-gpuslice_"+imageVersion+"_linux_"+runtime.GOARCH+".tar.gz"), "-C", bin) // the second
	pod := i.agentPod("the agent to be ready", anyPod)
	if image := pod.Status.ContainerStatuses[0].ImageID; !strings.HasPrefix(image, registryAddress+"/") {
		t.Errorf("the agent's image is %s", image)
	}
	i.awaitAmount(gpu, 2, 2)
	i.awaitNode("the agent to say that nothing is asked for", func(n *corev1.Node) bool { return reason(n) == string(config.ReasonNotRequested) })
	i.did("installed from the release's files")
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	for _, args := range [][]string{
		{"plan", nodeName, "--mig-config", "all-balanced"},
		{"apply", nodeName, "--mig-config", "all-balanced", "--wait"},
		{"status", nodeName},
	} {
		t.Logf("kubectl gpuslice %s\n%s", strings.Join(args, " "), i.runs(i.cluster.Kubectl(), append([]string{"gpuslice", "--kubeconfig", i.cluster.AdminKubeconfig()}, args...)...))
	}
	i.awaitAmount(slice, 4, 4)
	i.did("planned, requested and verified")
}

// servesTheRelease serves a registry until the test ends, and pushes the release's image to it.
func (i *installed) servesTheRelease() {
	i.t.Helper()
	serve := exec.CommandContext(i.t.Context(), programs.Crane, "registry", "serve", "--address", registryAddress)
	if err := serve.Start(); err != nil {
		i.t.Fatal(err)
	}
	i.t.Cleanup(func() { _ = serve.Wait() }) // it ends with the context of the test
	layout := i.t.TempDir()
	i.runs("tar", "-xf", filepath.Join(programs.Release, "gpuslice-agent-"+imageVersion+".tar"), "-C", layout)
	var said []byte
	err := wait.PollUntilContextTimeout(i.t.Context(), 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (done bool, err error) {
		said, err = exec.CommandContext(ctx, programs.Crane, "push", layout, registryAddress+"/gpuslice/gpuslice-agent:"+imageVersion).CombinedOutput()
		return err == nil, nil // it is refused until the registry serves
	})
	if err != nil {
		i.t.Fatalf("pushing the release's image: %v\n%s", err, said)
	}
}

// runs runs a program, and returns what it prints.
func (i *installed) runs(program string, args ...string) string {
	i.t.Helper()
	out, err := exec.CommandContext(i.t.Context(), program, args...).CombinedOutput()
	if err != nil {
		i.t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
	}
	return string(out)
}
