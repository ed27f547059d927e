"""LSH attention (Reformer): a token sees only keys that are likely to match it, those with the same hash.

q_i = x_i W_q,   k_j = q_j / |q_j|. In each round r, q_i gets a bucket h_r(i). The tokens are sorted by (bucket, position) and cut into
chunks of C tokens. Token i may see the tokens j of its own chunk, of `before` chunks in front of it and of `after` chunks behind it:
    o_i^r = sum_j p_ij v_j,   p_i = softmax over the seen j of q_i . k_j - log N_ij,   o_i = sum_r softmax_r(lse_i^r) o_i^r
`paper`  of these tokens, i sees those with h_r(j) = h_r(i). N_ij is the number of rounds in which i sees j.
`chunk`  i sees all of these tokens, and N_ij = 1, as in the public code. The last chunk of a round is in front of the next round's first.
q_i . k_i is replaced by -10^5, so that a token attends to itself only if it sees no other. Kitaev et al. 2020, arXiv:2001.04451, eqs. 3-6
and appendix A. R rounds take O(R N C D_k + R N log N) time, O(R N C) memory, and with the rule `paper` O(R² N C) time for N_ij. With
`causal` no future token is seen, but the chunks depend on them; the layer for decoders is in causal_lsh.py.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities, of_nothing, refuse_cross
from models.attention.layers.encoder import EncoderLayer
from models.attention.layers.mechanism import ComplexityRow, Cost, Examples, Mechanism
from models.attention.layers.multi_head import head_width, merge_heads, split_heads
from models.attention.sparse.lsh_buckets import Buckets, angular_buckets, draw_rotations
from models.attention.sparse.lsh_chunks import at, by_bucket, n_rounds_seeing, neighbours
from models.parts.positions import Rotation

Rule = Literal["paper", "chunk"]
RULES = ("paper", "chunk")
SELF_LOGIT = -1e5
EPS = 1e-12


def attend_lsh(
    qk: Tensor,
    v: Tensor,
    buckets: Tensor,
    *,
    key_mask: Tensor | None = None,
    causal: bool = False,
    rule: Rule = "paper",
    chunk: int = 64,
    before: int = 1,
    after: int = 0,
    scale: float = 1.0,
    self_logit: float = SELF_LOGIT,
    eps: float = EPS,
) -> Tensor:
    """Compute LSH attention: qk (B, H, N, D_k), v (B, H, N, D_v), key_mask bool (B, N) -> (B, H, N, D_v), 0 for masked tokens. buckets:
    int64 (B, H or 1, R, N), any integers >= 0. chunk: tokens of a chunk. Raises ValueError for an unknown rule or invalid sizes.
    """
    _check(rule, chunk, before, after)
    refuse_cross("LSH attention", qk=qk, v=v, buckets=buckets.mT)
    if (nothing := of_nothing(qk, qk, v)) is not None:
        return nothing
    B, H, N, _ = qk.shape
    chunk = torch.sym_min(chunk, N)  # a short sequence is not padded to a full chunk
    given, exact = v.dtype, torch.promote_types(v.dtype, torch.float32)
    n_chunks = (N + chunk - 1) // chunk
    more = n_chunks * chunk - N
    real = torch.ones(B, N, dtype=torch.bool, device=qk.device) if key_mask is None else key_mask
    real = F.pad(real, (0, more))[:, None].expand(-1, H, -1)  # (B, H, N'), N' = n_chunks * C
    buckets = F.pad(buckets.expand(-1, H, -1, -1), (0, more))  # (B, H, R, N')
    order = by_bucket(buckets, real)  # (B, H, R, N'): the token at each place in sorted order
    place = order.argsort(-1)  # (B, H, R, N'), the inverse of `order`: the place of each token
    n_filled = ((real[:, :1].sum(-1, keepdim=True) + chunk - 1) // chunk).clamp_min(1)  # (B, 1, 1): number of chunks with a token

    i = order.unflatten(-1, (-1, chunk))  # (B, H, R, chunks, C)
    j, is_once = neighbours(order, n_filled, n_chunks, chunk, before, after, across_rounds=rule == "chunk")  # (B, H, R, chunks, W C) each
    i_, j_ = i.unsqueeze(-1), j.unsqueeze(-2)
    allowed = is_once.unsqueeze(-2) & at(real, i).unsqueeze(-1) & at(real, j).unsqueeze(-2)
    if causal:
        allowed = allowed & (j_ <= i_)
    qk, v = (F.pad(x.to(exact), (0, 0, 0, more)) for x in (qk, v))
    scores = scale * (at(qk, i) @ at(unit_keys(qk, eps=eps), j).mT).to(exact)  # (B, H, R, chunks, C, W C); autocast is undone
    scores = torch.where(i_ == j_, self_logit, scores)
    if rule == "paper":
        own = buckets.gather(-1, order).unflatten(-1, (-1, chunk))  # h_r(i)
        allowed = allowed & (own.unsqueeze(-1) == buckets.gather(-1, j.flatten(3)).view_as(j).unsqueeze(-2))
        n_rounds = n_rounds_seeing(i, j, buckets, place // chunk, n_filled, before, after).clamp_min(1)
        times = allowed / n_rounds.to(exact)  # exp(s - log N_ij) = exp(s) / N_ij
    else:
        times = allowed.to(exact)

    o, lse = _softmax_and_lse(torch.where(allowed, scores, torch.finfo(exact).min), times, at(v, j))
    o, lse = o.flatten(3, 4), lse.flatten(3, 4)  # (B, H, R, N', D_v), (B, H, R, N', 1), sorted
    o = o.gather(3, place.unsqueeze(-1).expand(-1, -1, -1, -1, o.shape[-1]))
    lse = lse.gather(3, place.unsqueeze(-1))
    return (o * torch.softmax(lse, dim=2)).sum(2)[:, :, :N].to(given)


def unit_keys(qk: Tensor, *, eps: float = EPS) -> Tensor:
    """Return q / |q| over the last axis. `eps` is added to the mean of the squares, so that a zero vector stays zero."""
    return qk * torch.rsqrt(qk.square().mean(-1, keepdim=True) + eps) * qk.shape[-1] ** -0.5


class HashedHeads(Mechanism):
    """The projections and the hash of LSH attention. Keys are the queries scaled to length 1, so there is no to_k."""

    def __init__(self, d_model: int, n_heads: int, d_head: int | None, bias: bool, n_rounds: int, n_buckets: Buckets, seed: int) -> None:
        super().__init__()
        self.n_heads, self.n_buckets = n_heads, n_buckets
        self.d_head = head_width(d_model, n_heads, d_head)
        self.to_q = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_v = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_out = nn.Linear(n_heads * self.d_head, d_model, bias=bias)
        self.rotations: Tensor
        self.register_buffer("rotations", draw_rotations(n_heads, n_rounds, self.d_head, n_buckets, seed=seed))


class LSHAttention(HashedHeads, EncoderLayer):
    """Multi-head LSH self-attention. A row of at most `chunk` tokens gets full attention. n_buckets should be about 2 N / chunk; a tuple
    contains the factors of this number. The rotations of the hash are drawn once, from `seed`, and are saved with the weights. The other
    options are those of `attend_lsh`.
    """

    # Outputs depend on the order of the tokens, because a bucket that does not fit into its chunks is cut in this order.
    capabilities = Capabilities(cross=False, pads_to="chunk", ordered=True, weights="pattern")
    cost = Cost(
        "O(R N c D + R N log N)",
        lambda N, s: s.n_rounds * N * (4 * s.chunk * s.D + s.H * math.log2(max(2, N))),
        ComplexityRow("LSH, R rounds, chunk c", "O(1) within a bucket"),
    )
    examples = Examples(
        small={"chunk": 4, "n_buckets": 6},
        large={"n_rounds": 4, "chunk": 64, "n_buckets": 32},
        short={"n_rounds": 2, "chunk": 8, "n_buckets": 8},
        varied=("chunk", (32, 64, 128, 256)),
    )

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = True,
        n_rounds: int = 4,
        n_buckets: Buckets = 32,
        chunk: int = 64,
        before: int = 1,
        after: int = 0,
        rule: Rule = "paper",
        scale: float = 1.0,
        self_logit: float = SELF_LOGIT,
        eps: float = EPS,
        causal: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(d_model, n_heads, d_head, bias, n_rounds, n_buckets, seed)
        _check(rule, chunk, before, after)
        self.chunk = chunk
        self.options: dict[str, Any] = {"chunk": chunk, "before": before, "after": after, "rule": rule, "scale": scale, "causal": causal}
        self.options |= {"self_logit": self_logit, "eps": eps}

    def mix(self, x: Tensor, key_mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        key_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if key_mask is None else key_mask
        qk = split_heads(self.to_q(x), self.n_heads)  # (B, H, N, D_k)
        v = split_heads(self.to_v(x), self.n_heads)
        is_long = key_mask.sum(1) > self.chunk  # (B,)
        buckets = angular_buckets(qk, self.rotations, self.n_buckets) * is_long[:, None, None, None]
        return self.to_out(merge_heads(attend_lsh(qk, v, buckets, key_mask=key_mask, **self.options)))


def _softmax_and_lse(scores: Tensor, times: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax-weighted values (.., C, D_v) and the log of the sum of weights (.., C, 1): scores, times (.., C, W C), v (.., W C,
    D_v). A key's weight is times · exp(score). If all weights of a row are 0, the output is 0 and the log is the lowest number.
    """
    top = scores.amax(-1, keepdim=True)
    exps = torch.exp(scores - top) * times
    total = exps.sum(-1, keepdim=True)
    total = total + (total == 0)
    return exps @ v / total, top + total.log()


def _check(rule: str, chunk: int, before: int, after: int) -> None:
    if rule not in RULES:
        raise ValueError(f"rule={rule!r} is not one of {', '.join(RULES)}")
    if chunk < 1 or before < 0 or after < 0:
        raise ValueError(f"chunk={chunk} must be at least 1 token, before={before} and after={after} at least 0 chunks")
