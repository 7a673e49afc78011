// Package deviceplugin builds NVIDIA's k8s-device-plugin v0.19.3 as it is released, for tests: nvidia-device-plugin,
// gpu-feature-discovery and config-manager, which go.mod names as tools.
//
// It is a module of its own so that what NVIDIA's programs require never decides the versions that this project is
// built with. The MPS control daemon is left out: a requirement of it is missing from the public checksum database.
package deviceplugin
