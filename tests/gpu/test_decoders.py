"""Decoders on a GPU: what they compute is what they compute on the CPU, their states stay there, and memory has its bound.

Shared prompts, runs that are left and the rows themselves are in `test_device.py` and `test_slots.py` of `tests/service/generation/`, which
carry the same marks.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import contract
from export.bundle import export_bundle
from export.kinds.encoder import BARS
from service.generation.gpu.session import DeviceStepSession, left_of, open_steps
from service.generation.selftest import check_golden
from service.generation.session import Step, StepSession
from service.generation.slots import Slots
from service.runtime.onnx import CPU, CUDA
from tests.conftest import Once
from tests.decoders import tiny_decoder
from tests.gpu import ON_A_GPU

pytestmark = ON_A_GPU
SLOTS = 7
STEPS = 40


@pytest.fixture(scope="session")
def fp16_decoder(once: Once) -> Path:
    def made(out: Path) -> None:
        checkpoint = tiny_decoder(out.with_name("fp16-checkpoint"), d_model=64, n_layers=2, layers="gated_delta", positions="none")
        export_bundle(checkpoint, out, name="tiny-fp16", precision="fp16")

    return once("tiny-decoder-fp16", made)


def opened(bundle: Path, provider: str, gpu_memory_gib: float | None = None) -> StepSession[Any]:
    manifest = contract.read_manifest(bundle)
    return open_steps(bundle, manifest, threads=2, provider=provider, slots=SLOTS, gpu_memory_gib=gpu_memory_gib)


@pytest.mark.parametrize("provider", ["cuda", "auto"])
def test_the_gpu_computes_within_its_bounds(decoder_bundle: Path, provider: str) -> None:
    session = opened(decoder_bundle, provider, gpu_memory_gib=2)
    assert isinstance(session, DeviceStepSession)
    assert session.provider == session._session.get_providers()[0] == CUDA
    limit = left_of(2, contract.read_manifest(decoder_bundle), SLOTS)
    assert limit is not None
    assert int(session._session.get_provider_options()[CUDA]["gpu_mem_limit"]) == int(limit * 2**30)
    assert {tensor.device_name() for tensor in session.states(3)._tensors} == {"cuda"}


@pytest.mark.parametrize("bundle", ["decoder_bundle", "constant_states_bundle", "image_bundle", "fp16_decoder"])
def test_a_bundle_passes_its_own_bar(bundle: str, request: pytest.FixtureRequest) -> None:
    """As at every start: the golden logits of torch on a CPU, prompts and single tokens."""
    folder: Path = request.getfixturevalue(bundle)
    check_golden(folder, opened(folder, "cuda"))


@pytest.mark.parametrize("bundle", ["decoder_bundle", "constant_states_bundle", "image_bundle"])
def test_rows_of_many_ages_are_those_of_the_cpu(bundle: str, request: pytest.FixtureRequest) -> None:
    """They join one by one, every fifth step the first one leaves, and the last one takes its place."""
    folder: Path = request.getfixturevalue(bundle)
    here, there = (rows_of_many_ages(opened(folder, provider)) for provider in ("cpu", "cuda"))
    assert np.abs(here - there).max() <= 10 * BARS["fp32"].tolerance, "forty steps, each within what one may be off"


def rows_of_many_ages(session: StepSession[Any]) -> np.ndarray:
    """The logits of all steps."""
    slots: Slots[int] = Slots(session, SLOTS)
    tokens, logits = np.zeros((SLOTS, 1), np.int64), np.zeros((SLOTS, 1, session.vocab_size), np.float32)
    ones, zeros = np.ones(SLOTS, np.int64), np.zeros((SLOTS, 1), np.int64)
    seen = []
    for step in range(STEPS):
        if len(slots) < SLOTS:
            slots.add(step)
        if step % 5 == 4:
            slots.remove(0)
        used = len(slots)
        rows = min(session.batch(used), SLOTS)
        tokens[:used, 0] = [(17 * owner + step) % session.vocab_size for owner in slots.owners]
        session.bind(Step(tokens[:rows], ones[:rows], slots.positions[:rows], zeros[:rows], *slots.sets, logits[:rows]))()
        slots.stepped(ones[:used])
        seen.append(logits[:used].copy())
    return np.concatenate(seen)


def test_the_same_rows_give_the_same_bits(decoder_bundle: Path) -> None:
    session = opened(decoder_bundle, "cuda")
    assert np.array_equal(rows_of_many_ages(session), rows_of_many_ages(session))


def test_a_cpu_is_taken_where_it_is_asked_for(decoder_bundle: Path) -> None:
    assert opened(decoder_bundle, "cpu").provider == CPU
