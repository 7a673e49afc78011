// Command kube is the Kubernetes control plane, kubelet and kubectl v1.37.1 in one binary, for tests.
//
// The base name it is started under, or else its first argument, chooses the component, so that one link of 150 MB
// serves them all.
package main

import (
	"context"
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
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
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
		fmt.Fprintf(os.Stderr, "%q is none of kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kubectl\n", name)
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
	case "kubelet":
		return kubelet.NewKubeletCommand(context.Background()) // which ends by signals of its own
	case "kubectl":
		return kubectl.NewDefaultKubectlCommand()
	default:
		return nil
	}
}
