package render

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// longestDescription bounds what people read in a list, in characters.
const longestDescription = 500

// Profiles names what HardwareProfiles are made for.
type Profiles struct {
	Namespace  string
	LocalQueue string // empty for profiles that go by the nodes' labels
	CPU        *Amount
	Memory     *Amount // nil for profiles that leave it to the workload, as CPU
}

// Amount is how much of a resource a workload gets unless its user asks for more, and how much that may be at most.
type Amount struct{ Default, Most string }

// ParseAmount reads "8Gi:16Gi", or "8Gi" for no more than that.
func ParseAmount(text string) (*Amount, error) {
	least, most, ranged := strings.Cut(text, ":")
	if !ranged {
		most = least
	}
	from, err := resource.ParseQuantity(least)
	to, wrong := resource.ParseQuantity(most)
	if err != nil || wrong != nil || from.Sign() <= 0 || to.Cmp(from) < 0 {
		return nil, fmt.Errorf("%q: write DEFAULT:MOST, like 8Gi:16Gi", sanitize.Cut(text, longestName))
	}
	return &Amount{from.String(), to.String()}, nil
}

// identifiers returns the resources of a profile: the one that the pools offer, then those that the flags name.
func (to Profiles) identifiers(o Offer) []kinds.Identifier {
	out := []kinds.Identifier{identifier(o)}
	for _, other := range []struct {
		amount     *Amount
		name, kind string
	}{{to.CPU, "cpu", "CPU"}, {to.Memory, "memory", "Memory"}} {
		if other.amount != nil {
			most, usual := intstr.Parse(other.amount.Most), intstr.Parse(other.amount.Default)
			out = append(out, kinds.Identifier{DisplayName: other.kind, Identifier: other.name, MinCount: usual, DefaultCount: usual, MaxCount: &most, ResourceType: other.kind})
		}
	}
	return out
}

// HardwareProfiles makes one for each resource that each name gives. A pod gets one slice or share, since a second one of a GPU does not help a
// program. Of whole GPUs it gets up to as many as a node has.
func HardwareProfiles(given []Given, to Profiles) ([]any, error) {
	if queues, err := queued(given); to.LocalQueue != "" && (err != nil || len(queues) > 1) {
		return nil, cmp.Or(err, fmt.Errorf("flag --local-queue is %s: the pools are of %d ClusterQueues, and a LocalQueue is of one: render the HardwareProfiles of each apart", to.LocalQueue, len(queues)))
	}
	var out []any
	of := map[string]string{} // profile, by the name of the object
	for _, g := range given {
		for _, o := range g.Offers {
			name, title := g.Name, g.Profile
			if len(g.Offers) > 1 {
				short := strings.TrimPrefix(strings.TrimPrefix(o.Resource, "nvidia.com/"), "mig-")
				name, title = g.Name+"-"+objectName(short), g.Profile+" "+short
			}
			if other, taken := of[name]; taken {
				return nil, fmt.Errorf("the HardwareProfiles of %s and %s would both be named %s: rename one of the two", other, g.Profile, name)
			}
			of[name] = g.Profile
			out = append(out, &kinds.HardwareProfile{
				TypeMeta: metav1.TypeMeta{APIVersion: kinds.HardwareProfileVersion, Kind: kinds.KindHardwareProfile},
				ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: to.Namespace, Annotations: map[string]string{
					kinds.AnnotationDisplayName: title,
					kinds.AnnotationDescription: sanitize.Cut(cmp.Or(g.Description, describe(o)), longestDescription),
					kinds.AnnotationDisabled:    "false",
					kinds.AnnotationVisibility:  "[]",
				}},
				Spec: kinds.HardwareProfileSpec{Identifiers: to.identifiers(o), Scheduling: scheduling(g, to.LocalQueue)},
			})
		}
	}
	return out, nil
}

