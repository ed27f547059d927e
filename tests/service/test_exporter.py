"""What a cluster's Prometheus finds: Ray's exporter, with our series and Ray's under the same labels."""

import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.ports import free_ports
from tests.bundles import tiny_encoder_bundle

# In a process of its own: Ray reads its flags when it is imported, and what it starts must not outlive the test.
CLUSTER = """
import sys, urllib.request
from pathlib import Path
import ray
from ray import serve
from service.deployment.split import build
from service.settings import Settings

bundle, port, exporter, folder = sys.argv[1:]
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80 * 1024**2, log_to_driver=False, configure_logging=False,
         namespace="serve", _temp_dir=folder, _metrics_export_port=int(exporter))
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
serve.run(build(Settings(bundles=(bundle,), profile="split", threads=1), None), name="attnserve")
body = b'{"input": "the cat sat on the mat"}'
request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/embeddings", body, {"content-type": "application/json"})
urllib.request.urlopen(request, timeout=60).read()
print("asked", flush=True)
sys.stdin.readline()
serve.shutdown()
ray.shutdown()
"""
WITH = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "1"}
PATIENCE_S = 90


@pytest.mark.service
def test_rays_exporter_has_ours_and_its_own_by_deployment(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds of the time are Ray's: workers report to the exporter so often."""
    bundle = tiny_encoder_bundle(tmp_path_factory.mktemp("exported") / "tiny")
    for name, value in WITH.items():
        monkeypatch.setenv(name, value)
    port, exporter = free_ports(2)
    folder = tempfile.mkdtemp(prefix="ray-")  # short, since paths of sockets must be
    command = [sys.executable, "-c", CLUSTER, str(bundle), str(port), str(exporter), folder]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[2]
    ) as cluster:
        assert cluster.stdin
        assert cluster.stdout
        try:
            heard: list[str] = []
            while heard[-1:] != ["asked\n"]:
                heard.append(cluster.stdout.readline())
                assert heard[-1], "".join(heard[-30:]) + _last_words(Path(folder))
            found = _until_there(exporter, {"ray_attnserve_tokens_total", "ray_te_request_count", "ray_serve_deployment_replica_healthy"})
            cluster.stdin.write("\n")
            cluster.stdin.flush()
            cluster.wait(PATIENCE_S)
        finally:
            cluster.terminate()
            cluster.wait(PATIENCE_S)
            shutil.rmtree(folder, ignore_errors=True)
    assert found["ray_attnserve_tokens_total"]["encoder"]["model"] == "tiny-encoder"
    assert found["ray_te_request_count"]["gateway"]["method"] == "/v1/embeddings"
    assert found["ray_serve_deployment_replica_healthy"]["encoder"]["application"] == "attnserve"
    ours, rays = found["ray_attnserve_tokens_total"]["encoder"], found["ray_serve_deployment_replica_healthy"]["encoder"]
    assert [ours[label] for label in ("application", "replica")] == [rays[label] for label in ("application", "replica")]


def _last_words(folder: Path) -> str:
    """Of Ray's own processes, whose end takes a driver with it and of which it says nothing."""
    logs = sorted(folder.glob("session_2*/logs/**/*.*"))
    return "".join(f"\n{log.name}: " + "\n".join(log.read_text(errors="replace").splitlines()[-8:]) for log in logs if log.is_file())


def _until_there(port: int, wanted: set[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Name -> deployment -> labels of one of its samples above 0, once all wanted names have one."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    waiting = threading.Event()
    for _ in range(PATIENCE_S):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        for family in families:
            for sample in family.samples:
                if sample.name in wanted and sample.value > 0:
                    found.setdefault(sample.name, {})[sample.labels["deployment"]] = dict(sample.labels)
        if wanted <= found.keys():
            return found
        waiting.wait(1)
    raise AssertionError(f"after {PATIENCE_S} s the exporter has no {wanted - found.keys()}")
