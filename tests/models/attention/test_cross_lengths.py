"""Layers that say `cross`: their functions take queries of one sequence to keys of another, here against loops over single pairs."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.scaled_dot_product import attend
from models.attention.linear.efficient import attend_efficient
from models.attention.linear.linear import attend_linear
from models.attention.linear.nystrom import attend_nystrom
from models.attention.linear.performer import attend_performer
from models.attention.linear.random_features import log_features
from models.attention.linear.vq import attend_to_codes
from models.attention.scoring.additive import attend_additive
from models.attention.scoring.cosine import attend_cosine
from models.attention.scoring.dot import attend_dot
from models.attention.scoring.nadaraya_watson import attend_nadaraya_watson
from models.attention.scoring.scored import ScoredAttention
from models.attention.scoring.softmax1 import attend_softmax1
from models.attention.sparse.local import attend_local
from models.layers import LAYERS
from tests.models.attention.scores import D_K, EXACT, N_K, N_Q, B, H, by_loops, drawn, qkv

WINDOW, N_CODES = 2, 3
KEYS = torch.arange(N_K) < torch.tensor([[N_K], [3]])  # (B, N_k)
W_q, W_k, w_v = drawn(D_K, D_K, seed=6), drawn(D_K, D_K, seed=7), drawn(D_K, seed=8)
W = drawn(8, D_K, seed=9)  # of the Performer's features
CODES = torch.randint(0, N_CODES, (B, H, N_K), generator=torch.Generator().manual_seed(0))
CODEBOOK = drawn(H, N_CODES, D_K, seed=10)
ROOT = D_K**-0.5


class Case(NamedTuple):
    """A function of q, k, v with the key mask KEYS, and its score of a pair of head h."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    score: Callable[[int, Tensor, Tensor], Tensor]
    beside: float = 0.0  # what the denominator holds beside the exponentials


def features(x: Tensor) -> Tensor:
    return log_features(x, W).exp()


PAIRS = KEYS[:, None, None, :]
SOFTMAX = Case(lambda q, k, v: attend(q, k, v, scale=ROOT, mask=PAIRS), lambda h, q, k: q @ k * ROOT)
CASES = {
    "softmax": SOFTMAX,
    "narrow": SOFTMAX,
    "wide": SOFTMAX,
    "dot": Case(lambda q, k, v: attend_dot(q, k, v, mask=PAIRS), lambda h, q, k: q @ k),
    "cosine": Case(
        lambda q, k, v: attend_cosine(q, k, v, tau=3.0, eps=0.0, mask=PAIRS), lambda h, q, k: 3 * F.cosine_similarity(q, k, dim=0)
    ),
    "nadaraya_watson": Case(
        lambda q, k, v: attend_nadaraya_watson(q, k, v, h=0.7, mask=PAIRS), lambda h, q, k: -((q - k) / 0.7).square().sum() / 2
    ),
    "additive": Case(
        lambda q, k, v: attend_additive(q, k, v, W_q=W_q, W_k=W_k, w_v=w_v, mask=PAIRS), lambda h, q, k: w_v @ torch.tanh(W_q @ q + W_k @ k)
    ),
    "softmax1": Case(lambda q, k, v: attend_softmax1(q, k, v, scale=ROOT, mask=PAIRS), lambda h, q, k: q @ k * ROOT, beside=1.0),
    "linear": Case(
        lambda q, k, v: attend_linear(q, k, v, key_mask=KEYS, eps=0.0), lambda h, q, k: torch.log((F.elu(q) + 1) @ (F.elu(k) + 1))
    ),
    "performer": Case(
        lambda q, k, v: attend_performer(q, k, v, W, key_mask=KEYS, eps=0.0), lambda h, q, k: torch.log(features(q) @ features(k))
    ),
    "vq": Case(
        lambda q, k, v: attend_to_codes(q, CODES, v, CODEBOOK, key_mask=KEYS), lambda h, q, k: q @ k * ROOT
    ),  # the loops are given rounded keys
    "local": Case(lambda q, k, v: attend_local(q, k, v, window=WINDOW, block=3, key_mask=KEYS), lambda h, q, k: q @ k * ROOT),
}
SCORES = [name for name, layer in LAYERS.items() if issubclass(layer, ScoredAttention)]
OTHERS = {"efficient", "nystromformer"}  # whose weights are no function of a single pair


