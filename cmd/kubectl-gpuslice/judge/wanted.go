package judge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/cel"

	"github.com/gpuslice/gpuslice/agent/plan/demand"
	dra "github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/devices"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// wantByClaims returns what the node's GPUs would have to be cut into for the pod's claims, and for those that the scheduler makes for it: for each request
// the smallest device that its selectors accept. None names a request that no GPU of the node can meet. The error says why it is not known.
func (m *moves) wantByClaims(ctx context.Context, p *corev1.Pod, n *corev1.Node) (want demand.Want, none string, err error) {
	portions, none, err := m.portionsByClaims(ctx, p, n, false)
	if err != nil || none != "" {
		return nil, none, err
	}
	want = demand.Want{}
	for _, of := range portions {
		want[of.kinds[0]] += of.count
	}
	return want, "", nil
}

// portionsByClaims returns the kinds of devices that each request of the pod's claims accepts, the smallest first, or with all unset only that one.
func (m *moves) portionsByClaims(ctx context.Context, p *corev1.Pod, n *corev1.Node, all bool) (out []portion, none string, err error) {
	wanted, named, err := m.room.devices.claimsOf(p, n)
	switch {
	case err != nil:
		return nil, "", err
	case len(named) > 0:
		return nil, "", errors.New("its claim may be used by other pods, too")
	}
	kinds := m.kindsOf(n)
	for _, c := range wanted {
		if len(c.Spec.Devices.Constraints) > 0 {
			return nil, "", errors.New("its claim has constraints over several devices")
		}
		for _, r := range c.Spec.Devices.Requests {
			exact := r.Exactly
			switch {
			case exact == nil:
				return nil, "", errors.New("its claim has several choices")
			case exact.AdminAccess != nil && *exact.AdminAccess:
				continue
			case exact.AllocationMode == resourcev1.DeviceAllocationModeAll:
				return nil, "", errors.New("its claim asks for all devices")
			case exact.Count < 0 || exact.Count > nvml.MaxDevices:
				return nil, "of so many devices", nil
			}
			of := portion{count: int(exact.Count)}
			of.kinds, err = m.passing(ctx, exact, kinds, all)
			switch {
			case err != nil:
				return nil, "", err
			case len(of.kinds) == 0:
				return nil, "of class " + sanitize.Cut(exact.DeviceClassName, longestKey), nil
			}
			out = append(out, of)
		}
	}
	return out, "", nil
}

// holders are the pods that have a device of NVIDIA's DRA driver.
func (d *devices) holders() map[types.UID]bool {
	out := map[types.UID]bool{}
	for _, c := range d.claims {
		if c.Status.Allocation == nil || !slices.ContainsFunc(c.Status.Allocation.Devices.Results, func(r resourcev1.DeviceRequestAllocationResult) bool {
			return r.Driver == dra.Driver && (r.AdminAccess == nil || !*r.AdminAccess)
		}) {
			continue
		}
		for _, by := range c.Status.ReservedFor {
			out[by.UID] = true
		}
	}
	return out
}

// kind is a device that a GPU could offer, as NVIDIA's DRA driver would publish it.
type kind struct {
	name   string // of the profile, or demand.Whole
	size   int    // memory slices
	device cel.Device
}

// kindsOf are the devices that the node's GPUs could offer, the smallest first.
func (m *moves) kindsOf(n *corev1.Node) []kind {
	h := m.hardware[n.Name]
	var out []kind
	for i := range h.gpus {
		g := &h.gpus[i]
		if g.Lost || slices.ContainsFunc(out, func(k kind) bool { return k.name == demand.Whole && product(k.device) == g.Model }) {
			continue
		}
		out = append(out, kind{demand.Whole, max(1, g.MemorySlices()), m.published(g.Model, "")})
		for _, p := range g.Profiles {
			if len(p.Placements) > 0 {
				out = append(out, kind{p.Name, p.Placements[0].Size, m.published(g.Model, p.Name)})
			}
		}
	}
	slices.SortStableFunc(out, func(a, b kind) int { return cmp.Compare(a.size, b.size) })
	return out
}

// published is a device of the model as the driver publishes it on some node: of the profile, or a whole GPU. Where there is none, it has what all devices of
// the model have, besides type and profile.
func (m *moves) published(model, profile string) cel.Device {
	out := cel.Device{Driver: dra.Driver, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{}}
	best := 0
	for _, s := range m.devices.slices {
		if s.Spec.Driver != dra.Driver {
			continue
		}
		for _, d := range s.Spec.Devices {
			score := 1
			switch is := (cel.Device{Attributes: d.Attributes}); {
			case product(is) != model:
				continue
			case dra.Text(d, "profile") == profile:
				score = 3
			case profile != "" && dra.Text(d, "profile") != "":
				score = 2
			}
			if score > best {
				best, out.Attributes, out.Capacity = score, d.Attributes, d.Capacity
			}
		}
	}
	out.Attributes = maps.Clone(out.Attributes)
	kind := "gpu"
	if profile != "" {
		kind = "mig"
		out.Attributes["profile"] = resourcev1.DeviceAttribute{StringValue: &profile}
	}
	out.Attributes["type"] = resourcev1.DeviceAttribute{StringValue: &kind}
	if _, is := out.Attributes["productName"]; !is {
		out.Attributes["productName"] = resourcev1.DeviceAttribute{StringValue: &model}
	}
	if best < 3 {
		out.Capacity = nil // it is that of another profile
	}
	return out
}

