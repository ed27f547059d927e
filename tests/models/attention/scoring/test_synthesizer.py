"""Synthesizers: every kind by loops, and what only they promise."""

import pytest
import torch
from torch import Tensor

from models.attention.scoring.causal_synthesizer import CausalSynthesizer
from models.attention.scoring.synthesizer import Synthesizer
from models.attention.scoring.synthesizer_scores import KINDS
from models.parts.positions import Rotation
from tests.cases import in_one_test
from tests.models.attention.scores import EXACT, drawn

D, H, N_MAX = 12, 3, 20

every_kind = in_one_test("kind", KINDS)


def make(layer: type = Synthesizer, kinds: tuple[str, ...] = KINDS, **options: object) -> Synthesizer:
    """A layer with all parameters random, biases too."""
    torch.manual_seed(0)
    made = layer(D, H, kinds=kinds, n_positions=N_MAX, bias=True, **({"rank": 2} | options))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made.double()


# The definition


def scores_by_loops(layer: Synthesizer, kind: str, x: Tensor) -> Tensor:
    """(B, N, D) -> (B, H, N, N), number by number."""
    B, N, _ = x.shape
    made = layer.scores.kinds[kind]
    L = torch.zeros(B, H, N, N, dtype=x.dtype)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in (B, H, N, N))).tolist():
        if kind == "dense":
            L[b, h, i, j] = made.W_2[h, j] @ (made.W_1[h] @ x[b, i] + made.b_1[h]).clamp_min(0) + made.b_2[h, j]
        if kind == "random":
            L[b, h, i, j] = made.R[h, i, j]
        if kind == "factorised_dense":
            width = N_MAX // made.W_A.shape[1]
            L[b, h, i, j] = (made.W_A[h, j // width] @ x[b, i]) * (made.W_B[h, j % width] @ x[b, i])
        if kind == "factorised_random":
            L[b, h, i, j] = made.R_1[h, i] @ made.R_2[h, j]
        if kind == "dot_product":
            q, k = (to(x).unflatten(-1, (H, -1)) for to in (made.to_q, made.to_k))
            L[b, h, i, j] = q[b, i, h] @ k[b, j, h] / (D // H) ** 0.5
    return L


def by_definition(layer: Synthesizer, x: Tensor, seen: Tensor) -> Tensor:
    """`seen` broadcasts to (B, H, N, N), and every row of it has a key."""
    shares = layer.scores.alpha.softmax(0) if len(layer.scores.kinds) > 1 else [1.0]
    L = sum(share * scores_by_loops(layer, kind, x) for share, kind in zip(shares, layer.scores.kinds, strict=True))
    weights = L.exp() * seen
    v = layer.to_v(x).unflatten(-1, (H, -1)).transpose(1, 2)
    return layer.to_out((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))


@in_one_test("kinds", [*((kind,) for kind in KINDS), KINDS, ("random", "dot_product")])
@torch.no_grad()
def test_both_layers_compute_their_definition(kinds: tuple[str, ...]) -> None:
    x, mask = drawn(2, 7, D), torch.arange(7) < torch.tensor([[7], [4]])
    layer, past = make(kinds=kinds), make(CausalSynthesizer, kinds)
    past.load_state_dict(layer.state_dict())
    expected = by_definition(layer, x, mask[:, None, None, :])
    assert (layer(x, mask) - expected).abs().max() <= EXACT
    causal_y, state = past(x, mask)
    expected = by_definition(layer, x, torch.ones(7, 7).tril())
    assert (causal_y - expected)[mask].abs().max() <= EXACT
    assert state["n"].tolist() == [[7], [4]]


# Identities


@every_kind
@torch.no_grad()
def test_scores_begin_with_variance_one(kind: str) -> None:
    """For tokens of variance 1, up to what a few thousand draws tell; the dot product begins as torch draws its projections."""
    torch.manual_seed(0)
    layer = Synthesizer(64, 8, kinds=(kind,), n_positions=64)
    x = torch.randn(4, 64, 64)
    variance = float(layer.scores(x, torch.arange(64)[None], layer.scores.keys(x), 64).var())
    assert variance == pytest.approx(1 / 9 if kind == "dot_product" else 1, rel=0.25)


@torch.no_grad()
def test_pairs_that_may_not_meet_and_a_bias_reach_the_scores() -> None:
    layer, x = make(), drawn(2, 9, D)
    near = (torch.arange(9)[:, None] - torch.arange(9)).abs() <= 1
    bias = torch.where(near, 0.0, -1e4).double()[None, None]
    assert (layer(x, pair_mask=near) - layer(x, pair_bias=bias)).abs().max() <= EXACT
    assert (layer(x, pair_mask=near) - layer(x)).abs().max() > 0.01


# What is drawn, and what is refused


def test_fixed_scores_are_those_of_the_seed() -> None:
    torch.manual_seed(1)
    one, other, third = (Synthesizer(D, H, kinds=("random",), n_positions=6, fixed=True, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.scores.kinds["random"].R, other.scores.kinds["random"].R)
    assert not torch.equal(one.scores.kinds["random"].R, third.scores.kinds["random"].R)


@torch.no_grad()
def test_a_full_causal_synthesizer_takes_padding_and_no_token() -> None:
    layer, x = make(CausalSynthesizer), drawn(2, N_MAX, D)
    _, state = layer(x)
    _, after = layer(x, torch.zeros(2, N_MAX, dtype=torch.bool), state)
    assert all(torch.equal(after[name], state[name]) for name in state)
    with pytest.raises(ValueError, match="21 tokens, but the Synthesizer has scores for n_positions=20; use a shorter text"):
        layer(x[:, :1], None, state)


def test_what_does_not_fit_is_refused_with_the_values() -> None:
    with pytest.raises(ValueError, match="N=21 tokens, but the Synthesizer has scores for n_positions=20; cut the input"):
        make()(drawn(1, N_MAX + 1, D))
    with pytest.raises(ValueError, match="a=3 does not divide n_positions=20"):
        make(kinds=("factorised_dense",), a=3)
    for kinds in ((), ("vanilla",), ("dense", "dense"), "dense"):
        with pytest.raises(ValueError, match=r"must be a list of some of dense, random, .*, each at most once"):
            make(kinds=kinds)
    with pytest.raises(ValueError, match="Synthesizer supports no rotation"):
        make()(drawn(1, 5, D), rotation=Rotation(torch.ones(5, 2), torch.zeros(5, 2)))
