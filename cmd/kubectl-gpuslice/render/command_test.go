package render

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/validate"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/test/agenttest"
	"github.com/gpuslice/gpuslice/test/clientset"
)

var update = flag.Bool("update", false, "write what is rendered into testdata again")

// The output is what a person applies. The tests of test/shipped hand these files to an API server.
func TestValidateTakesWhatRenderWrites(t *testing.T) {
	pools := filepath.Join("..", "..", "..", "deploy", "examples", "configmap-pools.yaml")
	const a100, h100 = "NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3"
	for _, row := range []struct{ name, args string }{
		{"kueue", "kueue --pool research=2x8:" + a100 + " --pool small-inference=4x8:" + a100 + " --pool small-inference=1x4:" + a100 +
			" --pool training=1x8:" + a100 + " --pool critical-agents=1x8:" + a100 + " --pool balanced-inference=1x8:" + a100 +
			" --local-queue team/inference=small-inference --local-queue team/experiments=research --cohort all --topology racks" +
			" --priority critical-agents=1000 --priority training=500 --priority research=100"},
		{"kueue-types", "kueue --pool research=2x1:" + a100 + "@g6.4xlarge --pool research=1x4:" + a100 + "@g6.12xlarge --pool training=1x8:" + a100 + " --local-queue team/research=research"},
		{"flavors", "flavors --pool research=2x8:" + a100 + " --pool training-h100=2x8:" + h100},
		{"hardwareprofiles", "hardwareprofiles --pool balanced-inference=1x8:" + a100 + " --pool research=2x8:" + a100 + " --pool small-inference=1x8:" + a100},
		{"hardwareprofiles-queue", "hardwareprofiles --pool small-inference=1x8:" + a100 + " --to team --local-queue inference"},
		{"quota", "quota --to production --pool balanced-inference=3x8:" + a100 + " --pool training-h100=2x8:" + h100 +
			" --pool critical-agents=2x8:" + a100 + " --priority training-h100=500 --priority critical-agents=1000"},
		{"configs", "kueue -f " + filepath.Join("..", "..", "gpuslice-agent", "testdata", "configs.yaml") + " --pool recommended=1x8"},
	} {
		t.Run(row.name, func(t *testing.T) {
			got := rendered(t, append([]string{"-f", pools}, strings.Fields(row.args)...)...)
			golden := filepath.Join("testdata", "objects", row.name+".yaml")
			agenttest.Golden(t, golden, got, *update)
			if said := validated(t, got, "validate", "-f", "-"); strings.Contains(said, "error") {
				t.Errorf("validate says of it:\n%s", said)
			}
		})
	}
}

// commands are those that these tests run: validate reads what render writes.
var commands = []cluster.Command{Command, validate.Command}

// validated is what a command says, and its error.
func validated(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	return agenttest.Said(t, commands, stdin, args...)
}

func rendered(t *testing.T, args ...string) string {
	t.Helper()
	return validated(t, "", append([]string{"render"}, args...)...)
}

