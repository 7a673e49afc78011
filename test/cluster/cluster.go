// Package cluster runs a real Kubernetes control plane on loopback for tests and the demo: etcd, kube-apiserver with RBAC
// and NodeRestriction, kube-controller-manager and kube-scheduler, with certificates of its own.
//
// It starts no kubelet and has no nodes: test/cluster/kubelet joins one. The processes end with Stop, or when the
// process that started them ends in any way.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// patience is how long a component may take to be ready. It takes seconds; a machine may be busy with other tests.
const patience = 3 * time.Minute

// Options say where a control plane lives. The zero value is fine for most.
type Options struct {
	Dir      string    // logs, certificates and etcd's data; "" is a temporary directory that Stop removes
	Binaries string    // directory of the programs; "" builds them when they are not built yet, which takes minutes
	Log      io.Writer // progress, a line each; nil for none

	APIServerFlags, ControllerManagerFlags []string // after those that they are started with
}

// Cluster is a control plane that runs.
type Cluster struct {
	dir        string
	temporary  bool
	binaries   string
	port       int
	authority  *authority
	admin      *rest.Config
	supervisor *supervisor
	audit      auditReader
	log        io.Writer
	began      time.Time

	apiServerFlags, controllerManagerFlags []string

	stop    sync.Once
	stopped error
}

// Start runs a control plane and returns when it serves: pods can be created in the default namespace. The context
// bounds the start alone.
func Start(ctx context.Context, o Options) (*Cluster, error) {
	c := &Cluster{dir: o.Dir, binaries: o.Binaries, log: o.Log, began: time.Now(), apiServerFlags: o.APIServerFlags, controllerManagerFlags: o.ControllerManagerFlags}
	if c.log == nil {
		c.log = io.Discard
	}
	if c.binaries == "" {
		dir, err := binaries.Builder{Log: o.Log}.Kube(ctx)
		if err != nil {
			return nil, err
		}
		c.binaries = dir
		c.began = time.Now()
	}
	if err := c.makeDir(); err != nil {
		return nil, err
	}
	c.supervisor = newSupervisor(c.dir)
	if err := c.start(ctx); err != nil {
		err = fmt.Errorf("starting a control plane in %s: %w", c.dir, err)
		c.temporary = c.temporary && ctx.Err() != nil // the logs say more than the error, unless the caller gave up
		return nil, errors.Join(err, c.Stop())
	}
	return c, nil
}

func (c *Cluster) makeDir() (err error) {
	if c.dir == "" {
		c.temporary = true
		if c.dir, err = os.MkdirTemp("", "gpuslice-cluster-"); err != nil {
			return fmt.Errorf("making a directory for a control plane: %w", err)
		}
		return nil
	}
	if c.dir, err = filepath.Abs(c.dir); err != nil {
		return fmt.Errorf("making a directory for a control plane: %w", err)
	}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return fmt.Errorf("making a directory for a control plane: %w", err)
	}
	// A second start in the same directory is a new cluster: old data would hold tokens of other keys.
	return os.RemoveAll(filepath.Join(c.dir, etcdData))
}

