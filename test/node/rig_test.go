package node_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/node"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

func TestMain(m *testing.M) { clustertest.Main(m) }

// patience bounds each wait. Most take a second or two; a machine may be busy with other tests.
const patience = 2 * time.Minute

// common is what the tests of this package share: the programs, and what is deployed to the cluster once.
var common struct {
	once  sync.Once
	parts node.Parts
	err   error
}

// rig is one simulated node with everything on it but the agent, which the test starts and kills.
type rig struct {
	*node.Node
	t       *testing.T
	client  kubernetes.Interface
	cluster *cluster.Cluster
	agents  *agents
}

// agents is how to start the agent on this node.
type agents struct {
	kubeconfig, settings string
	bus                  string // address of the host's system bus, which is none unless a test starts one
	inSandbox            bool   // it sees the node's part of /proc, and not this machine's
	running              *process
}

// newRig starts a node with the GPUs of the spec.
func newRig(t *testing.T, spec, settings string) *rig {
	t.Helper()
	c := clustertest.Start(t)
	common.once.Do(func() { common.err = deploy(c) })
	if common.err != nil {
		t.Fatal(common.err)
	}
	gpus, err := gpusim.ParseSpec([]byte(spec))
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "node-") //nolint:usetesting // Unix sockets are in it: t.TempDir's paths are too long
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if !t.Failed() {
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		}
	})
	name := filepath.Base(dir)
	logs := zap.NewDevelopmentConfig()
	logs.OutputPaths = []string{filepath.Join(dir, "kubelet.log")}
	log, err := logs.Build()
	if err != nil {
		t.Fatal(err)
	}
	n, err := node.Start(t.Context(), c, node.Options{Name: name, Dir: dir, GPUs: gpus, Parts: common.parts, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{Node: n, t: t, client: clustertest.Client(t), cluster: c, agents: &agents{
		kubeconfig: filepath.Join(dir, "agent.kubeconfig"), settings: filepath.Join(dir, "settings.yaml"),
		bus: "unix:path=" + filepath.Join(dir, "no-bus"),
	}}
	t.Cleanup(r.end)
	account, err := c.ServiceAccountConfig(t.Context(), "gpuslice", "gpuslice-agent")
	if err != nil {
		t.Fatal(err)
	}
	if err := cluster.WriteKubeconfig(r.agents.kubeconfig, account); err != nil {
		t.Fatal(err)
	}
	text := "apiVersion: gpuslice.io/v1alpha1\nkind: Settings\n" + settings
	if err := os.WriteFile(r.agents.settings, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return r
}

// deploy builds the programs and gives the cluster NVIDIA's device plugin and the agent's rights, as deploy/base has them.
func deploy(c *cluster.Cluster) error {
	var err error
	ctx := context.Background()
	if common.parts, err = node.Build(ctx, binaries.Builder{Log: os.Stderr}); err != nil {
		return err
	}
	for _, file := range []string{
		"manifests/device-plugin.yaml",
		"../../deploy/base/namespace.yaml", "../../deploy/base/serviceaccount.yaml", "../../deploy/base/rbac.yaml",
	} {
		cmd := exec.CommandContext(ctx, c.Kubectl(), "--kubeconfig", c.AdminKubeconfig(), "apply", "-f", file)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("applying %s: %w\n%s", file, err, out)
		}
	}
	return nil
}

// end stops what runs. A failed test leaves the node's directory, with the logs, and says where it is.
func (r *rig) end() {
	if r.agents.running != nil {
		r.kill()
	}
	if r.t.Failed() {
		r.t.Logf("the logs of node %s are in %s", r.Name, r.Dir)
	}
	if err := r.Stop(context.Background()); err != nil {
		r.t.Error(err)
	}
}

// process is a running agent.
type process struct {
	cmd   *exec.Cmd
	steps chan string // each step that it says is done, and each pod that it evicts; closed when it ends
}

// run starts the agent.
func (r *rig) run() *process {
	r.t.Helper()
	args := append([]string{"run"}, r.flags()...)
	cmd := exec.Command(r.Parts.Agent, args...)
	if r.agents.inSandbox {
		cmd = sandbox.Command(context.Background(), r.Parts.Sandbox, r.Sandbox(), r.Parts.Agent, args...)
	}
	cmd.Env = append(os.Environ(), "GPUSIM_NODE="+r.GPUs.Dir())
	pipe, err := cmd.StderrPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	log, err := os.OpenFile(filepath.Join(r.Dir, "agent.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	p := &process{cmd: cmd, steps: make(chan string, 1000)}
	go func() {
		defer close(p.steps)
		defer log.Close()
		lines := bufio.NewScanner(io.TeeReader(pipe, log))
		for lines.Scan() {
			var entry struct{ Msg, Step, Pod string }
			switch err := json.Unmarshal(lines.Bytes(), &entry); {
			case err != nil: // a line of the library's, not of the agent's
			case entry.Msg == "step done":
				p.steps <- entry.Step
			case entry.Msg == "eviction requested":
				p.steps <- "evict " + entry.Pod
			}
		}
	}()
	r.agents.running = p
	return p
}

// flags tell the agent where it is.
func (r *rig) flags() []string {
	return []string{
		"--node", r.Name, "--kubeconfig", r.agents.kubeconfig, "--settings", r.agents.settings,
		"--driver-root", r.DriverRoot(), "--pod-resources", r.Kubelet.PodResourcesSocket(),
		"--lock", filepath.Join(r.Dir, "agent.lock"), "--system-bus", r.agents.bus,
		"--cdi", r.SpecDir(), "--dev-root", r.DevRoot(),
	}
}

// kill ends the agent as the kernel does when memory runs out.
func (r *rig) kill() {
	r.t.Helper()
	p := r.agents.running
	r.agents.running = nil
	if err := p.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		r.t.Fatal(err)
	}
	for range p.steps { // until its log is at an end
	}
	_ = p.cmd.Wait() // the error says that it was killed
}

// label asks for a config.
func (r *rig) label(key, value string) {
	r.t.Helper()
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{key: value}}})
	if err != nil {
		r.t.Fatal(err)
	}
	_, err = r.client.CoreV1().Nodes().Patch(r.t.Context(), r.Name, types.MergePatchType, body, metav1.PatchOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
}

