// Package holders finds who holds a GPU or a part of one: processes, in the host's process table, and pods, by what they ask for, by
// what kubelet has given them and by their processes. It says what becomes known of a pod and never what is to be done with it.
//
// It knows nothing of GPU geometry, of settings or of the agent's loop. Devices are the identities that kubelet uses. What the kernel
// or kubelet does not tell is an error and never nobody.
package holders
