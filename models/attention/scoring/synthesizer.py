"""Synthesizer: attention whose scores are computed from each token alone, or are constant, and not from pairs of tokens.

o = softmax(L) v. L has a column for each of N_max positions, of which the first N are used. For each head L is
    dense                L_i = W_2 relu(W_1 x_i + b_1) + b_2
    random               L = R, (N_max, N_max), learned or fixed
    factorised dense     L_il = A_i[l // b] B_i[l mod b],   A_i = W_A x_i of a numbers, B_i = W_B x_i of b numbers, a b = N_max
    factorised random    L = R_1 R_2ᵀ, of rank k
    dot product          L_ij = q_i . k_j / sqrt(D_k), which is ordinary attention
or a mixture of these, sum_c softmax(α)_c L_c, followed by one softmax over the keys.
Tay et al. 2020, arXiv:2005.00743, section 3. O(N² D_v) time a head. The random kinds store N_max² or 2 k N_max numbers a head.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.encoder import EncoderLayer
from models.attention.layers.mechanism import Cost, Examples, Mechanism
from models.attention.layers.multi_head import both_masks, head_width, merge_heads, split_heads
from models.attention.layers.scaled_dot_product import masked_softmax
from models.attention.scoring.synthesizer_scores import (
    KINDS,
    DenseScores,
    DotProductScores,
    FactorisedDenseScores,
    FactorisedRandomScores,
    RandomScores,
    SynthesizedScores,
)


def attend_by_scores(scores: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return softmax(scores) v: scores (B or 1, H, N_q, N_k), v (B, H, N_k, D_v) -> (B, H, N_q, D_v), or 0 if there is no key."""
    return masked_softmax(scores, mask) @ v


class SynthesizerHeads(Mechanism):
    """A base class of `Synthesizer` and `CausalSynthesizer`, with the scores and with the projections of the values and of the output.

    kinds: names in `KINDS`. d_hidden: for the dense kind, rows of W_1, by default d_head. a: for the factorised dense kind, rows of W_A, a
    divisor of n_positions, by default near its square root. rank: for the factorised random kind, k. fixed: for the random kinds, R is
    drawn with `seed` and not trained.
    """

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
        if isinstance(kinds, str) or not kinds or set(kinds) - set(KINDS) or len(set(kinds)) < len(kinds):
            raise ValueError(f"kinds={kinds!r} must be a list of some of {', '.join(KINDS)}, each at most once")
        bias = self.biased if bias is None else bias
        self.n_heads = n_heads
        self.d_head = D_k = head_width(d_model, n_heads, d_head)
        self.n_positions = n_positions
        random = torch.Generator().manual_seed(seed)
        make: dict[str, Callable[[], nn.Module]] = {
            "dense": lambda: DenseScores(d_model, n_heads, n_positions, d_hidden or D_k),
            "random": lambda: RandomScores(n_heads, n_positions, fixed, random),
            "factorised_dense": lambda: FactorisedDenseScores(d_model, n_heads, n_positions, a),
            "factorised_random": lambda: FactorisedRandomScores(n_heads, n_positions, rank, fixed, random),
            "dot_product": lambda: DotProductScores(d_model, n_heads, D_k, bias),
        }
        self.scores = SynthesizedScores({kind: make[kind]() for kind in kinds})
        self.to_v = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_out = nn.Linear(n_heads * self.d_head, d_model, bias=bias)


class Synthesizer(SynthesizerHeads, EncoderLayer):
    """Multi-head Synthesizer of one kind, or a mixture of several. Raises ValueError if a kind is unknown or N > n_positions."""

    capabilities = Capabilities(cross=False, pairs=True, ordered=True)
    cost = Cost("O(N² D)", lambda N, s: N * s.n_positions * s.D + N * N * s.D)
    examples = Examples({"kinds": KINDS, "n_positions": 128, "fixed": True})

    def mix(self, x: Tensor, key_mask: Tensor | None, rotation: None, *, pair_mask: Tensor | None, pair_bias: Tensor | None) -> Tensor:
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
