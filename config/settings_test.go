package config_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/config"
)

const head = "apiVersion: gpuslice.io/v1alpha1\nkind: Settings\n"

// selectorsAsText compares label selectors by what they mean, not by how they are held.
var selectorsAsText = cmp.Transformer("text", func(s labels.Selector) string { return s.String() })

func parsed(t *testing.T, text string) labels.Selector {
	t.Helper()
	selector, err := labels.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return selector
}

func TestSettings(t *testing.T) {
	t.Run("that say nothing are the defaults", func(t *testing.T) {
		got, err := config.Parse([]byte(head))
		if diff := cmp.Diff(config.Default(), got, selectorsAsText); err != nil || diff != "" {
			t.Errorf("error %v, settings (-want +got):\n%s", err, diff)
		}
	})

	t.Run("that say everything are what they say", func(t *testing.T) {
		got, err := config.Parse([]byte(head + `
nodeHeartbeat: 30s
migStrategy: single
migConfigMap: {namespace: gpu-operator, name: mine, key: mig.yaml}
devicePlugin:
  podSelector: ["app in (a, b)"]
  namespaces: [gpus]
  containers: [plugin]
  handover: configmap
  configFile: /etc/plugin/config.yaml
  configMap: {namespace: gpu-operator, name: plugin-configs}
  defaultConfig: shared-4
mps: {podSelector: [app=mps], containers: []}
memoryPressure: {threshold: 95, clear: 0, for: 0s}
health: {criticalXids: [167], applicationXids: [62], kernelLog: never, taint: PreferNoSchedule, deviceTaint: NoSchedule, reset: degraded}
idle: {every: 1m, after: 48h, below: 5, instances: sample}
staleResources: remove
podAccess: policy
profiles: {name: pools, key: pools.yaml}
maintenance: {namespace: ops, name: nights, key: nights.yaml}
reboot: {policy: delegate, sentinel: /run/host/reboot-required}
drain:
  fence: devices
  mode: gradual
  gradualFor: 36h
  afterDeadline: delete
  deleteGrace: 10s
  unmanagedPods: refuse
  emptyDir: refuse
  onUncordon: refence
  rules:
    - {namespaces: [training, batch], selector: "app in (a, b)", action: wait, for: 8h}
    - {selector: batch.kubernetes.io/job-name, action: refuse}
    - {namespaces: [kube-system], action: evict}
  clients: ["app in (a, b)"]
operands: [nvidia.com/gpu.deploy.dcgm, nvidia.com/gpu.deploy.client]
units: [nvidia-dcgm.service, 'monitor@gpu\x2d0.socket']
recover: {adopt: [mig-manager]}
timeouts: {driverCall: 1m, apiCall: 5s, capacity: 10m, drain: 1h30m, unit: 30s, reboot: 24h, driverUpgrade: 45m}
retry: {failures: 3, first: 1s, longest: 1m, noEffect: 5}
startupTaint: startup-taint.cluster-autoscaler.kubernetes.io/gpuslice
`))
		if err != nil {
			t.Fatal(err)
		}
		selector, jobs := parsed(t, "app in (a,b)"), parsed(t, "batch.kubernetes.io/job-name")
		want := config.Settings{
			NodeHeartbeat: 30 * time.Second,
			MIGStrategy:   config.MIGStrategySingle,
			MIGConfigMap:  config.ConfigMapKey{Namespace: "gpu-operator", Name: "mine", Key: "mig.yaml"},
			Profiles:      config.ConfigMapKey{Name: "pools", Key: "pools.yaml"},
			Maintenance:   config.ConfigMapKey{Namespace: "ops", Name: "nights", Key: "nights.yaml"},
			Reboot:        config.Reboot{Policy: config.RebootDelegate, Sentinel: "/run/host/reboot-required"},
			DevicePlugin: config.DevicePlugin{
				PodSelector: []labels.Selector{selector}, Namespaces: []string{"gpus"}, Containers: []string{"plugin"},
				Handover: config.HandoverConfigMap, ConfigFile: "/etc/plugin/config.yaml",
				ConfigMap: config.ConfigMapName{Namespace: "gpu-operator", Name: "plugin-configs"}, DefaultConfig: "shared-4",
			},
			MPS:            config.MPS{PodSelector: []labels.Selector{parsed(t, "app=mps")}},
			MemoryPressure: config.MemoryPressure{Threshold: 95},
			Health: config.Health{
				CriticalXids: []int{167}, ApplicationXids: []int{62}, KernelLog: config.KernelLogNever, Taint: config.HealthTaintPreferNoSchedule,
				DeviceTaint: config.DeviceTaintNoSchedule, Reset: config.HealthResetDegraded,
			},
			Idle:           config.Idle{Every: time.Minute, After: 48 * time.Hour, Below: 5, Instances: config.IdleInstancesSample},
			StaleResources: config.StaleResourcesRemove,
			PodAccess:      config.PodAccessPolicy,
			Drain: config.Drain{Fence: config.DrainFenceDevices, Clients: []labels.Selector{selector}, Eviction: config.Eviction{
				Mode: config.DrainGradual, GradualFor: 36 * time.Hour,
				AfterDeadline: config.AfterDeadlineDelete, DeleteGrace: 10 * time.Second,
				UnmanagedPods: config.DrainRefuse, EmptyDir: config.DrainRefuse, OnUncordon: config.UncordonRefence,
				Rules: []config.DrainRule{
					{Namespaces: []string{"training", "batch"}, Selector: selector, Action: config.DrainWait, For: 8 * time.Hour},
					{Selector: jobs, Action: config.DrainRefuse},
					{Namespaces: []string{"kube-system"}, Selector: labels.Everything(), Action: config.DrainEvict},
				},
			}},
			Operands: []string{"nvidia.com/gpu.deploy.dcgm", "nvidia.com/gpu.deploy.client"},
			Units:    []string{"nvidia-dcgm.service", `monitor@gpu\x2d0.socket`},
			Recover:  config.Recover{Adopt: []string{config.AdoptMIGManager}},
			Timeouts: config.Timeouts{
				DriverCall: time.Minute, APICall: 5 * time.Second, Capacity: 10 * time.Minute, Drain: 90 * time.Minute,
				Unit: 30 * time.Second, Reboot: 24 * time.Hour, DriverUpgrade: 45 * time.Minute,
			},
			Retry: config.Retry{Failures: 3, First: time.Second, Longest: time.Minute, NoEffect: 5},

			StartupTaint: "startup-taint.cluster-autoscaler.kubernetes.io/gpuslice",
		}
		if diff := cmp.Diff(want, got, selectorsAsText); diff != "" {
			t.Errorf("settings (-want +got):\n%s", diff)
		}
	})

	t.Run("that say a part of a section keep the defaults of the rest", func(t *testing.T) {
		got, err := config.Parse([]byte(head + "timeouts: {drain: 10m}\nnodeHeartbeat:\n"))
		want := config.Default()
		want.Timeouts.Drain = 10 * time.Minute
		if diff := cmp.Diff(want, got, selectorsAsText); err != nil || diff != "" {
			t.Errorf("error %v, settings (-want +got):\n%s", err, diff)
		}
	})

	t.Run("without a ConfigMap's name want generated configs only", func(t *testing.T) {
		got, err := config.Parse([]byte(head + `migConfigMap: {name: ""}`))
		if err != nil || got.MIGConfigMap != (config.ConfigMapKey{}) {
			t.Errorf("error %v, ConfigMap %+v; want none", err, got.MIGConfigMap)
		}
	})

	t.Run("recognise the device plugin as its own manifests label it", func(t *testing.T) {
		for _, pod := range []labels.Set{
			{"app": "nvidia-device-plugin-daemonset"},
			{"app.kubernetes.io/name": "nvidia-device-plugin", "app.kubernetes.io/instance": "nvdp"},
			{"name": "nvidia-device-plugin-ds"},
		} {
			matching := 0
			for _, s := range config.Default().DevicePlugin.PodSelector {
				if s.Matches(pod) {
					matching++
				}
			}
			if matching != 1 {
				t.Errorf("%d selectors match %v, want 1", matching, pod)
			}
		}
	})
}

