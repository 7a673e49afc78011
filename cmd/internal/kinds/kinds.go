// Package kinds knows the kinds of objects that distribute the slices of a cluster's GPUs: Kueue's ResourceFlavor, ClusterQueue, LocalQueue
// and WorkloadPriorityClass, OpenShift AI's HardwareProfile, and Kubernetes' ResourceQuota and PriorityClass. It has their fields, and says what is wrong
// with a manifest of one.
//
// It asks no cluster, and knows nothing of profiles or pools.
package kinds

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// The versions that are read and written.
const (
	KueueVersion           = "kueue.x-k8s.io/v1beta2"
	HardwareProfileVersion = "infrastructure.opendatahub.io/v1"
	QuotaVersion           = "v1"
	PriorityVersion        = "scheduling.k8s.io/v1"
	ResourceVersion        = "resource.k8s.io/v1"
	KueueConfigVersion     = "config.kueue.x-k8s.io/v1beta2"
	KueueOperatorVersion   = "kueue.openshift.io/v1"
	MonitoringVersion      = "monitoring.coreos.com/v1"
)

// Needs has what a cluster needs to serve a version, where not each Kubernetes does.
var Needs = map[string]string{
	KueueVersion:           "Kueue 0.15 or newer",
	HardwareProfileVersion: "OpenShift AI 3.0 or newer",
	ResourceVersion:        "Kubernetes 1.34 or newer; extendedResourceName takes effect from 1.36 on",
	KueueConfigVersion: "Kueue 0.19 or newer; merge this into controller_manager_config.yaml of its ConfigMap kueue-manager-config, and restart Kueue. " +
		"On OpenShift its operator writes that ConfigMap: say --openshift",
	KueueOperatorVersion: "Red Hat's build of Kueue, 1.4 or newer where it maps DeviceClasses. Apply it with --server-side, which keeps what others wrote into these " +
		"objects, and apply it again once the operator has made Kueue's kinds",
}

// The kinds.
const (
	KindResourceFlavor  = "ResourceFlavor"
	KindClusterQueue    = "ClusterQueue"
	KindLocalQueue      = "LocalQueue"
	KindHardwareProfile = "HardwareProfile"
	KindResourceQuota   = "ResourceQuota"
	KindPriorityClass   = "PriorityClass"

	KindWorkloadPriorityClass = "WorkloadPriorityClass"

	KindDeviceClass           = "DeviceClass"
	KindResourceClaimTemplate = "ResourceClaimTemplate"

	KindPrometheusRule = "PrometheusRule"
)

// Kueue's own limits.
const (
	MostNodeLabels     = 8  // and taints, and tolerations, of a ResourceFlavor
	MostGroups         = 16 // of a ClusterQueue
	MostFlavorsOfGroup = 64
	MostResources      = 64 // of a group
)

// Annotations of a HardwareProfile, which OpenShift AI's dashboard reads.
const (
	AnnotationDisplayName = "opendatahub.io/display-name"
	AnnotationDescription = "opendatahub.io/description"
	AnnotationDisabled    = "opendatahub.io/disabled"
	AnnotationVisibility  = "opendatahub.io/dashboard-feature-visibility"
)

// ResourceFlavor is a kind of node, by the labels that all of them have.
type ResourceFlavor struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              FlavorSpec `json:"spec,omitempty"`
}

// FlavorSpec is the spec of a ResourceFlavor.
type FlavorSpec struct {
	NodeLabels   map[string]string   `json:"nodeLabels,omitempty"`  // Kueue adds them to the pods' nodeSelector
	NodeTaints   []corev1.Taint      `json:"nodeTaints,omitempty"`  // that pods must tolerate by themselves
	Tolerations  []corev1.Toleration `json:"tolerations,omitempty"` // Kueue adds them to the pods
	TopologyName string              `json:"topologyName,omitempty"`
}

// Tolerated is what pods of the flavor tolerate: its tolerations, and the taints that pods have to tolerate for Kueue to admit them by it.
func (f FlavorSpec) Tolerated() []corev1.Toleration {
	tolerations := slices.Clone(f.Tolerations)
	for _, t := range f.NodeTaints {
		tolerations = append(tolerations, corev1.Toleration{Key: t.Key, Operator: corev1.TolerationOpEqual, Value: t.Value, Effect: t.Effect})
	}
	return tolerations
}

// ClusterQueue is a budget of resources by flavor.
type ClusterQueue struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              ClusterQueueSpec `json:"spec,omitempty"`
	Status            map[string]any   `json:"status,omitempty"`
}

// ClusterQueueSpec is the spec of a ClusterQueue. Of fields that have nothing to do with GPUs it reads the names alone.
type ClusterQueueSpec struct {
	ResourceGroups            []ResourceGroup       `json:"resourceGroups,omitempty"`
	CohortName                string                `json:"cohortName,omitempty"`
	QueueingStrategy          string                `json:"queueingStrategy,omitempty"`
	NamespaceSelector         *metav1.LabelSelector `json:"namespaceSelector,omitempty"` // nil selects none, an empty one all
	FlavorFungibility         map[string]any        `json:"flavorFungibility,omitempty"`
	Preemption                map[string]any        `json:"preemption,omitempty"`
	AdmissionChecksStrategy   map[string]any        `json:"admissionChecksStrategy,omitempty"`
	StopPolicy                string                `json:"stopPolicy,omitempty"`
	FairSharing               map[string]any        `json:"fairSharing,omitempty"`
	AdmissionScope            map[string]any        `json:"admissionScope,omitempty"`
	ConcurrentAdmissionPolicy map[string]any        `json:"concurrentAdmissionPolicy,omitempty"`
}

