"""Performer: what its random features estimate and how well, the attention made of them pair by pair, and exponents beyond any float."""

import math
from functools import cache

import torch
from torch import Tensor, nn

from models.attention.linear.causal_performer import FeatureSums, attend_causal_performer
from models.attention.linear.performer import attend_performer
from models.attention.linear.random_features import KERNELS, default_features, draw_projection, log_features, redraw_features, relu_features
from models.layers import LAYERS
from tests.cases import in_one_test
from tests.models.attention.test_causal_layers import EXACT, D, H

B, D_K, D_V, M = 2, 4, 3, 6

every_kernel = in_one_test("kernel", KERNELS)


def draw(N: int, *widths: int, std: float = 1.0, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [std * torch.randn(B, H, N, width, generator=generator, dtype=torch.float64) for width in widths]


def projection(n_features: int = M, d_head: int = D_K, *, rows: str = "orthogonal", seed: int = 0) -> Tensor:
    return draw_projection(n_features, d_head, torch.Generator().manual_seed(seed), rows=rows).double()


def features(x: Tensor, W: Tensor, kernel: str) -> Tensor:
    return relu_features(x, W) if kernel == "relu" else log_features(x, W, kernel=kernel).exp()


def nothing(kernel: str = "positive", dtype: torch.dtype = torch.float64) -> FeatureSums:
    D_phi = 2 * M if kernel == "hyperbolic" else M
    return FeatureSums(torch.zeros(B, H, D_phi, D_V + 1, dtype=dtype), torch.zeros(B, H, 1, dtype=dtype))


# What the features estimate


@cache
def kernel_errors(*, kernel: str = "positive", rows: str = "orthogonal", n_draws: int = 2000) -> tuple[Tensor, Tensor]:
    """Of the estimate of exp(qᵀk / √D_k) over many draws of W, relative: mean and mean square, for 6 pairs of short q and k."""
    d_head = 8
    q, k = 0.35 * torch.randn(2, 6, d_head, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    errors = []
    for _ in range(n_draws):
        W = draw_projection(d_head, d_head, generator, rows=rows)
        products = (log_features(q, W, kernel=kernel).exp() * log_features(k, W, kernel=kernel).exp()).sum(-1)
        errors.append(products / ((q * k).sum(-1) / math.sqrt(d_head)).exp() - 1)
    stacked = torch.stack(errors)
    return stacked.mean(0), stacked.square().mean(0)


@in_one_test("rows", ["orthogonal", "iid"])
@in_one_test("kernel", ["positive", "hyperbolic"])
def test_the_kernel_is_estimated_without_bias(kernel: str, rows: str) -> None:
    mean, mean_square = kernel_errors(kernel=kernel, rows=rows)
    assert (mean.abs() <= 5 * (mean_square / 2000).sqrt()).all()


def test_rows_are_at_right_angles_within_a_block_and_as_long_as_they_should_be() -> None:
    W = projection(2 * D_K + 1)
    for block in (W[:D_K], W[D_K : 2 * D_K]):
        products = block @ block.mT
        assert (products - products.diag().diag()).abs().max() <= 1e-6
    assert (projection(7, rows="regularised").norm(dim=-1) - math.sqrt(D_K)).abs().max() <= 1e-6
    lengths = projection(4000).square().sum(-1)  # of D_k numbers from N(0, 1)
    assert abs(float(lengths.mean()) - D_K) < 0.2
    assert abs(float(lengths.var()) - 2 * D_K) < 1


# The attention made of them


@every_kernel
def test_pair_by_pair(kernel: str) -> None:
    (q,), (k, v), W = draw(5, D_K), draw(7, D_K, D_V, seed=1), projection()
    mask = torch.arange(7) < torch.tensor([4, 0])[:, None]
    weights = features(q, W, kernel) @ features(k, W, kernel).mT * mask[:, None, None, :]
    assert (weights[0, :, :, :4] > 0).all()
    expected = weights[:1] @ v[:1] / weights[:1].sum(-1, keepdim=True)
    o = attend_performer(q, k, v, W, key_mask=mask, kernel=kernel, eps=0.0 if kernel == "relu" else 1e-30)
    assert (o[:1] - expected).abs().max() <= EXACT
    assert not attend_performer(q, k, v, W, key_mask=mask, kernel=kernel)[1].any()


@every_kernel
@in_one_test("N", [1, 63, 64, 65])
def test_causal_pair_by_pair(kernel: str, N: int) -> None:
    (q, k, v), W = draw(N, D_K, D_K, D_V), projection()
    weights = (features(q, W, kernel) @ features(k, W, kernel).mT).tril()
    o, _ = attend_causal_performer(q, k, v, W, nothing(kernel), kernel=kernel)
    assert (o - weights @ v / weights.sum(-1, keepdim=True)).abs().max() <= EXACT


def test_a_matrix_for_each_head() -> None:
    q, k, v = draw(9, D_K, D_K, D_V)
    W = torch.stack([projection(seed=seed) for seed in range(H)])
    o = attend_performer(q, k, v, W)
    for h in range(H):
        head = slice(h, h + 1)
        assert (o[:, head] - attend_performer(q[:, head], k[:, head], v[:, head], W[h])).abs().max() <= EXACT


@in_one_test("kernel", ["positive", "hyperbolic"])
def test_long_queries_and_keys_still_share_out_all_of_their_attention(kernel: str) -> None:
    """Exponents of -10⁴ and less, in float32."""
    q, k = (x.float() for x in draw(20, D_K, D_K, std=100.0))
    v = torch.full((B, H, 20, D_V), 3.0)
    assert (attend_performer(q, k, v, projection(), kernel=kernel) - 3).abs().max() <= 1e-5
    o, past = attend_causal_performer(k, k, v, projection(), nothing(kernel, torch.float32), kernel=kernel)
    assert all(torch.isfinite(tensor).all() for tensor in (o, *past))


# The layers


@in_one_test("name", ["performer", "causal_performer"])
def test_a_layer_draws_by_its_seed_and_again_when_told(name: str) -> None:
    layers = [LAYERS[name](D, H, seed=seed) for seed in (0, 0, 1)]
    assert layers[0].projection.shape == (default_features(D // H), D // H)
    assert torch.equal(layers[0].projection, layers[1].projection)
    assert not torch.equal(layers[0].projection, layers[2].projection)
    layers[2].load_state_dict(layers[0].state_dict())
    assert torch.equal(layers[2].projection, layers[0].projection)
    layers[0].redraw(torch.Generator().manual_seed(1))
    assert torch.equal(layers[0].projection, LAYERS[name](D, H, seed=1).projection)


def test_a_model_draws_at_its_steps_another_for_each_layer() -> None:
    model = nn.ModuleList(LAYERS[name](D, H) for name in ("performer", "causal_performer"))
    first = model[0].projection.clone()
    for step in (0, 999, 1001):
        redraw_features(model, step)
        assert torch.equal(model[0].projection, first)
    redraw_features(model, 1000)
    assert not torch.equal(model[0].projection, first)
    assert not torch.equal(model[0].projection, model[1].projection)
