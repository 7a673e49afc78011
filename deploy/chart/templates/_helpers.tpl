{{/* Labels that Helm's own guide asks for, beside those of deploy/base. Selectors have none of them, so that an upgrade works. */}}
{{- define "gpuslice.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The agent's image, by its digest where one is given. */}}
{{- define "gpuslice.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/*
The namespace of NVIDIA's GPU Operator: by the value, else which of the usual two is there. Helm asks the cluster for all but helm template; where it
asks none, lookup finds nothing, not even kube-system.
*/}}
{{- define "gpuslice.operatorNamespace" -}}
{{- $usual := list "gpu-operator" "nvidia-gpu-operator" -}}
{{- if eq (include "gpuslice.openshift" .) "true" -}}
{{- $usual = reverse $usual -}}
{{- end -}}
{{- $there := list -}}
{{- range $usual -}}
{{- if lookup "v1" "Namespace" "" . -}}
{{- $there = append $there . -}}
{{- end -}}
{{- end -}}
{{- if .Values.gpuOperator.namespace -}}
{{ .Values.gpuOperator.namespace }}
{{- else if $there -}}
{{ first $there }}
{{- else if lookup "v1" "Namespace" "" "kube-system" -}}
{{- fail (printf "gpuOperator.namespace: there is no namespace %s: install the GPU Operator first, or say where it is" (join " and no " $usual)) -}}
{{- else -}}
{{ first $usual }}
{{- end -}}
{{- end }}

{{/* The settings, with the GPU Operator's namespace among those of the device plugin, as YAML. */}}
{{- define "gpuslice.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- if .Values.gpuOperator.enabled -}}
{{- $_ := set $settings.devicePlugin "namespaces" (uniq (append $settings.devicePlugin.namespaces (include "gpuslice.operatorNamespace" .))) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end }}

{{/* Whether the cluster is OpenShift, or is said to be. */}}
{{- define "gpuslice.openshift" -}}
{{- if or (eq .Values.openshift "true") (and (eq .Values.openshift "auto") (.Capabilities.APIVersions.Has "security.openshift.io/v1")) -}}
true
{{- end -}}
{{- end }}

{{/* What confines the agents to the pods of their own nodes: impersonation, policy or rbac. */}}
{{- define "gpuslice.podAccess" -}}
{{- if ne .Values.settings.podAccess "auto" -}}
{{ .Values.settings.podAccess }}
{{- else if semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version -}}
impersonation
{{- else if .Values.policies.enabled -}}
policy
{{- else -}}
rbac
{{- end -}}
{{- end }}
