"""A Mistral checkpoint as `transformers` writes it: every layer has a window, so it is exported and served as it is."""

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

V, WINDOW, N_CONTINUED = 256, 16, 40
SETTINGS = {
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


async def test_the_engine_continues_as_transformers_does(tmp_path: Path) -> None:
    """Beyond the window and the length of the training, with keys that three heads share."""
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SETTINGS)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.05 if "embed" in name else 2 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "checkpoint")
    byte_tokenizer().save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    prompts = [[*b"def f(x):"], [7], [*range(50)]]
    expected = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        how = {"max_new_tokens": N_CONTINUED, "do_sample": False, "eos_token_id": None}
        expected.append(model.generate(tokens, attention_mask=torch.ones_like(tokens), **how)[0, len(prompt) :].tolist())
    assert len({token for tokens in expected for token in tokens}) > 20, "a model that repeats itself proves little"

    manifest = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    assert manifest.decoder is not None
    assert manifest.decoder.exact
    assert manifest.decoder.states[0].shape == (2, WINDOW - 1, 8)
    engine = GeneratorEngine(
        OnnxStepSession(tmp_path / "bundle", manifest, threads=1),
        Vocabulary(tmp_path / "bundle" / contract.TOKENIZER),
        eos_token_ids=(),
        grammars=Grammars(tmp_path / "bundle" / contract.TOKENIZER, ()),
        numerics="0",
        limits=GeneratorLimits(slots=3),
        metrics=GeneratorMetrics(Metrics(), "mistral"),
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
