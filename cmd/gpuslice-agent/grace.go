package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
)

const (
	// annotationGrace is how long what a command has begun may take after SIGTERM, for commands that change anything.
	annotationGrace = "grace"
	// gracePeriod is a little less than terminationGracePeriodSeconds of the DaemonSet, 120 s, so that the log says what kubelet's SIGKILL
	// would not.
	gracePeriod = 110 * time.Second
	// shortGrace is that of a command that changes nothing, and has nothing to bring to its end.
	shortGrace = 2 * time.Second
	// exitKilled is the exit code of a process that SIGTERM ends.
	exitKilled = 143
)

// graceOf is how long the command may go on that the arguments name.
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

// endBy ends the process, whatever it computes or waits for. What it had begun is seen by the next one.
func endBy(grace time.Duration) {
	time.Sleep(grace) //nolint:forbidigo // the process ends meanwhile, or is ended
	fmt.Fprintf(os.Stderr, "error: not at an end %s after the signal to end; ended in the middle\n", grace)
	os.Exit(exitKilled)
}
