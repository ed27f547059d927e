"""Linear attention with each of its feature maps: the matrix of weights pair by pair, and what the maps promise."""

import math
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.linear.feature_maps import FEATURE_MAPS, map_named
from models.layers import LAYERS
from tests.cases import in_one_test
from tests.models.attention.test_causal_layers import EXACT, D, H, heads, projected, tokens

every_map = in_one_test("name", FEATURE_MAPS)


def weight(name: str, q: Tensor, k: Tensor) -> float:
    """φ(q)ᵀφ(k) of single vectors, from its definition."""
    s = float(q @ k)
    if name == "elu":
        return float((F.elu(q) + 1) @ (F.elu(k) + 1))
    if name == "relu":
        return float(q.clamp(min=0) @ k.clamp(min=0))
    if name == "relu_squared":
        return float(q.clamp(min=0).square() @ k.clamp(min=0).square())
    if name == "exp":
        return float((q + k).exp().sum())
    if name == "taylor_1":
        return 1 + s / float(q.norm() * k.norm())
    s /= math.sqrt(q.shape[0])
    return 1 + s + s * s / 2


def layer(kind: str, name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    made = LAYERS[kind](D, H, bias=True, **({} if kind == "based" else {"feature_map": name}))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made.double()


@in_one_test(("kind", "name"), [*product(("linear", "causal_linear"), FEATURE_MAPS), ("based", "taylor_2")])
@torch.no_grad()
def test_pair_by_pair(kind: str, name: str) -> None:
    made, x = layer(kind, name), tokens(1, 7)
    q, k, v = heads(made, x)
    o = torch.zeros_like(v)
    for h in range(H):
        for i in range(7):
            weights = [weight(name, q[0, h, i], k[0, h, j]) for j in range(7 if kind == "linear" else i + 1)]
            o[0, h, i] = sum(w * v[0, h, j] for j, w in enumerate(weights)) / (sum(weights) + 1e-6)
    y = made(x) if kind == "linear" else made(x)[0]
    assert (y - projected(made, o)).abs().max() <= EXACT


@every_map
@in_one_test("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_inputs_stay_finite(name: str, dtype: torch.dtype) -> None:
    made = layer("linear", name).to(dtype)
    x = (1e3 * tokens(2, 40)).to(dtype).requires_grad_(dtype == torch.float32)
    y = made(x, torch.arange(40) < torch.tensor([40, 0])[:, None])
    assert torch.isfinite(y).all()
    if dtype == torch.float32:
        y.sum().backward()
        assert torch.isfinite(x.grad).all()


def test_a_direction_of_nothing_is_no_number_less() -> None:
    x = torch.zeros(1, 4, requires_grad=True)
    features = map_named("taylor_1")(x)
    assert features.tolist() == [[1, 0, 0, 0, 0]]
    features.sum().backward()
    assert torch.isfinite(x.grad).all()


@in_one_test(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_elu_keeps_its_digits_where_it_is_small(dtype: torch.dtype, tolerance: float) -> None:
    """e^x - 1 + 1 would be 0 from x = -18 on in float32, and from -7 on in bfloat16."""
    x = torch.arange(-80, 8, dtype=torch.float32).to(dtype).requires_grad_()
    y = map_named("elu")(x)
    exact = torch.where(x > 0, x.detach().double() + 1, x.detach().double().exp())
    assert ((y.double() - exact) / exact).abs().max() <= tolerance
    y.sum().backward()
    assert ((x.grad.double() - torch.where(x > 0, 1.0, exact)) / exact).abs().max() <= tolerance
