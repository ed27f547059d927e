"""The blocks of a GGUF file are taken over into a graph: the same weights, without rounding where the graph has the same form."""

from pathlib import Path

import numpy as np
import pytest
import torch

from export import contract
from export.blocks.blocks import below_each_other, rounded
from export.blocks.stored import StoredBlocks, blocks_of
from export.bundle import export_bundle
from export.errors import ExportError
from models.checkpoints.decoder import load_decoder
from models.checkpoints.gguf.file import GgufFile
from models.checkpoints.gguf.unpack import unpack
from tests.decoders import tiny_decoder
from tests.models.checkpoints.gguf.tiny import BYTE_LEVEL, HIDDEN, WIDTH, tiny_gguf

WINDOW = {"llama.attention.sliding_window": 64}
BITS = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_K": 8, "Q6_K": 8}


@pytest.mark.parametrize("kind", BITS)
def test_the_weights_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    file = GgufFile(tiny_gguf(tmp_path / "tiny.gguf", kind))
    tensor = next(tensor for tensor in file.tensors if tensor.name == "blk.1.ffn_down.weight")
    blocks, wanted = blocks_of(tensor), tensor.weights()
    assert blocks.bits == BITS[kind]
    assert blocks.scales.shape == (WIDTH, HIDDEN // 32)
    largest = np.abs(wanted).max()
    exact = {"Q8_0": 0, "Q4_0": 0, "Q6_K": 1 / 127}.get(kind, 1e-6)
    assert np.abs(blocks.weights() - wanted).max() <= exact * largest


def test_the_rows_are_in_the_order_of_the_loaded_model(tmp_path: Path) -> None:
    """Every matrix of the model is found by its values, also q and k, whose rows have another order in the file."""
    file = tiny_gguf(tmp_path / "tiny.gguf", "Q8_0")
    unpack(file, tmp_path / "folder")
    stored = StoredBlocks(file)
    matrices = [p for name, p in load_decoder(tmp_path / "folder").model.named_parameters() if p.dim() == 2]
    assert len(matrices) == 1 + 2 * 7
    for matrix in matrices:
        weights = matrix.detach().numpy()
        assert np.array_equal(stored(weights).weights(), weights)


def test_joined_matrices_are_found_and_get_the_bits_of_the_widest(tmp_path: Path) -> None:
    """Graphs compute q, k and v in one product."""
    file = tiny_gguf(tmp_path / "tiny.gguf", "Q4_1")
    unpack(file, tmp_path / "folder")
    layer = load_decoder(tmp_path / "folder").model.blocks[0].layer
    joined = torch.cat([layer.to_q.weight, layer.to_k.weight, layer.to_v.weight]).detach().numpy()
    stored = StoredBlocks(file)
    found = stored(joined)
    assert found is not None
    assert found.bits == 4
    assert np.abs(found.weights() - joined).max() <= 1e-6
    assert stored(joined[:-1]) is None
    assert stored(np.concatenate([joined, np.ones_like(joined[:1])])) is None
    wide = below_each_other([found, rounded(joined, 8)])
    assert wide.bits == 8
    assert np.array_equal(wide.weights(), np.concatenate([found.weights(), rounded(joined, 8).weights()]))


def test_a_bundle_keeps_the_blocks_of_its_file(tmp_path: Path) -> None:
    """No matrix is left in float32, the bundle is about as large as the file, and its answers are exact."""
    file = tiny_gguf(tmp_path / "tiny.gguf", "Q4_1", fields=WINDOW)
    manifest = export_bundle(tmp_path, tmp_path / "bundle", precision="as-stored")
    decoder = manifest.decoder
    assert decoder is not None
    assert decoder.exact
    assert decoder.bits_per_byte == pytest.approx(decoder.fp32_bits_per_byte, rel=1e-4)
    assert decoder.answers is not None
    assert decoder.answers.measured.same == decoder.answers.prompts
    products, rounded_inputs = 1 + 2 * 7, 1 + 2 * 4
    assert manifest.graph.operators["MatMulNBits"] == products + rounded_inputs
    source = manifest.source
    assert source is not None
    assert (source.checkpoint, source.weights_sha256) == ("tiny", contract.sha256(file))
    weights = (tmp_path / "bundle" / "model.onnx.data").stat().st_size
    parameters = len(BYTE_LEVEL) * WIDTH + 2 * (2 * WIDTH * WIDTH + 2 * WIDTH * 128 + 3 * WIDTH * HIDDEN)
    assert weights < 1.15 * parameters * 6 / 8  # 4 bits, and a scale and an offset in float32 for 32 weights


def test_only_a_gguf_file_has_blocks_to_keep(tmp_path: Path) -> None:
    folder = tiny_decoder(tmp_path / "decoder")
    with pytest.raises(
        ExportError, match=r"precision='as-stored' keeps the blocks of a GGUF file, and .*decoder is none; choose int8 or int4"
    ):
        export_bundle(folder, tmp_path / "bundle", precision="as-stored")