// start runs the components. The API server waits for etcd by itself, the others give up without an API server.
func (c *Cluster) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	etcdPort, err := c.supervisor.reservePort()
	if err != nil {
		return err
	}
	if err := c.supervisor.start(c.etcd(etcdPort)); err != nil {
		return err
	}
	if c.port, err = c.supervisor.reservePort(); err != nil {
		return err
	}
	if err := c.writeCertificates(); err != nil {
		return err
	}
	if err := c.ready(ctx, "etcd", etcdReady(etcdPort)); err != nil {
		return err
	}
	if err := c.supervisor.start(c.apiServer(etcdPort)); err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(c.admin)
	if err != nil {
		return fmt.Errorf("making a client for the API server: %w", err)
	}
	if err := c.ready(ctx, "kube-apiserver", func(ctx context.Context) error {
		return client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	}); err != nil {
		return err
	}
	for _, component := range []component{c.controllerManager(), c.scheduler()} {
		if err := c.supervisor.start(component); err != nil {
			return err
		}
	}
	return c.ready(ctx, "kube-controller-manager", func(ctx context.Context) error {
		_, err := client.CoreV1().ServiceAccounts(corev1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
}

// ready waits until the check passes, and not longer than all components live.
func (c *Cluster) ready(ctx context.Context, name string, check func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		if err := c.supervisor.wait(ctx); err != nil {
			cancel(err)
		}
	}()
	defer func() { cancel(nil); <-watched }()

	last := errors.New("none")
	err := wait.PollUntilContextCancel(ctx, 25*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		attempt, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		if err := check(attempt); err != nil {
			last = err
			return false, nil
		}
		return true, nil
	})
	if err != nil {
		if cause := context.Cause(ctx); !errors.Is(cause, ctx.Err()) {
			return cause
		}
		return fmt.Errorf("waiting for %s (%w); its last answer: %w%s", name, err, last, c.supervisor.logEnd(name))
	}
	fmt.Fprintf(c.log, "%s: ready after %s\n", name, time.Since(c.began).Round(100*time.Millisecond))
	return nil
}

// Stop ends the processes at once and removes a temporary directory. It reports a component that had ended by itself.
// Calls after the first return the same.
func (c *Cluster) Stop() error {
	c.stop.Do(func() {
		c.stopped = c.supervisor.stop()
		if c.stopped == nil && c.temporary {
			c.stopped = os.RemoveAll(c.dir)
		}
	})
	return c.stopped
}

// Minor is the minor version of the API server: 37 for v1.37.1.
func (c *Cluster) Minor() (uint, error) {
	client, err := kubernetes.NewForConfig(c.admin)
	if err != nil {
		return 0, fmt.Errorf("making a client for the API server: %w", err)
	}
	said, err := client.Discovery().ServerVersion()
	if err != nil {
		return 0, fmt.Errorf("asking the API server for its version: %w", err)
	}
	v, err := version.ParseGeneric(said.GitVersion)
	if err != nil {
		return 0, fmt.Errorf("the API server says that its version is %q: %w", said.GitVersion, err)
	}
	return v.Minor(), nil
}

// ImpersonatesNodes is the first minor version of Kubernetes with constrained impersonation: an account may send
// requests as its own node, and as no other.
const ImpersonatesNodes = 36

// Dir is the directory of the logs, the certificates and the audit log.
func (c *Cluster) Dir() string { return c.dir }

// Kubectl is the path of a kubectl of the control plane's version. It may be handed files that the Go command does not know of.
func (c *Cluster) Kubectl() string {
	binaries.KeepOutOfTestCache()
	return c.kubectl()
}

func (c *Cluster) kubectl() string { return filepath.Join(c.binaries, "kubectl") }

// RunKubectl runs kubectl as the administrator and returns what it prints. The arguments may name no file: the Go command does not see which files
// kubectl reads, and would take a test's result from its cache after such a file has changed. Apply and Kubectl are for those.
func (c *Cluster) RunKubectl(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, c.kubectl(), append([]string{"--kubeconfig", c.AdminKubeconfig()}, args...)...)
	// The user's defaults and aliases are for the user's clusters, and so is the cache.
	cmd.Env = append(os.Environ(), "KUBERC=off", "KUBECACHEDIR="+c.file("cache"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("kubectl %q: %w\n%s", args, err, out)
	}
	return string(out), nil
}

// Apply has kubectl apply files, and after them the folders that have a kustomization.
func (c *Cluster) Apply(ctx context.Context, paths ...string) error {
	binaries.KeepOutOfTestCache()
	// One kubectl for all files: each kubectl reads the whole schema of the API server, which costs both of them a second.
	files, calls := []string{"apply"}, [][]string(nil)
	for _, path := range paths {
		if filepath.Ext(path) == "" {
			calls = append(calls, []string{"apply", "-k", path})
		} else {
			files = append(files, "-f", path)
		}
	}
	if len(files) > 1 {
		calls = slices.Insert(calls, 0, files)
	}
	for _, args := range calls {
		if _, err := c.RunKubectl(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}
