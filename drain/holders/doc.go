// Package holders finds the processes and pods that hold a GPU or a part of one. It finds processes in the host's process table, and pods by their
// requests, their devices from kubelet, and their processes. It reports, and never decides about a pod.
//
// It knows nothing of GPU geometry, of settings or of the agent's loop. Devices are the identities that kubelet uses. If the
// kernel or kubelet does not answer, the result is an error and never an empty list.
package holders
