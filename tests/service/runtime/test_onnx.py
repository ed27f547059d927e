"""Padding, the choice of a provider, and one real graph in ONNX Runtime."""

import logging
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from export import contract
from service.encoder_decoder.session import EncoderDecoderSession
from service.generation.gpu.session import open_steps
from service.generation.session import OnnxStepSession
from service.runtime import onnx as runtime
from service.runtime.memory import Release
from service.runtime.onnx import OnnxSession, SettingsConflict, check_install, choose_provider, cuda_options, one_runtime
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


def steps(bundle: Path, provider: str) -> Any:
    """Of a decoder."""
    return open_steps(bundle, contract.read_manifest(bundle), threads=2, provider=provider, slots=2, gpu_memory_gib=None)


def session(folder: Path, *, typed: bool = False, provider: str = "cpu") -> OnnxSession:
    bundle = fake_bundle(folder / "tiny", "classifier", n_labels=1, typed=typed)
    weighted_sum(bundle, typed=typed)
    return OnnxSession(bundle, contract.read_manifest(bundle), threads=2, provider=provider)


# A session -------------------------------------------------------------------------------------------------------------------------------


def test_a_row_is_the_same_alone_and_padded_in_a_batch(tmp_path: Path) -> None:
    graph = session(tmp_path)
    rows = graph.run([contract.LOGITS], [[1, 2, 3], [4], [5, 6]], None)[contract.LOGITS]
    assert rows.dtype == np.float32
    assert rows.tolist() == [[6], [4], [11]]
    assert graph.run([contract.LOGITS], [[4]], None)[contract.LOGITS].tolist() == [[4]]


def test_tokens_to_which_no_token_attends_have_2_in_the_mask(tmp_path: Path) -> None:
    rows = session(tmp_path).run([contract.LOGITS], [[1, 2, 3], [4], [5, 6]], None, [1, 0, 2])
    assert rows[contract.LOGITS].tolist() == [[1 + 2 + 2 * 3], [4], [2 * 11]]


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


def test_sessions_keep_the_memory_of_one_run_and_not_of_one_each(tmp_path: Path) -> None:
    one, *others = (session(tmp_path / str(number))._graph.one_thread for number in range(9))
    text = np.ones((1, 2**22), np.int64)  # 32 MiB, and as much for the product
    feed = {contract.INPUT_IDS: text, contract.ATTENTION_MASK: text}
    one.run(None, feed)
    before = psutil.Process().memory_info().rss
    for other in others:
        other.run(None, feed)
    assert psutil.Process().memory_info().rss - before < 2 * text.nbytes


def test_the_memory_of_a_run_is_given_back_on_request(tmp_path: Path) -> None:
    long = session(tmp_path)
    text = np.ones((1, 2**22), np.int64)  # 32 MiB, and as much for the product
    long._graph.one_thread.run(None, {contract.INPUT_IDS: text, contract.ATTENTION_MASK: text})
    before = psutil.Process().memory_info().rss
    Release()._trim()
    assert before - psutil.Process().memory_info().rss >= text.nbytes


@pytest.fixture
def products(tmp_path: Path) -> tuple[Path, contract.Graph]:
    """A graph of 64 products with weights of 256 KiB each, in a file beside it, and its entry in a manifest."""
    random, folder = np.random.default_rng(0), tmp_path / "products"
    folder.mkdir()
    weights = [numpy_helper.from_array(random.normal(size=(256, 256)).astype(np.float32) / 16, f"w{number}") for number in range(64)]
    nodes = [helper.make_node("MatMul", [f"x{number}" if number else "x", f"w{number}"], [f"x{number + 1}"]) for number in range(64)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 256]) for name in ("x", "x64")]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / contract.GRAPH, save_as_external_data=True, location="weights")
    x, y = (contract.Tensor(name=name, dtype="float32", shape=("N", 256)) for name in ("x", "x64"))
    return folder / contract.GRAPH, contract.Graph(
        file=contract.GRAPH, opset=20, inputs=(x,), outputs=(y,), operators={"MatMul": 64}, optimisation="none"
    )


def mapped_weights() -> list[tuple[int, int]]:
    """(offset in the file, size) of each part of a file of packed weights that this process has in memory."""
    parts = [
        (int(offset, 16), int(end, 16) - int(begin, 16))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "packed.onnx.data" in line
        for (begin, end), offset in [(line.split()[0].split("-"), line.split()[2])]
    ]
    return sorted(part for part in parts if part[1] >= 2**18)


