"""FLASH: within groups and between them as loops, the limits of the specification, and the causal layer's four recurrences."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.gated.causal_flash import CausalMixedChunkAttention, attend_causal_in_groups
from models.attention.gated.flash import MixedChunkAttention, attend_in_groups
from models.parts.positions import Rotation, rotation_at
from tests.cases import in_one_test
from tests.models.attention.scores import EXACT, drawn

G, s, e = 4, 3, 5


def example(N: int, B: int = 2) -> tuple[list[Tensor], Tensor]:
    """The four maps of z, and v."""
    return [drawn(B, 1, N, s, seed=i) for i in range(4)], drawn(B, 1, N, e, seed=4)


def by_loops(maps: list[Tensor], v: Tensor, *, causal: bool, divisor: str, mask: Tensor, bias: Tensor, quad_divisor: float = G) -> Tensor:
    """One row, query and key at a time."""
    quad_q, quad_k, lin_q, lin_k = (x[:, 0] for x in maps)
    o = torch.zeros_like(v)
    for b in range(v.shape[0]):
        for i in range(v.shape[2]):
            seen = [j for j in range(v.shape[2]) if mask[b, j] and (j <= i or not causal)]
            for j in seen:
                if i // G == j // G:
                    o[b, 0, i] += F.relu(quad_q[b, i] @ quad_k[b, j] / quad_divisor + bias[i % G, j % G]) ** 2 * v[b, 0, j]
                if not causal or j // G < i // G:
                    o[b, 0, i] += lin_q[b, i] @ lin_k[b, j] * v[b, 0, j] / (len(seen) if divisor == "tokens" else G)
    return o


@in_one_test("divisor", ["tokens", "group"])
@in_one_test("causal", [False, True], ids=["both ways", "causal"])
@in_one_test("N", [1, 3, 4, 5, 11])
def test_groups_are_the_loops(N: int, causal: bool, divisor: str) -> None:
    """With padding at the end of a row, and inside it."""
    maps, v = example(N)
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[1, N // 2 :] = False
    mask[0, 1:2] = False
    bias = drawn(G, G, seed=5)
    o = attend_in_groups(*maps, v, group=G, causal=causal, key_mask=mask, bias=bias, divisor=divisor)
    expected = by_loops(maps, v, causal=causal, divisor=divisor, mask=mask, bias=bias)
    assert (o - expected).abs().max() <= EXACT


@in_one_test("divisor", ["tokens", "group"])
@in_one_test("cut", [1, 4, 6])
def test_the_causal_step_is_the_loops_in_two_calls(cut: int, divisor: str) -> None:
    """With another divisor of the scores than G."""
    maps, v = example(11)
    mask = torch.arange(11) < torch.tensor([[11], [9]])
    given = {"bias": drawn(G, G, seed=5), "divisor": divisor, "quad_divisor": 3.0}
    first, past = attend_causal_in_groups(*(x[:, :, :cut] for x in (*maps, v)), group=G, mask=mask[:, :cut], **given)
    rest, _ = attend_causal_in_groups(*(x[:, :, cut:] for x in (*maps, v)), past, group=G, mask=mask[:, cut:], **given)
    expected = by_loops(maps, v, causal=True, mask=mask, **given)
    assert ((torch.cat([first, rest], dim=2) - expected) * mask[:, None, :, None]).abs().max() <= EXACT
    whole = attend_in_groups(*maps, v, group=G, causal=True, key_mask=mask, **given)
    assert (whole - expected).abs().max() <= EXACT


@in_one_test("causal", [False, True])
def test_half_precision_counts_beyond_2048(causal: bool) -> None:
    """The same as float32 up to the rounding of its output: a sum in float16 would stall, or end."""
    maps, v = [x.half() for x in example(3000, B=1)[0]], 1 + example(3000, B=1)[1].half().abs()
    o = attend_in_groups(*maps, v, group=G, causal=causal)
    exact = attend_in_groups(*(x.double() for x in (*maps, v)), group=G, causal=causal)
    assert o.dtype == torch.float16
    assert (o - exact).abs().max() <= 1e-3 * exact.abs().max()  # half a unit in the last place of 11 bits is 2^-11 of a number


# The layers


def layer(kind: type = CausalMixedChunkAttention, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = kind(6, 2, d_head=4, bias=True, group=G, **options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def rotation(N: int) -> Rotation:
    return rotation_at(torch.arange(N)[None], 4, base=100.0, dtype=torch.float64)


@torch.no_grad()
def test_the_layer_is_the_papers() -> None:
    unit, x = layer(MixedChunkAttention), drawn(1, 10, 6)
    u, v, z = (F.silu(to(x[0])) for to in (unit.to_u, unit.to_v, unit.to_z))
    maps = [(z * g[0] + b[0])[None, None] for g, b in zip(unit.gain, unit.offset, strict=True)]
    bias = torch.stack([torch.stack([unit.bias(torch.tensor(j - i)) for j in range(G)]) for i in range(G)])
    o = by_loops(maps, v[None, None], causal=False, divisor="tokens", mask=torch.ones(1, 10, dtype=torch.bool), bias=bias)
    assert (unit(x)[0] - unit.to_out(u * o[0, 0])).abs().max() <= EXACT
    assert abs(unit.bias(torch.tensor(-1)) - unit.bias.weight[1] * 2) <= EXACT  # times sqrt(s), s = 4


@in_one_test("options", [{}, {"divisor": "group", "relative_bias": False}], ids=["default", "by groups"])
@in_one_test("N", [1, 3, 4, 5, 8, 9, 63, 64, 65])
@torch.no_grad()
def test_four_recurrences_are_the_groups(N: int, options: dict) -> None:
    unit, x = layer(**options), drawn(2, N, 6)
    u, v, maps = unit.projected(x, rotation(N))
    r = torch.arange(G)
    bias = None if unit.bias is None else unit.bias(r - r[:, None])
    o = attend_in_groups(*maps, v, group=G, causal=True, bias=bias, divisor=unit.divisor)
    assert (unit(x, rotation=rotation(N))[0] - unit.gated(u, o)).abs().max() <= EXACT


@torch.no_grad()
def test_in_float32_the_first_group_has_no_linear_part_and_the_hundredth_still_has_its_digits() -> None:
    """M and P grow apart: their difference keeps float32's digits, since M is the larger of the two from the second group on."""
    unit, x = layer(relative_bias=False), drawn(1, 100 * G, 6)
    exact, _ = unit(x)
    rounded, _ = unit.float()(x.float())
    assert (rounded - exact).abs().max() <= 1e-5 * exact.abs().max().clamp_min(1)
    unit.gain.data[:2], unit.offset.data[:2] = 0, 0
    assert torch.equal(unit(x.float()[:, :G])[0], unit.to_out.bias.expand(1, G, 6))
