"""The base class of engines that generate text step by step on one thread. It contains start and stop, queue, slots, cancellation,
deadlines, delivery and errors.

Subclasses for decoders and encoder-decoders make jobs of requests, and a `Workload` computes them. Callers run on the event loop. Only
the engine's thread uses jobs and makes runtime calls. Both share the queue (`Admission`). The tokens of a step are sent to the event loop
in one call. Jobs start and end between two steps.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal

from numpy.typing import NDArray

from service.errors import DeadlineExceeded, InvalidRequest, NotReady, Overloaded, RuntimeFailed, ServiceError
from service.generation.admission import Admission, Holding, QueueLimits, stopping
from service.generation.request import Delta, FinishReason, GenerationRequest, Sampling, Token
from service.generation.run import Run
from service.generation.state import State
from service.generation.submission import J, Submission, Workload
from service.runtime.lanes import Lane
from service.runtime.moving_average import averaged
from service.runtime.offered import OfferedSlots
from service.runtime.onnx import device_lost
from service.runtime.pacing import loaded_hand_over_s
from service.runtime.priority import give_way
from service.states.record import StateReference
from service.telemetry.logs import traces
from service.telemetry.metrics import GeneratorMetrics

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracer

log = logging.getLogger("attnserve")

_LOOK = 8  # steps between two checks of whether a running job must be preempted for a waiting job
_LONG_PROMPT = 4096  # after more than this number of prompt tokens were checked, other tasks of the event loop may run


@dataclass
class Once:
    """Results that all jobs of a submission share, so that the work for them is done once."""

    states: dict[StateReference, State] = field(default_factory=dict)  # states loaded before the jobs are made
    checkpoints: dict[str, State] = field(default_factory=dict)  # checkpoints loaded before the jobs are made, by id
    checked: set[int] = field(default_factory=set)  # `id()` of each collection of token ids that was checked
    made: dict[int, NDArray[Any]] = field(default_factory=dict)  # arrays made from collections of token ids, by the collection's `id()`


class StepEngine(ABC, Generic[J]):
    """Base of the engines: a loop over a queue and a workload. Call `start`, `open` and `submit` on the same event loop. Workloads call
    `guarded`, `emit`, `fail`, `ended`, `finished`, `publish` and `post`.
    """

    workload: Workload[J]
    sweep_s = 0.02  # minimum interval between two checks of deadlines
    kind_of_request: type[GenerationRequest] = GenerationRequest
    numerics = ""  # the engine's arithmetic, see `states/numerics.py`; "": states of this engine cannot be kept

    def __init__(
        self,
        name: str,
        limits: QueueLimits,
        admission: Admission[J],
        *,
        provider: str,
        run_s: float,
        metrics: GeneratorMetrics,
        tracer: "Tracer | None",
    ) -> None:
        """`run_s` is the time in seconds that a job is assumed to hold its slots, until the first job has ended."""
        self.provider = provider
        self.metrics = metrics
        self.offered = OfferedSlots(limits.slots, metrics.offered.inc)
        self.limits = limits
        self.admission = admission
        self._tracer = tracer
        self._run_s = run_s  # moving average of the seconds that a job holds its slots
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.last_call_failed = False
        self._began: float | None = None  # when the runtime call in progress began; None if there is none
        # The attributes from here on are used by the engine's thread only.
        self.n_steps = 0
        self._look_at = 0  # the number of steps after which to check whether a job must be preempted
        self._swept = 0.0
        self._emitted: list[tuple[Run, Token | Delta | ServiceError]] = []
        self._urgent = False  # whether something of `_emitted` must not wait: a first or last token, or an error
        self._hand_over_by = 0.0  # until when `_emitted` may wait; 0: there is nothing, or it has not waited yet
        metrics.slots.set(limits.slots)

    def start(self) -> None:
        """Start the engine's thread. Call it on the callers' event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()
        self.metrics.running.set_function(lambda: self.workload.held)
        self.metrics.waiting.set_function(lambda: len(self.admission))
        self.metrics.ready.set(1)

    async def stop(self) -> None:
        """End every run with NotReady, and stop the thread."""
        self.admission.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self.metrics.ready.set(0)

    @property
    def pending(self) -> int:
        """Return the number of slots that jobs hold or wait for."""
        return self.workload.held + self.admission.slots

    def has_numerics(self, numerics: str) -> bool:
        return numerics == self.numerics

    @property
    def prompt_token_s(self) -> float:
        """Return the seconds that a token of a prompt takes. 0: not known, or prompts are short."""
        return 0.0

    @property
    def full(self) -> bool:
        """Return whether one more run would have to wait for a slot."""
        return self.pending >= self.limits.slots

    @property
    def alive(self) -> bool:
        return self._thread is None or self._thread.is_alive()

    @property
    def healthy(self) -> bool:
        """Return whether the thread runs and the last call of the runtime succeeded."""
        return self._thread is not None and self.alive and not self.last_call_failed

    @property
    def stuck_s(self) -> float:
        """Return the seconds since the runtime's current call began; 0 if none runs."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def keeps_places(self, lane: Lane) -> bool:
        return self.admission.keeps_places(lane, time.monotonic())

    def withdraw(self, lane: Lane, client: str, told_s: float) -> None:
        self.admission.withdraw(lane, client, told_s)

    def refused(self, runs: float) -> None:
        """Count runs that a gateway has rejected because no replica could accept them."""
        self.offered.refuse(runs)

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    async def open(self, requests: Iterable[GenerationRequest], key: str = "") -> list[Run]:
        """Queue all runs of one API request, or none, and return them. `key` is the request's session, which only pools use.

        Raises InvalidRequest (also InputTooLong), Overloaded, DeadlineExceeded or NotReady.
        """
        requests = list(requests)
        submission, once, tokens = new_submission(requests[0]), Once(), 0
        wanted = sum(request.slots for request in requests)
        with self.offered.refusing(wanted):
            submission.most_wait_s = self.check(submission.client, submission.lane, requests[0].slots, wanted)
        await self._prepare(requests, once)
        for request in requests:
            tokens += len(request.known) + (0 if id(request.prompt) in once.checked else len(request.prompt))
            if tokens > _LONG_PROMPT:
                tokens = await asyncio.sleep(0, 0)
            submission.fresh.append(self._job(request, submission, once))
        runs = [run for job in submission.fresh for run in job.runs]
        self._queue(submission)  # after this line, the engine's thread may remove jobs from the submission
        return runs

    def expecting(self, client: str, tokens: float, deadline: float) -> contextlib.AbstractContextManager[None]:
        """See `Generating.expecting`. Engines whose prompts are short admit every prompt."""
        return contextlib.nullcontext()

    def submit(self, request: GenerationRequest) -> Run:
        """Queue one run, however long it will wait, and return it. If it raises an error, which may be any error of `open`, nothing was
        queued.
        """
        submission = new_submission(request)
        submission.fresh.append(job := self._job(request, submission, Once()))
        self._queue(submission)
        return job.runs[0]

    async def probe(self, deadline: float) -> None:
        """Generate one token, to test the engine. Raises a ServiceError if that fails."""
        request = self.kind_of_request(prompt=(0,), sampling=Sampling(seed=0), max_tokens=1, deadline=deadline)
        async for _ in self.submit(request):
            pass

    def check(self, client: str, lane: Lane, slots: int = 1, runs: int = 1) -> float:
        """Raise QueueTooLong if a request of this client, of `runs` runs, would wait too long for its first `slots`. Returns how many
        seconds it may wait.
        """
        holders = self.workload.holders
        held = Counter[str]()
        for holder in holders:
            held[holder.request.client] += holder.slots
        return self.admission.check(client, lane, time.monotonic(), Holding(self.limits.slots, held, self._turn_s(holders)), slots, runs)

    def _turn_s(self, holders: list[J]) -> float:
        """Estimate how many seconds a job holds its slots while others wait: the average of ended jobs, or the mean age of running jobs if
        that is longer.
        """
        now = time.monotonic()
        ages = [now - (holder.runs[0].usage.started or now) for holder in holders]
        return max(self._run_s, sum(ages) / max(len(ages), 1))

    async def _prepare(self, requests: list[GenerationRequest], once: Once) -> None:
        """Do slow work for requests before they are queued, and add the results to `once`."""

    @abstractmethod
    def _job(self, request: GenerationRequest, submission: Submission[J], once: Once) -> J:
        """Return the job of a request, after `_check_queueable` and further checks."""

    def _check_queueable(self, request: GenerationRequest) -> None:
        """Raise an error if no engine could queue this request."""
        if self._loop is None:
            raise NotReady("the model is still being started")
        if not request.prompt and request.start is None:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if request.deadline <= time.monotonic():
            raise DeadlineExceeded("the request's deadline passed before it was queued")

    @abstractmethod
    def _retry_after_s(self, submission: Submission[J]) -> float:
        """Return after how many seconds a request that finds the queue full should be retried."""

    def _queue(self, submission: Submission[J]) -> None:
        retry_after_s = self._retry_after_s(submission)
        with self.offered.refusing(submission.slots):
            replaced = self.admission.queue(submission, retry_after_s=retry_after_s)
        for each in replaced:
            self._refused_here(each)
            error = Overloaded("Model is overloaded: a client with fewer requests took the place of this one", retry_after_s=retry_after_s)
            for run in (run for job in each.fresh for run in job.runs):
                self.finished(run, "error")
                run.fail(error)

    def _refused_here(self, submission: Submission[J]) -> None:
        if self.offered.counts_refusals:
            self.offered.refuse(submission.slots)

    # On the thread ---------------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            give_way()
            while self.admission.wait(busy=self.workload.held > 0):
                self._turn()
        except BaseException:  # raised by a bug or a lost device; `alive` is then False, so the replica is replaced
            log.exception("the engine's thread has died")
            self.admission.close()
        self._end()

    def _turn(self) -> None:
        """Make one turn of the engine's loop: handle the queue and deadlines, and compute a step. Simulations call this without a
        thread.
        """
        self.n_steps += 1
        self._sweep()
        self._admit()
        self._refuse_overdue()
        self.offered.hold(time.monotonic(), self.workload.held)
        next_s = self.workload.compute()
        self.offered.hold(time.monotonic(), self.workload.held)
        self.publish(next_s)

    def _end(self) -> None:
        """Fail all runs, because the engine stops."""
        self.workload.close()
        self.fail([*self.admission.waiting(), *self.workload.holders], stopping())
        self.publish()

    def guarded(self, call: Callable[[], None], jobs: Iterable[J]) -> None:
        """Call the runtime. If it raises an error, the jobs of the call fail."""
        jobs, began = list(jobs), self._began
        self._began = time.monotonic()
        try:
            call()
        except BaseException as error:  # catches SystemExit too, because callers would wait forever if the thread ended
            log.exception("step failed", extra={"runs": len(jobs), **traces(job.request.traceparent for job in jobs)})
            told = error if isinstance(error, RuntimeFailed) else RuntimeFailed("the runtime failed; the log says why")
            self.last_call_failed = told is not error  # False for a RuntimeFailed, which means that only the logits are invalid
            self.fail(jobs, told)
            for job in jobs:
                self.admission.remove(job)
            self.workload.after_failure(jobs)
            if device_lost(error):
                raise  # ends the thread, because the process cannot compute any more
        finally:
            self._began = began  # that of the call in which this one was made

    def _sweep(self) -> None:
        """Remove cancelled jobs. Every `sweep_s`, also end runs whose deadline has passed, and fail runs whose text is not read."""
        now = time.monotonic()
        cancelled = self.admission.cancelled()
        if not (cancelled or now - self._swept > self.sweep_s):
            return
        for job in [*self.workload.holders, *self.admission.waiting()]:
            if cancelled and all(run.cancelled for run in job.runs):
                for run in job.runs:
                    self.finished(run, "abort")
            elif now >= job.request.deadline:
                self.workload.end_at_deadline(job)
            elif any((since := run.unread_since) is not None and now - since > self.limits.unread_s for run in job.runs):
                self.fail([job], DeadlineExceeded(f"the text was not read for {self.limits.unread_s:g} s"))
            else:
                continue
            self._remove(job)

    def _remove(self, job: J) -> None:
        self.admission.remove(job)
        self.workload.remove(job)

    def _admit(self) -> None:
        """Give slots to the next jobs. If no slot is free, the queue is checked only after an arrival and every `_LOOK` steps."""
        if not len(self.admission):
            return
        free = self.limits.slots - self.workload.held
        if free <= 0 and not self.admission.arrived and self.n_steps < self._look_at:
            return
        self._look_at = self.n_steps + _LOOK
        now, holders = time.monotonic(), self.workload.holders
        while (turn := self.admission.turn(now, holders, free=free, quantum=self.workload.quantum, room=self.workload.room)) is not None:
            job, giving = turn
            if giving is not None:
                self.guarded(partial(self.workload.set_aside, giving, now), [giving])
                holders.remove(giving)
                free += giving.slots
            self.guarded(partial(self.workload.place, job), [job])
            holders.append(job)
            free -= job.slots
            if (usage := job.runs[0].usage).started is None:
                for run in job.runs:
                    run.usage.started = now
                self.offered.begin(job.slots)
                self.metrics.queue_s.observe(now - usage.submitted)

    def _refuse_overdue(self) -> None:
        """Reject requests that waited too long for their first slots. Called after `_admit`, so that a request that arrives at an idle
        engine is never rejected."""
        now = time.monotonic()
        if now - self._swept > self.sweep_s:
            self._swept = now
            for submission, refusal in self.admission.overdue(now):
                self._refused_here(submission)
                self.fail(submission.fresh, refusal)

    # Delivery to the runs --------------------------------------------------------------------------------------------------------------

    def fail(self, jobs: Iterable[J], error: ServiceError) -> None:
        """End the unfinished runs of these jobs with an error."""
        for run in (run for job in jobs for run in job.runs):
            if run.usage.finished is None:
                self.emit(run, error)

    def emit(self, run: Run, made: Token | Delta | ServiceError) -> None:
        """Add a token, delta or error of a run to the outputs that the next `_publish` delivers."""
        if isinstance(made, ServiceError):
            self.finished(run, "error")
        elif made.finish_reason is not None:
            self.finished(run, made.finish_reason)
        self._urgent |= run.usage.finished is not None or run.usage.completion_tokens <= 1
        self._emitted.append((run, made))

    def finished(self, run: Run, reason: FinishReason | Literal["abort", "error"]) -> None:
        run.usage.finished = time.monotonic()
        self.metrics.finished(reason, run.usage)
        # On the event loop, so that writing does not delay the next step.
        if self._tracer is not None and run.request.traceparent is not None:
            self.post(self._tracer.generation, run.request.traceparent, run.usage, reason)

    def ended(self, job: J, now: float) -> None:
        """Update the average time that jobs hold their slots with the time of a job that has ended."""
        self._run_s = averaged(self._run_s, now - (job.runs[0].usage.started or now))

    @property
    def hand_over_s(self) -> float:
        """Return how long tokens may wait, so that those of several steps are made by one call and handed over at once."""
        return loaded_hand_over_s(self.limits.hand_over_s, self.workload.held)

    def publish(self, next_s: float = math.inf) -> None:
        """Hand over what was emitted, unless it may wait for the next call, which comes within `next_s` seconds."""
        if not self._emitted:
            return
        now = time.monotonic()
        self._hand_over_by = self._hand_over_by or now + self.hand_over_s
        if self._urgent or now + next_s > self._hand_over_by:
            emitted, self._emitted, self._urgent, self._hand_over_by = self._emitted, [], False, 0.0
            self.post(_deliver, emitted)

    def post(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop, from any thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # raised if the event loop is closed; then no caller waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)


def new_submission(request: GenerationRequest) -> Submission[Any]:
    now = time.monotonic()
    return Submission(request.client, request.lane, submitted=now, since=now)


def _deliver(emitted: list[tuple[Run, Token | Delta | ServiceError]]) -> None:
    for run, made in emitted:
        if isinstance(made, ServiceError):
            run.fail(made)
        else:
            run.give(made)