// await watches the node until done is satisfied with it.
func (r *rig) await(what string, done func(*corev1.Node) bool) *corev1.Node {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	var last *corev1.Node
	for ctx.Err() == nil {
		w, err := r.client.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{
			FieldSelector: fields.OneTermEqualSelector("metadata.name", r.Name).String(),
		})
		if err != nil {
			break
		}
		for event := range w.ResultChan() {
			object, ok := event.Object.(*corev1.Node)
			if !ok {
				break
			}
			last = object
			if done(object) {
				w.Stop()
				return object
			}
		}
		w.Stop()
	}
	r.t.Fatalf("waiting for %s: %v; the node says:\n%s", what, context.Cause(ctx), words(last))
	return nil
}

// awaitReason watches the node until GPUPartitionReady has the reason.
func (r *rig) awaitReason(reason config.Reason) *corev1.Node {
	r.t.Helper()
	return r.await("reason "+string(reason), func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && c.Reason == string(reason)
	})
}

// awaitConverged watches the node until it is as the label asks, and given back.
func (r *rig) awaitConverged(name string) *corev1.Node {
	r.t.Helper()
	return r.await("config "+name, func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && c.Status == corev1.ConditionTrue && strings.HasPrefix(c.Message, name+":") &&
			n.Labels[config.LabelMIGConfigState] == string(config.StateSuccess)
	})
}

// awaitOffered watches the node until kubelet offers so many of the resource.
func (r *rig) awaitOffered(resource string, n int) {
	r.t.Helper()
	r.await(fmt.Sprintf("%s %d", resource, n), func(o *corev1.Node) bool { return offered(o)[resource] == n })
}

// givenBack fails the test if anything of a change is left on the node.
func (r *rig) givenBack(n *corev1.Node) {
	r.t.Helper()
	if n.Spec.Unschedulable {
		r.t.Error("the node is still cordoned")
	}
	for _, taint := range n.Spec.Taints {
		if taint.Key == config.TaintRepartitioning {
			r.t.Error("the node still has our taint")
		}
	}
	if j, ok := n.Annotations[config.AnnotationJournal]; ok {
		r.t.Errorf("the node still has a journal: %s", j)
	}
}

func condition(n *corev1.Node) *corev1.NodeCondition {
	for i := range n.Status.Conditions {
		if n.Status.Conditions[i].Type == config.ConditionGPUPartitionReady {
			return &n.Status.Conditions[i]
		}
	}
	return nil
}

// offered is what the node has to give out of NVIDIA's resources, without those at 0.
func offered(n *corev1.Node) map[string]int {
	out := map[string]int{}
	for name, q := range n.Status.Allocatable {
		if strings.HasPrefix(string(name), "nvidia.com/") && !q.IsZero() {
			out[string(name)] = int(q.Value())
		}
	}
	return out
}

func words(n *corev1.Node) string {
	if n == nil {
		return "nothing"
	}
	c := condition(n)
	if c == nil {
		return fmt.Sprintf("no condition; allocatable %v", offered(n))
	}
	return fmt.Sprintf("%s=%s %s: %s; allocatable %v", c.Type, c.Status, c.Reason, c.Message, offered(n))
}
