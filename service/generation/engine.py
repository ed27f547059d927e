"""Slots, and the loop that feeds them: one decode step for everybody who has begun, then a piece of somebody's prompt.

Callers live on the event loop; the runtime, the states and the sampler belong to one thread. What both sides touch is behind one lock,
held for microseconds, and what a step made goes back to the loop in one call. Runs join and leave at every step. A prompt is fed in
pieces, so small while others stream that a piece takes about as long as a step of theirs; the pieces go in turn to the prompt that has
waited longest and to the one that is nearest its end, so that a long prompt neither blocks short ones nor starves.

Speculative decoding would sit in `_step`: the graph gives logits at any positions, and a step's old states stay until `Slots.stepped`.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import DeadlineExceeded, InvalidRequest, NeverFits, NotReady, Overloaded, RuntimeFailed, ServiceError
from service.generation.grammar import Grammars
from service.generation.request import Delta, GenerationRequest, Grammar, TokenLogprob, Usage
from service.generation.run import Run
from service.generation.sampling import Sampler, check_sampling, logprobs_of
from service.generation.sequence import Condition, Sequence
from service.generation.session import Ids, StepSession
from service.generation.slots import Slots
from service.generation.text import TextStream, Vocabulary
from service.metrics import GeneratorMetrics

log = logging.getLogger("attnserve")

_MEMORY = 0.9  # weight of the past in moving averages
_LEAST_PIECE, _MOST_PIECE = 16, 1024  # tokens of a prompt in one call
_PIECE_STEPS = 1.0  # how many decode steps a piece may take the time of, while others stream
_WITH_LOGPROBS = 64  # the same where logits of every position are wanted: V numbers each


@dataclass(frozen=True, kw_only=True)
class GeneratorLimits:
    """Bounds of one engine."""

    slots: int = 32
    max_waiting: int = 256  # runs without a slot
    max_waiting_tokens: int = 262_144  # of their prompts
    max_prompt_tokens: int = 131_072
    bulk_delay_s: float = 2.0  # a bulk run is passed by interactive ones for so long
    unread_s: float = 60.0  # a run whose text nobody takes for so long is ended


class GeneratorEngine:
    """Continues token sequences. `start` and `submit` belong to one event loop."""

    def __init__(
        self,
        session: StepSession,
        vocabulary: Vocabulary,
        *,
        eos_token_ids: tuple[int, ...],
        grammars: Grammars,
        limits: GeneratorLimits,
        metrics: GeneratorMetrics,
    ) -> None:
        self.limits = limits
        self.metrics = metrics
        self._session = session
        self._vocabulary = vocabulary
        self._eos = eos_token_ids
        self._grammars = grammars
        # The thread's own.
        self._slots: Slots[Sequence] = Slots(session.decoder, limits.slots)
        self._sampler = Sampler(session.vocab_size, limits.slots)
        self._logits = np.zeros((limits.slots, session.vocab_size), np.float32)  # of each row's next token
        self._prompts: dict[Sequence, Slots[Sequence]] = {}  # being fed, in order of arrival; each with a slot reserved
        self._turn = 0
        self._step_s = 0.0
        self._token_s = 0.0  # of a prompt
        self._said: list[tuple[Run, Delta | ServiceError]] = []
        # Behind the lock.
        self._changed = threading.Condition()
        self._waiting: tuple[deque[Sequence], deque[Sequence]] = (deque(), deque())  # by lane
        self._waiting_tokens = 0
        self._left: set[Run] = set()  # cancelled since the last step
        self._taken: dict[Run, asyncio.Future[Condition]] = {}
        self._closed = False
        self._run_s = 1.0  # of a whole run, moving average
        self._arrivals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._last_step_failed = False
        metrics.running.set_function(lambda: len(self._slots) + len(self._prompts))
        metrics.waiting.set_function(lambda: sum(map(len, self._waiting)))

    def start(self) -> None:
        """Begin to work. To be called on the event loop that will call `submit`."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="generator", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End every run with NotReady, then the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        return self._thread is None or self._thread.is_alive()

    @property
    def healthy(self) -> bool:
        """Started, alive, and the last call of the runtime succeeded."""
        return self._thread is not None and self.alive and not self._last_step_failed

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    async def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar, which may take seconds, so that `submit` finds it compiled. Raises InvalidRequest, Overloaded."""
        await asyncio.to_thread(self._grammars.matcher, grammar)

    def submit(self, request: GenerationRequest) -> Run:
        """Queue a run. Raises InvalidRequest, NeverFits, Overloaded, DeadlineExceeded or NotReady, with nothing queued."""
        self._check(request)
        matcher = self._grammars.matcher(request.grammar) if request.grammar is not None else None
        text = TextStream(
            self._vocabulary, stop=request.stop, include_stop=request.include_stop, skip_special_tokens=request.skip_special_tokens
        )
        return self._queue(Sequence(self._new_run(request), text, matcher, self._ends(request), self._arrival()))

    def resume(self, condition: Condition) -> Run:
        """Go on with a run that was taken out, here or elsewhere; its deltas continue where the others ended."""
        request = condition.request
        self._check(request)
        expected = [(state.shape, np.dtype(state.dtype)) for state in self._session.decoder.states]
        if [(state.shape, state.dtype) for state in condition.states] != expected:
            raise InvalidRequest("the state is not of this model: its tensors have other shapes")
        matcher = self._grammars.matcher(request.grammar) if request.grammar is not None else None
        if matcher is not None:
            matcher.advance(*condition.completion)
        text = TextStream.from_state(self._vocabulary, condition.text)
        sequence = Sequence(self._new_run(request), text, matcher, self._ends(request), self._arrival(), come_from=condition)
        sequence.completion = list(condition.completion)
        sequence.run.usage.completion_tokens = len(condition.completion)
        return self._queue(sequence)

    async def take(self, run: Run) -> Condition:
        """Take a run out between two steps: its deltas end here, and the condition goes on with it. InvalidRequest if it has ended."""
        assert self._loop is not None
        future: asyncio.Future[Condition] = self._loop.create_future()
        with self._changed:
            self._taken[run] = future
            self._changed.notify()
        return await future

    def _check(self, request: GenerationRequest) -> None:
        if self._loop is None:
            raise NotReady("the model is still being started")
        size, limit = len(request.prompt), self.limits.max_prompt_tokens
        if not size:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if size > limit:
            raise NeverFits(f"the prompt has {size} tokens and the most is {limit}: shorten it", param="prompt")
        vocab_size = self._session.vocab_size
        if (worst := max(request.prompt)) >= vocab_size or (worst := min(request.prompt)) < 0:
            raise InvalidRequest(f"token id {worst} of the prompt is outside this model's vocabulary of {vocab_size}", param="prompt")
        check_sampling(request.sampling, vocab_size)
        if request.deadline <= time.monotonic():
            raise DeadlineExceeded("the request's deadline passed before it was queued")

    def _new_run(self, request: GenerationRequest) -> Run:
        return Run(request, Usage(len(request.prompt), submitted=time.monotonic()), self._cancel)

    def _ends(self, request: GenerationRequest) -> frozenset[int]:
        return frozenset((*(() if request.ignore_eos else self._eos), *request.stop_token_ids))

    def _arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _queue(self, sequence: Sequence) -> Run:
        tokens = sequence.left_of_prompt
        with self._changed:
            if self._closed:
                raise _stopping()
            waiting = sum(map(len, self._waiting))
            if waiting >= self.limits.max_waiting or (waiting and self._waiting_tokens + tokens > self.limits.max_waiting_tokens):
                raise Overloaded(
                    f"Model is overloaded: {waiting} requests with {self._waiting_tokens} prompt tokens wait for one of "
                    f"{self.limits.slots} slots",
                    retry_after_s=self._run_s / self.limits.slots + tokens * self._token_s,
                )
            self._waiting[sequence.request.lane].append(sequence)
            self._waiting_tokens += tokens
            self._changed.notify()
        return sequence.run

    def _cancel(self, run: Run) -> None:
        with self._changed:
            self._left.add(run)
            self._changed.notify()

    # On the thread ---------------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._wait():
            self._drop()
            self._admit()
            self._feed_some()
            if len(self._slots):
                self._guarded(self._step)
            self._publish()
        self._end()

    def _wait(self) -> bool:
        """Until there is something to do; False when the engine is closed."""
        with self._changed:
            while not (self._closed or len(self._slots) or self._prompts or self._left or self._taken or any(self._waiting)):
                self._changed.wait()
            return not self._closed

    def _guarded(self, call: Callable[..., list[Sequence]], *arguments: Any) -> None:
        """A call of the runtime. What it raises belongs to the runs that took part."""
        took_part = list(arguments[:1] or self._slots.owners)
        try:
            failed = call(*arguments)
            self._last_step_failed = False
            why = "the model's logits for this run are not finite; it was ended"
        except BaseException:  # not even SystemExit ends this thread: everybody would wait for it for good
            log.exception("step failed", extra={"runs": len(took_part)})
            self._last_step_failed = True
            failed, why = took_part, "the runtime failed; the log says why"
        for sequence in failed:
            self._say(sequence.run, RuntimeFailed(why))
            self._forget(sequence)

    def _drop(self) -> None:
        """Free what nobody wants any more, hand over what is asked for."""
        with self._changed:
            left, self._left = self._left, set()
            taken, self._taken = self._taken, {}
            everybody = [*self._slots.owners, *self._prompts, *self._waiting[0], *self._waiting[1]]
        now = time.monotonic()
        for sequence in everybody:
            run = sequence.run
            if run in left:
                run.usage.finished = now
                self.metrics.finished("abort", run.usage)
                self._forget(sequence)
            elif run in taken:
                self._hand_over(taken.pop(run), self._condition(sequence))
                self._forget(sequence)
            elif now >= run.request.deadline:
                self._say(run, DeadlineExceeded("the request's deadline passed before its last token"))
                self._forget(sequence)
            elif run.unread and now - run.read_at > self.limits.unread_s:
                self._say(run, DeadlineExceeded(f"nobody took the text for {self.limits.unread_s:g} s"))
                self._forget(sequence)
        for future in taken.values():
            self._hand_over(future, InvalidRequest("the run has ended: there is nothing to take out"))

    def _forget(self, sequence: Sequence) -> None:
        if sequence in self._prompts:
            del self._prompts[sequence]
        elif sequence in self._slots.owners:
            row = self._slots.owners.index(sequence)
            moved = self._slots.remove(row)
            if moved is not None:
                self._sampler.move(moved, row)
                self._logits[row] = self._logits[moved]
        else:
            with self._changed:
                self._waiting[sequence.request.lane].remove(sequence)
                self._waiting_tokens -= sequence.left_of_prompt

    def _condition(self, sequence: Sequence) -> Condition:
        in_slot = sequence in self._slots.owners
        row = self._slots.owners.index(sequence) if in_slot else 0
        if in_slot:
            states = self._slots.state(row)
        elif sequence in self._prompts:
            states = self._prompts[sequence].state(0)
        elif sequence.come_from is not None:
            return sequence.come_from
        else:
            states = Slots(self._session.decoder, 1).state(0)
        return Condition(
            request=sequence.request,
            position=sequence.position,
            completion=tuple(sequence.completion),
            states=tuple(states),
            logits=self._logits[row].copy() if in_slot else None,
            sampler=self._sampler.take(row) if in_slot else None,
            text=sequence.text.state(),
        )

    def _admit(self) -> None:
        """Slots to those who wait, interactive first, but for bulk that has waited long enough."""
        now = time.monotonic()
        while len(self._slots) + len(self._prompts) < self.limits.slots:
            with self._changed:
                interactive, bulk = self._waiting
                if not (interactive or bulk):
                    return
                overdue = bool(bulk) and now - bulk[0].run.usage.submitted > self.limits.bulk_delay_s
                sequence = (bulk if overdue or not interactive else interactive).popleft()
                self._waiting_tokens -= sequence.left_of_prompt
            sequence.run.usage.started = now
            self.metrics.queue_s.observe(now - sequence.run.usage.submitted)
            condition = sequence.come_from
            states = None if condition is None else list(condition.states)
            sequence.position = 0 if condition is None else condition.position
            if condition is not None and states is not None and condition.logits is not None:
                self._join(sequence, states, condition.logits)
            else:
                self._prompts[sequence] = Slots(self._session.decoder, 1)
                self._prompts[sequence].add(sequence, states, sequence.position)
            sequence.come_from = None

    def _join(self, sequence: Sequence, states: list[NDArray[Any]], logits: NDArray[np.float32]) -> None:
        """The prompt is done: the run draws its tokens with the others from now on."""
        row = self._slots.add(sequence, states, sequence.position)
        self._logits[row] = logits
        request, condition = sequence.request, sequence.come_from
        if condition is not None and condition.sampler is not None:
            self._sampler.restore(row, condition.sampler)
        else:
            self._sampler.put(row, request.sampling, prompt=request.prompt, top_logprobs=request.top_logprobs)

    def _feed_some(self) -> None:
        """Pieces of prompts, as many tokens of them as may pass before the next step."""
        budget = self._piece()
        while self._prompts and budget > 0:
            sequence = self._next_prompt()
            size = min(sequence.left_of_prompt, budget, _MOST_PIECE if sequence.request.prompt_logprobs is None else _WITH_LOGPROBS)
            self._guarded(self._feed, sequence, size)
            budget -= max(size, _LEAST_PIECE)  # a call has its price, however little it is given

    def _next_prompt(self) -> Sequence:
        """In turn the one that came first and the one that is nearest its end."""
        self._turn += 1
        return min(self._prompts, key=lambda sequence: sequence.order if self._turn % 2 else sequence.left_of_prompt)

    def _feed(self, sequence: Sequence, size: int) -> list[Sequence]:
        """A piece of the prompt; after the last one the run joins the others."""
        request, slots = sequence.request, self._prompts[sequence]
        every = request.prompt_logprobs is not None
        piece = request.prompt[sequence.position : sequence.position + size]
        started = time.perf_counter()
        slots.check(0, sequence, sequence.position)
        lengths: Ids = np.array([size], np.int64)
        wanted: Ids = np.arange(size, dtype=np.int64)[None] if every else lengths[None] - 1
        states, out = slots.views()
        logits = self._session.run(np.array([piece], np.int64), lengths, slots.positions[:1], wanted, states, out)[0]
        slots.stepped(lengths)
        self._token_s = _averaged(self._token_s, (time.perf_counter() - started) / size)
        if not np.isfinite(logits.sum()):
            return [sequence]
        if every:
            self._tell_prompt(sequence, piece, logits)
        sequence.position += size
        self.metrics.prompt_tokens.inc(size)
        if not sequence.left_of_prompt:
            del self._prompts[sequence]
            if request.max_tokens:
                self._join(sequence, slots.state(0), logits[-1])
            else:
                self._say(sequence.run, Delta("", finish_reason="length"))
        return []

    def _piece(self) -> int:
        """Tokens of prompts between two steps: what takes about as long as a step, where somebody waits for the step."""
        if not len(self._slots) or not self._token_s:
            return _MOST_PIECE
        return max(_LEAST_PIECE, min(_MOST_PIECE, int(_PIECE_STEPS * self._step_s / self._token_s)))

    def _tell_prompt(self, sequence: Sequence, piece: tuple[int, ...], logits: NDArray[np.float32]) -> None:
        """The log-probability of each prompt token, under the logits of the one before it."""
        told, n_top = sequence.run.prompt_logprobs, sequence.request.prompt_logprobs or 0
        if sequence.before is None:
            told.append(None)
            rows, tokens = logits[:-1], piece[1:]
        else:
            rows, tokens = np.concatenate([sequence.before[None], logits[:-1]]), piece
        told.extend(logprobs_of(rows, tokens, n_top))
        sequence.before = logits[-1].copy()

    def _step(self) -> list[Sequence]:
        """One token for everybody: draw it, say it, and feed those who go on."""
        drawn = self._draw()
        self._publish()  # before the graph runs, so that the loop sends while it does
        rows = len(self._slots)
        if not rows:
            return []
        started = time.perf_counter()
        tokens: Ids = np.array([[drawn[sequence]] for sequence in self._slots.owners], np.int64)
        ones, zeros = np.ones(rows, np.int64), np.zeros((rows, 1), np.int64)
        for row, sequence in enumerate(self._slots.owners):
            self._slots.check(row, sequence, sequence.position)
        states, out = self._slots.views()
        logits = self._session.run(tokens, ones, self._slots.positions[:rows], zeros, states, out)[:, 0]
        self._slots.stepped(ones)
        self._logits[:rows] = logits
        for sequence in self._slots.owners:
            sequence.position += 1
        self._step_s = _averaged(self._step_s, time.perf_counter() - started)
        finite = np.isfinite(logits.sum(axis=1))
        return [] if finite.all() else [sequence for row, sequence in enumerate(self._slots.owners) if not finite[row]]

    def _draw(self) -> dict[Sequence, int]:
        """The next token of every row, said; those who end with it, or for whom there is none, are gone."""
        owners = list(self._slots.owners)
        masks = self._sampler.masks([sequence.matcher for sequence in owners])
        draws = self._sampler.draw(self._logits[: len(owners)], masks=masks, banned=[sequence.banned for sequence in owners])
        drawn: dict[Sequence, int] = {}
        now = time.monotonic()
        for row, sequence in enumerate(owners):
            if row in draws.failures:
                self._say(sequence.run, draws.failures[row])
                self._forget(sequence)
                continue
            drawn[sequence] = token_id = int(draws.token_ids[row])
            logprob: TokenLogprob | None = draws.logprobs.get(row)
            delta = sequence.accept(token_id, logprob)
            self._count(sequence, now)
            self._say(sequence.run, delta)
            if delta.finish_reason is not None:
                self._run_s = _averaged(self._run_s, now - (sequence.run.usage.started or now))
                self._forget(sequence)
        self.metrics.generation_tokens.inc(len(drawn))
        return drawn

    def _count(self, sequence: Sequence, now: float) -> None:
        usage = sequence.run.usage
        usage.completion_tokens = len(sequence.completion)
        if usage.first_token is None:
            usage.first_token = now
            self.metrics.first_token_s.observe(now - usage.submitted)
        else:
            self.metrics.between_tokens_s.observe(now - sequence.last_token)
        sequence.last_token = now

    def _say(self, run: Run, what: Delta | ServiceError) -> None:
        if isinstance(what, ServiceError) or what.finish_reason is not None:
            run.usage.finished = time.monotonic()
            self.metrics.finished((what.finish_reason if isinstance(what, Delta) else None) or "error", run.usage)
        self._said.append((run, what))

    def _publish(self) -> None:
        if self._said:
            said, self._said = self._said, []
            self._post(_tell, said)

    def _hand_over(self, future: "asyncio.Future[Condition]", what: Condition | ServiceError) -> None:
        self._publish()  # what was said before it was taken out
        self._post(_settle, future, what)

    def _end(self) -> None:
        """Closed: everybody is told."""
        with self._changed:
            left = [*self._waiting[0], *self._waiting[1], *self._prompts, *self._slots.owners]
            taken, self._taken = self._taken, {}
        for sequence in left:
            self._say(sequence.run, _stopping())
        self._publish()
        for future in taken.values():
            self._hand_over(future, _stopping())

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)


def _tell(said: list[tuple[Run, Delta | ServiceError]]) -> None:
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


def _averaged(past: float, now: float) -> float:
    return now if not past else _MEMORY * past + (1 - _MEMORY) * now


def _stopping() -> NotReady:
    return NotReady("the service is shutting down: send the request to another replica")
