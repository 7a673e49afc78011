package repo_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
)

const (
	base      = root + "/deploy/base"
	namespace = "gpuslice" // of everything in deploy/ that has one
)

// localConfig is the annotation of what kubectl reads when it builds an overlay, and does not send to the cluster.
const localConfig = "config.kubernetes.io/local-config"

// manifest is one object of deploy/.
type manifest struct {
	file                  string
	kind, namespace, name string
	object                runtime.Object
}

// foreign are the groups of objects that deploy/ has and that Kubernetes has no types of.
var foreign = []string{
	"nvidia.com", "monitoring.coreos.com", "machine.openshift.io", "machineconfiguration.openshift.io", "autoscaling.openshift.io", "karpenter.sh",
	"argoproj.io", "source.toolkit.fluxcd.io", "kustomize.toolkit.fluxcd.io",
}

// readManifests reads the objects of deploy/, each into its type of k8s.io/api, once for all tests. A field that the type does not have, or that
// is there twice, is an error. Objects of foreign groups are left out.
var readManifests = sync.OnceValues(func() ([]manifest, error) {
	var out []manifest
	err := filepath.WalkDir(root+"/deploy", func(path string, _ fs.DirEntry, err error) error {
		if path == root+"/deploy/chart" { // test/shipped has what Helm makes of it
			return fs.SkipDir
		}
		if err != nil || filepath.Ext(path) != ".yaml" || slices.Contains([]string{"kustomization.yaml", "references.yaml"}, filepath.Base(path)) {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
		for {
			doc, err := documents.Read()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			m, ours, err := manifestOf(path, doc)
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			if ours {
				out = append(out, m)
			}
		}
	})
	return out, err
})

func manifestOf(path string, doc []byte) (m manifest, ours bool, err error) {
	var its metav1.TypeMeta
	if err := sigsyaml.Unmarshal(doc, &its); err != nil {
		return manifest{}, false, err
	}
	if group, _, _ := strings.Cut(its.APIVersion, "/"); slices.Contains(foreign, group) {
		return manifest{}, false, nil
	}
	object, kind, err := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer().Decode(doc, nil, nil)
	if err != nil {
		return manifest{}, false, err
	}
	named, err := meta.Accessor(object)
	if err != nil {
		return manifest{}, false, err
	}
	return manifest{file: path, kind: kind.Kind, namespace: named.GetNamespace(), name: named.GetName(), object: object}, true, nil
}

// manifests are the objects of deploy/. Tests change none of them.
func manifests(t *testing.T) []manifest {
	t.Helper()
	out, err := readManifests()
	if err != nil {
		t.Fatal(err)
	}
	if len(out) == 0 {
		t.Fatal("deploy/ has no manifests")
	}
	return out
}

// the finds the only manifest of its type.
func the[T runtime.Object](t *testing.T, name string) T {
	t.Helper()
	for _, m := range manifests(t) {
		if object, ok := m.object.(T); ok && m.name == name {
			return object
		}
	}
	var none T
	t.Fatalf("deploy/ has no %T %s", none, name)
	return none
}

func TestManifestsDecodeStrictlyAndLieInOurNamespace(t *testing.T) {
	clusterWide := []string{"Namespace", "Node", "ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "PriorityLevelConfiguration", "FlowSchema", "DeviceClass"}
	for _, m := range manifests(t) {
		want := namespace
		switch {
		case filepath.Base(m.file) == "one-namespace.yaml":
			continue // it never gets into the cluster, and says why it is in two
		case slices.Contains(clusterWide, m.kind):
			want = ""
		case slices.Contains([]string{"smoke-test.yaml", "dra.yaml"}, filepath.Base(m.file)):
			want = "" // wherever people try it
		case filepath.Base(m.file) == "argocd-health.yaml":
			want = "" // a patch
		case strings.Contains(m.file, "components/gpu-operator/"):
			want = "gpu-operator" // where its ConfigMaps are
		}
		if m.namespace != want {
			t.Errorf("%s: %s %s is in namespace %q, want %q", m.file, m.kind, m.name, m.namespace, want)
		}
	}
}

// kustomization is what is read of a kustomization.yaml.
type kustomization struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Namespace  string   `json:"namespace"`
	Resources  []string `json:"resources"`
	Components []string `json:"components"`
	Patches    []any    `json:"patches"`

	Replacements   []any    `json:"replacements"`
	Configurations []string `json:"configurations"`
}

// patchFiles are the files of patches; "" for one that stands in the kustomization.
func (k kustomization) patchFiles() []string {
	var out []string
	for _, p := range k.Patches {
		patch, _ := p.(map[string]any)
		file, _ := patch["path"].(string)
		out = append(out, file)
	}
	return out
}

func readKustomization(t *testing.T, path string) (k kustomization) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := sigsyaml.UnmarshalStrict(text, &k); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return k
}

