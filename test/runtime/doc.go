// Package runtime builds released programs for tests, to run containers below a real kubelet: containerd
// v2.4.2 with its shim and ctr, runc v1.4.3, and the CNI plugins v1.9.1; go.mod names them as tools.
//
// It is a separate module so that their requirements never decide the versions that this project is built with.
package runtime
