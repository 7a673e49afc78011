package drift

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/devices"
)

// readSlices counts the devices of NVIDIA's DRA driver by the device plugin's resource names: render writes DeviceClasses for these.
// A user who may not read slices sees what the rest says.
func (c *comparison) readSlices(ctx context.Context) error {
	served, err := c.known.Groups(ctx, resourcev1.GroupName)
	if err != nil || !slices.Contains(served, resourcev1.SchemeGroupVersion.Version) {
		return err
	}
	all, err := c.listSlices(ctx)
	if apierrors.IsForbidden(err) {
		c.Unread = append(c.Unread, fmt.Sprintf("%v: nodes of NVIDIA's DRA driver count as nodes without GPUs", err))
		return nil
	}
	if err != nil {
		return err
	}
	byNode := devices.ByNode(all)
	for i := range c.nodes {
		n := &c.nodes[i]
		of, there := byNode[n.name]
		if !there || len(of.Offers) == 0 {
			continue
		}
		if len(n.offers) > 0 {
			c.promisesMore("Node "+n.name, "NVIDIA's device plugin offers %s, and its DRA driver %s: each GPU is advertised twice, so the agent changes nothing there; remove one of the two from the node",
				resources(n.offers), counts(of))
			continue
		}
		if err := c.compareLabels(ctx, n); err != nil {
			return err
		}
		kind := &c.Static
		if of.Dynamic {
			kind = &c.Dynamic
		}
		*kind = append(*kind, n.name)
		for device, count := range of.Offers {
			n.offers[corev1.ResourceName(device.Resource())] = *resource.NewQuantity(int64(count), resource.DecimalSI)
		}
	}
	return nil
}

// compareLabels says where the agent would refuse what a node's labels ask for.
func (c *comparison) compareLabels(ctx context.Context, n *node) error {
	if c.known.Refused == nil {
		return nil
	}
	why, err := c.known.Refused(ctx, n.labels)
	if apierrors.IsForbidden(err) {
		c.Unread = append(c.Unread, fmt.Sprintf("%v: what labels ask of nodes of NVIDIA's DRA driver is not judged", err))
		return nil
	}
	if err == nil && why != "" {
		c.promisesMore("Node "+n.name, "%s", why)
	}
	return err
}

func (c *comparison) listSlices(ctx context.Context) (all []resourcev1.ResourceSlice, err error) {
	options := metav1.ListOptions{Limit: atATime, FieldSelector: resourcev1.ResourceSliceSelectorDriver + "=" + devices.Driver}
	for {
		page, err := c.objects.Resource(resourcev1.SchemeGroupVersion.WithResource("resourceslices")).List(ctx, options)
		if err != nil {
			return nil, fmt.Errorf("reading the ResourceSlices: %w", err)
		}
		for i := range page.Items {
			s, err := sliceOf(&page.Items[i])
			if err != nil {
				return nil, err
			}
			all = append(all, s)
		}
		if len(all) > most {
			return nil, fmt.Errorf("there are more than %d ResourceSlices", most)
		}
		if options.Continue = page.GetContinue(); options.Continue == "" {
			return all, nil
		}
	}
}

func sliceOf(u *unstructured.Unstructured) (s resourcev1.ResourceSlice, err error) {
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &s); err != nil {
		return s, fmt.Errorf("reading ResourceSlice %s: %w", u.GetName(), err)
	}
	return s, nil
}

func resources(offers corev1.ResourceList) string {
	var out []string
	for name, quantity := range offers {
		out = append(out, fmt.Sprintf("%s %s", name, quantity.String()))
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

func counts(n devices.Node) string {
	var out []string
	for kind, count := range n.Offers {
		out = append(out, strings.TrimSpace(fmt.Sprintf("%d of class %s %s", count, kind.Class, kind.Profile)))
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}
