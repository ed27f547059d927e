"""The series that there are: ours as a running application gives them, those of Ray from the list beside the rules."""

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from service.app import build_app
from service.catalog import Catalog
from service.settings import Settings
from tests.deploy.promql import Series
from tests.service.exposition import samples
from tests.service.fakes import client, fake_app, fake_bundle, until

LISTS = Path(__file__).with_name("prometheus")
TARGET = frozenset({"job", "namespace"})  # what Prometheus adds to every series
IN_A_CLUSTER = TARGET | {"application", "deployment", "replica"}  # and service/deployment/ray_metrics.py and Ray to ours


def ray_series() -> dict[str, Any]:
    """Name -> its labels and the file of Ray that defines it."""
    listed: dict[str, Any] = yaml.safe_load((LISTS / "ray-metrics.yaml").read_text())
    return listed


def other_series() -> dict[str, Any]:
    """Name -> its labels and its exporter, for what is neither ours nor Ray's."""
    listed: dict[str, Any] = yaml.safe_load((LISTS / "other-metrics.yaml").read_text())
    return listed


async def our_series(folder: Path, decoder_bundle: Path) -> Series:
    """Everything that /metrics says after a good and a bad request to an encoder and to a decoder."""
    series: dict[str, frozenset[str]] = {}
    key = "a-key-0123456789"  # for the series of tenants
    async with client(fake_app(fake_bundle(folder / "mini"), api_keys=(key,)), headers={"authorization": f"Bearer {key}"}) as http:
        await http.post("/v1/embeddings", json={"input": "cat"})
        await http.post("/v1/embeddings", json={"input": ""})
        series |= read((await http.get("/metrics")).text)
    catalog = Catalog(Settings(bundles=(decoder_bundle,), threads=1))
    app = build_app(catalog)
    async with app.router.lifespan_context(app):
        await until(lambda: catalog.failure or any(model.engine.healthy for model in catalog.models.values()))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://attnserve") as http:
            asked = {"model": "tiny-decoder", "prompt": "def", "max_tokens": 2}
            assert (await http.post("/v1/completions", json=asked)).status_code == 200
            series |= read((await http.get("/metrics")).text)
    return series


def read(exposition: str) -> Series:
    return {sample.name: frozenset(sample.labels) | IN_A_CLUSTER for sample in samples(exposition)}


def binary(name: str) -> str:
    """The path of promtool or prometheus. Where it is missing the test is skipped, and says how to get it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install prometheus (or set PATH to where it is)")
    return found
