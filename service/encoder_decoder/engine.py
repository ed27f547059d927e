"""An encoder-decoder's engine: one step for all rows. Sources start and end between two steps.

`service/generation/step_engine.py` contains the parts of an engine that do not depend on how tokens are computed. This module adds the
sources and their searches.
"""

import math
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from service.encoder_decoder.batch import Batch, Source
from service.encoder_decoder.request import EncoderDecoderRequest
from service.encoder_decoder.search import Path, Search
from service.encoder_decoder.session import EncoderDecoderSession, check_golden
from service.errors import DeadlineExceeded, InputTooLong, InvalidRequest
from service.generation.admission import Admission, Holding, QueueLimits
from service.generation.model import Generator
from service.generation.request import Attention, Delta, GenerationRequest, Token
from service.generation.run import Run
from service.generation.sampling.sampler import check_ids
from service.generation.step_engine import Once, StepEngine
from service.generation.submission import Submission, Workload
from service.generation.text import TextStream, Vocabulary
from service.runtime.lanes import Lane
from service.runtime.onnx import CPU
from service.settings import Settings
from service.telemetry.metrics import GeneratorMetrics
from service.telemetry.usage import Usage

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracer


class SourceAdmission(Admission[Source]):
    """A queue of sources. A source keeps its rows until its outputs are complete."""

    def _wait_s(self, client: str, lane: Lane, holding: Holding, slots: int) -> float:
        """Return the estimated seconds until a new source gets its rows. All waiting sources of its own client get their rows before it,
        and each other client gets at most as many rows as its own client, the new source included.
        """
        by_client = Counter[str]()
        for each in self._submissions:
            if each.lane <= lane:
                by_client[each.client] += each.slots
        own = by_client.pop(client, 0)
        ahead = own + sum(min(rows, own + slots) for rows in by_client.values()) + slots - holding.free
        return max(ahead, 0) * holding.turn_s / holding.slots if len(self) else 0.0


class EncoderDecoderEngine(StepEngine[Source]):
    """The engine of an encoder-decoder: it generates the outputs of sources. A slot is one row of a step."""

    sweep_s = 0.0  # deadlines are checked at every step, because a step takes much longer than the check
    kind_of_request = EncoderDecoderRequest

    def __init__(
        self,
        session: EncoderDecoderSession,
        vocabulary: Vocabulary,
        *,
        limits: QueueLimits,
        metrics: GeneratorMetrics,
        tracer: "Tracer | None" = None,
    ) -> None:
        admission = SourceAdmission(limits)
        super().__init__("encoder_decoder", limits, admission, provider=CPU, run_s=0.1, metrics=metrics, tracer=tracer)
        self._session, self._vocabulary = session, vocabulary
        self.workload = Searching(self, session)

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    def _retry_after_s(self, submission: Submission[Source]) -> float:
        return max(len(self.admission) * self._run_s / self.limits.slots, 0.1)

    def _job(self, request: GenerationRequest, submission: Submission[Source], once: Once) -> Source:
        assert isinstance(request, EncoderDecoderRequest), "this engine takes EncoderDecoderRequests"
        self._check_queueable(request)
        size, limit, both = len(request.prompt), self._session.max_source, self._session.both
        if size > limit:
            raise InputTooLong(f"the prompt has {size} tokens and the maximum context length is {limit} tokens: shorten it", param="prompt")
        check_ids(request.prompt, self._session.vocab_size, "prompt")
        if not 1 <= request.n <= request.beams <= self.limits.slots:
            raise InvalidRequest(
                f"n={request.n} outputs of num_beams={request.beams}: n is at most num_beams, and num_beams at most {self.limits.slots}",
                param="num_beams",
            )
        search = Search(
            beams=request.beams,
            length=size,
            max_tokens=min(request.max_tokens, both.max_output),
            begin_token_id=both.begin_token_id,
            end_token_id=both.end_token_id,
            top_logprobs=request.top_logprobs,
        )
        return Source(request, [self._run(request, submission.submitted) for _ in range(request.n)], search, submission)

    def _run(self, request: EncoderDecoderRequest, submitted: float) -> Run:
        text = TextStream(self._vocabulary, stop=(), include_stop=False, skip_special_tokens=request.skip_special_tokens)
        return Run(request, Usage(len(request.prompt), submitted=submitted), self.admission.cancel, text)


