"""The GPUs that replicas of profile `split` reserve in Ray, and a check that this machine has them."""

import math
from collections.abc import Iterable

from export import contract
from service.errors import StartFailed
from service.settings import Settings


def replica_gpus(settings: Settings, kinds: Iterable[contract.Kind]) -> float:
    """GPUs of one replica, or its share of one; `kinds` are those of its bundles."""
    if not any(contract.KINDS[kind].uses_gpu for kind in kinds):
        return 0.0
    return settings.replica_gpus if settings.replica_gpus is not None else float(settings.provider == "cuda")


def check_gpus(settings: Settings, there: int) -> None:
    """StartFailed if the replicas, at their upper bounds, need more GPUs than there are: Ray would wait for another machine."""
    kinds = {contract.read_manifest(bundle).kind for bundle in settings.bundles}
    each = replica_gpus(settings, kinds)
    if not each:
        return
    most = {
        "encoder": max(settings.encoders, settings.max_encoders or 0),
        "generator": max(settings.generators, settings.max_generators or 0),
    }
    computing = {contract.KINDS[kind].pool for kind in kinds if contract.KINDS[kind].uses_gpu}
    pools = {f"{pool}s": count for pool, count in most.items() if pool in computing}
    replicas = sum(pools.values())
    needed = math.ceil(replicas / int(1 / each) if each < 1 else replicas * each)  # a share cannot span two GPUs
    if needed > there:
        asked = ", ".join(f"{name}={count}" for name, count in pools.items())
        raise StartFailed(
            f"{asked} and replica_gpus={each:g} need {needed} GPUs, and this machine has {there}. See what nvidia-smi and "
            "CUDA_VISIBLE_DEVICES say; or set fewer of them, a smaller replica_gpus, or provider=cpu."
        )
