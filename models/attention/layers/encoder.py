"""Base classes of the layers of encoders. They check the arguments of `forward`. The base classes for decoders are in causal.py."""

from collections.abc import Callable

from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.mechanism import ALL_PAIRS, Mechanism
from models.attention.layers.multi_head import EqualHeads, both_masks, merge_heads
from models.parts.positions import Rotation


class EncoderLayer(Mechanism):
    """A base class of encoder layers that accept no pair mask and no pair bias. A subclass defines `mix`."""

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        pair_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
    ) -> Tensor:
        """Map x (B, N, D) to (B, N, D). key_mask bool (B, N): True at tokens.

        Raises ValueError for a pair mask or a pair bias, and for a rotation if the layer does not support it.
        """
        if pair_mask is not None or pair_bias is not None or (rotation is not None and not self.capabilities.rotates):
            name = type(self).__name__
            raise ValueError(f"{name} supports no rotation, pair mask or pair bias; use softmax attention")
        return self.mix(x, key_mask, rotation)

    def mix(self, x: Tensor, key_mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        """Return the outputs (B, N, D) of `forward`, which has checked that the layer supports the arguments."""
        raise NotImplementedError


class EqualHeadsEncoderLayer(EqualHeads, EncoderLayer):
    """An `EncoderLayer` with the projections of `SoftmaxAttention`, whose weights it can load. A subclass defines `attend`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Return the heads' outputs: q, k, v (B, H, N, D_k), key_mask bool (B, N) -> (B, H, N, D_k), 0 for a query that sees no key."""
        raise NotImplementedError

    def mix(self, x: Tensor, key_mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k)
        return self.to_out(merge_heads(self.attend(q, k, v, key_mask)))


class PairLayer(Mechanism):
    """A base class of layers that score all pairs of tokens. A subclass defines `heads` (as in `EqualHeads`), `to_out` and `attend`.

    attend(q, k, v, mask=.., bias=..): (B, H, N_q, D_k), (B, H, N_k, D_k), (B, H, N_k, D_v) -> (B, H, N_q, D_v). It is a function, or a
    module if the score has parameters of its own. mask (bool, True = attend) and bias (added to the scores) broadcast to (B, H, N_q, N_k),
    or are None. A query that may attend to no key gets the output 0.
    """

    capabilities = Capabilities(rotates=True, pairs=True)
    cost = ALL_PAIRS
    attend: Callable[..., Tensor]
    to_out: nn.Linear

    def heads(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, N, D) to q, k and v, each (B, H, N, D_k), and apply the rotation to q and k."""
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
        """Map (B, N, D) to (B, N, D). Raises ValueError for a rotation if the layer does not support it.

        key_mask bool (B, N): True at tokens. rotation: rotates q and k by position. pair_mask bool (N, N): which query may see which
        key. pair_bias (1, H, N, N): added to the scores. Outputs at padding are undefined.
        """
        if rotation is not None and not self.capabilities.rotates:
            raise ValueError(f"{type(self).__name__} supports no rotation; add positions to the embeddings")
        q, k, v = self.heads(x, rotation)
        return self.to_out(merge_heads(self.attend(q, k, v, mask=both_masks(key_mask, pair_mask), bias=pair_bias)))
