package agent

import (
	"context"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/agent/retried"
)

// Whoever may create a pod may send any number of them to the node, each with as much text as the API server takes. Kubelet refuses
// those that are too many, and they stay in the list. So it is read in pages, and of a large pod only what decisions are made by is kept.
const (
	podsOfPage   = 10       // a page is held as it was sent and as it was read
	largePod     = 64 << 10 // bytes; what people write by hand is shorter
	longestOfPod = 1 << 10  // bytes of a text in a large pod
	mostOfLarge  = 256      // of what a large pod may have any number
)

// podsOf lists the pods of a node as the API server has them now.
func podsOf(ctx context.Context, client kubernetes.Interface, node string) ([]corev1.Pod, error) {
	var out []corev1.Pod
	err := retried.Do(ctx, func() error {
		out = nil
		options := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String(), Limit: podsOfPage}
		for {
			page, err := client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, options)
			if err != nil {
				return err
			}
			for i := range page.Items {
				shorten(&page.Items[i])
			}
			out = append(out, page.Items...)
			if options.Continue = page.Continue; options.Continue == "" {
				return nil
			}
		}
	})
	return out, err
}

// shorten takes from a large pod what no decision is made by.
func shorten(pod *corev1.Pod) {
	if pod.Size() <= largePod {
		return
	}
	pod.ManagedFields = nil
	pod.Annotations, pod.Labels = firstOf(pod.Annotations), firstOf(pod.Labels)
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			c := &containers[i]
			containers[i] = corev1.Container{
				Name: c.Name, Command: firstTexts(c.Command), Args: firstTexts(c.Args), Resources: c.Resources, RestartPolicy: c.RestartPolicy,
				VolumeMounts: firstFew(c.VolumeMounts), Env: firstFew(c.Env),
			}
			for j := range containers[i].Env {
				e := &containers[i].Env[j]
				*e = corev1.EnvVar{Name: cutText(e.Name), Value: cutText(e.Value)}
			}
		}
	}
	pod.Spec.EphemeralContainers = nil
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

// cutText is the beginning of a text; the rest of it is let go.
func cutText(text string) string {
	if len(text) <= longestOfPod {
		return text
	}
	return strings.Clone(text[:longestOfPod])
}
