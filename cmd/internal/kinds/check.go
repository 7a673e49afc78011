package kinds

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	strict "sigs.k8s.io/json"

	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/nvml"
)

// kind is what is known of one kind.
type kind struct {
	version  string
	replaced map[string]string // versions that are no longer taken, and why
	moved    map[string]string // fields that people write and that no object of the version has, and what to write
	into     func() any
	check    func(object any) []error
}

var known = map[string]kind{
	KindResourceFlavor: {
		version: KueueVersion, replaced: oldKueue,
		into:  func() any { return &ResourceFlavor{} },
		check: func(o any) []error { return checkOf(o, checkFlavor) },
	},
	KindClusterQueue: {
		version: KueueVersion, replaced: oldKueue,
		moved: map[string]string{"spec.cohort": "is cohortName from v1beta2 on"},
		into:  func() any { return &ClusterQueue{} },
		check: func(o any) []error { return checkOf(o, checkClusterQueue) },
	},
	KindLocalQueue: {
		version: KueueVersion, replaced: oldKueue,
		into:  func() any { return &LocalQueue{} },
		check: func(o any) []error { return checkOf(o, checkLocalQueue) },
	},
	KindWorkloadPriorityClass: {
		version: KueueVersion, replaced: oldKueue,
		moved: map[string]string{"globalDefault": "is of PriorityClass: workloads without a WorkloadPriorityClass have the priority of their pods"},
		into:  func() any { return &WorkloadPriorityClass{} },
		check: func(any) []error { return nil },
	},
	KindHardwareProfile: {
		version: HardwareProfileVersion,
		replaced: map[string]string{
			"dashboard.opendatahub.io/v1alpha1":      "is a group that is replaced: OpenShift AI 3 refuses to create or change such a one; write " + HardwareProfileVersion,
			"infrastructure.opendatahub.io/v1alpha1": "is deprecated: write " + HardwareProfileVersion,
		},
		moved: map[string]string{
			"spec.displayName": "is an annotation: write " + AnnotationDisplayName,
			"spec.description": "is an annotation: write " + AnnotationDescription,
			"spec.enabled":     "is an annotation: write " + AnnotationDisabled + `, "true" or "false"`,
			"spec.resourceLimits": "is a field that no version has, so that nothing is limited: write an entry of identifiers for the resource, as " +
				"{identifier: memory, displayName: Memory, minCount: 2Gi, defaultCount: 8Gi, maxCount: 16Gi, resourceType: Memory}",
			"spec.allocationStrategy": "is a field that no version has, so that no queue is used: write scheduling: {type: Queue, kueue: {localQueueName: NAME}}",
			"spec.nodeSelector":       "is in scheduling: {type: Node, node: {nodeSelector: …}} in this version",
			"spec.tolerations":        "is in scheduling: {type: Node, node: {tolerations: …}} in this version",
		},
		into:  func() any { return &HardwareProfile{} },
		check: func(o any) []error { return checkOf(o, checkHardwareProfile) },
	},
	KindResourceQuota: {
		version: QuotaVersion,
		into:    func() any { return &resourceQuota{} },
		check:   func(o any) []error { return checkOf(o, checkQuota) },
	},
	KindPriorityClass: {
		version: PriorityVersion,
		replaced: map[string]string{
			"scheduling.k8s.io/v1beta1":  "is removed: write " + PriorityVersion,
			"scheduling.k8s.io/v1alpha1": "is removed: write " + PriorityVersion,
		},
		into:  func() any { return &priorityClass{} },
		check: func(o any) []error { return checkOf(o, checkPriorityClass) },
	},
}

var oldKueue = map[string]string{
	"kueue.x-k8s.io/v1beta1":  "is right for Kueue up to 0.14 alone: from 0.15 on Kueue has v1beta2, and from 0.20 on no other; write " + KueueVersion,
	"kueue.x-k8s.io/v1alpha2": "is removed: write " + KueueVersion,
	"kueue.x-k8s.io/v1alpha1": "is removed: write " + KueueVersion,
}

// Known reports whether a manifest is of one of the kinds, in its version or in one that this has replaced. A kind of the same name in
// another group is another.
func Known(top map[string]any) bool {
	k, version := kindOf(top)
	_, replaced := k.replaced[version]
	return k.version != "" && (version == k.version || replaced)
}

// Named reports whether a kind has the name of one of them, in whatever group.
func Named(name string) bool { return known[name].version != "" }

// Versions are the versions of a kind that were replaced, sorted. A cluster may serve them still.
func Versions(name string) []string { return slices.Sorted(maps.Keys(known[name].replaced)) }

func kindOf(top map[string]any) (kind, string) {
	name, _ := top["kind"].(string)
	version, _ := top["apiVersion"].(string)
	return known[name], version
}

