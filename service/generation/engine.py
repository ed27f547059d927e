"""The engine: one decode step for everybody who has begun, then a piece of somebody's prompt, and again.

Callers live on the event loop; the runtime, the states and the sampler belong to one thread. They meet in `Admission`, and what a step made
goes back to the loop in one call. Runs join and leave at every step.

Speculative decoding would sit in `_step`: the graph gives logits at any positions, and a step's old states stay until the next one.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from service.batching import Lane
from service.errors import DeadlineExceeded, InvalidRequest, NeverFits, NotReady, RuntimeFailed, ServiceError
from service.generation.admission import Admission, stopping
from service.generation.averages import averaged
from service.generation.condition import Condition
from service.generation.engine_thread import EngineThread
from service.generation.grammar import Grammars
from service.generation.prefill import LEAST_PIECE, Prefill, Prompt
from service.generation.request import Delta, GenerationRequest, Grammar, Sampling, Token, Usage
from service.generation.run import Run
from service.generation.running import Running
from service.generation.sampling import check_sampling
from service.generation.sequence import Sequence
from service.generation.session import StepSession, beginning
from service.generation.text import TextStream, Vocabulary
from service.logs import traces
from service.metrics import GeneratorMetrics
from service.runtime import device_lost

if TYPE_CHECKING:
    from service.tracing import Tracer

log = logging.getLogger("attnserve")

_SWEEP_S = 0.02  # between two looks at deadlines


@dataclass(frozen=True, kw_only=True)
class GeneratorLimits:
    """Bounds of one engine."""

    slots: int = 32
    max_waiting: int = 256  # runs without a slot
    max_waiting_tokens: int = 262_144  # of their prompts
    max_prompt_tokens: int = 131_072
    max_wait_s: float = 1.0  # of a request for the first slot, by how long runs took
    max_bulk_wait_s: float = 30.0
    bulk_delay_s: float = 2.0  # a bulk run is passed by interactive ones for so long
    unread_s: float = 60.0  # a run whose text nobody takes for so long is ended


class GeneratorEngine(EngineThread):
    """Continues token sequences. `start` and `submit` belong to one event loop."""

    def __init__(
        self,
        session: StepSession[Any],
        vocabulary: Vocabulary,
        *,
        eos_token_ids: tuple[int, ...],
        grammars: Grammars,
        limits: GeneratorLimits,
        metrics: GeneratorMetrics,
        tracer: "Tracer | None" = None,
    ) -> None:
        super().__init__("generator", metrics)
        self.limits = limits
        self.provider = session.provider
        self._tracer = tracer
        self._session = session
        self._vocabulary = vocabulary
        self._eos = eos_token_ids
        self._grammars = grammars
        self._admission = Admission(
            max_waiting=limits.max_waiting,
            max_waiting_tokens=limits.max_waiting_tokens,
            max_wait_s=limits.max_wait_s,
            max_bulk_wait_s=limits.max_bulk_wait_s,
            bulk_delay_s=limits.bulk_delay_s,
        )
        self._run_s = 1.0  # of a whole run, moving average
        self._arrivals = 0
        # The thread's own.
        self._running = Running(session, limits.slots)
        self._prefill = Prefill(session)
        self._step_s = 0.0
        self._swept = 0.0
        self._drew = 0.0
        self._said: list[tuple[Run, Token | Delta | ServiceError]] = []
        metrics.slots.set(limits.slots)
        metrics.running.set_function(lambda: len(self._running) + len(self._prefill))
        metrics.waiting.set_function(lambda: len(self._admission))

    @property
    def load(self) -> float:
        """Runs that have a slot or wait for one, as a share of all slots."""
        return (len(self._running) + len(self._prefill) + len(self._admission)) / self.limits.slots

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    async def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar, which may take seconds, so that `submit` finds it compiled. Raises InvalidRequest, Overloaded."""
        await asyncio.to_thread(self._grammars.matcher, grammar)

    def submit(self, request: GenerationRequest) -> Run:
        """Queue a run. Raises InvalidRequest, NeverFits, Overloaded, DeadlineExceeded or NotReady, with nothing queued."""
        return self._queue(self._sequence(request))

    def check(self, lane: Lane) -> None:
        """QueueTooLong when a request would wait too long for its first slot, by how long runs took."""
        free = self.limits.slots - len(self._running) - len(self._prefill)
        slot_s = self._run_s / self.limits.slots
        self._admission.check(lane, time.monotonic(), free=free, slot_s=slot_s, token_s=self._prefill.token_s)

    async def open(self, requests: Iterable[GenerationRequest], key: str = "") -> list[Run]:
        """Queue all runs of one request or none, their grammars compiled before. `key` says whose they are; here is one engine for all.

        Raises what `submit` and `check` do.
        """
        asked = list(requests)
        for lane in {request.lane for request in asked}:
            self.check(lane)
        for grammar in {request.grammar for request in asked if request.grammar is not None}:
            await self.prepare(grammar)
        runs: list[Run] = []
        try:
            for request in asked:
                runs.append(self.submit(request))
        except BaseException:
            for run in runs:
                run.cancel()
            raise
        return runs

    def resume(self, condition: Condition) -> Run:
        """Go on with a run that was taken out, here or elsewhere; its deltas continue where the others ended. Raises what `submit` does."""
        sequence = self._sequence(condition.request)
        condition.check(self._session.decoder, self._session.vocab_size)
        sequence.go_on_from(condition)
        return self._queue(sequence)

    async def probe(self, deadline: float) -> None:
        """Draw one token. Raises what keeps it from coming, as a ServiceError."""
        async for _ in self.submit(GenerationRequest(prompt=(0,), sampling=Sampling(seed=0), max_tokens=1, deadline=deadline)):
            pass

    async def take(self, run: Run) -> Condition:
        """Take a run out between two steps: its deltas end here, and the condition goes on with it.

        Raises InvalidRequest if it has ended or is being taken out already, NotReady when the engine stops.
        """
        assert self._loop is not None
        future: asyncio.Future[Condition] = self._loop.create_future()
        self._admission.take(run, future)
        try:
            return await future
        finally:
            run.cancel()  # its reader sees the end; and nothing runs on for a caller who did not wait

    def _check(self, request: GenerationRequest) -> None:
        if self._loop is None:
            raise NotReady("the model is still being started")
        size, limit = len(request.prompt), self.limits.max_prompt_tokens
        if not size:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if size > limit:
            raise NeverFits(f"the prompt has {size} tokens and the most is {limit}: shorten it", param="prompt")
        n_positions = self._session.decoder.n_positions
        if n_positions is not None and size > n_positions:
            raise NeverFits(f"the prompt has {size} tokens, and this model positions for {n_positions}: shorten it", param="prompt")
        vocab_size = self._session.vocab_size
        for name, ids in (("prompt", request.prompt), ("stop_token_ids", request.stop_token_ids)):
            if ids and ((worst := max(ids)) >= vocab_size or (worst := min(ids)) < 0):
                raise InvalidRequest(f"token id {worst} of {name} is outside this model's vocabulary of {vocab_size}", param=name)
        if not all(request.stop):
            raise InvalidRequest("a stop string is empty, and every text ends with it: leave it out", param="stop")
        check_sampling(request.sampling, vocab_size)
        if request.deadline <= time.monotonic():
            raise DeadlineExceeded("the request's deadline passed before it was queued")

    def _sequence(self, request: GenerationRequest) -> Sequence:
        """A run at its beginning, once it is known that it can be one of this model."""
        self._check(request)
        self._arrivals += 1
        text = TextStream(
            self._vocabulary, stop=request.stop, include_stop=request.include_stop, skip_special_tokens=request.skip_special_tokens
        )
        usage = Usage(len(request.prompt), submitted=time.monotonic())
        return Sequence(
            run=Run(request, usage, self._admission.leave, None if request.stop else text),
            stops=text if request.stop else None,
            matcher=self._grammars.matcher(request.grammar) if request.grammar is not None else None,
            ends=frozenset((*(() if request.ignore_eos else self._eos), *request.stop_token_ids)),
            order=self._arrivals,
            n_positions=self._session.decoder.n_positions,
        )

    def _queue(self, sequence: Sequence) -> Run:
        retry_after_s = self._run_s / self.limits.slots + sequence.left_of_prompt * self._prefill.token_s
        self._admission.queue(sequence, retry_after_s=retry_after_s)
        return sequence.run

    def _close(self) -> None:
        self._admission.close()

    # On the thread ---------------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._admission.wait(busy=bool(len(self._running) or len(self._prefill))):
                self._heed()
                self._admit()
                self._feed_some()
                if len(self._running):
                    self._guarded(self._step, self._running.sequences)
                self._publish()
        except BaseException:  # a fault of this code, or the device is lost; `alive` has the replica replaced
            log.exception("the engine's thread has died")
            self._admission.close()
        self._end()

    def _guarded(self, call: Callable[[], None], took_part: list[Sequence]) -> None:
        """A call of the runtime. What it raises belongs to the runs that took part."""
        everybody = list(took_part)
        self._began = time.monotonic()
        try:
            call()
            self._last_call_failed = False
        except BaseException as error:  # not even SystemExit ends this thread: everybody would wait for it for good
            asked = traces(sequence.run.request.traceparent for sequence in everybody)
            log.exception("step failed", extra={"runs": len(everybody), **asked})
            told = error if isinstance(error, RuntimeFailed) else RuntimeFailed("the runtime failed; the log says why")
            self._last_call_failed = told is not error  # else it is about logits
            for sequence in everybody:
                if sequence.run.usage.finished is None:
                    self._say(sequence.run, told)
                    self._forget(sequence)
            if device_lost(error):
                raise  # which ends this thread: the process can compute nothing more
        finally:
            self._began = None

    def _heed(self) -> None:
        """Free what nobody wants any more, hand over what is asked for, and now and then end what has taken too long."""
        now = time.monotonic()
        left, taken = self._admission.wishes()
        sweep = now - self._swept > _SWEEP_S
        if not (left or taken or sweep):
            return
        self._swept = now
        for sequence in [*self._running.sequences, *self._prefill.sequences, *self._admission.waiting()]:
            run = sequence.run
            if run in left:
                run.usage.finished = now
                self.metrics.finished("abort", run.usage)
                self._trace(run, "abort")
                self._forget(sequence)
            elif run in taken:
                self._hand_over(taken.pop(run), self._condition(sequence))
                self._trace(run, "taken")
                self._forget(sequence)
            elif now >= run.request.deadline:
                self._say(run, DeadlineExceeded("the request's deadline passed before its last token"))
                self._forget(sequence)
            elif (since := run.unread_since) is not None and now - since > self.limits.unread_s:
                self._say(run, DeadlineExceeded(f"nobody took the text for {self.limits.unread_s:g} s"))
                self._forget(sequence)
        for future in taken.values():
            self._hand_over(future, InvalidRequest("the run has ended: there is nothing to take out"))

    def _forget(self, sequence: Sequence) -> None:
        if sequence in self._running.sequences:
            self._running.remove(sequence)
        elif sequence in self._prefill.sequences:
            self._prefill.remove(sequence)
        else:
            self._admission.remove(sequence)

    def _condition(self, sequence: Sequence) -> Condition:
        logits, position = None, sequence.position
        if sequence in self._running.sequences:
            states, logits = self._running.condition(sequence)
        elif sequence in self._prefill.sequences and sequence.request.prompt_logprobs is None:
            states = self._prefill.states(sequence)
        elif sequence.come_from is not None:
            return sequence.come_from
        else:  # from the beginning, also where log-probabilities of the prompt were told to this caller and the next one wants all of them
            states, position = beginning(self._session.decoder), 0
        return Condition(
            request=sequence.request,
            completion=tuple(sequence.completion),
            position=position,
            states=tuple(states),
            logits=logits,
        )

    def _admit(self) -> None:
        """Slots to those who wait."""
        now = time.monotonic()
        while len(self._running) + len(self._prefill) < self.limits.slots:
            sequence = self._admission.next(now)
            if sequence is None:
                return
            self._place(sequence)
            sequence.run.usage.started = now
            self.metrics.queue_s.observe(now - sequence.run.usage.submitted)

    def _place(self, sequence: Sequence) -> None:
        condition, sequence.come_from = sequence.come_from, None
        if condition is None:
            self._prefill.add(sequence, None)
            return
        self._guarded(partial(self._place_again, sequence, condition), [sequence])

    def _place_again(self, sequence: Sequence, condition: Condition) -> None:
        """Its states go to where the graph runs."""
        sequence.position = condition.position
        if condition.logits is None:
            self._prefill.add(sequence, condition.states if condition.position else None)
        else:
            self._running.join(sequence, condition.states, condition.logits)

    def _feed_some(self) -> None:
        """Pieces of prompts, as many tokens of them as may pass before the next step."""
        budget = self._prefill.budget(self._step_s if len(self._running) else None)
        while len(self._prefill) and budget > 0:
            prompts, size = self._prefill.next(budget)
            self._guarded(partial(self._feed, prompts, size), [sequence for prompt in prompts for sequence in prompt.sequences])
            budget -= len(prompts) * max(size, LEAST_PIECE)  # a call has its price, however little it is given

    def _feed(self, prompts: list[Prompt], size: int) -> None:
        """A piece of each prompt; the runs of those that are done begin to draw."""
        before = sum(prompt.left for prompt in prompts)
        for fed in self._prefill.feed(prompts, size):
            for sequence in fed.sequences:
                if sequence.request.max_tokens:
                    self._running.join(sequence, fed.states, fed.logits)
                else:
                    self._say(sequence.run, Delta("", finish_reason="length"))
        self.metrics.prompt_tokens.inc(before - sum(prompt.left for prompt in prompts))

    def _step(self) -> None:
        """One token for everybody: draw it, say it, and feed those who go on."""
        self._draw()
        self._publish()  # before the graph runs, so that the loop sends while it does
        if len(self._running):
            started = time.perf_counter()
            self._running.step()
            self._step_s = averaged(self._step_s, time.perf_counter() - started)

    def _draw(self) -> None:
        """The next token of every row, said; those who end with it, or for whom there is none, are gone."""
        sequences, now, n_first = list(self._running.sequences), time.monotonic(), 0
        drawn = self._running.draw()
        for row, (sequence, token_id) in enumerate(zip(sequences, drawn.token_ids.tolist(), strict=True)):
            if row in drawn.failures:
                self._say(sequence.run, drawn.failures[row])
                self._running.remove(sequence)
                continue
            made, usage = sequence.accept(token_id, drawn.logprobs.get(row)), sequence.run.usage
            usage.completion_tokens += 1
            if usage.first_token is None:
                usage.first_token = now
                self.metrics.first_token_s.observe(now - usage.submitted)
                n_first += 1
            self._say(sequence.run, made)
            if made.finish_reason is not None:
                self._run_s = averaged(self._run_s, now - (usage.started or now))
                self._running.remove(sequence)
        n_drawn = len(sequences) - len(drawn.failures)
        self.metrics.between_tokens_s.observe(now - self._drew, n_drawn - n_first)  # who drew before drew at every step since
        self.metrics.generation_tokens.inc(n_drawn)
        self._drew = now

    def _say(self, run: Run, what: Token | Delta | ServiceError) -> None:
        if isinstance(what, ServiceError) or what.finish_reason is not None:
            run.usage.finished = time.monotonic()
            reason = "error" if isinstance(what, ServiceError) else what.finish_reason or "error"
            self.metrics.finished(reason, run.usage)
            self._trace(run, reason)
        self._said.append((run, what))

    def _trace(self, run: Run, reason: str) -> None:
        """A run has ended: its trace is written on the loop, not between two steps."""
        if self._tracer is not None and run.request.traceparent is not None:
            self._post(self._tracer.generation, run.request.traceparent, run.usage, reason)

    def _publish(self) -> None:
        if self._said:
            said, self._said = self._said, []
            self._post(_tell, said)

    def _hand_over(self, future: "asyncio.Future[Condition]", what: Condition | ServiceError) -> None:
        self._publish()  # what was said before it was taken out
        self._post(_settle, future, what)

    def _end(self) -> None:
        """Everybody is told."""
        _, taken = self._admission.wishes()
        for sequence in [*self._admission.waiting(), *self._prefill.sequences, *self._running.sequences]:
            self._say(sequence.run, stopping())
        self._publish()
        for future in taken.values():
            self._hand_over(future, stopping())


def _tell(said: list[tuple[Run, Token | Delta | ServiceError]]) -> None:
    for run, what in said:
        if isinstance(what, ServiceError):
            run.fail(what)
        else:
            run.give(what)


def _settle(future: "asyncio.Future[Condition]", what: Condition | ServiceError) -> None:
    if not future.done():
        if isinstance(what, ServiceError):
            future.set_exception(what)
        else:
            future.set_result(what)
