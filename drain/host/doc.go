// Package host asks the machine below the node: which boot of it this is, its systemd for units and its logind for reboots, over D-Bus.
// All of it may be missing, and whoever does not answer is left at a deadline.
//
// It knows nothing of Kubernetes, pods or GPUs.
package host
