package manifest

import (
	"strings"
)

// IsClusterPolicy reports whether a piece is one of the GPU Operator. Kyverno has a kind of the same name.
func IsClusterPolicy(p Piece) bool {
	version, _ := p.Top["apiVersion"].(string)
	return p.Foreign == "ClusterPolicy" && strings.HasPrefix(version, "nvidia.com/")
}
