package main

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/test/incumbent"
)

// configManager is NVIDIA's config-manager in the pod of its device plugin, as the GPU Operator and the plugin's chart run
// it. It reports to no one: only what the node advertises shows that it is done.
func configManager(st *stage, _ incumbent.Programs) contender {
	chart := deployment{
		labels: map[string]string{
			labelPlugin: "true", "nvidia.com/gpu.deploy.gpu-feature-discovery": "true", "test.gpuslice.io/config-manager": "true",
		},
		namespace: "nvidia-device-plugin", selector: labelApp + "=" + pluginApp,
	}
	return service{stage: st, plugin: chart, asks: byPluginConfig, account: userOf("nvidia-device-plugin", "nvidia-device-plugin")}
}

// byPluginConfig requests a config of the ConfigMap by its key, as people do where there is config-manager and no agent.
func byPluginConfig(ctx context.Context, at *site) (end ending, err error) {
	const key = "time-slicing-4" // of test/node/manifests/config-manager.yaml
	if err := at.label(ctx, map[string]string{"nvidia.com/device-plugin.config": key}); err != nil {
		return end, err
	}
	end.word = success
	end.over, err = at.awaitEnd(ctx, func(*corev1.Node) bool { return true })
	return end, err
}
