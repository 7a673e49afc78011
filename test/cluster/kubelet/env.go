package kubelet

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// environment holds a container's variables.
type environment map[string]string

// list writes the variables as a process takes them.
func (e environment) list() []string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(e)) {
		all = append(all, name+"="+e[name])
	}
	return all
}

// environment collects the container's variables in kubelet's order: the image's, the API server's address, envFrom, env,
// and what device plugins gave.
func (w *worker) environment(ctx context.Context, c *container) (environment, error) {
	pod := w.latest()
	env := environment{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOSTNAME": pod.Name, "HOME": "/root"}
	for _, pair := range c.image.Env {
		name, value, _ := strings.Cut(pair, "=")
		env[name] = value
	}
	maps.Copy(env, w.k.apiAddress())
	for _, from := range c.spec.EnvFrom {
		values, err := w.envFrom(ctx, pod.Namespace, from)
		if err != nil {
			return nil, err
		}
		for name, value := range values {
			env[from.Prefix+name] = value
		}
	}
	for _, v := range c.spec.Env {
		value, err := w.envValue(ctx, pod, v, env)
		if err != nil {
			return nil, fmt.Errorf("setting %s of container %s: %w", v.Name, c.spec.Name, err)
		}
		if value != nil {
			env[v.Name] = *value
		}
	}
	for _, given := range w.k.devices.given(w.uid, c.spec.Name) {
		maps.Copy(env, given.Envs)
	}
	return env, nil
}

// apiAddress is where clients in the pod find the API server.
func (k *Kubelet) apiAddress() environment {
	if k.Config == nil {
		return nil
	}
	host := k.Config.Host
	if u, err := url.Parse(host); err == nil && u.Host != "" {
		host = u.Host
	}
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		name, port = host, "443"
	}
	return environment{"KUBERNETES_SERVICE_HOST": name, "KUBERNETES_SERVICE_PORT": port, "KUBERNETES_SERVICE_PORT_HTTPS": port}
}

func (w *worker) envFrom(ctx context.Context, namespace string, from corev1.EnvFromSource) (map[string]string, error) {
	switch {
	case from.ConfigMapRef != nil:
		return w.k.configMap(ctx, namespace, from.ConfigMapRef.Name, from.ConfigMapRef.Optional)
	case from.SecretRef != nil:
		return w.k.secret(ctx, namespace, from.SecretRef.Name, from.SecretRef.Optional)
	}
	return nil, nil
}

// envValue is the value of a variable; nil for an optional one that is not there.
func (w *worker) envValue(ctx context.Context, pod *corev1.Pod, v corev1.EnvVar, so environment) (*string, error) {
	if v.ValueFrom == nil {
		value := expand(v.Value, so)
		return &value, nil
	}
	switch from := v.ValueFrom; {
	case from.FieldRef != nil:
		value, err := w.field(pod, from.FieldRef.FieldPath)
		return &value, err
	case from.ResourceFieldRef != nil:
		value, err := limit(pod, from.ResourceFieldRef)
		return &value, err
	case from.ConfigMapKeyRef != nil:
		ref := from.ConfigMapKeyRef
		values, err := w.k.configMap(ctx, pod.Namespace, ref.Name, ref.Optional)
		return keyOf(values, "ConfigMap", ref.Name, ref.Key, ref.Optional, err)
	case from.SecretKeyRef != nil:
		ref := from.SecretKeyRef
		values, err := w.k.secret(ctx, pod.Namespace, ref.Name, ref.Optional)
		return keyOf(values, "Secret", ref.Name, ref.Key, ref.Optional, err)
	}
	return nil, fmt.Errorf("this kubelet knows fieldRef, resourceFieldRef, configMapKeyRef and secretKeyRef, and the pod has another source")
}

// limit is what a container may take of memory, in bytes, as a variable has it whose divisor is not set.
func limit(pod *corev1.Pod, of *corev1.ResourceFieldSelector) (string, error) {
	if of.Resource != "limits.memory" || !of.Divisor.IsZero() && of.Divisor.Value() != 1 {
		return "", fmt.Errorf("this kubelet knows limits.memory in bytes, and the pod asks for %s by %s", of.Resource, of.Divisor.String())
	}
	for _, c := range pod.Spec.Containers {
		if memory, has := c.Resources.Limits[corev1.ResourceMemory]; has && c.Name == of.ContainerName {
			return strconv.FormatInt(memory.Value(), 10), nil
		}
	}
	return "", fmt.Errorf("this kubelet finds no limit of memory at container %q", of.ContainerName)
}

