"""The softmax twin: torch's numbers from a cache that is written in place."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from export.errors import ExportError
from export.kv_cache.graph import export_cached
from export.kv_cache.session import CachedSession
from models.checkpoints.decoder import load_decoder
from tests.decoders import tiny_decoder


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twin")
    return export_cached(tiny_decoder(folder / "checkpoint", layers="causal_softmax", n_layers=2), folder / "twin")


def test_prompt_pieces_and_steps_give_torchs_logits(twin: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 256, (1, 90))
    with torch.inference_mode():
        want = load_decoder(twin.parent.with_name("checkpoint")).model(torch.from_numpy(tokens))[0][0].numpy()
    session = CachedSession(twin, rows=1, capacity=90, threads=1)
    ends = [40, 70, *range(71, 91)]
    for begin, end in zip([0, *ends], ends, strict=False):
        assert np.abs(session.run(tokens[:, begin:end])[0] - want[end - 1]).max() < 1e-4
    with pytest.raises(ValueError, match="90 \\+ 1 tokens do not fit into a cache of 90"):
        session.run(tokens[:, :1])


def test_a_row_gives_what_it_gives_alone(twin: Path) -> None:
    tokens = np.random.default_rng(2).integers(0, 256, (4, 20))
    together, alone = CachedSession(twin, rows=4, capacity=32, threads=1), CachedSession(twin, rows=1, capacity=32, threads=1)
    assert together.size_bytes == 4 * alone.size_bytes == 4 * (2 * 2 * 16 * 32 * 4)
    for t in range(20):
        assert np.abs(together.run(tokens[:, t : t + 1])[3] - alone.run(tokens[3:, t : t + 1])[0]).max() < 1e-5


def test_the_folder_holds_the_graph_and_nothing_that_is_left_over(twin: Path) -> None:
    assert sorted(file.name for file in twin.parent.iterdir()) == ["model.onnx", "model.onnx.data", "tokenizer.json"]
    operators = [node.op_type for node in onnx.load(twin, load_external_data=False).graph.node]
    assert operators.count("GroupQueryAttention") == 2


def test_a_decoder_with_other_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="only causal_softmax layers"):
        export_cached(tiny_decoder(tmp_path / "checkpoint"), tmp_path / "twin")


def test_learned_positions_are_refused(tmp_path: Path) -> None:
    checkpoint = tiny_decoder(tmp_path / "checkpoint", layers="causal_softmax", positions="learned", n_positions=64)
    with pytest.raises(ExportError, match="n_positions=64 learned positions are a limit, but the cache is for texts of any length"):
        export_cached(checkpoint, tmp_path / "twin")
