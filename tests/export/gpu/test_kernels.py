"""Every node of a graph for GPUs has a signature that the CUDA provider of the pinned release accepted, and none depends on data."""

import re
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from export.errors import ExportError
from export.gpu import kernels
from tests.cases import in_one_test
from tests.export.gpu.variants import encoder_graph, random_classifier, random_encoder


def graph_of(file: Path, *nodes: onnx.NodeProto, dtype: int = TensorProto.FLOAT) -> Path:
    """A graph from x to y, float32 (4,) in each."""
    sides = ([helper.make_tensor_value_info(name, dtype, [4])] for name in "xy")
    model = helper.make_model(helper.make_graph(nodes, "graph", *sides), opset_imports=[helper.make_opsetid("", 20)])
    onnx.save(model, file)
    return file


def test_the_release_that_was_asked_is_the_one_that_is_installed() -> None:
    assert kernels.release() == ort.__version__
    assert all(re.fullmatch(r"[\w.]+ \w+ \d+: [\w -]+ -> [\w ]+", line) for line in kernels.table())


@pytest.mark.parametrize(
    "name", ["gelu_tanh", "classifier", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("bert", "rotary", "sinusoidal"))]
)
def test_every_node_of_an_encoder_in_fp16_has_a_kernel(name: str, tmp_path: Path) -> None:
    model = random_classifier() if name == "classifier" else random_encoder(name)
    encoder_graph(model.half()).export(tmp_path / "gpu.onnx", weights_beside=True)
    kernels.check(tmp_path / "gpu.onnx")


@in_one_test("operator", sorted(kernels.DYNAMIC & {"NonZero", "CumSum", "Loop", "If", "Range"}))
def test_an_operator_that_depends_on_data_is_refused(operator: str, tmp_path: Path) -> None:
    file = graph_of(tmp_path / "graph.onnx", helper.make_node(operator, ["x"], ["y"], name="seventh"))
    with pytest.raises(ExportError, match=f"the node seventh of {operator}, whose size or work depends on data"):
        kernels.check(file)


def test_a_type_for_which_there_is_no_kernel_is_refused(tmp_path: Path) -> None:
    """Gelu is known for float32 and float16."""
    node = helper.make_node("Gelu", ["x"], ["y"], name="seventh")
    kernels.check(graph_of(tmp_path / "graph.onnx", node))
    with pytest.raises(ExportError, match=r"ai\.onnx Gelu 20: double -> double"):
        kernels.check(graph_of(tmp_path / "graph.onnx", node, dtype=TensorProto.DOUBLE))
