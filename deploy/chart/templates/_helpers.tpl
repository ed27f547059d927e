{{/* The base name of all objects: the release's, with the chart's name in it. */}}
{{- define "attnserve.name" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) }}
{{- if and .Values.rayService.enabled (gt (len $name) 47) }}
{{- fail (printf "%s has %d characters and KubeRay makes names of 63 out of a RayService's: choose a release name that makes at most 47" $name (len $name)) }}
{{- end }}
{{- $name | trunc 47 | trimSuffix "-" }}
{{- end }}

{{- define "attnserve.selector" -}}
app.kubernetes.io/name: attnserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* list ROOT SUFFIX: an object's name, with a suffix that may be empty, and labels. */}}
{{- define "attnserve.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "attnserve.name" $root }}{{ index . 1 }}
labels:
  {{- include "attnserve.selector" $root | nindent 2 }}
  app.kubernetes.io/managed-by: {{ $root.Release.Service }}
  app.kubernetes.io/part-of: attnserve
  helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{/* "true" if the release has monitors, else empty. */}}
{{- define "attnserve.monitored" -}}
{{- $known := .Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}
{{- if or (eq .Values.monitors "always") (and (eq .Values.monitors "auto") $known) }}true{{ end }}
{{- end }}

{{- define "attnserve.image" -}}
{{- $image := .Values.image }}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}
{{- else }}{{ $image.repository }}:{{ $image.tag | default (printf "%s-%s" .Chart.AppVersion (ternary "gpu" "cpu" .Values.gpu.enabled)) }}{{ end }}
{{- end }}

{{/* The groups of workers of a RayService: name, pools, cpu, memory, min, max, nodeSelector, tolerations. */}}
{{- define "attnserve.groups" -}}
{{- $ray := .Values.rayService }}
{{- $scaling := .Values.scaling }}
{{- $common := dict "min" $scaling.min "max" $scaling.max "nodeSelector" .Values.nodeSelector "tolerations" .Values.tolerations }}
{{- $groups := list (merge (dict "name" "workers" "pools" (list "gateway" "encoder")) $ray.worker $common) }}
{{- if $ray.generators }}
{{- $groups = list (merge (dict "name" "workers" "pools" (list "gateway" "encoder" "generator")) $ray.worker $common) }}
{{- if $ray.separate }}
{{- $encoders := merge (dict "name" "encoders" "pools" (list "gateway" "encoder")) $ray.groups.encoders $common }}
{{- $groups = list $encoders (merge (dict "name" "generators" "pools" (list "generator")) $ray.groups.generators $common) }}
{{- end }}
{{- end }}
{{- range $group := $groups }}
{{- if not $scaling.enabled }}{{ $_ := set $group "max" $group.min }}{{ end }}
{{- if gt (int $group.min) (int $group.max) }}{{ fail (printf "min=%v of the %s is more than max=%v" $group.min $group.name $group.max) }}{{ end }}
{{- end }}
{{- dict "groups" $groups | toJson }}
{{- end }}

{{/* list ROOT CPU MEMORY DISK_REQUEST DISK_LIMIT GPU: the resources of a container, with the disk that fetched bundles take: a pod above its
limit is evicted. As many CPUs as are asked for are the limit, since the service makes a thread for each. */}}
{{- define "attnserve.resources" -}}
{{- $fetch := (index . 0).Values.models.fetch }}
{{- $fetched := ternary ($fetch.size | trimSuffix "Gi" | int) 0 (gt (len $fetch.urls) 0) }}
requests: {cpu: {{ index . 1 | toString | quote }}, memory: {{ index . 2 }}, ephemeral-storage: {{ add (index . 3) $fetched }}Gi}
limits:
  cpu: {{ index . 1 | toString | quote }}
  memory: {{ index . 2 }}
  ephemeral-storage: {{ add (index . 4) $fetched }}Gi
  {{- if index . 5 }}
  nvidia.com/gpu: "1"
  {{- end }}
{{- end }}

{{/* What all pods have. The checksum makes a change of the settings a change of the pods. */}}
{{- define "attnserve.annotations" -}}
checksum/settings: {{ include (print $.Template.BasePath "/settings.yaml") . | sha256sum }}
{{- end }}

{{- define "attnserve.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext: {runAsNonRoot: true, runAsUser: 1000, runAsGroup: 1000, fsGroup: 1000, seccompProfile: {type: RuntimeDefault}}
{{- if .Values.models.fetch.urls }}
initContainers:
  - name: fetch
    image: {{ include "attnserve.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    {{- include "attnserve.secured" . | nindent 4 }}
    # One bundle may take 80 % of the volume.
    args: [fetch, --to, /models, --max-gib, {{ max 1 (div (mul 8 (.Values.models.fetch.size | trimSuffix "Gi" | int)) 10) | toString | quote }}]
    envFrom:
      - configMapRef: {name: {{ include "attnserve.name" . }}-bundles}
      - secretRef: {name: {{ .Values.models.fetch.secret }}, optional: true}
    # Errors are in `kubectl describe pod` too.
    terminationMessagePolicy: FallbackToLogsOnError
    resources:
      requests: {cpu: "1", memory: 512Mi}
      limits: {cpu: "1", memory: 512Mi}
    volumeMounts: [{name: models, mountPath: /models}]
{{- end }}
{{- end }}

{{- define "attnserve.secured" -}}
securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{/* What all containers of the service have. */}}
{{- define "attnserve.container" -}}
image: {{ include "attnserve.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{ include "attnserve.secured" . }}
envFrom:
  - configMapRef: {name: {{ include "attnserve.name" . }}-settings}
  {{- if .Values.rayService.enabled }}
  - configMapRef: {name: {{ include "attnserve.name" . }}-ray-flags}
  {{- end }}
  {{- if and .Values.states.redis.url .Values.states.redis.secret }}
  # Its key ATTNSERVE_STATES_PASSWORD. A pod without it does not start.
  - secretRef: {name: {{ .Values.states.redis.secret }}}
  {{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if .Values.keys.secret }}
  # The folder, not the file by subPath: that one would not change with its Secret.
  - {name: keys, mountPath: /etc/attnserve, readOnly: true}
  {{- end }}
  {{- if or .Values.models.claim .Values.models.image .Values.models.fetch.urls }}
  - {name: models, mountPath: /models, readOnly: true}
  {{- end }}
  {{- if .Values.states.claim }}
  - {name: states, mountPath: /states}
  {{- end }}
{{- end }}

{{- define "attnserve.volumes" -}}
# Sessions, sockets and logs of Ray, HAProxy's configuration, HOME; while an encoder is opened, up to four times its bundle.
- name: tmp
  emptyDir: {sizeLimit: {{ ternary "4Gi" "1Gi" .Values.rayService.enabled }}}
{{- if .Values.keys.secret }}
# Hashes of API keys, with tenants and limits. Not optional: a pod without it does not start.
- name: keys
  secret: {secretName: {{ .Values.keys.secret }}, defaultMode: 0440}
{{- end }}
{{- with .Values.models }}
{{- if .claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .claim }}, readOnly: true}
{{- else if .image }}
- name: models
  image: {reference: {{ .image | quote }}, pullPolicy: IfNotPresent}
{{- else if .fetch.urls }}
- name: models
  emptyDir: {sizeLimit: {{ .fetch.size }}}
{{- end }}
{{- end }}
{{- if .Values.states.claim }}
- name: states
  persistentVolumeClaim: {claimName: {{ .Values.states.claim }}}
{{- end }}
{{- end }}

{{/* list ROOT NODE_SELECTOR TOLERATIONS: of pods that compute. */}}
{{- define "attnserve.scheduling" -}}
{{- with index . 1 }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- $tolerations := index . 2 }}
{{- if (index . 0).Values.gpu.enabled }}
{{- $tolerations = prepend $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with $tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end }}

{{/* How long workers continue without a head: an hour, in which a person can restore Redis or its node. KubeRay sets 600 s unless it finds
the variable here, in `env`; it does not read ConfigMaps. The head has the same value. */}}
{{- define "attnserve.reconnect" -}}
{{- if .Values.rayService.ha -}}
env: [{name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "3600"}]
{{- end }}
{{- end }}
