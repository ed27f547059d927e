"""The session of the graph for GPUs, with a CPU as its device: fixed memory, few shapes, any number of texts, several threads."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from export import contract
from export.gpu.cpu_twin import write_cpu_twin
from service.encoding.gpu.packing import LEAST_TOKENS
from service.encoding.gpu.session import PackedSession, open_session
from service.runtime.onnx import CPU, CUDA, OnnxSession, SettingsConflict, elsewhere, open_graph
from tests.checkpoints import MAX_TOKENS, VOCABULARY

FP16 = 5e-3  # largest error of a number of a vector of length 1


@pytest.fixture
def session(gpu_bundle: Path, tmp_path: Path) -> PackedSession:
    return of_twin(gpu_bundle, tmp_path)


def of_twin(bundle: Path, folder: Path, most_tokens: int = 4 * LEAST_TOKENS) -> PackedSession:
    """The graph for GPUs as a CPU can compute it."""
    manifest = contract.verify(bundle)
    assert manifest.gpu_graph is not None
    write_cpu_twin(bundle / manifest.gpu_graph.graph.file, folder / "twin.onnx")
    longest = manifest.limits.max_tokens
    return PackedSession(folder / "twin.onnx", manifest.gpu_graph, max_tokens=longest, most_tokens=most_tokens, provider=CPU)


def some_texts(n: int, longest: int = MAX_TOKENS, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(5, len(VOCABULARY), length).tolist() for length in random.integers(1, longest + 1, n)]


def served(bundle: Path) -> OnnxSession:
    return OnnxSession(bundle, contract.read_manifest(bundle), threads=1, provider="cpu")


def vectors(session: PackedSession | OnnxSession, ids: Sequence[list[int]]) -> np.ndarray:
    return session.run([contract.EMBEDDING], ids, None)[contract.EMBEDDING]


@pytest.mark.parametrize(("n", "longest"), [(1, 1), (3, MAX_TOKENS), (150, MAX_TOKENS), (1000, 2)])
def test_any_number_of_texts_has_the_vectors_of_the_served_graph(gpu_bundle: Path, session: PackedSession, n: int, longest: int) -> None:
    ids = some_texts(n, longest)
    assert np.abs(vectors(session, ids) - vectors(served(gpu_bundle), ids)).max() < FP16


def test_addresses_never_change_and_the_number_of_shapes_is_bounded(session: PackedSession) -> None:
    session.warm_up()
    before = [dict(session.bound(at).addresses) for at in range(len(session.buckets))]
    for n in (1, 40, 110, 200):
        vectors(session, some_texts(n, seed=n))
    assert [session.bound(at).addresses for at in range(len(session.buckets))] == before
    assert len(session.buckets) == 3
    addresses = [address for bound in before for address in bound.values()]
    assert len(set(addresses)) == len(addresses)  # no two shapes share memory: CUDA graphs keep what they were recorded with
    assert all(address % 64 == 0 for address in addresses)


def test_threads_get_their_own_rows(session: PackedSession) -> None:
    inputs = [some_texts(20, seed=seed) for seed in range(8)]
    wanted = [vectors(session, ids) for ids in inputs]
    with ThreadPoolExecutor(4) as threads:
        for got, want in zip(threads.map(lambda ids: vectors(session, ids), inputs), wanted, strict=True):
            assert np.array_equal(got, want)


def test_other_outputs_come_from_the_served_graph(gpu_bundle: Path, session: PackedSession) -> None:
    assert contract.TOKEN_EMBEDDINGS not in session.outputs
    manifest = contract.read_manifest(gpu_bundle)
    assert manifest.gpu_graph is not None
    other = PackedSession(session.graph, manifest.gpu_graph, max_tokens=MAX_TOKENS, provider=CPU, others=lambda: served(gpu_bundle))
    ids = some_texts(3)
    assert other.run([contract.TOKEN_EMBEDDINGS], ids, None)[contract.TOKEN_EMBEDDINGS].shape == (3, max(map(len, ids)), 48)


def test_a_bundle_with_a_graph_for_gpus_is_served_by_the_other_graph_on_a_cpu(gpu_bundle: Path) -> None:
    session = open_session(gpu_bundle, contract.verify(gpu_bundle), threads=1, provider="auto")
    assert isinstance(session, OnnxSession)
    if CUDA not in __import__("onnxruntime").get_available_providers():
        with pytest.raises(SettingsConflict, match="install onnxruntime-gpu"):
            open_session(gpu_bundle, contract.verify(gpu_bundle), threads=1, provider="cuda")


def test_a_node_that_the_provider_does_not_compute_is_an_error(session: PackedSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this CPU the twin's nodes are assigned to the CPU; to a session that wants another provider they are elsewhere."""
    opened = open_graph(session.graph, threads=1, whole=True)
    assert not elsewhere(opened, CPU)
    assert elsewhere(opened, CUDA)["LayerNormalization"] == 7
    monkeypatch.setattr("service.runtime.onnx.elsewhere", lambda session, provider: elsewhere(session, CUDA))
    with pytest.raises(SettingsConflict, match=r"it has no kernel for .*LayerNormalization"):
        open_graph(session.graph, threads=1, whole=True)
