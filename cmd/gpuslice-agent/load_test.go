package main

import (
	"slices"
	"testing"
)

// An overlay may put the agent into any namespace, and the device plugin beside it.
func TestTheAgentReadsInItsOwnNamespace(t *testing.T) {
	o := &options{namespace: "elsewhere"}
	settings, err := o.load()
	if err != nil {
		t.Fatal(err)
	}
	for of, namespace := range map[string]string{
		"profiles": settings.Profiles.Namespace, "migConfigMap": settings.MIGConfigMap.Namespace, "maintenance": settings.Maintenance.Namespace,
		"devicePlugin.configMap": settings.DevicePlugin.ConfigMap.Namespace,
	} {
		if namespace != "elsewhere" {
			t.Errorf("%s is looked for in %q", of, namespace)
		}
	}
	if in := settings.DevicePlugin.Namespaces; !slices.Contains(in, "elsewhere") || slices.Contains(in, "gpuslice") {
		t.Errorf("the device plugin is looked for in %v", in)
	}
}
