// Package migparted builds the released mig-parted v0.14.4 of NVIDIA for tests: nvidia-mig-parted and
// nvidia-mig-manager. go.mod names both as tools.
//
// It is a separate module so that the requirements of NVIDIA's programs never decide the versions that this project is
// built with.
package migparted
