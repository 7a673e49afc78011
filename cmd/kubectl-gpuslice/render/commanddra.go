package render

import (
	"errors"

	"github.com/spf13/cobra"
	forms "k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
)

func renderDRA(o *cluster.Options, r *rendering) *cobra.Command {
	var namespace string
	c := renders(o, r, "dra", "DeviceClasses of the MIG devices, and ResourceClaimTemplates, for nodes of NVIDIA's DRA driver", func() error {
		r.dra = true
		if namespace == "" {
			return errors.New("name the namespace of the templates by --to")
		}
		return checkName("to", namespace, namespaceForm)
	}, func(given []Given) ([]any, error) { return Claims(given, namespace), nil })
	c.Flags().StringVar(&namespace, "to", "", "namespace of the templates")
	return c
}

func renderKueueConfig(o *cluster.Options, r *rendering) *cobra.Command {
	var counters []string
	var openShift bool
	c := renders(o, r, "kueue-config", "the part of Kueue's config that makes its quotas hold for DRA claims", func() error {
		r.dra = true
		var wrong []error
		for _, name := range counters {
			wrong = append(wrong, checkName("counter", name, counterForm))
		}
		return errors.Join(wrong...)
	}, func(given []Given) ([]any, error) { return KueueConfig(given, counters, openShift) })
	c.Flags().BoolVar(&openShift, "openshift", false, "as the Kueue of Red Hat's operator, which writes Kueue's config")
	c.Flags().StringArrayVar(&counters, "counter", nil,
		"count a device by what it takes of this counter of its GPU, as gpu.nvidia.com/NAME, where the driver cuts the GPUs itself: memory, multiprocessors; several by several flags")
	return c
}

// counterForm is a counter of a ResourceSlice.
var counterForm = nameForm{
	func(name string) bool { return len(forms.IsDNS1123Label(name)) == 0 },
	"write the name of a counter of a ResourceSlice: lower-case letters, digits and '-', at most 63, as memory or multiprocessors",
}
