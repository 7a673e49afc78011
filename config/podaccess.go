package config

import (
	"github.com/gpuslice/gpuslice/config/check"
)

// PodAccess says in whose name the agent asks the API server about pods, and for their evictions, and so what confines it to those of its node.
type PodAccess string

// The ways.
const (
	// PodAccessAuto asks in the name of the node where the API server lets it, and else in that of the agent's account.
	PodAccessAuto PodAccess = "auto"
	// PodAccessImpersonation asks in the name of the node, and in no other.
	PodAccessImpersonation PodAccess = "impersonation"
	// PodAccessPolicy asks in the name of the account, whose evictions an admission policy confines.
	PodAccessPolicy PodAccess = "policy"
	// PodAccessRBAC asks in the name of the account, which nothing confines.
	PodAccessRBAC PodAccess = "rbac"
)

// Values lists the ways.
func (PodAccess) Values() []string {
	return check.Words(PodAccessAuto, PodAccessImpersonation, PodAccessPolicy, PodAccessRBAC)
}
