"""A GGUF file is unpacked as the Hugging Face folder that transformers makes of it: the same logits and settings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM

from models.checkpoints.decoder import load_decoder
from models.checkpoints.gguf.file import GgufFile, gguf_file
from models.checkpoints.gguf.header import SUPPORTED
from models.checkpoints.gguf.unpack import unpack
from models.folders.folder import CheckpointError
from tests.models.checkpoints.gguf.tiny import BYTE_LEVEL, tiny_gguf

WITHIN = 1e-4  # float32: two layers, logits of a few units


def unpacked(file: Path) -> Path:
    folder = file.with_suffix("")
    unpack(file, folder)
    return folder


def assert_the_same_logits(file: Path, n_texts: int = 20) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    ours = load_decoder(unpacked(file)).model
    random = np.random.default_rng(1)
    with torch.no_grad():
        for n in random.integers(1, 60, n_texts):
            tokens = torch.from_numpy(random.integers(0, len(BYTE_LEVEL), (1, n)))
            wanted = theirs(tokens).logits
            assert wanted.abs().max() > 0.1
            torch.testing.assert_close(ours(tokens)[0], wanted, rtol=0, atol=WITHIN)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1", "Q6_K"])
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """The rows of q and k have another order in the file, of pairs that are rotated together."""
    assert_the_same_logits(tiny_gguf(tmp_path / "tiny.gguf", kind))


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", False), ("qwen3", True), ("llama", False)])
def test_logits_of_every_architecture_are_those_of_transformers(architecture: str, tied: bool, tmp_path: Path) -> None:
    assert_the_same_logits(tiny_gguf(tmp_path / "tiny.gguf", "Q8_0", architecture=architecture, tied=tied))


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_type_is_read_as_the_package_dequantises_it(kind: str, tmp_path: Path) -> None:
    file = GgufFile(tiny_gguf(tmp_path / "tiny.gguf", kind))
    tensor = next(tensor for tensor in file.tensors if tensor.name == "blk.1.ffn_down.weight")
    wanted = dequantize(tensor.data, GGMLQuantizationType[kind]).reshape(256, 512)
    assert wanted.std() > 0.01
    assert np.array_equal(tensor.weights(), wanted)
    assert torch.equal(tensor.values().float(), torch.from_numpy(wanted.astype(np.float32)))
    assert tensor.values().dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)


def test_the_folder_has_the_settings_the_template_and_the_end_tokens(tmp_path: Path) -> None:
    checkpoint = load_decoder(unpacked(tiny_gguf(tmp_path / "tiny.gguf")))
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.eos_token_ids == (0, 1)
    assert checkpoint.bos_token_id == 0
    assert "<|turn|>" in str(checkpoint.chat_template)
    config = checkpoint.config
    assert (config.d_model, config.n_layers, config.n_heads, config.d_feedforward, config.tied) == (256, 2, 4, 512, True)
    assert (config.rotary_base, config.norm_eps) == (100_000.0, pytest.approx(1e-5))


def test_weights_are_split_among_files_of_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny_gguf(tmp_path / "tiny.gguf")
    whole = load_decoder(unpacked(file)).model.state_dict()
    monkeypatch.setattr("models.checkpoints.gguf.unpack.SHARD_BYTES", 600_000)
    unpack(file, tmp_path / "split")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 3
    split = load_decoder(tmp_path / "split").model.state_dict()
    assert all(torch.equal(split[name], tensor) for name, tensor in whole.items())
    assert json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())["metadata"]["total_size"] > 4_000_000


def test_a_mistral_with_a_window_keeps_it(tmp_path: Path) -> None:
    folder = unpacked(tiny_gguf(tmp_path / "tiny.gguf", fields={"llama.attention.sliding_window": 64}))
    config = load_decoder(folder).config
    assert (set(config.layer_names), config.layer_options["sliding_window"]["window"]) == ({"sliding_window"}, 64)


def test_a_folder_with_one_gguf_file_stands_for_it(tmp_path: Path) -> None:
    assert gguf_file(tmp_path) is None
    file = tiny_gguf(tmp_path / "tiny.gguf")
    assert gguf_file(tmp_path) == gguf_file(file) == file
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files; give the path of one, e\.g\. .*other\.gguf"):
        gguf_file(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert gguf_file(tmp_path) is None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"architecture": "gpt2"}, "the architecture 'gpt2' is not supported; supported: llama, qwen2, qwen3"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "scaling.type='yarn': scaled rotary positions are not supported"),
        ({"tensors": {"rope_freqs.weight": np.ones(32, np.float32)}}, "rope_freqs.weight: scaled rotary positions are not supported"),
        ({"fields": {"llama.rope.dimension_count": 32}}, "dimension_count=32, but a head has 64 columns"),
        ({"tensors": {"blk.0.extra.weight": np.ones(32, np.float32)}}, "the tensor 'blk.0.extra.weight' is not known"),
        ({"tensors": {"output_norm.weight": None}}, "model.norm.weight is missing from the weights"),
        ({"tensors": {"output_norm.weight": np.ones(32, np.float32)}}, r"model.norm.weight has shape \(32,\)"),
        ({"fields": {"llama.attention.key_length": "x"}}, "key_length='x' should be of type int"),
        ({"fields": {"llama.attention.key_length": 10**6}}, "has shape"),
    ],
)
def test_an_unsupported_model_is_refused_in_one_sentence(how: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        load_decoder(unpacked(tiny_gguf(tmp_path / "tiny.gguf", **how)))
