"""An encoder, reranker or classifier as a graph: texts as token ids (B, N) in, vectors or logits out."""

from pathlib import Path

from torch import Tensor, nn

from export import contract
from export.errors import ExportError
from export.graphs.onnx_file import LARGEST_FILE_BYTES
from export.graphs.packed_encoder import without_padding
from export.graphs.torch_graph import TorchGraph
from models.checkpoints.published import Checkpoint

EXAMPLE_TOKENS = 519  # longer than a group, chunk or window of any layer: of a shorter one the exporter takes N for a constant


class Float32Outputs(nn.Module):
    """A model of any precision whose outputs are a tuple of float32 tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> tuple[Tensor, ...]:
        result = self.model(input_ids, attention_mask, token_type_ids)
        return tuple(tensor.float() for tensor in ((result,) if isinstance(result, Tensor) else result))


def encoder_graph(checkpoint: Checkpoint, model: nn.Module | None = None) -> TorchGraph:
    """The graph of the checkpoint's model, or of `model` in its place. Raises ExportError for an encoder without pooling."""
    sizes = {"B": 3, "N": min(EXAMPLE_TOKENS, checkpoint.max_tokens - 1)}
    module = Float32Outputs(checkpoint.model if model is None else model)
    return TorchGraph(module, _inputs(checkpoint), _outputs(checkpoint), sizes, max_tokens=checkpoint.max_tokens)


def trace(checkpoint: Checkpoint, file: Path, *, separate_projections: bool = False, weights_beside: bool | None = None) -> None:
    """Write the graph of the model without padding; see `without_padding`.

    `weights_beside` puts the weights into a second file; None: only if one file cannot hold them.
    """
    if weights_beside is None:
        weights_beside = sum(int(tensor.nbytes) for tensor in checkpoint.model.state_dict().values()) > LARGEST_FILE_BYTES
    packed = without_padding(checkpoint.model, separate_projections=separate_projections)
    encoder_graph(checkpoint, packed).export(file, weights_beside=weights_beside)


def _inputs(checkpoint: Checkpoint) -> tuple[contract.Tensor, ...]:
    """Token types are an input only if the model reads pairs of texts and has types."""
    pairs = checkpoint.kind in ("reranker", "classifier") and checkpoint.uses_token_types
    names = [contract.INPUT_IDS, contract.ATTENTION_MASK, *([contract.TOKEN_TYPE_IDS] if pairs else [])]
    return tuple(contract.Tensor(name=name, dtype="int64", shape=("B", "N")) for name in names)


def _outputs(checkpoint: Checkpoint) -> tuple[contract.Tensor, ...]:
    if checkpoint.kind != "encoder":
        n_labels = len(checkpoint.id2label)
        per_token = checkpoint.kind == "token_classifier"
        return (contract.Tensor(name=contract.LOGITS, dtype="float32", shape=("B", "N", n_labels) if per_token else ("B", n_labels)),)
    if checkpoint.pooling == "none":
        raise ExportError(f"{checkpoint.folder} has no pooling, so it gives no vector of a text; add a Pooling module to its modules.json")
    dense = checkpoint.model.get_submodule("dense")
    widths = [module.out_features for module in dense.modules() if isinstance(module, nn.Linear)]
    width = int(widths[-1]) if widths else int(checkpoint.config.d_model)
    return (
        contract.Tensor(name=contract.EMBEDDING, dtype="float32", shape=("B", width)),
        contract.Tensor(name=contract.POOLED, dtype="float32", shape=("B", width)),
        contract.Tensor(name=contract.TOKEN_EMBEDDINGS, dtype="float32", shape=("B", "N", checkpoint.config.d_model)),
    )
