package fence

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// toolNVSentinel is NVSentinel as a Marker names it.
const toolNVSentinel = "NVSentinel"

// NVSentinel names the sign that NVIDIA's NVSentinel manages the health of the node's GPUs: one of its Markers, or a condition that its monitors
// write. It is empty where NVSentinel is not there, and where a label has it leave the node alone.
//
// The conditions are those of NVSentinel's health monitors (health-monitors/gpu-health-monitor, syslog-health-monitor): GpuMemWatch,
// GpuNvlinkWatch, SysLogsXIDError, GpuDcgmConnectivityFailure and their like.
func NVSentinel(node *corev1.Node) string {
	for _, label := range []string{"nvsentinel.dgxc.nvidia.com/managed", "k8saas.nvidia.com/ManagedByNVSentinel"} {
		if node.Labels[label] == "false" {
			return ""
		}
	}
	for _, m := range Markers(node, nil) {
		if m.Tool == toolNVSentinel {
			return m.Sign
		}
	}
	for _, c := range node.Status.Conditions {
		kind := string(c.Type)
		if strings.HasPrefix(kind, "Gpu") && strings.HasSuffix(kind, "Watch") || strings.HasPrefix(kind, "SysLogs") || strings.HasPrefix(kind, "GpuDcgm") {
			return "condition " + short(kind)
		}
	}
	return ""
}