func TestSettingsOfSharingMayTurnItsPartsOff(t *testing.T) {
	got, err := config.Parse([]byte(head + "idle: {every: 0s, below: 0}\nmemoryPressure: {threshold: 0}\ndevicePlugin: {configMap: {namespace: a, name: ''}}"))
	if err != nil || got.MemoryPressure.Threshold != 0 || got.Idle.Every != 0 || got.Idle.Below != 0 || got.DevicePlugin.ConfigMap != (config.ConfigMapName{}) {
		t.Errorf("error %v, memory pressure %+v, use %+v, ConfigMap %+v; want none", err, got.MemoryPressure, got.Idle, got.DevicePlugin.ConfigMap)
	}
}

func TestAListTakesThePlaceOfTheDefaultsUnlessItHasNoValue(t *testing.T) {
	none := config.Default()
	none.Operands, none.Units = nil, nil
	for name, test := range map[string]struct {
		file string
		want config.Settings
	}{
		"empty":           {"operands: []\nunits: []\n", none},
		"without a value": {"operands:\nunits: ~\ndevicePlugin: {podSelector: }\n", config.Default()},
	} {
		got, err := config.Parse([]byte(head + test.file))
		if diff := cmp.Diff(test.want, got, selectorsAsText); err != nil || diff != "" {
			t.Errorf("%s: error %v, settings (-want +got):\n%s", name, err, diff)
		}
	}
}