// Spec names the kind of a document without apiVersion and kind, if it looks like the spec of one; otherwise it is empty.
func Spec(top map[string]any) string {
	if top["kind"] != nil || top["apiVersion"] != nil {
		return ""
	}
	if spec, ok := top["spec"].(map[string]any); ok && len(top) == 1 {
		top = spec
	}
	switch {
	case top["nodeLabels"] != nil:
		return KindResourceFlavor
	case top["resourceGroups"] != nil:
		return KindClusterQueue
	case top["clusterQueue"] != nil:
		return KindLocalQueue
	case top["identifiers"] != nil:
		return KindHardwareProfile
	default:
		return ""
	}
}

// Check reports everything that is wrong with a manifest of a known kind. Its text is one document. The error joins one
// *check.InvalidError for each mistake, at most a hundred.
func Check(top map[string]any, text []byte) error {
	k, version := kindOf(top)
	doc, err := document.JSON(text)
	if err != nil {
		return fmt.Errorf("reading YAML: %w", err)
	}
	var wrong []error
	if why := k.replaced[version]; why != "" {
		wrong = append(wrong, &check.InvalidError{Field: "apiVersion", Value: version, Want: why})
	}
	object := k.into()
	unknown, err := strict.UnmarshalStrict(doc, object)
	if err != nil {
		return errors.Join(append(wrong, fmt.Errorf("reading a %s: %w", top["kind"], err))...)
	}
	for _, u := range unknown {
		wrong = check.AddMistake(wrong, k.unknownField(u))
	}
	name, namespace, _ := metaOf(top)
	if name == "" {
		wrong = check.AddMistake(wrong, &check.InvalidError{Field: "metadata", Want: "has no name"})
	}
	for _, err := range append(checkName("metadata.name", name), checkNamespace(namespace)...) {
		wrong = check.AddMistake(wrong, err)
	}
	for _, err := range k.check(object) {
		wrong = check.AddMistake(wrong, err)
	}
	return errors.Join(wrong...)
}

// Name is a manifest's kind and name for people.
func Name(top map[string]any) string {
	name, namespace, kind := metaOf(top)
	if namespace != "" {
		name = namespace + "/" + name
	}
	return strings.TrimSpace(kind + " " + name)
}

func metaOf(top map[string]any) (name, namespace, kind string) {
	meta, _ := top["metadata"].(map[string]any)
	name, _ = meta["name"].(string)
	namespace, _ = meta["namespace"].(string)
	kind, _ = top["kind"].(string)
	return name, namespace, kind
}

func (k kind) unknownField(err error) error {
	field, ok := errors.AsType[strict.FieldError](err)
	if !ok {
		return err
	}
	wrong := &check.InvalidError{Field: field.FieldPath(), Want: "is a field that " + k.version + " does not have"}
	if to := k.moved[wrong.Field]; to != "" {
		wrong.Want = to
		return wrong
	}
	if at := fieldsAt(reflect.TypeOf(k.into()), wrong.Field); len(at) > 0 {
		wrong.Want += ": here are " + strings.Join(at, ", ")
	}
	return wrong
}

// fieldsAt are the fields next to the last one of a path; none where they are many or free.
func fieldsAt(of reflect.Type, path string) []string {
	const most = 15
	steps := strings.Split(path, ".")
	for _, step := range steps[:len(steps)-1] {
		name, _, _ := strings.Cut(step, "[")
		of = elementOf(of)
		if of.Kind() != reflect.Struct {
			return nil
		}
		found := false
		for field := range of.Fields() {
			if tag, _, _ := strings.Cut(field.Tag.Get("json"), ","); tag == name {
				of, found = field.Type, true
				break
			}
		}
		if !found {
			return nil
		}
	}
	var out []string
	if of = elementOf(of); of.Kind() == reflect.Struct {
		for field := range of.Fields() {
			if tag, _, _ := strings.Cut(field.Tag.Get("json"), ","); tag != "" {
				out = append(out, tag)
			}
		}
	}
	if len(out) > most {
		return nil
	}
	return out
}

// elementOf is what a pointer or a list is of.
func elementOf(of reflect.Type) reflect.Type {
	for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice {
		of = of.Elem()
	}
	return of
}

func checkOf[T any](object any, check func(*T) []error) []error {
	typed, ok := object.(*T)
	if !ok {
		return nil
	}
	return check(typed)
}

func invalid(field, value, want string, args ...any) error {
	return &check.InvalidError{Field: field, Value: value, Want: fmt.Sprintf(want, args...)}
}

