// Package host asks the machine below the node: which boot of it this is, its systemd for units and its logind for reboots, over D-Bus.
// Any of them may be missing. The package gives up a call without an answer at its deadline.
//
// It knows nothing of Kubernetes, pods or GPUs.
package host
