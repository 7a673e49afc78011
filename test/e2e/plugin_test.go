package e2e_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/gpuslice/gpuslice/test/sandbox"
)

// pluginProcess is NVIDIA's device plugin as a process of the node, with a config file that a test writes.
type pluginProcess struct {
	r   *rig
	cmd *exec.Cmd
}

// sees is what a program of NVIDIA's sees of the node.
func (r *rig) sees() sandbox.Options {
	return sandbox.Options{
		Mounts: []sandbox.Mount{{Source: r.file("host/proc/driver"), Target: "/proc/driver"}},
		Env:    []string{"GPUSIM_NODE=" + r.file("gpus"), "LD_LIBRARY_PATH=" + filepath.Dir(programs.LibNVML)},
	}
}

// startPlugin runs the plugin with the config.
func (r *rig) startPlugin(config string) *pluginProcess {
	r.t.Helper()
	r.writeConfig(config)
	cmd := sandbox.Command(r.t.Context(), programs.Sandbox, r.sees(), filepath.Join(programs.DevicePlugin, "nvidia-device-plugin"),
		"--config-file="+r.file("plugin.yaml"))
	log, err := os.OpenFile(r.file("plugin.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		r.t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.plugin = &pluginProcess{r: r, cmd: cmd}
	return r.plugin
}

func (r *rig) writeConfig(text string) {
	r.t.Helper()
	if err := os.WriteFile(r.file("plugin.yaml"), []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// reload gives the plugin another config: it restarts within its process.
func (p *pluginProcess) reload(config string) {
	p.r.t.Helper()
	p.r.writeConfig(config)
	if err := p.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		p.r.t.Fatal(err)
	}
}

// stop kills the plugin.
func (p *pluginProcess) stop() {
	_ = p.cmd.Process.Kill() // it may have ended
	_ = p.cmd.Wait()         // as it was asked to
	p.r.plugin = nil
}
