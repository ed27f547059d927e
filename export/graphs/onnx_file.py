"""Optimises ONNX files with ONNX Runtime, saves them, and describes them for the manifest. Speedups: docs/decisions.md."""

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime as ort

from export import contract

REWRITTEN = "rewritten by onnxruntime for the CPU, level extended"
LARGEST_FILE_BYTES = 1_900_000_000  # largest .onnx file, because protobuf has a limit of 2 GiB; larger weights are in a second file


def optimise(source: Path, folder: Path) -> Path:
    """Optimise the graph for the CPU by onnxruntime (fused operators, folded constants). Returns the new file in `folder`."""
    folder.mkdir()
    target = folder / contract.GRAPH
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 3
    if weight_file(source).is_file():
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weight_file(target).name)
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    return target


def save(model: onnx.ModelProto, file: Path, *, weights_beside: bool = False) -> None:
    """Write a graph, with its weights in a second file if `weights_beside`, or if one file cannot contain them."""
    beside = weights_beside or sum(len(tensor.raw_data) for tensor in model.graph.initializer) > LARGEST_FILE_BYTES
    onnx.save(model, file, save_as_external_data=beside, location=weight_file(file).name if beside else None)
    if beside:  # onnx lets only its owner read the second file, but the server may be another user
        weight_file(file).chmod(file.stat().st_mode)


def weight_file(file: Path) -> Path:
    """Return the path of the second file, which has the weights of a graph."""
    return file.with_name(file.name + ".data")


def describe(file: Path, inputs: tuple[contract.Tensor, ...], outputs: tuple[contract.Tensor, ...], optimisation: str) -> contract.Graph:
    """Return the manifest's entry for a graph whose inputs and outputs have been checked."""
    model = onnx.load(file, load_external_data=False)
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    operators = Counter(node.op_type for node in model.graph.node)
    return contract.Graph(
        file=file.name, opset=opset, inputs=inputs, outputs=outputs, operators=dict(operators.most_common()), optimisation=optimisation
    )
