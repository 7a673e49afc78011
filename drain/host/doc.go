// Package host asks the machine below the node: which boot of it this is, its systemd for units and its logind for reboots, over D-Bus.
// Any of them may be missing, and a call that is not answered is given up at its deadline.
//
// It knows nothing of Kubernetes, pods or GPUs.
package host