// checkName refuses what the API server refuses as the name of an object. That it is missing is for others to say.
func checkName(field, name string) []error {
	if name == "" || len(validation.IsDNS1123Subdomain(name)) == 0 {
		return nil
	}
	return []error{invalid(field, strconv.Quote(name),
		"is no name that Kubernetes takes: write lower-case letters, digits, '-' and '.', at most 253, beginning and ending with a letter or digit")}
}

func checkNamespace(name string) []error {
	if name == "" || len(validation.IsDNS1123Label(name)) == 0 {
		return nil
	}
	return []error{invalid("metadata.namespace", strconv.Quote(name),
		"is no name of a namespace: write lower-case letters, digits and '-', at most 63, beginning and ending with a letter or digit")}
}

func checkFlavor(f *ResourceFlavor) []error {
	wrong := checkName("spec.topologyName", f.Spec.TopologyName)
	for _, of := range []struct {
		field string
		n     int
	}{{"nodeLabels", len(f.Spec.NodeLabels)}, {"nodeTaints", len(f.Spec.NodeTaints)}, {"tolerations", len(f.Spec.Tolerations)}} {
		if of.n > MostNodeLabels {
			wrong = append(wrong, invalid("spec."+of.field, strconv.Itoa(of.n), "are more than the %d that Kueue takes", MostNodeLabels))
		}
	}
	if f.Spec.TopologyName != "" && len(f.Spec.NodeLabels) == 0 {
		wrong = append(wrong, invalid("spec.topologyName", f.Spec.TopologyName, "needs at least one of nodeLabels"))
	}
	return wrong
}

func checkLocalQueue(q *LocalQueue) []error {
	if q.Spec.ClusterQueue == "" {
		return []error{invalid("spec.clusterQueue", "", "is missing")}
	}
	return checkName("spec.clusterQueue", q.Spec.ClusterQueue)
}

func checkClusterQueue(q *ClusterQueue) []error {
	wrong := checkName("spec.cohortName", q.Spec.CohortName)
	if q.Spec.NamespaceSelector == nil {
		wrong = append(wrong, invalid("spec.namespaceSelector", "", "is missing, so that no namespace may use the queue: for all write {}"))
	}
	if n := len(q.Spec.ResourceGroups); n > MostGroups {
		wrong = append(wrong, invalid("spec.resourceGroups", strconv.Itoa(n), "are more than the %d that Kueue takes", MostGroups))
	}
	resources, flavors := map[string]int{}, map[string]int{} // and the group that has them, from 1
	for g, group := range q.Spec.ResourceGroups {
		at := fmt.Sprintf("spec.resourceGroups[%d]", g)
		if len(group.CoveredResources) == 0 || len(group.Flavors) == 0 {
			wrong = append(wrong, invalid(at, "", "needs at least one of coveredResources, and one of flavors"))
		}
		for _, name := range group.CoveredResources {
			if other := resources[name]; other > 0 {
				wrong = append(wrong, invalid(at+".coveredResources", name, "is covered by resourceGroups[%d] too: a resource is in one group", other-1))
			}
			resources[name] = g + 1
			wrong = append(wrong, checkResource(at+".coveredResources", name)...)
		}
		for f, flavor := range group.Flavors {
			of := fmt.Sprintf("%s.flavors[%d]", at, f)
			wrong = append(wrong, checkName(of+".name", flavor.Name)...)
			if other := flavors[flavor.Name]; other > 0 {
				wrong = append(wrong, invalid(of+".name", flavor.Name, "is in resourceGroups[%d] too: a flavor is in one group, once", other-1))
			}
			flavors[flavor.Name] = g + 1
			wrong = append(wrong, checkFlavorQuotas(of, group.CoveredResources, flavor, q.Spec.CohortName != "")...)
		}
	}
	return wrong
}

func checkFlavorQuotas(at string, covered []string, flavor FlavorQuotas, cohort bool) []error {
	var names []string
	var wrong []error
	for i, r := range flavor.Resources {
		names = append(names, r.Name)
		if r.BorrowingLimit != nil && !cohort {
			wrong = append(wrong, invalid(fmt.Sprintf("%s.resources[%d].borrowingLimit", at, i), r.BorrowingLimit.String(),
				"needs a cohortName: without one there is no queue to borrow from"))
		}
		if r.NominalQuota.Sign() < 0 {
			wrong = append(wrong, invalid(fmt.Sprintf("%s.resources[%d].nominalQuota", at, i), r.NominalQuota.String(), "cannot be below 0"))
		}
	}
	if len(covered) > 0 && !slices.Equal(names, covered) { // that the group covers nothing is said of the group
		wrong = append(wrong, invalid(at+".resources", "", "must be those of coveredResources, in their order: %s",
			strings.Join(covered[:min(len(covered), MostResources)], ", ")))
	}
	return wrong
}

