"""The OpenAPI document is true: whatever is sent, the answer has a status and a body that the document names, and never a 5xx."""

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.service.live import LiveService

pytestmark = pytest.mark.service

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# Routes whose successes must have been among what was tried; the others need inputs that a schema cannot describe.
REACHED = (
    "/v1/embeddings",
    "/v1/attention",
    "/embed",
    "/embed_all",
    "/rerank",
    "/predict",
    "/similarity",
    "/tokenize",
    "/v2/embed",
    "/v2/rerank",
    "/v1/rerank",
)


def test_schemathesis_finds_nothing(service: LiveService, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("schemathesis")), "--no-color", "run", f"{service.url}/openapi.json"]
    options = ["--checks", CHECKS, "--max-examples", "30", "--generation-deterministic", "--phases", "examples,coverage,fuzzing"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
    with urllib.request.urlopen(f"{service.url}/metrics") as answer:
        succeeded = set(re.findall(r'te_request_success\{method="([^"]+)"', answer.read().decode()))
    assert set(REACHED) <= succeeded