// ResourceGroup are resources that a workload takes from one flavor together.
type ResourceGroup struct {
	CoveredResources []string       `json:"coveredResources"`
	Flavors          []FlavorQuotas `json:"flavors"`
}

// FlavorQuotas is how much of each resource of its group a flavor has, in the order of the group.
type FlavorQuotas struct {
	Name      string          `json:"name"`
	Resources []ResourceShare `json:"resources"`
}

// ResourceShare is how much of one resource may be admitted at a time.
type ResourceShare struct {
	Name           string             `json:"name"`
	NominalQuota   resource.Quantity  `json:"nominalQuota"`
	BorrowingLimit *resource.Quantity `json:"borrowingLimit,omitempty"`
	LendingLimit   *resource.Quantity `json:"lendingLimit,omitempty"`
}

// LocalQueue is the entry of a namespace to a ClusterQueue.
type LocalQueue struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              LocalQueueSpec `json:"spec,omitempty"`
	Status            map[string]any `json:"status,omitempty"`
}

// LocalQueueSpec is the spec of a LocalQueue.
type LocalQueueSpec struct {
	ClusterQueue string         `json:"clusterQueue,omitempty"`
	StopPolicy   string         `json:"stopPolicy,omitempty"`
	FairSharing  map[string]any `json:"fairSharing,omitempty"`
}

// WorkloadPriorityClass is the priority of workloads that name it by the label kueue.x-k8s.io/priority-class. Kubernetes knows nothing of it.
type WorkloadPriorityClass struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Value             int32  `json:"value"`
	Description       string `json:"description,omitempty"`
}

// HardwareProfile is what people of OpenShift AI choose hardware by.
type HardwareProfile struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              HardwareProfileSpec `json:"spec,omitempty"`
	Status            map[string]any      `json:"status,omitempty"`
}

// HardwareProfileSpec is the spec of a HardwareProfile.
type HardwareProfileSpec struct {
	Identifiers []Identifier `json:"identifiers,omitempty"`
	Scheduling  *Scheduling  `json:"scheduling,omitempty"`
}

// Identifier is a resource, and how much of it a workload may ask for.
type Identifier struct {
	DisplayName  string              `json:"displayName"`
	Identifier   string              `json:"identifier"` // name of the resource
	MinCount     intstr.IntOrString  `json:"minCount"`
	DefaultCount intstr.IntOrString  `json:"defaultCount"`
	MaxCount     *intstr.IntOrString `json:"maxCount,omitempty"`
	ResourceType string              `json:"resourceType,omitempty"`
}

// Scheduling is how a workload gets to its nodes: by a queue of Kueue, or by a selector.
type Scheduling struct {
	Type  string           `json:"type"`
	Kueue *KueueScheduling `json:"kueue,omitempty"`
	Node  *NodeScheduling  `json:"node,omitempty"`
}

// The types of Scheduling.
const (
	SchedulingQueue = "Queue"
	SchedulingNode  = "Node"
)

// KueueScheduling names the queue.
type KueueScheduling struct {
	LocalQueueName string `json:"localQueueName"`
	PriorityClass  string `json:"priorityClass,omitempty"`
}

// NodeScheduling is added to the workload's pods.
type NodeScheduling struct {
	NodeSelector map[string]string   `json:"nodeSelector,omitempty"`
	Tolerations  []corev1.Toleration `json:"tolerations,omitempty"`
}

// AsQueue turns the profile into a ClusterQueue of one flavor. It returns false if the profile is disabled or names a LocalQueue.
func (p HardwareProfile) AsQueue() (as ClusterQueue, flavor FlavorSpec, is bool) {
	s := p.Spec.Scheduling
	if p.Annotations[AnnotationDisabled] == "true" || s != nil && s.Kueue != nil {
		return as, flavor, false
	}
	if s != nil && s.Node != nil {
		flavor = FlavorSpec{NodeLabels: s.Node.NodeSelector, Tolerations: s.Node.Tolerations}
	}
	group, gives := ResourceGroup{}, FlavorQuotas{Name: p.Name}
	for _, id := range p.Spec.Identifiers {
		group.CoveredResources = append(group.CoveredResources, id.Identifier)
		gives.Resources = append(gives.Resources, ResourceShare{Name: id.Identifier, NominalQuota: *resource.NewQuantity(1, resource.DecimalSI)})
	}
	group.Flavors = []FlavorQuotas{gives}
	as.Spec.ResourceGroups = []ResourceGroup{group}
	return as, flavor, true
}

type (
	resourceQuota = corev1.ResourceQuota
	priorityClass = schedulingv1.PriorityClass
)

// PrometheusRule has rules for a Prometheus, which the Prometheus operator hands on.
type PrometheusRule struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              RuleGroups `json:"spec"`
}

// RuleGroups are the groups of a PrometheusRule.
type RuleGroups struct {
	Groups []RuleGroup `json:"groups"`
}

// RuleGroup has rules that are evaluated one after the other.
type RuleGroup struct {
	Name  string `json:"name"`
	Rules []Rule `json:"rules"`
}

// Rule records a series by an expression.
type Rule struct {
	Record string            `json:"record"`
	Expr   string            `json:"expr"`
	Labels map[string]string `json:"labels,omitempty"`
}
