"""Decoders as `transformers` writes them: exported and served where their state is of constant size, refused where it grows or would depend
on how a prompt is cut."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from export import contract
from export.bundle import export_bundle
from export.errors import ExportError
from models.parts.rotary import RotaryScaling
from service.generation.engine import GeneratorEngine, GeneratorLimits
from service.generation.request import GenerationRequest, Sampling
from service.generation.sampling.grammar import Grammars
from service.generation.session import OnnxStepSession
from service.generation.text import Vocabulary
from service.telemetry.metrics import GeneratorMetrics, Metrics
from tests.decoders import byte_tokenizer, tiny_decoder
from tests.models.checkpoints.test_decoder_families import TEXT

V, WINDOW, N_CONTINUED = 256, 16, 40
MISTRAL = {  # every layer has a window, and three heads share keys
    "vocab_size": V,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "sliding_window": WINDOW,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32},
}


def mistral(folder: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**MISTRAL)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.05 if "embed" in name else 2 * parameter.shape[-1] ** -0.5)
    return saved(model, folder)


def qwen(folder: Path, layer_types: tuple[str, ...] = ("linear_attention",) * 3) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        **TEXT | {"vocab_size": V, "num_hidden_layers": len(layer_types)}, layer_types=list(layer_types)
    )
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.1 if "proj" in name else 0.3)
    return saved(model, folder)


def saved(model: transformers.PreTrainedModel, folder: Path) -> transformers.PreTrainedModel:
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def continued(model: transformers.PreTrainedModel, prompt: list[int], **how: object) -> list[int]:
    tokens = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": N_CONTINUED, "do_sample": False, "eos_token_id": None}
    return model.generate(tokens, **given, **how)[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("made", "how", "longest", "first_state"),
    [
        (mistral, {}, 50, (2, WINDOW - 1, 8)),  # beyond the window and the length of the training
        (qwen, {"use_cache": False}, 100, None),  # its cache asks the layers of full attention how long the text is
    ],
    ids=["mistral", "qwen3_5"],
)
async def test_the_engine_continues_as_transformers_does(
    made: Callable[[Path], transformers.PreTrainedModel], how: dict, longest: int, first_state: tuple[int, ...] | None, tmp_path: Path
) -> None:
    model = made(tmp_path / "checkpoint")
    prompts = [[*b"def f(x):"], [7], [*range(longest)]]
    expected = [continued(model, prompt, **how) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 20, "a model that repeats itself proves little"

    manifest = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    assert manifest.decoder is not None
    assert manifest.decoder.exact
    assert first_state in (None, manifest.decoder.states[0].shape)
    engine = GeneratorEngine(
        OnnxStepSession(tmp_path / "bundle", manifest, threads=1),
        Vocabulary(tmp_path / "bundle" / contract.TOKENIZER),
        eos_token_ids=(),
        grammars=Grammars(tmp_path / "bundle" / contract.TOKENIZER, ()),
        numerics="0",
        limits=GeneratorLimits(slots=3),
        metrics=GeneratorMetrics(Metrics(), "published"),
    )
    engine.start()
    try:
        greedy = Sampling(seed=0, temperature=0)
        runs = [engine.submit(GenerationRequest(prompt=tuple(prompt), sampling=greedy, max_tokens=N_CONTINUED)) for prompt in prompts]
        assert [[token async for delta in run for token in delta.token_ids] for run in runs] == expected
    finally:
        await engine.stop()


def test_dynamic_scaling_is_refused_because_a_state_would_depend_on_the_cuts(tmp_path: Path) -> None:
    scaling = RotaryScaling(kind="dynamic", factor=2.0, original_positions=32)
    checkpoint = tiny_decoder(tmp_path / "checkpoint", layers="sliding_window", window=9, rotary_scaling=scaling)
    with pytest.raises(ExportError, match=r"the rotary scaling is dynamic, .*; supported: linear, llama3, yarn"):
        export_bundle(checkpoint, tmp_path / "bundle")


def test_full_attention_is_refused_by_the_number_of_its_layer(tmp_path: Path) -> None:
    qwen(tmp_path / "checkpoint", (*("linear_attention",) * 3, "full_attention") * 2)
    with pytest.raises(ExportError, match=r"layer 3 of 8, counted from 0 \(and 1 more\), is full attention"):
        export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
