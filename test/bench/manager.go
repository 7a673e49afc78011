package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/gpuslice/gpuslice/test/incumbent"
	"github.com/gpuslice/gpuslice/test/sandbox"
	"github.com/gpuslice/gpuslice/test/systemd"
)

// migManager is NVIDIA's k8s-mig-manager as the GPU Operator runs it where the driver is in a container: it pauses the
// operator's pods by labels, and leaves the host's services alone.
func migManager(st *stage, programs incumbent.Programs) contender {
	return service{stage: st, plugin: operators, start: func(ctx context.Context, at *site) (*process, error) {
		root := filepath.Join(at.Dir, "root") // of the host, where it looks for the system bus
		bus := filepath.Join(root, "run", "dbus")
		tools := filepath.Join(at.Dir, "tools")
		config := filepath.Join(at.Dir, "config.yaml")
		if err := os.MkdirAll(bus, 0o755); err != nil {
			return nil, fmt.Errorf("making a host for mig-manager: %w", err)
		}
		if err := os.WriteFile(config, at.scenario.file(), 0o600); err != nil {
			return nil, fmt.Errorf("writing the config: %w", err)
		}
		if err := programs.InstallTools(tools); err != nil {
			return nil, err
		}
		kubeconfig, err := at.kubeconfig(ctx, operatorNamespace, "nvidia-mig-manager")
		if err != nil {
			return nil, err
		}
		host, err := systemd.Start(ctx, systemd.Options{Dir: bus})
		if err != nil {
			return nil, err
		}
		inside := at.Sandbox()
		inside.Env = append(inside.Env, incumbent.PathWith(tools))
		p, err := launch(ctx, sandbox.Command(ctx, programs.Sandbox, inside, filepath.Join(programs.MIGParted, "nvidia-mig-manager"),
			"--kubeconfig", kubeconfig, "--node-name", at.Name, "--config-file", config,
			"--default-gpu-clients-namespace", operatorNamespace, "--host-root-mount", root,
		), filepath.Join(at.Dir, "mig-manager.log"), "Waiting for change to")
		if err != nil {
			return nil, errors.Join(err, host.Close())
		}
		stop := p.stop
		p.stop = func() error { return errors.Join(stop(), host.Close()) }
		return p, nil
	}}
}
