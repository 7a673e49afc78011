package main

import (
	"errors"

	"github.com/spf13/cobra"
	forms "k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/render"
)

func (o *options) renderDRA(r *rendering) *cobra.Command {
	var namespace string
	c := o.renders(r, "dra", "DeviceClasses of the MIG devices, and ResourceClaimTemplates, for nodes of NVIDIA's DRA driver", func() error {
		r.dra = true
		if namespace == "" {
			return errors.New("name the namespace of the templates by --to")
		}
		return checkName("to", namespace, namespaceName)
	}, func(given []render.Given) ([]any, error) { return render.Claims(given, namespace), nil })
	c.Flags().StringVar(&namespace, "to", "", "namespace of the templates")
	return c
}

func (o *options) renderKueueConfig(r *rendering) *cobra.Command {
	var counters []string
	c := o.renders(r, "kueue-config", "the part of Kueue's config by which its quotas hold for the claims of DRA", func() error {
		r.dra = true
		var wrong []error
		for _, name := range counters {
			wrong = append(wrong, checkName("counter", name, counterName))
		}
		return errors.Join(wrong...)
	}, func(given []render.Given) ([]any, error) { return render.KueueConfig(given, counters) })
	c.Flags().StringArrayVar(&counters, "counter", nil,
		"count a device by what it takes of this counter of its GPU, as gpu.nvidia.com/NAME, where the driver cuts the GPUs itself: memory, multiprocessors; several by several flags")
	return c
}

// counterName is a counter of a ResourceSlice.
var counterName = nameForm{
	func(name string) bool { return len(forms.IsDNS1123Label(name)) == 0 },
	"write the name of a counter of a ResourceSlice: lower-case letters, digits and '-', at most 63, as memory or multiprocessors",
}
