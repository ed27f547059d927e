"""What the specification leaves open is an argument of the pure function, so that an outside reference with another choice can be met."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.gated.gau import weights
from models.attention.layers.fused_block import attend_fused
from models.attention.layers.scaled_dot_product import attend
from models.attention.linear.codebook import codes_of
from models.attention.linear.efficient import attend_efficient
from models.attention.linear.linear import attend_linear
from models.attention.linear.nystrom import attend_nystrom
from models.attention.scoring.softmax1 import attend_softmax1, attend_softmax1_online
from models.attention.sparse.bigbird import attend_bigbird
from models.attention.sparse.causal_lsh import CausalLSHAttention, attend_lsh_to_cache
from models.attention.sparse.lsh import LSHAttention, attend_lsh
from tests.cases import in_one_test
from tests.models.attention.scores import EXACT, B, H, drawn, qkv

q, k, v = qkv(7, 7)
mask = torch.arange(7) < torch.tensor([[7], [4]])


def same(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= EXACT)


@in_one_test("function", [attend, attend_softmax1, attend_softmax1_online])
def test_no_scale_is_one_over_the_root_of_the_width(function: object) -> None:
    assert same(function(q, k, v), function(q, k, v, scale=q.shape[-1] ** -0.5))
    assert not same(function(q, k, v), function(q, k, v, scale=1.0))


def test_fused_projections_take_a_scale() -> None:
    x, W = drawn(B, 7, 12, seed=8), drawn(3 * 12, 12, seed=9)
    parts = [part.unflatten(-1, (H, -1)).transpose(1, 2) for part in (x @ W.mT).chunk(3, dim=-1)]
    o = F.scaled_dot_product_attention(*parts, scale=0.3).transpose(1, 2).flatten(-2)
    assert same(attend_fused(x, W_qkv=W, n_heads=H, scale=0.3), o)


def test_a_gated_unit_takes_a_scale_and_the_length_at_which_its_scores_are_those_of_softmax() -> None:
    scores = 0.3 * q @ k.mT
    assert same(weights(q, k, scale=0.3), F.relu(scores).square() / 7)
    plus = weights(q, k, normalisation="softmax_plus", scale=0.3, log_base=64)
    assert same(plus, torch.softmax(math.log(7) / math.log(64) * scores, dim=-1))
    assert same(weights(q, k, normalisation="softmax_plus", log_base=7), weights(q, k, normalisation="softmax"))


def test_efficient_attention_by_scaling_takes_a_length() -> None:
    o = attend_efficient(q, k, v, key_mask=mask, normalisation="scaling", length=7)
    assert same(o, q @ ((k * mask[:, None, :, None]).mT @ v) / 7)


def test_linear_attention_takes_any_map() -> None:
    A = q.exp() @ k.exp().mT
    assert same(attend_linear(q, k, v, feature_map=torch.exp, eps=0.0), A @ v / A.sum(-1, keepdim=True))


def test_nystrom_attention_takes_the_kernel_of_its_convolution() -> None:
    """Over time, one for each head; masked values do not enter."""
    kernel = drawn(H, 1, 3, 1, seed=8)
    added = attend_nystrom(q, k, v, n_landmarks=3, key_mask=mask, conv=kernel) - attend_nystrom(q, k, v, n_landmarks=3, key_mask=mask)
    tokens = F.pad(v * mask[:, None, :, None], (0, 0, 1, 1))
    assert same(added, sum(kernel[:, :, i] * tokens[:, :, i : i + 7] for i in range(3)))


def test_bigbird_sees_everything_up_to_a_number_of_blocks() -> None:
    table = torch.zeros(H, 2, 0, dtype=torch.int64)  # 4 blocks of 2 tokens
    full = attend(q, k, v, mask=mask[:, None, None])
    assert same(attend_bigbird(q, k, v, table, block=2, key_mask=mask, full_up_to=4), full)
    long_q, long_k, long_v = qkv(14, 14)
    table = torch.zeros(H, 5, 0, dtype=torch.int64)
    sparse = attend_bigbird(long_q, long_k, long_v, table, block=2)
    assert same(attend_bigbird(long_q, long_k, long_v, table, block=2, full_up_to=6), sparse)
    assert not same(sparse, attend(long_q, long_k, long_v))


def test_a_cached_lsh_takes_the_eps_of_its_keys_and_what_a_token_scores_itself() -> None:
    buckets = torch.zeros(B, H, 1, 7, dtype=torch.int64)
    options = {"eps": 0.5, "self_logit": -1.0}
    cached, _ = attend_lsh_to_cache(q, v, buckets.mT.double(), **options)
    assert same(cached, attend_lsh(q, v, buckets, chunk=7, causal=True, **options))
    assert not same(cached, attend_lsh_to_cache(q, v, buckets.mT.double())[0])


def test_lsh_layers_pass_them_on() -> None:
    x = drawn(B, 7, 12, seed=8)
    options = {"eps": 0.5, "self_logit": -1.0, "n_buckets": 2, "n_rounds": 8}
    layer = CausalLSHAttention(12, H, bias=True, **options).double()
    whole = LSHAttention(12, H, causal=True, chunk=7, **options).double()
    assert layer.options.items() <= whole.options.items()
    other = CausalLSHAttention(12, H, bias=True, n_buckets=2, n_rounds=8).double()
    other.load_state_dict(layer.state_dict())
    assert not same(layer(x)[0], other(x)[0])


def test_codes_are_sums_over_counts_that_are_not_below_the_least() -> None:
    sums, counts = drawn(H, 2, 4, seed=8), torch.tensor([[2.0, 0.1]] * H, dtype=torch.float64)
    assert same(codes_of(sums, counts, least=0.5), torch.stack([sums[:, 0] / 2, sums[:, 1] / 0.5], dim=1))
