"""What a cluster's service says is where the runbook looks for it: in what each node's `ray start` writes, which `kubectl logs` shows."""

import json
from typing import Any

import httpx
import pytest

from tests.bundles import WITHHELD
from tests.cluster.conftest import WORKERS
from tests.cluster.nodes import Cluster
from tests.service.fakes import PATIENCE_S

pytestmark = [pytest.mark.live, pytest.mark.alone]


def test_a_500_is_found_by_its_request_id(cluster: Cluster) -> None:
    asked = {"model": "tiny-encoder", "input": WITHHELD}
    answer = httpx.post(f"{cluster.url('one')}/v1/embeddings", json=asked, headers={"x-request-id": "the-lost-one"}, timeout=PATIENCE_S)
    assert answer.status_code == 500

    def found() -> list[dict[str, Any]]:
        return [record for name in WORKERS for record in records(cluster, name) if record.get("request_id") == "the-lost-one"]

    (record,) = cluster.until(found, "a worker has written the record")
    assert (record["status"], record["path"], record["level"]) == (500, "/v1/embeddings", "WARNING")


def test_replicas_of_pools_are_heard(cluster: Cluster) -> None:
    """Encoders and generators say which bundles they have loaded, gateways that they are ready."""
    said = [record for name in WORKERS for record in records(cluster, name)]
    assert {each["model"] for each in said if each["message"] == "loaded"} >= {"tiny-encoder", "tiny-decoder"}
    assert [each for each in said if each["message"] == "ready"]


def records(cluster: Cluster, node: str) -> list[dict[str, Any]]:
    """The service's own, among what Ray and Serve say."""
    lines = cluster.said(node).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and '"logger": "attnserve' in line]
