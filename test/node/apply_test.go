package node_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// oneT4 is a node whose GPU cannot do MIG.
const oneT4 = "gpus:\n- model: T4\n"

// rollsOut gives kubectl the plugin, and a kubeconfig of someone who may do no more than README says that a roll-out takes.
func (r *rig) rollsOut() (kubectl func(args ...string) *exec.Cmd) {
	r.t.Helper()
	plugin, err := binaries.Builder{Log: os.Stderr}.Tool(r.t.Context(), "./cmd/kubectl-gpuslice")
	if err != nil {
		r.t.Fatal(err)
	}
	name := "roll-out-" + r.Name
	user, err := r.cluster.ConfigFor(name)
	if err != nil {
		r.t.Fatal(err)
	}
	kubeconfig := filepath.Join(r.t.TempDir(), "kubeconfig")
	if err := cluster.WriteKubeconfig(kubeconfig, user); err != nil {
		r.t.Fatal(err)
	}
	meta := metav1.ObjectMeta{Name: name}
	_, err = r.client.RbacV1().ClusterRoles().Create(r.t.Context(), &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch", "patch"}},
	}}, metav1.CreateOptions{})
	if err == nil {
		_, err = r.client.RbacV1().ClusterRoleBindings().Create(r.t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: name}},
		}, metav1.CreateOptions{})
	}
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		for _, err := range []error{
			r.client.RbacV1().ClusterRoleBindings().Delete(context.Background(), name, metav1.DeleteOptions{}),
			r.client.RbacV1().ClusterRoles().Delete(context.Background(), name, metav1.DeleteOptions{}),
		} {
			if err != nil {
				r.t.Error(err)
			}
		}
	})
	return func(args ...string) *exec.Cmd {
		ctx, cancel := context.WithTimeout(r.t.Context(), patience)
		r.t.Cleanup(cancel)
		cmd := exec.CommandContext(ctx, r.cluster.Kubectl(), append([]string{"gpuslice"}, args...)...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, "PATH="+filepath.Dir(plugin)+":"+os.Getenv("PATH"))
		return cmd
	}
}

// says runs the command, and fails the test unless it ends with the code and says all of it.
func says(t *testing.T, cmd *exec.Cmd, code int, all ...string) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	said(t, cmd, string(out), code, all...)
}

func said(t *testing.T, cmd *exec.Cmd, out string, code int, all ...string) {
	t.Helper()
	if got := cmd.ProcessState.ExitCode(); got != code {
		t.Errorf("%s: exit code %d, want %d:\n%s", strings.Join(cmd.Args[1:], " "), got, code, out)
	}
	for _, say := range all {
		if !strings.Contains(out, say) {
			t.Errorf("%s does not say %q:\n%s", strings.Join(cmd.Args[1:], " "), say, out)
		}
	}
}

// answersSay is says for a command that waits five seconds for an agent. A busy machine's agent takes longer, and the command says that: then it runs again.
func answersSay(t *testing.T, command func() *exec.Cmd, all ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		cmd := command()
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(out), "the agent has not answered within") || ctx.Err() != nil {
			said(t, cmd, string(out), 0, all...)
			return
		}
	}
}

// pool puts the nodes into one, by a label.
func pool(t *testing.T, rigs ...*rig) (selector string) {
	t.Helper()
	name := clustertest.Namespace(t) // no other test's
	for _, r := range rigs {
		r.label("pool", name)
	}
	return "pool=" + name
}