func TestValidateIsNotNeededToSeeWhatRenderMisses(t *testing.T) {
	pools := filepath.Join("..", "..", "..", "deploy", "examples", "configmap-pools.yaml")
	const both = " --pool research=1x8:NVIDIA-A100-SXM4-80GB --pool critical-agents=1x8:NVIDIA-A100-SXM4-80GB"
	for args, want := range map[string]string{
		"kueue --pool research=1x8":                                                                   "name files of profiles or MIG configs with -f",
		"kueue -f " + pools:                                                                           "give the nodes by --pool, or have them read from the cluster by --nodes",
		"kueue -f " + pools + " --pool research=1x8 --nodes a":                                        "give the nodes by --pool, or have them read from the cluster by --nodes",
		"kueue -f " + pools + " --pool research=8":                                                    `pool "research=8": write PROFILE=NODESxGPUS:MODEL, like small-inference=4x8:NVIDIA-A100-SXM4-80GB`,
		"kueue -f " + pools + " --pool research=1x8":                                                  "pool research: the profile is about model NVIDIA-A100*: name the model of its GPUs, like research=1x8:NVIDIA-A100-SXM4-80GB",
		"kueue -f " + pools + " --pool reserch=1x8":                                                   `no profile or MIG config is named "reserch": did you mean research?`,
		"quota -f " + pools + " --pool research=1x8:NVIDIA-A100":                                      "name the namespace of the quota by --to",
		"quota -f " + pools + " --pool research=1x8:NVIDIA-A100 --to a --priority other=1":            "priority other: none of the pools is of this name",
		"kueue -f " + pools + " --pool research=1x8:NVIDIA-A100 --local-queue a":                      `flag --local-queue is "a": write NAMESPACE/NAME`,
		"kueue -f " + pools + " --pool balanced-inference=1x8:NVIDIA-A100-80GB --mig-strategy single": "MIG strategy is single",
		"kueue -f " + pools + both + " --local-queue a/b":                                             "flag --local-queue is a/b: the pools are of 2 ClusterQueues, and a LocalQueue is of one: write a/b=PROFILE, of critical-agents; research",
		"kueue -f " + pools + both + " --local-queue a/b=training":                                    "flag --local-queue is a/b=training: no pool with GPUs is of this profile; there are critical-agents; research",
		"kueue -f " + pools + both + " --local-queue a/b=":                                            `flag --local-queue is "a/b=": write NAMESPACE/NAME, or NAMESPACE/NAME=PROFILE`,
		"kueue -f " + pools + both + " --local-queue a/b=research --local-queue a/b=critical-agents":  `flag --local-queue is "a/b" twice`,
		"hardwareprofiles -f " + pools + both + " --local-queue b":                                    "flag --local-queue is b: the pools are of 2 ClusterQueues, and a LocalQueue is of one: render the HardwareProfiles of each apart",
		"hardwareprofiles -f " + pools + both + " --memory 8Gi:4Gi":                                   `flag --memory is "8Gi:4Gi": write DEFAULT:MOST, like 8Gi:16Gi`,
		"hardwareprofiles -f " + pools + both + " --cpu none":                                         `flag --cpu is "none": write DEFAULT:MOST`,
		"kueue -f " + pools + both + " --by-instance-type":                                            "--by-instance-type is about the cluster's nodes: say it with --nodes",
		"kueue -f " + pools + both + " --pool research=1x8:NVIDIA-A100@g6/4":                          `pool research: "g6/4" is no instance type: `,
		"kueue -f " + pools + both + " --priority research":                                           `priority "research": write PROFILE=VALUE`,
		"kueue -f " + pools + both + " --cluster-queue " + strings.Repeat("x", 250):                   `flag --cluster-queue is "xxx`,
		"":                                   "say what to render: kueue, flavors, kueue-config, dra, hardwareprofiles, quota or prices",
		"hardwareprofile -f " + pools:        `render does not write "hardwareprofile": say kueue`,
		"kueue -f " + pools + " --nodes a=(": `flag --nodes is "a=(": `,
		"kueue -f " + pools + " --pool research=1x8 --mig-strategy none": `flag --mig-strategy is "none": write single or mixed`,
	} {
		if got := rendered(t, strings.Fields(args)...); !strings.HasPrefix(got, "error: ") || !strings.Contains(got, want) {
			t.Errorf("render %s: says\n%s\nwant %s", args, got, want)
		}
	}
}

// A flag that becomes a name in an object is checked as the API server checks the name, before anything is written.
func TestRenderRefusesNamesThatTheAPIServerRefuses(t *testing.T) {
	from := []string{"-f", filepath.Join("..", "..", "..", "deploy", "examples", "configmap-pools.yaml"), "--pool", "research=1x8:NVIDIA-A100"}
	long := strings.Repeat("x", 64)
	for _, row := range []struct{ kind, flag, wrong, right string }{
		{"kueue", "cluster-queue", "GPUs", "gpus.of-all"},
		{"kueue", "cluster-queue", "", long},
		{"kueue", "cohort", "all_teams", "all"},
		{"kueue", "topology", "racks/1", "racks"},
		{"kueue", "local-queue", "Team/inference", "team/inference"},
		{"kueue", "local-queue", "a.b/inference", "team/in.ference"},
		{"kueue", "local-queue", "team/a b", "team/a"},
		{"kueue", "local-queue", "team/" + long, "team/" + long[1:]},
		{"kueue", "local-queue", "team/a/b", "team/a"},
		{"flavors", "topology", "racks: x", "racks"},
		{"hardwareprofiles", "to", "a.b", "a"},
		{"hardwareprofiles", "to", "", "a"},
		{"hardwareprofiles", "local-queue", "a\nb", "a.b"},
		{"quota", "to", "Team A", "team"},
		{"quota", "to", long, long[1:]},
		{"quota", "name", "../gpus", "gpus"},
	} {
		args := func(value string) []string {
			out := append([]string{row.kind, "--" + row.flag, value}, from...)
			if row.flag == "name" {
				out = append(out, "--to", "team")
			}
			return out
		}
		got := rendered(t, args(row.wrong)...)
		if !strings.HasPrefix(got, "error: flag --"+row.flag+" is \"") || strings.Count(got, "\n") != 1 {
			t.Errorf("%s --%s %q: it says\n%s", row.kind, row.flag, row.wrong, got)
		}
		if got := rendered(t, args(row.right)...); !strings.HasPrefix(got, "# research") {
			t.Errorf("%s --%s %q: it says\n%s", row.kind, row.flag, row.right, got)
		}
	}
}

