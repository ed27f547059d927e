"""The graph of an encoder, reranker or classifier for GPUs. The host packs the tokens, and only one vector per text comes back.

All sizes follow from the shapes of the inputs, so a shape can be captured as a CUDA graph. Attention is onnxruntime's
PackedMultiHeadAttention, which only CUDA has; `cpu_twin.py` makes a graph for CPUs. T is the number of packed tokens, padding at the end
included, B the largest number of texts, N the longest text in tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from export import contract
from export.checks.parity import Feed, Tensors
from export.errors import ExportError
from export.graphs.compact import one
from export.graphs.encoder import width_of
from export.graphs.packed_encoder import with_children
from export.graphs.torch_graph import TorchGraph
from models.attention.layers.softmax import SoftmaxAttention
from models.checkpoints.published import Checkpoint
from models.encoder.heads import SentenceEncoder, SequenceClassifier
from models.encoder.model import Embeddings, Encoder, EncoderBlock
from models.parts.modules import Modules
from models.parts.positions import Rotation, rotate

HOW = "weights in float16; no shape or work depends on data, so that CUDA can record it"
SIZES = {"T": 96, "B": 5, "E": 6, "N": 33}  # sizes of the traced example


def gpu_encoder_graph(checkpoint: Checkpoint) -> TorchGraph:
    """Return the graph of the checkpoint's model, in the model's precision.

    Raises ExportError for an encoder whose attention PackedMultiHeadAttention does not compute, or whose pooling is not a weighted sum.
    """
    model: Any = checkpoint.model
    if (reason := unsupported(model)) is not None:
        raise ExportError(f"{checkpoint.folder} has no graph for GPUs: {reason}")
    typed = 2 in contract.KINDS[checkpoint.kind].texts and checkpoint.uses_token_types
    return TorchGraph(PackedModel(model), *contract.packed_interface(checkpoint.kind, width_of(checkpoint), typed=typed), SIZES)


def pack_one(feed: Feed, inputs: Tensors, pooling: contract.PoolingByWeights) -> Feed:
    """Return the inputs of the graph for one text, from those of the served graph, (1, N)."""
    N = feed[contract.INPUT_IDS].shape[1]
    numbers = np.arange(N)
    weights = {"cls": numbers == 0, "last": numbers == N - 1, "mean": np.full(N, 1 / N), "mean_sqrt_len": np.full(N, N**-0.5)}
    packed = {
        contract.POSITION_IDS: numbers,
        contract.TEXT_OF_TOKEN: numbers * 0,
        contract.POOLING_WEIGHT: weights[pooling],
        contract.TEXTS: np.zeros((1, 1)),
        contract.TOKEN_OFFSET: numbers[None],
        contract.CU_SEQLENS: np.array([0, N]),
    }
    packed |= {name: feed[name][0] for name in (contract.INPUT_IDS, contract.TOKEN_TYPE_IDS) if name in feed}
    return {tensor.name: packed[tensor.name].astype(tensor.dtype) for tensor in inputs}


def unsupported(model: nn.Module) -> str | None:
    """Return why the model has no graph for GPUs, or None if it has one."""
    if not isinstance(model, SentenceEncoder | SequenceClassifier) or not isinstance(model.encoder, Encoder):
        return "it is no encoder of blocks with one output for each text"
    c = model.encoder.config
    if c.attention != "softmax":
        return f"its attention is {c.attention!r}, and PackedMultiHeadAttention computes 'softmax'"
    if c.n_relative_buckets or any(window is not None for window in c.windows):
        return "its attention has windows or a bias for each distance, which PackedMultiHeadAttention computes only with padding"
    if model.pooling not in contract.POOLING_WEIGHTS:
        return f"its pooling is {model.pooling!r}, which is not one of {', '.join(contract.POOLING_WEIGHTS)}"
    return None


class Packing(NamedTuple):
    """Where the texts are among the packed tokens; see `contract.packed_interface`."""

    token_offset: Tensor  # (B, N) int32
    cu_seqlens: Tensor  # (B + 1,) int32


class PackedModel(nn.Module):
    """A model with pooling, over packed tokens."""

    def __init__(self, model: SentenceEncoder | SequenceClassifier) -> None:
        super().__init__()
        encoder = model.encoder
        self.classifier = model if isinstance(model, SequenceClassifier) else None
        self.dense = model.dense if isinstance(model, SentenceEncoder) else None
        self.first_position = 0 if encoder.embeddings.padding_id is None else encoder.embeddings.padding_id + 1
        self.embeddings = _with_given_positions(encoder.embeddings)
        self.rotations = encoder.rotations
        own = {block: with_children(block, attention=PackedAttention(block.attention)) for block in encoder.blocks}
        self.blocks: Modules[EncoderBlock] = Modules(own[block] for block in encoder.blocks)  # several layers may share a block
        self.final_norm = encoder.final_norm

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        text_of_token: Tensor,
        pooling_weight: Tensor,
        texts: Tensor,
        token_offset: Tensor,
        cu_seqlens: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Map the inputs of `contract.packed_interface` to its outputs."""
        t = positions + self.first_position
        x = self.embeddings(input_ids, t, token_type_ids)  # (T, D)
        rotation = by_token(self.rotations["full"](positions)) if self.rotations else None
        packing: Any = Packing(token_offset, cu_seqlens)
        for block in self.blocks:
            x = block(x, packing, rotation=rotation, pair_mask=None, pair_bias=None)
        # The outputs of padding are undefined and may be NaN, which a weight of 0 would not remove.
        x = torch.where((text_of_token >= 0).unsqueeze(1), self.final_norm(x), 0.0)
        weights = (texts == text_of_token) * pooling_weight  # (B, T)
        pooled = weights.to(x.dtype) @ x  # (B, D); a GPU sums products of float16 numbers in float32
        if self.classifier is not None:
            return (self.classifier.classifier(self.classifier.transform(pooled)).float(),)
        assert self.dense is not None
        pooled = self.dense(pooled).float()
        # `unit_length` would become ReduceL2, which needs cuDNN.
        return pooled / (pooled * pooled).sum(-1, keepdim=True).sqrt().clamp_min(1e-12), pooled


