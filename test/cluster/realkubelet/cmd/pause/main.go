// Command pause waits until it is told to end. It keeps the namespaces of a pod, or runs in a container that only has
// to exist.
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
