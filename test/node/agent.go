package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
)

var errNoAgent = errors.New("no agent runs on the node")

// KillAgent sends SIGKILL to the agent that runs in a pod of this node, as the kernel does when memory runs out, and
// returns its process id. The kubelet then starts its container again.
func (n *Node) KillAgent() (int, error) { return n.signalAgent(syscall.SIGKILL) }

// StopAgent sends SIGSTOP to that agent: it stands still, whatever it does, and is not dead.
func (n *Node) StopAgent() (int, error) { return n.signalAgent(syscall.SIGSTOP) }

func (n *Node) signalAgent(signal syscall.Signal) (int, error) {
	pid, err := AgentPID(n.Parts.Agent, n.GPUs.Dir())
	if err != nil {
		return 0, fmt.Errorf("node %s: %w", n.Name, err)
	}
	if err := syscall.Kill(pid, signal); err != nil {
		return 0, fmt.Errorf("sending %s to the agent of node %s: %w", signal, n.Name, err)
	}
	return pid, nil
}

// AgentPID finds an agent by its program and by the directory of the GPUs that it was given.
func AgentPID(program, gpus string) (int, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return 0, err
	}
	for _, dir := range dirs {
		exe, err := os.Readlink(filepath.Join(dir, "exe"))
		if err != nil || exe != program {
			continue
		}
		environ, err := os.ReadFile(filepath.Join(dir, "environ"))
		if err != nil {
			continue // it ended in the meantime
		}
		cmdline, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || !bytes.Contains(cmdline, []byte("\x00run\x00")) { // a probe has the same program
			continue
		}
		if slices.ContainsFunc(bytes.Split(environ, []byte{0}), func(v []byte) bool { return string(v) == "GPUSIM_NODE="+gpus }) {
			return strconv.Atoi(filepath.Base(dir))
		}
	}
	return 0, errNoAgent
}
