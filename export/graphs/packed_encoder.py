"""An encoder over packed tokens: outside attention, activations are (T, D), T the tokens of the batch, instead of (B, N, D).

Attention unpacks the tokens to (B, N, D), runs as one of the runtime's fused operators, and packs its outputs. So padding costs almost
nothing, and products of two-dimensional matrices use `Gemm`. The outputs of padded queries are dropped. Figures: docs/decisions.md.
"""

import copy
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from export.graphs.compact import one
from export.graphs.hybrid import CompactHybrid, is_compact
from export.graphs.token_packing import TokenPacking
from models.attention.layers.multi_head import merge_heads, split_heads
from models.attention.layers.softmax import SoftmaxAttention
from models.encoder.heads import SequenceClassifier
from models.encoder.model import Encoder, EncoderBlock
from models.encoder.retrieval import BLOCK, Splade
from models.parts.modules import Modules
from models.parts.positions import Rotation, rotate

Module = TypeVar("Module", bound=nn.Module)


def without_padding(model: Module, *, separate_projections: bool = False) -> Module:
    """Return the model with a packed encoder that shares its weights, only for `torch.onnx.export`; a Reformer is returned unchanged.
    `separate_projections` keeps the projections of q, k and v outside the attention operator, so that they can be quantised.
    """
    if not isinstance(model.encoder, Encoder):  # the encoder is a Reformer
        return model
    first_token_only = isinstance(model, SequenceClassifier) and model.pooling == "cls"
    heads = {"sparse": PackedSplade(head)} if isinstance(head := getattr(model, "sparse", None), Splade) else {}
    return with_children(model, encoder=PackedEncoder(model.encoder, separate_projections, first_token_only), **heads)


class PackedEncoder(nn.Module):
    """`models.encoder.model.Encoder` with blocks on packed tokens: (B, N) ids -> (B, N, D), or (B, 1, D) with `first_token_only`."""

    def __init__(self, encoder: Encoder, separate_projections: bool, first_token_only: bool) -> None:
        super().__init__()
        self.first_token_only = first_token_only
        self.config = encoder.config
        self.embeddings = encoder.embeddings
        self.rotations = encoder.rotations
        self.relative_bias = encoder.relative_bias
        own = {block: packed(block, separate_projections) for block in encoder.blocks}  # several layers may share a block
        self.blocks: Modules[EncoderBlock] = Modules(own[block] for block in encoder.blocks)
        self.final_norm = encoder.final_norm

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        t = torch.arange(input_ids.shape[1], device=input_ids.device)
        packing = TokenPacking.of(attention_mask != 0, t, attention_mask == 1)
        rotations = {name: table(t) for name, table in self.rotations.items()}
        near = {window: (t[None, :] - t[:, None]).abs() <= window for window in set(self.config.windows) if window is not None}
        bias = None if self.relative_bias is None else self.relative_bias(t)
        x = packing.pack(self.embeddings(input_ids, t, token_type_ids))  # (T, D)
        for number, block in enumerate(self.blocks):
            pairs = {
                "rotation": rotations.get(block.reach),
                "pair_mask": None if block.window is None else near[block.window],
                "pair_bias": bias,
            }
            if self.first_token_only and number == len(self.blocks) - 1:
                return self.final_norm(first_tokens(block, x, packing, pairs)).unsqueeze(1)
            x = block(x, packing, **pairs)
        return packing.unpack(self.final_norm(x))


class PackedSplade(nn.Module):
    """`Splade`, whose logits are computed for the packed tokens, one block of the vocabulary after another.

    Only sums in an order that does not depend on the batch are used, so a text has the same weights, to the bit, alone and in any batch.
    """

    def __init__(self, head: Splade) -> None:
        super().__init__()
        self.head = with_children(head)
        del self.head.decoder
        self.weights = nn.ParameterList(weight.contiguous() for weight in head.decoder.weight.detach().split(BLOCK))
        self.biases = nn.ParameterList(bias.contiguous() for bias in head.decoder.bias.detach().split(BLOCK))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        packing = TokenPacking.of(mask, torch.arange(mask.shape[1], device=mask.device))
        h = self.head.transform(packing.pack(x))
        blocks = [packing.unpack(F.linear(h, weight, bias)) for weight, bias in zip(self.weights, self.biases, strict=True)]
        if self.head.pooling == "max":  # an unpacked row repeats its last token instead of padding
            return torch.cat([self.head.pooled(logits) for logits in blocks], dim=1) * mask.any(1, keepdim=True)
        return torch.cat([self.head.pooled(logits * mask.unsqueeze(-1), _in_order) for logits in blocks], dim=1)


def _in_order(x: Tensor) -> Tensor:
    """Return the sum over axis 1, added up from the first to the last: (B, N, D) -> (B, D)."""
    return one("CumSum", [x, torch.tensor(1)], x.shape)[:, -1]


