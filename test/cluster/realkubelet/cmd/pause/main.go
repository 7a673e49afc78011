// Command pause does nothing until it is asked to end: what keeps the namespaces of a pod, and what runs in a container of
// which only that matters.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	<-ended
}