func TestKustomizationsNameEveryFileOfTheirFolder(t *testing.T) {
	found := 0
	for _, path := range files(t) {
		if filepath.Base(path) != "kustomization.yaml" {
			continue
		}
		found++
		k := readKustomization(t, path)
		if component := strings.Contains(path, "/components/"); component != (k.Kind == "Component") {
			t.Errorf("%s is a %s", path, k.Kind)
		}
		var named []string
		patches := slices.DeleteFunc(k.patchFiles(), func(file string) bool { return file == "" })
		for _, r := range slices.Concat(k.Resources, k.Components, k.Configurations, patches) {
			at := filepath.Join(filepath.Dir(path), r)
			if info, err := os.Stat(at); err != nil {
				t.Errorf("%s: %v", path, err)
			} else if !info.IsDir() {
				named = append(named, at)
			}
		}
		beside, err := filepath.Glob(filepath.Dir(path) + "/*.yaml")
		if err != nil {
			t.Fatal(err)
		}
		beside = slices.DeleteFunc(beside, func(file string) bool { return file == path })
		slices.Sort(named)
		if diff := cmp.Diff(beside, named, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s: resources (-files +kustomization.yaml):\n%s", path, diff)
		}
	}
	if found < 8 {
		t.Errorf("found %d kustomizations", found)
	}
}

func TestTheBaseIsInOurNamespaceAndHasThePolicies(t *testing.T) {
	k := readKustomization(t, base+"/kustomization.yaml")
	if k.Namespace != namespace {
		t.Errorf("namespace is %q, want %q", k.Namespace, namespace)
	}
	if !slices.Contains(k.Resources, "../policies") {
		t.Error("the base goes without the admission policies")
	}
}

// The list in a ClusterPolicy takes the place of NVIDIA's own.
func TestTheOperatorsPodsTolerateWhatOurPluginDoes(t *testing.T) {
	var policy struct {
		Spec struct {
			Daemonsets struct {
				Tolerations []corev1.Toleration `json:"tolerations"`
			} `json:"daemonsets"`
		} `json:"spec"`
	}
	if err := sigsyaml.Unmarshal([]byte(read(t, "deploy/examples/clusterpolicy.yaml")), &policy); err != nil {
		t.Fatal(err)
	}
	keys := func(of []corev1.Toleration) (all []string) {
		for _, one := range of {
			all = append(all, fmt.Sprintf("%s %s %s", one.Key, one.Operator, one.Effect))
		}
		slices.Sort(all)
		return all
	}
	want := keys(the[*appsv1.DaemonSet](t, "gpuslice-device-plugin").Spec.Template.Spec.Tolerations)
	if diff := cmp.Diff(want, keys(policy.Spec.Daemonsets.Tolerations)); diff != "" {
		t.Errorf("tolerations (-overlays/device-plugin +examples/clusterpolicy.yaml):\n%s", diff)
	}
}

// NVIDIA's config manager ends where its ConfigMap has no key ("no configuration files available"), and no device plugin starts.
func TestTheConfigMapThatTheClusterPolicyNamesHasAKeyThatSharesNothing(t *testing.T) {
	command := regexp.MustCompile(`(?m)^ *# +kubectl -n \S+ create configmap device-plugin-config --from-literal=([-._a-zA-Z0-9]+)='([^']+)'$`)
	said := command.FindStringSubmatch(read(t, "deploy/examples/clusterpolicy-configs.yaml"))
	if said == nil {
		t.Fatalf("examples/clusterpolicy-configs.yaml does not say how to make the ConfigMap, by %s", command)
	}
	if c, err := deviceplugin.Parse([]byte(said[2])); err != nil || c.Sharing.Strategy != catalog.SharingNone {
		t.Errorf("key %s: %+v, %v", said[1], c, err)
	}
}

func TestSettingsAreTheDefaultsButForWhatTheyName(t *testing.T) {
	got, err := config.Parse([]byte(the[*corev1.ConfigMap](t, "gpuslice-settings").Data["settings.yaml"]))
	if err != nil {
		t.Fatal(err)
	}
	want := config.Default()
	want.MIGConfigMap = config.ConfigMapKey{Name: "gpuslice-mig-configs", Key: "config.yaml"}
	want.Reboot.Sentinel = "/run/host/reboot-required"
	bySelectorText := cmp.Comparer(func(a, b labels.Selector) bool { return a.String() == b.String() })
	if diff := cmp.Diff(want, got, bySelectorText); diff != "" {
		t.Errorf("deploy/base/configmap-settings.yaml says that it shows the defaults (-default +written):\n%s", diff)
	}
}

