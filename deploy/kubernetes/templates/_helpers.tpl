{{- define "tessera.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "tessera.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tessera.labels" -}}
{{ include "tessera.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "tessera.metadata" -}}
name: {{ include "tessera.name" . }}
labels:
  {{- include "tessera.labels" . | nindent 2 }}
{{- end }}

{{- /* The Secret with the API keys; empty where every route is open. */ -}}
{{- define "tessera.keys" -}}
{{- if .Values.apiKeys.keys }}{{ include "tessera.name" . }}-keys{{ else if not .Values.apiKeys.none }}{{ required "apiKeys: name an existingSecret, give keys, or say none: true" .Values.apiKeys.existingSecret }}{{ end }}
{{- end }}
