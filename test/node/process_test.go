package node_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

// process is a running agent.
type process struct {
	cmd   *exec.Cmd
	steps chan string // each step that it says is done, and each pod that it evicts; closed when it ends
}

// run starts the agent.
func (r *rig) run() *process {
	r.t.Helper()
	args := append([]string{"run", "--metrics-address", r.agents.metrics}, r.flags()...)
	cmd := exec.Command(r.Parts.Agent, args...)
	// The agent collects its garbage as its DaemonSet says, and not as these tests do.
	cmd.Env = append(os.Environ(), "GPUSIM_NODE="+r.GPUs.Dir(), "GOGC=", "GPUSLICE_MEMORY_LIMIT=268435456")
	cmd.Env = append(cmd.Env, r.agents.env...)
	pipe, err := cmd.StderrPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	log, err := os.OpenFile(filepath.Join(r.Dir, "agent.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	p := &process{cmd: cmd, steps: make(chan string, 1000)}
	go func() {
		defer close(p.steps)
		defer log.Close()
		lines := bufio.NewScanner(io.TeeReader(pipe, log))
		for lines.Scan() {
			if bytes.Contains(lines.Bytes(), []byte("WARNING: DATA RACE")) { // where the tests run with the race detector
				r.t.Errorf("the agent has a data race, see %s", log.Name())
			}
			var entry struct{ Msg, Step, Pod string }
			switch err := json.Unmarshal(lines.Bytes(), &entry); {
			case err != nil: // a line of the library's, not of the agent's
			case entry.Msg == "step done":
				p.steps <- entry.Step
			case entry.Msg == "eviction requested":
				p.steps <- "evict " + entry.Pod
			}
		}
	}()
	r.agents.running = p
	return p
}

// kill ends the agent as the kernel does when memory runs out. It returns the steps that have not been taken notice of.
func (r *rig) kill() (steps []string) {
	r.t.Helper()
	p := r.agents.running
	r.agents.running = nil
	if err := p.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		r.t.Fatal(err)
	}
	for step := range p.steps { // until its log is at an end
		steps = append(steps, step)
	}
	_ = p.cmd.Wait() // the error says that it was killed
	return steps
}
