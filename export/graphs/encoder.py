"""The graph of an encoder, reranker or classifier: from token ids (B, N) to vectors or logits."""

from pathlib import Path

from torch import Tensor, nn

from export import contract
from export.errors import ExportError
from export.graphs.onnx_file import LARGEST_FILE_BYTES
from export.graphs.packed_encoder import without_padding
from export.graphs.torch_graph import TorchGraph
from models.checkpoints.published import Checkpoint
from models.encoder.heads import SentenceEncoder
from models.encoder.retrieval import Splade, TokenWeights

# N of the traced example. It exceeds every group, chunk and window of a layer, because the exporter would otherwise make N a constant.
EXAMPLE_TOKENS = 519


class Float32Outputs(nn.Module):
    """A wrapper of a model in any precision that returns a tuple of float32 tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> tuple[Tensor, ...]:
        result = self.model(input_ids, attention_mask, token_type_ids)
        return tuple(tensor.float() for tensor in ((result,) if isinstance(result, Tensor) else result) if tensor is not None)


def encoder_graph(checkpoint: Checkpoint, model: nn.Module | None = None) -> TorchGraph:
    """Return the graph of the checkpoint's model, or of `model`. Token types are an input only if the model reads pairs of texts and has
    types. Raises ExportError for an encoder that gives nothing of a text.
    """
    sizes = {"B": 3, "N": min(EXAMPLE_TOKENS, checkpoint.max_tokens - 1)}
    module = Float32Outputs(checkpoint.model if model is None else model)
    typed = 2 in contract.KINDS[checkpoint.kind].texts and checkpoint.uses_token_types
    interface = contract.encoder_interface(
        checkpoint.kind,
        width_of(checkpoint),
        checkpoint.config.d_model,
        typed=typed,
        dense=checkpoint.pooling != "none",
        sparse=sparse_of(checkpoint),
        multivector=multivector_of(checkpoint),
    )
    return TorchGraph(module, *interface, sizes, max_tokens=checkpoint.max_tokens)


def trace(checkpoint: Checkpoint, file: Path, *, separate_projections: bool = False, weights_beside: bool | None = None) -> None:
    """Write the model's packed graph; see `without_padding`. `weights_beside` None: only if one file cannot contain the weights."""
    if weights_beside is None:
        weights_beside = sum(int(tensor.nbytes) for tensor in checkpoint.model.state_dict().values()) > LARGEST_FILE_BYTES
    packed = without_padding(checkpoint.model, separate_projections=separate_projections)
    encoder_graph(checkpoint, packed).export(file, weights_beside=weights_beside)


def sparse_of(checkpoint: Checkpoint) -> contract.Sparse | None:
    """Return the manifest's description of the model's sparse vectors."""
    head = checkpoint.model.sparse if isinstance(checkpoint.model, SentenceEncoder) else None
    if head is None:
        return None
    if isinstance(head, TokenWeights):
        return contract.Sparse(size=checkpoint.config.vocab_size, by_token=True, **checkpoint.search.sparse)
    size = head.decoder.out_features if isinstance(head, Splade) else head.encoder.out_features
    return contract.Sparse(size=size, vocabulary=isinstance(head, Splade), **checkpoint.search.sparse)


def multivector_of(checkpoint: Checkpoint) -> contract.MultiVector | None:
    """Return the manifest's description of the model's token matrices."""
    head = checkpoint.model.multivector if isinstance(checkpoint.model, SentenceEncoder) else None
    if head is None:
        return None
    return contract.MultiVector(width=head.width, **checkpoint.search.multivector)


def width_of(checkpoint: Checkpoint) -> int:
    """Return the width of the first output: the number of labels of a classifier, or the length of an encoder's vector."""
    if contract.KINDS[checkpoint.kind].has_labels:
        return len(checkpoint.id2label)
    if checkpoint.pooling == "none":
        if sparse_of(checkpoint) is None and multivector_of(checkpoint) is None:
            raise ExportError(
                f"{checkpoint.folder} has no pooling, so it gives no vector of a text; add a Pooling module to its modules.json"
            )
        return int(checkpoint.config.d_model)
    dense = checkpoint.model.get_submodule("dense")
    widths = [module.out_features for module in dense.modules() if isinstance(module, nn.Linear)]
    return int(widths[-1]) if widths else int(checkpoint.config.d_model)
