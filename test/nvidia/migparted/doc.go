// Package migparted builds NVIDIA's mig-parted v0.14.4 as it is released, for tests: nvidia-mig-parted and
// nvidia-mig-manager, which go.mod names as tools.
//
// It is a module of its own so that what NVIDIA's programs require never decides the versions that this project is
// built with.
package migparted
