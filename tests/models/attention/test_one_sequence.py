"""Mechanisms whose layers do not say `cross`: their functions refuse queries and keys of different lengths, and say both."""

import inspect
from collections.abc import Callable
from pkgutil import resolve_name

import pytest
import torch
from torch import Tensor

from models.layers import LAYERS
from tests.models.attention.mechanisms import MECHANISMS
from tests.models.attention.scores import D_K, B, H, drawn

Call = Callable[[Callable, Tensor, Tensor, Tensor], object]


def codes(N: int) -> Tensor:
    return torch.zeros(B, H, N, dtype=torch.int64)


def local_and_global(f: Callable, *heads: Tensor, **options: object) -> object:
    return f(heads, [x[:, :, : heads[0].shape[2]] for x in heads[:1] * 3], window=2, n_global=1, **options)


EQUALLY: Call = lambda f, q, k, v: f(q, k, v)  # noqa: E731
RECURRENCE: Call = lambda f, q, k, v: f(q, k, v, torch.zeros(B, H, D_K, D_K))  # noqa: E731
GROUPS: Call = lambda f, q, k, v: f(q, k, q, k, v, group=4)  # noqa: E731
CALLS: dict[str, Call] = {
    "atrous": lambda f, q, k, v: f(q, k, v, rate=2),
    "sparse": lambda f, q, k, v: f(q, k, v, mode="union", stride=2),
    "bigbird": lambda f, q, k, v: f(q, k, v, torch.zeros(H, max(-(-q.shape[2] // 2) - 2, 0), 0, dtype=torch.int64), block=2),
    "bigbird, with global tokens": lambda f, q, k, v: f(q, k, v, torch.zeros(H, 3, 0, dtype=torch.int64), n_global=1, block=2),
    "disentangled": lambda f, q, k, v: f(q, k, v, r_k=drawn(H, 2 * q.shape[2], D_K, seed=5)),
    "hybrid": lambda f, q, k, v: f(q, k, v, torch.exp, torch.exp, block=2),
    "longformer": local_and_global,
    "longformer, causal": local_and_global,
    "mixed chunks": GROUPS,
    "mixed chunks, causal": GROUPS,
    "LSH": lambda f, q, k, v: f(q, v, codes(k.shape[2]).unsqueeze(2)),
    "LSH, with a cache": lambda f, q, k, v: f(q, v, codes(k.shape[2]).unsqueeze(3).double()),
    "vector-quantised, causal": lambda f, q, k, v: f(q, codes(k.shape[2]), v, drawn(H, 3, D_K, seed=4)),
    "vector-quantised, causal, with a position bias": lambda f, q, k, v: f(
        q, codes(k.shape[2]), v, drawn(H, 3, D_K, seed=4), torch.zeros(1, 4)
    ),
    "Efficient, causal": EQUALLY,
    "Performer, causal": lambda f, q, k, v: f(q, k, v, drawn(8, D_K, seed=4)),
    "linear, causal, features given": EQUALLY,
    "linear recurrence, parallel": RECURRENCE,
    "linear recurrence, in chunks": RECURRENCE,
    "linear recurrence, step by step": RECURRENCE,
}
# Of other lengths by nature: scores are given, or slots, or the keys of a past.
OTHERS = {"Synthesizer", "sliding window", "window and first tokens", "atrous, slots", "sparse, slots"}


def test_all_that_do_not_say_cross_are_here() -> None:
    functions = {name: row.layers for name, row in MECHANISMS.items() if row.layers and inspect.isfunction(resolve_name(row.callable))}
    within = {name for name, layers in functions.items() if not any(LAYERS[layer].capabilities.cross for layer in layers)}
    beside = {name for name in CALLS if not MECHANISMS[name].layers}  # what several layers are made of
    assert within | beside == CALLS.keys() | OTHERS


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("n_q", "n_k"), [(6, 9), (9, 6), (1, 9), (9, 1)])
def test_other_queries_than_keys_are_refused(name: str, n_q: int, n_k: int) -> None:
    q, k, v = (drawn(B, H, N, D_K, seed=seed) for seed, N in enumerate((n_q, n_k, n_k)))
    with pytest.raises(
        ValueError, match=rf"attends within one sequence, but \w+ has {n_q} tokens and \w+ has {n_k}; give equally many of both"
    ):
        CALLS[name](resolve_name(MECHANISMS[name].callable), q, k, v)


@pytest.mark.parametrize("name", CALLS)
def test_as_many_of_both_are_taken(name: str) -> None:
    assert CALLS[name](resolve_name(MECHANISMS[name].callable), *(drawn(B, H, 6, D_K, seed=seed) for seed in range(3))) is not None


def test_a_window_has_a_key_for_each_query() -> None:
    q, k, v = (drawn(B, H, N, D_K, seed=N) for N in (6, 4, 4))
    with pytest.raises(ValueError, match="6 queries, 4 keys and 4 values: give a key and a value to each query"):
        resolve_name(MECHANISMS["sliding window"].callable)(q, k, v, scale=1.0, present=torch.ones(B, 4, dtype=torch.bool))
