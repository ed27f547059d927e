"""The bare step loop, whose speed is an upper bound for an engine: runs a decoder's step graph in ONNX Runtime with buffers that are bound
once, without a sampler or text. Tokens are random, because their values do not change the time of a step.
"""

import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np

from export import contract
from service.generation.session import OnnxStepSession, Step

WARM_STEPS = 20
LEAST_STEPS = 2  # fewest steps from which a median is computed


def open_steps(bundle: Path, threads: int) -> OnnxStepSession:
    """Open the step graph. Unlike in the engine, the rows of a call are not divided among the cores."""
    return OnnxStepSession(bundle, contract.read_manifest(bundle), threads=threads, share_out=False)


def stepping(session: OnnxStepSession, rows: int, *, width: int = 1, warm_steps: int = WARM_STEPS, position: int = 0) -> Callable[[], None]:
    """Return a function that feeds the next `width` tokens to each of `rows` sequences, from `position` on, and computes the logits after
    the last token."""
    one, other = session.states(rows), session.states(rows)
    one.reserve(sys.maxsize, rows)
    other.share(one)
    tokens = np.random.default_rng(0).integers(0, session.vocab_size, (rows, width))
    lengths, wanted, positions = np.full(rows, width), np.full((rows, 1), width - 1), np.full(rows, position)
    logits = np.empty((rows, 1, session.vocab_size), np.float32)
    there, back = (
        session.bind(Step(tokens, lengths, positions, wanted, before, after, logits)) for before, after in ((one, other), (other, one))
    )
    calls = cycle((there, back))

    def step() -> None:
        next(calls)()
        positions[:] += width

    for _ in range(warm_steps):
        step()
    return step


def median_s(step: Callable[[], object], seconds: float) -> float:
    """Call `step` again and again for `seconds`, at least LEAST_STEPS times, and return the median seconds of a call."""
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < LEAST_STEPS or time.perf_counter() - begun < seconds:
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def tokens_per_s(bundle: Path, rows: int, seconds: float, threads: int) -> float:
    """Return the tokens per second of the bare step loop, for `rows` sequences together."""
    return rows * calls_per_s(stepping(open_steps(bundle, threads), rows), seconds)


def prefill_tokens_per_s(bundle: Path, chunk: int, seconds: float, threads: int) -> float:
    """Return the prompt tokens per second of the bare step loop, for one prompt that is fed in chunks of `chunk` tokens."""
    return chunk * calls_per_s(stepping(open_steps(bundle, threads), 1, width=chunk, warm_steps=1), seconds)


def calls_per_s(call: Callable[[], object], seconds: float) -> float:
    """Call again and again for `seconds`, at least once, and return the calls per second."""
    calls, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or not calls:
        call()
        calls += 1
    return calls / elapsed


def step_s(bundle: Path, threads: int, seconds: float, *, position: int) -> float:
    """Return the median seconds of a step of one sequence at `position`."""
    return median_s(stepping(open_steps(bundle, threads), 1, position=position), seconds)
