package config

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// AutoscalerStartupDomain is the domain of taint keys that cluster-autoscaler takes for startup taints by itself.
const AutoscalerStartupDomain = "startup-taint.cluster-autoscaler.kubernetes.io"

// StartupTaints decides which taints are startup taints. A node may register with them, to keep pods away until its GPUs are as requested and the
// capacity is verified. The agent then removes all of them. The zero value knows TaintNotReady alone.
type StartupTaints struct{ second string }

// StartupTaints are TaintNotReady and the one of the settings.
func (s Settings) StartupTaints() StartupTaints { return StartupTaints{second: s.StartupTaint} }

// Keys lists the keys of startup taints.
func (s StartupTaints) Keys() []string {
	if s.second == "" {
		return []string{TaintNotReady}
	}
	return []string{TaintNotReady, s.second}
}

// Has reports whether the taint is a startup taint, whatever its value and effect.
func (s StartupTaints) Has(t corev1.Taint) bool { return slices.Contains(s.Keys(), t.Key) }

// IsTransientTaint reports whether programs set and lift the taint as a node's state changes: Kubernetes, an autoscaler, and agents.
func IsTransientTaint(key string) bool {
	return strings.HasPrefix(key, "node.kubernetes.io/") || strings.HasPrefix(key, "node.cloudprovider.kubernetes.io/") ||
		slices.Contains([]string{
			"ToBeDeletedByClusterAutoscaler", "DeletionCandidateOfClusterAutoscaler", "karpenter.sh/disrupted", TaintRepartitioning, TaintGPUUnhealthy,
		}, key)
}

// MayBeStartupTaint returns why the key cannot name a second startup taint; nothing if it can. Removing another program's taint would open a node
// that this program keeps closed.
func MayBeStartupTaint(key string) (problems []string) {
	if problems := validation.IsQualifiedName(key); len(problems) > 0 {
		return problems
	}
	domain, _, _ := strings.Cut(key, "/")
	if foreign := ForeignDomain(key); foreign != "" && domain != AutoscalerStartupDomain {
		return []string{fmt.Sprintf("is under %s, where other programs set and lift taints: use a key of your own, or %s/gpuslice",
			foreign, AutoscalerStartupDomain)}
	}
	return nil
}

// startupTaintProblems checks the setting.
func startupTaintProblems(key string) []string {
	if key == TaintNotReady {
		return []string{"is always a startup taint: leave it out, or name a second one"}
	}
	return MayBeStartupTaint(key)
}

// foreignDomains are domains where a profile cannot set keys: other programs write these, and schedulers, operators and this agent rely on them. The
// domain kubernetes.io includes node-role.kubernetes.io: some platforms reinstall a node when its role changes.
var foreignDomains = []string{"nvidia.com", "gpuslice.io", "kubernetes.io", "k8s.io"}

// ForeignDomain returns the one of foreignDomains that the key is under, or "".
func ForeignDomain(key string) string {
	domain, _, has := strings.Cut(key, "/")
	for _, foreign := range foreignDomains {
		if has && (domain == foreign || strings.HasSuffix(domain, "."+foreign)) {
			return foreign
		}
	}
	return ""
}
