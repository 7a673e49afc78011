package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
)

const (
	// annotationGrace says how long a command that changes anything may go on after SIGTERM.
	annotationGrace = "grace"
	// gracePeriod is a little less than terminationGracePeriodSeconds of the DaemonSet, 120 s: this process can write a last line into the
	// log, and kubelet's SIGKILL could not.
	gracePeriod = 110 * time.Second
	// shortGrace is for a command that changes nothing, and so has nothing to finish.
	shortGrace = 2 * time.Second
	// exitKilled is the exit code of a process that SIGTERM ends.
	exitKilled = 143
)

// graceOf gives the grace of the command that the arguments name.
func graceOf(root *cobra.Command, args []string) time.Duration {
	c, _, err := root.Find(args)
	if err != nil {
		return shortGrace
	}
	d, err := time.ParseDuration(c.Annotations[annotationGrace])
	if err != nil {
		return shortGrace
	}
	return d
}

// exitAfter ends the process, whatever it computes or waits for. The next one finds what it had begun.
func exitAfter(grace time.Duration) {
	time.Sleep(grace) //nolint:forbidigo // the process ends before, or is ended
	fmt.Fprintf(os.Stderr, "error: not at an end %s after the signal to end; ended in the middle\n", grace)
	os.Exit(exitKilled)
}
