// Command kubelet runs the stand-in kubelet of one simulated GPU node until it is told to stop.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/pods"
)

// file is what --config holds.
type file struct {
	Images    map[string]kubelet.Image `json:"images"`    // programs of this machine by the image that pods name
	HostPaths map[string]string        `json:"hostPaths"` // directories of this machine by the prefix of hostPath volumes
	Taints    []corev1.Taint           `json:"taints"`    // of the node when it is made
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "kubelet: %v\n", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var o kubelet.Options
	var kubeconfig, config, gpus, proc string
	c := &cobra.Command{
		Use:   "kubelet --node NAME --dir DIR --kubeconfig FILE",
		Short: "Be the kubelet of a simulated GPU node, until Ctrl-C",
		Example: `  kubelet --node gpu-1 --dir /run/gpu-1 --kubeconfig node.kubeconfig --sandbox bin/sandbox --config images.yaml --gpusim gpus/

  # images.yaml
  images:
    nvcr.io/nvidia/k8s-device-plugin:v0.19.3: {path: /opt/nvidia-device-plugin, env: [LD_LIBRARY_PATH=/opt/sim]}
  hostPaths: {/run/nvidia/driver: /opt/driver-root}`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := complete(&o, kubeconfig, config, gpus, proc); err != nil {
				return err
			}
			return run(cmd.Context(), o)
		},
	}
	f := c.Flags()
	f.StringVar(&o.Node, "node", "", "`name` of the Node")
	f.StringVar(&o.Dir, "dir", "", "the node's /var/lib/kubelet: a `directory` with a short path, since sockets are in it")
	f.StringVar(&kubeconfig, "kubeconfig", "", "`file` with the credentials of system:node:<name>")
	f.StringVar(&config, "config", "", "YAML `file` with images, hostPaths and taints")
	f.StringVar(&o.SandboxBinary, "sandbox", "", "the sandbox `program`, if images are to run")
	f.StringVar(&gpus, "gpusim", "", "`directory` of simulated GPUs on which pods are to be seen as processes")
	f.StringVar(&proc, "proc", "", "`directory` of the simulated process table in which those are to be seen besides, for the agent's --proc")
	f.StringToStringVar(&o.Labels, "label", nil, "`key=value` of the Node when it is made; may be repeated")
	f.StringVar(&o.Address, "address", "127.0.0.1", "`IP` of the node")
	f.StringVar(&o.BootID, "boot-id", "", "another `id` than the last time is a reboot")
	f.DurationVar(&o.StatusPeriod, "status-period", 10*time.Second, "`time` between looks at the node's status")
	f.BoolVar(&o.ReportAtOnce, "report-at-once", false, "report devices as soon as they change")
	for _, name := range []string{"node", "dir", "kubeconfig"} {
		if err := c.MarkFlagRequired(name); err != nil {
			panic(err) // a name that is not one of the flags above
		}
	}
	return c
}

func complete(o *kubelet.Options, kubeconfig, config, gpus, proc string) (err error) {
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return fmt.Errorf("looking for --dir: %w", err)
	}
	if o.Config, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
		return fmt.Errorf("reading --kubeconfig: %w", err)
	}
	log := zap.NewDevelopmentConfig()
	log.DisableStacktrace, log.DisableCaller = true, true
	if o.Log, err = log.Build(); err != nil {
		return fmt.Errorf("opening the log: %w", err)
	}
	if config != "" {
		text, err := os.ReadFile(config)
		if err != nil {
			return fmt.Errorf("reading --config: %w", err)
		}
		var f file
		if err := yaml.UnmarshalStrict(text, &f); err != nil {
			return fmt.Errorf("reading --config %s: %w", config, err)
		}
		o.Images, o.HostPaths, o.Taints = f.Images, f.HostPaths, f.Taints
	}
	if gpus == "" {
		return nil
	}
	simulated, err := gpusim.Open(gpus)
	if err != nil {
		return err
	}
	users := pods.Users{GPUs: simulated, Log: o.Log.Named("gpus")}
	if proc != "" {
		if users.Table, err = pods.MakeTable(proc, simulated.BootID()); err != nil {
			return err
		}
	}
	o.OnAllocate, o.OnFree = users.Hold, users.Release
	return nil
}

func run(ctx context.Context, o kubelet.Options) error {
	k, err := kubelet.Start(ctx, o)
	if err != nil {
		return err
	}
	o.Log.Info("kubelet runs", zap.String("node", o.Node), zap.String("dir", o.Dir))
	<-ctx.Done()
	k.Stop()
	return nil
}
