"""Calls of the runtime: a row's bits do not depend on how many threads there are, or on how a batch is shared out among them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from export import contract
from service.generation.session import LEAST_ROWS, OnnxStepSession
from tests.decoders import tiny_decoder_bundle

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
def test_bits_do_not_depend_on_threads(bundle: Path, rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = contract.read_manifest(bundle)
    one, wide = (stepped(OnnxStepSession(bundle, manifest, threads=n, share_out=False), rows, width) for n in (1, THREADS))
    others = [wide]
    for way in (0, 1):
        monkeypatch.setattr("service.generation.session.Quicker", lambda way=way: lambda ways, size: ways[way]())
        others.append(stepped(OnnxStepSession(bundle, manifest, threads=THREADS), rows, width))
    for other in others:
        assert all(np.array_equal(ours, reference) for ours, reference in zip(other, one, strict=True))


@pytest.mark.parametrize(("rows", "ways"), [(1, 2), (LEAST_ROWS, 1), (LEAST_ROWS * THREADS - 1, 1), (LEAST_ROWS * THREADS, 2), (33, 2)])
def test_calls_with_about_as_many_tokens_are_made_in_the_way_that_was_quicker_for_them(
    bundle: Path, rows: int, ways: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[tuple[int, int]] = []

    class Watched:
        def __call__(self, ways: Sequence[Callable[[], None]], size: int) -> None:
            offered.append((id(self), len(ways)))
            ways[-1]()

    monkeypatch.setattr("service.generation.session.Quicker", Watched)
    session = OnnxStepSession(bundle, contract.read_manifest(bundle), threads=THREADS)
    for _ in range(2):
        stepped(session, rows, 1)
    assert {n for _, n in offered} == ({ways} - {1})
    assert len({chooser for chooser, _ in offered}) == (ways > 1)


def test_calls_of_about_the_same_size_share_their_choice(bundle: Path) -> None:
    session = OnnxStepSession(bundle, contract.read_manifest(bundle), threads=THREADS)
    for rows, width in ((9, 1), (15, 1), (8, 1), (33, 1), (9, 5)):
        stepped(session, rows, width)
    assert list(session._quicker) == [(4, 1, False), (6, 1, False), (4, 3, False)]
