{{/* The base name of all objects: the release's, with the chart's name in it. */}}
{{- define "attnserve.name" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) }}
{{- if and .Values.rayService.enabled (gt (len $name) 47) }}
{{- fail (printf "%s has %d characters and KubeRay makes names of 63 out of a RayService's: choose a release name that makes at most 47" $name (len $name)) }}
{{- end }}
{{- $name | trunc 47 | trimSuffix "-" }}
{{- end }}

{{/* The name of a ConfigMap without the hash that kustomize gives it. */}}
{{- define "attnserve.unhashed" -}}{{ regexReplaceAll "-[a-z0-9]{10}$" . "" }}{{- end }}

{{/* "true" if the release has monitors, else empty. */}}
{{- define "attnserve.monitored" -}}
{{- $known := .Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}
{{- if or (eq .Values.monitors "always") (and (eq .Values.monitors "auto") $known) }}true{{ end }}
{{- end }}

{{- define "attnserve.image" -}}
{{- if .image.digest }}{{ .image.repository }}@{{ .image.digest }}
{{- else }}{{ .image.repository }}:{{ .image.tag | default (printf "%s-%s" .version (ternary "gpu" "cpu" .gpu)) }}{{ end }}
{{- end }}

{{/* The helpers below change the manifests that they are given, and print nothing.

.it: any part of a manifest. Adds the release's name to all labels and selectors that have the service's name, so that two releases in one
namespace do not select each other's pods. */}}
{{- define "attnserve.instance" -}}
{{- $release := .release }}
{{- if kindIs "map" .it }}
{{- if eq (get .it "app.kubernetes.io/name" | toString) "attnserve" }}{{ $_ := set .it "app.kubernetes.io/instance" $release }}{{ end }}
{{- range $value := .it }}{{ include "attnserve.instance" (dict "it" $value "release" $release) }}{{ end }}
{{- else if kindIs "slice" .it }}
{{- range $value := .it }}{{ include "attnserve.instance" (dict "it" $value "release" $release) }}{{ end }}
{{- end }}
{{- end }}

{{/* .data: the settings as deploy/common and the overlay have them. */}}
{{- define "attnserve.settings" -}}
{{- $values := .values }}
{{- $data := .data }}
{{- $_ := set $data "ATTNSERVE_BUNDLES" (join "," $values.bundles) }}
{{- $_ := set $data "ATTNSERVE_API_KEYS_FILE" (ternary (printf "/etc/attnserve/%s" $values.keys.file) "" (ne $values.keys.secret "")) }}
{{- $_ := set $data "ATTNSERVE_REQUEST_TIMEOUT_S" ($values.requestTimeoutSeconds | int | toString) }}
{{- if hasKey $data "ATTNSERVE_DRAIN_TIMEOUT_S" }}
{{- $_ := set $data "ATTNSERVE_DRAIN_TIMEOUT_S" (add (int (get $data "ATTNSERVE_DRAIN_TIMEOUT_S")) .longer | toString) }}
{{- end }}
{{- if $values.rayService.enabled }}
{{- $pools := ternary 2 1 $values.rayService.generators }}
{{- $_ := set $data "ATTNSERVE_THREADS" (div (sub (int $values.rayService.worker.cpu) 2) $pools | toString) }}
{{- end }}
{{- if $values.gpu.enabled }}
{{- $_ := set $data "ATTNSERVE_PROVIDER" "cuda" }}
{{- $_ := set $data "ATTNSERVE_GPU_MEMORY_GIB" ($values.gpu.memoryGiB | toString) }}
{{- if $values.rayService.enabled }}{{ $_ := set $data "ATTNSERVE_REPLICA_GPUS" (ternary "0.5" "1" $values.rayService.generators) }}{{ end }}
{{- end }}
{{- if $values.traces.endpoint }}{{ $_ := set $data "ATTNSERVE_OTLP_ENDPOINT" $values.traces.endpoint }}{{ end }}
{{- if $values.states.claim }}{{ $_ := set $data "ATTNSERVE_STATES" "/states" }}{{ end }}
{{- if $values.states.redis.url }}{{ $_ := set $data "ATTNSERVE_STATES" $values.states.redis.url }}{{ end }}
{{- range $name, $value := $values.settings }}
{{- $text := ternary ($value | toString) ($value | toJson) (kindIs "string" $value) }}
{{- $_ := set $data (printf "ATTNSERVE_%s" $name) $text }}
{{- end }}
{{- end }}

{{/* .resources: of a container. .asked: cpu and memory, which are both its request and its limit. */}}
{{- define "attnserve.resources" -}}
{{- range $part := list .resources.requests .resources.limits }}
{{- $_ := set $part "cpu" ($.asked.cpu | int | toString) }}
{{- $_ := set $part "memory" $.asked.memory }}
{{- end }}
{{- if .gpu }}{{ $_ := set .resources.limits "nvidia.com/gpu" "1" }}{{ end }}
{{- end }}

{{/* .template: of a pod with one container. .computes: whether the pod gets nodeSelector, tolerations and GPUs. */}}
{{- define "attnserve.pod" -}}
{{- $values := .root.Values }}
{{- /* A change of settings is a change of the pods. A hash in the ConfigMap's name, as kustomize has it, would need ConfigMaps that outlive an
upgrade, and `helm rollback` fails on those. */ -}}
{{- $_ := set .template.metadata "annotations" (dict "checksum/settings" .checksum) }}
{{- $pod := .template.spec }}
{{- $container := index $pod.containers 0 }}
{{- $image := include "attnserve.image" (dict "image" $values.image "version" .root.Chart.AppVersion "gpu" $values.gpu.enabled) }}
{{- $_ := set $container "image" $image }}
{{- $_ := set $container "imagePullPolicy" $values.image.pullPolicy }}
{{- if $values.image.pullSecrets }}
{{- $secrets := list }}
{{- range $values.image.pullSecrets }}{{ $secrets = append $secrets (dict "name" .) }}{{ end }}
{{- $_ := set $pod "imagePullSecrets" $secrets }}
{{- end }}
{{- range $source := $container.envFrom }}
{{- $_ := set $source.configMapRef "name" (include "attnserve.unhashed" $source.configMapRef.name | replace "attnserve" $.name) }}
{{- end }}
{{- $_ := set $pod "serviceAccountName" (replace "attnserve" .name $pod.serviceAccountName) }}
{{- $volumes := list }}
{{- range $volume := $pod.volumes }}
{{- if ne $volume.name "keys" }}{{ $volumes = append $volumes $volume }}
{{- else if $values.keys.secret }}
{{- $_ := set $volume.secret "secretName" $values.keys.secret }}
{{- $volumes = append $volumes $volume }}
{{- end }}
{{- end }}
{{- $mounts := list }}
{{- range $mount := $container.volumeMounts }}
{{- if or (ne $mount.name "keys") $values.keys.secret }}{{ $mounts = append $mounts $mount }}{{ end }}
{{- end }}
{{- $models := $values.models }}
{{- $source := dict }}
{{- if $models.claim }}{{ $source = dict "persistentVolumeClaim" (dict "claimName" $models.claim "readOnly" true) }}{{ end }}
{{- if $models.image }}{{ $source = dict "image" (dict "reference" $models.image "pullPolicy" "IfNotPresent") }}{{ end }}
{{- if $models.fetch.urls }}
{{- $source = dict "emptyDir" (dict "sizeLimit" $models.fetch.size) }}
{{- $most := max 1 (div (mul 8 ($models.fetch.size | trimSuffix "Gi" | int)) 10) }}
{{- $fetch := dict "name" "fetch" "image" $image "imagePullPolicy" $values.image.pullPolicy "securityContext" $container.securityContext }}
{{- $_ := set $fetch "args" (list "fetch" "--to" "/models" "--max-gib" ($most | toString)) }}
{{- $secret := dict "name" $models.fetch.secret "optional" true }}
{{- $_ := set $fetch "envFrom" (list (dict "configMapRef" (dict "name" (printf "%s-bundles" .name))) (dict "secretRef" $secret)) }}
{{- $_ := set $fetch "terminationMessagePolicy" "FallbackToLogsOnError" }}
{{- $_ := set $fetch "resources" (dict "requests" (dict "cpu" "1" "memory" "512Mi") "limits" (dict "cpu" "1" "memory" "512Mi")) }}
{{- $_ := set $fetch "volumeMounts" (list (dict "name" "models" "mountPath" "/models")) }}
{{- $_ := set $pod "initContainers" (list $fetch) }}
{{- end }}
{{- if $source }}
{{- $volumes = append $volumes (merge (dict "name" "models") $source) }}
{{- $mounts = append $mounts (dict "name" "models" "mountPath" "/models" "readOnly" true) }}
{{- end }}
{{- if $values.states.claim }}
{{- $volumes = append $volumes (dict "name" "states" "persistentVolumeClaim" (dict "claimName" $values.states.claim)) }}
{{- $mounts = append $mounts (dict "name" "states" "mountPath" "/states") }}
{{- end }}
{{- if and $values.states.redis.url $values.states.redis.secret }}
{{- $_ := set $container "envFrom" (append $container.envFrom (dict "secretRef" (dict "name" $values.states.redis.secret))) }}
{{- end }}
{{- $_ := set $pod "volumes" $volumes }}
{{- $_ := set $container "volumeMounts" $mounts }}
{{- include "attnserve.resources" (dict "resources" $container.resources "asked" .asked "gpu" (and .computes $values.gpu.enabled)) }}
{{- if $models.fetch.urls }}
{{- /* Fetched bundles count as the pod's storage, and a pod above its limit is evicted. */ -}}
{{- range $part := list $container.resources.requests $container.resources.limits }}
{{- $own := get $part "ephemeral-storage" | trimSuffix "Gi" | int }}
{{- $_ := set $part "ephemeral-storage" (printf "%dGi" (add $own ($models.fetch.size | trimSuffix "Gi" | int))) }}
{{- end }}
{{- end }}
{{- /* The grace period of a pod that waits for requests grows with the longest request. */ -}}
{{- if gt (int $pod.terminationGracePeriodSeconds) (sub (int $values.requestTimeoutSeconds) .longer | int) }}
{{- $_ := set $pod "terminationGracePeriodSeconds" (add (int $pod.terminationGracePeriodSeconds) .longer) }}
{{- end }}
{{- if .computes }}
{{- $tolerations := $values.tolerations }}
{{- if $values.gpu.enabled }}{{ $tolerations = prepend $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}{{ end }}
{{- if $tolerations }}{{ $_ := set $pod "tolerations" $tolerations }}{{ end }}
{{- if $values.nodeSelector }}{{ $_ := set $pod "nodeSelector" $values.nodeSelector }}{{ end }}
{{- end }}
{{- end }}

{{/* .spec: of a RayService. */}}
{{- define "attnserve.ray" -}}
{{- $values := .root.Values }}
{{- $scaling := $values.scaling }}
{{- $longer := .longer }}
{{- $config := fromYaml .spec.serveConfigV2 }}
{{- $application := index $config.applications 0 }}
{{- $deployments := list }}
{{- range $one := $application.deployments }}
{{- $_ := set $one "graceful_shutdown_timeout_s" (add (int $one.graceful_shutdown_timeout_s) $longer) }}
{{- if $one.autoscaling_config }}
{{- $_ := set $one.autoscaling_config "min_replicas" $scaling.min }}
{{- $_ := set $one.autoscaling_config "max_replicas" $scaling.max }}
{{- else }}{{ $_ := set $one "num_replicas" $scaling.min }}
{{- end }}
{{- if or $values.rayService.generators (ne $one.name "generator") }}{{ $deployments = append $deployments $one }}{{ end }}
{{- end }}
{{- $_ := set $application "deployments" $deployments }}
{{- $_ := set .spec "serveConfigV2" (toYaml $config) }}
{{- $_ := set .spec "rayClusterDeletionDelaySeconds" (add (int .spec.rayClusterDeletionDelaySeconds) $longer) }}
{{- $cluster := .spec.rayClusterConfig }}
{{- $workers := index $cluster.workerGroupSpecs 0 }}
{{- $_ := set $workers "replicas" $scaling.min }}
{{- $_ := set $workers "minReplicas" $scaling.min }}
{{- $_ := set $workers "maxReplicas" (ternary $scaling.max $scaling.min $scaling.enabled) }}
{{- $given := dict "root" .root "name" .name "checksum" .checksum "longer" $longer }}
{{- $head := dict "template" $cluster.headGroupSpec.template "asked" $values.rayService.head "computes" false }}
{{- $worker := dict "template" $workers.template "asked" $values.rayService.worker "computes" true }}
{{- include "attnserve.pod" (merge $head $given) }}
{{- include "attnserve.pod" (merge $worker $given) }}
{{- end }}
