package drain

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Policy is what may be done to pods that have to leave, and until when. The zero Policy evicts them all, and has no
// deadline.
type Policy struct {
	Rules     []Rule // the first that fits a pod counts, also over Unmanaged and EmptyDir
	Unmanaged Choice // of pods that no controller brings back
	EmptyDir  Choice // of pods with files on the node's disk, which go with them

	Deadline    time.Duration // how long a pod may take to leave, after the fence and what a rule waits; 0 is for ever
	Delete      bool          // pods that are still there then are deleted
	DeleteGrace time.Duration // longest grace of such a deletion

	// Fence is the taint of the fence. A DaemonSet that tolerates it brings its pod back at once, which is refused.
	// Without a key it is not: for pods that are to be replaced, and not to leave.
	Fence corev1.Taint

	// KubeletSilent is why kubelet cannot be expected to end a pod: "node gpu-1 is not Ready since 03:12Z". Empty while
	// it works.
	KubeletSilent string
}

// Choice is whether certain pods are refused, and the field of the settings that says so: "drain.emptyDir".
type Choice struct {
	Refuse bool
	Field  string
}

// Rule is what is done with certain pods.
type Rule struct {
	Field      string   // of the settings, where people find it: "drain.rules[0]"
	Namespaces []string // none for all
	Selector   labels.Selector
	Action     Action
	For        time.Duration // of Wait: how long after the fence a pod may end by itself
}

// Action is what a rule does with a pod.
type Action string

// The actions.
const (
	Evict  Action = "evict"  // as any other pod
	Wait   Action = "wait"   // the pod may end by itself for a time
	Refuse Action = "refuse" // the pod is left alone
)
