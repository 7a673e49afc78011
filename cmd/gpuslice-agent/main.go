// Command gpuslice-agent keeps the GPUs of one Kubernetes node cut as the node's labels ask.
package main

import (
	"cmp"
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/access"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
)

// version is set by the build.
var version = "development"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root := command()
	context.AfterFunc(ctx, func() {
		stop() // a second signal ends the process at once
		exitAfter(graceOf(root, os.Args[1:]))
	})
	if code := cli.End(os.Stderr, root.ExecuteContext(ctx)); code != 0 {
		os.Exit(code)
	}
}

// options are the flags that the subcommands share.
type options struct {
	node, namespace, kubeconfig, settings string
	driverRoot, devRoot, podResources     string
	lockFile, stateDir                    string
	procRoot, pciDevices, systemBus       string
	kernelLog                             string
	pluginConfig                          string
	metricsAddress, metricsCertDir        string
	pprofAddress, memoryLimit             string
	metricsSecure                         bool
	specs                                 []string
	adopt                                 []string // of recover
	debug                                 bool

	settingsFile *settingsFile    // of an agent, once it is made
	access       *access.Checker  // of the account that the agent has, once it is made
	alive        *report.Liveness // of the agent that runs, once it is made
}

func command() *cobra.Command {
	var o options
	root := &cobra.Command{
		Use:           "gpuslice-agent",
		Short:         "Keeps the GPUs of one Kubernetes node cut as the node's labels ask",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	flags := root.PersistentFlags()
	flags.StringVar(&o.node, "node", os.Getenv("NODE_NAME"), "name of the node this runs on (env NODE_NAME)")
	flags.StringVar(&o.namespace, "namespace", cmp.Or(os.Getenv("POD_NAMESPACE"), "gpuslice"), "namespace of the agent's ConfigMaps (env POD_NAMESPACE)")
	flags.StringVar(&o.kubeconfig, "kubeconfig", os.Getenv("KUBECONFIG"), "kubeconfig file; without it the pod's service account is used")
	flags.StringVar(&o.settings, "settings", env("SETTINGS", ""), "settings file; without it the defaults hold (env GPUSLICE_SETTINGS)")
	flags.StringVar(&o.driverRoot, "driver-root", env("DRIVER_ROOT", "/"), "directory under which NVIDIA's driver is installed (env GPUSLICE_DRIVER_ROOT)")
	flags.StringVar(&o.devRoot, "dev-root", "/", "directory with the node's device files in dev")
	flags.StringSliceVar(&o.specs, "cdi", nil, "directories of the CDI specs to keep up to date (default /etc/cdi,/var/run/cdi)")
	flags.StringVar(&o.podResources, "pod-resources", "/var/lib/kubelet/pod-resources/kubelet.sock", "kubelet's PodResources socket")
	flags.StringVar(&o.lockFile, "lock", env("LOCK", "/run/gpuslice/agent.lock"),
		"lock file, so that one agent at a time runs on a machine (env GPUSLICE_LOCK)")
	flags.StringVar(&o.stateDir, "state-dir", env("STATE_DIR", "/var/lib/gpuslice/agent"),
		"directory of the host's record of what a change has to restore; root's own (env GPUSLICE_STATE_DIR)")
	flags.StringVar(&o.pluginConfig, "plugin-config", env("PLUGIN_CONFIG", ""),
		"where the device plugin's config file is seen; without it where the settings say that the host has it (env GPUSLICE_PLUGIN_CONFIG)")
	flags.StringVar(&o.procRoot, "proc", "/proc", "the process table of the host")
	flags.StringVar(&o.pciDevices, "pci-devices", "/sys/bus/pci/devices", "the devices of the host's PCI bus")
	flags.StringVar(&o.kernelLog, "kernel-log", "/dev/kmsg", "the log of the host's kernel; it need not be readable")
	flags.StringVar(&o.systemBus, "system-bus", env("SYSTEM_BUS", "unix:path=/run/dbus/system_bus_socket"),
		"address of the host's D-Bus, for logind and systemd; it need not exist (env GPUSLICE_SYSTEM_BUS)")
	flags.BoolVar(&o.debug, "debug", false, "log observations too")
	root.AddCommand(o.run(), o.health(), o.plan(), o.recover(), o.cleanup(), cli.Version(version))
	return root
}

// env gives a default that the pod may set, so that a command which a user runs in the agent's pod finds the host where the agent does.
func env(name, otherwise string) string { return cmp.Or(os.Getenv("GPUSLICE_"+name), otherwise) }
