package repo_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
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
