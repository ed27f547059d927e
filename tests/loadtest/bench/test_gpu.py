"""The benchmark of the graphs for GPUs runs through on a CPU, and says what is missing for a GPU."""

import json
from pathlib import Path

import onnxruntime as ort
import pytest
from typer.testing import CliRunner

from loadtest.bench import gpu
from loadtest.errors import LoadtestError
from service.runtime.onnx import CUDA

SHORT = ["--provider", "cpu", "--seconds", "0.01", "--no-http"]


def test_it_runs_through_on_a_cpu(gpu_bundle: Path, gpu_decoder: Path, tmp_path: Path) -> None:
    asked = ["--encoder", str(gpu_bundle), "--sizes", "1x8,3x64", "--decoder", str(gpu_decoder), "--rows", "1,3", "--out", str(tmp_path)]
    ended = CliRunner().invoke(gpu.app, [*asked, *SHORT], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["encoder"]["equal"] > 0.999
    assert found["encoder"]["assigned"]["LayerNormalization"] == 7
    assert list(found["encoder"]["rates"]) == ["1x8", "3x64"]
    assert found["decoder"]["assigned"]["LinearAttention"] == 2
    assert list(found["decoder"]["rates"]) == ["1", "3"]
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("# On a CPU: these are no figures of a GPU")
    assert "| 3x64 |" in page
    assert "All nodes are on cpu: " in page


def test_the_share_over_http_is_of_the_best_rate() -> None:
    about = {"provider": "cuda", "gpu": "X 1", "date": "d", "cpus": 1, "cpu": "c", "commit": "1", "command": ["a"], "versions": {"b": "2"}}
    rates = {"1x8": {"tokens_per_s": 50.0}, "2x8": {"tokens_per_s": 200.0}}
    http = {"texts_per_s": 1.0, "tokens_per_s": 140.0, "refused": 3}
    found = {"encoder": {"equal": 1.0, "assigned": {"Add": 1}, "rates": rates}, "http": http}
    page = gpu.page(about, found)
    assert page.startswith("# On X 1\n")
    assert "0.70 of the best above; 3 requests refused" in page
    assert "gateways" not in page
    split = gpu.page(about, found | {"http_split": {"gateways": 8, "texts_per_s": 2.0, "tokens_per_s": 180.0, "refused": 0}})
    assert "## Over HTTP, 8 gateways before one encoder\n\n2 texts/s, 180 tokens/s, 0.90 of the best above" in split


def test_without_a_gpu_it_says_what_to_install(gpu_bundle: Path) -> None:
    if CUDA in ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(LoadtestError, match=r"encoder on cuda: .*install onnxruntime-gpu in its place"):
        gpu.in_process("encoder", gpu_bundle, gpu.Provider.cuda, ["1x8"], 0.01)


def test_a_bundle_without_a_graph_for_gpus_is_refused(decoder_bundle: Path) -> None:
    with pytest.raises(LoadtestError, match=r"has no graph for GPUs: export it with `attnserve export --gpu`"):
        gpu.in_process("decoder", decoder_bundle, gpu.Provider.cpu, ["1"], 0.01)