func keyOf(values map[string]string, kind, name, key string, optional *bool, err error) (*string, error) {
	if err != nil {
		return nil, err
	}
	if value, found := values[key]; found {
		return &value, nil
	}
	if isSet(optional) {
		return nil, nil //nolint:nilnil // an optional variable that is not there is neither a value nor an error
	}
	return nil, fmt.Errorf("couldn't find key %s in %s %s", key, kind, name)
}

// field is a value of the pod, by the paths that the downward API allows.
func (w *worker) field(pod *corev1.Pod, path string) (string, error) {
	if base, key, found := strings.Cut(path, "['"); found {
		key = strings.TrimSuffix(key, "']")
		switch base {
		case "metadata.labels":
			return pod.Labels[key], nil
		case "metadata.annotations":
			return pod.Annotations[key], nil
		}
	}
	w.mu.Lock()
	address := w.address
	w.mu.Unlock()
	values := map[string]string{
		"metadata.name": pod.Name, "metadata.namespace": pod.Namespace, "metadata.uid": string(pod.UID),
		"metadata.labels": lines(pod.Labels), "metadata.annotations": lines(pod.Annotations),
		"spec.nodeName": pod.Spec.NodeName, "spec.serviceAccountName": pod.Spec.ServiceAccountName,
		"status.hostIP": w.k.Address, "status.hostIPs": w.k.Address, "status.podIP": address, "status.podIPs": address,
	}
	value, known := values[path]
	if !known {
		return "", fmt.Errorf("field %s of a pod is not one that can be referred to", path)
	}
	return value, nil
}

// lines writes a map as the downward API does.
func lines(values map[string]string) string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(values)) {
		fmt.Fprintf(&b, "%s=%q\n", key, values[key])
	}
	return b.String()
}

// configMap reads the values of a ConfigMap. One that is optional and not there has none.
func (k *Kubelet) configMap(ctx context.Context, namespace, name string, optional *bool) (map[string]string, error) {
	object, err := k.client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, unlessOptional(fmt.Errorf("reading ConfigMap %s/%s: %w", namespace, name, err), optional)
	}
	values := maps.Clone(object.Data)
	if values == nil {
		values = map[string]string{}
	}
	for key, value := range object.BinaryData {
		values[key] = string(value)
	}
	return values, nil
}

// secret reads the values of a Secret. One that is optional and not there has none.
func (k *Kubelet) secret(ctx context.Context, namespace, name string, optional *bool) (map[string]string, error) {
	object, err := k.client.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, unlessOptional(fmt.Errorf("reading Secret %s/%s: %w", namespace, name, err), optional)
	}
	values := map[string]string{}
	for key, value := range object.Data {
		values[key] = string(value)
	}
	return values, nil
}

func unlessOptional(err error, optional *bool) error {
	if isSet(optional) && apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func isSet(b *bool) bool { return b != nil && *b }

func expandAll(texts []string, env environment) []string {
	all := make([]string, len(texts))
	for i, text := range texts {
		all[i] = expand(text, env)
	}
	return all
}

// expand replaces $(NAME) by the variable's value; an unknown one stays as it is, and $$ stands for one $.
func expand(text string, env environment) string {
	var b strings.Builder
	for {
		before, after, found := strings.Cut(text, "$")
		b.WriteString(before)
		if !found {
			return b.String()
		}
		text = after
		switch {
		case strings.HasPrefix(text, "$"):
			b.WriteByte('$')
			text = text[1:]
		case strings.HasPrefix(text, "("):
			name, rest, closed := strings.Cut(text[1:], ")")
			value, known := env[name]
			if !closed || !known {
				b.WriteByte('$')
				continue
			}
			b.WriteString(value)
			text = rest
		default:
			b.WriteByte('$')
		}
	}
}
