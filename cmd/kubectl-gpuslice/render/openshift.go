package render

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
)

// OperatorKueue is the object that Red Hat's operator reads to make Kueue's config. Source of its fields: openshift/kueue-operator, pkg/apis/kueueoperator/v1.
type OperatorKueue struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              OperatorSpec `json:"spec"`
}

// OperatorSpec is the spec of an OperatorKueue.
type OperatorSpec struct {
	ManagementState string         `json:"managementState"`
	Config          OperatorConfig `json:"config"`
}

// OperatorConfig is what the operator lets people configure of Kueue.
type OperatorConfig struct {
	Integrations Integrations         `json:"integrations"`
	Resources    *ConfiguredResources `json:"resources,omitempty"`
}

// Integrations are the kinds of objects with workloads that Kueue queues.
type Integrations struct {
	Frameworks []string `json:"frameworks"`
}

// frameworks are those of kinds that each cluster has: OpenShift AI's workbenches are StatefulSets, and its model servers Deployments.
var frameworks = []string{"BatchJob", "Deployment", "Pod", "StatefulSet"}

// labelManaged is of namespaces that the operator's Kueue looks at. It passes over the workloads of others.
const labelManaged = "kueue.openshift.io/managed"

// longestExpression bounds a selector of the operator's object, in characters.
const longestExpression = 1024

// operatorKueue is the one object that the operator takes.
func operatorKueue(mappings []DeviceClassMapping) (*OperatorKueue, error) {
	out := &OperatorKueue{
		TypeMeta: metav1.TypeMeta{APIVersion: kinds.KueueOperatorVersion, Kind: "Kueue"}, ObjectMeta: metav1.ObjectMeta{Name: "cluster"},
		Spec: OperatorSpec{ManagementState: "Managed", Config: OperatorConfig{Integrations: Integrations{frameworks}}},
	}
	for _, m := range mappings {
		for i := range m.Sources {
			s := &m.Sources[i]
			s.Type, s.Counter.DeviceSelector.Type = "Counter", "CEL"
			if n := len(s.Counter.DeviceSelector.CEL.Expression); n > longestExpression {
				return nil, fmt.Errorf("the GPUs are of too many models: their selector has %d characters, and the operator's Kueue takes %d: render fewer pools", n, longestExpression)
			}
		}
	}
	if n := len(mappings); n > 1 && len(mappings[0].Sources) > 0 {
		return nil, fmt.Errorf("flag --counter is given %d times, and the operator's Kueue takes a DeviceClass in one mapping: name one counter", n)
	}
	if len(mappings) > 0 {
		out.Spec.Config.Resources = &ConfiguredResources{mappings}
	}
	return out, nil
}

// managed are the namespaces of LocalQueues, each with the label that the operator asks for and with nothing else.
func managed(queues []LocalQueue) (out []any) {
	var names []string
	for _, local := range queues {
		names = append(names, local.Namespace)
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		out = append(out, &metav1.PartialObjectMetadata{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{labelManaged: "true"}},
		})
	}
	return out
}
