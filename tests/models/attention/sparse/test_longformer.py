"""Longformer against its definition, row by row, and the causal form against the same looking back."""

import torch
from torch import Tensor

from models.attention.layers.multi_head import merge_heads, split_heads
from models.attention.sparse.causal_longformer import CausalLongformerAttention
from models.attention.sparse.longformer import attend_longformer
from models.encoder.model import Encoder, EncoderConfig
from tests.cases import in_one_test
from tests.models.attention.sparse.patterns import EXACT, LENGTHS, ROUNDED, heads, some_keys


def defined(
    local: list[Tensor],
    of_globals: list[Tensor],
    is_global: Tensor,
    *,
    window: int,
    dilation: int = 1,
    key_mask: Tensor,
    causal: bool = False,
) -> Tensor:
    """is_global (B, N): one query after the other."""
    (q, k, v), (q_g, k_g, v_g) = local, of_globals
    o = torch.zeros_like(v)
    B, H, N, D = q.shape
    for b in range(B):
        for i in range(N):
            if not key_mask[b, i]:
                continue
            near = torch.tensor([abs(i - j) <= dilation * window // 2 and (i - j) % dilation == 0 for j in range(N)])
            seen = key_mask[b] & (is_global[b, i] | near | is_global[b])
            if causal:
                seen = seen & (torch.arange(N) <= i)
            for h in range(H):
                qi, kj, vj = (q_g, k_g, v_g) if is_global[b, i] else (q, k, v)
                weights = torch.softmax(kj[b, h, seen] @ qi[b, h, i] / D**0.5, dim=0)
                o[b, h, i] = weights @ vj[b, h, seen]
    return o


@in_one_test(("window", "block"), [(0, 8), (2, 8), (8, 4), (16, 8), (6, 1)])
@in_one_test("N", LENGTHS)
def test_is_its_definition_with_leading_globals(N: int, window: int, block: int) -> None:
    for n_global in (0, 1, 3):
        local, of_globals = heads(N), heads(N, seed=1)
        is_global = (torch.arange(N) < n_global).expand(2, -1)
        for key_mask in (torch.ones(2, N, dtype=torch.bool), some_keys(N)):
            expected = defined(local, of_globals, is_global, window=window, key_mask=key_mask)
            for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, ROUNDED)):
                given = [[x.to(dtype) for x in of] for of in (local, of_globals)]
                o = attend_longformer(*given, window=window, n_global=n_global, key_mask=key_mask, block=block)
                assert (o - expected).abs().max() <= tolerance


@in_one_test("N", LENGTHS)
def test_is_its_definition_with_globals_anywhere(N: int) -> None:
    """Each row has others, and another number of them; some are padding."""
    is_global = torch.rand(2, N, generator=torch.Generator().manual_seed(N)) < torch.tensor([[0.2], [0.6]])
    local, of_globals, mask = heads(N), heads(N, seed=1), torch.stack([some_keys(N)[0], torch.arange(N) < N - 1])
    o = attend_longformer(local, of_globals, window=4, global_mask=is_global, key_mask=mask, block=8)
    assert (o - defined(local, of_globals, is_global, window=4, key_mask=mask)).abs().max() <= EXACT


@in_one_test("N", LENGTHS)
def test_windows_may_be_dilated_head_by_head(N: int) -> None:
    local, of_globals, mask = heads(N, H=4), heads(N, H=4, seed=1), some_keys(N)
    dilations = [1, 3, 3, 2]
    o = attend_longformer(local, of_globals, window=4, n_global=2, dilation=dilations, key_mask=mask, block=4)
    is_global = (torch.arange(N) < 2).expand(2, -1)
    for h, dilation in enumerate(dilations):
        one = [[x[:, h : h + 1] for x in given] for given in (local, of_globals)]
        assert (o[:, h : h + 1] - defined(*one, is_global, window=4, dilation=dilation, key_mask=mask)).abs().max() <= EXACT


def test_global_projections_begin_as_the_local_ones_in_a_model_too() -> None:
    config = EncoderConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=2, d_feedforward=8, n_positions=9, attention="longformer")
    layer = Encoder(config).blocks[0].attention
    for name in ("to_q", "to_k", "to_v"):
        assert torch.equal(getattr(layer, name).weight, getattr(layer, f"{name}_global").weight)


@in_one_test(("window", "n_global"), [(4, 1), (4, 3), (3, 6), (30, 2)])
@torch.no_grad()
def test_the_causal_layer_is_its_definition_in_calls_of_any_size(window: int, n_global: int) -> None:
    torch.manual_seed(0)
    layer = CausalLongformerAttention(8, 2, window=window, n_global=n_global).double()
    for to in (layer.to_q_global, layer.to_k_global, layer.to_v_global):
        torch.nn.init.normal_(to.weight)
    x = torch.randn(2, 18, 8, dtype=torch.float64)
    local = [split_heads(to(x), 2) for to in (layer.to_q, layer.to_k, layer.to_v)]
    of_globals = [split_heads(to(x), 2) for to in (layer.to_q_global, layer.to_k_global, layer.to_v_global)]
    is_global, key_mask = (torch.arange(18) < n_global).expand(2, -1), torch.ones(2, 18, dtype=torch.bool)
    o = defined(local, of_globals, is_global, window=2 * (window - 1), key_mask=key_mask, causal=True)
    state, outputs = None, []
    for piece in x.split([1, 1, 3, 1, 8, 4], dim=1):
        y, state = layer(piece, None, state)
        outputs.append(y)
    assert (torch.cat(outputs, dim=1) - layer.to_out(merge_heads(o))).abs().max() <= EXACT
