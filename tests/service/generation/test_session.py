"""Calls of the runtime: a row's bits do not depend on how many threads there are, or on how a batch is shared out among them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import contract
from service.generation.session import LEAST_ROWS, OnnxStepSession, quickest
from tests.decoders import tiny_decoder_bundle

pytestmark = pytest.mark.export

THREADS = 2
STEPS = 3


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_decoder_bundle(
        tmp_path_factory.mktemp("session") / "b", d_model=64, n_heads=4, d_feedforward=144, layers="gated_delta", positions="none"
    )


def stepped(session: OnnxStepSession, rows: int, width: int) -> list[np.ndarray]:
    """The logits and states of `rows` sequences after some steps of `width` tokens."""
    tokens = np.random.default_rng(0).integers(0, session.vocab_size, (STEPS, rows, width))
    lengths, wanted = np.full(rows, width), np.full((rows, 1), width - 1)
    states, out = session.states(rows), session.states(rows)
    for step in range(STEPS):
        logits = session.run(tokens[step], lengths, lengths * step, wanted, states, out)
        states, out = out, states
    return [logits, *states.arrays]


@pytest.mark.parametrize("rows", [1, LEAST_ROWS * THREADS - 1, LEAST_ROWS * THREADS, LEAST_ROWS * THREADS + 1, 33])
@pytest.mark.parametrize("width", [1, 5])
def test_bits_do_not_depend_on_threads(bundle: Path, rows: int, width: int) -> None:
    manifest = contract.read_manifest(bundle)
    one, wide, shared = (
        stepped(OnnxStepSession(bundle, manifest, threads=threads, share_out=share_out), rows, width)
        for threads, share_out in ((1, False), (THREADS, False), (THREADS, True))
    )
    for ours, same, reference in zip(shared, wide, one, strict=True):
        assert np.array_equal(ours, reference)
        assert np.array_equal(same, reference)


@pytest.mark.parametrize(("gains_from", "least"), [(99, 64), (16, 16), (8, 8)])
def test_rows_are_divided_only_where_that_saved_time_at_the_start(
    bundle: Path, gains_from: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided: list[int] = []

    class Watched(OnnxStepSession):
        def _divided(self, fed: Any) -> Callable[[], None]:
            divided.append(len(fed.tokens))
            return partial(super()._divided(fed))

    def quickest(calls: Sequence[Callable[[], None]]) -> int:
        """The divided call, a `partial`, is faster from `gains_from` rows on."""
        kinds = [isinstance(call, partial) for call in calls]
        return kinds.index(True) if any(kinds) and divided[-1] >= gains_from else kinds.index(False)

    monkeypatch.setattr("service.generation.session.quickest", quickest)
    session = Watched(bundle, contract.read_manifest(bundle), threads=THREADS)
    divided.clear()
    for rows in (least - 1, least):
        stepped(session, rows, 1)
    assert set(divided) == {least}


def test_two_calls_at_the_same_time_have_the_bits_of_each_alone(bundle: Path) -> None:
    session = OnnxStepSession(bundle, contract.read_manifest(bundle), threads=THREADS)
    assert session.at_once is not None
    calls, alone = [], []
    for rows, width in ((9, 1), (2, 40)):
        tokens = np.random.default_rng(rows).integers(0, session.vocab_size, (rows, width))
        lengths, wanted, positions = np.full(rows, width), np.full((rows, 1), width - 1), np.zeros(rows, np.int64)
        states, out, same = (session.states(rows + 1) for _ in range(3))  # slots that are not in use come last
        logits = np.empty((rows, 1, session.vocab_size), np.float32)
        calls.append(session.bind(tokens, lengths, positions, wanted, states, out, logits, one_core=True))
        alone.append((session.run(tokens, lengths, positions, wanted, states, same), same, logits, out))
    session.at_once(calls)
    for expected, states, logits, out in alone:
        assert np.array_equal(logits, expected)
        for ours, theirs in zip(out.arrays, states.arrays, strict=True):
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(("threads", "two"), [(1, False), (2, True), (3, False)])
def test_only_two_cores_make_two_calls_at_the_same_time(bundle: Path, threads: int, two: bool) -> None:
    session = OnnxStepSession(bundle, contract.read_manifest(bundle), threads=threads)
    assert (session.at_once is not None) == two


def test_the_call_with_the_shortest_run_is_the_quickest() -> None:
    """By its best run, since other programs lengthen some runs. The first run, which allocates memory, does not count."""
    now = 0.0
    seconds = {"steady": iter([0.0, 5, 5, 5, 5, 5]), "interrupted": iter([99.0, 80, 4, 80, 80, 80])}

    def call(name: str) -> None:
        nonlocal now
        now += next(seconds[name])

    assert quickest([lambda: call("steady"), lambda: call("interrupted")], lambda: now) == 1
