"""Padding, the choice of a provider, and one real graph in ONNX Runtime."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from export import contract
from service import runtime
from service.runtime import OnnxSession, SettingsConflict, choose_provider, one_runtime, pad
from tests.service.fakes import fake_bundle

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def weighted_sum(bundle: Path, *, typed: bool) -> None:
    """The smallest graph that sees everything: logits (B, 1) = sum over N of ids * mask, plus 1000 * sum of the types."""
    int64 = TensorProto.INT64
    names = [contract.INPUT_IDS, contract.ATTENTION_MASK, *([contract.TOKEN_TYPE_IDS] if typed else [])]
    inputs = [helper.make_tensor_value_info(name, int64, ["B", "N"]) for name in names]
    nodes = [helper.make_node("Mul", names[:2], ["seen"])]
    if typed:
        nodes += [helper.make_node("Mul", [names[2], "thousand"], ["types"]), helper.make_node("Add", ["seen", "types"], ["all"])]
    nodes += [
        helper.make_node("ReduceSum", ["all" if typed else "seen", "axis"], ["sum"], keepdims=1),
        helper.make_node("Cast", ["sum"], [contract.LOGITS], to=TensorProto.FLOAT),
    ]
    constants = [helper.make_tensor("axis", int64, [1], [1]), helper.make_tensor("thousand", int64, [1], [1000])]
    outputs = [helper.make_tensor_value_info(contract.LOGITS, TensorProto.FLOAT, ["B", 1])]
    graph = helper.make_graph(nodes, "weighted_sum", inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), bundle / contract.GRAPH)


def session(folder: Path, *, typed: bool = False) -> OnnxSession:
    bundle = fake_bundle(folder / "tiny", "classifier", n_labels=1, typed=typed)
    weighted_sum(bundle, typed=typed)
    return OnnxSession(bundle, contract.read_manifest(bundle), threads=2, provider="cpu")


# Padding ---------------------------------------------------------------------------------------------------------------------------------


def test_inputs_of_one_length_are_not_padded() -> None:
    ids, mask, types = pad([[1, 2], [3, 4]], [[0, 0], [0, 1]], 9)
    assert types is not None
    assert (ids.tolist(), mask.tolist(), types.tolist()) == ([[1, 2], [3, 4]], [[1, 1], [1, 1]], [[0, 0], [0, 1]])
    assert ids.dtype == mask.dtype == types.dtype == np.int64


def test_shorter_inputs_are_padded_on_the_right_and_masked() -> None:
    ids, mask, types = pad([[1, 2, 3], [4]], [[0, 1, 1], [1]], 9)
    assert types is not None
    assert (ids.tolist(), mask.tolist(), types.tolist()) == ([[1, 2, 3], [4, 9, 9]], [[1, 1, 1], [1, 0, 0]], [[0, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize("ids", [[[1], [2]], [[1, 2], [3]]])
def test_without_types_there_are_none(ids: list[list[int]]) -> None:
    assert pad(ids, None, 0)[2] is None


# A session -------------------------------------------------------------------------------------------------------------------------------


def test_a_row_is_the_same_alone_and_padded_in_a_batch(tmp_path: Path) -> None:
    graph = session(tmp_path)
    rows = graph.run([contract.LOGITS], [[1, 2, 3], [4], [5, 6]], None)[contract.LOGITS]
    assert rows.dtype == np.float32
    assert rows.tolist() == [[6], [4], [11]]
    assert graph.run([contract.LOGITS], [[4]], None)[contract.LOGITS].tolist() == [[4]]


def test_token_types_are_zeros_unless_given_and_only_where_the_graph_takes_them(tmp_path: Path) -> None:
    typed = session(tmp_path / "typed", typed=True)
    assert typed.run([contract.LOGITS], [[1, 2], [3]], None)[contract.LOGITS].tolist() == [[3], [3]]
    assert typed.run([contract.LOGITS], [[1, 2], [3]], [[0, 1], [1]])[contract.LOGITS].tolist() == [[1003], [1003]]
    untyped = session(tmp_path / "untyped")
    assert untyped.run([contract.LOGITS], [[1, 2]], [[1, 1]])[contract.LOGITS].tolist() == [[3]]


def test_a_session_serves_several_threads_at_once(tmp_path: Path) -> None:
    graph = session(tmp_path)

    def ask(number: int) -> float:
        return float(graph.run([contract.LOGITS], [[number] * (number % 7 + 1)], None)[contract.LOGITS][0, 0])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(200))) == [number * (number % 7 + 1) for number in range(200)]


def test_a_session_says_where_it_runs(tmp_path: Path) -> None:
    assert session(tmp_path).provider == CPU


# Providers -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "available", "chosen"),
    [
        ("auto", [CPU], CPU),
        ("auto", ["TensorrtExecutionProvider", CUDA, CPU], CUDA),
        ("cpu", [CUDA, CPU], CPU),
        ("cuda", [CUDA, CPU], CUDA),
    ],
)
def test_the_provider_is_the_one_asked_for_and_by_default_the_gpu_where_there_is_one(
    wanted: str, available: list[str], chosen: str
) -> None:
    assert choose_provider(wanted, available) == chosen


def test_a_gpu_that_is_asked_for_and_not_there_stops_the_start() -> None:
    with pytest.raises(SettingsConflict, match="offers only CPUExecutionProvider: install onnxruntime-gpu in its place"):
        choose_provider("cuda", [CPU])


def test_two_runtimes_side_by_side_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    one_runtime()
    monkeypatch.setattr(runtime, "_installed", lambda package: True)
    with pytest.raises(SettingsConflict, match="both installed and overwrite each other"):
        one_runtime()
