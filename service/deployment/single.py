"""Profile `single`: one deployment that is ingress and model."""

from pathlib import Path
from typing import Any

from service.deployment.ingress import CHECKED_EVERY_S, SILENT_FOR_S, Ingress
from service.settings import Settings, freeze


def build(settings: Settings, log_file: Path) -> Any:
    """The Serve application."""
    from ray import serve

    frozen, log_path = freeze(settings), str(log_file)

    def make_app() -> Any:
        """Runs in the replica, so that models and heavy imports are not in the command's memory."""
        from service.catalog import Catalog
        from service.deployment import replica
        from service.deployment.ray_private import keep_calls_on_loopback

        keep_calls_on_loopback()
        return replica.start(frozen, log_path, Catalog)

    @serve.deployment(
        name="attnserve",
        num_replicas=1,
        # Admission is ours, in tokens: Serve must neither queue nor refuse requests.
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=settings.drain_timeout_s + 5,
        health_check_period_s=CHECKED_EVERY_S,
        health_check_timeout_s=SILENT_FOR_S,
        logging_config={"encoding": "JSON", "enable_access_log": False, "log_level": "WARNING"},
    )
    @serve.ingress(make_app)
    class Single(Ingress):
        pass

    return Single.bind()  # type: ignore[attr-defined]
