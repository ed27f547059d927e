"""Decoders whose states stay on a device: the same bits as on the host for who joins, leaves, goes elsewhere or shares a prompt."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from export import contract
from service.errors import RuntimeFailed
from service.generation.gpu.session import DeviceStates, DeviceStepSession, left_of
from service.generation.request import Delta, GenerationRequest, Sampling
from service.generation.run import Run, join
from service.generation.session import OnnxStepSession, Step, StepSession
from service.runtime.onnx import CPU, CUDA, SettingsConflict
from tests.gpu import ON_A_GPU
from tests.service.fakes import PATIENCE_S
from tests.service.generation.real_engine import running

SLOTS = 5  # no power of two
TOKENS = 24
BUNDLES = ("decoder_bundle", "constant_states_bundle", "image_bundle")


class Spoilt(DeviceStates):
    """What is nobody's is no number."""

    def __init__(self, decoder: contract.Decoder, rows: int, *rest: Any) -> None:
        super().__init__(decoder, rows, *rest)
        for row in range(rows):
            self.put(row, [np.full(state.shape, np.nan if state.dtype == "float32" else -1, state.dtype) for state in decoder.states])


class OnDevice(DeviceStepSession):
    """Remembers how many rows its calls had, and can be held between two of them."""

    def __init__(self, bundle: Path, provider: str = CPU) -> None:
        super().__init__(bundle, contract.read_manifest(bundle), provider=provider)
        self.rows: set[int] = set()
        self.calls = 0
        self.hold_at: int | None = None
        self.held, self.go_on = threading.Event(), threading.Event()
        self.full = False

    def states(self, rows: int) -> DeviceStates:
        if self.full:
            return DeviceStepSession.states(self, 2**60)
        return Spoilt(self.decoder, rows, self._copies, self._device)

    def bind(self, *steps: Step) -> Callable[[], None]:
        call = super().bind(*steps)
        if steps[0].tokens.shape[1] == 1:
            self.rows.add(len(steps[0].tokens))

        def counted() -> None:
            if self.calls == self.hold_at:
                self.held.set()
                assert self.go_on.wait(PATIENCE_S)
            self.calls += 1
            call()

        return counted


def on_host(bundle: Path) -> OnnxStepSession:
    return OnnxStepSession(bundle, contract.read_manifest(bundle), threads=1)


@pytest.fixture(params=[CPU, pytest.param(CUDA, marks=ON_A_GPU)])
def provider(request: pytest.FixtureRequest) -> str:
    if request.param == CPU:
        request.getfixturevalue("afar")
    return str(request.param)


def asked(number: int, **changes: Any) -> GenerationRequest:
    """Prompts of 1, 6, 11 .. tokens, and as many tokens drawn that rows are free at different steps."""
    prompt = tuple((3 * number + at) % 256 for at in range(1 + 5 * number))
    request = GenerationRequest(prompt=prompt, sampling=Sampling(seed=number), max_tokens=4 + 7 * number % TOKENS, top_logprobs=2)
    return dataclasses.replace(request, **changes)


async def all_of(run: Run) -> Delta:
    return join([delta async for delta in run])


async def answers(session: StepSession[Any], bundle: Path, requests: Sequence[GenerationRequest]) -> list[tuple[Delta, Any]]:
    """What each run says, with its log-probabilities and those of its prompt."""
    async with running(session, bundle, slots=SLOTS) as engine:
        runs = [engine.submit(request) for request in requests]
        return [(await all_of(run), list(run.prompt_logprobs)) for run in runs]


@pytest.mark.parametrize("name", BUNDLES)
async def test_runs_of_many_lengths_say_what_they_say_on_the_host(name: str, request: pytest.FixtureRequest, afar: None) -> None:
    """To the bit, as the log-probabilities show, while they join, leave and move to other rows."""
    bundle: Path = request.getfixturevalue(name)
    requests = [asked(number) for number in range(14)] + [asked(40, prompt_logprobs=1), asked(300, max_tokens=3)]
    session = OnDevice(bundle)
    assert await answers(session, bundle, requests) == await answers(on_host(bundle), bundle, requests)
    assert session.rows >= {1, 4, SLOTS}
    assert session.rows <= {1, 2, 4, SLOTS}, "a step has one of a few shapes"


async def test_only_what_is_fed_comes_from_the_host_in_a_step(decoder_bundle: Path, afar: None) -> None:
    session = OnDevice(decoder_bundle)
    await answers(session, decoder_bundle, [asked(number) for number in range(8)])
    assert set(session._session.from_host) == {contract.TOKENS, contract.LENGTHS, contract.WANTED}
    rows_from_host = len(session._copies._session.from_host) / len(session.decoder.states)
    spoilt = 2 * SLOTS + 2 * 8
    assert rows_from_host == spoilt + 8, "a row of zeros for each prompt; from there to its slot it goes on the device"


# What cannot be --------------------------------------------------------------------------------------------------------------------------


def test_a_state_that_would_not_stay_on_the_device_stops_the_start(decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Place:
        name = "Cuda"

    def places(session: ort.InferenceSession) -> list[Place]:
        return [Place()] * len(session.get_inputs())

    monkeypatch.setattr(ort.InferenceSession, "get_input_memory_infos", places)
    with pytest.raises(SettingsConflict, match=r"no kernel for what reads state_0_S, state_0_conv, .*set provider=auto"):
        OnDevice(decoder_bundle)


def test_a_window_is_for_the_cpu(decoder_bundle: Path) -> None:
    manifest = contract.read_manifest(decoder_bundle)
    assert manifest.decoder is not None
    windowed = manifest.model_copy(update={"decoder": manifest.decoder.model_copy(update={"window": 1024})})
    with pytest.raises(SettingsConflict, match=r"tiny-decoder attends to a window of 1024 tokens, .*Set provider=cpu, or auto"):
        DeviceStepSession(decoder_bundle, windowed, provider=CPU)


async def test_memory_that_runs_out_ends_the_run_that_asked_for_it_and_no_other(decoder_bundle: Path, afar: None) -> None:
    session = OnDevice(decoder_bundle)
    async with running(session, decoder_bundle, slots=SLOTS) as engine:
        session.full = True
        with pytest.raises(RuntimeFailed):
            await all_of(engine.submit(asked(1)))
        session.full = False
        assert (await all_of(engine.submit(asked(1)))).token_ids
    with pytest.raises(SettingsConflict, match=r"the states of 1152921504606846976 sequences, .* Set fewer slots"):
        DeviceStepSession.states(session, 2**60)


def test_memory_of_the_gpu_is_for_states_too(decoder_bundle: Path) -> None:
    manifest = contract.read_manifest(decoder_bundle)
    assert manifest.decoder is not None
    MiB = 2**20
    slots = MiB // manifest.decoder.state_bytes + 1
    assert left_of(None, manifest, slots) is None
    left = left_of(1.0, manifest, slots)
    assert left is not None
    assert 1 - left == pytest.approx(4 / 1024, rel=0.05)
    with pytest.raises(SettingsConflict, match=f"gpu_memory_gib=0.003 is not enough for tiny-decoder: the states of slots={slots} "):
        left_of(0.003, manifest, slots)
