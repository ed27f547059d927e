"""A loaded checkpoint becomes an ONNX file: torch's exporter with B and N left free, then onnxruntime's own rewriting, done once.

What was measured to pay, and what was not, is in docs/log.md, 2026-11-21.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnxruntime as ort
import torch
from torch import Tensor, nn

from export import contract
from export.errors import ExportError
from export.graphs.packed_encoder import without_padding
from models.checkpoints.published import Checkpoint

OPSET = 20
PACKED = "tokens packed to (T, D) between attentions"
REWRITTEN = "rewritten by onnxruntime for the CPU, level extended"
EXAMPLE_TOKENS = 519  # longer than a group, chunk or window of any layer: of a shorter one the exporter takes N for a constant
LARGEST_FILE_BYTES = 1_900_000_000  # of an .onnx file; protobuf ends at 2 GiB, and weights beyond that go to a file beside it


def inputs_of(checkpoint: Checkpoint) -> tuple[contract.Tensor, ...]:
    """What the graph reads. Token types only where two texts may come and the model tells them apart."""
    pairs = checkpoint.kind in ("reranker", "classifier") and checkpoint.uses_token_types
    names = [contract.INPUT_IDS, contract.ATTENTION_MASK, *([contract.TOKEN_TYPE_IDS] if pairs else [])]
    return tuple(contract.Tensor(name=name, dtype="int64", shape=("B", "N")) for name in names)


def outputs_of(checkpoint: Checkpoint) -> tuple[contract.Tensor, ...]:
    """What the graph gives, widths included."""
    if checkpoint.kind != "encoder":
        n_labels = len(checkpoint.id2label)
        per_token = checkpoint.kind == "token_classifier"
        return (contract.Tensor(name=contract.LOGITS, dtype="float32", shape=("B", "N", n_labels) if per_token else ("B", n_labels)),)
    if checkpoint.pooling == "none":
        raise ExportError(f"{checkpoint.folder} has no pooling, so it gives no vector of a text; add a Pooling module to its modules.json")
    width = _width(checkpoint)
    return (
        contract.Tensor(name=contract.EMBEDDING, dtype="float32", shape=("B", width)),
        contract.Tensor(name=contract.POOLED, dtype="float32", shape=("B", width)),
        contract.Tensor(name=contract.TOKEN_EMBEDDINGS, dtype="float32", shape=("B", "N", checkpoint.config.d_model)),
    )


def run_torch(checkpoint: Checkpoint, feed: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's own answer to the inputs of a graph, by the names of its outputs."""
    with torch.inference_mode():
        result = checkpoint.model(*(feed[tensor.name] for tensor in inputs_of(checkpoint)))
    if checkpoint.kind != "encoder":
        return {contract.LOGITS: result}
    return {contract.EMBEDDING: result.embedding, contract.POOLED: result.pooled, contract.TOKEN_EMBEDDINGS: result.token_embeddings}


def trace(checkpoint: Checkpoint, file: Path, *, separate_projections: bool = False, weights_beside: bool | None = None) -> None:
    """Write the graph of the model as torch exports it, tokens packed; see `without_padding`. A half-precision model gives float32 too.

    `weights_beside` puts the weights into a second file; None: where one file cannot hold them.
    """
    inputs, outputs = inputs_of(checkpoint), outputs_of(checkpoint)
    example = torch.ones(3, min(EXAMPLE_TOKENS, checkpoint.max_tokens - 1), dtype=torch.int64)  # a size of 1 would be taken for a constant
    axes = {0: torch.export.Dim("B"), 1: torch.export.Dim("N", max=checkpoint.max_tokens)}
    with quiet():
        torch.onnx.export(
            Float32Outputs(without_padding(checkpoint.model, separate_projections=separate_projections)),
            tuple(example.clone() for _ in inputs),  # one tensor twice would be taken for one input
            file,
            dynamo=True,
            dynamic_shapes=tuple(axes for _ in inputs),
            input_names=[tensor.name for tensor in inputs],
            output_names=[tensor.name for tensor in outputs],
            opset_version=OPSET,
            external_data=_weight_bytes(checkpoint.model) > LARGEST_FILE_BYTES if weights_beside is None else weights_beside,
            verbose=False,
        )
    strip(file)


class Float32Outputs(nn.Module):
    """A model that computes in any precision and answers in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> tuple[Tensor, ...]:
        result = self.model(input_ids, attention_mask, token_type_ids)
        return tuple(tensor.float() for tensor in ((result,) if isinstance(result, Tensor) else result))


def optimise(source: Path, folder: Path) -> Path:
    """Let onnxruntime rewrite the graph for the CPU (fused operators, folded constants) into a new folder; the file there."""
    folder.mkdir()
    target = folder / contract.GRAPH
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 3
    if beside(source).is_file():
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", beside(target).name)
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    return target


def save(model: onnx.ModelProto, file: Path) -> None:
    """Write a graph, its weights beside it where one file cannot hold them."""
    large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > LARGEST_FILE_BYTES
    onnx.save(model, file, save_as_external_data=large, location=beside(file).name if large else None)


def beside(file: Path) -> Path:
    """Where the weights of a graph are that are not in its own file."""
    return file.with_name(file.name + ".data")


def describe(file: Path, inputs: tuple[contract.Tensor, ...], outputs: tuple[contract.Tensor, ...], optimisation: str) -> contract.Graph:
    """The manifest's account of a graph that was checked to have these inputs and outputs."""
    model = onnx.load(file, load_external_data=False)
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    operators = Counter(node.op_type for node in model.graph.node)
    return contract.Graph(
        file=file.name, opset=opset, inputs=inputs, outputs=outputs, operators=dict(operators.most_common()), optimisation=optimisation
    )


def _width(checkpoint: Checkpoint) -> int:
    dense = checkpoint.model.get_submodule("dense")
    widths = [module.out_features for module in dense.modules() if isinstance(module, nn.Linear)]
    return int(widths[-1]) if widths else int(checkpoint.config.d_model)


def _weight_bytes(model: nn.Module) -> int:
    return sum(int(tensor.nbytes) for tensor in model.state_dict().values())


def strip(file: Path) -> None:
    """Remove what the exporter notes about its own source code, paths of the exporting machine among it."""
    model = onnx.load(file, load_external_data=False)
    model.doc_string = ""
    del model.metadata_props[:]
    for part in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output, *model.graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]
    onnx.save(model, file)


@contextmanager
def quiet() -> Iterator[None]:
    """torch's exporter warns of its own use of torch, and logs that torchvision is absent: nothing a caller could act on."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
