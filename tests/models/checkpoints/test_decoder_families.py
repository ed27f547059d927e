"""Every family of decoders gives the logits of `transformers`, from a folder that `transformers` has written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from models.checkpoints.decoder import load_decoder
from models.checkpoints.families import DECODERS
from models.decoder.model import Decoder, DecoderConfig
from models.folders.folder import CheckpointError, JsonSettings
from tests.models.checkpoints import tiny

V, N = 97, 120
N_TRAINED = 64  # longest text of the training, so that the texts of the tests are beyond it
WITHIN = 1e-4  # float32, 120 tokens, logits of a few units

TEXT = {
    "vocab_size": V,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24, "patch_size": 4}
ROPE = {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}

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
    "yarn-factor": {"rope_type": "yarn", "factor": 7.0, "attention_factor": 0.8, "original_max_position_embeddings": N_TRAINED},
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

# id: (class of transformers, its settings)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": ("LlamaForCausalLM", {**SMOLLM2, "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}}),
    "llama-biases": ("LlamaForCausalLM", {**LLAMA, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "llama-multi-head": ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 8, "hidden_act": "gelu_pytorch_tanh"}),
    "mistral-window": ("MistralForCausalLM", {**LLAMA, "sliding_window": 30}),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2ForCausalLM", QWEN2),
    "qwen2-windows": ("Qwen2ForCausalLM", {**QWEN2, "use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", QWEN3),
    "qwen3-windows-biases": (
        "Qwen3ForCausalLM",
        {
            **QWEN3,
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 30,
            "layer_types": LAYER_TYPES,
        },
    ),
    "gemma": ("GemmaForCausalLM", GEMMA),
    **{
        f"llama-{name}": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": {"rope_theta": 500.0, **rope}})
        for name, rope in SCALINGS.items()
    },
    "qwen3_5": ("Qwen3_5ForCausalLM", TEXT),
    "qwen3_5-linear": ("Qwen3_5ForCausalLM", {**TEXT, "layer_types": ["linear_attention"] * 4}),
    "qwen3_5-tied-kernel-rope-eps": (
        "Qwen3_5ForCausalLM",
        {
            **TEXT,
            "layer_types": ["full_attention", "linear_attention"],
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 3,
            "linear_num_value_heads": 2,
            "num_key_value_heads": 4,
            "rope_parameters": ROPE,
            "rms_norm_eps": 1e-3,
        },
    ),
    "qwen3_5-vision": ("Qwen3_5ForConditionalGeneration", {"text_config": TEXT, "vision_config": VISION}),
}


def build(case: str) -> nn.Module:
    """A model of `transformers` in which every parameter is drawn, those that begin as 0 or 1 too; logits are of a few units."""
    model_class, settings = CASES[case]
    torch.manual_seed(0)
    cls = getattr(transformers, model_class)
    model = cls(cls.config_class(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if model_class.startswith("Qwen3_5"):
                parameter.normal_(std=0.1 if "proj" in name else 0.3)
                parameter.add_(1.0 if name.endswith("linear_attn.norm.weight") else 0.0)
                parameter.sub_(3.0 if name.endswith("dt_bias") else 0.0)  # half-lives of about 15 tokens
                continue
            linear = parameter.dim() > 1 and "embed" not in name
            # Embeddings are small, because a model whose tokens stand out repeats them.
            parameter.normal_(std=2 * parameter.shape[1] ** -0.5 if linear else 0.05 if "embed" in name else 0.3)
            parameter.add_(1.0 if "norm" in name and not model_class.startswith("Gemma") else 0.0)
    return model


def load(case: str, folder: Path) -> tuple[nn.Module, Decoder]:
    reference = build(case)
    return reference, load_decoder(tiny.save(reference, folder)).model


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_same_logits_as_transformers(case: str, tmp_path: Path) -> None:
    """Whole; in pieces and then token by token; and rows of unequal lengths, padded."""
    reference, decoder = load(case, tmp_path)
    given = torch.randint(V, (2, N), generator=torch.Generator().manual_seed(1))
    theirs = reference(input_ids=given, use_cache=False).logits
    assert theirs.std() > 0.5, "a reference that says nothing proves nothing"
    assert (decoder(given)[0] - theirs).abs().max() <= WITHIN

    if not decoder.config.rotary.depends_on_length:
        begin, states = 0, None
        for size in (70, 30, *[1] * 20):
            rest, states = decoder(given[:, begin : begin + size], states=states, positions=torch.full((2,), begin))
            assert (rest - theirs[:, begin : begin + size]).abs().max() <= WITHIN
            begin += size

    padded, _ = decoder(given, torch.tensor([N, 63]))
    short = reference(input_ids=given[1:, :63], use_cache=False).logits
    assert (padded[0] - theirs[0]).abs().max() <= WITHIN
    assert (padded[1, :63] - short[0]).abs().max() <= WITHIN


def test_a_state_is_of_constant_size_where_no_layer_is_full_attention(tmp_path: Path) -> None:
    _, decoder = load("mistral-window", tmp_path / "window")
    assert not decoder.grows
    assert decoder.init_states(1)[0]["k"].shape == (1, 2, 29, 32)
    assert not load("qwen3_5-linear", tmp_path / "linear")[1].grows
    assert load("mistral", tmp_path / "full")[1].grows
    assert load("qwen2-windows", tmp_path / "both")[1].config.layers == ("causal_softmax", "sliding_window")


@torch.no_grad()
def test_norms_that_count_from_zero_keep_their_digits_in_half_precision(tmp_path: Path) -> None:
    """1 + w is not a bfloat16 for a small w."""
    reference = build("qwen3_5")
    reference.model.norm.weight.fill_(2**-10)
    decoder = load_decoder(tiny.save(reference.bfloat16(), tmp_path)).model
    assert (decoder.final_norm.weight == 1 + 2**-10).all()


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
        ("Qwen3_5", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("Qwen3_5", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("Qwen3_5", {"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ("Qwen3_5", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn' is not supported"),
        ("Qwen3_5", {"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ("Qwen3_5", {"layer_types": ["linear_attention"]}, "layer_types has 1 entries for num_hidden_layers=4"),
        ("Qwen3_5", {"linear_num_key_heads": None}, "has no 'linear_num_key_heads'"),
        ("Gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
    ],
)
def test_settings_that_are_not_supported(family: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Also in the folder of a model, where an error names the file."""
    (tmp_path / "config.json").write_text(
        json.dumps({**(TEXT if family == "Qwen3_5" else LLAMA), "architectures": [f"{family}ForCausalLM"], **change})
    )
    with pytest.raises(CheckpointError, match=message):
        load_decoder(tmp_path)


def test_the_head_that_predicts_a_second_token_is_left_out(tmp_path: Path) -> None:
    """What else does not fit is refused: test_decoder_checkpoint.py."""
    weights = tiny.save(build("qwen3_5"), tmp_path) / "model.safetensors"
    save_file({**load_file(weights), "mtp.norm.weight": torch.zeros(24)}, weights)
    load_decoder(tmp_path)


def test_config_without_layer_types_has_a_full_layer_every_fourth(tmp_path: Path) -> None:
    folder = tiny.save(build("qwen3_5"), tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "layer_types": None, "full_attention_interval": 4}))
    assert load_decoder(folder).config.layers == ("gated_delta", "gated_delta", "gated_delta", "gated_softmax")
