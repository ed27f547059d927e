"""Every family of decoders gives the logits of `transformers`, from a folder that `transformers` has written."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.checkpoints.decoder import load_decoder
from models.checkpoints.families import DECODERS
from models.folders.folder import CheckpointError, JsonSettings
from tests.models.checkpoints import tiny

V, N = 60, 200
WITHIN = 1e-4  # float32, 200 tokens, logits of a few units

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

# id: (class of transformers, its settings)
CASES = {
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
            parameter.normal_(std=0.1 if "proj" in name else 0.3)
            if name.endswith("linear_attn.norm.weight"):
                parameter.add_(1.0)
            if name.endswith("dt_bias"):
                parameter.sub_(3.0)  # half-lives of about 15 tokens
    return model


def tokens(B: int = 2) -> Tensor:
    return torch.randint(V, (B, N), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_same_logits_as_transformers(case: str, tmp_path: Path) -> None:
    """Whole; a prompt and then token by token; and rows of unequal lengths, padded."""
    reference = build(case)
    decoder, given = load_decoder(tiny.save(reference, tmp_path)).model, tokens()
    theirs = reference(input_ids=given, use_cache=False).logits
    assert theirs.std() > 0.5, "a reference that says nothing proves nothing"

    whole, states = decoder(given)
    assert (whole - theirs).abs().max() <= WITHIN

    begin = 150
    _, states = decoder(given[:, :begin])
    for t in range(begin, N):
        step, states = decoder(given[:, t : t + 1], states=states, positions=torch.full((2,), t))
        assert (step[:, 0] - theirs[:, t]).abs().max() <= WITHIN

    lengths = torch.tensor([N, 63])
    padded, _ = decoder(given, lengths)
    short = reference(input_ids=given[1:, :63], use_cache=False).logits
    assert (padded[0] - theirs[0]).abs().max() <= WITHIN
    assert (padded[1, :63] - short[0]).abs().max() <= WITHIN


def test_a_checkpoint_of_linear_layers_alone_has_a_state_of_constant_size(tmp_path: Path) -> None:
    decoder = load_decoder(tiny.save(build("qwen3_5-linear"), tmp_path / "linear")).model
    assert not decoder.grows
    assert not decoder.takes_positions
    sizes = [{name: tensor.shape for name, tensor in state.items()} for state in decoder.init_states(2)]
    _, states = decoder(tokens())
    assert [{name: tensor.shape for name, tensor in state.items()} for state in states] == sizes
    assert load_decoder(tiny.save(build("qwen3_5"), tmp_path / "hybrid")).model.grows


@torch.no_grad()
def test_norms_that_count_from_zero_keep_their_digits_in_half_precision(tmp_path: Path) -> None:
    """1 + w is not a bfloat16 for a small w."""
    reference = build("qwen3_5")
    reference.model.norm.weight.fill_(2**-10)
    decoder = load_decoder(tiny.save(reference.bfloat16(), tmp_path)).model
    assert (decoder.final_norm.weight == 1 + 2**-10).all()


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn' is not supported"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries for num_hidden_layers=4"),
        ({"linear_num_key_heads": None}, "has no 'linear_num_key_heads'"),
    ],
)
def test_settings_that_are_not_supported(change: dict, message: str) -> None:
    settings = JsonSettings({**TEXT, "layer_types": None, **change}, Path("config.json"))
    with pytest.raises(CheckpointError, match=message):
        DECODERS["Qwen3_5ForCausalLM"].decoder_config(settings)


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
