"""One cluster for all tests of this folder: its start is most of what they cost. Each test leaves it whole."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bundles import tiny_encoder_bundle, withholding
from tests.cluster.nodes import Cluster, running

WORKERS = ("one", "two")


@pytest.fixture(scope="session")
def cluster(decoder_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head without replicas and two workers with one of each pool, as in one group of deploy/chart; Redis where it is installed."""
    encoder = withholding(tiny_encoder_bundle(tmp_path_factory.mktemp("cluster") / "tiny"))
    flags = ("--encoders", "2", "--generators", "2", "--threads", "1", "--set", "gateways=2")
    redis = shutil.which("redis-server") or shutil.which("valkey-server")
    with running([encoder, decoder_bundle], *flags, workers=WORKERS, cpus=3, redis=Path(redis) if redis else None) as made:
        yield made