func checkHardwareProfile(p *HardwareProfile) []error {
	var wrong []error
	for i, id := range p.Spec.Identifiers {
		at := fmt.Sprintf("spec.identifiers[%d]", i)
		switch {
		case id.Identifier == "":
			wrong = append(wrong, invalid(at+".identifier", "", "is missing: write the name of a resource, as the device plugin offers it"))
		case id.DisplayName == "":
			wrong = append(wrong, invalid(at+".displayName", "", "is missing"))
		}
		wrong = append(wrong, checkResource(at+".identifier", id.Identifier)...)
		if t := id.ResourceType; t != "" && t != "CPU" && t != "Memory" && t != "Accelerator" {
			wrong = append(wrong, invalid(at+".resourceType", t, "must be CPU, Memory or Accelerator"))
		}
		wrong = append(wrong, checkCounts(at, id)...)
	}
	return append(wrong, checkScheduling(p.Spec.Scheduling)...)
}

func checkCounts(at string, id Identifier) []error {
	var wrong []error
	read := func(field string, v intstr.IntOrString) resource.Quantity {
		q, err := resource.ParseQuantity(v.String())
		if err != nil {
			wrong = append(wrong, invalid(at+"."+field, strconv.Quote(v.String()), "must be a number or a quantity, like 4 or 8Gi"))
		}
		return q
	}
	least, usual := read("minCount", id.MinCount), read("defaultCount", id.DefaultCount)
	most := usual
	if id.MaxCount != nil {
		most = read("maxCount", *id.MaxCount)
	}
	if len(wrong) == 0 && (usual.Cmp(least) < 0 || most.Cmp(usual) < 0) {
		wrong = append(wrong, invalid(at+".defaultCount", usual.String(), "must be at least minCount and at most maxCount"))
	}
	return wrong
}

func checkScheduling(s *Scheduling) []error {
	const at = "spec.scheduling"
	switch {
	case s == nil:
		return nil
	case s.Type == SchedulingQueue && (s.Node != nil || s.Kueue == nil || s.Kueue.LocalQueueName == ""):
		return []error{invalid(at+".type", s.Type, "needs kueue.localQueueName, and no node")}
	case s.Type == SchedulingNode && (s.Kueue != nil || s.Node == nil):
		return []error{invalid(at+".type", s.Type, "needs node, and no kueue")}
	case s.Type != SchedulingQueue && s.Type != SchedulingNode:
		return []error{invalid(at+".type", strconv.Quote(s.Type), "must be Queue or Node")}
	case s.Kueue != nil:
		return checkName(at+".kueue.localQueueName", s.Kueue.LocalQueueName)
	}
	return nil
}

// checkResource refuses a resource of NVIDIA's that the device plugin never offers.
func checkResource(field, name string) []error {
	plain := strings.TrimSuffix(name, nvml.SharedSuffix)
	if !IsGPU(plain) {
		return nil
	}
	if _, err := catalog.ResourceName(plain); err != nil {
		return []error{invalid(field, name, "%v", err)}
	}
	return nil
}

// IsGPU reports whether a resource is one that NVIDIA's device plugin may offer.
func IsGPU(name string) bool { return strings.HasPrefix(name, resourceDomain) }

const (
	resourceDomain = "nvidia.com/"
	requestsPrefix = "requests."
	limitsPrefix   = "limits."
)

func checkQuota(q *resourceQuota) []error {
	var wrong []error
	for _, name := range slices.Sorted(maps.Keys(q.Spec.Hard)) {
		field := "spec.hard." + string(name)
		asked, isRequest := strings.CutPrefix(string(name), requestsPrefix)
		limited, isLimit := strings.CutPrefix(string(name), limitsPrefix)
		if hard := q.Spec.Hard[name]; hard.Sign() < 0 {
			wrong = append(wrong, invalid(field, hard.String(), "cannot be below 0"))
		}
		switch {
		case isLimit && IsGPU(limited):
			wrong = append(wrong, invalid(field, "",
				"is not counted: of such resources Kubernetes counts requests, which are their limits too; leave it out, and have %s%s", requestsPrefix, limited))
		case IsGPU(string(name)):
			wrong = append(wrong, invalid(field, "", "is not counted: write %s%s", requestsPrefix, name))
		case isRequest:
			wrong = append(wrong, checkResource(field, asked)...)
		}
	}
	return wrong
}

func checkPriorityClass(p *priorityClass) []error {
	const highest = 1_000_000_000 // of those that people may make
	var wrong []error
	if p.Value > highest {
		wrong = append(wrong, invalid("value", strconv.Itoa(int(p.Value)), "is more than %d: those above are Kubernetes' own", highest))
	}
	if strings.HasPrefix(p.Name, "system-") {
		wrong = append(wrong, invalid("metadata.name", p.Name, "begins with system-, as only Kubernetes' own do"))
	}
	return wrong
}
