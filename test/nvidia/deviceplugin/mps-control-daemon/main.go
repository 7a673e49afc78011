// Command mps-control-daemon is NVIDIA's MPS control daemon for Kubernetes without its subcommand mount-shm, which no
// test needs. NVIDIA's own package handles the config, the GPUs and nvidia-cuda-mps-control. The program around it is
// rewritten, since a requirement of the subcommand is missing from the public checksum database.
//
// Like NVIDIA's, it has its files under /mps, and sets the compute mode by nvidia-smi. It starts over on SIGHUP,
// retries when a daemon does not start, and restores the compute mode only on a request to end.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	nvinfo "github.com/NVIDIA/go-nvlib/pkg/nvlib/info"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
	spec "github.com/NVIDIA/k8s-device-plugin/api/config/v1"
	"github.com/NVIDIA/k8s-device-plugin/cmd/mps-control-daemon/mps"
	"github.com/urfave/cli/v2"
	"k8s.io/klog/v2"
)

const (
	readyFile  = "/mps/.ready"
	retryAfter = 30 * time.Second // NVIDIA's
)

func main() {
	app := cli.NewApp()
	app.Name = "NVIDIA MPS Control Daemon"
	app.Flags = []cli.Flag{
		&cli.StringFlag{Name: "config-file", Usage: "the device plugin's config file", EnvVars: []string{"CONFIG_FILE"}},
		&cli.StringFlag{Name: "mig-strategy", Value: spec.MigStrategyNone, Usage: "[none | single | mixed]", EnvVars: []string{"MIG_STRATEGY"}},
	}
	app.Action = run
	if err := app.Run(os.Args); err != nil {
		klog.Error(err)
		os.Exit(1)
	}
}

func run(c *cli.Context) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	for {
		daemons, retry, err := start(c)
		if err != nil {
			return err
		}
		var again <-chan time.Time
		if retry {
			klog.Infof("Failed to start one or more MPS daemons. Retrying in %s...", retryAfter)
			again = time.After(retryAfter)
		}
		var received os.Signal
		select {
		case <-again:
		case received = <-signals:
			klog.Infof("Received signal %q.", received)
		}
		if err := stop(daemons); err != nil || received != nil && received != syscall.SIGHUP {
			return err
		}
	}
}

// start starts a daemon for each resource that the config shares by MPS.
func start(c *cli.Context) (daemons []*mps.Daemon, retry bool, err error) {
	config, err := spec.NewConfig(c, c.App.Flags)
	if err != nil {
		return nil, false, fmt.Errorf("reading the config: %w", err)
	}
	config.Flags.GFD = nil
	disableNaming(config)
	lib := nvml.New()
	devices := device.New(lib)
	if err := addResources(config, lib, devices); err != nil {
		return nil, false, fmt.Errorf("adding the default resources to the config: %w", err)
	}
	info := nvinfo.New(nvinfo.WithNvmlLib(lib), nvinfo.WithDeviceLib(devices))
	if daemons, err = mps.NewDaemons(info, lib, devices, mps.WithConfig(config)); err != nil {
		return nil, false, fmt.Errorf("getting the daemons: %w", err)
	}
	if len(daemons) == 0 {
		klog.Info("No devices are configured for MPS sharing; Waiting indefinitely.")
	}
	for _, d := range daemons {
		if err := d.Start(); err != nil {
			klog.Errorf("Failed to start MPS daemon: %v", err)
			return daemons, true, nil
		}
	}
	ready, err := os.Create(readyFile)
	if err != nil {
		return daemons, false, fmt.Errorf("creating %s: %w", readyFile, err)
	}
	return daemons, false, ready.Close()
}

// addResources is rm.AddDefaultResourcesToConfig of NVIDIA's, which only its own programs may import.
func addResources(config *spec.Config, lib nvml.Interface, devices device.Interface) error {
	if err := config.Resources.AddGPUResource("*", "gpu"); err != nil {
		return err
	}
	switch *config.Flags.MigStrategy {
	case spec.MigStrategySingle:
		return config.Resources.AddMIGResource("*", "gpu")
	case spec.MigStrategyMixed:
		if r := lib.Init(); r != nvml.SUCCESS {
			return r
		}
		return errors.Join(devices.VisitMigProfiles(func(p device.MigProfile) error {
			if info := p.GetInfo(); info.C != info.G {
				return nil
			}
			return config.Resources.AddMIGResource(p.String(), strings.ReplaceAll("mig-"+p.String(), "+", "."))
		}), shutdown(lib))
	}
	return nil
}

func shutdown(lib nvml.Interface) error {
	if r := lib.Shutdown(); r != nvml.SUCCESS {
		return r
	}
	return nil
}

func stop(daemons []*mps.Daemon) error {
	if err := os.Remove(readyFile); err != nil {
		klog.Warningf("Failed to remove %s: %v", readyFile, err)
	}
	var errs error
	for _, d := range daemons {
		errs = errors.Join(errs, d.Stop())
	}
	if errs != nil {
		return fmt.Errorf("stopping the daemons: %w", errs)
	}
	return nil
}
