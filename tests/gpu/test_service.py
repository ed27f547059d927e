"""The service on a GPU: it says of each model where it computes."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.runtime.onnx import CUDA
from tests.gpu import ON_A_GPU
from tests.service.fakes import PATIENCE_S
from tests.service.live import LiveService, live

pytestmark = [*ON_A_GPU, pytest.mark.live]


@pytest.fixture(scope="module", params=["single", "split"])
def on_gpu(request: pytest.FixtureRequest, minilm_bundle: Path, decoder_bundle: Path) -> Iterator[LiveService]:
    """Encoder and decoder share a GPU, in profile split as two processes."""
    with live([minilm_bundle, decoder_bundle], "--provider", "cuda", "--profile", request.param, "--set", "replica_gpus=0.5") as running:
        yield running


def ask(service: LiveService, path: str, body: dict[str, Any] | None = None) -> tuple[Any, dict[str, str]]:
    """The answer and its headers."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(f"{service.url}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer), {name.lower(): value for name, value in answer.headers.items()}


def test_an_encoder_says_that_it_computes_on_the_gpu(on_gpu: LiveService) -> None:
    (vector,), headers = ask(on_gpu, "/embed", {"inputs": "three red birds"})
    assert len(vector) == 384
    assert headers["x-compute-type"] == "gpu+optimized"
    info, _ = ask(on_gpu, "/info")
    assert info["provider"] == CUDA
    assert info["providers"] == {"all-MiniLM-L6-v2": CUDA, "tiny-decoder": CUDA}


def test_a_decoder_beside_it_continues_a_text(on_gpu: LiveService) -> None:
    answer, _ = ask(on_gpu, "/v1/completions", {"model": "tiny-decoder", "prompt": "one", "max_tokens": 3, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 3
