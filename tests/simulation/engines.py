"""The generator's engine and the store's writer without their threads: the simulated loop calls them at random times.

Only their waiting is replaced. The code that computes, queues, copies and writes is the service's own.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, TypeVar, cast

from service.errors import StoreFailed
from service.generation.engine import GeneratorEngine, GeneratorLimits
from service.generation.sampling.grammar import Words
from service.generation.sampling.masks import Masks, _mask_of
from service.generation.saved.keeper import StateKeeper
from service.generation.sequence import Sequence
from service.generation.session import HostStates, Ids, Logits
from service.states.engine import StateEngine
from service.states.sqlite import SqliteEngine
from service.states.store import Store
from service.telemetry.metrics import GeneratorMetrics, Metrics
from tests.service.generation.fake_steps import EOS, VOCAB_SIZE, FakeSteps
from tests.simulation.loop import SimulatedLoop
from tests.simulation.plain import tokenizer

T = TypeVar("T")

NUMERICS = "ab"
FINGERPRINT = "fake"
_CALL_S, _TOKEN_S = 0.0004, 0.0001  # virtual duration of a call of the runtime, and of each of its tokens
_HUGE_S = 1e9  # longest wait in a queue: no request is refused, because overload is not simulated
_GROUP = 8  # most calls of the store that become durable together
_PAUSE_S = 0.001  # mean time between two turns of an engine, and until a thread that was woken runs


@dataclass
class Chances:
    """The probability of each kind of failure, and the speed of the store."""

    runtime: float = 0.0  # that a call of the runtime fails
    commit: float = 0.0  # that a transaction of the store fails at its end
    store_s: float = 0.002  # mean duration of a transaction


class TimedSteps(FakeSteps):
    """A toy recurrence that takes time, and fails at random."""

    def __init__(self, loop: SimulatedLoop, chances: Chances) -> None:
        super().__init__()
        self._loop = loop
        self._chances = chances

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: HostStates, out: HostStates) -> Logits:
        self._loop.now += _CALL_S + _TOKEN_S * tokens.size
        if self._loop.random.random() < self._chances.runtime:
            self._loop.log("the runtime fails")
            self.failures[len(self.calls)] = RuntimeError("the runtime has failed, by chance")
        return super().run(tokens, lengths, positions, wanted, states, out)


class SimulatedMasks(Masks):
    """Masks that are ready at random times."""

    def __init__(self, vocab_size: int, loop: SimulatedLoop) -> None:
        super().__init__(vocab_size)
        self._loop = loop

    def begin(self, sequence: Sequence) -> None:
        if sequence.matcher is None:
            return
        mask = sequence.mask = Future[Words]()
        result = _mask_of(sequence.matcher, self._words)
        if self._loop.random.random() < 0.5:
            mask.set_result(result)
        else:
            self._loop.call_later(self._loop.soon(_PAUSE_S), mask.set_result, result)

    def late(self, sequences: Any) -> list[Sequence]:
        return [sequence for sequence in sequences if sequence.mask is not None and not sequence.mask.done()]

    def wait_for_one(self, sequences: Any) -> None:
        """Return at once: the next turn of the engine asks again."""


class SimulatedEngine(GeneratorEngine):
    """An engine whose loop calls `_turn` after random pauses while there is work. `paused` and `dead` are those of its process."""

    def __init__(self, name: str, loop: SimulatedLoop, steps: FakeSteps, keeper: StateKeeper | None, slots: int, cache_bytes: int) -> None:
        super().__init__(
            steps,
            tokenizer().vocabulary,
            eos_token_ids=(EOS,),
            grammars=tokenizer().grammars,
            keeper=keeper,
            limits=GeneratorLimits(
                slots=slots, max_wait_s=_HUGE_S, max_bulk_wait_s=_HUGE_S, prefix_cache_bytes=cache_bytes, hand_over_s=4 * _PAUSE_S
            ),
            numerics=NUMERICS,
            metrics=_metrics(),
        )
        self.name = name
        self.paused = self.dead = False
        self._simulated = loop
        self._decoding._masks = SimulatedMasks(VOCAB_SIZE, loop)
        self._due = False

    def start(self) -> None:
        self._loop = self._simulated
        self._thread = cast(threading.Thread, _NoThread())
        self.admission._changed = cast(threading.Condition, _Bell(self.wake))

    def wake(self) -> None:
        """Let the thread run, soon."""
        if not self._due:
            self._due = True
            self._simulated.call_later(self._simulated.soon(_PAUSE_S), self._run_thread)

    def _run_thread(self) -> None:
        self._due = False
        if self.paused or self.dead:
            return
        with self._simulated.in_process(self.name):
            if self.admission._closed:
                self._end()
                self.dead = True
                return
            cancelled = [sequence for sequence in self.workload.holders if sequence.run.cancelled]
            self._turn()
            if any(sequence in self.workload.holders for sequence in cancelled):
                self._simulated.broken.append(f"{self.name}: a run keeps its slot although it was cancelled before this turn")
        admission = self.admission
        if self.workload.held or len(admission) or admission._cancelled:
            self.wake()

    def leaks(self) -> list[str]:
        """Describe the slots, rows and queue entries that are in use. To be called when no run is left."""
        held = {
            "slots are held": self.pending,
            "rows are in use": len(self._decoding.running._slots),
            "rows have runs": len(self._decoding.running.sequences),
            "runs wait for masks": len(self._decoding.late),
            "prompts rest": len(self._decoding.prefill._resting) + len(self._decoding.prefill._prompts),
            "jobs are set aside": self.admission.aside,
        }
        return [f"{self.name}: {number} {what}" for what, number in held.items() if number]


class SimulatedStore(Store):
    """A store whose writer the loop calls. Several of them may share one engine, as processes share a directory."""

    def __init__(self, engine: StateEngine, name: str, loop: SimulatedLoop, chances: Chances) -> None:
        super().__init__(engine)
        self.name = name
        self.paused = self.dead = False
        self._simulated = loop
        self._chances = chances
        self._queued: list[tuple[Callable[[StateEngine], Any], Future[Any]]] = []
        self.written: Callable[[], None] = lambda: None  # called when a group is durable, before any caller has its result
        self._due = False

    def _start(self) -> None:
        """Start nothing: the simulated loop calls `_run_thread`."""

    def submit(self, call: Callable[[StateEngine], T]) -> Future[T]:
        future: Future[T] = Future()
        self._queued.append((call, future))
        self.wake()
        return future

    def close(self) -> None:
        self._closed = True

    def restart(self) -> None:
        """Fail the queued calls with StoreFailed, as if the store had been restarted."""
        lost, self._queued = self._queued, []
        for _, future in lost:
            future.set_exception(StoreFailed("the store of states was started again: send the request again"))

    def wake(self) -> None:
        if not self._due:
            self._due = True
            self._simulated.call_later(self._simulated.soon(self._chances.store_s), self._run_thread)

    def _run_thread(self) -> None:
        self._due = False
        if self.paused or self.dead or not self._queued:
            return
        size = self._simulated.random.randint(1, _GROUP)
        group, self._queued = self._queued[:size], self._queued[size:]
        with self._simulated.in_process(self.name):
            self._carry_out(group)
        self.written()
        if self._queued:
            self.wake()


class FailingSqlite(SqliteEngine):
    """Keeps states in memory. A transaction may fail at its commit, at random, and is then undone."""

    def __init__(self, loop: SimulatedLoop, chances: Chances) -> None:
        super().__init__(None, clock=lambda: loop.epoch)
        self._simulated = loop
        self._chances = chances
        self._depth = 0

    @contextmanager
    def group(self) -> Iterator[None]:
        with super().group():
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            if not self._depth and self._simulated.random.random() < self._chances.commit:
                self._simulated.log("a transaction fails")
                raise OSError("no space left, by chance")


def opened(
    name: str, loop: SimulatedLoop, store: Store, chances: Chances, *, slots: int, hot_bytes: int, cache_bytes: int
) -> SimulatedEngine:
    """Return a started engine that keeps states in this store."""
    steps = TimedSteps(loop, chances)
    keeper = StateKeeper(store, steps.decoder, vocab_size=VOCAB_SIZE, fingerprint=FINGERPRINT, numerics=NUMERICS, hot_bytes=hot_bytes)
    engine = SimulatedEngine(name, loop, steps, keeper, slots, cache_bytes)
    engine.start()
    return engine


@cache
def _metrics() -> GeneratorMetrics:
    return GeneratorMetrics(Metrics(), "toy")


class _NoThread:
    """Stands in for the engine's thread."""

    def is_alive(self) -> bool:
        return True

    def join(self) -> None: ...


class _Bell:
    """Stands in for the condition of the queue. No thread waits for it: `notify` wakes the simulated engine."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self.notify = ring

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
