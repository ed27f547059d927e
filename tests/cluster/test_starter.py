"""A cluster ends with the process that has started it, also if that one is killed."""

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.service.fakes import PATIENCE_S

pytestmark = [pytest.mark.live, pytest.mark.alone]

STARTER = """
import shutil, sys
from pathlib import Path
from tests.cluster.nodes import running

redis = shutil.which("redis-server")
with running([Path(sys.argv[1])], workers=("one",), cpus=3, redis=Path(redis) if redis else None) as cluster:
    print(cluster.folder, flush=True)
    sys.stdin.read()
"""


def test_nothing_of_a_cluster_outlives_its_starter(encoder_bundle: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(encoder_bundle)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        folder = Path(starter.stdout.readline().strip())
        family = psutil.Process(starter.pid).children(recursive=True)
        starter.kill()
    names = {process.name() for process in family if process.is_running()}
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    shutil.rmtree(folder)
    assert {"raylet", "gcs_server", "haproxy"} <= names
    assert alive == []
