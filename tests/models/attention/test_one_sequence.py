"""Mechanisms whose layers do not say `cross`: their functions refuse queries and keys of different lengths, and say both."""

from collections.abc import Callable
from pkgutil import resolve_name

import pytest
import torch
from torch import Tensor

from models.attention.sparse.windows import attend_to_windows
from tests.cases import in_one_test
from tests.models.attention.scores import D_K, B, H, drawn

Call = Callable[[Callable, Tensor, Tensor, Tensor], object]


def codes(N: int) -> Tensor:
    return torch.zeros(B, H, N, dtype=torch.int64)


def local_and_global(f: Callable, *heads: Tensor, **options: object) -> object:
    return f(heads, [x[:, :, : heads[0].shape[2]] for x in heads[:1] * 3], window=2, n_global=1, **options)


EQUALLY: Call = lambda f, q, k, v: f(q, k, v)  # noqa: E731
RECURRENCE: Call = lambda f, q, k, v: f(q, k, v, torch.zeros(B, H, D_K, D_K))  # noqa: E731
GROUPS: Call = lambda f, q, k, v: f(q, k, q, k, v, group=4)  # noqa: E731
CALLS: dict[str, Call] = {  # by the name of the function within models.attention
    "sparse.atrous.attend_atrous": lambda f, q, k, v: f(q, k, v, rate=2),
    "sparse.sparse.attend_sparse": lambda f, q, k, v: f(q, k, v, mode="union", stride=2),
    "sparse.bigbird.attend_bigbird": lambda f, q, k, v: f(
        q, k, v, torch.zeros(H, max(-(-q.shape[2] // 2) - 2, 0), 0, dtype=torch.int64), block=2
    ),
    "sparse.bigbird_etc.attend_bigbird_etc": lambda f, q, k, v: f(q, k, v, torch.zeros(H, 3, 0, dtype=torch.int64), n_global=1, block=2),
    "scoring.disentangled.attend_disentangled": lambda f, q, k, v: f(q, k, v, r_k=drawn(H, 2 * q.shape[2], D_K, seed=5)),
    "linear.hybrid.attend_hybrid": lambda f, q, k, v: f(q, k, v, torch.exp, torch.exp, block=2),
    "sparse.longformer.attend_longformer": local_and_global,
    "sparse.causal_longformer.attend_causal_longformer": local_and_global,
    "gated.flash.attend_in_groups": GROUPS,
    "gated.causal_flash.attend_causal_in_groups": GROUPS,
    "sparse.lsh.attend_lsh": lambda f, q, k, v: f(q, v, codes(k.shape[2]).unsqueeze(2)),
    "sparse.causal_lsh.attend_lsh_to_cache": lambda f, q, k, v: f(q, v, codes(k.shape[2]).unsqueeze(3).double()),
    "linear.causal_vq.attend_causal_to_codes": lambda f, q, k, v: f(q, codes(k.shape[2]), v, drawn(H, 3, D_K, seed=4)),
    "linear.vq_near.attend_causal_to_codes_and_near": lambda f, q, k, v: f(
        q, codes(k.shape[2]), v, drawn(H, 3, D_K, seed=4), torch.zeros(1, 4)
    ),
    "linear.causal_efficient.attend_causal_efficient": EQUALLY,
    "linear.causal_performer.attend_causal_performer": lambda f, q, k, v: f(q, k, v, drawn(8, D_K, seed=4)),
    "layers.causal.attend_causal_features": EQUALLY,
    "layers.recurrence.parallel": RECURRENCE,
    "layers.recurrence.chunkwise": RECURRENCE,
    "layers.recurrence.recurrent": RECURRENCE,
}


@in_one_test("name", CALLS)
@in_one_test(("n_q", "n_k"), [(6, 9), (9, 6), (1, 9), (9, 1)])
def test_other_queries_than_keys_are_refused(name: str, n_q: int, n_k: int) -> None:
    q, k, v = (drawn(B, H, N, D_K, seed=seed) for seed, N in enumerate((n_q, n_k, n_k)))
    with pytest.raises(
        ValueError, match=rf"attends within one sequence, but \w+ has {n_q} tokens and \w+ has {n_k}; give equally many of both"
    ):
        CALLS[name](resolve_name(f"models.attention.{name}"), q, k, v)


def test_a_window_has_a_key_for_each_query() -> None:
    q, k, v = (drawn(B, H, N, D_K, seed=N) for N in (6, 4, 4))
    with pytest.raises(ValueError, match="6 queries, 4 keys and 4 values: give a key and a value to each query"):
        attend_to_windows(q, k, v, scale=1.0, present=torch.ones(B, 4, dtype=torch.bool))
