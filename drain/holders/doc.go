// Package holders finds who holds a GPU or a part of one: processes, in the host's process table, and pods, by what they ask for, by
// what kubelet has given them and by their processes. It reports, and never decides what becomes of a pod.
//
// It knows nothing of GPU geometry, of settings or of the agent's loop. Devices are the identities that kubelet uses. Where the
// kernel or kubelet does not answer, the result is an error and never an empty list.
package holders
