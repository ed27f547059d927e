"""What a cluster's Prometheus finds: Ray's exporter, with our series and Ray's under the same labels."""

import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from prometheus_client.samples import Sample

from loadtest.common.server import free_ports
from tests.service.exposition import samples

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
serve.run(build(Settings(bundles=(bundle,), profile="split", threads=1, max_encoders=2), None), name="attnserve")
body = b'{"input": "the cat sat on the mat"}'
request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/embeddings", body, {"content-type": "application/json"})
urllib.request.urlopen(request, timeout=60).read()
print("asked", flush=True)
sys.stdin.readline()
serve.shutdown()
ray.shutdown()
"""
WITH = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "1"}
PATIENCE_S = 300
RAYS = Path(__file__).parents[2] / "deploy" / "prometheus" / "ray-metrics.yaml"
# What only something going wrong counts; where it is defined, tests/deploy/test_dashboards.py says.
OF_FAILURES = {"ray_serve_deployment_error_counter_total", "ray_serve_health_check_failures_total"}
ENCODERS = {
    "ray_attnserve_tokens_total": {"application": "attnserve", "deployment": "encoder", "model": "tiny-encoder", "replica": None},
    "ray_serve_deployment_replica_healthy": {"application": "attnserve", "deployment": "encoder", "replica": None},
}
GATEWAYS = {"ray_te_request_count": {"deployment": "gateway", "method": "/v1/embeddings"}}
OURS_AT_MOST, RAYS_AT_MOST = 400, 2500
Labels = Mapping[str, str | None]  # None: there, with any value


@pytest.mark.live
def test_rays_exporter_has_ours_and_its_own_by_deployment(encoder_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of Ray's that rules and dashboards ask for is there with its labels, but for GPUs and failures.

    Ten seconds of the time are Ray's: workers report to the exporter so often."""
    listed = yaml.safe_load(RAYS.read_text()).items()
    rays: dict[str, Labels] = {name: dict.fromkeys(one["labels"]) for name, one in listed if "GpuIndex" not in one["labels"]}
    for name in OF_FAILURES:
        del rays[name]
    for name, value in WITH.items():
        monkeypatch.setenv(name, value)
    port, exporter = free_ports(2)
    folder = tempfile.mkdtemp(prefix="ray-")  # short, since paths of sockets must be
    command = [sys.executable, "-c", CLUSTER, str(encoder_bundle), str(port), str(exporter), folder]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[3]
    ) as cluster:
        assert cluster.stdin
        assert cluster.stdout
        try:
            heard: list[str] = []
            while heard[-1:] != ["asked\n"]:
                heard.append(cluster.stdout.readline())
                assert heard[-1], "".join(heard[-30:]) + _last_words(Path(folder))
            found = _until_there(exporter, {**rays, **ENCODERS, **GATEWAYS})
            series = [sample.name for sample in _scrape(exporter)]
            cluster.stdin.write("\n")
            cluster.stdin.flush()
            cluster.wait(PATIENCE_S)
        finally:
            cluster.terminate()
            cluster.wait(PATIENCE_S)
            shutil.rmtree(folder, ignore_errors=True)
    ours, its = (found[name] for name in ENCODERS)
    assert ours["replica"] == its["replica"]
    # One node with everything on it, a gateway and an encoder: what deploy/observability.md tells operators to expect.
    mirrored = sum(name.startswith(("ray_te_", "ray_attnserve_", "ray_vllm_")) for name in series)
    print(f"series of one node: {mirrored} of ours, {len(series) - mirrored} of Ray")
    assert mirrored < OURS_AT_MOST
    assert len(series) - mirrored < RAYS_AT_MOST


def _last_words(folder: Path) -> str:
    """Of Ray's own processes, whose end takes a driver with it and of which it says nothing."""
    logs = sorted(folder.glob("session_2*/logs/**/*.*"))
    return "".join(f"\n{log.name}: " + "\n".join(log.read_text(errors="replace").splitlines()[-8:]) for log in logs if log.is_file())


def _until_there(port: int, wanted: Mapping[str, Labels]) -> dict[str, dict[str, str]]:
    """Name -> labels of one of its samples, once every wanted name has one with the labels that it is to have."""
    found: dict[str, dict[str, str]] = {}
    waiting = threading.Event()
    for _ in range(PATIENCE_S):
        for sample in _scrape(port):
            if sample.name in wanted and _has(sample.labels, wanted[sample.name]):
                found[sample.name] = sample.labels
        if wanted.keys() <= found.keys():
            return found
        waiting.wait(1)
    raise AssertionError(f"after {PATIENCE_S} s the exporter has no {wanted.keys() - found.keys()}")


def _scrape(port: int) -> list[Sample]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        return samples(answer.read().decode())


def _has(labels: Mapping[str, str], wanted: Labels) -> bool:
    return all(name in labels and value in (None, labels[name]) for name, value in wanted.items())
