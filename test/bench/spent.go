package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"
)

// spent is where the time of a change by gpuslice went, apart from the calls into the driver. With result.bound the parts add up to
// result.said. All are 0 if nothing was to be changed.
type spent struct {
	drain        time.Duration // from the label until the first step that changes a GPU or the device plugin's config
	passes       time.Duration // from there to the end of the last step that changes a GPU, without the calls
	plugin       time.Duration // from there until the node offers what its GPUs have
	verification time.Duration // from there until the agent says that it is done
}

// step is one step that the agent has done, as its log says.
type step struct {
	text       string
	began, end time.Time
}

func (s step) changesGPU() bool { return strings.HasPrefix(s.text, "GPU ") }

func (s step) changesPlugin() bool {
	return strings.HasPrefix(s.text, "set the device plugin's config")
}

// stepsIn reads the steps from the agent's log, in their order.
func stepsIn(log string) (steps []step, err error) {
	file, err := os.Open(log)
	if err != nil {
		return nil, fmt.Errorf("reading the agent's log: %w", err)
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		var line struct {
			At   time.Time `json:"ts"`
			Msg  string    `json:"msg"`
			Step string    `json:"step"`
			Took string    `json:"took"`
		}
		if json.Unmarshal(lines.Bytes(), &line) != nil || line.Msg != "step done" {
			continue
		}
		took, err := time.ParseDuration(line.Took)
		if err != nil {
			return nil, fmt.Errorf("reading the agent's log: how long step %q took: %w", line.Step, err)
		}
		steps = append(steps, step{text: line.Step, began: line.At.Add(-took), end: line.At})
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading the agent's log: %w", err)
	}
	return steps, nil
}

// divide divides the time of a change that was requested at began.
func divide(r result, began time.Time, steps []step) (s spent) {
	var first, last time.Time
	for _, one := range steps {
		if first.IsZero() && (one.changesGPU() || one.changesPlugin()) {
			first, last = one.began, one.began
		}
		if one.changesGPU() {
			last = one.end
		}
	}
	if first.IsZero() || r.said == 0 {
		return spent{}
	}
	return spent{
		drain: first.Sub(began), passes: last.Sub(first) - r.bound, plugin: r.ready - last.Sub(began), verification: r.said - r.ready,
	}
}
