"""What several tests of deploy/ share."""

import asyncio
from pathlib import Path

import pytest

from tests.deploy.exported import TARGET, other_series, our_series, ray_series
from tests.deploy.promql import Series


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory, decoder_bundle: Path) -> Series:
    """Every series a rule or a dashboard may ask for."""
    ours = asyncio.run(our_series(tmp_path_factory.mktemp("encoder"), decoder_bundle))
    listed = {**ray_series(), **other_series()}
    return {**ours, **{name: TARGET | set(one["labels"]) for name, one in listed.items()}}
