// Package deviceplugin builds the released k8s-device-plugin v0.19.3 of NVIDIA for tests. go.mod names
// nvidia-device-plugin, gpu-feature-discovery and config-manager as tools; mps-control-daemon is in the folder next to
// this file.
//
// It is a separate module so that the requirements of NVIDIA's programs never decide the versions that this project is
// built with.
package deviceplugin
