package kubelet

import (
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
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

// environment collects the container's variables in kubelet's order: the image's, the API server's address, env, and what device plugins gave.
func (w *worker) environment(c *container) (environment, error) {
	pod := w.latest()
	env := environment{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOSTNAME": pod.Name, "HOME": "/root"}
	for _, pair := range c.image.Env {
		name, value, _ := strings.Cut(pair, "=")
		env[name] = value
	}
	maps.Copy(env, w.k.apiAddress())
	if len(c.spec.EnvFrom) > 0 {
		return nil, fmt.Errorf("this kubelet does not know envFrom, which container %s has", c.spec.Name)
	}
	for _, v := range c.spec.Env {
		value, err := envValue(pod, v)
		if err != nil {
			return nil, fmt.Errorf("setting %s of container %s: %w", v.Name, c.spec.Name, err)
		}
		env[v.Name] = value
	}
	for _, given := range w.k.devices.given(w.uid, c.spec.Name) {
		maps.Copy(env, given.Envs)
	}
	return env, nil
}

// apiAddress is where clients in the pod find the API server.
func (k *Kubelet) apiAddress() environment {
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

func envValue(pod *corev1.Pod, v corev1.EnvVar) (string, error) {
	switch from := v.ValueFrom; {
	case from == nil && strings.Contains(v.Value, "$("):
		return "", fmt.Errorf("this kubelet does not replace variables in %q", v.Value)
	case from == nil:
		return v.Value, nil
	case from.FieldRef != nil:
		return field(pod, from.FieldRef.FieldPath)
	case from.ResourceFieldRef != nil:
		return limit(pod, from.ResourceFieldRef)
	}
	return "", fmt.Errorf("this kubelet knows fieldRef and resourceFieldRef, and the pod has another source")
}

// limit is a container's memory limit in bytes, for a variable without a divisor.
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

// field is a value of the pod, by its path in the downward API.
func field(pod *corev1.Pod, path string) (string, error) {
	switch path {
	case "metadata.name":
		return pod.Name, nil
	case "metadata.namespace":
		return pod.Namespace, nil
	case "spec.nodeName":
		return pod.Spec.NodeName, nil
	}
	return "", fmt.Errorf("this kubelet knows metadata.name, metadata.namespace and spec.nodeName, and the pod asks for %s", path)
}
