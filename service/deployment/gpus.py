"""Computes the GPUs that replicas of profile `split` reserve in Ray, and checks that this machine has them."""

import math
from collections.abc import Iterable

from export import contract
from service.errors import StartFailed
from service.settings import Settings


def replica_gpus(settings: Settings, kinds: Iterable[contract.Kind]) -> float:
    """Return the GPUs, or the fraction of a GPU, that one replica reserves. `kinds` are the kinds of its bundles."""
    if not any(contract.KINDS[kind].uses_gpu for kind in kinds):
        return 0.0
    return settings.replica_gpus if settings.replica_gpus is not None else float(settings.provider == "cuda")


def check_gpus(settings: Settings, there: int) -> None:
    """Raise StartFailed if the largest number of replicas that `settings` allows needs more GPUs than this machine has (`there`). Without
    this check, Ray would wait for another machine.
    """
    kinds = {contract.read_manifest(bundle).kind for bundle in settings.bundles}
    each = replica_gpus(settings, kinds)
    if not each:
        return
    pools = {
        name: settings.most(name) for name in sorted({f"{contract.KINDS[kind].pool}s" for kind in kinds if contract.KINDS[kind].uses_gpu})
    }
    replicas = sum(pools.values())
    needed = math.ceil(replicas / int(1 / each) if each < 1 else replicas * each)  # a replica cannot use parts of two GPUs
    if needed > there:
        asked = ", ".join(f"{name}={count}" for name, count in pools.items())
        raise StartFailed(
            f"{asked} and replica_gpus={each:g} need {needed} GPUs, but this machine has {there}. Check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES; or set fewer replicas, a smaller replica_gpus, or provider=cpu."
        )
