package node_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/node"
)

func TestMain(m *testing.M) { clustertest.Main(m) }

// patience bounds each wait. Most take a second or two; a machine may be busy with much else.
const patience = 5 * time.Minute

// common is what the tests of this package share: the programs.
var common struct {
	once  sync.Once
	parts node.Parts
	err   error
}

// deployed is what most nodes share: a cluster to which all is deployed once.
var deployed struct {
	once sync.Once
	err  error
}

// build builds the programs.
func build(t *testing.T) {
	t.Helper()
	common.once.Do(func() { common.parts, common.err = node.Build(t.Context(), binaries.Builder{Log: os.Stderr}) })
	if common.err != nil {
		t.Fatal(common.err)
	}
}

// rig is one simulated node with everything on it but the agent, which the test starts and kills.
type rig struct {
	*node.Node
	t       *testing.T
	client  kubernetes.Interface
	cluster *cluster.Cluster
	account *rest.Config // the agent's
	agents  *agents
}

// agents is how to start the agent on this node.
type agents struct {
	kubeconfig, settings string
	bus                  string // address of the host's system bus, which is none unless a test starts one
	metrics              string // address at which it serves them; empty for none
	env                  []string
	running              *process
}

// option changes what node a rig is.
type option func(*node.Options)

// newRig starts a node with the GPUs of the spec.
func newRig(t *testing.T, spec, settings string, options ...option) *rig {
	t.Helper()
	return rigIn(t, deployedCluster(t), spec, settings, options...)
}

// deployedCluster starts the cluster that most nodes share.
func deployedCluster(t *testing.T) *cluster.Cluster {
	t.Helper()
	c := clustertest.Start(t)
	build(t)
	deployed.once.Do(func() { deployed.err = deploy(c) })
	if deployed.err != nil {
		t.Fatal(deployed.err)
	}
	return c
}

// rigIn starts a node in a control plane to which all is deployed.
func rigIn(t *testing.T, c *cluster.Cluster, spec, settings string, options ...option) *rig {
	t.Helper()
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
	o := node.Options{Name: name, Dir: dir, GPUs: gpus, Parts: common.parts, Log: log}
	for _, change := range options {
		change(&o)
	}
	n, err := node.Start(t.Context(), c, o)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{Node: n, t: t, client: clustertest.ClientOf(t, c), cluster: c, agents: &agents{
		kubeconfig: filepath.Join(dir, "agent.kubeconfig"), settings: filepath.Join(dir, "settings.yaml"),
		bus: "unix:path=" + filepath.Join(dir, "no-bus"),
	}}
	t.Cleanup(r.end)
	if err := journal.RecordIn(r.stateDir()).Write(t.Context(), journal.Record{Version: journal.Version}); err != nil { // an agent has been here
		t.Fatal(err)
	}
	if r.account, err = c.NodeConfig(t.Context(), "gpuslice", "gpuslice-agent", n.Name); err != nil {
		t.Fatal(err)
	}
	if err := cluster.WriteKubeconfig(r.agents.kubeconfig, r.account); err != nil {
		t.Fatal(err)
	}
	r.set(settings)
	return r
}

// set has the next agent go by other settings. The pods of these tests are bare, and may be evicted all the same.
func (r *rig) set(settings string) {
	r.t.Helper()
	text := "apiVersion: gpuslice.io/v1alpha1\nkind: Settings\n" + settings
	if !strings.Contains("\n"+settings, "\ndrain:") {
		text += "drain: {unmanagedPods: evict, emptyDir: evict}\n"
	}
	if err := os.WriteFile(r.agents.settings, []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// deploy gives the cluster NVIDIA's device plugin and the agent's rights, as deploy/base has them, and what is in the files.
func deploy(c *cluster.Cluster, more ...string) error {
	ctx := context.Background()
	minor, err := c.Minor()
	if err != nil {
		return err
	}
	pods := "../../deploy/components/impersonation/rbac.yaml" // in place of rights to the pods of all nodes, as the chart does
	if minor < cluster.ImpersonatesNodes {
		pods = "../../deploy/base/rbac.yaml"
	}
	// One kubectl for all files: each kubectl reads the whole schema of the API server, which costs both of them a second.
	files := []string{"--kubeconfig", c.AdminKubeconfig(), "apply"}
	for _, file := range append(more,
		"manifests/device-plugin.yaml", "manifests/operands.yaml", "manifests/config-manager.yaml",
		"../../deploy/base/namespace.yaml", "manifests/maintenance.yaml", "../../deploy/base/serviceaccount.yaml", "../../deploy/base/rbac.yaml", pods,
		"../../deploy/components/delete-after-deadline/rbac.yaml",
		"../../deploy/overlays/device-plugin/device-plugin.yaml", "../../deploy/overlays/device-plugin/gpu-feature-discovery.yaml",
		"../../deploy/overlays/device-plugin/mps-control-daemon.yaml",
	) {
		files = append(files, "-f", file)
	}
	for _, args := range [][]string{files, {"--kubeconfig", c.AdminKubeconfig(), "apply", "-k", "manifests/policies"}} {
		if out, err := exec.CommandContext(ctx, c.Kubectl(), args...).CombinedOutput(); err != nil {
			return fmt.Errorf("kubectl %s: %w\n%s", strings.Join(args[2:], " "), err, out)
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

// stateDir is where the agent keeps the host's record.
func (r *rig) stateDir() string { return filepath.Join(r.Dir, "state") }

// flags say to the agent where it is.
func (r *rig) flags() []string {
	return []string{
		"--node", r.Name, "--kubeconfig", r.agents.kubeconfig, "--settings", r.agents.settings,
		"--driver-root", r.DriverRoot(), "--pod-resources", r.Kubelet.PodResourcesSocket(),
		"--lock", filepath.Join(r.Dir, "agent.lock"), "--state-dir", r.stateDir(), "--system-bus", r.agents.bus,
		"--cdi", r.SpecDir(), "--dev-root", r.DevRoot(), "--proc", r.ProcRoot(), "--plugin-config", r.PluginConfig(),
		"--pci-devices", r.PCIDevices(), "--kernel-log", r.KernelLog(),
	}
}
