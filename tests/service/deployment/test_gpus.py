"""How many GPUs the replicas of profile split need, what is said where there are fewer, and what of one an encoder may take."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from export import contract
from service.catalog import Catalog
from service.deployment.scaling import check_gpus
from service.errors import StartFailed
from service.settings import Settings
from tests.service.fakes import FakeSession, fake_bundle, open_fake


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return fake_bundle(tmp_path / "encoder")


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"provider": "cuda"}, 1),
        ({"provider": "cuda", "encoders": 3}, 3),
        ({"provider": "cuda", "encoders": 1, "max_encoders": 4}, 4),
        ({"replica_gpus": 0.5, "encoders": 3}, 2),
        ({"replica_gpus": 0.6, "encoders": 3}, 3),  # two do not fit one GPU
        ({"replica_gpus": 2, "encoders": 2}, 4),
    ],
)
def test_gpus_are_counted_as_encoders_fit_them(encoder: Path, settings: dict[str, Any], needed: int) -> None:
    asked = Settings(bundles=(encoder,), **settings)
    check_gpus(asked, needed)
    with pytest.raises(StartFailed, match=f"need {needed} GPUs, but this machine has {needed - 1}"):
        check_gpus(asked, needed - 1)


@pytest.mark.parametrize("settings", [{}, {"provider": "cuda", "replica_gpus": 0}])
def test_who_asks_for_no_gpu_needs_none(encoder: Path, settings: dict[str, Any]) -> None:
    check_gpus(Settings(bundles=(encoder,), **settings), 0)


def test_encoder_decoders_need_no_gpu(encoder: Path, decoder_bundle: Path, encoder_decoder_bundle: Path) -> None:
    """They compute on the CPU: a pool of them reserves no GPU, for which Ray would wait, and those beside them are counted as before."""
    alone = Settings(bundles=(encoder_decoder_bundle,), provider="cuda")
    check_gpus(alone, 0)
    assert reserved(alone) == {"gateway": 0, "generator": 0}
    check_gpus(Settings(bundles=(encoder, encoder_decoder_bundle), provider="cuda", generators=3), 1)
    assert reserved(Settings(bundles=(encoder, encoder_decoder_bundle), provider="cuda")) == {"gateway": 0, "encoder": 1, "generator": 0}
    beside = Settings(bundles=(encoder_decoder_bundle, decoder_bundle), provider="cuda")
    assert reserved(beside) == {"gateway": 0, "generator": 1}
    with pytest.raises(StartFailed, match="generators=1 and replica_gpus=1 need 1 GPUs"):
        check_gpus(beside, 0)


def reserved(settings: Settings) -> dict[str, float]:
    """GPUs in Ray's books of one replica of each deployment."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, as it is imported
        from ray.serve._private.build_app import build_app

        from service.deployment import split
    built = build_app(split.build(settings, None), name="attnserve").deployments
    return {each.name: (each.ray_actor_options or {}).get("num_gpus", 0) for each in built}


def test_an_encoder_is_told_how_much_of_a_gpu_it_may_take(encoder: Path) -> None:
    told: list[Any] = []

    def open_session(bundle: Path, manifest: contract.Manifest, **named: Any) -> FakeSession:
        told.append((named["provider"], named["gpu_memory_gib"]))
        return open_fake(bundle, manifest)

    Catalog(Settings(bundles=(encoder,), provider="cuda", gpu_memory_gib=1.5), open_session=open_session).load()
    assert told == [("cuda", 1.5)]
