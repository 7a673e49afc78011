// Package taints says of taints of nodes what those need to know who judge a cluster before pods come: whether tolerations cover one, and
// whether it goes by itself.
//
// It reads no cluster.
package taints

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/config"
)

// longest bounds a key or a taint in a message, in characters.
const longest = 150

// Text is a taint as kubectl takes it.
func Text(t corev1.Taint) string {
	if t.Value == "" {
		return legible.Cut(fmt.Sprintf("%s:%s", t.Key, t.Effect), longest)
	}
	return legible.Cut(fmt.Sprintf("%s=%s:%s", t.Key, t.Value, t.Effect), longest)
}

// Toleration is what a pod needs, as YAML.
func Toleration(t corev1.Taint) string {
	return fmt.Sprintf("{key: %s, operator: Exists, effect: %s}", legible.Cut(t.Key, longest), t.Effect)
}

// Closing are those that keep pods with the tolerations away for good. Kubernetes' own go by themselves, as those of an autoscaler and those
// that agents lift; DaemonSets tolerate most of them.
func Closing(all []corev1.Taint, tolerations []corev1.Toleration) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(all), func(t corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectPreferNoSchedule || isTransient(t.Key) || slices.ContainsFunc(tolerations, func(by corev1.Toleration) bool {
			return by.ToleratesTaint(klog.Logger{}, &t, false)
		})
	})
}

func isTransient(key string) bool {
	return strings.HasPrefix(key, "node.kubernetes.io/") || strings.HasPrefix(key, "node.cloudprovider.kubernetes.io/") ||
		slices.Contains([]string{
			"ToBeDeletedByClusterAutoscaler", "DeletionCandidateOfClusterAutoscaler", "karpenter.sh/disrupted",
			config.TaintRepartitioning, config.TaintGPUUnhealthy,
		}, key)
}
