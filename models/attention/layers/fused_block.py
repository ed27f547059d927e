"""Self-attention as a block of a pre-norm transformer: LayerNorm, then one matrix product for the q, k and v of all heads.

[q | k | v] = norm(x) W_qkv,   o = dropout(softmax(q kᵀ / sqrt(D_k))) v,   y = dropout(concat(heads) W^O + b)
Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2, with a W_qkv without bias, as implementations of Dosovitskiy et al. 2020,
arXiv:2010.11929, have it. A block with one head as wide as the model has no W^O, because W^V W^O would be one matrix like W^V. The caller
adds the residual, x + y.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.multi_head import both_masks, head_width, merge_heads, split_heads
from models.attention.layers.scaled_dot_product import masked_softmax, scale_of
from models.attention.layers.softmax import SoftmaxAttention


def fused(W_q: Tensor, W_k: Tensor, W_v: Tensor) -> Tensor:
    """Concatenate W_q, W_k and W_v, each (H D_k, D), to W_qkv (3 H D_k, D)."""
    return torch.cat([W_q, W_k, W_v])


def separated(W_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split W_qkv (3 H D_k, D) into W_q, W_k and W_v, each (H D_k, D)."""
    W_q, W_k, W_v = W_qkv.chunk(3)
    return W_q, W_k, W_v


def attend_fused(
    x: Tensor, *, W_qkv: Tensor, n_heads: int, scale: float | None = None, key_mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Return the concatenated heads, before W^O: x (B, N, D), W_qkv (3 H D_k, D), key_mask bool (B, N) -> (B, N, H D_k).

    `scale` defaults to D_k^-1/2. dropout: the probability that an attention weight is set to 0.
    """
    q, k, v = (split_heads(part, n_heads) for part in (x @ W_qkv.mT).chunk(3, dim=-1))  # (B, H, N, D_k)
    scores = (q * scale_of(q, scale)) @ k.mT  # (B, H, N, N)
    weights = masked_softmax(scores, both_masks(key_mask, None))
    return merge_heads(F.dropout(weights, dropout) @ v)


class FusedBlock(nn.Module):
    """LayerNorm and self-attention with one projection for q, k and v. It has dropout in training mode."""

    def __init__(self, d_model: int, n_heads: int = 8, *, d_head: int | None = 64, dropout: float = 0.0, norm_eps: float = 1e-5) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} must be at least 0 and below 1")
        self.n_heads = n_heads
        self.d_head = head_width(d_model, n_heads, d_head)
        self.dropout = dropout
        d_heads = n_heads * self.d_head
        one_wide_head = n_heads == 1 and self.d_head == d_model
        self.norm = nn.LayerNorm(d_model, eps=norm_eps)
        self.to_qkv = nn.Linear(d_model, 3 * d_heads, bias=False)
        self.to_out = nn.Identity() if one_wide_head else nn.Linear(d_heads, d_model)
        for W in separated(self.to_qkv.weight.detach()):
            nn.init.xavier_uniform_(W)
        if isinstance(self.to_out, nn.Linear):
            nn.init.xavier_uniform_(self.to_out.weight)
            nn.init.zeros_(self.to_out.bias)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Apply the block, without the residual: x (B, N, D), key_mask bool (B, N) -> (B, N, D)."""
        dropout = self.dropout if self.training else 0.0
        o = attend_fused(self.norm(x), W_qkv=self.to_qkv.weight, n_heads=self.n_heads, key_mask=key_mask, dropout=dropout)
        return F.dropout(self.to_out(o), dropout)


@torch.no_grad()
def to_separate(block: FusedBlock) -> tuple[nn.LayerNorm, SoftmaxAttention]:
    """Return a norm and an attention layer with the block's weights. The norm and then the layer compute the block without dropout."""
    weight = block.to_qkv.weight
    norm = nn.LayerNorm(block.norm.normalized_shape, eps=block.norm.eps).to(weight)
    norm.load_state_dict(block.norm.state_dict())
    attention = SoftmaxAttention(weight.shape[1], block.n_heads, d_head=block.d_head).to(weight)
    for to, W in zip((attention.to_q, attention.to_k, attention.to_v), separated(weight), strict=True):
        to.weight.copy_(W)
        nn.init.zeros_(to.bias)
    if isinstance(block.to_out, nn.Linear):
        attention.to_out.load_state_dict(block.to_out.state_dict())
    else:
        nn.init.eye_(attention.to_out.weight)
        nn.init.zeros_(attention.to_out.bias)
    return norm, attention


@torch.no_grad()
def from_separate(norm: nn.LayerNorm, attention: SoftmaxAttention) -> FusedBlock:
    """Return the block that computes attention(norm(x)), with copied weights.

    The block has no bias for q, k and v, and none at all if it has no W^O. Raises ValueError if the bias of to_q, to_k or to_v, or in the
    latter case of to_out, is not 0.
    """
    W_q, W_k, W_v, W_o = (to.weight for to in (attention.to_q, attention.to_k, attention.to_v, attention.to_out))
    block = FusedBlock(W_q.shape[1], attention.n_heads, d_head=attention.d_head, norm_eps=norm.eps).to(W_q)
    without_bias = {"to_q": attention.to_q, "to_k": attention.to_k, "to_v": attention.to_v}
    if isinstance(block.to_out, nn.Identity):
        without_bias["to_out"] = attention.to_out
    for name, linear in without_bias.items():
        if linear.bias is not None and linear.bias.any():
            raise ValueError(
                f"{name} has a bias of up to {linear.bias.abs().max():.3g}, which the fused block cannot store; train it without"
            )
    block.to_qkv.weight.copy_(fused(W_q, W_k, W_o @ W_v if isinstance(block.to_out, nn.Identity) else W_v))
    # Not strict, because `norm` and `to_out` may lack a weight or a bias: the block then keeps its own initial one, 1 or 0.
    block.norm.load_state_dict(norm.state_dict(), strict=False)
    block.to_out.load_state_dict(attention.to_out.state_dict(), strict=False)
    return block
