"""The engine's loop: one decode step for all running sequences, then one prefill chunk, and again.

Callers live on the event loop; the runtime, the states and the sampler belong to one thread. They meet in `Admission`, and what a step made
goes back to the loop in one call. Runs join and leave at every step.

Speculative decoding would sit in `_step`: the graph gives logits at any positions, and a step's old states stay until the next one.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from service.errors import DeadlineExceeded, InputTooLong, InvalidRequest, NotReady, Overloaded, RuntimeFailed, ServiceError
from service.generation.admission import Admission, Holding, Wanted, stopping
from service.generation.engine_thread import EngineThread
from service.generation.prefill import Prefill, Prompt
from service.generation.request import Delta, GenerationRequest, Grammar, Sampling, Token
from service.generation.run import Run
from service.generation.running import Running
from service.generation.sampling.grammar import Grammars
from service.generation.sampling.masks import Masks, is_there
from service.generation.sampling.prompt_logprobs import PromptLogprobs
from service.generation.sampling.sampler import Edits, check_ids, check_sampling
from service.generation.sequence import Asked, Sequence
from service.generation.session import Logits, StepSession, Tensor, beginning
from service.generation.snapshot import Snapshot, State
from service.generation.text import TextStream, Vocabulary
from service.runtime.lanes import Lane
from service.runtime.moving_average import averaged
from service.runtime.onnx import device_lost
from service.telemetry.logs import traces
from service.telemetry.metrics import GeneratorMetrics
from service.telemetry.usage import Usage

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracer

log = logging.getLogger("attnserve")

_SWEEP_S = 0.02  # between two looks at deadlines
_LOOK = 8  # steps between two checks whether a waiting run gets the slot of another one
_QUANTUM = (4, 128)  # tokens, at least and at most, for which a run keeps its slot while others wait
_QUANTA = 4  # in `max_wait_s`, as far as these allow it
_LONG_PROMPT = 4096  # tokens: after checking so many, other tasks of the event loop run


@dataclass(frozen=True, kw_only=True)
class GeneratorLimits:
    """Bounds of one engine."""

    slots: int = 32
    max_waiting: int = 256  # runs of requests that have not started
    max_waiting_tokens: int = 262_144  # of their prompts
    max_prompt_tokens: int = 131_072
    max_wait_s: float = 1.0  # of a request for its first slot
    max_bulk_wait_s: float = 30.0
    bulk_delay_s: float = 2.0  # a bulk run is passed by interactive ones for so long
    unread_s: float = 60.0  # a run whose text its client does not read for so long is ended
    max_aside: int = 256  # runs that have given back their slot and wait for another
    max_aside_bytes: int = 256 * 2**20  # of their states; at least the bytes of all slots' states


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
        super().__init__("generator", limits.slots, metrics)
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
        state_bytes = session.decoder.state_bytes
        aside_bytes = max(limits.max_aside_bytes, limits.slots * state_bytes)
        self._max_aside = min(limits.max_aside, aside_bytes // (state_bytes + 4 * session.vocab_size))
        # The thread's own.
        self._running = Running(session, limits.slots)
        self._prefill = Prefill(session)
        self._masks = Masks(session.vocab_size)
        self._late: list[Sequence] = []  # runs with a slot that skip steps until their masks are ready
        self._step_s = 0.0
        self._swept = 0.0
        self._steps = 0
        self._drew = 0.0
        self._back: list[Sequence] = []  # runs that have drawn no token since they got a slot back
        self._said: list[tuple[Run, Token | Delta | ServiceError]] = []
        metrics.running.set_function(lambda: self._n_holders)
        metrics.waiting.set_function(lambda: len(self._admission))

    @property
    def pending(self) -> int:
        """Runs that have a slot or wait for one."""
        return self._n_holders + len(self._admission)

    @property
    def _n_holders(self) -> int:
        return len(self._running) + len(self._late) + len(self._prefill)

    @property
    def _holders(self) -> list[Sequence]:
        """Runs that have a slot."""
        return [*self._running.sequences, *self._late, *self._prefill.sequences]

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    async def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar, which may take seconds, so that `submit` finds it compiled. Raises InvalidRequest, Overloaded."""
        await asyncio.to_thread(self._grammars.matcher, grammar)

    def submit(self, request: GenerationRequest) -> Run:
        """Queue a run. Raises InvalidRequest (also InputTooLong), Overloaded, DeadlineExceeded or NotReady, with nothing queued."""
        sequence = self._sequence(request, _asked(request), _Once())
        self._queue(sequence.asked)
        return sequence.run

    def check(self, client: str, lane: Lane) -> None:
        """Raise QueueTooLong if a request of this client would wait too long for its first slot."""
        holders = self._holders
        by_client = Counter(holder.request.client for holder in holders)
        self._admission.check(client, lane, time.monotonic(), Holding(self.limits.slots, by_client, self._turn_s(holders)))

    def _turn_s(self, holders: list[Sequence]) -> float:
        """How long a run keeps its slot while others wait: a quantum, or until it ends. Unfinished runs count with their age."""
        if self._admission.aside < self._max_aside:
            return min(self._run_s, self._quantum * self._step_s) if self._step_s else self._run_s
        now = time.monotonic()
        ages = [now - (holder.run.usage.started or now) for holder in holders]
        return max(self._run_s, sum(ages) / max(len(ages), 1))

    async def open(self, requests: Iterable[GenerationRequest], key: str = "") -> list[Run]:
        """Queue all runs of one request or none, their grammars compiled before. `key` says whose they are; here is one engine for all.

        Raises what `submit` and `check` do.
        """
        requests = list(requests)
        with self.offered.refusing(len(requests)):
            for client, lane in {(request.client, request.lane) for request in requests}:
                self.check(client, lane)
        for grammar in {request.grammar for request in requests if request.grammar is not None}:
            await self.prepare(grammar)
        asked, once, tokens = _asked(requests[0]), _Once(), 0
        for request in requests:
            tokens += 0 if id(request.prompt) in once.checked else len(request.prompt)
            if tokens > _LONG_PROMPT:
                tokens = await asyncio.sleep(0, 0)
            self._sequence(request, asked, once)
        self._queue(asked)
        return [sequence.run for sequence in asked.fresh]

    def resume(self, snapshot: Snapshot) -> Run:
        """Continue a run from its snapshot, made here or elsewhere, without sending its tokens again. Raises what `submit` does."""
        sequence = self._sequence(snapshot.request, _asked(snapshot.request), _Once(), snapshot)
        self._queue(sequence.asked)
        return sequence.run

    async def probe(self, deadline: float) -> None:
        """Draw one token. Raises what keeps it from coming, as a ServiceError."""
        async for _ in self.submit(GenerationRequest(prompt=(0,), sampling=Sampling(seed=0), max_tokens=1, deadline=deadline)):
            pass

    async def snapshot(self, run: Run) -> Snapshot:
        """A copy of a run between two steps; the run continues. Raises what `take` does."""
        return await self._want(run, ends=False)

    async def take(self, run: Run) -> Snapshot:
        """End a run between two steps, after the deltas until then, and return its snapshot.

        Raises InvalidRequest if the run has ended or another snapshot of it is being made, NotReady if the engine stops.
        """
        snapshot = self._want(run, ends=True)
        try:
            return await snapshot
        finally:
            run.cancel()  # its reader sees the end, and no run continues for a caller that has left

    def _want(self, run: Run, *, ends: bool) -> "asyncio.Future[Snapshot]":
        assert self._loop is not None
        wanted = Wanted(self._loop.create_future(), ends)
        self._admission.want(run, wanted)
        return wanted.future

    def _check(self, request: GenerationRequest, checked: set[int]) -> None:
        if self._loop is None:
            raise NotReady("the model is still being started")
        size, limit = len(request.prompt), self.limits.max_prompt_tokens
        if not size:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if size > limit:
            raise InputTooLong(f"the prompt has {size} tokens and the most is {limit}: shorten it", param="prompt")
        n_positions = self._session.decoder.n_positions
        if n_positions is not None and size > n_positions:
            raise InputTooLong(f"the prompt has {size} tokens, and this model positions for {n_positions}: shorten it", param="prompt")
        vocab_size = self._session.vocab_size
        for name, ids in (("prompt", request.prompt), ("stop_token_ids", request.stop_token_ids)):
            if id(ids) not in checked:
                check_ids(ids, vocab_size, name)
                checked.add(id(ids))
        for name in ("max_tokens", "min_tokens"):
            if (value := getattr(request, name)) < 0:
                raise InvalidRequest(f"{name} is {value} and must be 0 or more", param=name)
        for name in ("top_logprobs", "prompt_logprobs"):
            if (wanted := getattr(request, name)) is not None and not 0 <= wanted <= vocab_size:
                raise InvalidRequest(f"{name} is {wanted} and must be from 0 to {vocab_size}, the size of the vocabulary", param=name)
        if not all(request.stop):
            raise InvalidRequest("a stop string is empty, and every text ends with it: leave it out", param="stop")
        check_sampling(request.sampling, vocab_size, checked)
        if request.deadline <= time.monotonic():
            raise DeadlineExceeded("the request's deadline passed before it was queued")

    def _sequence(self, request: GenerationRequest, asked: Asked, once: "_Once", snapshot: Snapshot | None = None) -> Sequence:
        """Create one more run of a request, at its beginning or from a snapshot, after checking that this model can run it."""
        self._check(request, once.checked)
        completion: tuple[int, ...] = ()
        if snapshot is not None:
            snapshot.check(self._session.decoder, self._session.vocab_size, self._session.fingerprint)
            completion = snapshot.completion
        self._arrivals += 1
        text = TextStream(
            self._vocabulary, stop=request.stop, include_stop=request.include_stop, skip_special_tokens=request.skip_special_tokens
        )
        usage = Usage(len(request.prompt), submitted=asked.submitted)
        sequence = Sequence(
            run=Run(request, usage, self._admission.leave, None if request.stop else text),
            stops=text if request.stop else None,
            matcher=self._grammars.matcher(request.grammar) if request.grammar is not None else None,
            ends=frozenset((*(() if request.ignore_eos else self._eos), *request.stop_token_ids)),
            order=self._arrivals,
            asked=asked,
            n_positions=self._session.decoder.n_positions,
            edits=Edits.of(request.sampling, self._session.vocab_size, request.prompt, completion, once.made),
        )
        if snapshot is not None:
            sequence.restore(snapshot)
        asked.fresh.append(sequence)
        return sequence

    def _queue(self, asked: Asked) -> None:
        retry_after_s = self._run_s / self.limits.slots + self._prefill.price.of(asked.tokens)
        with self.offered.refusing(len(asked.fresh)):
            lost = self._admission.queue(asked, retry_after_s=retry_after_s)
        for gone in lost:
            self._refused_here(len(gone.fresh))
            told = Overloaded("Model is overloaded: a client with fewer requests took the place of this one", retry_after_s=retry_after_s)
            for sequence in gone.fresh:
                sequence.run.usage.finished = time.monotonic()
                self.metrics.finished("error", sequence.run.usage)
                sequence.run.fail(told)

    def _refused_here(self, runs: int) -> None:
        if self.offered.counts_refusals:
            self.offered.refuse(runs)

    def _close(self) -> None:
        self._admission.close()

    # On the thread ---------------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._admission.wait(busy=self._n_holders > 0):
                self._steps += 1
                self._heed()
                self._admit()
                self._refuse()
                self.offered.hold(time.monotonic(), self._n_holders)
                self._feed_some()
                if self._gather():
                    self._guarded(self._step, self._running.sequences)
                self.offered.hold(time.monotonic(), self._n_holders)
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
        except BaseException as error:  # not even SystemExit may end this thread: all callers would wait forever
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
        """Handle cancellations and requests for snapshots; every 20 ms also expire deadlines and unread runs."""
        now = time.monotonic()
        left, wanted = self._admission.wishes()
        if not (left or wanted or now - self._swept > _SWEEP_S):
            return
        for sequence in [*self._holders, *self._admission.waiting()]:
            run = sequence.run
            if run in left:
                run.usage.finished = now
                self.metrics.finished("abort", run.usage)
                self._trace(run, "abort")
                self._forget(sequence)
            elif run in wanted:
                self._hand_over(wanted[run].future, self._snapshot(sequence))
                if wanted.pop(run).ends:
                    self._trace(run, "taken")
                    self._forget(sequence)
            elif now >= run.request.deadline:
                self._say(run, DeadlineExceeded("the request's deadline passed before its last token"))
                self._forget(sequence)
            elif (since := run.unread_since) is not None and now - since > self.limits.unread_s:
                self._say(run, DeadlineExceeded(f"the text was not read for {self.limits.unread_s:g} s"))
                self._forget(sequence)
        for each in wanted.values():
            self._hand_over(each.future, InvalidRequest("the run has ended: there is no snapshot to make"))

    def _refuse(self) -> None:
        """End requests that have waited too long for their first slot, after slots were given out."""
        now = time.monotonic()
        if now - self._swept > _SWEEP_S:
            self._swept = now
            for asked, refusal in self._admission.overdue(now):
                self._refused_here(len(asked.fresh))
                for sequence in asked.fresh:
                    self._say(sequence.run, refusal)

    def _forget(self, sequence: Sequence) -> None:
        self._admission.remove(sequence)
        if sequence in self._running.sequences:
            self._running.remove(sequence)
        elif sequence in self._late:
            self._late.remove(sequence)
        elif sequence in self._prefill:
            self._prefill.remove(sequence)
        if sequence in self._back:
            self._back.remove(sequence)

    def _snapshot(self, sequence: Sequence) -> Snapshot:
        before = sequence.before
        if sequence in self._running.sequences:
            state = self._state(sequence, *self._running.copy(sequence))
        elif sequence in self._prefill:
            tensors, before = self._prefill.copy(sequence)
            state = self._state(sequence, tensors)
        else:
            state = sequence.state or self._state(sequence, beginning(self._session.decoder))
        return Snapshot(
            request=sequence.request,
            state=state,
            completion=tuple(sequence.completion),
            start=sequence.start,
            fed=sequence.fed,
            prompt_logprobs=PromptLogprobs(sequence.run.prompt_logprobs),
            before=before,
        )

    def _state(self, sequence: Sequence, tensors: Several[Tensor], logits: Logits | None = None) -> State:
        return State(tensors=tuple(tensors), position=sequence.position, logits=logits, fingerprint=self._session.fingerprint)

    @property
    def _quantum(self) -> int:
        """Tokens for which a run keeps its slot while others wait."""
        least, most = _QUANTUM
        return most if not self._step_s else max(least, min(most, int(self.limits.max_wait_s / _QUANTA / self._step_s)))

    def _admit(self) -> None:
        """Give slots to the runs that are next. If all are taken, look at waiting runs only after an arrival, and every few steps."""
        if not len(self._admission):
            return
        holders = self._holders
        if len(holders) >= self.limits.slots and not self._admission.arrived and self._steps % _LOOK:
            return
        now = time.monotonic()
        while True:
            free, room = len(holders) < self.limits.slots, self._admission.aside < self._max_aside
            turn = self._admission.turn(now, holders, free=free, quantum=self._quantum, room=room)
            if turn is None:
                return
            if turn.instead_of is not None:
                self._guarded(partial(self._set_aside, turn.instead_of, now), [turn.instead_of])
                holders.remove(turn.instead_of)
            self._guarded(partial(self._place, turn.run), [turn.run])
            holders.append(turn.run)
            if (usage := turn.run.run.usage).started is None:
                usage.started = now
                self.offered.begin()
                self.metrics.queue_s.observe(now - usage.submitted)

    def _set_aside(self, sequence: Sequence, now: float) -> None:
        """Take its slot for another run. Its state is kept, and it continues from there later."""
        if sequence in self._running.sequences:
            self._hold(sequence)
            self._admission.set_aside(sequence, now)
        elif sequence in self._late:
            self._late.remove(sequence)
            self._admission.set_aside(sequence, now)
        else:
            self._admission.set_aside(sequence, now)
            self._prefill.set_aside(sequence)

    def _hold(self, sequence: Sequence) -> None:
        """Remove it from the rows that draw, and keep its state."""
        sequence.state = self._state(sequence, *self._running.copy(sequence))
        self._running.remove(sequence)
        if sequence in self._back:  # it has drawn nothing since
            self._back.remove(sequence)
        elif sequence.run.usage.first_token is not None:
            sequence.drew = self._drew

    def _go_on(self, sequence: Sequence) -> None:
        """Give a row to a run whose prompt is done, from the state that was kept."""
        state, sequence.state = sequence.state, None
        assert state is not None
        assert state.logits is not None
        self._running.join(sequence, state.tensors, state.logits)
        if sequence.drew:
            self._back.append(sequence)

    def _gather(self) -> bool:
        """Whether a step can run: runs whose masks are ready take part, and the others wait unchanged for a later step."""
        for sequence in [each for each in self._late if is_there(each)]:
            self._late.remove(sequence)
            self._guarded(partial(self._go_on, sequence), [sequence])
        late = self._masks.late(self._running.sequences)
        if len(late) == len(self._running):  # no run could take part in it now
            if not len(self._running) and self._late and not len(self._prefill):
                self._masks.wait_for_one(self._late)
            return False
        for sequence in late:
            self._guarded(partial(self._sit_out, sequence), [sequence])
        return len(self._running) > 0

    def _sit_out(self, sequence: Sequence) -> None:
        self._hold(sequence)
        self._late.append(sequence)

    def _place(self, sequence: Sequence) -> None:
        """Move the run's states to where the graph runs."""
        if sequence.mask is None:
            self._masks.begin(sequence)
        if not sequence.left_of_prompt:
            self._go_on(sequence)
        elif sequence in self._prefill:
            self._prefill.back(sequence)
        else:
            self._prefill.add(sequence)
        sequence.placed_at = sequence.position

    def _feed_some(self) -> None:
        """Pieces of prompts, as many tokens of them as may pass before the next step."""
        budget = self._prefill.budget(self._step_s if len(self._running) else None)
        while budget > 0 and len(self._prefill):
            prompts, size = self._prefill.next(budget)
            self._guarded(partial(self._feed, prompts, size), [sequence for prompt in prompts for sequence in prompt.sequences])
            budget -= self._prefill.cost(prompts, size)

    def _feed(self, prompts: list[Prompt], size: int) -> None:
        """Feed a piece of each prompt. When a prompt is done its runs start to draw, or wait if they have no slot now."""
        before = sum(prompt.left for prompt in prompts)
        for fed in self._prefill.feed(prompts, size):
            copied = fed.states.slots.state(fed.states.at) if any(each.aside for each in fed.sequences) else []
            for sequence in fed.sequences:
                if not sequence.request.max_tokens:
                    self._admission.remove(sequence)
                    self._say(sequence.run, Delta("", finish_reason="length"))
                elif sequence.aside:
                    sequence.state = self._state(sequence, copied, fed.logits)
                else:
                    self._running.join(sequence, fed.states, fed.logits)
                    sequence.placed_at = sequence.position
        self.metrics.prompt_tokens.inc(before - sum(prompt.left for prompt in prompts))
        self._last_call_failed = False

    def _step(self) -> None:
        """One token for every running sequence: draw it, publish it, and feed those that continue."""
        self._draw()
        self._publish()  # before the graph runs, so that the loop sends while it does
        if len(self._running):
            started = time.perf_counter()
            self._running.step()
            self._step_s = averaged(self._step_s, time.perf_counter() - started)
        self._last_call_failed = False

    def _draw(self) -> None:
        """Draw and publish the next token of every row. Sequences that end with it, or have none, are removed."""
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
            else:
                self._masks.begin(sequence)
        for sequence in self._back:  # which drew before they gave their slots back
            self.metrics.between_tokens_s.observe(now - sequence.drew, 1)
            n_first += 1
        self._back.clear()
        n_drawn = len(sequences) - len(drawn.failures)
        self.metrics.between_tokens_s.observe(now - self._drew, n_drawn - n_first)  # the others drew at the last step too
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

    def _hand_over(self, future: "asyncio.Future[Snapshot]", what: Snapshot | ServiceError) -> None:
        self._publish()  # what was said before it was taken out
        self._post(_settle, future, what)

    def _end(self) -> None:
        """Fail all runs, since the engine stops."""
        _, wanted = self._admission.wishes()
        for sequence in [*self._admission.waiting(), *self._holders]:
            self._say(sequence.run, stopping())
        self._masks.close()
        self._publish()
        for each in wanted.values():
            self._hand_over(each.future, stopping())


@dataclass
class _Once:
    """Work that is shared by all runs of a request, by object identity: checked ids and arrays made from them."""

    checked: set[int] = field(default_factory=set)
    made: dict[int, NDArray[Any]] = field(default_factory=dict)


def _asked(request: GenerationRequest) -> Asked:
    now = time.monotonic()
    return Asked(request.client, request.lane, submitted=now, since=now)


def _tell(said: list[tuple[Run, Token | Delta | ServiceError]]) -> None:
    for run, what in said:
        if isinstance(what, ServiceError):
            run.fail(what)
        else:
            run.give(what)


def _settle(future: "asyncio.Future[Snapshot]", what: Snapshot | ServiceError) -> None:
    if not future.done():
        if isinstance(what, ServiceError):
            future.set_exception(what)
        else:
            future.set_result(what)