func product(d cel.Device) string {
	for _, name := range []resourcev1.QualifiedName{"productName", dra.Driver + "/productName"} {
		if value := d.Attributes[name].StringValue; value != nil {
			return *value
		}
	}
	return ""
}

// passing are the kinds that the request's class and selectors let pass, or with all unset the first of them.
func (m *moves) passing(ctx context.Context, r *resourcev1.ExactDeviceRequest, kinds []kind, all bool) (out []string, unknown error) {
	class, err := m.devices.classes.Get(r.DeviceClassName)
	if err != nil {
		return nil, fmt.Errorf("there is no DeviceClass %s", sanitize.Cut(r.DeviceClassName, longestKey))
	}
	ctx, cancel := context.WithTimeout(ctx, allocationTime)
	defer cancel()
	for _, k := range kinds {
		if len(out) > 0 && !all {
			break
		}
		passes := true
		for _, s := range slices.Concat(class.Spec.Selectors, r.Selectors) {
			if s.CEL == nil {
				return nil, errors.New("its claim has a selector that is not known")
			}
			program := m.devices.cache.GetOrCompile(s.CEL.Expression)
			if program.Error != nil {
				return nil, errors.New("its claim has a selector that cannot be compiled")
			}
			is, _, err := program.DeviceMatches(ctx, k.device)
			if err != nil { // as of a capacity that no node publishes yet
				unknown = fmt.Errorf("its claim's selectors ask for what no node publishes: %s", sanitize.Message(err.Error(), 2*longestKey))
			}
			if passes = passes && is && err == nil; !passes {
				break
			}
		}
		if passes && !slices.Contains(out, k.name) { // of several models
			out = append(out, k.name)
		}
	}
	if len(out) > 0 {
		return out, nil
	}
	return nil, unknown
}

// missingClass is a DeviceClass that the pod's claims name and that is not there; empty if there is none.
func (m *moves) missingClass(p *corev1.Pod) string {
	for i := range m.Nodes {
		wanted, _, err := m.room.devices.claimsOf(p, &m.Nodes[i])
		if err != nil || m.Unknown != nil {
			return ""
		}
		for _, c := range wanted {
			for _, r := range c.Spec.Devices.Requests {
				if r.Exactly == nil {
					continue
				}
				if _, err := m.devices.classes.Get(r.Exactly.DeviceClassName); err != nil {
					return sanitize.Cut(r.Exactly.DeviceClassName, longestKey)
				}
			}
		}
		return "" // they are the same on each node, but for those of extended resources
	}
	return ""
}

// PerhapsNone is what Asked has last of a pod that may ask for other devices alone.
const PerhapsNone = "perhaps of no GPU"

// Asked are the GPUs and parts of them that the pod requests, as "nvidia.com/mig-3g.40gb 1", those of DeviceClasses, and its claims. The pod does not say which
// driver a claim or another class belongs to.
func Asked(p *corev1.Pod) []string { return classes{}.asked(p) }

// asked is Asked, with the resources that classes have named.
func (c classes) asked(p *corev1.Pod) []string {
	var out []string
	certain := false
	for name, n := range Requests(p) {
		if n.IsZero() {
			continue
		}
		class, byClass := strings.CutPrefix(string(name), resourcev1.ResourceDeviceClassPrefix)
		byClass = byClass || c.of(name) != ""
		ofClass := strings.HasPrefix(string(name), "nvidia.com/") || slices.Contains([]string{dra.ClassGPU, dra.ClassMIG}, class)
		nvidias := nvml.GPUResource(string(name)) || byClass && ofClass
		if certain = certain || nvidias; nvidias || byClass {
			out = append(out, fmt.Sprintf("%s %s", name, n.String()))
		}
	}
	slices.Sort(out)
	if claims := claimNames(p, len(out) == 0); len(claims) > 0 {
		out = append(out, "by claim "+sanitize.Listed(claims))
	}
	if !certain && len(out) > 0 {
		out = append(out, PerhapsNone)
	}
	return out
}

// claimNames returns the names of the pod's claims, or the pod's own for one that is still to be made. That which the scheduler makes for extended
// resources of any name counts where it is wanted.
func claimNames(p *corev1.Pod, extended bool) []string {
	var out []string
	for _, c := range p.Spec.ResourceClaims {
		name := c.Name
		if c.ResourceClaimName != nil {
			name = *c.ResourceClaimName
		}
		for _, s := range p.Status.ResourceClaimStatuses {
			if s.Name == c.Name {
				name = "" // it takes none
				if s.ResourceClaimName != nil {
					name = *s.ResourceClaimName
				}
			}
		}
		if name != "" {
			out = append(out, name)
		}
	}
	if s := p.Status.ExtendedResourceClaimStatus; s != nil && extended {
		out = append(out, s.ResourceClaimName)
	}
	return out
}
