package cluster

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// Identity is a node at the time when this command wrote to it.
type Identity struct {
	Name string
	uid  types.UID
	from string // resource version: older states of the node do not count
}

// Identify returns the identity of a node.
func Identify(n *corev1.Node) Identity {
	return Identity{Name: n.Name, uid: n.UID, from: n.ResourceVersion}
}

// Outdated reports whether n is another node, or an older state of this one: lists come from caches.
func (i Identity) Outdated(n *corev1.Node) bool {
	order, err := resourceversion.CompareResourceVersion(n.ResourceVersion, i.from)
	return n.UID != i.uid || err == nil && order < 0
}
