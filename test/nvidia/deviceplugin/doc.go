// Package deviceplugin builds NVIDIA's k8s-device-plugin v0.19.3 as it is released, for tests: nvidia-device-plugin,
// gpu-feature-discovery and config-manager, which go.mod names as tools, and mps-control-daemon, in the folder beside this file.
//
// It is a module of its own so that what NVIDIA's programs require never decides the versions that this project is
// built with.
package deviceplugin