func TestNodesAreCountedByWhatTheyAskFor(t *testing.T) {
	node := func(name string, labels map[string]string, status string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels, Annotations: map[string]string{"gpuslice.io/status": status}}}
	}
	client := fake.NewClientset(
		node("a", map[string]string{"gpuslice.io/profile": "research", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-SHARED", "nvidia.com/gpu.count": "8"}, ""),
		node("b", map[string]string{"gpuslice.io/profile": "research", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.count": "8"}, "what no one can read"),
		node("c", map[string]string{"nvidia.com/mig.config": "small", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "nvidia.com/gpu.count": "14"},
			`{"gpus": [{"index": 0}, {"index": 1}], "owner": "plugin"}`),
		node("d", map[string]string{"nvidia.com/mig.config": "small", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "nvidia.com/gpu.count": "14"}, ""),
		node("e", map[string]string{"nvidia.com/gpu.count": "8"}, ""),
		node("f", map[string]string{"nvidia.com/mig.config": "small", "nvidia.com/gpu.count": "560"}, ""),
		node("g", map[string]string{"nvidia.com/mig.config": "small"}, ""),
		node("h", map[string]string{"nvidia.com/mig.config": "small"}, `{"gpus": [{"index": 0}], "owner": "DRA static"}`),
		node("j", map[string]string{"gpuslice.io/profile": "research", "nvidia.com/gpu.count": "8", "nvidia.com/mig.config.state": "failed"}, ""),
		node("i", map[string]string{"nvidia.com/mig.config": "small"}, `{"gpus": [{"index": 0}], "owner": "both"}`),
	)
	from := Sources{Profiles: map[string]catalog.Profile{"research": {Sharing: sharedBy(catalog.SharingTimeSlicing, false, map[string]int{"nvidia.com/gpu": 3})}}}
	pools, _, left, err := from.poolsOf(t.Context(), clientset.Of(client), "", false)
	if err != nil {
		t.Fatal(err)
	}
	want := []Pool{{Name: "research", Nodes: 2, GPUs: 8, Model: "NVIDIA-A100-SXM4-80GB"}, {Name: "small", Nodes: 1, GPUs: 2, Model: "NVIDIA-A100-SXM4-80GB"}}
	if diff := cmp.Diff(want, pools); diff != "" {
		t.Errorf("pools (-want +got):\n%s", diff)
	}
	byDRA, _, _, err := Sources{DRA: true}.poolsOf(t.Context(), clientset.Of(client), "", false)
	if n := slices.IndexFunc(byDRA, func(p Pool) bool { return p == Pool{Name: "small", Nodes: 1, GPUs: 1} }); err != nil || n < 0 {
		t.Errorf("with --dra: error %v, pools %v", err, byDRA)
	}
	if diff := cmp.Diff([]string{
		"node d is left out: no agent says how many GPUs it has, and its label nvidia.com/gpu.count=14 counts MIG devices, " +
			"under the device plugin's MIG strategy single; count it by --pool",
		"node e is left out: it has neither the label gpuslice.io/profile nor nvidia.com/mig.config",
		"node f is left out: no agent says how many GPUs it has, and its label nvidia.com/gpu.count=560 is impossible: a machine has 1 to 64; count it by --pool",
		"node g is left out: neither its agent nor the label nvidia.com/gpu.count says how many GPUs it has; count it by --pool",
		"node h is left out: its agent says that NVIDIA's DRA driver has its GPUs (DRA static), so it offers no resources of the device plugin: count it with --dra",
		"node i is left out: its agent says that several programs advertise its GPUs, or a DRA driver other than NVIDIA's",
		"node j is left out: its agent has not carried out its labels (nvidia.com/mig.config.state=failed), so flavors and hardware profiles do not select it",
	}, left); diff != "" {
		t.Errorf("left out (-want +got):\n%s", diff)
	}
}

// A flavor without a type would have the nodes of each.
func TestNodesWithoutAnInstanceTypeAreLeftOutOfThoseByType(t *testing.T) {
	node := func(name, kind string) *corev1.Node {
		labels := map[string]string{"gpuslice.io/profile": "research", "nvidia.com/gpu.count": "8"}
		if kind != "" {
			labels["node.kubernetes.io/instance-type"] = kind
		}
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	}
	pools, _, left, err := Sources{}.poolsOf(t.Context(), clientset.Of(fake.NewClientset(node("a", "g6.4xlarge"), node("b", ""), node("c", "g6.12xlarge"))), "", true)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Pool{{Name: "research", Nodes: 1, GPUs: 8, Type: "g6.12xlarge"}, {Name: "research", Nodes: 1, GPUs: 8, Type: "g6.4xlarge"}}, pools); diff != "" {
		t.Errorf("pools (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"node b is left out: it has no label node.kubernetes.io/instance-type"}, left); diff != "" {
		t.Errorf("left out (-want +got):\n%s", diff)
	}
}

// Kueue's pods come to nodes with taints only where the flavor has them tolerate these. What they may request of cpu and memory is what the nodes have.
func TestWhatRenderWritesFromNodesIsNoDrift(t *testing.T) {
	taint := func(key, value, effect string) any {
		return map[string]any{"key": key, "value": value, "effect": effect}
	}
	all := []any{
		taint("nvidia.com/gpu", "present", "NoSchedule"), taint("gpuslice.io/not-ready", "", "NoSchedule"), taint("gpuslice.io/repartitioning", "", "NoSchedule"),
		taint("node.kubernetes.io/unschedulable", "", "NoSchedule"), taint("startup-taint.cluster-autoscaler.kubernetes.io/gpuslice", "", "NoSchedule"),
	}
	var nodes []any
	for name, offers := range map[string]map[string]any{"a": {"cpu": "64", "memory": "512Gi"}, "b": {"cpu": "31500m"}} {
		offers["nvidia.com/gpu"] = "56"
		nodes = append(nodes, map[string]any{
			"metadata": map[string]any{"name": name, "labels": map[string]any{
				"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.count": "8", "gpuslice.io/profile": "small-inference",
				"workload-type": "production-inference", "mig-profile": "1g.10gb",
			}},
			"spec":   map[string]any{"taints": append(slices.Clone(all), taint("restrictedaccess", name, "NoExecute"))},
			"status": map[string]any{"allocatable": offers},
		})
	}
	objects := map[string][]any{}
	kubeconfig := agenttest.Kubeconfig(t, func(path string) any {
		switch of := path[strings.LastIndex(path, "/")+1:]; {
		case path == "/api/v1/nodes":
			return map[string]any{"kind": "NodeList", "apiVersion": "v1", "items": nodes}
		case path == "/apis/kueue.x-k8s.io":
			return map[string]any{"kind": "APIGroup", "apiVersion": "v1", "name": "kueue.x-k8s.io", "versions": []any{map[string]any{"groupVersion": "kueue.x-k8s.io/v1beta2", "version": "v1beta2"}}}
		case strings.HasPrefix(path, "/apis/kueue.x-k8s.io/v1beta2/") || of == "resourcequotas":
			return map[string]any{"kind": "List", "apiVersion": "v1", "items": append([]any{}, objects[of]...)}
		}
		return nil
	})
	written := rendered(t, "kueue", "-f", filepath.Join("..", "..", "..", "deploy", "examples", "configmap-pools.yaml"), "--nodes", "gpuslice.io/profile", "--kubeconfig", kubeconfig)
	for text := range strings.SplitSeq(written, "---\n") {
		var object map[string]any
		if err := yaml.Unmarshal([]byte(text), &object); err != nil {
			t.Fatal(err)
		}
		kind, _ := object["kind"].(string)
		objects[strings.ToLower(kind)+"s"] = append(objects[strings.ToLower(kind)+"s"], object)
	}
	const want = "  tolerations:\n  - effect: NoSchedule\n    key: gpu\n    operator: Equal\n    value: mig\n  - effect: NoSchedule\n    key: nvidia.com/gpu\n    operator: Exists\n" +
		"  - effect: NoExecute\n    key: restrictedaccess\n    operator: Exists\n---\n"
	const quotas = "      - name: nvidia.com/gpu\n        nominalQuota: \"112\"\n      - name: cpu\n        nominalQuota: 95500m\n" +
		"      - name: ephemeral-storage\n        nominalQuota: 100Pi\n      - name: memory\n        nominalQuota: 100Pi\n" // of what not each node reports
	if !strings.Contains(written, want) || !strings.Contains(written, quotas) {
		t.Errorf("rendered\n%s\nwant\n%s\nand\n%s", written, want, quotas)
	}
	got := validated(t, "", "validate", "--against-cluster", "--kubeconfig", kubeconfig)
	if !strings.HasPrefix(got, "read: ClusterQueue 1, LocalQueue 0, ResourceFlavor 1, ResourceQuota 0\n") || strings.Contains(got, "drift") || !strings.Contains(got, "no quota, queue or hardware profile promises more") {
		t.Errorf("validate says of it\n%s", got)
	}
}

// Nodes of one type may have a taint that those of another have not.
func TestEachInstanceTypeOfAPoolHasAFlavor(t *testing.T) {
	var nodes []any
	for name, kind := range map[string]string{"a": "g6.4xlarge", "b": "g6.4xlarge", "c": "g6.12xlarge", "d": ""} {
		nodes = append(nodes, map[string]any{
			"metadata": map[string]any{"name": name, "labels": map[string]any{
				"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.count": "1", "gpuslice.io/profile": "research", "node.kubernetes.io/instance-type": kind,
			}},
			"spec": map[string]any{"taints": []any{map[string]any{"key": "type", "value": kind, "effect": "NoSchedule"}, map[string]any{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}}},
		})
	}
	kubeconfig := agenttest.Kubeconfig(t, func(string) any { return map[string]any{"kind": "NodeList", "apiVersion": "v1", "items": nodes} })
	got := rendered(t, "flavors", "-f", filepath.Join("..", "..", "..", "deploy", "examples", "configmap-pools.yaml"), "--nodes", "nvidia.com/gpu.count", "--by-instance-type", "--kubeconfig", kubeconfig)
	for name, want := range map[string]string{
		"research-g6.4xlarge":  "    node.kubernetes.io/instance-type: g6.4xlarge\n    nvidia.com/mig.config.state: success\n    workload-type: research\n",
		"research-g6.12xlarge": "    node.kubernetes.io/instance-type: g6.12xlarge\n    nvidia.com/mig.config.state: success\n    workload-type: research\n",
	} {
		_, of, _ := strings.Cut(got, "  name: "+name+"\n")
		of, _, _ = strings.Cut(of, "---\n")
		_, kind, _ := strings.Cut(name, "-")
		if !strings.Contains(of, want) || !strings.Contains(of, "    key: nvidia.com/gpu\n    operator: Exists\n") || !strings.Contains(of, "    value: "+kind+"\n") {
			t.Errorf("of %s it writes\n%s\nwant\n%s", name, of, want)
		}
	}
	if !strings.HasPrefix(got, "# research, g6.12xlarge: 1 node x 1 GPU, nvidia.com/gpu 3\n# research, g6.4xlarge: 2 nodes x 1 GPU, nvidia.com/gpu 6\n") {
		t.Errorf("it writes\n%s", got)
	}
}

// Taints that only some of the nodes have close these nodes on purpose.
func TestRenderSaysWhereEachNodeIsClosedByATaintOfItsOwn(t *testing.T) {
	var nodes []any
	for _, name := range []string{"a", "b"} {
		nodes = append(nodes, map[string]any{
			"metadata": map[string]any{"name": name, "labels": map[string]any{
				"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.count": "8", "gpuslice.io/profile": "small-inference",
			}},
			"spec": map[string]any{"taints": []any{map[string]any{"key": "team-" + name, "effect": "NoSchedule"}}},
		})
	}
	kubeconfig := agenttest.Kubeconfig(t, func(string) any { return map[string]any{"kind": "NodeList", "apiVersion": "v1", "items": nodes} })
	const want = "small-inference: each of its 2 nodes has a taint that not all of them have, so pods do not tolerate it: team-a:NoSchedule; team-b:NoSchedule; "
	run := func() string {
		var aside bytes.Buffer
		c := (&cluster.Options{}).Root(commands...)
		c.SetOut(&bytes.Buffer{})
		c.SetErr(&aside)
		c.SetArgs([]string{"render", "flavors", "-f", filepath.Join("..", "..", "..", "deploy", "examples", "configmap-pools.yaml"), "--nodes", "nvidia.com/gpu.count", "--kubeconfig", kubeconfig})
		if err := c.ExecuteContext(t.Context()); err != nil {
			t.Fatal(err)
		}
		return aside.String()
	}
	if got := run(); !strings.Contains(got, want) {
		t.Errorf("it says %q, want %q", got, want)
	}
	delete(nodes[1].(map[string]any), "spec") //nolint:errcheck // made above
	if got := run(); got != "" {
		t.Errorf("with one that is open it says %q", got)
	}
}

// What one node asks for is no reason to say nothing of the others.
func TestRenderLeavesOutNodesThatCannotBeComputed(t *testing.T) {
	nodes := []any{}
	for name, profile := range map[string]string{"a": "small-inference", "b": "small-inference", "c": "", "d": "reserch", "e": "training-h100"} {
		labels := map[string]string{"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.count": "8", "nvidia.com/mig.config": "all-1g.5gb"}
		if profile != "" {
			labels["gpuslice.io/profile"] = profile
		}
		nodes = append(nodes, map[string]any{"metadata": map[string]any{"name": name, "labels": labels}})
	}
	kubeconfig := agenttest.Kubeconfig(t, func(string) any { return map[string]any{"kind": "NodeList", "apiVersion": "v1", "items": nodes} })
	run := func(selected ...any) (said, left string, err error) {
		nodes = selected
		var out, aside bytes.Buffer
		c := (&cluster.Options{}).Root(commands...)
		c.SetOut(&out)
		c.SetErr(&aside)
		c.SetArgs([]string{"render", "quota", "--to", "team", "-f", filepath.Join("..", "..", "..", "deploy", "examples", "configmap-pools.yaml"), "--nodes", "nvidia.com/gpu.count", "--kubeconfig", kubeconfig})
		err = c.ExecuteContext(t.Context())
		return out.String(), aside.String(), err
	}
	all := nodes
	said, left, err := run(all...)
	if err != nil || !strings.HasPrefix(said, "# small-inference: 2 nodes x 8 GPUs, nvidia.com/gpu 112\napiVersion") {
		t.Errorf("error %v, it says\n%s", err, said)
	}
	for _, want := range []string{
		"left out: 1 node (c), since their devices cannot be computed: all-1g.5gb is not in the files: the agent makes such configs",
		"left out: 1 node (d), since their devices cannot be computed: no profile or MIG config is named \"reserch\"",
		"left out: 1 node (e), since their devices cannot be computed: pool training-h100: ",
	} {
		if !strings.Contains(left, want) {
			t.Errorf("beside it it does not say %q:\n%s", want, left)
		}
	}
	only := slices.DeleteFunc(all, func(n any) bool { return n.(map[string]any)["metadata"].(map[string]any)["name"] != "c" }) //nolint:errcheck // made above
	if said, _, err := run(only...); err == nil || !strings.Contains(err.Error(), "all-1g.5gb is not in the files") {
		t.Errorf("of that node alone: error %v, it says\n%s", err, said)
	}
}

// The objects are written, since a table may be older than a model: what it says stands next to them.
func TestRenderWarnsOfWhatAModelDoesNotHold(t *testing.T) {
	file := filepath.Join(t.TempDir(), "configs.yaml")
	text := "version: v1\nmig-configs:\n  big: [{devices: all, mig-enabled: true, mig-devices: {4g.40gb: 1}}]\n  many: [{devices: [0], mig-enabled: true, mig-devices: {1g.10gb: 8}}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	const refuse = ": agents refuse it there, and the objects promise what such nodes do not offer\n"
	for pool, want := range map[string]string{
		"big=1x8:NVIDIA-A30":                     "big: by NVIDIA's tables NVIDIA-A30 has no 4g.40gb" + refuse,
		"big=1x8:NVIDIA-A100-SXM4-80GB":          "",
		"big=1x8":                                "",
		"many=1x1:NVIDIA H100 80GB HBM3":         "many: by NVIDIA's tables NVIDIA H100 80GB HBM3 holds at most 7 of 1g.10gb" + refuse,
		"many=1x1:NVIDIA-Something-of-next-year": "",
	} {
		var out, left strings.Builder
		c := (&cluster.Options{}).Root(Command)
		c.SetOut(&out)
		c.SetErr(&left)
		c.SetArgs([]string{"render", "quota", "--to", "team", "-f", file, "--pool", pool})
		if err := c.ExecuteContext(t.Context()); err != nil || left.String() != want || !strings.Contains(out.String(), "kind: ResourceQuota") {
			t.Errorf("%s: error %v, it says %q, want %q\n%s", pool, err, left.String(), want, out.String())
		}
	}
}

// sharesNot is a label by which a pool of nodes that share nothing is kept from others.
const sharesNot = "nvidia.com/gpu.sharing-strategy"

// beside is a node b beside node a, which shares nothing.
type beside struct {
	labels map[string]string
	status string
	offers string // GPUs; empty for 8
	want   string // why b is left out; empty if it counts
	flavor string // label that keeps it off; empty for none, "-" if the pool is left out
}

// node is node a or b.
func (row beside) node(name string) map[string]any {
	labels := map[string]string{"nvidia.com/mig.config": "uncut", "nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.count": "8", sharesNot: "none"}
	status, offers := "", "8"
	if name == "b" {
		maps.Copy(labels, row.labels)
		status = row.status
	}
	if name == "b" && row.offers != "" {
		offers = row.offers
	}
	return map[string]any{
		"metadata": map[string]any{"name": name, "labels": labels, "annotations": map[string]any{"gpuslice.io/status": status}},
		"status":   map[string]any{"allocatable": map[string]any{"nvidia.com/gpu": offers}},
	}
}

// agrees reports whether render has counted and written what it should.
func (row beside) agrees(err error, out, left string) bool {
	switch {
	case row.flavor == "-":
		return err != nil && strings.Contains(err.Error(), "would also run on others with its labels") && strings.Contains(err.Error(), "(b)") && out == ""
	case row.want == "":
		return err == nil && left == "" && strings.HasPrefix(out, "# uncut: 2 nodes x 8 GPUs, nvidia.com/gpu 16\n") && !strings.Contains(out, sharesNot)
	}
	return err == nil && strings.Contains(left, "node b is left out: "+row.want) && strings.HasPrefix(out, "# uncut: 1 node x 8 GPUs, nvidia.com/gpu 8\n") &&
		strings.Contains(out, row.flavor+": ")
}

// A node that shares its GPUs is never counted among those of whole ones, and no flavor of these selects it.
func TestNodesThatShareAreNotCountedAsWhole(t *testing.T) {
	file := filepath.Join(t.TempDir(), "configs.yaml")
	text := "version: v1\nmig-configs:\n  uncut: [{devices: all, mig-enabled: false}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	plugin := filepath.Join(t.TempDir(), "plugin.yaml")
	text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: plugin}\ndata:\n  four: |\n    version: v1\n    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n" +
		"  plain: |\n    version: v1\n    flags: {migStrategy: mixed}\n"
	if err := os.WriteFile(plugin, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, row := range map[string]beside{
		"neither":                    {},
		"a config of the files":      {labels: map[string]string{config.LabelDevicePluginConfig: "plain"}},
		"a config that shares":       {labels: map[string]string{config.LabelDevicePluginConfig: "four"}, want: "its label nvidia.com/device-plugin.config=four requests sharing by time-slicing, and uncut names no sharing", flavor: "-"},
		"a config of no file":        {labels: map[string]string{config.LabelDevicePluginConfig: "five", sharesNot: "time-slicing"}, want: "its label nvidia.com/device-plugin.config=five names a config that is not in the files", flavor: sharesNot},
		"one that its agent wrote":   {labels: map[string]string{config.LabelDevicePluginConfig: config.OwnPluginKey + "1"}, want: "its label nvidia.com/device-plugin.config=gpuslice-1 names a config that is not in the files", flavor: "-"},
		"a model of shared GPUs":     {labels: map[string]string{"nvidia.com/gpu.product": "NVIDIA-L4-SHARED"}, want: "its label nvidia.com/gpu.product=NVIDIA-L4-SHARED says that it shares", flavor: "nvidia.com/gpu.product"},
		"a number of replicas":       {labels: map[string]string{"nvidia.com/mig-1g.10gb.replicas": "2"}, want: "its label nvidia.com/mig-1g.10gb.replicas=2 says that it shares", flavor: "-"},
		"a strategy":                 {labels: map[string]string{sharesNot: "mps"}, want: "its label nvidia.com/gpu.sharing-strategy=mps says that it shares", flavor: sharesNot},
		"the status of its agent":    {status: `{"capacity": "nvidia.com/gpu 32 = 8 x 4 time-slicing"}`, want: "its agent says that it shares: nvidia.com/gpu 32 = 8 x 4 time-slicing", flavor: "-"},
		"another status":             {status: `{"capacity": "nvidia.com/gpu 8"}`},
		"one that is not to be read": {status: `what no one can read`},
		"more than its GPUs":         {offers: "32", want: "it offers 32 of nvidia.com/gpu, and uncut makes 8: ", flavor: "-"},
		"less than its GPUs":         {offers: "7"},
		"more, in mid-change":        {labels: map[string]string{config.LabelMIGConfigState: "pending"}, offers: "32"},
	} {
		t.Run(name, func(t *testing.T) {
			nodes := []any{row.node("a"), row.node("b")}
			kubeconfig := agenttest.Kubeconfig(t, func(string) any { return map[string]any{"kind": "NodeList", "apiVersion": "v1", "items": nodes} })
			for _, kind := range []string{"kueue", "hardwareprofiles"} {
				var out, left bytes.Buffer
				c := (&cluster.Options{}).Root(commands...)
				c.SetOut(&out)
				c.SetErr(&left)
				c.SetArgs([]string{"render", kind, "-f", file, "-f", plugin, "--nodes", "nvidia.com/gpu.count", "--kubeconfig", kubeconfig})
				if err := c.ExecuteContext(t.Context()); !row.agrees(err, out.String(), left.String()) {
					t.Errorf("%s: error %v, it says %s, want %q and %q; it writes\n%s", kind, err, left.String(), row.want, row.flavor, out.String())
				}
			}
		})
	}
}

// The label of a MIG config stays on a node whose profile wins over it, and nodes have it that --nodes does not select.
func TestNoFlavorSelectsNodesOfAnotherClass(t *testing.T) {
	file := filepath.Join(t.TempDir(), "files.yaml")
	text := "apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\nprofiles:\n  three: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}}\n  alone: {sharing: none}\n" +
		"  slices: {mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}], migStrategy: single, sharing: none}\n" +
		"---\nversion: v1\nmig-configs:\n  uncut: [{devices: all, mig-enabled: false}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	const strategy, product = "nvidia.com/gpu.sharing-strategy", "nvidia.com/gpu.product"
	for name, row := range map[string]struct {
		other map[string]string // labels of the other node, beside those of the pool's
		want  string            // label that keeps the flavor off it; empty for none, "-" if the pool is left out
	}{
		"of a profile that shares":            {map[string]string{config.LabelProfile: "three", strategy: "time-slicing"}, strategy},
		"of a profile that has yet to share":  {map[string]string{config.LabelProfile: "three"}, "-"},
		"of a profile that cuts":              {map[string]string{config.LabelProfile: "slices", product: "NVIDIA-L4-MIG-1g.10gb"}, product},
		"of a profile that is in no file":     {map[string]string{config.LabelProfile: "four", strategy: "mps"}, strategy},
		"of a profile that shares nothing":    {map[string]string{config.LabelProfile: "alone", product: "NVIDIA-L40"}, ""},
		"not selected, and shares":            {map[string]string{"pool": "b", strategy: "time-slicing"}, strategy},
		"not selected, and may share":         {map[string]string{"pool": "b", config.LabelDevicePluginConfig: "any"}, "-"},
		"not selected, of one that shares":    {map[string]string{"pool": "b", config.LabelProfile: "three", strategy: "mps"}, strategy},
		"not selected, and shares nothing":    {map[string]string{"pool": "b"}, ""},
		"not selected, of an unknown number":  {map[string]string{"pool": "b", config.LabelProfile: "slices", "nvidia.com/gpu.count": "", product: "NVIDIA-L4-MIG-1g.10gb"}, product},
		"not selected, the same, of the pool": {map[string]string{"pool": "b", "nvidia.com/gpu.count": ""}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var nodes []any
			for _, of := range []string{"a", "b"} {
				labels := map[string]string{config.LabelMIGConfig: "uncut", config.LabelMIGConfigState: "success", product: "NVIDIA-L4", "nvidia.com/gpu.count": "8", strategy: "none", "pool": "a"}
				if of == "b" {
					maps.Copy(labels, row.other)
				}
				nodes = append(nodes, map[string]any{"metadata": map[string]any{"name": of, "labels": labels}})
			}
			kubeconfig := agenttest.Kubeconfig(t, func(string) any { return map[string]any{"kind": "NodeList", "apiVersion": "v1", "items": nodes} })
			var out bytes.Buffer
			c := (&cluster.Options{}).Root(commands...)
			c.SetOut(&out)
			c.SetErr(&out)
			c.SetArgs([]string{"render", "flavors", "-f", file, "--nodes", "pool=a", "--kubeconfig", kubeconfig})
			err := c.ExecuteContext(t.Context())
			got := fmt.Sprint(out.String(), err)
			_, flavor, _ := strings.Cut(got, "  name: uncut\n")
			flavor, _, _ = strings.Cut(flavor, "  tolerations:\n")
			want := row.want != "-" && strings.Contains(flavor, row.want)
			if row.want == "" {
				want = strings.HasSuffix(flavor, "  nodeLabels:\n    nvidia.com/mig.config: uncut\n    nvidia.com/mig.config.state: success\n")
			}
			if row.want == "-" {
				want = strings.Contains(got, "pool uncut: its pods would also run on others with its labels") && strings.Contains(got, "(b)") && flavor == ""
			}
			if !want {
				t.Errorf("it writes\n%s", got)
			}
		})
	}
}

// A pool without its nodes does not say whether they share.
func TestRenderSaysThatItDoesNotKnowTheSharingOfAPool(t *testing.T) {
	file := filepath.Join(t.TempDir(), "profiles.yaml")
	text := "apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\nprofiles:\n  whole: {mig: [{gpus: {all: true}, enabled: false}]}\n  alone: {mig: [{gpus: {all: true}, enabled: false}], sharing: none}\n" +
		"  slices: {mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	const want = "whole: its nodes keep the sharing that they have, and what is written is for nodes that share nothing: name sharing: none in the profile\n"
	for pool, want := range map[string]string{"whole=1x8": want, "alone=1x8": "", "slices=1x8": ""} {
		var out, left bytes.Buffer
		c := (&cluster.Options{}).Root(commands...)
		c.SetOut(&out)
		c.SetErr(&left)
		c.SetArgs([]string{"render", "kueue", "-f", file, "--pool", pool})
		if err := c.ExecuteContext(t.Context()); err != nil || left.String() != want {
			t.Errorf("%s: error %v, it says %q, want %q", pool, err, left.String(), want)
		}
	}
}