def test_both_sessions_of_a_graph_have_their_weights_in_the_same_memory(
    products: tuple[Path, contract.Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, promised = products
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(runtime, "_in_memory", lambda folder: False)  # whatever the disk of the tests is
    x = np.random.default_rng(1).normal(size=(3, 256)).astype(np.float32)
    wanted = runtime.open_graph(graph, threads=1).run(None, {"x": x})[0]
    one, two = runtime.open_twice(graph, threads=2, promised=promised)
    assert list(scratch.iterdir()) == []
    parts = mapped_weights()
    assert len(parts) == 128
    assert parts[::2] == parts[1::2]
    for session in (one, two):
        assert np.array_equal(session.run(None, {"x": x})[0], wanted)
    del one, two, session
    assert mapped_weights() == []


def full(folder: Path) -> Any:
    return SimpleNamespace(free=0)


def missing(**_: Any) -> Any:
    raise FileNotFoundError("No usable temporary directory found")


def torn(graph: Path, folder: Path) -> Path:
    (folder / "packed.onnx").write_bytes(graph.read_bytes()[:1000])
    return folder / "packed.onnx"


@pytest.mark.parametrize(
    ("module", "name", "instead", "why"),
    [
        (runtime, "_with_packed_weights", torn, "cannot be opened"),
        (shutil, "disk_usage", full, "0 bytes of free space"),
        (tempfile, "TemporaryDirectory", missing, "No usable"),
        (runtime, "_in_memory", lambda folder: True, "is in memory"),
    ],
)
def test_without_a_disk_each_session_packs_the_weights(
    products: tuple[Path, contract.Graph],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: Any,
    name: str,
    instead: Any,
    why: str,
) -> None:
    monkeypatch.setattr(runtime, "_in_memory", lambda folder: False)
    monkeypatch.setattr(module, name, instead)
    x = np.ones((1, 256), np.float32)
    with caplog.at_level(logging.INFO, "attnserve"):
        one, two = runtime.open_twice(products[0], threads=2, promised=products[1])
    assert why in caplog.records[-1].why
    assert np.array_equal(one.run(None, {"x": x})[0], two.run(None, {"x": x})[0])
    assert mapped_weights() == []


def test_errors_of_a_graph_have_its_own_name(products: tuple[Path, contract.Graph]) -> None:
    graph, promised = products
    with pytest.raises(contract.BundleError, match=str(graph)):
        runtime.open_twice(graph, threads=2, promised=promised.model_copy(update={"inputs": promised.outputs}))


def test_one_thread_has_one_session(products: tuple[Path, contract.Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(runtime, "_with_packed_weights")
    one, same = runtime.open_twice(products[0], threads=1, promised=products[1])
    assert one is same


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


def test_a_gpu_that_is_asked_for_and_not_there_stops_the_start(
    tmp_path: Path, decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU])
    for opened in (partial(session, tmp_path), partial(steps, decoder_bundle)):
        with pytest.raises(SettingsConflict, match="offers only CPUExecutionProvider: install onnxruntime-gpu in its place"):
            opened(provider="cuda")


def test_a_gpu_is_looked_for_before_anything_is_started() -> None:
    check_install("auto")
    check_install("cpu")
    with pytest.raises(SettingsConflict, match="provider=cuda, but this onnxruntime offers only"):
        check_install("cuda")


class WithoutDriver(ort.InferenceSession):
    """What onnxruntime-gpu does where CUDA's libraries cannot be loaded: a line on stderr, and a session on the CPU."""

    def _create_inference_session(self, providers: Any, *rest: Any) -> None:
        super()._create_inference_session([CPU], *rest)


class WithoutDevice(ort.InferenceSession):
    """And where they can be, and the driver has no device for this process."""

    def _create_inference_session(self, providers: Any, *rest: Any) -> None:
        if any(CUDA in provider for provider in providers):
            raise RuntimeError("CUDA failure 100: no CUDA-capable device is detected")
        super()._create_inference_session(providers, *rest)


@pytest.fixture(
    params=[(WithoutDriver, "the session has only CPUExecutionProvider"), (WithoutDevice, "no CUDA-capable device is detected")]
)
def broken_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An onnxruntime that offers CUDA and cannot have it: what there is to read about it."""
    stand_in, why = request.param
    monkeypatch.setattr(ort, "InferenceSession", stand_in)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, CPU])
    return str(why)


def test_a_gpu_that_does_not_work_stops_the_start_where_it_was_asked_for(broken_gpu: str, tmp_path: Path, decoder_bundle: Path) -> None:
    for opened in (partial(session, tmp_path), partial(steps, decoder_bundle)):
        with pytest.raises(SettingsConflict, match=f"CUDAExecutionProvider was asked for and cannot be had: .*{broken_gpu}.* nvidia-smi"):
            opened(provider="cuda")


def test_by_default_a_gpu_that_does_not_work_is_told_and_the_cpu_computes(
    broken_gpu: str, tmp_path: Path, decoder_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "attnserve"):
        graph, decoder = session(tmp_path, provider="auto"), steps(decoder_bundle, "auto")
    assert graph.provider == decoder.provider == CPU
    assert graph.run([contract.LOGITS], [[1, 2, 3]], None)[contract.LOGITS].tolist() == [[6]]
    assert isinstance(decoder, OnnxStepSession)
    assert len(caplog.records) == 2
    assert all(broken_gpu in record.__dict__["why"] for record in caplog.records)


def test_a_session_takes_of_a_gpu_what_it_needs_and_no_more_than_it_may() -> None:
    """In the words of ONNX Runtime; fp32 is not rounded to TF32 on the way."""
    assert cuda_options(None) == {"arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}
    assert cuda_options(1.5) == {**cuda_options(None), "gpu_mem_limit": "1610612736"}


@pytest.mark.parametrize("provider", ["auto", "cuda"])
def test_a_model_without_a_form_for_gpus_computes_on_the_cpu_and_says_so_once(
    provider: str, encoder_decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, CPU])
    with caplog.at_level(logging.INFO, "attnserve"):
        EncoderDecoderSession(encoder_decoder_bundle, contract.read_manifest(encoder_decoder_bundle), threads=1, provider=provider)
    told = [(record.__dict__["model"], record.message) for record in caplog.records]
    assert told == [("tiny-writer", "computes on the CPU, as every encoder-decoder does")]


def test_two_runtimes_side_by_side_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    one_runtime()
    monkeypatch.setattr(runtime, "_installed", lambda package: True)
    with pytest.raises(SettingsConflict, match="both installed and overwrite each other"):
        one_runtime()
