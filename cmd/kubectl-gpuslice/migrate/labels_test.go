package migrate

import (
	"path/filepath"
	"strings"
	"testing"
)

// A label may have the value of another, and a config of a name that agents make may be one that they do not make of these GPUs.
func TestMigrateSaysWhatALabelNamesInPlaceOfAMIGConfig(t *testing.T) {
	const a100, rtx = "nvidia.com/gpu.product: NVIDIA-A100-SXM4-40GB, nvidia.com/gpu.count: '8', nvidia.com/gpu.memory: '40960'", "nvidia.com/gpu.product: NVIDIA-GeForce-RTX-4090, nvidia.com/mig.capable: 'false'"
	const plugin = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  four: |\n    version: v1\n"
	const configs = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: m}\ndata:\n  config.yaml: |\n    version: v1\n    mig-configs: {mixed: [{devices: all, mig-enabled: false}], mine: [{devices: all, mig-enabled: false}]}\n"
	for name, row := range map[string]struct{ labels, file, want string }{
		"a strategy":                  {"nvidia.com/mig.config: mixed, " + a100, "", "change      nvidia.com/mig.config=mixed: mixed is a MIG strategy, which the device plugin has, and no MIG config: name a config, as all-balanced, or remove the label: gpu-1\n"},
		"a strategy, next to configs": {"nvidia.com/mig.config: single", configs, "nvidia.com/mig.config=single: single is a MIG strategy"},
		"a config of that name":       {"nvidia.com/mig.config: mixed, " + a100, configs, "taken over  nvidia.com/mig.config=mixed: gpu-1\n"},
		"a spelled name":              {"nvidia.com/mig.config: gpu0_2x3g.40gb, " + a100, "", "nvidia.com/mig.config=gpu0_2x3g.40gb: the agent reads it as a config, where mig-manager has found none: gpu-1\n"},
		"a wrong spelled name":        {"nvidia.com/mig.config: gpu00_off, " + a100, "", "nvidia.com/mig.config=gpu00_off: the agent would refuse it: config \"gpu00_off\", gpu00: \"00\" is no index of a GPU"},
		"a MIG device":                {"nvidia.com/mig.config: 1g.5gb.me, " + a100, "", "1g.5gb.me is a MIG device, and no MIG config: all-1g.5gb.me is the config that fills GPUs with it: gpu-1\n"},
		"a key of the device plugin":  {"nvidia.com/mig.config: four", plugin, "four is a config of the device plugin, and no MIG config: set the label nvidia.com/device-plugin.config to it, and remove this one: gpu-1\n"},
		"a MIG config for the plugin": {"nvidia.com/device-plugin.config: all-1g.5gb", plugin, "all-1g.5gb is a MIG config, and no config of the device plugin: set the label nvidia.com/mig.config to it, and remove this one: gpu-1\n"},
		"one of a file":               {"nvidia.com/device-plugin.config: mine", configs, "mine is a MIG config, and no config of the device plugin"},
		"another name":                {"nvidia.com/mig.config: custom", "", "no file of MIG configs was read that would say whether it is there"},
		"a config of other GPUs":      {"nvidia.com/mig.config: all-1g.12gb, " + a100, "", "nvidia.com/mig.config=all-1g.12gb: the agent makes no config of that name of the node's GPUs (NVIDIA-A100-SXM4-40GB), and says UnknownConfig: change the label: gpu-1\n"},
		"a config of these GPUs":      {"nvidia.com/mig.config: all-1g.5gb, " + a100, "", "taken over  nvidia.com/mig.config=all-1g.5gb: gpu-1\n"},
		"GPUs without MIG":            {"nvidia.com/mig.config: all-balanced, " + rtx, "", "the agent makes no config of that name of the node's GPUs (NVIDIA-GeForce-RTX-4090)"},
		"GPUs without MIG, MIG off":   {"nvidia.com/mig.config: all-disabled, " + rtx, "", "taken over  nvidia.com/mig.config=all-disabled: gpu-1\n"},
		"GPUs of no known model":      {"nvidia.com/mig.config: all-1g.34gb, nvidia.com/gpu.product: NVIDIA-B300", "", "taken over  nvidia.com/mig.config=all-1g.34gb: gpu-1\n"},
		"a filter": {
			"nvidia.com/mig.config: mine, " + a100, strings.ReplaceAll(configs, "mine: [{", "mine: [{device-filter: '0x20B210DE', "),
			"change      nvidia.com/mig.config=mine has a device-filter, and no label shows the PCI device ids of the GPUs: see whether a rule is about them by gpuslice-agent plan --offline --mig-config mine on the node with -f THIS-FILE",
		},
	} {
		text := "apiVersion: v1\nkind: Node\nmetadata: {name: gpu-1, labels: {" + row.labels + "}}\n"
		file := filepath.Join(written(t, map[string]string{"nodes.yaml": text + "---\n" + row.file}), "nodes.yaml")
		if got, err := migrates(t, "--dry-run", "-f", file); err != nil || !strings.Contains(got, row.want) {
			t.Errorf("%s: error %v, want %s in\n%s", name, err, row.want, got)
		}
	}
}
