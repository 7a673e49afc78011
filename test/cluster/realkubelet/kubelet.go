// Package realkubelet runs a real node: kubelet over containerd, runc and CNI, on the machine of package machine. Pods
// run in real containers. Their images are built from programs of this machine; nothing is pulled.
//
// It is the counterpart of the stand-in test/cluster/kubelet, and like it knows nothing of GPUs. A machine has one
// node: the directories of device plugins and of PodResources are constants of kubelet.
package realkubelet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/machine"
)

const (
	// DevicePluginDir is the directory of the device plugins' sockets and of the Registration service's, kubelet.sock.
	DevicePluginDir = rootDir + "/device-plugins"
	// PodResourcesSocket is the path of the PodResources v1 service.
	PodResourcesSocket = rootDir + "/pod-resources/kubelet.sock"

	// A reboot loses everything below /run, and nothing below /var/lib. Both are in the machine's memory, where
	// overlayfs works on any file system of the host.
	rootDir       = "/var/lib/kubelet"
	containerdDir = "/var/lib/containerd"
	networksDir   = "/var/lib/cni"
	stateDir      = "/run/containerd"
	netnsDir      = "/run/netns"

	// patience bounds each wait for a program. They take a second; the machine may be busy.
	patience = 2 * time.Minute
	// pollEvery is between looks at what cannot be watched.
	pollEvery = 20 * time.Millisecond
)

// Options say which node it is. All but Labels, Images, Archives and the driver's are required.
type Options struct {
	Node    string // name of the Node object
	Dir     string // of logs and configuration
	Cluster *cluster.Cluster
	Kube    string // directory of kubelet
	Runtime string // directory of containerd and what it needs
	Pause   string // cmd/pause, built without cgo
	Labels  map[string]string
	Images  []Image
	// Archives are images in files, in OCI's layout or as docker save writes them.
	Archives []string

	// DriverMounts and DriverEnv are what a container runtime such as NVIDIA's adds. Every container sees them.
	DriverMounts map[string]string // directory or file of the machine by its path in the container
	DriverEnv    []string          // "KEY=value"
}

// Kubelet is a running node.
type Kubelet struct {
	Options
	client     kubernetes.Interface
	containerd *daemon
	kubelet    *daemon
	boots      int
}

// Start brings up the node and joins it to the cluster. It returns when the node is ready for pods.
func Start(ctx context.Context, o Options) (*Kubelet, error) {
	if machine.Cgroup() == "" {
		return nil, errors.New("starting a kubelet: this program has no machine to itself: call machine.Enter first")
	}
	client, err := kubernetes.NewForConfig(o.Cluster.Config())
	if err != nil {
		return nil, fmt.Errorf("connecting to the cluster: %w", err)
	}
	k := &Kubelet{Options: o, client: client}
	if err := k.configure(); err != nil {
		return nil, fmt.Errorf("configuring node %s: %w", o.Node, err)
	}
	if err := k.boot(ctx); err != nil {
		return nil, errors.Join(err, k.shutDown(ctx))
	}
	for _, image := range append(o.Images, Image{Name: pauseImage, Entrypoint: []string{"/pause"}, Files: map[string]string{"/pause": o.Pause}}) {
		if err := k.importImage(ctx, image); err != nil {
			return nil, errors.Join(fmt.Errorf("importing image %s: %w", image.Name, err), k.shutDown(ctx))
		}
	}
	for _, archive := range o.Archives {
		if _, err := k.ctr(ctx, "images", "import", archive); err != nil {
			return nil, errors.Join(fmt.Errorf("importing the images of %s: %w", archive, err), k.shutDown(ctx))
		}
	}
	if err := k.awaitReady(ctx); err != nil {
		return nil, errors.Join(err, k.shutDown(ctx))
	}
	return k, nil
}

// boot starts the programs of the node.
func (k *Kubelet) boot(ctx context.Context) error {
	k.boots++
	if err := k.showBootID(); err != nil {
		return fmt.Errorf("booting node %s: %w", k.Node, err)
	}
	if err := k.startContainerd(ctx); err != nil {
		return fmt.Errorf("booting node %s: %w", k.Node, err)
	}
	return k.StartKubelet(ctx)
}

