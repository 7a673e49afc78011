package access_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/access"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// lacking are the parts of a cluster with what the agent says that they lack, by a word of each.
func lacking(t *testing.T, server, kubelet string) (said []string) {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1"}}
	node.Status.NodeInfo.KubeletVersion = kubelet
	client := clientset.Of(fake.NewClientset(node))
	core, logs := observer.New(zap.InfoLevel)
	checker := access.New(access.Options{
		Client: client, Node: "gpu-1", Namespace: "gpuslice", Pods: pods{}, Timeout: time.Second, Events: record.NewFakeRecorder(10), Log: zap.New(core),
		Version: func(context.Context) (string, error) { return server, nil },
	})
	checker.Begin(t.Context())
	for _, entry := range logs.FilterMessage("this version of Kubernetes lacks something").All() {
		fields := entry.ContextMap()
		of, _ := fields["of"].(string)
		what, _ := fields["lacks"].(string)
		if fields["instead"] == "" {
			t.Errorf("the line does not say what the agent does instead: %v", fields)
		}
		said = append(said, of+": "+what)
	}
	if len(logs.FilterMessage("versions of Kubernetes").All()) != 1 {
		t.Error("the versions are not said once")
	}
	return said
}

func TestWhatAnOlderKubernetesLacksIsSaidAtTheStart(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		server, kubelet string
		want            []string // beginnings, in order
	}{
		"the newest":               {"v1.37.1", "v1.37.1", nil},
		"the first with all":       {"v1.36.0", "v1.34.0", nil},
		"of a vendor":              {"v1.35.3-gke.1627000", "v1.35.3+k3s1", []string{"the API server v1.35.3-gke.1627000: requests in the name"}},
		"a kubelet that is older":  {"v1.36.0", "v1.33.9", []string{"kubelet v1.33.9: an answer that names the resource claims"}},
		"before the streams":       {"v1.33.1", "v1.34.0", []string{"the API server v1.33.1: requests in the name", "the API server v1.33.1: watches that begin"}},
		"the first with policies":  {"v1.30.14", "v1.36.0", []string{"the API server v1.30.14: requests in", "the API server v1.30.14: watches", "the API server v1.30.14: tokens that name"}},
		"before policies":          {"v1.29.4", "v1.36.0", []string{"the API server v1.29.4: requests", "the API server v1.29.4: watches", "the API server v1.29.4: tokens", "the API server v1.29.4: admission"}},
		"none of them says it":     {"", "", nil},
		"what is no version":       {"unknown", "v2", nil},
		"a version without an end": {"v1.30." + strings.Repeat("9", 1<<20), "v1.37.1", []string{"the API server v1.30.9", "the API server v1.30.9", "the API server v1.30.9"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			said := lacking(t, row.server, row.kubelet)
			if len(said) != len(row.want) {
				t.Fatalf("said %q, want %q", said, row.want)
			}
			for i, want := range row.want {
				if !strings.HasPrefix(said[i], want) || len(said[i]) > 300 {
					t.Errorf("said %q, want %q", said[i], want)
				}
			}
		})
	}
}
