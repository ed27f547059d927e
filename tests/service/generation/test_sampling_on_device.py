"""The graph that draws the next tokens, with a CPU as its device: what it draws, its memory, and its states."""

from pathlib import Path

import numpy as np
import pytest
import torch

from export import contract
from export.gpu.sampling_step import CANDIDATES, Draw
from service.generation.gpu.sampling import SamplingSession
from service.generation.sampling.drawing import draw_truncated
from service.generation.sampling.graph import draw
from service.generation.sampling.random import uniform
from service.generation.sampling.truncation import Truncation
from service.generation.session import OnnxStepSession
from service.runtime.onnx import CPU

R = 400  # rows of a draw
VOCABULARIES = (7, 256, 1500)  # less and more than CANDIDATES, multiples of 64 and not


def opened(bundle: Path, slots: int = 5) -> SamplingSession:
    manifest = contract.verify(bundle)
    assert manifest.gpu_graph is not None
    assert manifest.decoder is not None
    return SamplingSession(bundle / manifest.gpu_graph.graph.file, manifest.gpu_graph, manifest.decoder, slots=slots, provider=CPU)


def some_logits(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 3, (R, vocab_size)).astype(np.float32)


def drawn(logits: np.ndarray, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """What the graph's torch form draws."""
    numbers = [torch.from_numpy(np.asarray(x, dtype)) for x, dtype in ((temperature, "f4"), (top_k, "i8"), (top_p, "f4"), (uniforms, "f4"))]
    with torch.inference_mode():
        return Draw(logits.shape[1])(torch.from_numpy(logits), *numbers).numpy()


def uniforms() -> np.ndarray:
    return uniform(np.arange(R, dtype=np.uint64), np.full(R, 3, np.uint64))


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_without_limits_it_draws_what_the_host_draws(vocab_size: int) -> None:
    logits, temperature = some_logits(vocab_size), np.linspace(0.3, 2, R, dtype=np.float32)
    got = drawn(logits, temperature, np.zeros(R), np.ones(R), uniforms())
    want = draw(logits, 1 / temperature, uniforms())
    assert (got == want).mean() >= 0.99  # sums in float32 instead of float64 may change a draw next to a boundary


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (40, 0.9), (0, 1e-6)])
def test_with_limits_it_draws_the_same_tokens_as_often_as_the_host(vocab_size: int, top_k: int, top_p: float) -> None:
    """The host has another order of tokens if they are many."""
    for row in some_logits(vocab_size)[:3]:
        logits, temperature, grid = np.tile(row, (R, 1)), np.full(R, 0.8, np.float32), (np.arange(R) + 0.5) / R
        limits = Truncation(np.full(R, top_k), np.full(R, top_p), np.zeros(R), np.ones(R))
        want = draw_truncated(logits, logits.max(axis=1), temperature, limits, grid)
        got = drawn(logits, temperature, np.full(R, top_k), np.full(R, top_p), grid)
        assert np.abs(np.bincount(got, minlength=vocab_size) - np.bincount(want, minlength=vocab_size)).max() <= 1


def test_the_likeliest_token_is_the_first_of_equals() -> None:
    logits = some_logits(256).round()  # many equal numbers
    got = drawn(logits, np.ones(R), np.ones(R), np.ones(R), np.zeros(R))
    assert np.array_equal(logits[np.arange(R), got], logits.max(axis=1))


def test_what_it_cannot_draw_is_minus_1() -> None:
    flat = np.zeros((4, 3 * CANDIDATES), np.float32)
    flat[3] = np.nan
    got = drawn(flat, np.ones(4), np.array([0, CANDIDATES + 1, 5, 1]), np.array([0.9, 1, 0.5, 1]), np.zeros(4))
    assert (got[:2] == -1).all()  # the likeliest 90 % of equal tokens, and more tokens than candidates
    assert got[2] >= 0
    assert got[3] == -1  # not a number


def test_a_greedy_run_is_that_of_the_served_graph(gpu_decoder: Path) -> None:
    session = opened(gpu_decoder)
    served = OnnxStepSession(gpu_decoder, contract.read_manifest(gpu_decoder), threads=1)
    states = served.states(1), served.states(1)
    session.put(0, seed=9, temperature=0)
    token = np.array([65])
    for at in range(30):
        here = np.array([at])
        logits = served.run(token[:, None], np.array([1]), here, np.array([[0]]), *(states if at % 2 == 0 else states[::-1]))
        first, second = np.sort(logits[0, 0])[[-1, -2]]
        got = session.step(token)
        assert got[0] == logits[0, 0].argmax() or first - second < 0.05  # the graph for GPUs has its weights in float16
        token = np.array([logits[0, 0].argmax()])


def test_a_row_does_not_depend_on_the_other_rows(gpu_decoder: Path) -> None:
    def run(rows: int, of: int, seed: int) -> list[int]:
        session = opened(gpu_decoder)
        for row in range(rows):
            session.put(row, seed=seed if row == of else 100 + row, temperature=1, top_k=20 if row == of else 0)
        tokens, found = np.full(rows, 65), []
        for _ in range(20):
            tokens = session.step(tokens)
            found.append(int(tokens[of]))
        return found

    assert run(1, 0, 7) == run(5, 3, 7) == run(2, 1, 7)
    assert run(1, 0, 8) != run(1, 0, 7)


def test_a_run_goes_on_from_its_state(gpu_decoder: Path) -> None:
    session = opened(gpu_decoder)
    session.put(0, seed=7, temperature=1)
    tokens, whole = np.array([65]), []
    for step in range(20):
        if step == 9:
            kept, position, last = session.current.read(0, step), int(session.positions[0]), tokens
        tokens = session.step(tokens)
        whole.append(int(tokens[0]))
    session.put(2, seed=1, temperature=1)
    session.put(1, seed=7, temperature=1, states=kept, position=position)
    rest, tokens = [], np.array([5, last[0], 5])
    for _ in range(11):
        tokens = session.step(tokens)
        rest.append(int(tokens[1]))
    assert rest == whole[9:]


def test_memory_is_fixed(gpu_decoder: Path) -> None:
    """Two graphs for each power of two of rows, with addresses that never change; only the two sets of states are shared."""
    session = opened(gpu_decoder)
    before = {}
    for _ in range(2):
        for rows in (1, 2, 3, 4, 5, 5):
            for _ in range(2):
                session.step(np.full(rows, 65))
        found = {(rows, now): bound.addresses for (rows, now), bound in session._bound.items()}
        before = before or found
        assert found == before
    assert set(found) == {(rows, now) for rows in (1, 2, 4, 8) for now in (0, 1)}
    assert found[4, 0]["state_0_S"] == found[8, 0]["state_0_S"] == found[4, 1]["new_state_0_S"] != found[4, 1]["state_0_S"]
    assert len({addresses[contract.TOKENS] for addresses in found.values()}) == 8
