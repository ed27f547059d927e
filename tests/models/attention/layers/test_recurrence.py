"""The recurrence: three executions of one function, and what each of its four rules is known to do."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.recurrence import chunkwise, parallel, recurrent
from tests.cases import in_one_test

EXACT = 1e-10  # float64: the same formula, summed in another order
ROUNDED = 1e-5  # float32: 24 bits, sums of a few hundred terms; relative to the largest output where that is above 1

D_K, D_V = 6, 5
LENGTHS = (1, 2, 63, 64, 65, 200)
RULES = ("linear", "gated", "gated_rows", "delta", "gated_delta", "gated_rows_delta")

every_rule = in_one_test("rule", RULES)
every_gated_rule = in_one_test("rule", [rule for rule in RULES if "gated" in rule])
every_execution = in_one_test("execution", [parallel, chunkwise, recurrent])
both_dtypes = in_one_test(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, ROUNDED)])


def inputs(
    rule: str, B: int, N: int, *, H: int = 2, dtype: torch.dtype = torch.float64, scale: float = 1.0, decay: float | None = None
) -> dict[str, Tensor]:
    """Random arguments of a rule. Keys of the delta rules have length 1, without which the state of a thousand tokens has no bound."""
    generator = torch.Generator().manual_seed(N)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given = {"q": scale * normal(B, H, N, D_K), "k": normal(B, H, N, D_K), "v": scale * normal(B, H, N, D_V), "S": normal(B, H, D_K, D_V)}
    given["k"] = F.normalize(given["k"], dim=-1) if "delta" in rule else scale * given["k"]
    if "gated" in rule:
        rows = (D_K,) if "rows" in rule else ()
        drawn = F.logsigmoid(2 * normal(B, H, N, *rows))
        given["decay"] = drawn if decay is None else torch.full_like(drawn, decay)
    if "delta" in rule:
        given["beta"] = torch.sigmoid(normal(B, H, N))
    return {name: tensor.to(dtype) for name, tensor in given.items()}


def error(ours: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> float:
    """The largest difference of o and of S, relative where the largest value is above 1."""
    differences = ((a - b).abs().max() / b.abs().max().clamp_min(1) for a, b in zip(ours, reference, strict=True))
    return float(max(differences))


@both_dtypes
@every_rule
@in_one_test("N", LENGTHS)
@torch.no_grad()
def test_the_three_executions_agree(rule: str, N: int, dtype: torch.dtype, tolerance: float) -> None:
    given = inputs(rule, 1 if N > 100 else 2, N, H=1 if N > 100 else 2, dtype=dtype)
    one_by_one = recurrent(**given)
    assert error(parallel(**given), one_by_one) <= tolerance
    assert error(chunkwise(**given), one_by_one) <= tolerance


@every_execution
@every_rule
def test_orders_of_magnitude(execution: Callable, rule: str) -> None:
    """Inputs of a thousand and of a millionth, against the float64 recurrence."""
    for scale in (1e3, 1e-6):
        given = inputs(rule, 2, 70, scale=scale)
        rounded = {name: tensor.float() for name, tensor in given.items()}
        assert error(execution(**rounded), recurrent(**given)) <= ROUNDED


@every_execution
@every_gated_rule
@in_one_test("decay", [0.0, -50.0])
def test_decays_at_their_limits(execution: Callable, rule: str, decay: float) -> None:
    """Nothing forgotten, and everything: each token then sees itself alone."""
    given = inputs(rule, 2, 70, decay=decay)
    ungated = {name: tensor for name, tensor in given.items() if name != "decay"}
    if decay == 0:
        assert error(execution(**given), recurrent(**ungated)) <= EXACT
    else:
        o, S = execution(**given)
        beta = given["beta"][..., None] if "delta" in rule else 1
        itself = (given["q"] * given["k"]).sum(-1, keepdim=True) * beta * given["v"]
        assert (o - itself).abs().max() <= EXACT
        assert torch.isfinite(S).all()


@every_gated_rule
def test_a_small_decay_keeps_its_digits_after_a_large_one(rule: str) -> None:
    """Cumulative sums in float32 would be off by 1e-4 behind a few decays of -50."""
    given = inputs(rule, 2, 64)
    token = torch.arange(64).view(64, *(1,) * (given["decay"].dim() - 3))
    given["decay"] = torch.where(token % 4 == 0, -50.0, given["decay"] / 100)
    rounded = {name: tensor.float() for name, tensor in given.items()}
    assert error(chunkwise(**rounded), recurrent(**given)) <= ROUNDED


# What the delta rule is for


@every_execution
def test_one_key_again_and_again(execution: Callable) -> None:
    """Where the power series of the chunk's triangle has binomial coefficients for terms: float32 would lose every digit."""
    k = F.normalize(torch.ones(1, 1, 130, 4), dim=-1)
    v = torch.randn(1, 1, 130, 3, generator=torch.Generator().manual_seed(0))
    o, _ = execution(k, k, v, torch.zeros(1, 1, 4, 3), beta=torch.ones(1, 1, 130))
    assert (o - v).abs().max() <= ROUNDED


# Precision


@every_execution
def test_autocast_leaves_the_sums_alone(execution: Callable) -> None:
    given = inputs("gated_delta", 2, 65, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, S = execution(**given)
    assert error((o, S), recurrent(**given)) <= ROUNDED
