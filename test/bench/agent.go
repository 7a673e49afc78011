package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
)

// gpuslice is our agent, with its ordinary settings.
func gpuslice(st *stage) contender {
	return service{stage: st, start: func(ctx context.Context, at *site) (*process, error) {
		configMaps := at.client.CoreV1().ConfigMaps(agentNamespace)
		_, err := configMaps.Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: at.Name}, Data: map[string]string{"config.yaml": string(at.scenario.file())},
		}, metav1.CreateOptions{})
		if err != nil {
			return nil, fmt.Errorf("making the ConfigMap with the config: %w", err)
		}
		settings := filepath.Join(at.Dir, "settings.yaml")
		text := fmt.Appendf(nil, "apiVersion: gpuslice.io/v1alpha1\nkind: Settings\nmigConfigMap: {name: %s}\n", at.Name)
		if err := os.WriteFile(settings, text, 0o600); err != nil {
			return nil, fmt.Errorf("writing the settings: %w", err)
		}
		kubeconfig, err := at.kubeconfig(ctx, agentNamespace, "gpuslice-agent")
		if err != nil {
			return nil, err
		}
		cmd := exec.CommandContext(ctx, st.parts.Agent, "run", "--node", at.Name, "--kubeconfig", kubeconfig, "--settings", settings,
			"--driver-root", at.DriverRoot(), "--pod-resources", at.Kubelet.PodResourcesSocket(), "--proc", at.ProcRoot())
		cmd.Env = append(os.Environ(), "GPUSIM_NODE="+at.GPUs.Dir())
		cmd.SysProcAttr = &syscall.SysProcAttr{}
		p, err := launch(ctx, cmd, filepath.Join(at.Dir, "agent.log"), "")
		if err != nil {
			return nil, err
		}
		if err := at.watch.until(ctx, "the agent", idle); err != nil {
			return nil, errors.Join(err, p.stop())
		}
		return p, nil
	}}
}

// idle reports whether the agent has said that there is nothing to do.
func idle(_ context.Context, o *corev1.Node) (bool, error) {
	for _, c := range o.Status.Conditions {
		if c.Type == config.ConditionGPUPartitionReady {
			return c.Reason == string(config.ReasonNoWish), nil
		}
	}
	return false, nil
}