// StopKubelet ends kubelet alone, as `systemctl stop kubelet` does. Containers go on.
func (k *Kubelet) StopKubelet() error { return k.kubelet.stop() }

// StartKubelet starts kubelet again, and returns when it accepts registrations of device plugins.
func (k *Kubelet) StartKubelet(ctx context.Context) error {
	registration := filepath.Join(DevicePluginDir, "kubelet.sock")
	// An old socket would look like the new kubelet's.
	if err := os.Remove(registration); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("starting kubelet: %w", err)
	}
	var err error
	k.kubelet, err = start(k.file("kubelet.log"), filepath.Join(k.Kube, "kubelet"), k.kubeletArgs()...)
	if err != nil {
		return err
	}
	return k.await(ctx, k.kubelet, func(ctx context.Context) error {
		if _, err := os.Stat(registration); err != nil {
			return err
		}
		return healthy(ctx)
	})
}

// Restart is what `systemctl restart kubelet` does.
func (k *Kubelet) Restart(ctx context.Context) error {
	if err := k.StopKubelet(); err != nil {
		return err
	}
	return k.StartKubelet(ctx)
}

// Reboot ends everything that runs on the node, and starts it again with another boot id. No container survives; the
// pods and the record of their devices do. Programs outside the node, such as a test's device plugin, are for the test
// to end before and to start after.
func (k *Kubelet) Reboot(ctx context.Context) error {
	if err := k.shutDown(ctx); err != nil {
		return err
	}
	return k.boot(ctx)
}

// Stop ends the node, removes it from the cluster, and leaves nothing that another node would find.
func (k *Kubelet) Stop(ctx context.Context) error {
	if err := k.shutDown(ctx); err != nil {
		return err
	}
	if err := k.client.CoreV1().Nodes().Delete(ctx, k.Node, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting node %s: %w", k.Node, err)
	}
	for _, dir := range []string{rootDir, containerdDir} {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("removing what node %s has left: %w", k.Node, err)
		}
	}
	return nil
}

// shutDown ends all programs of the node, containers at last, as the loss of power does.
func (k *Kubelet) shutDown(ctx context.Context) error {
	err := errors.Join(k.kubelet.stop(), k.containerd.stop())
	if err != nil {
		return fmt.Errorf("shutting down node %s: %w", k.Node, err)
	}
	if err := k.killContainers(ctx); err != nil {
		return fmt.Errorf("shutting down node %s: %w", k.Node, err)
	}
	if err := machine.RemoveCgroups(); err != nil {
		return fmt.Errorf("shutting down node %s: %w", k.Node, err)
	}
	if err := unmountBelow(rootDir+"/pods", stateDir, netnsDir, bootIDPath); err != nil {
		return fmt.Errorf("shutting down node %s: %w", k.Node, err)
	}
	for _, volatile := range []string{stateDir, netnsDir, networksDir} {
		if err := os.RemoveAll(volatile); err != nil {
			return fmt.Errorf("shutting down node %s: %w", k.Node, err)
		}
	}
	return nil
}

func (k *Kubelet) file(name string) string { return filepath.Join(k.Dir, name) }

func healthy(ctx context.Context) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:10248/healthz", nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("kubelet answers %s", response.Status)
	}
	return nil
}

// awaitReady waits until the node may have pods.
func (k *Kubelet) awaitReady(ctx context.Context) error {
	return k.await(ctx, k.kubelet, func(ctx context.Context) error {
		node, err := k.client.CoreV1().Nodes().Get(ctx, k.Node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, taint := range node.Spec.Taints {
			if taint.Key == corev1.TaintNodeNotReady {
				return errors.New("the node has the taint of one that is not ready")
			}
		}
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
				return nil
			} else if c.Type == corev1.NodeReady {
				return errors.New(c.Message)
			}
		}
		return errors.New("the node does not say whether it is ready")
	})
}

// await returns when the check passes. It gives up when the program ends.
func (k *Kubelet) await(ctx context.Context, d *daemon, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	last := errors.New("none")
	err := wait.PollUntilContextCancel(ctx, pollEvery, true, func(ctx context.Context) (bool, error) {
		if d.hasEnded() {
			return false, errors.New("it has ended")
		}
		last = check(ctx)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("waiting for %s of node %s: %w; the last answer: %w; the log is %s", d.name, k.Node, err, last, d.log)
	}
	return nil
}
