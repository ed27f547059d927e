"""The gated attention unit: its four normalisations as loops, its bias, and the unit as the paper writes it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.gated.causal_gau import CausalGatedAttentionUnit
from models.attention.gated.gau import DistanceBias, GatedAttentionUnit, weights
from models.parts.positions import rotation_at
from tests.cases import in_one_test
from tests.models.attention.scores import EXACT, drawn

NORMALISATIONS = ("length", "valid", "softmax", "softmax_plus")
s = 4


def by_loops(q: Tensor, k: Tensor, normalisation: str, mask: Tensor, bias: Tensor, least: int) -> Tensor:
    """(N_q, s), (N_k, s), (N_q, N_k) twice: one query and key at a time."""
    A = torch.zeros(len(q), len(k), dtype=q.dtype)
    for i in range(len(q)):
        seen = [j for j in range(len(k)) if mask[i, j]]
        for j in seen:
            match normalisation:
                case "length":
                    A[i, j] = max(0.0, float(q[i] @ k[j] + bias[i, j]) / len(k)) ** 2
                case "valid":
                    A[i, j] = max(0.0, float(q[i] @ k[j]) / math.sqrt(s) + float(bias[i, j])) ** 2 / len(seen)
                case _:
                    scale = math.log(max(len(seen), least)) / math.log(512) if normalisation == "softmax_plus" else 1.0
                    A[i, j] = math.exp(scale * float(q[i] @ k[j]) / math.sqrt(s) + float(bias[i, j]))
        if normalisation.startswith("softmax") and seen:
            A[i] /= A[i].sum()
    return A


@in_one_test("least", [1, 16])
@in_one_test("normalisation", NORMALISATIONS)
def test_weights_are_the_loops(normalisation: str, least: int) -> None:
    """With a query that sees nothing, and one that sees one key."""
    q, k, bias = drawn(6, s), drawn(7, s, seed=1), drawn(6, 7, seed=2)
    mask = drawn(6, 7, seed=3) > 0
    mask[2], mask[3] = False, torch.arange(7) == 4
    A = weights(q, k, normalisation=normalisation, mask=mask, bias=bias, least_length=least)
    assert (A - by_loops(q, k, normalisation, mask, bias, least)).abs().max() <= EXACT
    assert not A[2].any()


@in_one_test("normalisation", NORMALISATIONS)
def test_gradients_of_the_weights(normalisation: str) -> None:
    q, k = drawn(3, s).requires_grad_(), drawn(4, s, seed=1).requires_grad_()
    mask = torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]])
    assert torch.autograd.gradcheck(lambda q, k: weights(q, k, normalisation=normalisation, mask=mask), (q, k), fast_mode=True)


@in_one_test("causal", [False, True])
def test_the_bias_has_t5s_buckets(causal: bool) -> None:
    """d = query - key: one number each below n/2, then by the logarithm, with n = 32 for the past alone and 16 for either side."""
    bias = DistanceBias(scale=3.0, causal=causal)
    torch.nn.init.normal_(bias.weight)
    n = 32 if causal else 16
    for d in (0, 1, 7, 8, 9, 15, 16, 17, 31, 60, 127, 128, 129, 100_000, -1, -9, -500):
        distance, upper = (max(d, 0), 0) if causal else (abs(d), 16 if d < 0 else 0)
        bucket = distance
        if distance >= n // 2:
            bucket = min(n - 1, n // 2 + int(math.log(distance / (n // 2)) / math.log(128 / (n // 2)) * (n // 2)))
        assert bias(torch.tensor(-d)) == 3.0 * bias.weight[upper + bucket]


def unit(kind: type = GatedAttentionUnit, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = kind(6, 2, d_head=s, bias=True, **options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@torch.no_grad()
def test_the_unit_is_the_papers() -> None:
    """u ⊙ (A v) behind a projection, with q and k from one z, and the bias times sqrt(D) inside the square."""
    layer, x, t = unit(), drawn(1, 7, 6), torch.arange(7)
    u, v, z = (F.silu(to(x[0])) for to in (layer.to_u, layer.to_v, layer.to_z))
    assert u.shape == v.shape == (7, 12)
    q, k = (z * g[0] + b[0] for g, b in zip(layer.gain, layer.offset, strict=True))
    bias = layer.bias.weight[layer.bias.bucket_of[t - t[:, None] + 128]] * math.sqrt(6)
    A = F.relu(q @ k.T / math.sqrt(s) + bias).square() / 7
    assert (layer(x)[0] - layer.to_out(u * (A @ v))).abs().max() <= EXACT


@in_one_test("normalisation", NORMALISATIONS[1:])
@torch.no_grad()
def test_the_causal_unit_is_the_unit_with_a_mask(normalisation: str) -> None:
    """Every token gets what it gets as the last of the tokens up to it, but for the buckets of the bias."""
    layer = unit(CausalGatedAttentionUnit, normalisation=normalisation, relative_bias=False, least_length=3)
    both = unit(normalisation=normalisation, relative_bias=False, least_length=3)
    both.load_state_dict(layer.state_dict())
    x = drawn(2, 9, 6)
    turned = rotation_at(torch.arange(9)[None], s, base=100.0, dtype=torch.float64)
    y, _ = layer(x, rotation=turned)
    for i in range(9):
        here = turned._replace(cos=turned.cos[:, :, : i + 1], sin=turned.sin[:, :, : i + 1])
        assert (both(x[:, : i + 1], rotation=here)[:, -1] - y[:, i]).abs().max() <= EXACT