func TestARollOutEndsWhenAllNodesAreAsAskedOrRefuse(t *testing.T) {
	t.Parallel()
	good, bad := newRig(t, twoH100, ""), newRig(t, oneT4, "")
	kubectl := good.rollsOut()
	selector := pool(t, good, bad)
	for _, r := range []*rig{good, bad} {
		r.awaitOffered("nvidia.com/gpu", len(r.GPUs.UUIDs()))
		r.run()
		r.awaitReason(config.ReasonNotRequested)
	}
	namespace := clustertest.Namespace(t)
	good.pod(namespace, "trainer", map[string]string{"nvidia.com/gpu": "1"})
	good.awaitRunning(namespace, "trainer")
	before := good.GPUs.String()

	ask := []string{"apply", "-l", selector, "--profile", "all-1g.10gb"}
	says(t, kubectl(append(ask, "--dry-run", "-v")...), 4,
		good.Name+": begins at once: no window restricts it; whether it ends is not known: listing pods: pods is forbidden", "1 pod has to leave: "+namespace+"/trainer", "offers then: nvidia.com/mig-1g.10gb", "1  fence: journal, cordon, taint", "create 1g.10gb@0",
		bad.Name+": would be refused: UnknownConfig: label gpuslice.io/profile=all-1g.10gb: ", "nothing was labelled",
		"error: profile all-1g.10gb would be refused by 1 node")
	for _, r := range []*rig{good, bad} {
		n := r.await("an end of the preview", func(n *corev1.Node) bool { return n.Annotations[config.AnnotationPlan] == "" })
		if label, there := n.Labels[config.LabelProfile]; there || n.Annotations[config.AnnotationPreview] != "" {
			t.Errorf("%s is labelled %q, its annotations are %v", r.Name, label, n.Annotations)
		}
	}
	if after := good.GPUs.String(); after != before {
		t.Errorf("the dry run changed the GPUs:\n%s", after)
	}

	says(t, kubectl(append(ask, "--wait")...), 1,
		good.Name+"  labelled gpuslice.io/profile=all-1g.10gb", good.Name+"  Draining  ", good.Name+"  Converged  all-1g.10gb: ",
		bad.Name+"  Failed  ", "profile all-1g.10gb: 1 of 2 nodes converged, 1 failed")
	good.givenBack(good.node())
	says(t, kubectl("apply", good.Name, "--profile", "all-1g.10gb", "--wait"), 0, "has label gpuslice.io/profile=all-1g.10gb already", "1 of 1 node converged")
	says(t, kubectl("status", "-l", selector), 0, good.Name, bad.Name, "Converged", "Stalled", "mig-1g.10gb 14")
}

// A person sees how the GPUs are cut and who uses them, and what is to be restored on the node, without a shell in a pod.
func TestAnAgentAnswersThePluginWithoutAShell(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	kubectl := r.rollsOut()
	r.awaitOffered("nvidia.com/gpu", 2)
	r.run()
	says(t, kubectl("apply", r.Name, "--mig-config", "all-1g.10gb", "--wait"), 0, r.Name+"  Converged  ")
	namespace := clustertest.Namespace(t)
	r.pod(namespace, "notebook", map[string]string{"nvidia.com/mig-1g.10gb": "1"})
	r.awaitRunning(namespace, "notebook")

	var held string // where the pod is
	for _, gpu := range r.snapshot() {
		for _, i := range gpu.Instances {
			if len(i.Processes) > 0 {
				held = fmt.Sprintf("  GPU %d #%-3d %s  %s/notebook", gpu.Index, i.ID, i.Placed, namespace)
			}
		}
	}
	if held == "" {
		t.Fatal("no instance has a process")
	}
	answersSay(t, func() *exec.Cmd { return kubectl("status", r.Name) }, "│1g.10gb", held, "GPU 0-1 NVIDIA H100 80GB HBM3 MIG, 13 of 14 free")
	answersSay(t, func() *exec.Cmd { return kubectl("status", r.Name, "-o", "yaml") }, "- "+namespace+"/notebook", "known: true")
	r.await("a report of who has what", func(n *corev1.Node) bool {
		var s api.Status
		return json.Unmarshal([]byte(n.Annotations[config.AnnotationStatus]), &s) == nil && len(s.Held) > 0
	})
	says(t, kubectl("status", r.Name, "--ask=false"), 0, "as its agent last reported, without processes outside of pods: --ask=false", "a pod that you may not list", "GPU 0-1 NVIDIA H100 80GB HBM3 MIG, 13 of 14 free, well")
	says(t, kubectl("plan", r.Name), 0, r.Name+": nothing to do")
	says(t, kubectl("plan", r.Name, "--mig-config", "all-disabled"), 5, r.Name+": begins at once", "1 pod has to leave: "+namespace+"/notebook",
		"whether it ends is not known: listing pods: ")
	says(t, kubectl("recover", r.Name, "--dry-run"), 0, "all-1g.10gb", "GPU 0: 1g.10gb@0")
	slip := func() *exec.Cmd { return kubectl("apply", r.Name, "--mig-config", "all-1g.10g") }
	for out, err := slip().CombinedOutput(); err == nil; out, err = slip().CombinedOutput() { // a busy machine's agent may take longer to answer than it waits
		t.Logf("%s", out)
	}
	says(t, slip(), 1, r.Name+": would be refused: UnknownConfig: ", "all-1g.10gb", "refused by 1 node")
	says(t, kubectl("apply", r.Name, "--none"), 0, r.Name+"  lost label nvidia.com/mig.config=")
	r.awaitReason(config.ReasonNotRequested)
	for key, value := range r.node().Annotations {
		if key == config.AnnotationPreview || key == config.AnnotationPlan {
			t.Errorf("annotation %s is left: %s", key, value)
		}
	}
}
