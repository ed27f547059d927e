"""Base classes of the layers of encoders. They check the arguments of `forward`. The base classes for decoders are in causal.py."""

from collections.abc import Callable

from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.mechanism import ALL_PAIRS, Mechanism
from models.attention.layers.multi_head import EqualHeads, both_masks, merge_heads
from models.parts.positions import Rotation


class EncoderLayer(Mechanism):
    """A base class of encoder layers. A subclass defines mix(x, key_mask, rotation), with pair_mask and pair_bias if it supports pairs."""

    mix: Callable[..., Tensor]

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        pair_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
    ) -> Tensor:
        """Map x (B, N, D) to (B, N, D), undefined at padding. key_mask bool (B, N): True at tokens. rotation: rotates q and k by position.
        pair_mask bool (N, N): which query may see which key. pair_bias (1, H, N, N): added to the scores.

        Raises ValueError for a rotation, a pair mask or a pair bias that the layer does not support.
        """
        can, name = self.capabilities, type(self).__name__
        if rotation is not None and not can.rotates and can.pairs:
            raise ValueError(f"{name} supports no rotation; add positions to the embeddings")
        pairs = {"pair_mask": pair_mask, "pair_bias": pair_bias}
        if not can.pairs and ((rotation is not None and not can.rotates) or any(each is not None for each in pairs.values())):
            raise ValueError(f"{name} supports no rotation, pair mask or pair bias; use softmax attention")
        return self.mix(x, key_mask, rotation, **(pairs if can.pairs else {}))


class EqualHeadsEncoderLayer(EqualHeads, EncoderLayer):
    """An `EncoderLayer` with the projections of `SoftmaxAttention`, whose weights it can load. A subclass defines `attend`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Return the heads' outputs: q, k, v (B, H, N, D_k), key_mask bool (B, N) -> (B, H, N, D_k), 0 for a query that sees no key."""
        raise NotImplementedError

    def mix(self, x: Tensor, key_mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k)
        return self.to_out(merge_heads(self.attend(q, k, v, key_mask)))


class PairLayer(EncoderLayer):
    """A base class of layers that score all pairs of tokens. A subclass defines `heads` (as in `EqualHeads`), `to_out` and `attend`.

    attend(q, k, v, mask=.., bias=..): (B, H, N_q, D_k), (B, H, N_k, D_k), (B, H, N_k, D_v) -> (B, H, N_q, D_v), a function, or a module if
    the score has parameters. mask (bool) and bias (added to the scores) broadcast to (B, H, N_q, N_k). A query without keys gets 0.
    """

    capabilities = Capabilities(rotates=True, pairs=True)
    cost = ALL_PAIRS
    attend: Callable[..., Tensor]
    heads: Callable[..., tuple[Tensor, Tensor, Tensor]]
    to_out: nn.Linear

    def mix(
        self, x: Tensor, key_mask: Tensor | None, rotation: Rotation | None, *, pair_mask: Tensor | None, pair_bias: Tensor | None
    ) -> Tensor:
        q, k, v = self.heads(x, rotation)
        return self.to_out(merge_heads(self.attend(q, k, v, mask=both_masks(key_mask, pair_mask), bias=pair_bias)))
