"""The methods that Serve calls on a replica that takes requests, in both profiles."""

from collections.abc import Mapping
from typing import Any

# Period and timeout of the health checks of Serve's controller, in seconds. It replaces a replica after three failures, and a dead process
# after one. The timeout is long because a busy event loop answers late. On one machine `watch.py` finds replicas that hang sooner.
CHECKED_EVERY_S, SILENT_FOR_S = 1, 20


class Ingress:
    """Serve's methods over the catalog of this process, `service.deployment.replica.catalog`."""

    async def check_health(self) -> None:
        """RuntimeError for a failure that only a new process can repair: Serve replaces the replica."""
        from service.deployment.replica import catalog

        if catalog is not None and (reason := catalog.sick()):
            raise RuntimeError(reason)

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Change live settings. SettingsError for others."""
        from service.deployment.replica import catalog

        assert catalog is not None
        catalog.reconfigure(user_config)


class WarmIngress(Ingress):
    """A replica that passes its first check when its models are loaded: until then Serve sends no requests and keeps older replicas."""

    async def check_health(self) -> None:
        from service.deployment.replica import catalog

        assert catalog is not None
        await catalog.warm.wait()
        if catalog.failure is not None:
            raise RuntimeError(catalog.failure)
        await super().check_health()