def first_tokens(block: EncoderBlock, x: Tensor, packing: TokenPacking, pairs: dict[str, Any]) -> Tensor:
    """`EncoderBlock.forward` for the first token of every text, which attends to all tokens: (T, D) -> (B, D)."""
    B, N = packing.mask.shape
    first = torch.arange(B, device=x.device) * N  # the positions of the first tokens among all B * N positions
    answers = packing._replace(position=first)  # so that only the outputs of first tokens are packed
    kept = x.index_select(0, packing.row.index_select(0, first))
    if block.pre_norm:
        return block.apply_feedforward(kept + block.attention(block.attention_norm(x), answers, **pairs))
    return block.apply_feedforward(block.attention_norm(kept + block.attention(x, answers, **pairs)))


def packed(block: EncoderBlock, separate_projections: bool) -> EncoderBlock:
    """Return the block with an attention layer whose input and output are (T, D)."""
    layer = block.attention
    attention: nn.Module
    if isinstance(layer, SoftmaxAttention):
        attention = FusedAttention(layer, separate_projections)
    else:
        attention = CompactHybrid(layer) if is_compact(layer) else Unpacked(layer)
    return with_children(block, attention=attention)


class FusedAttention(nn.Module):
    """Softmax attention as one operator of onnxruntime, with the projections, unless q and k are rotated after them or
    `separate_projections`.
    """

    def __init__(self, layer: SoftmaxAttention, separate_projections: bool) -> None:
        super().__init__()
        self.layer = layer
        self.separate_projections = separate_projections
        projections = (layer.to_q, layer.to_k, layer.to_v)
        self.qkv_weight = nn.Parameter(torch.cat([p.weight for p in projections]).T.contiguous())  # (D, 3 H D_k)
        self.qkv_bias = nn.Parameter(torch.cat([p.bias for p in projections])) if layer.to_q.bias is not None else None

    def forward(
        self, x: Tensor, packing: TokenPacking, *, rotation: Rotation | None, pair_mask: Tensor | None, pair_bias: Tensor | None
    ) -> Tensor:
        """Compute attention: (T, D) -> (T, D). The operators add -10,000 to the score of a padded key, so its weight is exactly 0."""
        key_mask = packing.mask.int()  # (B, N)
        score_bias = both_biases(pair_mask, pair_bias, x.dtype)
        if rotation is None and not self.separate_projections:
            o = self._with_projections(packing.unpack(x), key_mask, score_bias)
        else:
            o = self._after_projections(packing, x, key_mask, rotation, score_bias)
        return self.layer.to_out(packing.pack(o))

    def _with_projections(self, x: Tensor, key_mask: Tensor, score_bias: Tensor | None) -> Tensor:
        """Compute attention by one operator that includes the projections, also of padding: (B, N, D) -> (B, N, H * D_k)."""
        width = self.layer.n_heads * self.layer.d_head
        inputs, heads = [x, self.qkv_weight, self.qkv_bias, key_mask, None, score_bias], self.layer.n_heads
        return one("Attention", inputs, (*x.shape[:2], width), num_heads=heads, qkv_hidden_sizes=[width] * 3, scale=self.layer.scale)

    def _after_projections(
        self, packing: TokenPacking, x: Tensor, key_mask: Tensor, rotation: Rotation | None, score_bias: Tensor | None
    ) -> Tensor:
        """Project x to q, k and v with three matrices, then compute attention: packed (T, D) -> padded (B, N, H * D_k)."""
        layer = self.layer
        q, k, v = (packing.unpack(project(x)) for project in (layer.to_q, layer.to_k, layer.to_v))
        if rotation is not None:
            q, k = (merge_heads(rotate(split_heads(y, layer.n_heads), rotation)) for y in (q, k))
        inputs = [q, k, v, None, key_mask, score_bias]
        return one("MultiHeadAttention", inputs, v.shape, num_heads=layer.n_heads, scale=layer.scale)


class Unpacked(nn.Module):
    """A wrapper that runs any other attention layer on padded rows: (T, D) -> (T, D)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, packing: TokenPacking, **pairs: Tensor | None) -> Tensor:
        return packing.pack(self.layer(packing.unpack(x), packing.mask, **pairs))


def both_biases(pair_mask: Tensor | None, pair_bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Combine the mask of allowed pairs (N, N) and the bias (1, H, N, N) into one bias that is added to the scores; None without both."""
    if pair_mask is None:
        return pair_bias
    allowed = torch.where(pair_mask, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]  # (1, 1, N, N)
    return allowed if pair_bias is None else allowed + pair_bias


def with_children(module: Module, **children: nn.Module) -> Module:
    """Return a copy of `module` with some children replaced. The other children are shared with `module`, which is unchanged."""
    changed = copy.copy(module)
    changed._modules = {**module._modules, **children}
    return changed