def test_all_that_say_so_are_here() -> None:
    """Or have `attend` of `ScoredAttention`, for which there is a test of its own."""
    cross = {name for name, layer in LAYERS.items() if layer.capabilities.cross}
    assert CASES.keys() | OTHERS <= cross
    assert cross - CASES.keys() - OTHERS <= set(SCORES)


@pytest.mark.parametrize("name", SCORES)
@torch.no_grad()
def test_a_query_gets_the_same_alone_and_without_the_keys_that_it_does_not_see(name: str) -> None:
    torch.manual_seed(0)
    attend_scored, (q, k, v) = LAYERS[name](H * D_K, H).double().attend, (x[..., :D_K] for x in qkv())
    o = attend_scored(q, k, v, mask=PAIRS, bias=None)
    assert o.shape == (B, H, N_Q, v.shape[-1])
    for b, i in torch.cartesian_prod(torch.arange(B), torch.arange(N_Q)).tolist():
        alone = attend_scored(q[b : b + 1, :, i : i + 1], k[b : b + 1, :, KEYS[b]], v[b : b + 1, :, KEYS[b]], mask=None, bias=None)
        assert (o[b, :, i] - alone[0, :, 0]).abs().max() <= EXACT


@pytest.mark.parametrize(("name", "case"), CASES.items(), ids=CASES)
def test_other_queries_than_keys(name: str, case: Case) -> None:
    q, k, v = qkv()
    seen = PAIRS.expand(B, 1, N_Q, N_K)
    if name == "local":
        seen = seen & ((torch.arange(N_Q)[:, None] - torch.arange(N_K)).abs() <= WINDOW)
    if name == "vq":
        k = CODEBOOK[torch.arange(H)[None, :, None], CODES]
    expected = by_loops(case.score, q, k, v, seen, torch.zeros(1, H, N_Q, N_K), beside=case.beside)
    assert (case.attend(q, k, v) - expected).abs().max() <= EXACT


def test_other_queries_than_keys_of_efficient_attention() -> None:
    q, k, v = qkv()
    o = attend_efficient(q, k, v, key_mask=KEYS)
    for b, h, i in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(N_Q)).tolist():
        exps = [k[b, h, j].exp() for j in range(N_K) if KEYS[b, j]]
        weights = [q[b, h, i].softmax(0) @ (e / sum(exps)) for e in exps]
        assert (o[b, h, i] - sum(w * v[b, h, j] for j, w in enumerate(weights))).abs().max() <= EXACT


@pytest.mark.parametrize(("n_q", "n_k"), [(8, 12), (12, 8)])
def test_other_queries_than_keys_of_the_nystromformer(n_q: int, n_k: int) -> None:
    """Segments of 2 and of 3 tokens, and the inverse by singular values."""
    q, k, v = qkv(n_q, n_k)
    means = lambda x: x.unflatten(2, (4, -1)).mean(3)  # noqa: E731
    by_softmax = lambda x, y: torch.softmax(x @ y.mT / math.sqrt(D_K), dim=-1)  # noqa: E731
    F_, A, R = by_softmax(q, means(k)), by_softmax(means(q), means(k)), by_softmax(means(q), k)
    o = attend_nystrom(q, k, v, n_landmarks=4, n_iterations=None)
    assert (o - F_ @ torch.linalg.pinv(A) @ R @ v).abs().max() <= 1e-8  # an inverse of condition 10³
