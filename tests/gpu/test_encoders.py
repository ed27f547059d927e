"""Encoders on a GPU: what they compute is what they compute on the CPU, and it is the GPU that computes it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from export import contract
from export.bundle import export_bundle
from export.kinds.encoder import BARS
from service.encoding.selftest import check_golden
from service.runtime.onnx import CUDA, OnnxSession
from service.tokenization.texts import TextEncoder
from tests.conftest import Once
from tests.gpu import ON_A_GPU

pytestmark = ON_A_GPU


@pytest.fixture(scope="session")
def fp16_bundle(minilm: Path, once: Once) -> Path:
    return once("all-MiniLM-L6-v2-fp16", lambda out: export_bundle(minilm, out, name="all-MiniLM-L6-v2-fp16", precision="fp16"))


def opened(bundle: Path, provider: str, gpu_memory_gib: float | None = None) -> OnnxSession:
    return OnnxSession(bundle, contract.read_manifest(bundle), threads=2, provider=provider, gpu_memory_gib=gpu_memory_gib)


def texts_of(bundle: Path) -> TextEncoder:
    manifest = contract.read_manifest(bundle)
    return TextEncoder(
        bundle / contract.TOKENIZER,
        max_tokens=manifest.limits.max_tokens,
        vocab_size=manifest.limits.vocab_size,
        pair_types=True,
        prompts=manifest.prompts,
        default_prompt=manifest.default_prompt,
    )


def golden_ids(bundle: Path) -> list[list[int]]:
    texts, most = texts_of(bundle), contract.read_manifest(bundle).limits.max_tokens
    return [texts.tokenizer.encode(text).ids[:most] for text in contract.read_golden(bundle, contract.Golden).texts]


@pytest.mark.parametrize("provider", ["cuda", "auto"])
def test_the_gpu_computes_within_its_bounds(minilm_bundle: Path, provider: str) -> None:
    session = opened(minilm_bundle, provider, gpu_memory_gib=2)
    options = session._graph.one_thread.get_provider_options()[CUDA]
    assert session.provider == session._graph.one_thread.get_providers()[0] == CUDA
    assert int(options["gpu_mem_limit"]) == 2 * 2**30
    assert (options["arena_extend_strategy"], options["use_tf32"]) == ("kSameAsRequested", "0")


def test_golden_vectors_are_those_of_the_cpu(minilm_bundle: Path) -> None:
    """All golden texts in one padded batch, to the tolerance that an fp32 graph has at export."""
    ids = golden_ids(minilm_bundle)
    here, there = (opened(minilm_bundle, provider).run([contract.EMBEDDING], ids, None)[contract.EMBEDDING] for provider in ("cpu", "cuda"))
    assert np.abs(here - there).max() <= BARS["fp32"].tolerance


@pytest.mark.parametrize("bundle", ["minilm_bundle", "fp16_bundle"])
def test_a_bundle_passes_its_own_bar(bundle: str, request: pytest.FixtureRequest) -> None:
    """As at every start: the golden vectors of torch on a CPU, one text at a time."""
    folder: Path = request.getfixturevalue(bundle)
    selftest = check_golden(folder, contract.read_manifest(folder), texts_of(folder), opened(folder, "cuda"))
    assert selftest.min_cosine is not None
    assert selftest.min_cosine >= BARS[contract.read_manifest(folder).precision].min_cosine


def test_runs_side_by_side_do_not_mix(minilm_bundle: Path) -> None:
    """As the engine calls it: one run is made ready while another computes."""
    session, ids = opened(minilm_bundle, "cuda"), golden_ids(minilm_bundle)

    def vector(row: list[int]) -> np.ndarray:
        return session.run([contract.EMBEDDING], [row], None)[contract.EMBEDDING][0]

    alone = [vector(row) for row in ids]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(vector, ids * 4))
    assert np.abs(np.array(alone * 4) - np.array(together)).max() <= BARS["fp32"].tolerance
