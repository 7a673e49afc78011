package policy_test

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/gpuslice/gpuslice/test/long"
)

var components = []string{"delete-after-deadline", "impersonation", "reboot-sentinel", "without-policies"}

// render is what kubectl makes of an overlay with components. A field that a type does not have fails the test.
func (s *scene) render(overlay string, components ...string) []runtime.Object {
	s.t.Helper()
	return s.build(kustomization(s.t, overlay, components...))
}

// build is what kubectl makes of the kustomization in a folder.
func (s *scene) build(folder string) (objects []runtime.Object) {
	s.t.Helper()
	strict := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	text := s.kubectl("kustomize", folder)
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
			s.t.Fatalf("%s: %v\n%s", folder, err, doc)
		}
		objects = append(objects, object)
	}
}

func TestComponentsGoWithEveryOverlay(t *testing.T) {
	s := newScene(t)
	for _, overlay := range []string{"base", "device-plugin", "gpu-operator", "openshift"} {
		for _, set := range [][]string{nil, components[:1], components[1:2], components[2:3], components[3:], components} {
			if len(set) == 1 && overlay != "base" && !long.Full() {
				continue
			}
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
				"/usr": true, "/run/nvidia": true, "/run": has("reboot-sentinel"), "/": false,
			} {
				if _, mounted := mounts[folder]; mounted != want {
					t.Errorf("%s with %v: %s of the host is mounted: %t, want %t", overlay, set, folder, mounted, want)
				}
			}
			for _, folder := range []string{"/usr", "/run/nvidia"} { // below GPUSLICE_DRIVER_ROOT as on the host: the finder looks in both
				if mounts[folder] != "/run/driver-root"+folder {
					t.Errorf("%s with %v: %s of the host is at %s", overlay, set, folder, mounts[folder])
				}
			}
		}
	}
}

// The role has to be where the operator keeps its ConfigMaps, and its file must not get into the cluster.
func TestTheOperatorsNamespaceIsSaidOnce(t *testing.T) {
	s := newScene(t)
	elsewhere := kustomization(t, "base", "gpu-operator")
	operator, err := os.ReadFile(filepath.Join(deployFolder, "overlays/gpu-operator/operator.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	said := strings.NewReplacer("namespace: gpu-operator", "namespace: gpus", "configMap: device-plugin-config", "configMap: shares").Replace(string(operator))
	if err := os.WriteFile(filepath.Join(elsewhere, "operator.yaml"), []byte(said), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(elsewhere, "kustomization.yaml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text = bytes.Replace(text, []byte("components:"), []byte("- operator.yaml\ncomponents:"), 1)
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	for folder, want := range map[string][]string{
		filepath.Join(deployFolder, "overlays/gpu-operator"): {"gpu-operator", "device-plugin-config"},
		filepath.Join(deployFolder, "overlays/openshift"):    {"nvidia-gpu-operator", "device-plugin-config"},
		elsewhere: {"gpus", "shares"},
	} {
		var got [][]string
		for _, object := range s.build(folder) {
			switch o := object.(type) {
			case *rbacv1.Role:
				if o.Namespace != "gpuslice" {
					got = append(got, []string{o.Namespace, o.Rules[0].ResourceNames[0]})
				}
			case *rbacv1.RoleBinding:
				if o.Namespace != "gpuslice" {
					got = append(got, []string{o.Namespace, want[1]})
				}
			case *corev1.ConfigMap:
				if o.Name == "gpuslice-operator" {
					t.Errorf("%s: ConfigMap %s comes into the cluster", folder, o.Name)
				}
			}
		}
		if diff := cmp.Diff([][]string{want, want}, got); diff != "" {
			t.Errorf("%s: namespace and ConfigMap of the role and its binding (-want +got):\n%s", folder, diff)
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
