"""GAU-α: its equations written out and its size."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.encoder.gau_alpha import GauAlpha, GauAlphaConfig
from models.parts.positions import rotate

EXACT = 1e-10  # float64: the same formula, summed in another order
TINY = {"vocab_size": 50, "d_model": 12, "n_layers": 2, "d_key": 4, "n_positions": 70, "least_length": 4}


def tiny(dtype: torch.dtype = torch.float64, **options: bool) -> GauAlpha:
    """Weights so large that every part of it shows."""
    torch.manual_seed(0)
    model = GauAlpha(GauAlphaConfig(**TINY, **options), dtype=dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def ids(B: int, N: int) -> Tensor:
    return torch.randint(50, (B, N), generator=torch.Generator().manual_seed(1))


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-12).sqrt()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("N", [1, 3, 9])
@torch.no_grad()
def test_it_is_the_equations(N: int, interleaved: bool) -> None:
    model, tokens, types = tiny(rotary_interleaved=interleaved), ids(1, N), torch.arange(N)[None] % 2
    x = norm(model.tokens.weight[tokens[0]] + model.token_types.weight[types[0]])
    for unit in model.units:
        u, v, z = (F.silu(x @ to.weight.T) for to in (unit.to_u, unit.to_v, unit.to_z))
        q, k = (rotate((z * g[0])[None, None], model.rotations(torch.arange(N)), interleaved=interleaved)[0, 0] for g in unit.gain)
        scale = math.log(max(N, 4)) / math.log(512)
        A = torch.softmax(scale * q @ k.T / math.sqrt(4), dim=-1)
        x = norm(x + (u * (A @ v)) @ unit.to_out.weight.T)
    assert (model(tokens, torch.ones_like(tokens), types)[0] - x).abs().max() <= EXACT


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    model, tokens = tiny(), ids(1, 9)
    mask = (torch.arange(9) < 6).long()[None]
    assert (model(tokens, mask)[:, :6] - model(tokens[:, :6], mask[:, :6])).abs().max() <= EXACT


def test_the_base_model_has_24_units_without_a_bias_or_a_norm() -> None:
    with torch.device("meta"):
        model = GauAlpha(GauAlphaConfig(vocab_size=12_000))
    D, e, s = 768, 1536, 128
    assert sum(p.numel() for p in model.parameters()) == 12_002 * D + 24 * (3 * D * e + D * s + 2 * s)
    assert not [name for name, _ in model.named_parameters() if "bias" in name or "norm" in name or "offset" in name]


def test_what_makes_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match="n_layers=0 must be at least 1"):
        GauAlphaConfig(vocab_size=5, n_layers=0)
    with pytest.raises(ValueError, match="d_head=3 is odd"):
        GauAlpha(GauAlphaConfig(vocab_size=5, d_key=3))
    with pytest.raises(ValueError, match="N=71 tokens, but the model has n_positions=70; cut the input"):
        tiny()(ids(1, 71), torch.ones(1, 71))
