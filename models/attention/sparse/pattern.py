"""Base of the encoder's layers in which a fixed pattern says which token sees which: projections to heads and back around one function."""

from torch import Tensor

from models.attention.layers.capabilities import refuse_pairs
from models.attention.layers.multi_head import EqualHeads, merge_heads
from models.parts.positions import Rotation


class PatternAttention(EqualHeads):
    """A subclass says `attend`. The projections are those of `SoftmaxAttention`, so that weights are exchangeable.

    Its forward takes a rotation, and raises ValueError for a pair mask or a pair bias: pairs outside the pattern are never formed.
    """

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """(B, H, N, D_k) three times, bool (B, N) -> (B, H, N, D_k); 0 where a query may see no key."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        pair_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D), bool (B, N) -> (B, N, D)."""
        refuse_pairs(type(self).__name__, None, pair_mask, pair_bias)
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k)
        return self.to_out(merge_heads(self.attend(q, k, v, key_mask)))


def at_least(name: str, value: int, least: int, why: str) -> int:
    """`value`, or ValueError."""
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}: {why}")
    return value
