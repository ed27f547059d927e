"""A Qwen3.5 checkpoint as `transformers` writes it: exported and served where its state is of constant size, refused where it grows."""

from pathlib import Path

import pytest
import torch
import transformers

from export import contract
from export.bundle import export_bundle
from export.errors import ExportError
from service.generation.engine import GeneratorEngine, GeneratorLimits
from service.generation.request import GenerationRequest, Sampling
from service.generation.sampling.grammar import Grammars
from service.generation.session import OnnxStepSession
from service.generation.text import Vocabulary
from service.telemetry.metrics import GeneratorMetrics, Metrics
from tests.decoders import byte_tokenizer

V = 256
SETTINGS = {
    "vocab_size": V,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "max_position_embeddings": 512,
}
N_CONTINUED = 50


def saved(folder: Path, layer_types: list[str]) -> transformers.PreTrainedModel:
    """A model with random weights, and its folder."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**SETTINGS, num_hidden_layers=len(layer_types), layer_types=layer_types)
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.1 if "proj" in name else 0.3)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def continued(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """Without its cache, which asks the layers of full attention how long the text is."""
    tokens = torch.tensor([prompt])
    whole = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=N_CONTINUED, do_sample=False, use_cache=False)
    return whole[0, len(prompt) :].tolist()


async def test_the_engine_continues_as_transformers_does(tmp_path: Path) -> None:
    model = saved(tmp_path / "checkpoint", ["linear_attention"] * 3)
    manifest = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    assert manifest.decoder is not None
    assert manifest.decoder.exact
    prompts = [[*b"def f(x):"], [7], [*range(100)]]
    expected = [continued(model, prompt) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 20, "a model that repeats itself proves little"

    engine = GeneratorEngine(
        OnnxStepSession(tmp_path / "bundle", manifest, threads=1),
        Vocabulary(tmp_path / "bundle" / contract.TOKENIZER),
        eos_token_ids=(),
        grammars=Grammars(tmp_path / "bundle" / contract.TOKENIZER, ()),
        numerics="0",
        limits=GeneratorLimits(slots=3),
        metrics=GeneratorMetrics(Metrics(), "qwen"),
    )
    engine.start()
    try:
        greedy = Sampling(seed=0, temperature=0)
        runs = [engine.submit(GenerationRequest(prompt=tuple(prompt), sampling=greedy, max_tokens=N_CONTINUED)) for prompt in prompts]
        assert [[token async for delta in run for token in delta.token_ids] for run in runs] == expected
    finally:
        await engine.stop()


def test_full_attention_is_refused_by_the_number_of_its_layer(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", [*["linear_attention"] * 3, "full_attention"] * 2)
    with pytest.raises(ExportError, match=r"layer 3 of 8, counted from 0 \(and 1 more\), is full attention"):
        export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
