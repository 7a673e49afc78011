package watch

import (
	"context"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// A user who may create pods may send any number of them to the node, each with as much text as the API server accepts. Kubelet refuses the surplus,
// but they stay in the list. So the agent keeps only the fields of a large pod that it needs.
const (
	largePod     = 64 << 10 // bytes; pods that users write by hand are shorter
	longestOfPod = 1 << 10  // bytes of a text in a large pod
	mostOfLarge  = 256      // entries of a list in a large pod
)

// Lister lists the pods of a node.
type Lister struct {
	Client kube.Interface
	Node   string
}

// List returns the pods as the API server has them now. It requests all of them at once: the API server answers that from its cache, by the name of
// the node. For a list in pages it would read the pods of the whole cluster from etcd. List reads the answer pod by pod.
func (l Lister) List(ctx context.Context) (pods []corev1.Pod, err error) {
	err = kube.Retry(ctx, func() error {
		pods, err = l.list(ctx)
		return err
	})
	return pods, err
}

func (l Lister) list(ctx context.Context) ([]corev1.Pod, error) {
	list, err := Read(ctx, l.Client.RawCore(), metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", l.Node).String()})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// Read asks for a list of pods once, and reads the answer pod by pod.
func Read(ctx context.Context, client cache.Getter, options metav1.ListOptions) (*corev1.PodList, error) {
	body, err := client.Get().Resource("pods").VersionedParams(&options, metav1.ParameterCodec).
		SetHeader("Accept", runtime.ContentTypeProtobuf).Stream(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }() // read has read it to its end, or has failed
	return read(body)
}

// Shorten removes a pod's fields that the agent does not need, and cuts the texts of a large one.
func Shorten(pod *corev1.Pod) {
	large := pod.Size() > largePod
	pod.ManagedFields = nil
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			c := &containers[i]
			containers[i] = corev1.Container{
				Name: c.Name, Image: cutText(c.Image), Command: c.Command, Args: c.Args, Resources: c.Resources,
				RestartPolicy: c.RestartPolicy, VolumeMounts: c.VolumeMounts, Env: c.Env,
			}
			if large {
				cut(&containers[i])
			}
		}
	}
	for i := range pod.Spec.EphemeralContainers { // they request nothing
		c := &pod.Spec.EphemeralContainers[i]
		c.EphemeralContainerCommon = corev1.EphemeralContainerCommon{Name: c.Name, VolumeMounts: c.VolumeMounts, Env: c.Env}
		if large {
			c.VolumeMounts, c.Env = firstFew(c.VolumeMounts), firstVariables(c.Env)
		}
	}
	pod.Spec.Affinity, pod.Spec.TopologySpreadConstraints, pod.Spec.HostAliases, pod.Spec.DNSConfig = nil, nil, nil, nil
	pod.Spec.ImagePullSecrets, pod.Spec.ReadinessGates, pod.Spec.SecurityContext = nil, nil, nil
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		kept := corev1.Volume{Name: v.Name}
		kept.HostPath, kept.EmptyDir, kept.PersistentVolumeClaim, kept.Ephemeral = v.HostPath, v.EmptyDir, v.PersistentVolumeClaim, v.Ephemeral
		if v.ConfigMap != nil {
			kept.ConfigMap = &corev1.ConfigMapVolumeSource{LocalObjectReference: v.ConfigMap.LocalObjectReference}
		}
		pod.Spec.Volumes[i] = kept
	}
	if large {
		pod.Annotations, pod.Labels = firstOf(pod.Annotations), firstOf(pod.Labels)
	}
}

func cut(c *corev1.Container) {
	c.Command, c.Args = firstTexts(c.Command), firstTexts(c.Args)
	c.VolumeMounts, c.Env = firstFew(c.VolumeMounts), firstVariables(c.Env)
}

// firstVariables keeps those that may name devices before others, and of a value that only kubelet sees, that there is one.
func firstVariables(all []corev1.EnvVar) []corev1.EnvVar {
	out := firstFew(slices.SortedStableFunc(slices.Values(all), holders.CompareNaming))
	for i, e := range out {
		out[i] = corev1.EnvVar{Name: cutText(e.Name), Value: cutText(e.Value)}
		if e.ValueFrom != nil {
			out[i].ValueFrom = &corev1.EnvVarSource{}
		}
	}
	return out
}

func firstFew[T any](all []T) []T { return slices.Clone(all[:min(len(all), mostOfLarge)]) }

func firstTexts(all []string) []string {
	out := firstFew(all)
	for i := range out {
		out[i] = cutText(out[i])
	}
	return out
}

func firstOf(all map[string]string) map[string]string {
	out := map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(all))[:min(len(all), mostOfLarge)] {
		out[key] = cutText(all[key])
	}
	return out
}

// cutText returns a copy of the beginning of a text, so that the rest can be freed.
func cutText(text string) string {
	if len(text) <= longestOfPod {
		return text
	}
	return strings.Clone(text[:longestOfPod])
}
