package render

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/devices"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// classPrefix begins the names of the classes that are written here, one for each profile.
const classPrefix = "mig-"

// claimRequest names the one request of a claim.
const claimRequest = "gpu"

// Claims makes a ResourceClaimTemplate in the namespace for each device that the pools give, and a DeviceClass for each that is a MIG device.
func Claims(given []Given, namespace string) []any {
	var classes, templates []any
	for _, device := range claimed(given) {
		name, class := "gpu", devices.ClassGPU
		if device != "" {
			name = className(device)
			class = name
			classes = append(classes, deviceClass(name, device))
		}
		templates = append(templates, claimTemplate(namespace, name, class))
	}
	return append(classes, templates...)
}

// deviceClass has the MIG devices of a profile. Pods may ask for one by the resource that the device plugin offers it by.
func deviceClass(name, device string) *resourcev1.DeviceClass {
	resource := nvml.ResourceMIGPrefix + dotted(device)
	expression := fmt.Sprintf("device.driver == '%[1]s' && device.attributes['%[1]s'].type == 'mig' && device.attributes['%[1]s'].profile == '%[2]s'", devices.Driver, device)
	return &resourcev1.DeviceClass{
		TypeMeta:   metav1.TypeMeta{APIVersion: kinds.ResourceVersion, Kind: kinds.KindDeviceClass},
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourcev1.DeviceClassSpec{
			ExtendedResourceName: &resource,
			Selectors:            []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{Expression: expression}}},
		},
	}
}

func claimTemplate(namespace, name, class string) *resourcev1.ResourceClaimTemplate {
	return &resourcev1.ResourceClaimTemplate{
		TypeMeta:   metav1.TypeMeta{APIVersion: kinds.ResourceVersion, Kind: kinds.KindResourceClaimTemplate},
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec: resourcev1.ResourceClaimTemplateSpec{Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{
			Requests: []resourcev1.DeviceRequest{{Name: claimRequest, Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: class}}},
		}}},
	}
}

