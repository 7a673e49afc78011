package repo_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/yaml"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/render"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/taints"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/nvml"
)

// pool is what the examples for autoscalers say of the nodes that they add.
type pool struct {
	labels    map[string]string
	taints    []corev1.Taint
	offers    string            // of all GPUs together
	announced map[string]string // the labels that an autoscaler is given beside the nodes' own
}

// poolOf reads a MachineSet, or a NodePool with its NodeOverlay.
func poolOf(t *testing.T, file string) (p pool) {
	t.Helper()
	r := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(read(t, "deploy/examples/"+file))))
	for {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return p
		}
		if err != nil {
			t.Fatal(err)
		}
		var o struct {
			Kind     string
			Metadata struct{ Annotations map[string]string }
			Spec     struct {
				KubeletConfig struct{ RegisterWithTaints []corev1.Taint }
				Template      struct {
					Metadata struct{ Labels map[string]string }
					Spec     struct {
						Metadata              struct{ Labels map[string]string }
						Taints, StartupTaints []corev1.Taint
					}
				}
				Capacity map[string]int
			}
		}
		if err := sigsyaml.Unmarshal(bytes.TrimSpace(doc), &o); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		spec := o.Spec.Template.Spec
		switch o.Kind {
		case "MachineSet":
			p.labels, p.offers, p.announced = spec.Metadata.Labels, o.Metadata.Annotations["machine.openshift.io/GPU"], map[string]string{}
			for _, label := range strings.Split(o.Metadata.Annotations["capacity.cluster-autoscaler.kubernetes.io/labels"], ",") {
				key, value, _ := strings.Cut(label, "=")
				p.announced[key] = value
			}
			// OpenShift puts them back for ever, and so takes the node from its pods.
			if len(spec.Taints) > 0 {
				t.Errorf("%s: the machine template has the taints %v, which OpenShift's nodelink-controller sets again each time that the agent takes one away", file, spec.Taints)
			}
			var announced []string
			for _, taint := range p.taints {
				announced = append(announced, taint.Key+"="+taint.Value+":"+string(taint.Effect))
			}
			if got := o.Metadata.Annotations["capacity.cluster-autoscaler.kubernetes.io/taints"]; got != strings.Join(announced, ",") || got == "" {
				t.Errorf("%s: the autoscaler is given the taints %q, and kubelet registers nodes with %q", file, got, announced)
			}
		case "KubeletConfig":
			p.taints = o.Spec.KubeletConfig.RegisterWithTaints
		case "NodePool":
			p.labels, p.taints = o.Spec.Template.Metadata.Labels, append(spec.Taints, spec.StartupTaints...)
		case "NodeOverlay":
			p.offers = fmt.Sprint(o.Spec.Capacity["nvidia.com/mig-1g.10gb"])
		}
	}
}

// saysLabelsOf checks that a new node has the profile's labels for the autoscaler, by which pods select nodes, and that nothing else sets them at the node.
func (p pool) saysLabelsOf(t *testing.T, file string, profile catalog.Profile) {
	t.Helper()
	for key, value := range profile.Labels {
		switch said, is := p.announced[key]; {
		case p.announced == nil:
			if p.labels[key] != value {
				t.Errorf("%s: the autoscaler is given the label %s=%s, and the profile gives %q", file, key, p.labels[key], value)
			}
		case !is || said != value:
			t.Errorf("%s: the autoscaler is given the label %s=%s, and the profile gives %q", file, key, said, value)
		case p.labels[key] != "":
			t.Errorf("%s: OpenShift sets the label %s of the profile again, whatever another profile says", file, key)
		}
		delete(p.announced, key)
	}
	for key, value := range p.announced {
		if p.labels[key] != value {
			t.Errorf("%s: the autoscaler is given %s=%s, and the nodes have %q", file, key, value, p.labels[key])
		}
	}
}

// An autoscaler that is given something else than what the agent makes of a node adds none, or adds nodes for ever.
func TestTheExamplesForAutoscalersSayWhatTheAgentMakes(t *testing.T) {
	profiles := exampleProfiles(t, "configmap-pools.yaml")
	second := configMap(t, "deploy", "components", "startup-taint", "key.yaml").Data["key"]
	if problems := config.MayBeStartupTaint(second); len(problems) > 0 || !strings.HasPrefix(second, "startup-taint.cluster-autoscaler.kubernetes.io/") {
		t.Errorf("the key of the component startup-taint is %q: %v", second, problems)
	}
	// OpenShift has no flag, and no field before 5.1: its autoscaler knows a startup taint by the prefix.
	for file, startup := range map[string]string{"machineset.yaml": second, "karpenter.yaml": config.TaintNotReady} {
		p := poolOf(t, file)
		name := p.labels[config.LabelProfile]
		profile, ok := profiles[name]
		if !ok {
			t.Fatalf("%s asks for the profile %q, which examples/configmap-pools.yaml does not have", file, name)
		}
		p.saysLabelsOf(t, file, profile)
		instances := 0
		for _, gpu := range apply(t, name, profiles, "gpus: [{model: A100-80GB, count: 8}]") {
			instances += len(gpu.Instances)
		}
		if got := fmt.Sprint(instances); got != p.offers {
			t.Errorf("%s: a node offers %s, and the autoscaler is given %q", file, got, p.offers)
		}
		want := map[string]bool{startup + ":NoSchedule": true}
		if file == "karpenter.yaml" { // of the fence behind which the agent cuts a new node
			want[config.TaintRepartitioning+":NoSchedule"], want[corev1.TaintNodeUnschedulable+":NoSchedule"] = true, true
		}
		for _, taint := range profile.Taints {
			want[taint.Key+":"+string(taint.Effect)] = true
		}
		for _, taint := range p.taints {
			if key := taint.Key + ":" + string(taint.Effect); !want[key] {
				t.Errorf("%s: no one takes the taint %s away", file, key)
			} else {
				delete(want, key)
			}
		}
		if len(want) > 0 {
			t.Errorf("%s: nodes do not begin with the taints %v", file, want)
		}
	}
}