// People edit these files, or copy them.
func TestConfigMapsAreReadByTheAgentsOwnParser(t *testing.T) {
	read := 0
	for _, m := range manifests(t) {
		configMap, ok := m.object.(*corev1.ConfigMap)
		if !ok || configMap.Annotations[localConfig] == "true" {
			continue
		}
		for name, text := range configMap.Data {
			if strings.HasSuffix(name, ".json") || strings.HasPrefix(name, "resource.customizations.") {
				continue // a dashboard, which test/shipped reads; a health check of Argo CD
			}
			read++
			if err := readByName(name, []byte(text)); err != nil {
				t.Errorf("%s: %s: %v", m.file, name, err)
			}
		}
	}
	if read < 5 {
		t.Errorf("deploy/ has %d files in ConfigMaps", read)
	}
	settings, err := config.Parse([]byte(the[*corev1.ConfigMap](t, "gpuslice-settings").Data["settings.yaml"]))
	if err != nil {
		t.Fatal(err)
	}
	if ref := settings.MIGConfigMap; the[*corev1.ConfigMap](t, ref.Name).Data[ref.Key] == "" {
		t.Errorf("settings: migConfigMap names key %q, which ConfigMap %s does not have", ref.Key, ref.Name)
	}
}

func TestTheAgentsPodMountsWhatItDeclares(t *testing.T) {
	written := []string{"dev", "lock", "cdi-run", "cdi-etc", "plugin-config", "state"} // each says in the manifest what is written there
	pod := the[*appsv1.DaemonSet](t, "gpuslice-agent").Spec.Template.Spec
	mounts := map[string]corev1.VolumeMount{}
	for _, m := range pod.Containers[0].VolumeMounts {
		mounts[m.Name] = m
	}
	for _, v := range pod.Volumes {
		m, ok := mounts[v.Name]
		delete(mounts, v.Name)
		switch {
		case !ok:
			t.Errorf("volume %s is not mounted", v.Name)
		case v.HostPath != nil && slices.Contains([]string{"/", "/run", "/var", "/etc", "/var/run", "/proc", "/sys"}, v.HostPath.Path):
			t.Errorf("volume %s: %s of the host brings more along than the agent needs", v.Name, v.HostPath.Path)
		case v.HostPath != nil && !m.ReadOnly && !slices.Contains(written, v.Name):
			t.Errorf("volume %s: %s of the host is mounted for writing", v.Name, v.HostPath.Path)
		case v.ConfigMap != nil:
			_ = the[*corev1.ConfigMap](t, v.ConfigMap.Name)
		}
	}
	for name := range mounts {
		t.Errorf("mount %s has no volume", name)
	}
	_ = the[*corev1.ServiceAccount](t, pod.ServiceAccountName)
}

func TestTheAgentsPathsLieUnderItsMounts(t *testing.T) {
	container := the[*appsv1.DaemonSet](t, "gpuslice-agent").Spec.Template.Spec.Containers[0]
	paths := slices.Clone(container.Args)
	for _, env := range container.Env {
		if strings.HasPrefix(env.Name, "GPUSLICE_") {
			paths = append(paths, env.Name+"="+strings.TrimPrefix(env.Value, "unix:path="))
		}
	}
	found := 0
	for _, arg := range paths {
		_, path, ok := strings.Cut(arg, "=/")
		if !ok {
			continue
		}
		found++
		under := slices.ContainsFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool {
			driver := strings.HasPrefix(m.MountPath, "/"+path+"/") && m.Name == "driver-root" // of its root, /usr is mounted
			return driver || strings.HasPrefix("/"+path+"/", m.MountPath+"/")
		})
		if !under {
			t.Errorf("%s: nothing is mounted there", arg)
		}
	}
	if found < 4 {
		t.Errorf("found %d paths: settings, driver, lock and bus are not where the agent's pod has them", found)
	}
}

// The agent learns its limit of memory from the pod, so that whoever changes one changes both.
func TestThePodGivesTheAgentItsLimitOfMemory(t *testing.T) {
	container := the[*appsv1.DaemonSet](t, "gpuslice-agent").Spec.Template.Spec.Containers[0]
	if container.Resources.Limits.Memory().IsZero() {
		t.Error("the agent's container has no limit of memory")
	}
	given := slices.ContainsFunc(container.Env, func(env corev1.EnvVar) bool {
		from := env.ValueFrom
		return env.Name == "GPUSLICE_MEMORY_LIMIT" && from != nil && from.ResourceFieldRef != nil &&
			from.ResourceFieldRef.Resource == "limits.memory" && from.ResourceFieldRef.ContainerName == container.Name
	})
	if !given {
		t.Errorf("the agent is not given its limit of memory: %v", container.Env)
	}
}

// By a pod that is available when it starts, a bad release comes to all nodes.
func TestTheAgentsPodIsAvailableSomeTimeAfterItIsReady(t *testing.T) {
	if set := the[*appsv1.DaemonSet](t, "gpuslice-agent").Spec; set.MinReadySeconds < 30 {
		t.Errorf("a pod counts as available after %d seconds", set.MinReadySeconds)
	}
}
