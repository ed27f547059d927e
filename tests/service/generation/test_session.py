"""Calls of the runtime: a row's bits do not depend on how many threads there are, or on how a batch is shared out among them."""

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
    for small_bytes in (0, 2**40):
        monkeypatch.setattr("service.generation.session.SMALL_BYTES", small_bytes)
        others.append(stepped(OnnxStepSession(bundle, manifest, threads=THREADS), rows, width))
    for other in others:
        assert all(np.array_equal(ours, reference) for ours, reference in zip(other, one, strict=True))
