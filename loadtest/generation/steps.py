"""The bare step loop: a decoder's step graph in ONNX Runtime with its buffers bound, no sampler, no text, nobody to answer.

It is what an engine can at best reach. The next token of a row is any token: what it is does not change what a step costs.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from export import contract
from service.generation.session import OnnxStepSession, zeros

WARM_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Some tokens in a row of one long sequence."""

    first: int  # position of the first
    s_per_token: float  # median
    rss_bytes: int  # of this process, at the end


def open_steps(bundle: Path, threads: int) -> OnnxStepSession:
    return OnnxStepSession(bundle, contract.read_manifest(bundle), threads=threads, provider="cpu")


def stepping(session: OnnxStepSession, rows: int) -> Callable[[], None]:
    """A function that feeds one token to each of `rows` sequences."""
    front, back = zeros(session.decoder, rows), zeros(session.decoder, rows)
    tokens = np.random.default_rng(0).integers(0, session.vocab_size, (rows, 1))
    ones, wanted, positions = np.ones(rows, np.int64), np.zeros((rows, 1), np.int64), np.zeros(rows, np.int64)

    def step() -> None:
        nonlocal front, back
        session.run(tokens, ones, positions, wanted, front, back)
        front, back = back, front
        positions[:] += 1

    for _ in range(WARM_STEPS):
        step()
    return step


def tokens_per_s(bundle: Path, rows: int, seconds: float, threads: int) -> float:
    """Of all rows together."""
    step = stepping(open_steps(bundle, threads), rows)
    steps, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        step()
        steps += 1
    return rows * steps / elapsed


def prefill_tokens_per_s(bundle: Path, chunk: int, seconds: float, threads: int) -> float:
    """One prompt, fed in chunks."""
    session = open_steps(bundle, threads)
    front, back = zeros(session.decoder, 1), zeros(session.decoder, 1)
    tokens = np.random.default_rng(0).integers(0, session.vocab_size, (1, chunk))
    lengths, position = np.array([chunk], np.int64), np.zeros(1, np.int64)
    session.run(tokens, lengths, position, lengths[None] - 1, front, back)
    chunks, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        session.run(tokens, lengths, position, lengths[None] - 1, front, back)
        front, back = back, front
        position += chunk
        chunks += 1
    return chunk * chunks / elapsed


def long_sequence(bundle: Path, tokens: int, threads: int, stretch: int = 1000) -> Iterator[Stretch]:
    """One sequence of many tokens, stretch by stretch."""
    step, process = stepping(open_steps(bundle, threads), 1), psutil.Process()
    for first in range(0, tokens, stretch):
        times = np.empty(stretch)
        for at in range(stretch):
            started = time.perf_counter()
            step()
            times[at] = time.perf_counter() - started
        yield Stretch(first=first, s_per_token=float(np.median(times)), rss_bytes=process.memory_info().rss)
