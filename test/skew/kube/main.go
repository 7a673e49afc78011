// Command kube is the Kubernetes control plane and kubectl of an earlier version in one binary, for tests. The .mod file
// that it is built with decides which version: go.mod, or one next to it that is named after a version.
//
// The base name it is started under, or else its first argument, chooses the component, as for the one in test/kube.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // client metrics of every component
	_ "k8s.io/component-base/metrics/prometheus/version"  // build info metric
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	kcm "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

func main() {
	name := filepath.Base(os.Args[0])
	command := component(name)
	if command == nil && len(os.Args) > 1 {
		name = os.Args[1]
		os.Args = os.Args[1:]
		command = component(name)
	}
	if command == nil {
		fmt.Fprintf(os.Stderr, "%q is none of kube-apiserver, kube-controller-manager, kube-scheduler, kubectl\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}

func component(name string) *cobra.Command {
	switch name {
	case "kube-apiserver":
		return apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		return kcm.NewControllerManagerCommand()
	case "kube-scheduler":
		return scheduler.NewSchedulerCommand()
	case "kubectl":
		return kubectl.NewDefaultKubectlCommand()
	default:
		return nil
	}
}