class PackedAttention(nn.Module):
    """Softmax attention over packed tokens as one operator of onnxruntime: (T, D) -> (T, D)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        assert isinstance(layer, SoftmaxAttention)
        self.n_heads, self.scale, self.to_out = layer.n_heads, layer.scale, layer.to_out
        projections = (layer.to_q, layer.to_k, layer.to_v)
        self.qkv = nn.Linear(layer.to_q.in_features, 3 * layer.to_q.out_features, bias=layer.to_q.bias is not None)
        self.qkv.weight = nn.Parameter(torch.cat([p.weight for p in projections]))  # (3 H D_k, D)
        if layer.to_q.bias is not None:
            self.qkv.bias = nn.Parameter(torch.cat([p.bias for p in projections]))

    def forward(self, x: Tensor, packing: Packing, *, rotation: Rotation | None, pair_mask: None, pair_bias: None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # (T, H D_k)
        if rotation is not None:
            q, k = (rotate(y.unflatten(-1, (self.n_heads, -1)), rotation).flatten(1) for y in (q, k))
        return self.to_out(one("PackedMultiHeadAttention", [q, k, v, None, *packing], v.shape, num_heads=self.n_heads, scale=self.scale))


def by_token(rotation: Rotation) -> Rotation:
    """Return the rotations of T tokens in a shape that broadcasts to (T, H, D_k / 2)."""
    return Rotation(rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1))


def _with_given_positions(embeddings: Embeddings) -> Embeddings:
    """Return the embeddings with positions as an input: those of RoBERTa would otherwise be counted from the ids, by a CumSum."""
    given = with_children(embeddings)
    given.padding_id = None
    return given


def largest_value(model: nn.Module, run: Callable[[], object]) -> float:
    """Return the largest absolute value that a module within `model` returns while `run` runs it."""
    largest = 0.0

    def look(module: nn.Module, arguments: object, output: object) -> None:
        nonlocal largest
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
            largest = max(largest, float(output.abs().max()))

    hooks = [module.register_forward_hook(look) for module in model.modules()]
    try:
        with torch.inference_mode():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return largest
