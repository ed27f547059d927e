"""What Serve asks of a replica that takes requests, in both profiles."""

from collections.abc import Mapping
from typing import Any

# Period and timeout of the health checks of Serve's controller. It replaces a replica after three failures, and a dead process after one.
# A silent replica may only be busy, since its event loop answers. One that hangs is found by other signs on one machine
# (`service/deployment/watch.py`), and after three timeouts on a cluster.
CHECKED_EVERY_S, SILENT_FOR_S = 1, 20


class Ingress:
    """Around the catalog of this process, which `service/deployment/replica.py` keeps."""

    async def check_health(self) -> None:
        """A replica that cannot mend itself is replaced."""
        from service.deployment.replica import catalog

        if catalog is not None and (reason := catalog.sick()):
            raise RuntimeError(reason)

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Settings that can change while requests run; SettingsError for others."""
        from service.deployment.replica import catalog

        assert catalog is not None
        catalog.reconfigure(user_config)


class WarmIngress(Ingress):
    """Serve counts it from its first passed check on, when its models are loaded: before, it gets no requests and no other ends for it."""

    async def check_health(self) -> None:
        from service.deployment.replica import catalog

        assert catalog is not None
        await catalog.warm.wait()
        if catalog.failure is not None:
            raise RuntimeError(catalog.failure)
        await super().check_health()