func TestSettingsAreRefused(t *testing.T) {
	tests := map[string]struct {
		file string
		want []string
	}{
		"when empty": {
			file: "",
			want: []string{`apiVersion: "" must be gpuslice.io/v1alpha1`, `kind: "" must be Settings`},
		},
		"when of another version": {
			file: "apiVersion: gpuslice.io/v1\nkind: Settings\n",
			want: []string{`apiVersion: "gpuslice.io/v1" must be gpuslice.io/v1alpha1`},
		},
		"for fields that do not exist, and for values beside them": {
			file: head + "nodeHeartBeat: 1m\ntimeouts: {drains: 1h, apiCall: 1h}\n",
			want: []string{
				"nodeHeartBeat: is unknown here: use apiVersion, kind, nodeHeartbeat, migStrategy, migConfigMap, profiles, maintenance, reboot, devicePlugin, mps, " +
					"memoryPressure, health, idle, staleResources, podAccess, drain, operands, units, recover, timeouts, retry, startupTaint",
				"timeouts.drains: is unknown here: use driverCall, apiCall, capacity, drain, unit, reboot, driverUpgrade",
				`timeouts.apiCall: "1h" must be from 1s to 5m`,
			},
		},
		"for a reboot that no one knows how to do": {
			file: head + "reboot: {policy: always, sentinel: reboot-required}\n",
			want: []string{
				`reboot.policy: "always" must be never or delegate or self`,
				`reboot.sentinel: "reboot-required" must be the absolute path of a file, like "/var/run/reboot-required"`,
			},
		},
		"for a heartbeat that is too fast": {
			file: head + "nodeHeartbeat: 9s\n",
			want: []string{`nodeHeartbeat: "9s" must be from 10s to 24h`},
		},
		"for a duration without its unit": {
			file: head + "nodeHeartbeat: 30\n",
			want: []string{`nodeHeartbeat: "30" must be a duration with its unit, like "90s" or "1h30m"`},
		},
		"for a strategy that the device plugin does not have": {
			file: head + "migStrategy: both\n",
			want: []string{`migStrategy: "both" must be auto or none or single or mixed`},
		},
		"for a mapping in place of a list": {
			file: head + "devicePlugin: {podSelector: app=x}\n",
			want: []string{`devicePlugin.podSelector: must be a list, not text`},
		},
		"for a value in place of a section": {
			file: head + "timeouts: 5m\n",
			want: []string{`timeouts: must be a mapping, not text`},
		},
		"for a device plugin that is nowhere": {
			file: head + "devicePlugin: {namespaces: []}\n",
			want: []string{`devicePlugin.namespaces: [] must name at least one namespace`},
		},
		"for a namespace twice": {
			file: head + "devicePlugin: {namespaces: [a, a]}\n",
			want: []string{`devicePlugin.namespaces[1]: "a" is there twice`},
		},
		"for no device plugin": {
			file: head + "devicePlugin: {podSelector: []}\n",
			want: []string{`devicePlugin.podSelector: [] must have at least one label selector`},
		},
		"for a device plugin that is every pod": {
			file: head + `devicePlugin: {podSelector: [app=x, ""]}`,
			want: []string{`devicePlugin.podSelector[1]: "" matches every pod: name the labels of the device plugin's`},
		},
		"for a hand-over that cannot be": {
			file: head + "devicePlugin: {containers: [a, A_, a], handover: sighup, configFile: config.yaml, configMap: {namespace: a.b, name: ''}, defaultConfig: a/b}\n",
			want: []string{
				`devicePlugin.containers[1]: "A_" a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')`,
				`devicePlugin.containers[2]: "a" is there twice`,
				`devicePlugin.handover: "sighup" must be auto or file or label or configmap or restart`,
				`devicePlugin.configFile: "config.yaml" must be the absolute path of a file, like "/var/lib/gpuslice/device-plugin/config.yaml"`,
				`devicePlugin.configMap.namespace: "a.b" must not contain dots`,
				`devicePlugin.configMap.name: "" must name the ConfigMap that has defaultConfig`,
				`devicePlugin.defaultConfig: "a/b" a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')`,
			},
		},
		"for a hand-over through no ConfigMap": {
			file: head + "devicePlugin: {handover: configmap, configMap: {name: ''}}\n",
			want: []string{`devicePlugin.configMap.name: "" must name the ConfigMap that handover configmap writes to`},
		},
		"for no MPS control daemon": {
			file: head + "mps: {podSelector: []}\n",
			want: []string{`mps.podSelector: [] must have at least one label selector`},
		},
		"for a taint that would end pods": {
			file: head + "health: {taint: NoExecute, deviceTaint: NoExecute}\n",
			want: []string{`health.taint: "NoExecute" must be none or NoSchedule or PreferNoSchedule`, `health.deviceTaint: "NoExecute" must be none or NoSchedule`},
		},
		"for a startup taint that is no key": {
			file: head + "startupTaint: a/b/c\n",
			want: []string{"startupTaint: \"a/b/c\" a valid label key must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character " +
				"(e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"},
		},
		"for a startup taint that there is already": {
			file: head + "startupTaint: gpuslice.io/not-ready\n",
			want: []string{`startupTaint: "gpuslice.io/not-ready" is always a startup taint: leave it out, or name a second one`},
		},
		"for the agent's own fence as a startup taint": {
			file: head + "startupTaint: gpuslice.io/repartitioning\n",
			want: []string{`startupTaint: "gpuslice.io/repartitioning" is under gpuslice.io, where other programs set and lift taints: use a key of your own, or startup-taint.cluster-autoscaler.kubernetes.io/gpuslice`},
		},
		"for the taint of a node that is not Ready as a startup taint": {
			file: head + "startupTaint: node.kubernetes.io/not-ready\n",
			want: []string{`startupTaint: "node.kubernetes.io/not-ready" is under kubernetes.io, where other programs set and lift taints: use a key of your own, or startup-taint.cluster-autoscaler.kubernetes.io/gpuslice`},
		},
		"for a status taint of cluster-autoscaler as a startup taint": {
			file: head + "startupTaint: status-taint.cluster-autoscaler.kubernetes.io/gpuslice\n",
			want: []string{`startupTaint: "status-taint.cluster-autoscaler.kubernetes.io/gpuslice" is under kubernetes.io, where other programs set and lift taints: use a key of your own, or startup-taint.cluster-autoscaler.kubernetes.io/gpuslice`},
		},
		"for NVIDIA's taint as a startup taint": {
			file: head + "startupTaint: nvidia.com/gpu\n",
			want: []string{`startupTaint: "nvidia.com/gpu" is under nvidia.com, where other programs set and lift taints: use a key of your own, or startup-taint.cluster-autoscaler.kubernetes.io/gpuslice`},
		},
		"for pressure that cannot be": {
			file: head + "memoryPressure: {threshold: 101, clear: 90%, for: 2h}\nstaleResources: bust\npodAccess: admin\nhealth: {kernelLog: always}\n",
			want: []string{
				`memoryPressure.threshold: "101" must be per cent, a whole number from 0 to 100`,
				`memoryPressure.clear: "90%" must be per cent, a whole number from 0 to 100`,
				`memoryPressure.for: "2h" must be from 0s to 1h`,
				`health.kernelLog: "always" must be auto or never`,
				`staleResources: "bust" must be report or remove`,
				`podAccess: "admin" must be auto or impersonation or policy or rbac`,
			},
		},
		"for use that no one can look at": {
			file: head + "idle: {every: 6m, after: 1s, below: none, instances: all}\n",
			want: []string{
				`idle.every: "6m" must be from 0s to 5m`,
				`idle.after: "1s" must be from 10s to 720h`,
				`idle.below: "none" must be per cent, a whole number from 0 to 100`,
				`idle.instances: "all" must be skip or sample`,
			},
		},
		"for looks that are too many": {
			file: head + "idle: {every: 10ms}\n",
			want: []string{`idle.every: "10ms" must be 0s, or at least 1s`},
		},
		"for looks that are too few": {
			file: head + "idle: {every: 1m, after: 90s}\n",
			want: []string{`idle.every: "1m" must be at most half of idle.after, which is 1m30s`},
		},
		"for pressure that is over before it begins": {
			file: head + "memoryPressure: {threshold: 80}\n",
			want: []string{`memoryPressure.clear: "80" must be less than memoryPressure.threshold, which is 80`},
		},
		"for words that are none of drain's": {
			file: head + "drain: {mode: slow, gradualFor: 31d, afterDeadline: force, unmanagedPods: wait, emptyDir: no, onUncordon: undo}\n",
			want: []string{
				`drain.mode: "slow" must be atOnce or gradual`,
				`drain.gradualFor: "31d" must be a duration with its unit, like "90s" or "1h30m"`,
				`drain.afterDeadline: "force" must be undo or delete`,
				`drain.unmanagedPods: "wait" must be evict or refuse`,
				`drain.emptyDir: "false" must be evict or refuse`,
				`drain.onUncordon: "undo" must be cancel or refence`,
			},
		},
		"for a moment in which no pod ends": {
			file: head + "drain: {mode: gradual, gradualFor: 59s}\n",
			want: []string{`drain.gradualFor: "59s" must be from 1m to 720h`},
		},
		"for a deletion without grace": {
			file: head + "drain: {deleteGrace: 0s}\n",
			want: []string{`drain.deleteGrace: "0s" must be from 1s to 1h`},
		},
		"for a time that no rule waits for": {
			file: head + "drain: {rules: [{selector: a=b, action: evict, for: 1h}, {selector: a=b, action: wait}, {selector: a=b, action: wait, for: 59s}]}\n",
			want: []string{
				`drain.rules[0].for: "1h" needs action wait or ask, not evict`,
				`drain.rules[1].for: must say how long to wait, like "8h"`,
				`drain.rules[2].for: "59s" must be from 1m to 720h`,
			},
		},
		"for a rule that fits every pod": {
			file: head + "drain: {rules: [{action: refuse}, {namespaces: [], selector: '', action: refuse}]}\n",
			want: []string{
				`drain.rules[0]: fits every pod: write "namespaces", "selector" or both`,
				`drain.rules[1]: fits every pod: write "namespaces", "selector" or both`,
			},
		},
		"for a rule that says nothing that is known": {
			file: head + "drain: {rules: [{namespace: a, selector: a=b, action: drop}, {namespaces: [a, A, a], action: evict}]}\n",
			want: []string{
				"drain.rules[0].namespace: is unknown here: use namespaces, selector, action, for",
				`drain.rules[0].action: "drop" must be evict or wait or ask or refuse`,
				`drain.rules[1].namespaces[1]: "A" a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')`,
				`drain.rules[1].namespaces[2]: "a" is there twice`,
			},
		},
		"for clients that are every pod, or the same": {
			file: head + `drain: {clients: ["", "a=b,c", "c,a=b"]}`,
			want: []string{
				`drain.clients[0]: "" matches every pod: name the labels of the clients`,
				`drain.clients[2]: "c,a=b" is there twice`,
			},
		},
		"for operands that are none": {
			file: head + "operands: [nvidia.com/gpu.present, nvidia.com/gpu.deploy., nvidia.com/gpu.deploy.driver, nvidia.com/gpu.deploy.dcgm, nvidia.com/gpu.deploy.dcgm, ~]\n",
			want: []string{
				`operands[0]: "nvidia.com/gpu.present" must begin with nvidia.com/gpu.deploy., like the labels of the operands of NVIDIA's GPU operator`,
				`operands[1]: "nvidia.com/gpu.deploy." must begin with nvidia.com/gpu.deploy., like the labels of the operands of NVIDIA's GPU operator`,
				`operands[2]: "nvidia.com/gpu.deploy.driver" is the driver, which every change of a GPU needs`,
				`operands[4]: "nvidia.com/gpu.deploy.dcgm" is there twice`,
				`operands[5]: "" must begin with nvidia.com/gpu.deploy., like the labels of the operands of NVIDIA's GPU operator`,
			},
		},
		"for units that cannot be stopped": {
			file: head + "units: [dcgm, kubepods.slice, a b.service, .service, dcgm@.service, dcgm.service, dcgm.service]\n",
			want: []string{
				`units[0]: "dcgm" must be the name of a systemd unit with its type: .service or .socket or .path or .timer`,
				`units[1]: "kubepods.slice" must be the name of a systemd unit with its type: .service or .socket or .path or .timer`,
				`units[2]: "a b.service" is not a name that systemd allows`,
				`units[3]: ".service" is not a name that systemd allows`,
				`units[4]: "dcgm@.service" is a template: name its instances, like "dcgm@0.service"`,
				`units[6]: "dcgm.service" is there twice`,
			},
		},
		"for units that the node lives by": {
			file: head + "units: [kubelet.service, containerd.service, crio.service, docker.service, docker.socket, dbus.service, dbus.socket, systemd-logind.service]\n",
			want: []string{
				`units[0]: "kubelet.service" is never stopped: the node and its pods need it`,
				`units[1]: "containerd.service" is never stopped: the node and its pods need it`,
				`units[2]: "crio.service" is never stopped: the node and its pods need it`,
				`units[3]: "docker.service" is never stopped: the node and its pods need it`,
				`units[4]: "docker.socket" is never stopped: the node and its pods need it`,
				`units[5]: "dbus.service" is never stopped: the node and its pods need it`,
				`units[6]: "dbus.socket" is never stopped: the node and its pods need it`,
				`units[7]: "systemd-logind.service" is never stopped: the node and its pods need it`,
			},
		},
		"for adopting the remains of no one that is known": {
			file: head + "recover: {adopt: [mig-parted]}\ntimeouts: {unit: 500ms}\n",
			want: []string{`recover.adopt[0]: "mig-parted" must be mig-manager`, `timeouts.unit: "500ms" must be from 1s to 1h`},
		},
		"for a list in place of one value": {
			file: head + "units: dcgm.service\n",
			want: []string{`units: must be a list, not text`},
		},
		"for delays that do not grow": {
			file: head + "retry: {first: 1m, longest: 30s}\n",
			want: []string{`retry.longest: "30s" is less than retry.first, 1m0s`},
		},
		"for counts that are none": {
			file: head + "retry: {failures: 0, noEffect: many}\n",
			want: []string{
				`retry.failures: "0" must be a whole number from 1 to 1000`,
				`retry.noEffect: "many" must be a whole number from 1 to 1000`,
			},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := config.Parse([]byte(test.file))
			if err == nil {
				t.Fatal("no error")
			}
			if diff := cmp.Diff(test.want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}

	for name, file := range map[string]string{
		"for a selector that is none":            head + "devicePlugin: {podSelector: [\"app==\\u0001\"]}\n",
		"for a ConfigMap that cannot exist":      head + "migConfigMap: {namespace: a.b, name: A, key: a/b}\n",
		"for a field that is there twice":        head + "nodeHeartbeat: 1m\nnodeHeartbeat: 2m\n",
		"for a field that is there in two cases": head + "NodeHeartbeat: 1m\n",
		"for text that is no YAML":               head + "a: [",
	} {
		t.Run(name, func(t *testing.T) {
			if s, err := config.Parse([]byte(file)); err == nil {
				t.Errorf("settings %+v, want an error", s)
			}
		})
	}
}

func TestLoadNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "settings.yaml")
	if _, err := config.Load(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("error %v of an absent file does not name it", err)
	}
	if err := os.WriteFile(path, []byte(head+"nodeHeartbeat: 1s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := "reading settings from " + path + `: nodeHeartbeat: "1s" must be from 10s to 24h`
	if _, err := config.Load(path); err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
	if err := os.WriteFile(path, []byte(head+"nodeHeartbeat: 1m\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err := config.Load(path); err != nil || s.NodeHeartbeat != time.Minute {
		t.Errorf("heartbeat %s, error %v; want 1m", s.NodeHeartbeat, err)
	}
}

func TestTheMIGStrategyIsTheNodesUnlessSettingsSayOtherwise(t *testing.T) {
	for _, test := range []struct {
		setting config.MIGStrategy
		label   string
		want    config.MIGStrategy
	}{
		{config.MIGStrategyAuto, "", config.MIGStrategyMixed},
		{config.MIGStrategyAuto, "single", config.MIGStrategySingle},
		{config.MIGStrategyAuto, "none", config.MIGStrategyNone},
		{config.MIGStrategyAuto, "auto", config.MIGStrategyMixed},
		{config.MIGStrategyAuto, "bogus", config.MIGStrategyMixed},
		{config.MIGStrategySingle, "mixed", config.MIGStrategySingle},
	} {
		if got := test.setting.On(test.label); got != test.want {
			t.Errorf("%s on a node labelled %q is %s, want %s", test.setting, test.label, got, test.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(head)
	f.Add(head + "nodeHeartbeat: 30s\nmigConfigMap: {name: \"\"}\ndevicePlugin: {podSelector: [app=x]}\n")
	f.Add(head + "drain: {deleteGrace: 1s, rules: [{namespaces: [a], selector: b, action: wait, for: 1h}]}\nunits: [a.service]\noperands: []\n")
	f.Add(head + "timeouts: {drain: -1h}\nretry: {failures: 99999999999999999999}\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := config.Parse([]byte(text))
		if err != nil {
			return
		}
		if s.NodeHeartbeat < 10*time.Second || s.Timeouts.DriverCall <= 0 || s.Timeouts.APICall <= 0 || s.Timeouts.Capacity <= 0 ||
			s.Timeouts.Drain <= 0 || s.Retry.Failures < 1 || s.Retry.NoEffect < 1 || s.Retry.First <= 0 ||
			s.Retry.Longest < s.Retry.First || !drains(s) || len(s.DevicePlugin.PodSelector) == 0 {
			t.Errorf("settings that were taken are out of bounds: %+v", s)
		}
	})
}

// drains reports whether the settings of draining are within bounds.
func drains(s config.Settings) bool {
	return s.Drain.DeleteGrace >= time.Second && s.Timeouts.Unit > 0 && !slices.Contains(s.Units, "kubelet.service") &&
		!slices.ContainsFunc(s.Drain.Rules, func(r config.DrainRule) bool {
			return (r.For > 0) != (r.Action == config.DrainWait) || r.Selector.Empty() && len(r.Namespaces) == 0
		})
}
