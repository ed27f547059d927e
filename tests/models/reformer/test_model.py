"""A Reformer loaded from a folder gives the numbers of `transformers`, which wrote the folder."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from export.bundle import export_bundle
from export.errors import ExportError
from export.maps.of_text import maps_of_checkpoint
from models.checkpoints.families.reformer import load_reformer
from models.checkpoints.published import load_checkpoint
from models.folders.folder import CheckpointError
from tests.models.checkpoints import tiny

EXACT = 1e-10  # float64: the same formula, summed in another order
TINY = {
    "vocab_size": tiny.V,
    "hidden_size": 24,
    "num_attention_heads": 2,
    "attention_head_size": 8,
    "feed_forward_size": 40,
    "max_position_embeddings": 64,
    "axial_pos_embds": True,
    "axial_pos_shape": [8, 8],
    "axial_pos_embds_dim": [10, 14],
    "attn_layers": ["local", "lsh", "local", "lsh"],
    "lsh_attn_chunk_length": 8,
    "local_attn_chunk_length": 8,
    "num_buckets": 6,
    "num_hashes": 1,
    "hash_seed": 3,
    "hidden_act": "relu",
    "is_decoder": True,
    "pad_token_id": 0,
}
CASES = {
    "causal": ("ReformerModel", {}),
    "causal language model": ("ReformerModelWithLMHead", {"hidden_act": "gelu"}),
    "both ways": ("ReformerModel", {"is_decoder": False, "layer_norm_eps": 1e-3}),
    "masked language model": ("ReformerForMaskedLM", {"is_decoder": False}),
    "chunks after, one table": (
        "ReformerModel",
        {
            "is_decoder": False,
            "axial_pos_embds": False,
            "lsh_num_chunks_after": 1,
            "local_num_chunks_before": 0,
            "local_num_chunks_after": 1,
        },
    ),
    "factors, chunks of two sizes": ("ReformerModel", {"num_buckets": [4, 6], "local_attn_chunk_length": 4}),
    "three rounds": ("ReformerModel", {"num_hashes": 3}),
    "three rounds, both ways": ("ReformerModel", {"num_hashes": 3, "is_decoder": False, "attn_layers": ["lsh", "lsh"]}),
}


def compared(case: str, lengths: Sequence[int], dtype: torch.dtype, folder: Path) -> dict[int, float]:
    """The largest difference from transformers on two texts of N tokens, for each N."""
    model_class, changes = CASES[case]
    reference = tiny.build(model_class, TINY | changes)
    ours = load_reformer(tiny.save(reference, folder), dtype=dtype)
    inner, found = getattr(reference.to(dtype), "reformer", reference), {}
    for N in lengths:
        ids, mask = texts(N)
        expected = inner(input_ids=ids, attention_mask=mask).last_hidden_state
        if inner is not reference:  # its head, with the bias of the checkpoint, which transformers left out before 5.24
            expected = F.linear(expected, reference.lm_head.decoder.weight, reference.lm_head.bias)
        assert expected.std() > 0.1, "a reference that says nothing proves nothing"
        found[N] = float((ours(ids, mask) - expected).abs().max())
    return found


def texts(N: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, tiny.V, (2, N), generator=torch.Generator().manual_seed(N))
    return ids, torch.ones_like(ids)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_same_numbers_as_transformers(case: str, tmp_path: Path) -> None:
    """With three neighbours in two chunks, transformers counts one of them twice."""
    lengths = [N for N in (1, 5, 8, 13, 24, 40) if N != 13 or "after" not in case]
    assert {N: error for N, error in compared(case, lengths, torch.float64, tmp_path).items() if error > EXACT} == {}


@pytest.mark.parametrize("layer", ["lsh", "local"])
@pytest.mark.parametrize("case", ["three rounds", "both ways"])
@torch.no_grad()
def test_a_row_gets_what_it_gets_alone(case: str, layer: str, tmp_path: Path) -> None:
    model_class, changes = CASES[case]
    changes = changes | {"attn_layers": [layer, layer]}
    model = load_reformer(tiny.save(tiny.build(model_class, TINY | changes), tmp_path), dtype=torch.float64)
    ids, mask = texts(40)
    mask[1, 21:] = 0
    y = model(ids, mask)
    assert (y[1:, :21] - model(ids[1:, :21], mask[1:, :21])).abs().max() <= EXACT


@pytest.mark.parametrize("architecture", ["ReformerModel", "ReformerModelWithLMHead", "ReformerForMaskedLM"])
@torch.no_grad()
def test_a_folder_is_an_encoder_with_pooling(architecture: str, tmp_path: Path) -> None:
    """Of the model inside, where it has a head: the mean of its token vectors, which are 2 D wide."""
    folder = tiny.save(tiny.build(architecture, TINY | {"is_decoder": architecture == "ReformerModelWithLMHead"}), tmp_path)
    checkpoint = load_checkpoint(folder, dtype=torch.float64)
    assert (checkpoint.kind, checkpoint.architecture, checkpoint.max_tokens) == ("encoder", architecture, TINY["max_position_embeddings"])
    ids, mask = texts(24)
    mask[1, 9:] = 0
    tokens = load_reformer(folder, dtype=torch.float64, logits=False)(ids, mask)
    mean = tokens[1, :9].mean(0)
    output = checkpoint.model(ids, mask)
    assert output.embedding.shape == (2, 2 * TINY["hidden_size"])
    assert (output.pooled[1] - mean).abs().max() <= EXACT
    assert (output.embedding[1] - mean / mean.norm()).abs().max() <= EXACT
    with pytest.raises(CheckpointError, match="attention='linear' cannot replace the checkpoint's lsh"):
        load_checkpoint(folder, attention="linear")


def test_it_is_exported(tmp_path: Path) -> None:
    """As any encoder is, but for maps; the export holds the graph against torch at every size, with padding and rows without a token.
    The graph of LSH is in tests/export/test_layers.py."""
    settings = TINY | {"is_decoder": False, "attn_layers": ["local"]}
    folder = tiny.save(tiny.build("ReformerModel", settings), tmp_path / "reformer")
    manifest = export_bundle(folder, tmp_path / "bundle")
    assert (manifest.kind, manifest.width, manifest.source.attention) == ("encoder", 2 * TINY["hidden_size"], "lsh")
    assert manifest.parity.max_abs_error <= 1e-4
    assert {(1, 1), (5, 17), (2, 64)} <= set(manifest.parity.shapes)
    assert "packed" not in manifest.graph.optimisation
    with pytest.raises(ExportError, match="ReformerModel has no attention maps"):
        export_bundle(folder, tmp_path / "maps", maps=True)
    with pytest.raises(ExportError, match="ReformerModel has no attention maps"):
        maps_of_checkpoint(folder, "w3 w4")


@torch.no_grad()
def test_without_a_seed_the_rotations_are_our_own(tmp_path: Path) -> None:
    """Drawn once: the same model twice, another one in each layer."""
    reference = tiny.build("ReformerModel", TINY | {"hash_seed": None})
    first, second = (load_reformer(tiny.save(reference, tmp_path)) for _ in range(2))
    rotations = [first.blocks.blocks[i].F.layer.rotations for i in (1, 3)]
    assert not torch.equal(*rotations)
    assert torch.equal(first(*texts(40)), second(*texts(40)))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    settings = json.loads((tiny.save(tiny.build("ReformerModel", TINY), tmp_path) / "config.json").read_text())
    for changes, message in (
        ({"num_buckets": None}, "no 'num_buckets'"),
        ({"attn_layers": ["lsh", "global"]}, "layers hold 'global', which is not one of lsh, local"),
        ({"axial_pos_embds_dim": [10, 10]}, r"axial_widths=\(10, 10\) must add up to d_model=24"),
        ({"axial_pos_shape": [4, 8]}, r"axial_shape=\(4, 8\) has fewer places than n_positions=64"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not supported"),
        ({"model_type": "bert"}, "model_type='bert' is not supported"),
        ({"feed_forward_size": 41}, r"has shape \(40, 24\), but config.json makes it \(41, 24\)"),
        ({"attn_layers": ["local", "lsh", "local"]}, "unexpected in the weights"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(CheckpointError, match=message):
            load_reformer(tmp_path)


def test_a_text_that_is_too_long_is_refused(tmp_path: Path) -> None:
    model = load_reformer(tiny.save(tiny.build("ReformerModel", TINY), tmp_path))
    with pytest.raises(ValueError, match="N=65 tokens, but the model has n_positions=64"):
        model(*texts(65))
