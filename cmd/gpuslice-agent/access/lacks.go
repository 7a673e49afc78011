package access

import (
	"context"
	"fmt"
	"slices"

	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Lack is what Kubernetes has by itself from a minor version on, and what becomes of it before.
type Lack struct {
	From    uint   // the minor version
	Kubelet bool   // it is the node's kubelet that has it, and not the API server
	What    string // that it lacks
	Instead string // what the agent does
}

// Lacks are all that an agent goes by. A test holds deploy/README.md to them.
var Lacks = []Lack{
	{30, false, "admission policies", "nothing confines what the agent writes to its own node"},
	{32, false, "tokens that name the node of their pod whatever the cluster's features are", "the agent tries whether its own does, and says it if not"},
	{34, false, "watches that begin with the objects that are there", "the agent reads a list first, object by object, and then watches"},
	{34, true, "an answer that names the resource claims of pods", "the agent finds pods with claims by their processes on the GPUs alone"},
	{
		36, false, "requests in the name of the own node alone",
		"the agent asks about pods in its account's name, which can read all pods; a policy confines its evictions",
	},
}

// logLacks writes into the log what the API server and the node's kubelet are and lack. The agent does not wait for them to say more: it goes by what
// it tries, not by versions.
func (c *Checker) logLacks(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, c.o.Timeout)
	defer cancel()
	var server, kubelet string
	if c.o.Version != nil {
		if said, err := c.o.Version(ctx); err == nil {
			server = said
		}
	}
	if node, err := c.o.Client.Nodes().Get(ctx, c.o.Node, metav1.GetOptions{}); err == nil {
		kubelet = node.Status.NodeInfo.KubeletVersion
	}
	c.o.Log.Info("versions of Kubernetes", zap.String("apiServer", short(server)), zap.String("kubelet", short(kubelet)))
	for _, lack := range slices.Backward(Lacks) { // what the newest clusters have comes first
		of, its := "the API server", server
		if lack.Kubelet {
			of, its = "kubelet", kubelet
		}
		if minor, ok := minorOf(its); ok && minor < lack.From {
			c.o.Log.Info("this version of Kubernetes lacks something", zap.String("of", of+" "+short(its)), zap.String("lacks", lack.What),
				zap.String("thereFrom", fmt.Sprintf("1.%d", lack.From)), zap.String("instead", lack.Instead))
		}
	}
}

// longest is how many bytes of a version are written: v1.30.14-gke.1627000 has 20.
const longest = 64

func short(text string) string { return text[:min(len(text), longest)] }

// minorOf is the minor version of v1.30.14, also with what vendors add.
func minorOf(text string) (uint, bool) {
	var major, minor uint
	_, err := fmt.Sscanf(short(text), "v%d.%d.", &major, &minor)
	return minor, err == nil && major == 1
}
