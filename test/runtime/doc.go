// Package runtime builds what runs containers below a real kubelet, as it is released, for tests: containerd v2.4.2 with its
// shim and ctr, runc v1.4.3, and the CNI plugins v1.9.1, which go.mod names as tools.
//
// It is a module of its own so that what they require never decides the versions that this project is built with.
package runtime
