"""The engine: one step for every row there is, and between two steps sources join and leave.

Callers live on the event loop; the runtime and the searches belong to one thread. They meet at a queue with a bound, and what a step made
goes back to the loop in one call.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from service.errors import DeadlineExceeded, InputTooLong, InvalidRequest, NotReady, RuntimeFailed, ServiceError
from service.generation.admission import stopping
from service.generation.engine_thread import EngineThread
from service.generation.request import Attention, GenerationRequest, Sampling, Token
from service.generation.run import Run
from service.generation.text import TextStream, Vocabulary
from service.runtime.moving_average import averaged
from service.runtime.onnx import CPU
from service.seq2seq.batch import Batch
from service.seq2seq.request import WritingRequest
from service.seq2seq.search import Path, Search
from service.seq2seq.session import WritingSession
from service.seq2seq.waiting import Asked, Job, Waiting, WritingLimits
from service.telemetry.logs import traces
from service.telemetry.metrics import GeneratorMetrics
from service.telemetry.usage import Usage

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracer

log = logging.getLogger("attnserve")


class WritingEngine(EngineThread):
    """Writes the outputs of sources. `start` and `open` belong to one event loop."""

    def __init__(
        self,
        session: WritingSession,
        vocabulary: Vocabulary,
        *,
        limits: WritingLimits,
        metrics: GeneratorMetrics,
        tracer: "Tracer | None" = None,
    ) -> None:
        super().__init__("writer", limits.rows, metrics)
        self.limits = limits
        self.provider = CPU  # the only one that sessions of this kind have
        self._tracer = tracer
        self._session, self._vocabulary = session, vocabulary
        self._changed = threading.Condition()
        self._queue = Waiting(limits)
        self._closed = False
        self._job_s = 0.1  # from a row to the end, moving average
        # The thread's own.
        self._batch: Batch[Job] = Batch(session)
        self._stepped = 0.0
        self._said: list[Callable[[], None]] = []
        metrics.running.set_function(self._taken)
        metrics.waiting.set_function(lambda: len(self._queue))

    @property
    def pending(self) -> int:
        """Rows that are taken or waited for."""
        with self._changed:
            waited_for = _rows(self._queue.jobs)
        return self._taken() + waited_for

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    async def open(self, requests: Sequence[GenerationRequest], key: str = "") -> list[Run]:
        """Queue all sources of one request or none: `n` runs of each, one after the other. `key` is the request's session, of no use here.

        Raises InvalidRequest (also InputTooLong), Overloaded, DeadlineExceeded or NotReady.
        """
        now = time.monotonic()
        asked = Asked(requests[0].client, requests[0].lane, now, deque())
        jobs = [self._job(request, asked) for request in requests if isinstance(request, WritingRequest)]
        assert len(jobs) == len(requests), "this engine takes WritingRequests"
        asked.jobs.extend(jobs)
        with self._changed:
            if self._closed:
                raise stopping()
            with self.offered.refusing(asked.rows):
                lost = self._queue.put(asked, now, free=self.limits.rows - self._taken(), job_s=self._expected_s(now))
            self._changed.notify()
        self._refused_here(lost)
        for job in lost:
            for run in job.runs:
                self._finished(run, "error")
                run.fail(self._queue.full())
        return [run for job in jobs for run in job.runs]

    async def probe(self, deadline: float) -> None:
        """Write one token. Raises what keeps it from coming, as a ServiceError."""
        (run,) = await self.open([WritingRequest(prompt=(0,), sampling=Sampling(seed=0), max_tokens=1, deadline=deadline)])
        async for _ in run:
            pass

    def _job(self, request: WritingRequest, asked: Asked) -> Job:
        if self._loop is None:
            raise NotReady("the model is still being started")
        size, limit, vocab_size = len(request.prompt), self._session.max_source, self._session.vocab_size
        if not size:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if size > limit:
            raise InputTooLong(f"the prompt has {size} tokens and this model reads {limit} at most: shorten it", param="prompt")
        if (worst := max(request.prompt)) >= vocab_size or (worst := min(request.prompt)) < 0:
            raise InvalidRequest(f"token id {worst} of prompt is outside this model's vocabulary of {vocab_size}", param="prompt")
        if not 1 <= request.n <= request.beams <= self.limits.rows:
            raise InvalidRequest(
                f"n={request.n} outputs of {request.beams} beams: n is at most num_beams, and that is at most {self.limits.rows}",
                param="num_beams",
            )
        if request.deadline <= time.monotonic():
            raise DeadlineExceeded("the request's deadline passed before it was queued")
        both = self._session.both
        search = Search(
            beams=request.beams,
            length=size,
            max_tokens=min(request.max_tokens, both.max_output),
            begin_token_id=both.begin_token_id,
            end_token_id=both.end_token_id,
            top_logprobs=request.top_logprobs,
        )
        job = Job(request, [], search, asked)
        for _ in range(request.n):
            text = TextStream(self._vocabulary, stop=(), include_stop=False, skip_special_tokens=request.skip_special_tokens)
            usage = Usage(size, submitted=time.monotonic())
            job.runs.append(Run(request, usage, lambda run: self._leave(job), text))
        return job

    def _leave(self, job: Job) -> None:
        with self._changed:
            job.wanted = not all(run.cancelled for run in job.runs)
            self._changed.notify()

    def _expected_s(self, now: float) -> float:
        """How long a source keeps its rows: the average of finished sources, and the age of running ones if that is more."""
        ages = [now - (job.runs[0].usage.started or now) for job in list(self._batch.jobs)]
        return max(self._job_s, sum(ages) / len(ages) if ages else 0.0)

    def _taken(self) -> int:
        return _rows(self._batch.jobs)

    def _refused_here(self, jobs: Iterable[Job]) -> None:
        if self.offered.counts_refusals:
            self.offered.refuse(_rows(jobs))

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    # On the thread ---------------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._wait():
                self._sweep()
                self._admit()
                self._refuse_overdue()
                self.offered.hold(time.monotonic(), self._taken())
                if self._batch.jobs:
                    self._guarded(self._step, list(self._batch.jobs))
                self.offered.hold(time.monotonic(), self._taken())
                self._publish()
        except BaseException:  # a fault of this code; `alive` has the replica replaced
            log.exception("the engine's thread has died")
        with self._changed:
            self._closed = True
            waiting = self._queue.jobs
        for job in [*self._batch.jobs, *waiting]:
            self._fail(job, stopping())
        self._publish()

    def _wait(self) -> bool:
        """Until there is something to do; False when it is closed."""
        with self._changed:
            while not (self._batch.jobs or self._closed or len(self._queue)):
                self._changed.wait()
            return not self._closed

    def _sweep(self) -> None:
        """Remove jobs that no client wants any more, and jobs past their deadline."""
        now = time.monotonic()
        with self._changed:
            gone = [job for job in self._queue.jobs if _over(job, now)]
            for job in gone:
                self._queue.remove(job)
        for job in [each for each in self._batch.jobs if _over(each, now)]:
            self._batch.leave(job)
            gone.append(job)
        for job in gone:
            if job.wanted:
                self._fail(job, DeadlineExceeded("the request's deadline passed before its last token"))
            else:
                for run in job.runs:
                    self._finished(run, "abort")

    def _admit(self) -> None:
        """Give rows to the jobs that are next."""
        new: list[Job] = []
        now, taken = time.monotonic(), self._taken()
        with self._changed:
            while (job := self._queue.next(now, (*self._batch.jobs, *new))) and taken + job.request.beams <= self.limits.rows:
                self._queue.take(job)
                new.append(job)
                taken += job.request.beams
        if new:
            for job in new:
                for run in job.runs:
                    run.usage.started = now
                self.offered.begin(job.request.beams)
                self.metrics.queue_s.observe(now - job.runs[0].usage.submitted)
                self.metrics.prompt_tokens.inc(len(job.request.prompt))
            self._guarded(partial(self._batch.join, new, [list(job.request.prompt) for job in new]), new)

    def _refuse_overdue(self) -> None:
        """Refuse jobs that waited too long, after rows were given out: a job that finds an idle engine has not waited."""
        with self._changed:
            overdue = self._queue.overdue(time.monotonic())
        self._refused_here(job for job, _ in overdue)
        for job, error in overdue:
            self._fail(job, error)

    def _guarded(self, call: Callable[[], None], took_part: list[Job]) -> None:
        """Call the runtime. An error fails the jobs that took part."""
        self._began = time.monotonic()
        try:
            call()
            self._last_call_failed = False
        except BaseException:  # not even SystemExit may end this thread: all callers would wait forever
            log.exception("step failed", extra={"runs": len(took_part), **traces(job.request.traceparent for job in took_part)})
            self._last_call_failed = True
            self._batch = Batch(self._session) if set(self._batch.jobs) <= set(took_part) else self._batch
            for job in took_part:
                self._fail(job, RuntimeFailed("the runtime failed; the log says why"))
        finally:
            self._began = None

    def _step(self) -> None:
        jobs = list(self._batch.jobs)
        self._batch.step()
        now = time.monotonic()
        for job in jobs:
            first = job.runs[0].usage.first_token is None
            over = not job.search.alive
            greedy = job.request.beams == 1
            if over or greedy:
                self._say(job, job.search.found[: len(job.runs)], now)
            if first and job.runs[0].usage.first_token is not None:
                self.metrics.first_token_s.observe(now - job.runs[0].usage.submitted)
            if over:
                self._job_s = averaged(self._job_s, now - (job.runs[0].usage.started or now))
                self._batch.leave(job)
        self.metrics.between_tokens_s.observe(now - self._stepped, sum(job.request.beams == 1 for job in jobs))
        self._stepped = now

    def _say(self, job: Job, found: list[Path], now: float) -> None:
        """Publish the new tokens of each output: one if it is greedy, all if it is of a beam."""
        for run, path in zip(job.runs, found, strict=True):
            said = run.usage.completion_tokens
            logprobs = path.logprobs or (None,) * len(path.tokens)
            new = [Token(token, logprob) for token, logprob in zip(path.tokens[said:], logprobs[said:], strict=True)]
            run.usage.completion_tokens = len(path.tokens)
            run.usage.first_token = run.usage.first_token or now
            self.metrics.generation_tokens.inc(len(new))
            if path.finish_reason is not None:
                new[-1] = new[-1]._replace(finish_reason=path.finish_reason)
                self._finished(run, path.finish_reason)
                if job.request.attention:
                    attention = Attention(path.tokens, np.stack(path.weights))
                    self._said.append(partial(setattr, run, "attention", attention))
            self._said += [partial(run.give, token) for token in new]

    def _fail(self, job: Job, error: ServiceError) -> None:
        for run in job.runs:
            self._finished(run, "error")
            self._said.append(partial(run.fail, error))

    def _finished(self, run: Run, reason: Literal["stop", "length", "abort", "error"]) -> None:
        """A run has ended: its trace is written on the loop, not between two steps."""
        run.usage.finished = time.monotonic()
        self.metrics.finished(reason, run.usage)
        if self._tracer is not None and run.request.traceparent is not None:
            self._post(self._tracer.generation, run.request.traceparent, run.usage, reason)

    def _publish(self) -> None:
        if self._said:
            said, self._said = self._said, []
            self._post(_tell, said)


def _rows(jobs: Iterable[Job]) -> int:
    """A beam counts with all it may come to have."""
    return sum(job.request.beams for job in jobs)


def _over(job: Job, now: float) -> bool:
    return not job.wanted or now >= job.request.deadline


def _tell(said: list[Callable[[], None]]) -> None:
    for say in said:
        say()
