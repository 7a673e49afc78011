//go:build plugin0.17

package main

import (
	spec "github.com/NVIDIA/k8s-device-plugin/api/config/v1"
	"k8s.io/klog/v2"
)

// disableNaming is the same for v0.17, where the caller brings the log.
func disableNaming(config *spec.Config) { spec.DisableResourceNamingInConfig(warnings{}, config) }

type warnings struct{}

func (warnings) Warning(args ...any)                 { klog.Warning(args...) }
func (warnings) Warningf(format string, args ...any) { klog.Warningf(format, args...) }
