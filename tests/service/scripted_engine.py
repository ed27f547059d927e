"""The real engine of decoders over a session without a model, which makes the engine draw a given text.

`ScriptedSteps` stands in for the step graph alone: queue, prefill, sampling, stop strings, grammars and states are the service's own.
`ScriptedEngine` remembers the runs of the engine, and refuses or fails them when a test says so.
"""

import math
import threading
import time
from collections.abc import Callable

import numpy as np

from export import contract
from service.generation.engine import GeneratorEngine, GeneratorLimits
from service.generation.request import GenerationRequest
from service.generation.run import Run
from service.generation.sampling.grammar import Grammars
from service.generation.saved.keeper import StateKeeper
from service.generation.sequence import Sequence
from service.generation.session import HostStates, Ids, Logits
from service.generation.step_engine import Once
from service.generation.submission import Submission
from service.generation.text import Vocabulary
from service.states.store import Store
from service.telemetry.metrics import GeneratorMetrics
from tests.service.fakes import PATIENCE_S
from tests.service.generation.fake_steps import GatedSteps

MOST_SEEN = 512  # number of tokens that a state remembers, the newest ones
STATES = (  # numbers, which are 0 always and are there for the checks of numbers; and the tokens
    contract.StateTensor(name="state_0_S", shape=(2, 4)),
    contract.StateTensor(name="state_0_seen", shape=(MOST_SEEN,), dtype="int64"),
)
_TURNS = 3  # turns of the event loop from a token of the engine to the event of a stream
GAP = 100.0  # between two tokens' logits: whatever seed and temperature, the likeliest token is drawn


class ScriptedSteps(GatedSteps):
    """The state is the ids of the newest tokens. The likeliest next token continues the script: it follows the longest end of the tokens
    so far with which the script begins. After its last token, the script begins again.
    """

    def __init__(self, decoder: contract.Decoder, vocab_size: int, fingerprint: str) -> None:
        super().__init__()
        self.decoder = decoder
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint
        self.script: list[int] = []
        self.gap = GAP  # a small gap makes log-probabilities that differ, and greedy runs still draw the script

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: HostStates, out: HostStates) -> Logits:
        self._enter(tokens, lengths)
        logits = np.zeros((*wanted.shape, self.vocab_size), np.float32)
        for row, length in enumerate(lengths.tolist()):
            seen = np.concatenate([states.arrays[1][row], tokens[row, :length] + 1])
            for place, at in enumerate(wanted[row].tolist()):
                logits[row, place] = self.logits(seen[: MOST_SEEN + at + 1])
            out.arrays[0][row], out.arrays[1][row] = states.arrays[0][row], seen[-MOST_SEEN:]
        return logits

    def logits(self, seen: Ids) -> Logits:
        """Return the (V,) logits: the script's next token is the likeliest, and of the others the one with the smaller id."""
        script, text = _letters(self.script), _letters(seen_in(seen))
        said = next(n for n in range(len(script) - 1, -1, -1) if text.endswith(script[:n]))
        logits = -np.arange(self.vocab_size, dtype=np.float32)
        logits[self.script[said]] = 1
        return logits * np.float32(self.gap)


def seen_in(state: Ids) -> list[int]:
    """Return the ids of the tokens in a state, which has a token as its id + 1, and no token as 0."""
    ids: list[int] = (state[state > 0] - 1).tolist()
    return ids


def _letters(ids: list[int]) -> str:
    """Return a text with one character for each id, because texts are compared fast."""
    return "".join(map(chr, ids))


