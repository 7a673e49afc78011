// Package taints says of taints of nodes what those need to know who judge a cluster before pods come: whether tolerations cover one, and
// whether it goes by itself.
//
// It reads no cluster.
package taints

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// longest bounds a key or a taint in a message, in characters.
const longest = 150

// Text is a taint as kubectl takes it.
func Text(t corev1.Taint) string {
	if t.Value == "" {
		return sanitize.Cut(fmt.Sprintf("%s:%s", t.Key, t.Effect), longest)
	}
	return sanitize.Cut(fmt.Sprintf("%s=%s:%s", t.Key, t.Value, t.Effect), longest)
}

// Toleration is what a pod needs, as YAML.
func Toleration(t corev1.Taint) string {
	return fmt.Sprintf("{key: %s, operator: Exists, effect: %s}", sanitize.Cut(t.Key, longest), t.Effect)
}

// Closing are those that keep pods with the tolerations away for good. Kubernetes' own go by themselves, as those of an autoscaler and those
// that agents lift; DaemonSets tolerate most of them.
func Closing(all []corev1.Taint, tolerations []corev1.Toleration) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(all), func(t corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectPreferNoSchedule || config.IsTransientTaint(t.Key) || slices.ContainsFunc(tolerations, func(by corev1.Toleration) bool {
			return by.ToleratesTaint(klog.Logger{}, &t, false)
		})
	})
}

// KeepingOut are those of Closing that keep workloads away for good. Agents lift startup taints once a node's GPUs are as asked; until then the
// driver's own pods have to tolerate them.
func KeepingOut(all []corev1.Taint, tolerations []corev1.Toleration, startup config.StartupTaints) []corev1.Taint {
	return slices.DeleteFunc(Closing(all, tolerations), func(t corev1.Taint) bool {
		return startup.Has(t) || strings.HasPrefix(t.Key, config.AutoscalerStartupDomain+"/")
	})
}

// Shared are the taints that each of the nodes has, sorted; without a value where the nodes have different ones.
func Shared(ofNodes [][]corev1.Taint) []corev1.Taint {
	type taint struct {
		key    string
		effect corev1.TaintEffect
	}
	nodes, value := map[taint]int{}, map[taint]string{}
	for _, of := range ofNodes {
		counted := map[taint]bool{}
		for _, t := range of {
			at := taint{t.Key, t.Effect}
			if nodes[at] > 0 && value[at] != t.Value {
				value[at] = ""
			} else {
				value[at] = t.Value
			}
			if !counted[at] {
				counted[at], nodes[at] = true, nodes[at]+1
			}
		}
	}
	var out []corev1.Taint
	for at, n := range nodes {
		if n == len(ofNodes) {
			out = append(out, corev1.Taint{Key: at.key, Value: value[at], Effect: at.effect})
		}
	}
	slices.SortFunc(out, func(a, b corev1.Taint) int {
		return cmp.Or(strings.Compare(a.Key, b.Key), strings.Compare(string(a.Effect), string(b.Effect)))
	})
	return out
}
