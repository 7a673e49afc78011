package policy_test

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
)

var components = []string{"delete-after-deadline", "driver-container", "reboot-sentinel", "without-policies"}

// render is what kubectl makes of an overlay with components. A field that a type does not have fails the test.
func (s *scene) render(overlay string, components ...string) (objects []runtime.Object) {
	s.t.Helper()
	strict := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	text := s.kubectl("kustomize", kustomization(s.t, overlay, components...))
	documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader([]byte(text))))
	for {
		doc, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			s.t.Fatal(err)
		}
		object, _, err := strict.Decode(doc, nil, nil)
		if err != nil {
			s.t.Fatalf("%s with %v: %v\n%s", overlay, components, err, doc)
		}
		objects = append(objects, object)
	}
}

func TestComponentsGoWithEveryOverlay(t *testing.T) {
	s := newScene(t)
	for _, overlay := range []string{"base", "device-plugin", "gpu-operator"} {
		for _, set := range [][]string{nil, components[:1], components[1:2], components[2:3], components[3:], components} {
			policies, mounts := 0, map[string]string{}
			for _, object := range s.render(overlay, set...) {
				if strings.HasPrefix(object.GetObjectKind().GroupVersionKind().Kind, "ValidatingAdmissionPolicy") {
					policies++
				}
				if d, ok := object.(*appsv1.DaemonSet); ok && d.Name == "gpuslice-agent" {
					mounts = hostMounts(t, &d.Spec.Template.Spec)
				}
			}
			has := func(component string) bool { return slices.Contains(set, component) }
			if (policies == 0) != has("without-policies") {
				t.Errorf("%s with %v has %d policies and bindings", overlay, set, policies)
			}
			for folder, want := range map[string]bool{
				"/run/dbus": true, "/run/gpuslice": true, "/dev": true,
				"/usr": !has("driver-container"), "/run/nvidia": has("driver-container"), "/run": has("reboot-sentinel"), "/": false,
			} {
				if _, mounted := mounts[folder]; mounted != want {
					t.Errorf("%s with %v: %s of the host is mounted: %t, want %t", overlay, set, folder, mounted, want)
				}
			}
			if has("driver-container") && mounts["/run/nvidia"] != "/run/driver-root/run/nvidia" { // below GPUSLICE_DRIVER_ROOT, as on the host
				t.Errorf("%s with %v: the driver's root is at %s", overlay, set, mounts["/run/nvidia"])
			}
		}
	}
}

// hostMounts are where the pod sees folders of the host.
func hostMounts(t *testing.T, pod *corev1.PodSpec) map[string]string {
	t.Helper()
	at := map[string]string{}
	for _, v := range pod.Volumes {
		if v.HostPath == nil {
			continue
		}
		for _, m := range pod.Containers[0].VolumeMounts {
			if m.Name == v.Name {
				at[v.HostPath.Path] = m.MountPath
			}
		}
		if at[v.HostPath.Path] == "" {
			t.Errorf("volume %s is not mounted", v.Name)
		}
	}
	return at
}
