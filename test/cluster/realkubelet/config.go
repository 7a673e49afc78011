package realkubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/machine"
)

// pauseImage is the image of the container that every pod has.
const pauseImage = "localhost/pause:1"

// configure writes what the programs of the node read.
func (k *Kubelet) configure() error {
	for _, dir := range []string{k.Dir, k.file("cni"), rootDir} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	credentials, err := k.Cluster.ConfigFor("system:node:"+k.Node, "system:nodes")
	if err != nil {
		return err
	}
	if err := cluster.WriteKubeconfig(k.file("kubelet.kubeconfig"), credentials); err != nil {
		return err
	}
	for name, text := range map[string]string{
		"kubelet.yaml":           k.kubeletConfig(),
		"ca.crt":                 string(credentials.CAData),
		"containerd.toml":        k.containerdConfig(),
		"cni/10-bridge.conflist": k.network(),
	} {
		if err := os.WriteFile(k.file(name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	return k.writeBaseSpec()
}

// kubeletConfig is kubelet's default, changed for a machine without systemd, swap, iptables and a way out. Images stay,
// since nothing could pull them again. Kubelet checks the node's status four times a second instead of every ten
// seconds, and restarts an ended container at once.
func (k *Kubelet) kubeletConfig() string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: %[1]s
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: %[2]q}
authorization: {mode: Webhook}
cgroupDriver: cgroupfs
cgroupRoot: %[3]q
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: %[4]q
resolvConf: ""
clusterDNS: [10.96.0.10]
makeIPTablesUtilChains: false
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 50Mi}
nodeStatusUpdateFrequency: 250ms
crashLoopBackOff: {maxContainerRestartPeriod: 1s}
podLogsDir: %[5]q
volumePluginDir: %[6]q
`, machine.Address, k.file("ca.crt"), machine.Cgroup(), "unix://"+k.socket(), k.file("pods"), k.file("volume-plugins"))
}

func (k *Kubelet) kubeletArgs() []string {
	args := []string{
		"--config=" + k.file("kubelet.yaml"), "--kubeconfig=" + k.file("kubelet.kubeconfig"),
		"--hostname-override=" + k.Node, "--node-ip=" + machine.Address, "--cert-dir=" + k.file("certificates"), "-v=2",
	}
	var labels []string
	for name, value := range k.Labels {
		labels = append(labels, name+"="+value)
	}
	slices.Sort(labels)
	if len(labels) > 0 {
		args = append(args, "--node-labels="+strings.Join(labels, ","))
	}
	return args
}

// socket is containerd's.
func (k *Kubelet) socket() string { return stateDir + "/containerd.sock" }

// containerdConfig is for a machine without CAP_SYS_RESOURCE, too: restrict_oom_score_adj lets containers start there.
func (k *Kubelet) containerdConfig() string {
	return fmt.Sprintf(`version = 3
root = %[1]q
state = %[2]q
[grpc]
  address = %[3]q
[ttrpc]
  address = %[4]q
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = %[5]q
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = [%[6]q]
    conf_dir = %[7]q
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = %[8]q
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = %[9]q
`, containerdDir, stateDir, k.socket(), k.socket()+".ttrpc", pauseImage, k.Runtime, k.file("cni"), k.baseSpecPath(),
		filepath.Join(k.Runtime, "runc"))
}

// network is a bridge without a way out.
func (k *Kubelet) network() string {
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0", "name": "pods",
  "plugins": [{
    "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false,
    "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}
  }]
}
`, networksDir)
}

func (k *Kubelet) baseSpecPath() string { return k.file("base-spec.json") }

// writeBaseSpec writes the base spec of every container: containerd's own, the driver, and the node's boot id.
func (k *Kubelet) writeBaseSpec() error {
	out, err := exec.Command(filepath.Join(k.Runtime, "ctr"), "oci", "spec").Output()
	if err != nil {
		return fmt.Errorf("asking ctr for its default spec: %w", err)
	}
	var spec map[string]any // unknown parts of it do not change
	if err := json.Unmarshal(out, &spec); err != nil {
		return fmt.Errorf("reading ctr's default spec: %w", err)
	}
	mounts, _ := spec["mounts"].([]any)
	for _, target := range slices.Sorted(maps.Keys(k.DriverMounts)) {
		mounts = append(mounts, map[string]any{
			"destination": target, "source": k.DriverMounts[target], "type": "bind", "options": []string{"rbind", "rw"},
		})
	}
	spec["mounts"] = mounts
	process, ok := spec["process"].(map[string]any)
	if !ok {
		return fmt.Errorf("reading ctr's default spec: it has no process")
	}
	env, _ := process["env"].([]any)
	for _, variable := range k.DriverEnv {
		env = append(env, variable)
	}
	process["env"] = env
	spec["hooks"] = map[string]any{"createContainer": []any{map[string]any{"path": "/bin/sh", "args": []string{"sh", "-c", showBootInContainer}}}}
	text, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return os.WriteFile(k.baseSpecPath(), text, 0o600)
}

const bootIDPath = "/proc/sys/kernel/random/boot_id"

// showBootInContainer has a container read the boot id that kubelet reads, like all programs of a machine. A container has a /proc of its own, and runc refuses
// a mount below it; a hook runs before the container has its root, and still sees the node's /proc.
const showBootInContainer = `bundle=$(sed -n 's/.*"bundle": *"\([^"]*\)".*/\1/p')
exec mount --bind ` + bootIDPath + ` "$bundle/rootfs` + bootIDPath + `"`

// showBootID has kubelet read another boot id after each boot.
func (k *Kubelet) showBootID() error {
	file := k.file(fmt.Sprintf("boot-id-%d", k.boots))
	if err := os.WriteFile(file, []byte(string(uuid.NewUUID())+"\n"), 0o600); err != nil {
		return err
	}
	if err := unix.Mount(file, bootIDPath, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("showing another boot id at %s: %w", bootIDPath, err)
	}
	return nil
}

func (k *Kubelet) startContainerd(ctx context.Context) error {
	var err error
	k.containerd, err = start(k.file("containerd.log"), filepath.Join(k.Runtime, "containerd"), "--config", k.file("containerd.toml"))
	if err != nil {
		return err
	}
	return k.await(ctx, k.containerd, func(ctx context.Context) error {
		_, err := k.ctr(ctx, "version")
		return err
	})
}

// ctr asks containerd, in the namespace of kubelet's containers.
func (k *Kubelet) ctr(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(k.Runtime, "ctr"), append([]string{"--address", k.socket(), "--namespace", "k8s.io"}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("ctr %s: %w: %s", args[0], err, out)
	}
	return string(out), nil
}