// claimed are the MIG devices that the pools give, each once, by NVIDIA's names; "" for whole GPUs.
func claimed(given []Given) (names []string) {
	for _, g := range given {
		for _, o := range g.Offers {
			names = append(names, attributed.ReplaceAllString(o.Device, "$1+$2"))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// attributed is a device with attributes as names of resources have it, which have no "+".
var attributed = regexp.MustCompile(`^([0-9]+g\.[0-9]+gb)\.(.+)$`)

// takenByDRA refuses what NVIDIA's DRA driver does not do.
func takenByDRA(after []nvml.GPU, sharing catalog.Sharing) error {
	if why := devices.RefusedSharing(sharing); why != "" {
		return errors.New(why)
	}
	for _, gpu := range after {
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				if why := devices.RefusedDevice(d.Profile); why != "" {
					return errors.New(why)
				}
			}
		}
	}
	return nil
}

// dotted is a device as names of resources and objects have it.
func dotted(device string) string { return strings.ReplaceAll(device, "+", ".") }

func className(device string) string { return classPrefix + dotted(device) }

// Limits of Kueue's config.
const (
	mostMappings = 16
	mostClasses  = 8 // of a mapping
)

// Configuration is the part of Kueue's config that maps DeviceClasses to the resources of quotas.
type Configuration struct {
	metav1.TypeMeta `json:",inline"`
	Resources       ConfiguredResources `json:"resources"`
}

// ConfiguredResources are the resources of Kueue's config.
type ConfiguredResources struct {
	DeviceClassMappings []DeviceClassMapping `json:"deviceClassMappings"`
}

// DeviceClassMapping has devices of some classes counted as a resource.
type DeviceClassMapping struct {
	Name             string              `json:"name"`
	DeviceClassNames []string            `json:"deviceClassNames"`
	Sources          []DeviceClassSource `json:"sources,omitempty"` // each device counts as one without them
}

// DeviceClassSource has a device counted by what it takes of a counter. The types are OpenShift's: Kueue's own config has none.
type DeviceClassSource struct {
	Type    string        `json:"type,omitempty"`
	Counter CounterSource `json:"counter"`
}

// CounterSource is a counter that the devices of a driver share.
type CounterSource struct {
	Name           string          `json:"name"`
	Driver         string          `json:"driver"`
	DeviceSelector CountedSelector `json:"deviceSelector"`
}

// CountedSelector selects the devices that are counted.
type CountedSelector struct {
	Type                      string `json:"type,omitempty"`
	resourcev1.DeviceSelector `json:",inline"`
}

// KueueConfig is the part of Kueue's config that has its quotas hold for claims too: a device of a class counts as the device plugin's
// resource for it. With counters, for drivers that cut the GPUs themselves, a device counts by its share of each counter. On OpenShift it is
// the operator's object.
func KueueConfig(given []Given, counters []string, openShift bool) ([]any, error) {
	mappings, err := mapped(given, counters)
	if err != nil {
		return nil, err
	}
	if openShift {
		object, err := operatorKueue(mappings)
		return []any{object}, err
	}
	return []any{&Configuration{
		TypeMeta:  metav1.TypeMeta{APIVersion: kinds.KueueConfigVersion, Kind: "Configuration"},
		Resources: ConfiguredResources{DeviceClassMappings: mappings},
	}}, nil
}

// mapped are the devices that the pools give by the resources that they count as.
func mapped(given []Given, counters []string) ([]DeviceClassMapping, error) {
	profiles := claimed(given)
	mappings := byDevice(profiles)
	if len(counters) > 0 {
		var err error
		if mappings, err = byCounter(given, profiles, counters); err != nil {
			return nil, err
		}
	}
	if n := len(mappings); n > mostMappings {
		return nil, fmt.Errorf("the pools give %d kinds of devices, and Kueue's config takes %d mappings: render fewer pools", n, mostMappings)
	}
	return mappings, nil
}

func byDevice(profiles []string) (out []DeviceClassMapping) {
	for _, device := range profiles {
		m := DeviceClassMapping{Name: nvml.ResourceGPU, DeviceClassNames: []string{devices.ClassGPU}}
		if device != "" {
			m = DeviceClassMapping{Name: nvml.ResourceMIGPrefix + dotted(device), DeviceClassNames: []string{className(device)}}
		}
		out = append(out, m)
	}
	return out
}

// byCounter counts by what the devices take of GPUs of the pools' models. All models are in one source. Of several sources Kueue wants a device each for
// a claim, and adds up what these devices take.
func byCounter(given []Given, profiles, counters []string) (out []DeviceClassMapping, err error) {
	classes := []string{devices.ClassGPU, devices.ClassMIG}
	for _, device := range profiles {
		if device != "" {
			classes = append(classes, className(device))
		}
	}
	if len(classes) > mostClasses {
		return nil, fmt.Errorf("the pools give %d kinds of devices, and a mapping of Kueue's config takes %d: render fewer pools", len(classes), mostClasses)
	}
	var models []string
	for _, g := range given {
		for _, p := range g.Pools {
			if p.Model == "" {
				return nil, fmt.Errorf("pool %s: counters are those of a model: name it, like %s=%dx%d:NVIDIA-H100-80GB-HBM3", p.Name, p.Name, p.Nodes, p.GPUs)
			}
			models = append(models, dashed(p.Model))
		}
	}
	slices.Sort(models)
	models = slices.Compact(models)
	for _, counter := range counters {
		expression := fmt.Sprintf("device.attributes['%s'].productName.replace(' ', '-') in ['%s']", devices.Driver, strings.Join(models, "', '"))
		out = append(out, DeviceClassMapping{
			Name: devices.Driver + "/" + counter, DeviceClassNames: classes,
			Sources: []DeviceClassSource{{Counter: CounterSource{
				Name: counter, Driver: devices.Driver,
				DeviceSelector: CountedSelector{DeviceSelector: resourcev1.DeviceSelector{CEL: &resourcev1.CELDeviceSelector{Expression: expression}}},
			}}},
		})
	}
	return out, nil
}
