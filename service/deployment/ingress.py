"""The methods that Serve calls on a replica that accepts requests, in both profiles."""

from collections.abc import Mapping
from typing import Any

# Period and timeout of the health checks by Serve's controller, in seconds. The controller replaces a replica after three failed checks,
# or after one if the process has ended. The timeout is long because a busy event loop answers late. On one machine `watch.py` finds hung
# replicas sooner.
_CHECKED_EVERY_S, _SILENT_FOR_S = 1, 20
APPLICATION = "attnserve"  # its name in Serve
LOGGING = {"encoding": "JSON", "enable_access_log": False, "log_level": "WARNING"}


def options_of_serve(shutdown_s: float) -> dict[str, Any]:
    """Return the Serve options that all deployments have. `shutdown_s` is the number of seconds that a replica gets to finish its
    requests.
    """
    return {
        # Unlimited in effect: Serve must neither queue nor refuse calls, because the engines admit requests by tokens and slots.
        "max_ongoing_requests": 100_000,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": shutdown_s,
        "health_check_period_s": _CHECKED_EVERY_S,
        "health_check_timeout_s": _SILENT_FOR_S,
        "logging_config": LOGGING,
    }


class Ingress:
    """Implements Serve's methods with this process's catalog, `service.deployment.replica.catalog`."""

    async def check_health(self) -> None:
        """Raise RuntimeError for a failure that only a new process can repair. Serve then replaces the replica."""
        from service.deployment.replica import catalog

        if catalog is not None and (reason := catalog.sick()):
            raise RuntimeError(reason)

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Change settings that can be changed in a running service. Raises SettingsError for other settings."""
        from service.deployment.replica import catalog

        assert catalog is not None
        catalog.reconfigure(user_config)


class WarmIngress(Ingress):
    """A replica that passes its first health check once its models are loaded. Until then, Serve sends it no requests."""

    async def check_health(self) -> None:
        from service.deployment.replica import catalog

        assert catalog is not None
        await catalog.warm.wait()
        if catalog.failure is not None:
            raise RuntimeError(catalog.failure)
        await super().check_health()
