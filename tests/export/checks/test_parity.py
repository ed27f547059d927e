"""Every check of a graph finds the graph that it is there for. The graphs are a few nodes, broken by hand."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from export import contract
from export.checks.parity import LONGEST_COMPARED, Arrays, Feed, check_interface, compare, feeds, open_graph
from export.errors import ExportError

INPUTS = tuple(contract.Tensor(name=name, dtype="int64", shape=("B", "N")) for name in (contract.INPUT_IDS, contract.ATTENTION_MASK))
OUTPUTS = (contract.Tensor(name=contract.LOGITS, dtype="float32", shape=("B", 1)),)
SIZES = feeds(INPUTS, vocab_size=50, pad_token_id=0, max_tokens=40)


def model(feed: Feed) -> Arrays:
    """The sum of a text's ids, over 1000, with padding counted out."""
    ids = feed[contract.INPUT_IDS] * feed[contract.ATTENTION_MASK]
    return {contract.LOGITS: (ids / 1000).sum(axis=1, keepdims=True).astype(np.float32)}


def write(
    folder: Path,
    *,
    ids_shape: tuple[str | int, ...] = ("B", "N"),
    out_name: str = contract.LOGITS,
    out_type: int = TensorProto.FLOAT,
    last: Callable[[], list[onnx.NodeProto]] = lambda: [helper.make_node("Identity", ["sum"], ["result"])],
    masked: bool = True,
) -> Path:
    """The graph of `model`, or a broken one. `last` makes "result" of "sum"."""
    constants = [
        numpy_helper.from_array(np.array(1000, np.float32), "thousand"),
        numpy_helper.from_array(np.array([1], np.int64), "axis_n"),
        numpy_helper.from_array(np.array([0], np.int64), "axis_b"),
        numpy_helper.from_array(np.array(0.001, np.float32), "little"),
        numpy_helper.from_array(np.array(0, np.float32), "zero"),
    ]
    nodes = [
        helper.make_node("Mul", [contract.INPUT_IDS, contract.ATTENTION_MASK], ["kept"]),
        helper.make_node("Cast", ["kept" if masked else contract.INPUT_IDS], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["floats", "thousand"], ["small"]),
        helper.make_node("ReduceSum", ["small", "axis_n"], ["sum"], keepdims=1),
        *last(),
        helper.make_node("Cast", ["result"], [out_name], to=out_type),
    ]
    graph = helper.make_graph(
        nodes,
        "broken",
        [
            helper.make_tensor_value_info(contract.INPUT_IDS, TensorProto.INT64, ids_shape),
            helper.make_tensor_value_info(contract.ATTENTION_MASK, TensorProto.INT64, ("B", "N")),
        ],
        [helper.make_tensor_value_info(out_name, out_type, ("B", 1))],
        constants,
    )
    file = folder / "graph.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), file)
    return file


def check(file: Path) -> float:
    session = open_graph(file, threads=1)
    check_interface(session, INPUTS, OUTPUTS)
    return compare(session, model, OUTPUTS, SIZES)


def test_a_sound_graph_passes_and_its_difference_is_measured(tmp_path: Path) -> None:
    assert 0 <= check(write(tmp_path)) < 1e-6


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"out_name": "scores"}, r"outputs are \['scores'\], but must be \['logits'\]"),
        ({"ids_shape": ("B", 7)}, r"input_ids: the axes are \(B, 7\), but must be \(B, N\)"),
        ({"ids_shape": ("N", "B")}, r"input_ids: the shape is \(N, B\), but must be \(B, N\)"),
        ({"out_type": TensorProto.DOUBLE}, r"logits: the type is tensor\(double\), but must be float32"),
    ],
    ids=["name", "fixed axis", "shape", "type"],
)
def test_a_graph_with_another_interface_is_refused(tmp_path: Path, broken: dict[str, object], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        check(write(tmp_path, **broken))


def test_a_missing_input_is_refused(tmp_path: Path) -> None:
    session = open_graph(write(tmp_path), threads=1)
    typed = (*INPUTS, contract.Tensor(name=contract.TOKEN_TYPE_IDS, dtype="int64", shape=("B", "N")))
    with pytest.raises(ExportError, match=r"inputs are .* must be .*token_type_ids"):
        check_interface(session, typed, OUTPUTS)


@pytest.mark.parametrize(
    ("shape", "message"),
    [(("B", "N"), r"the axes are \(B, 1\), but must be \(B, N\)"), (("B", 3), r"the shape is \(B, 1\), but must be \(B, 3\)")],
    ids=["should be free", "should be wider"],
)
def test_an_output_of_another_width_is_refused(tmp_path: Path, shape: tuple[str | int, ...], message: str) -> None:
    session = open_graph(write(tmp_path), threads=1)
    with pytest.raises(ExportError, match=message):
        check_interface(session, INPUTS, (contract.Tensor(name=contract.LOGITS, dtype="float32", shape=shape),))


def add(name: str) -> list[onnx.NodeProto]:
    return [helper.make_node("Add", ["sum", name], ["result"])]


def mean_of_batch() -> list[onnx.NodeProto]:
    """A text's value leaks into its neighbours: invisible at B = 1."""
    return [helper.make_node("ReduceMean", ["sum", "axis_b"], ["mean"], keepdims=1), helper.make_node("Max", ["mean", "sum"], ["result"])]


def not_a_number() -> list[onnx.NodeProto]:
    return [helper.make_node("Div", ["zero", "zero"], ["nan"]), helper.make_node("Add", ["sum", "nan"], ["result"])]


def every_text_twice() -> list[onnx.NodeProto]:
    return [helper.make_node("Concat", ["sum", "sum"], ["result"], axis=0)]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"last": lambda: add("little")}, r"at B=1, N=1 the graph is 0\.001 away from the model; the limit is 2e-05"),
        ({"last": mean_of_batch}, r"at B=2, N=1 the graph is .* away"),
        ({"last": not_a_number}, r"the graph is nan away"),
        ({"last": every_text_twice}, r"at B=1, N=1 the graph gives the shape \(2, 1\), but the model \(1, 1\)"),
    ],
    ids=["value", "leak between texts", "not a number", "shape at run time"],
)
def test_a_graph_with_other_values_is_refused(tmp_path: Path, broken: dict[str, object], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        check(write(tmp_path, **broken))


def test_a_graph_that_reads_padding_is_refused(tmp_path: Path) -> None:
    """Padding has an id of its own here, so that reading it shows."""
    padded = feeds(INPUTS, vocab_size=50, pad_token_id=49, max_tokens=40)
    session = open_graph(write(tmp_path, masked=False), threads=1)
    with pytest.raises(ExportError, match="logits: at B=2, N=7"):
        compare(session, model, OUTPUTS, padded)


def test_the_sizes_are_those_that_break_graphs() -> None:
    sizes = [feed[contract.ATTENTION_MASK].shape for feed in SIZES]
    assert {(1, 1), (2, 1), (3, 33), (2, 40)} <= set(sizes)
    lengths = [feed[contract.ATTENTION_MASK].sum(axis=1) for feed in SIZES]
    assert any(0 in rows for rows in lengths), "a text without tokens"
    assert any(rows.max() > 20 * rows.min() > 0 for rows in lengths), "lengths far apart"


def test_lengths_end_where_torch_would_need_all_memory() -> None:
    long = feeds(INPUTS, vocab_size=9, pad_token_id=0, max_tokens=8192)
    assert max(feed[contract.INPUT_IDS].shape[1] for feed in long) == LONGEST_COMPARED