class ScriptedEngine(GeneratorEngine):
    """Says its script to everybody, and ends it with the end of text."""

    def __init__(
        self,
        steps: ScriptedSteps,
        vocabulary: Vocabulary,
        grammars: Grammars,
        metrics: GeneratorMetrics,
        *,
        encode: Callable[[str], list[int]],
        script: str,
        prefix_cache_bytes: int = 0,
    ) -> None:
        """`encode` makes tokens of a script, without special tokens."""
        super().__init__(
            steps,
            vocabulary,
            eos_token_ids=steps.decoder.eos_token_ids,
            grammars=grammars,
            limits=GeneratorLimits(max_wait_s=PATIENCE_S, max_bulk_wait_s=PATIENCE_S, prefix_cache_bytes=prefix_cache_bytes),
            numerics="fa4e",
            metrics=metrics,
        )
        self.steps = steps
        self.runs: list[Run] = []  # all that were queued
        self.refusal: BaseException | None = None  # raised instead of making a run, after `refuse_after` others
        self.refuse_after = 0
        self.failures: dict[int, tuple[int, BaseException]] = {}  # by number of the run: after so many tokens, what
        self._made = 0
        self._store: Store | None = None
        self._encode = encode
        self.script = self.first_script = script  # the one that it says again after `forget`

    # What a test calls -----------------------------------------------------------------------------------------------------------------

    @property
    def script(self) -> str:
        return self._script

    @script.setter
    def script(self, text: str) -> None:
        self._script = text
        self.steps.script = [*self._encode(text), *self.steps.decoder.eos_token_ids]

    @property
    def requests(self) -> list[GenerationRequest]:
        return [run.request for run in self.runs]

    def forget(self) -> None:
        """Forget all runs, and everything that a test has set."""
        self.runs, self.refusal, self.refuse_after, self.failures, self._made = [], None, 0, {}, 0
        self.script, self.steps.gap = self.first_script, GAP
        self.steps.open()

    def hold(self, after: int = 0) -> None:
        """Let every run draw so many tokens, and then none: so many calls of the session begin, the first with the whole prompt."""
        self.steps.hold(after)

    def release(self, tokens: int | None = None) -> None:
        """Let every run draw so many more tokens. None: all, from now on."""
        if tokens is None:
            self.steps.open()
        else:
            self.steps.release(tokens)

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until something about the runs is so. To be called on another thread than the event loop's."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    @property
    def states(self) -> Store | None:
        """The store in which it keeps states."""
        return self._store

    @states.setter
    def states(self, store: Store | None) -> None:
        self._store = store
        self.compute_as(self.numerics)

    def compute_as(self, numerics: str) -> None:
        """Go on as an engine of other arithmetic."""
        steps, self.numerics = self.steps, numerics
        keeper = None
        if self._store is not None:
            keeper = StateKeeper(
                self._store, steps.decoder, vocab_size=steps.vocab_size, fingerprint=steps.fingerprint, numerics=numerics, hot_bytes=0
            )
        self._keeper = self._decoding.keeper = keeper

    # What the engine calls -------------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        self.steps.open()
        await super().stop()

    def _job(self, request: GenerationRequest, submission: Submission[Sequence], once: Once) -> Sequence:
        if self.refusal is not None and self._made >= self.refuse_after:
            raise self.refusal
        self._made += 1
        return super()._job(request, submission, once)

    def _queue(self, submission: Submission[Sequence]) -> None:
        self.runs += [job.run for job in submission.fresh]
        super()._queue(submission)

    def publish(self, next_s: float = math.inf) -> None:
        """Wait until the event loop has passed on what is published, so that it does not depend on the speed of threads how many tokens a
        reader gets at a time.
        """
        emitted = bool(self._emitted)
        super().publish(next_s)
        if emitted:
            passed_on = threading.Event()
            self.post(self._turn_of_loop, _TURNS, passed_on)
            passed_on.wait(PATIENCE_S)

    def _turn_of_loop(self, left: int, passed_on: threading.Event) -> None:
        if left:
            assert self._loop is not None
            self._loop.call_soon(self._turn_of_loop, left - 1, passed_on)
        else:
            passed_on.set()

    def _admit(self) -> None:
        """Fail the runs that are to fail, as runs fail whose deadline has passed: before they draw another token."""
        super()._admit()
        for number, (after, failure) in list(self.failures.items()):
            for job in [*self.workload.holders, *self.admission.waiting()] if number < len(self.runs) else ():
                if job.run is self.runs[number] and len(job.completion) == after:
                    self.finished(job.run, "error")
                    self.post(job.run.fail, failure)
                    self._remove(job)
