package config

import (
	"github.com/gpuslice/gpuslice/config/check"
)

// PodAccess is the agent's identity when it queries and evicts pods. It decides what confines the agent to the pods of its node.
type PodAccess string

// The ways.
const (
	// PodAccessAuto acts as the node where the API server allows it, else as the agent's account.
	PodAccessAuto PodAccess = "auto"
	// PodAccessImpersonation acts as the node only.
	PodAccessImpersonation PodAccess = "impersonation"
	// PodAccessPolicy acts as the account; an admission policy confines its evictions.
	PodAccessPolicy PodAccess = "policy"
	// PodAccessRBAC acts as the account, and nothing confines it.
	PodAccessRBAC PodAccess = "rbac"
)

// Values lists the ways.
func (PodAccess) Values() []string {
	return check.Words(PodAccessAuto, PodAccessImpersonation, PodAccessPolicy, PodAccessRBAC)
}
