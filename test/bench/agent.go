package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/test/incumbent"
)

// agentLog is the file with the agent's log in the directory of a run.
const agentLog = "agent.log"

// gpuslice is our agent, with its ordinary settings.
func gpuslice(st *stage, plugin deployment) contender {
	return service{stage: st, plugin: plugin, log: agentLog, start: func(ctx context.Context, at *site) (*process, error) {
		if err := at.configMap(ctx, "config.yaml", string(at.scenario.file())); err != nil {
			return nil, err
		}
		return at.startAgent(ctx, "migConfigMap: {name: "+at.Name+"}\n")
	}}
}

// gpusliceSharing is our agent next to a device plugin that runs with a file of the host: deploy/overlays/device-plugin.
func gpusliceSharing(st *stage, _ incumbent.Programs) contender {
	files := deployment{
		labels:    map[string]string{"nvidia.com/gpu.present": "true"},
		namespace: agentNamespace, selector: "app.kubernetes.io/name=nvidia-device-plugin",
	}
	return service{stage: st, plugin: files, asks: byProfile, log: agentLog, start: func(ctx context.Context, at *site) (*process, error) {
		profiles := fmt.Sprintf("apiVersion: %s\nkind: %s\nprofiles:\n  %s:\n    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}\n",
			catalog.ProfilesAPIVersion, catalog.ProfilesKind, at.scenario.config, at.scenario.replicas)
		if err := at.configMap(ctx, "profiles.yaml", profiles); err != nil {
			return nil, err
		}
		return at.startAgent(ctx, "profiles: {name: "+at.Name+"}\n")
	}}
}

// byProfile asks for the change by the name of a profile.
func byProfile(ctx context.Context, at *site) (end ending, err error) {
	began := time.Now()
	if err := at.label(ctx, map[string]string{config.LabelProfile: at.scenario.config}); err != nil {
		return end, err
	}
	done := func(o *corev1.Node) bool {
		c := ready(o)
		return c != nil && c.Status == corev1.ConditionTrue && strings.HasPrefix(c.Message, at.scenario.config+":")
	}
	if end.over, err = at.awaitEnd(ctx, done); err != nil {
		return end, err
	}
	for _, s := range at.watch.since(began) {
		if done(s.node) {
			end.word, end.said = success, s.at.Sub(began)
			break
		}
	}
	return end, nil
}

// configMap makes a ConfigMap of the run's own in the agent's namespace.
func (at *site) configMap(ctx context.Context, key, text string) error {
	_, err := at.client.CoreV1().ConfigMaps(agentNamespace).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: at.Name}, Data: map[string]string{key: text},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("making the ConfigMap with the config: %w", err)
	}
	return nil
}

// startAgent returns when the agent has said that there is nothing to do.
func (at *site) startAgent(ctx context.Context, settings string) (*process, error) {
	file := filepath.Join(at.Dir, "settings.yaml")
	text := "apiVersion: gpuslice.io/v1alpha1\nkind: Settings\ndrain: {unmanagedPods: evict, emptyDir: evict}\n" + settings // the pods here are bare
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return nil, fmt.Errorf("writing the settings: %w", err)
	}
	kubeconfig, err := at.kubeconfig(ctx, agentNamespace, "gpuslice-agent")
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, at.parts.Agent, "run", "--node", at.Name, "--kubeconfig", kubeconfig, "--settings", file,
		"--driver-root", at.DriverRoot(), "--pod-resources", at.Kubelet.PodResourcesSocket(), "--proc", at.ProcRoot(),
		"--state-dir", filepath.Join(at.Dir, "state"), "--lock", filepath.Join(at.Dir, "agent.lock"), "--pci-devices", at.PCIDevices(), "--kernel-log", at.KernelLog())
	cmd.Env = append(os.Environ(), "GPUSIM_NODE="+at.GPUs.Dir(), "GPUSLICE_PLUGIN_CONFIG="+at.PluginConfig())
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	p, err := launch(ctx, cmd, filepath.Join(at.Dir, agentLog), "")
	if err != nil {
		return nil, err
	}
	if err := at.watch.until(ctx, "the agent", idle); err != nil {
		return nil, errors.Join(err, p.stop())
	}
	return p, nil
}

// idle reports whether the agent has reported that there is nothing to do, and the state of the GPUs: then its first looks
// are over.
func idle(_ context.Context, s sample) (bool, error) {
	c := ready(s.node)
	return c != nil && c.Reason == string(config.ReasonNotRequested) && conditionOf(s.node, config.ConditionGPUUnhealthy) != nil, nil
}

// ready is what the agent says of the node; nil if it has said nothing yet.
func ready(o *corev1.Node) *corev1.NodeCondition {
	return conditionOf(o, config.ConditionGPUPartitionReady)
}

func conditionOf(o *corev1.Node, kind corev1.NodeConditionType) *corev1.NodeCondition {
	for i := range o.Status.Conditions {
		if o.Status.Conditions[i].Type == kind {
			return &o.Status.Conditions[i]
		}
	}
	return nil
}
