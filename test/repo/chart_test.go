package repo_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

//go:generate go test -count=1 . -run TestTheChartIsMadeOfTheBase -update

// The manifests of deploy/base and its components are written once. The chart's templates are those files with places that values are put
// into; test/shipped renders them by Helm, and compares objects.
func TestTheChartIsMadeOfTheBase(t *testing.T) {
	made := map[string]string{}
	for _, source := range chartSources {
		text := read(t, "deploy/"+source.from)
		if source.braces {
			text = strings.ReplaceAll(text, "{{", `{{"{{"}}`)
		}
		for _, e := range slices.Concat(source.first, common, source.edits) {
			text = e.apply(t, source.from, text)
		}
		if source.when != "" {
			text = "{{- if " + source.when + " }}\n" + text + "{{- end }}\n"
		}
		if made[source.to] != "" {
			text = "---\n" + text
		}
		made[source.to] += text
	}
	out := map[string]string{}
	for name, text := range made {
		out["deploy/chart/templates/"+name] = madeBy + text
	}
	head, _, found := strings.Cut(read(t, "deploy/chart/values.yaml"), marker)
	if !found {
		t.Fatalf("deploy/chart/values.yaml has no line %q", marker)
	}
	out["deploy/chart/values.yaml"] = head + marker + valuesOfTheBase(t)
	out["deploy/chart/values.schema.json"] = schemaOfValues(t)
	for name, text := range out {
		if *update {
			if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if diff := cmp.Diff(read(t, name), text); diff != "" {
			t.Errorf("%s is not made of deploy/base any more: run make generate (-is +would be):\n%s", name, diff)
		}
	}
}

const (
	madeBy = "{{- /* Made by \"make generate\" of the manifests in deploy/: change those. */ -}}\n"
	marker = "# ---- from here on made of deploy/base by \"make generate\" ----\n"
)

// edit puts a value into a manifest in place of what is there.
type edit struct {
	old, new string
	often    bool // it may be there more than once
	optional bool // or not at all
}

func (e edit) apply(t *testing.T, file, text string) string {
	t.Helper()
	switch n := strings.Count(text, e.old); {
	case n == 0 && e.optional:
	case n == 0, n > 1 && !e.often:
		t.Fatalf("deploy/%s has %d times what the chart puts a value for; change the edits in test/repo/chart_test.go with it:\n%s", file, n, e.old)
	}
	return strings.ReplaceAll(text, e.old, e.new)
}

// common are the edits of all files.
var common = []edit{
	{old: "namespace: gpuslice\n", new: "namespace: {{ .Release.Namespace }}\n", often: true, optional: true},
	{
		old: "  - kind: ServiceAccount\n    name: gpuslice-agent\n", new: "  - kind: ServiceAccount\n    name: {{ .Values.serviceAccount.name }}\n",
		often: true, optional: true,
	},
	{
		old: "request.userInfo.username" + byItsName, new: "request.userInfo.username == 'system:serviceaccount:{{ .Release.Namespace }}:{{ .Values.serviceAccount.name }}'",
		often: true, optional: true,
	},
	{
		old: "\n  labels:\n    app.kubernetes.io/name: gpuslice\n",
		new: "\n  labels:\n    app.kubernetes.io/name: gpuslice\n    {{- include \"gpuslice.labels\" . | nindent 4 }}\n", often: true, optional: true,
	},
}

// chartSource is a manifest of deploy/ and what the chart makes of it.
type chartSource struct {
	from, to string
	when     string // condition in the template's language; empty for always
	braces   bool   // it has double braces of its own, which are no template's
	first    []edit // before those of all files
	edits    []edit
}

var chartSources = []chartSource{
	{from: "base/namespace.yaml", to: "namespace.yaml", when: ".Values.namespace.create", edits: []edit{
		{old: "metadata:\n  name: gpuslice\n", new: "metadata:\n  name: {{ .Release.Namespace }}\n"},
	}},
	{from: "base/serviceaccount.yaml", to: "serviceaccount.yaml", when: ".Values.serviceAccount.create", edits: []edit{
		{old: "  name: gpuslice-agent\n", new: "  name: {{ .Values.serviceAccount.name }}\n"},
		{
			old: "    {{- include \"gpuslice.labels\" . | nindent 4 }}\n",
			new: "    {{- include \"gpuslice.labels\" . | nindent 4 }}\n  {{- with .Values.serviceAccount.annotations }}\n  annotations:\n    {{- toYaml . | nindent 4 }}\n  {{- end }}\n",
		},
	}},
	{from: "base/rbac.yaml", to: "rbac.yaml", edits: []edit{{
		old: podRules, new: "{{- if eq (include \"gpuslice.podAccess\" .) \"impersonation\" }}\n" + nodeRules + "{{- else }}\n" + podRules + "{{- end }}\n",
	}}},
	{from: "components/delete-after-deadline/rbac.yaml", to: "rbac.yaml", when: `eq .Values.settings.drain.afterDeadline "delete"`},
	{from: "components/gpu-operator/rbac.yaml", to: "gpu-operator.yaml", when: ".Values.gpuOperator.enabled", edits: []edit{
		{old: "namespace: gpu-operator\n", new: "namespace: {{ include \"gpuslice.operatorNamespace\" . }}\n", often: true},
		{old: "resourceNames: [device-plugin-config, time-slicing-config]", new: "resourceNames: {{ toJson .Values.gpuOperator.configMaps }}"},
		{old: "The first is\n  # replaced by what operator.yaml of the overlay says.", new: "They\n  # are the value gpuOperator.configMaps."},
	}},
	{from: "components/openshift/rolebinding.yaml", to: "openshift.yaml", when: `eq (include "gpuslice.openshift" .) "true"`},
	{from: "components/prometheus/rbac.yaml", to: "podmonitor.yaml", when: ".Values.podMonitor.enabled"},
	{from: "components/prometheus/podmonitor.yaml", to: "podmonitor.yaml", when: ".Values.podMonitor.enabled", edits: []edit{
		{
			old: "    {{- include \"gpuslice.labels\" . | nindent 4 }}\n",
			new: "    {{- include \"gpuslice.labels\" . | nindent 4 }}\n    {{- with .Values.podMonitor.labels }}\n    {{- toYaml . | nindent 4 }}\n    {{- end }}\n",
		},
		{old: "interval: 30s", new: "interval: {{ .Values.podMonitor.interval }}"},
	}},
	{from: "components/prometheus/prometheusrule.yaml", to: "prometheusrule.yaml", when: ".Values.prometheusRule.enabled", braces: true, edits: []edit{
		{
			old: "    {{- include \"gpuslice.labels\" . | nindent 4 }}\n",
			new: "    {{- include \"gpuslice.labels\" . | nindent 4 }}\n    {{- with .Values.prometheusRule.labels }}\n    {{- toYaml . | nindent 4 }}\n    {{- end }}\n",
		},
	}},
	{from: "components/prometheus/dashboards.yaml", to: "dashboards.yaml", when: ".Values.dashboards.enabled", braces: true, edits: []edit{
		{old: "    grafana_dashboard: \"1\"\n", new: "    {{- toYaml .Values.dashboards.labels | nindent 4 }}\n"},
	}},
	{from: "base/networkpolicy.yaml", to: "networkpolicy.yaml", when: ".Values.networkPolicy.enabled", edits: []edit{
		{old: "values: [monitoring, prometheus, openshift-monitoring, openshift-user-workload-monitoring]", new: "values: {{ toJson .Values.networkPolicy.namespaces }}"},
	}},
	{from: "base/daemonset.yaml", to: "daemonset.yaml", edits: []edit{
		{
			old: "        app.kubernetes.io/component: agent\n    spec:\n",
			new: "        app.kubernetes.io/component: agent\n        {{- with .Values.podLabels }}\n        {{- toYaml . | nindent 8 }}\n        {{- end }}\n" +
				"      annotations:\n        # The settings are read when an agent starts.\n        checksum/settings: {{ include \"gpuslice.settings\" . | sha256sum }}\n" +
				"        {{- with .Values.podAnnotations }}\n        {{- toYaml . | nindent 8 }}\n        {{- end }}\n    spec:\n",
		},
		{
			old: "            - --metrics-address=127.0.0.1:9400 # of the pod; for the cluster with ../components/prometheus\n",
			new: "            {{- if .Values.podMonitor.enabled }}\n            - --metrics-address=:9400\n            - --metrics-secure\n" +
				"            {{- else }}\n            - --metrics-address=127.0.0.1:9400 # of the pod; for the cluster with podMonitor.enabled\n            {{- end }}\n",
		},
		{
			old: "      serviceAccountName: gpuslice-agent\n",
			new: "      serviceAccountName: {{ .Values.serviceAccount.name }}\n      {{- with .Values.imagePullSecrets }}\n      imagePullSecrets:\n        {{- toYaml . | nindent 8 }}\n      {{- end }}\n" +
				"      {{- with .Values.nodeSelector }}\n      nodeSelector:\n        {{- toYaml . | nindent 8 }}\n      {{- end }}\n",
		},
		{
			old: "      tolerations:\n        - operator: Exists\n", new: "      {{- with .Values.tolerations }}\n      tolerations:\n        {{- toYaml . | nindent 8 }}\n      {{- end }}\n",
		},
		{old: "      priorityClassName: system-node-critical\n", new: "      {{- with .Values.priorityClassName }}\n      priorityClassName: {{ . }}\n      {{- end }}\n"},
		{old: "          image: gpuslice/gpuslice-agent:v0.1.0\n          imagePullPolicy: IfNotPresent\n", new: "          image: {{ include \"gpuslice.image\" . }}\n          imagePullPolicy: {{ .Values.image.pullPolicy }}\n"},
		{
			old: "                  resource: limits.memory\n", new: "                  resource: limits.memory\n            {{- with .Values.extraEnv }}\n            {{- toYaml . | nindent 12 }}\n            {{- end }}\n",
		},
		{
			old: "  updateStrategy:\n    type: RollingUpdate\n    rollingUpdate:\n      maxUnavailable: 1 # a bad release is noticed on one node\n",
			new: "  updateStrategy:\n    {{- toYaml .Values.updateStrategy | nindent 4 }}\n",
		},
		{
			old: "          resources:\n            requests:\n              cpu: 10m\n              memory: 64Mi\n            limits:\n              memory: 256Mi # no CPU limit: being throttled in the middle of a change helps no one\n",
			new: "          resources:\n            {{- toYaml .Values.resources | nindent 12 }}\n",
		},
		{
			old: "            - name: plugin-config\n              mountPath: /var/lib/gpuslice/device-plugin\n",
			new: "            {{- if not .Values.dra.enabled }}\n            - name: plugin-config\n              mountPath: /var/lib/gpuslice/device-plugin\n            {{- end }}\n",
		},
		{
			old: pluginConfigVolume, new: "        {{- if not .Values.dra.enabled }}\n" + pluginConfigVolume + "        {{- end }}\n",
		},
		{
			old: "          volumeMounts:\n", new: "          volumeMounts:\n            {{- if eq .Values.settings.reboot.policy \"delegate\" }}\n            # The folder of the sentinel file, with the sockets of the container runtime and of systemd.\n" +
				"            - name: run\n              mountPath: /run/host\n              mountPropagation: HostToContainer\n            {{- end }}\n",
		},
		{
			old: "      volumes:\n", new: "      volumes:\n        {{- if eq .Values.settings.reboot.policy \"delegate\" }}\n        - name: run\n          hostPath:\n            path: /run\n            type: Directory\n        {{- end }}\n",
		},
	}},
	{from: "base/configmap-mig-configs.yaml", to: "configmap-mig-configs.yaml", when: ".Values.migConfigs", first: []edit{{old: migConfigs, new: "{{- .Values.migConfigs | nindent 4 }}\n"}}},
	{from: "base/configmap-settings.yaml", to: "configmap-settings.yaml", first: []edit{{old: settingsText, new: "{{- include \"gpuslice.settings\" . | nindent 4 }}\n"}}},
	{from: "policies/configmaps.yaml", to: "policies.yaml", when: ".Values.policies.enabled"},
	{from: "policies/events.yaml", to: "policies.yaml", when: ".Values.policies.enabled"},
	{from: "policies/evictions.yaml", to: "policies.yaml", when: `and .Values.policies.enabled (ne (include "gpuslice.podAccess" .) "rbac")`, edits: []edit{
		{old: "{{ .Values.serviceAccount.name }}'\n", new: "{{ .Values.serviceAccount.name }}'{{ if eq (include \"gpuslice.podAccess\" .) \"impersonation\" }} || request.userInfo.username.startsWith('system:node:') && " +
			"request.userInfo.?extra.orValue({}).size() == 0{{ end }}\n"},
		{old: "expression: request.userInfo.?extra[", new: "expression: {{ if eq (include \"gpuslice.podAccess\" .) \"impersonation\" }}\"request.userInfo.username.startsWith('system:node:') ? " +
			"request.userInfo.username.substring(12) : request.userInfo.?extra['authentication.kubernetes.io/node-name'][0].orValue('')\"{{ else }}request.userInfo.?extra["},
		{old: "node-name'][0].orValue('')\n", new: "node-name'][0].orValue(''){{ end }}\n"},
	}},
	{from: "policies/leases.yaml", to: "policies.yaml", when: ".Values.policies.enabled"},
	{from: "policies/nodes.yaml", to: "policies.yaml", when: ".Values.policies.enabled", edits: []edit{
		{old: "    - name: startupTaint\n      expression: \"''\"\n", new: "    - name: startupTaint\n      expression: \"'{{ .Values.settings.startupTaint }}'\"\n"},
	}},
	{from: "policies/pods.yaml", to: "policies.yaml", when: ".Values.policies.enabled"},
	{from: "components/assign-by-right/policy.yaml", to: "assign-by-right.yaml", when: ".Values.assignByRight.enabled"},
	{from: "components/assign-by-right/rbac.yaml", to: "assign-by-right.yaml", when: ".Values.assignByRight.enabled"},
	{from: "components/device-taint-rules/policy.yaml", to: "device-taint-rules.yaml", when: ".Values.deviceTaintRules.enabled"},
	{from: "components/device-taint-rules/rbac.yaml", to: "device-taint-rules.yaml", when: ".Values.deviceTaintRules.enabled"},
	{from: "components/flow-control/flow-control.yaml", to: "flow-control.yaml", when: ".Values.flowControl.enabled", edits: []edit{
		{old: "            name: gpuslice-agent\n", new: "            name: {{ .Values.serviceAccount.name }}\n"},
	}},
	{from: "overlays/device-plugin/device-plugin.yaml", to: "device-plugin.yaml", when: ".Values.devicePlugin.enabled", edits: pluginEdits},
	{from: "overlays/device-plugin/gpu-feature-discovery.yaml", to: "device-plugin.yaml", when: ".Values.devicePlugin.enabled", edits: pluginEdits},
	{from: "overlays/device-plugin/mps-control-daemon.yaml", to: "device-plugin.yaml", when: ".Values.devicePlugin.enabled", edits: pluginEdits},
}

// pluginConfigVolume is the folder of the device plugin's config, which nodes of NVIDIA's DRA driver do without.
const pluginConfigVolume = "        # The config of a device plugin that is run with a file of the host, at devicePlugin.configFile of the settings.\n" +
	"        - name: plugin-config\n          hostPath:\n            path: /var/lib/gpuslice/device-plugin\n            type: DirectoryOrCreate\n"

var pluginEdits = []edit{
	{old: "image: " + nvidiasRegistry + "k8s-device-plugin:v0.19.3\n", new: "image: {{ .Values.devicePlugin.image }}\n", often: true},
	{
		old: "      priorityClassName: system-node-critical\n",
		new: "        {{- with .Values.settings.startupTaint }}\n        - key: {{ . }}\n          operator: Exists\n        {{- end }}\n" +
			"      priorityClassName: system-node-critical\n      {{- with .Values.devicePlugin.runtimeClassName }}\n      runtimeClassName: {{ . }}\n      {{- end }}\n",
	},
}

// settingsText and migConfigs are the texts in the ConfigMaps of deploy/base, indented as there.
var (
	settingsText = textOf("configmap-settings.yaml", "  settings.yaml: |\n")
	migConfigs   = textOf("configmap-mig-configs.yaml", "  config.yaml: |\n")
	// podRules are what an account may do with pods, nodeRules what it may do in the name of its node.
	podRules, _, _ = strings.Cut(textOf("rbac.yaml", "  name: gpuslice-agent-pods\n  labels:\n    app.kubernetes.io/name: gpuslice\nrules:\n"), "---\n")
	nodeRules      = textOf("../components/impersonation/rbac.yaml", "\nrules:\n")
)

func textOf(file, after string) string {
	text, err := os.ReadFile(base + "/" + file)
	if err != nil {
		panic(err)
	}
	_, below, _ := bytes.Cut(text, []byte(after))
	return string(below)
}

// outdent takes so many spaces from the start of each line.
func outdent(text string, spaces int) string {
	return regexp.MustCompile(fmt.Sprintf("(?m)^ {0,%d}", spaces)).ReplaceAllString(text, "")
}

// valuesOfTheBase are the settings and MIG configs as values.
func valuesOfTheBase(t *testing.T) string {
	t.Helper()
	settings := settingsText
	for _, e := range []edit{
		{old: "The agent may read ConfigMaps of its own namespace only (rbac.yaml).", new: "The agent may read ConfigMaps of the release's namespace only."},
		{old: "(with components/reboot-sentinel)", new: "(the chart mounts its folder)"},
		{old: "(components/impersonation)", new: "(Kubernetes 1.36 and newer, where the chart gives that right in place of the others)"},
		{old: "components/startup-taint sets one that cluster-autoscaler knows by itself.", new: "cluster-autoscaler knows startup-taint.cluster-autoscaler.kubernetes.io/gpuslice by itself."},
		{old: "with components/delete-after-deadline, which gives the right to.", new: "the chart then gives the right to."},
	} {
		settings = e.apply(t, "base/configmap-settings.yaml", settings)
	}
	return "\n# The agents' settings. After an edit the agents are restarted, one by one.\nsettings:\n" + outdent(settings, 2) +
		"\n# MIG configs by name, in the format of NVIDIA's mig-parted. Most nodes need none: all-disabled, all-<profile> and all-balanced are there\n" +
		"# on each. With \"\" the chart makes no ConfigMap of them, and settings.migConfigMap may name one of yours.\nmigConfigs: |\n" + outdent(migConfigs, 2)
}

// schemaOfValues is the schema of the chart's values: those of settings, profiles and maintenance within deploy/schema/values.json.
func schemaOfValues(t *testing.T) string {
	t.Helper()
	var values map[string]any
	if err := json.Unmarshal([]byte(read(t, "deploy/schema/values.json")), &values); err != nil {
		t.Fatalf("deploy/schema/values.json: %v", err)
	}
	defs := map[string]any{}
	for _, of := range []string{"settings", "profiles", "maintenance"} {
		var schema struct {
			Defs map[string]any `json:"$defs"`
		}
		if err := json.Unmarshal([]byte(read(t, "deploy/schema/"+of+".schema.json")), &schema); err != nil || len(schema.Defs) < 3 {
			t.Fatalf("deploy/schema/%s.schema.json: %v, with %d definitions", of, err, len(schema.Defs))
		}
		for name, def := range schema.Defs {
			if other := defs[name]; other != nil && !cmp.Equal(other, def) {
				t.Fatalf("deploy/schema/%s.schema.json has another %s than the schema of settings or profiles", of, name)
			}
			defs[name] = def
		}
	}
	defs["MaintenanceOfValues"] = withoutHead(t, defs["Maintenance"])
	values["$defs"] = defs
	text, err := json.MarshalIndent(values, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return string(text) + "\n"
}

// withoutHead is the schema of a file without the lines that say what the file is, which the chart writes.
func withoutHead(t *testing.T, file any) map[string]any {
	t.Helper()
	def, _ := file.(map[string]any)
	fields, _ := def["properties"].(map[string]any)
	if fields["apiVersion"] == nil || fields["kind"] == nil || len(fields) < 3 {
		t.Fatalf("the file has the fields %v", fields)
	}
	def, fields = maps.Clone(def), maps.Clone(fields)
	delete(fields, "apiVersion")
	delete(fields, "kind")
	delete(def, "required")
	def["properties"] = fields
	return def
}