class Searching(Workload[Source]):
    """The searches of an engine's sources. A beam search holds a slot for each row that it may use."""

    def __init__(self, engine: StepEngine[Source], session: EncoderDecoderSession) -> None:
        self._engine = engine
        self._session = session
        self._batch = Batch(session)
        self._placed: list[Source] = []  # sources that have slots but are not encoded yet
        self._stepped = 0.0

    @property
    def holders(self) -> list[Source]:
        return [*self._batch.sources, *self._placed]

    def place(self, job: Source) -> None:
        self._placed.append(job)
        self._engine.metrics.prompt_tokens.inc(len(job.request.prompt))

    def compute(self) -> float:
        if self._placed:
            self._engine.guarded(self._read, self._placed)
        if self._batch.sources:
            self._engine.guarded(self._step, self._batch.sources)
        return math.inf

    def end_at_deadline(self, job: Source) -> None:
        if job.request.attention:
            for run, path in zip(job.runs, job.search.found, strict=False):
                if run.usage.completion_tokens:
                    run.attention = Attention(path.tokens, np.stack(path.weights))
        for run in [run for run in job.runs if run.usage.finished is None]:
            late = DeadlineExceeded("the request's deadline passed before there was a token to answer")
            self._engine.emit(run, Delta("", finish_reason="length") if run.usage.completion_tokens else late)

    def remove(self, job: Source) -> None:
        if job in self._batch.sources:
            self._batch.leave(job)

    def after_failure(self, jobs: list[Source]) -> None:
        """Drop the whole batch if one of its sources was in the failed call: a step computes all rows together."""
        if set(self._batch.sources) & set(jobs):
            self._batch = Batch(self._session)

    def _read(self) -> None:
        placed, self._placed = self._placed, []
        self._batch.join(placed)
        self._engine.last_call_failed = False

    def _step(self) -> None:
        sources = list(self._batch.sources)
        self._batch.step()
        now = time.monotonic()
        for source in sources:
            usage, over, greedy = source.runs[0].usage, not source.search.alive, source.slots == 1
            first = usage.first_token is None
            if over or greedy:
                self._write(source, source.search.found[: len(source.runs)], now)
            if first and usage.first_token is not None:
                self._engine.metrics.first_token_s.observe(now - usage.submitted)
            if over:
                self._engine.ended(source, now)
                self._batch.leave(source)
        self._engine.metrics.between_tokens_s.observe(now - self._stepped, sum(source.slots == 1 for source in sources))
        self._stepped = now
        self._engine.last_call_failed = False

    def _write(self, source: Source, found: list[Path], now: float) -> None:
        """Emit the new tokens of each output of a source. Greedy search emits at most one token per step, and beam search all tokens at its
        end.
        """
        for run, path in zip(source.runs, found, strict=True):
            made = run.usage.completion_tokens
            logprobs = path.logprobs or (None,) * len(path.tokens)
            new = [Token(token, logprob) for token, logprob in zip(path.tokens[made:], logprobs[made:], strict=True)]
            run.usage.completion_tokens = len(path.tokens)
            run.usage.first_token = run.usage.first_token or now
            self._engine.metrics.generation_tokens.inc(len(new))
            if path.finish_reason is not None:
                new[-1] = new[-1]._replace(finish_reason=path.finish_reason)
                if source.request.attention:
                    run.attention = Attention(path.tokens, np.stack(path.weights))  # set before the reader gets the last token
            for token in new:
                self._engine.emit(run, token)


def open_encoder_decoder(model: Generator, settings: Settings, *, threads: int, tracer: "Tracer | None") -> EncoderDecoderEngine:
    """Open the engine of an encoder-decoder, and test it."""
    session = EncoderDecoderSession(model.bundle, model.manifest, threads=threads, provider=settings.provider)
    check_golden(model.bundle, session, model.encode)
    limits = QueueLimits(slots=max(settings.slots, 8), max_wait_s=settings.max_wait_s, max_bulk_wait_s=settings.max_bulk_wait_s)
    return EncoderDecoderEngine(session, model.vocabulary, limits=limits, metrics=model.metrics, tracer=tracer)
