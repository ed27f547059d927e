"""Synthesizer: how much a token attends to each position is made from the token alone, or from nothing, and not from pairs of tokens.

o = softmax(L) v. L has a column for each of N_max positions, of which the first N are used, no 1/sqrt(D), and is for each head
    dense                L_i = W_2 relu(W_1 x_i + b_1) + b_2
    random               L = R, (N_max, N_max), learned or fixed
    factorised dense     L_il = A_i[l // b] B_i[l mod b],   A_i = W_A x_i of a numbers, B_i = W_B x_i of b numbers, a b = N_max
    factorised random    L = R_1 R_2ᵀ, of rank k
    dot product          L_ij = q_i . k_j / sqrt(D_k), which is ordinary attention
or a mixture of these, sum_c softmax(α)_c L_c, with one softmax over the keys after it.
Tay et al. 2020, arXiv:2005.00743, section 3. O(N² D_v) time a head; a random one keeps N_max² numbers a head, or 2 k N_max.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.mechanism import Cost, Examples, Mechanism
from models.attention.layers.multi_head import both_masks, head_width, merge_heads, split_heads
from models.attention.layers.scaled_dot_product import masked_softmax
from models.attention.scoring.synthesizer_scores import KINDS, SynthesizedScores
from models.parts.positions import Rotation


def attend_by_scores(scores: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """(B or 1, H, N_q, N_k), (B, H, N_k, D_v) -> (B, H, N_q, D_v). `mask` as in `scaled_dot_product.attend`: 0 without any key."""
    weights = torch.softmax(scores, dim=-1) if mask is None else masked_softmax(scores, mask)
    return weights @ v


class SynthesizerHeads(Mechanism):
    """What both Synthesizers have: the scores, and the projections of values and of what comes out.

    kinds: names in `KINDS`. d_hidden: rows of W_1, d_head unless given (dense). a: rows of W_A, a divisor of n_positions, one near its root
    unless given (factorised dense). rank: k (factorised random). fixed: R is drawn with `seed` and not learned (both random kinds).
    """

    biased = True  # the projections, unless told otherwise

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool | None = None,
        kinds: Sequence[str] = ("dense",),
        n_positions: int = 512,
        d_hidden: int | None = None,
        a: int | None = None,
        rank: int = 8,
        fixed: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        bias = self.biased if bias is None else bias
        self.n_heads = n_heads
        self.d_head = head_width(d_model, n_heads, d_head)
        self.n_positions = n_positions
        self.scores = SynthesizedScores(
            d_model,
            n_heads,
            d_head=self.d_head,
            bias=bias,
            kinds=kinds,
            n_positions=n_positions,
            d_hidden=d_hidden,
            a=a,
            rank=rank,
            fixed=fixed,
            seed=seed,
        )
        self.to_v = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_out = nn.Linear(n_heads * self.d_head, d_model, bias=bias)


class Synthesizer(SynthesizerHeads):
    """Multi-head Synthesizer of one kind, or of a mixture of several. Raises ValueError for an unknown kind, and for N > n_positions."""

    capabilities = Capabilities(cross=False, pairs=True, ordered=True)
    cost = Cost("O(N² D)", lambda N, s: N * s.n_positions * s.D + N * N * s.D)
    examples = Examples({"kinds": KINDS, "n_positions": 128, "fixed": True})

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        pair_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D) -> (B, N, D); arguments as in `SoftmaxAttention.forward`. Raises ValueError for a rotation: there may be no q."""
        if rotation is not None:
            raise ValueError("a Synthesizer has no form for a rotation: its scores know positions by themselves; use none")
        N = x.shape[1]
        if not torch.compiler.is_exporting() and self.n_positions < N:
            raise ValueError(f"N={N} tokens, but the Synthesizer has scores for n_positions={self.n_positions}; cut the input")
        t = torch.arange(N, device=x.device).unsqueeze(0)
        scores = self.scores(x, t, self.scores.keys(x), N)  # (B or 1, H, N, N)
        if pair_bias is not None:
            scores = scores + pair_bias
        v = split_heads(self.to_v(x), self.n_heads)  # (B, H, N, D_v)
        o = attend_by_scores(scores, v, mask=both_masks(key_mask, pair_mask))
        return self.to_out(merge_heads(o))
