//go:build !plugin0.17

package main

import spec "github.com/NVIDIA/k8s-device-plugin/api/config/v1"

// disableNaming has the config say nothing of names that NVIDIA's programs do not support yet.
func disableNaming(config *spec.Config) { spec.DisableResourceNamingInConfig(config) }
