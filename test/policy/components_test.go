package policy_test

import (
	"bufio"
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

	"github.com/gpuslice/gpuslice/test/kustomize"
)

var components = []string{"delete-after-deadline", "impersonation", "reboot-sentinel", "without-policies"}

// objects are those of a kustomization. A field that a type does not have fails the test.
func objects(t *testing.T, files kustomize.Files) (all []runtime.Object) {
	t.Helper()
	text, err := kustomize.Build(t, deployFolder, files)
	if err != nil {
		t.Fatal(err)
	}
	strict := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	documents := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
	for {
		doc, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		object, _, err := strict.Decode(doc, nil, nil)
		if err != nil {
			t.Fatalf("%v: %v\n%s", files, err, doc)
		}
		all = append(all, object)
	}
}

func TestComponentsGoWithEveryOverlay(t *testing.T) {
	for _, overlay := range []string{"base", "overlays/device-plugin", "overlays/gpu-operator", "overlays/openshift", "overlays/dra"} {
		for _, set := range [][]string{nil, components[:1], components[1:2], components[2:3], components[3:], components} {
			if len(set) == 1 && overlay != "base" && testing.Short() {
				continue
			}
			policies, mounts := 0, map[string]string{}
			for _, object := range objects(t, kustomize.Over(overlay, set...)) {
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
				"/var/lib/gpuslice/device-plugin": overlay != "overlays/dra",
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
	operator, err := os.ReadFile(filepath.Join(deployFolder, "overlays/gpu-operator/operator.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := kustomize.Files{
		"kustomization.yaml": "resources: [DEPLOY/base, operator.yaml]\ncomponents: [DEPLOY/components/gpu-operator]\n",
		"operator.yaml": strings.NewReplacer("namespace: gpu-operator", "namespace: gpus", "configMap: device-plugin-config", "configMap: shares").
			Replace(string(operator)),
	}
	for name, c := range map[string]struct {
		files kustomize.Files
		want  []string // namespace and ConfigMap
	}{
		"gpu-operator": {kustomize.Over("overlays/gpu-operator"), []string{"gpu-operator", "device-plugin-config"}},
		"openshift":    {kustomize.Over("overlays/openshift"), []string{"nvidia-gpu-operator", "device-plugin-config"}},
		"elsewhere":    {elsewhere, []string{"gpus", "shares"}},
	} {
		var got [][]string
		for _, object := range objects(t, c.files) {
			switch o := object.(type) {
			case *rbacv1.Role:
				if o.Namespace != "gpuslice" {
					got = append(got, []string{o.Namespace, o.Rules[0].ResourceNames[0]})
				}
			case *rbacv1.RoleBinding:
				if o.Namespace != "gpuslice" {
					got = append(got, []string{o.Namespace, c.want[1]})
				}
			case *corev1.ConfigMap:
				if o.Name == "gpuslice-operator" {
					t.Errorf("%s: ConfigMap %s comes into the cluster", name, o.Name)
				}
			}
		}
		if diff := cmp.Diff([][]string{c.want, c.want}, got); diff != "" {
			t.Errorf("%s: namespace and ConfigMap of the role and its binding (-want +got):\n%s", name, diff)
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