func identifier(o Offer) kinds.Identifier {
	most := o.OfNode
	if o.Slice() || o.Replicas > 1 {
		most = 1
	}
	limit := intstr.FromInt32(int32(min(most, mostGPUs)))
	return kinds.Identifier{
		DisplayName: describe(o), Identifier: o.Resource, MinCount: intstr.FromInt32(1), DefaultCount: intstr.FromInt32(1), MaxCount: &limit,
		ResourceType: "Accelerator",
	}
}

// describe says what one of the resource is.
func describe(o Offer) string {
	what := "GPU"
	if o.Slice() {
		what = "GPU slice " + o.Device
	}
	if o.Replicas > 1 {
		return fmt.Sprintf("%s, shared by %d", what, o.Replicas)
	}
	return what
}

func scheduling(g Given, queue string) *kinds.Scheduling {
	if queue != "" {
		return &kinds.Scheduling{Type: kinds.SchedulingQueue, Kueue: &kinds.KueueScheduling{LocalQueueName: queue}}
	}
	return &kinds.Scheduling{Type: kinds.SchedulingNode, Node: &kinds.NodeScheduling{NodeSelector: g.Labels, Tolerations: tolerationsOf(g.Taints)}}
}

// Priority is the priority of the pods of one profile.
type Priority struct {
	Profile string
	Value   int32
}

// highestPriority is the highest that people may give; those above are Kubernetes' own.
const highestPriority = 1_000_000_000

// ParsePriority reads "production-inference=1000".
func ParsePriority(text string) (Priority, error) {
	profile, value, ok := strings.Cut(text, "=")
	n, err := strconv.ParseInt(value, 10, 32)
	if !ok || profile == "" || err != nil || n > highestPriority {
		return Priority{}, fmt.Errorf("priority %q: write PROFILE=VALUE with a whole number of at most %d", sanitize.Cut(text, longestName), highestPriority)
	}
	return Priority{Profile: profile, Value: int32(n)}, nil
}

// Quota makes a ResourceQuota of all that is given for one namespace, and a PriorityClass for each priority, highest first.
func Quota(given []Given, namespace, name string, priorities []Priority) ([]any, error) {
	quota := &corev1.ResourceQuota{
		TypeMeta: metav1.TypeMeta{APIVersion: kinds.QuotaVersion, Kind: kinds.KindResourceQuota}, ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{}},
	}
	for _, g := range given {
		for _, o := range g.Offers {
			key := corev1.ResourceName(corev1.DefaultResourceRequestsPrefix + o.Resource)
			total := quota.Spec.Hard[key]
			total.Add(*resource.NewQuantity(int64(o.Total), resource.DecimalSI))
			quota.Spec.Hard[key] = total
		}
	}
	classes, err := prioritized(given, priorities, func(name, description string, value int32) any {
		return &schedulingv1.PriorityClass{
			TypeMeta:   metav1.TypeMeta{APIVersion: kinds.PriorityVersion, Kind: kinds.KindPriorityClass},
			ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value, Description: description,
		}
	})
	return append([]any{quota}, classes...), err
}

// prioritized has a class for each priority, highest first.
func prioritized(given []Given, priorities []Priority, class func(name, description string, value int32) any) (out []any, err error) {
	priorities = slices.Clone(priorities)
	slices.SortStableFunc(priorities, func(a, b Priority) int { return cmp.Compare(b.Value, a.Value) })
	for i, p := range priorities {
		at := slices.IndexFunc(given, func(g Given) bool { return g.Profile == p.Profile })
		switch {
		case at < 0:
			return nil, fmt.Errorf("priority %s: none of the pools is of this name", sanitize.Cut(p.Profile, longestName))
		case slices.ContainsFunc(priorities[:i], func(other Priority) bool { return other.Profile == p.Profile }):
			return nil, fmt.Errorf("priority %s: there are two", sanitize.Cut(p.Profile, longestName))
		case strings.HasPrefix(given[at].Name, "system-"):
			return nil, fmt.Errorf("priority %s: a name that begins with system- is Kubernetes' own", p.Profile)
		}
		out = append(out, class(given[at].Name, sanitize.Cut(given[at].Description, longestDescription), p.Value))
	}
	return out, nil
}
