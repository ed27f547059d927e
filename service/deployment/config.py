"""Renders profile `split` as a Serve configuration, for `serve deploy` and KubeRay's `serveConfigV2`."""

import json
from typing import Any

import yaml
from ray.serve.deployment import deployment_to_schema
from ray.serve.schema import ServeDeploySchema

from service.deployment import ray_private, split
from service.deployment.flags import cluster_flags
from service.deployment.haproxy import KEEP_ALIVE_S
from service.deployment.ingress import APPLICATION, LOGGING
from service.settings import Settings


def render(settings: Settings) -> str:
    """Return the configuration as YAML, as `serve build` writes it. It contains no API keys: each node reads them from its own
    ATTNSERVE_API_KEYS or file of keys.
    """
    deployments = ray_private.deployments_of(split.build(settings, None), APPLICATION)
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": f"{split.__name__}:{split.application.__name__}",
        "args": _arguments(settings),
        "deployments": [json.loads(deployment_to_schema(each).model_dump_json(exclude_unset=True)) for each in deployments],
    }
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": settings.host, "port": settings.port, "keep_alive_timeout_s": KEEP_ALIVE_S},
        "logging_config": LOGGING,
        "applications": [application],
    }
    ServeDeploySchema.model_validate(config)
    flags = "".join(f"#   {name}={value}\n" for name, value in cluster_flags(settings).items())
    return f"# serve deploy FILE. In the environment of every node, before `ray start`:\n{flags}{yaml.safe_dump(config, sort_keys=False)}"


def _arguments(settings: Settings) -> dict[str, Any]:
    """Return the settings that differ from their defaults, except secrets and settings that are written elsewhere in the configuration."""
    said = settings.model_dump(mode="json", exclude_defaults=True, exclude={"api_keys", "profile", "host", "port", "lean"})
    return {**said, "threads": split.threads(settings)}
