package devices

import (
	"fmt"
	"maps"
	"regexp"
	"slices"

	"github.com/gpuslice/gpuslice/config/catalog"
)

// partForm is a compute instance that is smaller than its GPU instance.
var partForm = regexp.MustCompile(`^[0-9]+c\.`)

// RefusedDevice says why no node of the driver may have the MIG device; empty if it may.
func RefusedDevice(profile string) string {
	if !partForm.MatchString(profile) {
		return ""
	}
	return fmt.Sprintf("it asks for %s, a part of a GPU instance, and NVIDIA's DRA driver does not start on a node that has one: ask for whole instances", profile)
}

// RefusedSharing says why devices of the driver cannot be shared so; empty if they are not shared.
func RefusedSharing(s catalog.Sharing) string {
	if s.Strategy == "" || s.Strategy == catalog.SharingNone {
		return ""
	}
	return fmt.Sprintf("it shares devices by %s, and NVIDIA's DRA driver shares one by the config of its claim: ask for a profile without sharing, "+
		"and write GpuConfig or MigDeviceConfig into the claim (deploy/DRA.md)", s.Strategy)
}

// Refused says why nodes of the driver cannot be as a profile or MIG config asks; empty if they can.
func Refused(mig catalog.MIGConfig, sharing *catalog.Sharing) string {
	if sharing != nil {
		if why := RefusedSharing(*sharing); why != "" {
			return why
		}
	}
	for _, rule := range mig {
		for _, profile := range slices.Sorted(maps.Keys(rule.Devices)) {
			if why := RefusedDevice(profile); why != "" {
				return why
			}
		}
	}
	return ""
}
