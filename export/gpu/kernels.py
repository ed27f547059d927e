"""Which nodes the CUDA provider computes: a table of signatures that it accepted, against which every graph for GPUs is checked.

`cuda_kernels.txt` has a line for each signature: domain, operator, version, types of inputs -> types of outputs. Its first line names the
release of onnxruntime-gpu, whose own library was asked, by opening graphs and reading which provider got each node:

    python -m export.gpu.kernels GRAPH..    with onnxruntime-gpu of the pinned release, on a GPU or with the driver of tests/gpu/driver

A node with another signature is an error until the library was asked about it.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import onnx
import onnxruntime as ort

from export.errors import ExportError

TABLE = Path(__file__).with_name("cuda_kernels.txt")
ABOUT = "# onnxruntime-gpu"

# Operators whose output's size or whose work depends on data: a run would wait for the host, or could not be recorded as a CUDA graph.
DYNAMIC = frozenset(
    {
        "NonZero",
        "Compress",
        "Unique",
        "NonMaxSuppression",
        "CumSum",
        "Range",
        "ConstantOfShape",
        "Loop",
        "If",
        "Scan",
        "SequenceAt",
        "Resize",
    }
)


def table() -> frozenset[str]:
    """Return the signatures that the pinned release accepts."""
    return frozenset(line for line in TABLE.read_text().splitlines() if not line.startswith("#"))


def release() -> str:
    """Return the release of onnxruntime-gpu that was asked."""
    return TABLE.read_text().splitlines()[0].removeprefix(ABOUT).split(",")[0].strip()


def check(file: Path) -> None:
    """Raise ExportError for the first node of the graph that is dynamic, or that the CUDA provider is not known to compute."""
    known = table()
    for node, signature in signatures(file):
        if node.op_type in DYNAMIC:
            raise ExportError(f"{file.name} has the node {node.name} of {node.op_type}, whose size or work depends on data")
        if signature not in known:
            raise ExportError(f"{file.name} has the node {node.name}, and {TABLE.name} does not have its signature: {signature}")


def signatures(file: Path) -> Iterator[tuple[onnx.NodeProto, str]]:
    """Yield each node of a graph with its signature."""
    model = onnx.load(file, load_external_data=False)
    graph, versions = model.graph, {entry.domain: entry.version for entry in model.opset_import}
    types = {"": "-"} | {tensor.name: _type(tensor.data_type) for tensor in graph.initializer}
    types |= {info.name: _type(info.type.tensor_type.elem_type) for info in (*graph.input, *graph.value_info, *graph.output)}
    for node in graph.node:
        since = versions[node.domain]
        if onnx.defs.has(node.op_type, domain=node.domain):
            since = onnx.defs.get_schema(node.op_type, since, node.domain).since_version
        ins, outs = (" ".join(types[name] for name in names) for names in (node.input, node.output))
        yield node, f"{node.domain or 'ai.onnx'} {node.op_type} {since}: {ins} -> {outs}"


def _type(number: int) -> str:
    return onnx.TensorProto.DataType.Name(number).lower()


def accepted(file: Path) -> set[str]:
    """Return the signatures of the nodes that the CUDA provider of this onnxruntime computes.

    Nodes are recorded before the runtime fuses them, with their names.
    """
    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.log_severity_level = 3
    session = ort.InferenceSession(str(file), options, providers=["CUDAExecutionProvider"], enable_fallback=0)
    names = {
        node.name
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
        if part.ep_name == "CUDAExecutionProvider"
    }
    return {signature for node, signature in signatures(file) if node.name in names}


def main(files: list[str]) -> None:
    found = set().union(*(accepted(Path(file)) for file in files)) | (
        table() if TABLE.exists() and release() == version("onnxruntime-gpu") else set()
    )
    about = f"{ABOUT} {version('onnxruntime-gpu')}, asked by `python -m export.gpu.kernels`; see kernels.py"
    TABLE.write_text("\n".join([about, *sorted(found)]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