// guide is what the objects of the guide "Working with GPUs" say together. They are in testdata as they are written there.
type guide struct {
	Metadata struct{ Annotations map[string]string }
	Spec     struct {
		Template struct {
			Spec struct {
				Metadata struct{ Labels labels.Set }
				Taints   []corev1.Taint
			}
		}
		ResourceLimits struct {
			GPUs []struct {
				Type string
				Max  int
			}
		}
		MaxReplicas int
	}
}

func readGuide(t *testing.T) (of guide) {
	t.Helper()
	ellipsis := regexp.MustCompile(`(?m)^ *\.\.\.\n`)
	for doc := range strings.SplitSeq(ellipsis.ReplaceAllString(read(t, "test/repo/testdata/working-with-gpus.txt"), ""), "---\n") {
		if err := sigsyaml.Unmarshal([]byte(doc), &of); err != nil {
			t.Fatalf("%v in\n%s", err, doc)
		}
	}
	return of
}

func TestTheMachineSetsOfAGuideFitTheAgent(t *testing.T) {
	node := readGuide(t).Spec.Template.Spec
	requests := labels.Set{}
	for _, key := range config.RequestLabels() {
		if node.Metadata.Labels.Has(key) {
			requests[key] = node.Metadata.Labels.Get(key)
		}
	}
	if diff := cmp.Diff(labels.Set{config.LabelDevicePluginConfig: "tesla-t4"}, requests); diff != "" {
		t.Errorf("what nodes request of the agent (-want +got):\n%s", diff)
	}
	for name, profile := range exampleProfiles(t, "configmap-pools.yaml") {
		for key := range profile.Labels {
			if node.Metadata.Labels.Has(key) {
				t.Errorf("a node has the label %s before the agent sets it for the profile %s", key, name)
			}
		}
	}
	found := labels.Merge(node.Metadata.Labels, labels.Set{"feature.node.kubernetes.io/pci-10de.present": "true"})
	all := append(slices.Clone(node.Taints), corev1.Taint{Key: nvml.ResourceGPU, Effect: corev1.TaintEffectNoSchedule}) // the guide's first
	for name, wants := range map[string][]corev1.Taint{"gpuslice-agent": nil, "gpuslice-device-plugin": node.Taints} {
		d := the[*appsv1.DaemonSet](t, name)
		if !goesTo(t, d, found) {
			t.Errorf("%s does not go to nodes with the labels %v", name, found)
		}
		if diff := cmp.Diff(wants, taints.Closing(all, d.Spec.Template.Spec.Tolerations), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("taints that %s does not tolerate (-want +got):\n%s", name, diff)
		}
	}
	var flavor render.Given
	if closed := flavor.Tolerate([][]corev1.Taint{all}, config.Default().StartupTaints()); len(closed) > 0 {
		t.Errorf("pods of a rendered flavor do not tolerate %v", closed)
	}
}

// Each node of the guide has one T4, which four pods share.
func TestThePageOfAutoscalersHasTheNumbersOfAGuide(t *testing.T) {
	of := readGuide(t)
	plugin, err := deviceplugin.Parse([]byte(configMap(t, "config", "deviceplugin", "testdata", "working-with-gpus.yaml").Data["tesla-t4"]))
	if err != nil {
		t.Fatal(err)
	}
	_, offers := plugin.Sharing.Offered(nvml.ResourceGPU)
	limit := of.Spec.ResourceLimits.GPUs[0]
	if limit.Type != of.Spec.Template.Spec.Metadata.Labels.Get("cluster-api/accelerator") || limit.Max != offers*of.Spec.MaxReplicas {
		t.Errorf("the ClusterAutoscaler limits %+v, and %d nodes with the labels %v offer %d GPUs each", limit, of.Spec.MaxReplicas, of.Spec.Template.Spec.Metadata.Labels, offers)
	}
	page := read(t, "deploy/AUTOSCALERS.md")
	for _, want := range []string{
		fmt.Sprintf("`machine.openshift.io/GPU: %q` | a T4 that %d pods share is `%q`", of.Metadata.Annotations["machine.openshift.io/GPU"], offers, fmt.Sprint(offers)),
		fmt.Sprintf("`max: %d` of `resourceLimits.gpus` | the shares count: %d nodes", limit.Max, limit.Max/offers),
	} {
		if !strings.Contains(page, want) {
			t.Errorf("deploy/AUTOSCALERS.md lacks %q", want)
		}
	}
}
