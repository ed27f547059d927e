"""The families in the form of Llama: the logits and the texts of `transformers`, in the head ratios of published models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from models.checkpoints.decoder import load_decoder
from models.checkpoints.families import DECODERS
from models.decoder.model import Decoder, DecoderConfig
from models.folders.folder import CheckpointError, JsonSettings
from tests.models.checkpoints import tiny

V, N = 97, 120
N_TRAINED = 64  # longest text of the training, so that the texts of the tests are beyond it
WITHIN = 1e-4  # float32, 120 tokens, logits of a few units

COMMON = {"vocab_size": V, "num_hidden_layers": 2, "intermediate_size": 96, "max_position_embeddings": N_TRAINED, "bos_token_id": 1}
SMOLLM2 = {**COMMON, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
LLAMA = {**COMMON, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}  # 4 query heads share a key, as in Llama 3
QWEN2 = {**COMMON, "hidden_size": 448, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
QWEN3 = {**COMMON, "hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16}
GEMMA = {**COMMON, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32}
LAYER_TYPES = ["sliding_attention", "full_attention"]

SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": N_TRAINED,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": N_TRAINED},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}

# id: (family, settings of transformers)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": ("Llama", {**SMOLLM2, "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}}),
    "llama-biases": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "llama-multi-head": ("Llama", {**LLAMA, "num_key_value_heads": 8, "hidden_act": "gelu_pytorch_tanh"}),
    "mistral-window": ("Mistral", {**LLAMA, "sliding_window": 30}),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", QWEN2),
    "qwen2-windows": ("Qwen2", {**QWEN2, "use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}),
    "qwen3": ("Qwen3", QWEN3),
    "qwen3-windows-biases": (
        "Qwen3",
        {
            **QWEN3,
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 30,
            "layer_types": LAYER_TYPES,
        },
    ),
    "gemma": ("Gemma", GEMMA),
    **{f"llama-{name}": ("Llama", {**LLAMA, "rope_parameters": {"rope_theta": 500.0, **rope}}) for name, rope in SCALINGS.items()},
}
every_case = pytest.mark.parametrize("case", CASES)


def build(case: str) -> nn.Module:
    """A model of `transformers` in which every parameter is drawn, those that begin as 0 or 1 too; logits are of a few units."""
    family, settings = CASES[case]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            linear = parameter.dim() > 1 and "embed" not in name
            # Embeddings are small, because a model whose tokens stand out repeats them.
            parameter.normal_(std=2 * parameter.shape[1] ** -0.5 if linear else 0.05 if "embed" in name else 0.3)
            if "norm" in name and family != "Gemma":
                parameter.add_(1.0)
    return model


def load(case: str, folder: Path) -> tuple[nn.Module, Decoder]:
    reference = build(case)
    return reference, load_decoder(tiny.save(reference, folder)).model


def tokens(B: int = 2) -> Tensor:
    return torch.randint(V, (B, N), generator=torch.Generator().manual_seed(1))


@every_case
@torch.no_grad()
def test_same_logits_as_transformers(case: str, tmp_path: Path) -> None:
    """Whole, in pieces, and rows of unequal lengths."""
    reference, decoder = load(case, tmp_path)
    given = tokens()
    theirs = reference(input_ids=given, use_cache=False).logits
    assert theirs.std() > 0.5, "a reference that says nothing proves nothing"
    assert (decoder(given)[0] - theirs).abs().max() <= WITHIN

    if not decoder.config.rotary.depends_on_length:
        _, states = decoder(given[:, :70])
        rest, _ = decoder(given[:, 70:], states=states, positions=torch.full((2,), 70))
        assert (rest - theirs[:, 70:]).abs().max() <= WITHIN

    padded, _ = decoder(given, torch.tensor([N, 63]))
    short = reference(input_ids=given[1:, :63], use_cache=False).logits
    assert (padded[0] - theirs[0]).abs().max() <= WITHIN
    assert (padded[1, :63] - short[0]).abs().max() <= WITHIN


def test_a_state_is_of_constant_size_where_every_layer_has_a_window(tmp_path: Path) -> None:
    _, decoder = load("mistral-window", tmp_path / "window")
    assert not decoder.grows
    assert decoder.init_states(1)[0]["k"].shape == (1, 2, 29, 32)
    assert load("mistral", tmp_path / "full")[1].grows
    assert load("qwen2-windows", tmp_path / "both")[1].config.layers == ("causal_softmax", "sliding_window")


# Both forms of config.json


def config_of(family: str, settings: dict[str, Any]) -> DecoderConfig:
    return DECODERS[f"{family}ForCausalLM"].decoder_config(JsonSettings(settings, Path("config.json")))


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_settings_of_transformers_4_give_the_same_config(name: str, key: str) -> None:
    """`rope_theta` beside `rope_scaling`, whose type is called `type` in the oldest files."""
    rope = {name: value for name, value in SCALINGS[name].items() if name != "rope_type"} | {key: SCALINGS[name]["rope_type"]}
    old = config_of("Llama", {**LLAMA, "rope_theta": 500.0, "rope_scaling": rope})
    assert old == config_of("Llama", {**LLAMA, "rope_parameters": {"rope_theta": 500.0, **SCALINGS[name]}})
    assert old.rotary_base == 500.0
    assert old.rotary_scaling is not None


def test_settings_without_a_scaling() -> None:
    for rope in ({"rope_scaling": None, "rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}):
        config = config_of("Llama", {**LLAMA, **rope})
        assert (config.rotary_base, config.rotary_scaling) == (500.0, None)
    assert config_of("Llama", LLAMA).rotary_base == 10_000.0


def test_an_original_length_beside_the_scaling_comes_first_and_a_factor_follows_from_it() -> None:
    """As in files of Llama 3 and of long Qwen models that were edited by hand."""
    config = config_of("Llama", {**LLAMA, "rope_scaling": {"type": "yarn"}, "original_max_position_embeddings": 16})
    assert config.rotary_scaling is not None
    assert (config.rotary_scaling.factor, config.rotary_scaling.original_positions) == (4.0, 16)


# What is refused


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("Llama", {"hidden_act": "tanh"}, r"hidden_act='tanh' is not supported \(supported: silu"),
        ("Llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope' is not supported .supported: default"),
        ("Llama", {"rope_scaling": {"type": "linear"}}, "the rotary scaling 'linear' has no factor"),
        ("Llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2' is not accepted"),
        ("Llama", {"rope_scaling": {"type": "llama3", "factor": 2.0}}, "has no 'low_freq_factor'"),
        ("Llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rotary settings by type of layer"),
        ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
        ("Llama", {"num_key_value_heads": 3}, "n_heads=8 is not a multiple of n_kv_heads=3"),
        (
            "Llama",
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config=.* is not supported; use a checkpoint with float",
        ),
        ("Qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=2"),
        ("Qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types has 'chunked_attention'"),
        ("Qwen2", {"layer_types": LAYER_TYPES}, "layer_types has 'sliding_attention', but no sliding_window is in use"),
        ("Gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
    ],
)
def test_settings_that_are_not_supported(family: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Also in the folder of a model, where an error names the file."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": [f"{family}ForCausalLM"], **change}))
    with pytest.raises(CheckpointError, match=message):
        load_decoder(tmp_path)
