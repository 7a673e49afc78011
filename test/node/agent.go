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
	pid, err := n.agentPID()
	if err != nil {
		return 0, err
	}
	if err := syscall.Kill(pid, signal); err != nil {
		return 0, fmt.Errorf("sending %s to the agent of node %s: %w", signal, n.Name, err)
	}
	return pid, nil
}

// agentPID finds the agent by its program and by the GPUs that it was given.
func (n *Node) agentPID() (int, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return 0, err
	}
	for _, dir := range dirs {
		exe, err := os.Readlink(filepath.Join(dir, "exe"))
		if err != nil || exe != n.Parts.Agent {
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
		if slices.ContainsFunc(bytes.Split(environ, []byte{0}), func(v []byte) bool { return slices.Contains(n.env, string(v)) }) {
			return strconv.Atoi(filepath.Base(dir))
		}
	}
	return 0, fmt.Errorf("node %s: %w", n.Name, errNoAgent)
}
