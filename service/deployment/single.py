"""Profile `single`: one deployment accepts requests and computes them."""

from pathlib import Path
from typing import Any

from service.deployment.ingress import Ingress, options_of_serve
from service.settings import Settings, freeze


def build(settings: Settings, log_file: Path) -> Any:
    """Return the Serve application of profile `single`."""
    from ray import serve

    frozen, log_path = freeze(settings), str(log_file)

    def make_app() -> Any:
        """Return the application. Serve calls this in the replica, so that models and large imports use no memory in the process
        that deploys.
        """
        from service.catalog import Catalog
        from service.deployment import replica
        from service.deployment.ray_private import keep_calls_on_loopback

        keep_calls_on_loopback()
        return replica.start(frozen, log_path, Catalog)

    @serve.deployment(
        name="attnserve",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        **options_of_serve(settings.drain_timeout_s + 5),
    )
    @serve.ingress(make_app)
    class Single(Ingress):
        pass

    return Single.bind()  # type: ignore[attr-defined]
