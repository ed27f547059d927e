"""A decoder's engine. It alternates between a decode step for all running sequences and a chunk of prefill.

`step_engine.py` has all that does not depend on how tokens are computed. Here are prompts, states, sampling and snapshots.

Speculative decoding would belong in `_step`: the graph gives logits at any positions, and a step's old states stay until the next one.
"""

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from service.errors import InputTooLong, InvalidRequest, NotReady, ServiceError
from service.generation.admission import Admission, QueueLimits, Wanted, stopping
from service.generation.prefill import Prefill, Prompt
from service.generation.request import Delta, FinishReason, GenerationRequest
from service.generation.run import Run
from service.generation.running import Running
from service.generation.sampling.grammar import Grammars
from service.generation.sampling.masks import Masks, is_there
from service.generation.sampling.prompt_logprobs import PromptLogprobs
from service.generation.sampling.sampler import Edits, check_ids, check_sampling
from service.generation.saved.keeper import StateKeeper
from service.generation.saved.prefix_cache import PrefixCache, Prefixes
from service.generation.sequence import Sequence
from service.generation.session import Logits, StepSession, Tensor, beginning
from service.generation.snapshot import Snapshot, State
from service.generation.step_engine import Once, StepEngine, new_submission
from service.generation.submission import Submission
from service.generation.text import TextStream, Vocabulary
from service.runtime.moving_average import averaged
from service.telemetry.metrics import GeneratorMetrics
from service.telemetry.usage import Usage

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracer

_QUANTUM = (4, 128)  # least and most tokens for which a run keeps its slot while others wait
_QUANTA = 4  # number of quanta in `max_wait_s`, within these limits


@dataclass(frozen=True, kw_only=True)
class GeneratorLimits(QueueLimits):
    """Limits of one decoder's engine."""

    max_waiting_tokens: float = 262_144
    max_prompt_tokens: int = 131_072
    prefix_cache_bytes: int = 0
    unread_s: float = 60.0
    max_aside: int = 256  # most runs that were preempted and wait for a slot
    max_aside_bytes: int = 256 * 2**20  # most bytes for the states of these runs; at least the size of all slots' states


class GeneratorEngine(StepEngine[Sequence]):
    """Continues token sequences."""

    limits: GeneratorLimits

    def __init__(
        self,
        session: StepSession[Any],
        vocabulary: Vocabulary,
        *,
        eos_token_ids: tuple[int, ...],
        grammars: Grammars,
        keeper: StateKeeper | None = None,
        limits: GeneratorLimits,
        numerics: str,
        metrics: GeneratorMetrics,
        tracer: "Tracer | None" = None,
    ) -> None:
        """`keeper` loads and stores states. None: requests cannot name any. `numerics`: see `states/numerics.py`."""
        super().__init__("generator", limits, Admission(limits), provider=session.provider, run_s=1.0, metrics=metrics, tracer=tracer)
        self.numerics = numerics
        self._session = session
        self._vocabulary = vocabulary
        self._eos = eos_token_ids
        self._grammars = grammars
        self._keeper = keeper
        self._arrivals = 0
        state_bytes = session.decoder.state_bytes
        aside_bytes = max(limits.max_aside_bytes, limits.slots * state_bytes)
        self._max_aside = min(limits.max_aside, aside_bytes // (state_bytes + 4 * session.vocab_size))
        # Used by the engine's thread only.
        self._running = Running(session, limits.slots)
        self._prefill = Prefill(session)
        self._masks = Masks(session.vocab_size)
        self._prefixes = Prefixes(PrefixCache(limits.prefix_cache_bytes), session.fingerprint, metrics)
        self._late: list[Sequence] = []  # runs with a slot that skip steps until their masks are ready
        self._step_s = 0.0
        self._drew = 0.0
        self._back: list[Sequence] = []  # runs that have drawn no token since they got a slot back

    @property
    def _held(self) -> int:
        return len(self._running) + len(self._late) + len(self._prefill)

    @property
    def _holders(self) -> list[Sequence]:
        """Runs that have a slot."""
        return [*self._running.sequences, *self._late, *self._prefill.sequences]

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    async def _prepare(self, requests: list[GenerationRequest], once: Once) -> None:
        """Compile the grammars, which may take seconds, so that `_job` finds them compiled, and load the states to continue.

        Raises InvalidRequest, Overloaded, StateNotFound, StateGone or StoreFailed.
        """
        for grammar in {request.grammar for request in requests if request.grammar is not None}:
            await asyncio.to_thread(self._grammars.matcher, grammar)
        for start in {request.start for request in requests if request.start is not None}:
            once.states[start] = await self._states.load(start)
        if self._keeper is not None:
            for request in requests:
                begin = 0 if request.start is None else once.states[request.start].position
                if request.known and request.checkpoint and (snapshot := await self._keeper.checkpoint_of(request, begin)) is not None:
                    once.checkpoints[request.checkpoint] = snapshot

    @property
    def _states(self) -> StateKeeper:
        if self._keeper is None:
            raise InvalidRequest("this engine has no store of states: leave out `state` and `store_state`", param="state")
        return self._keeper

    def _turn_s(self, holders: list[Sequence]) -> float:
        """Estimate how long a run keeps its slot while others wait: one quantum, or until it ends if no run can be set aside."""
        if self._admission.aside < self._max_aside:
            return min(self._run_s, self._quantum * self._step_s) if self._step_s else self._run_s
        return super()._turn_s(holders)

    def _retry_after_s(self, submission: Submission[Sequence]) -> float:
        return self._run_s / self.limits.slots + self._prefill.price.of(submission.tokens)

    async def resume(self, snapshot: Snapshot) -> Run:
        """Continue a run from a snapshot made by any engine, without sending its tokens again. Raises what `open` raises."""
        once = Once()
        await self._prepare([snapshot.request], once)
        return self._submitted(self._job(snapshot.request, new_submission(snapshot.request), once, snapshot))

    async def snapshot(self, run: Run) -> Snapshot:
        """Return a snapshot of a run between two steps. The run continues. Raises what `take` raises."""
        return await self._want(run, ends=False)

    async def take(self, run: Run) -> Snapshot:
        """End a run between two steps and return its snapshot. Earlier tokens are delivered first.

        Raises InvalidRequest if the run has ended or another snapshot of it is being made, and NotReady if the engine stops.
        """
        snapshot = self._want(run, ends=True)
        try:
            return await snapshot
        finally:
            run.cancel()  # ends the run for its reader; if this caller was cancelled, it also ends the run in the engine

    def _want(self, run: Run, *, ends: bool) -> "asyncio.Future[Snapshot]":
        assert self._loop is not None
        wanted = Wanted(self._loop.create_future(), ends)
        self._admission.want(run, wanted)
        return wanted.future

    def _check_request(self, request: GenerationRequest, checked: set[int]) -> None:
        size, limit = len(request.prompt), self.limits.max_prompt_tokens
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

    def _job(self, request: GenerationRequest, submission: Submission[Sequence], once: Once, snapshot: Snapshot | None = None) -> Sequence:
        """Create one more run, at its beginning or from a snapshot, after checking that this model can run it."""
        self._check_queueable(request)
        self._check_request(request, once.checked)
        completion, state = request.known, None if request.start is None else once.states[request.start]
        self._check_start(request, state)
        snapshot = snapshot or once.checkpoints.get(request.checkpoint)
        if snapshot is not None:
            snapshot.check(self._session.decoder, self._session.vocab_size, self._session.fingerprint)
            completion = snapshot.completion
        self._arrivals += 1
        text = TextStream(
            self._vocabulary, stop=request.stop, include_stop=request.include_stop, skip_special_tokens=request.skip_special_tokens
        )
        usage = Usage(len(request.prompt), submitted=submission.submitted)
        sequence = Sequence(
            run=Run(request, usage, self._admission.cancel, None if request.stop else text),
            stops=text if request.stop else None,
            matcher=self._grammars.matcher(request.grammar) if request.grammar is not None else None,
            ends=frozenset((*(() if request.ignore_eos else self._eos), *request.stop_token_ids)),
            order=self._arrivals,
            submission=submission,
            n_positions=self._session.decoder.n_positions,
            edits=Edits.of(
                request.sampling, self._session.vocab_size, request.prompt, completion, once.made, None if state is None else state.seen
            ),
        )
        if state is not None:
            sequence.begin_at(state)
        if snapshot is not None:
            sequence.restore(snapshot)
        elif completion:
            sequence.replay(completion)
        return sequence

    def _check_start(self, request: GenerationRequest, state: State | None) -> None:
        """Raise InvalidRequest unless the request can begin at this state."""
        if request.keep is not None:
            _ = self._states
        check_ids(request.known, self._session.vocab_size, "known")
        if request.known and request.numerics not in ("", self.numerics):
            raise NotReady("the run was begun by another arithmetic than this generator's: another one must go on with it")
        if state is None:
            return
        size, n_positions = len(request.prompt) + state.position, self._session.decoder.n_positions
        if n_positions is not None and size > n_positions:
            raise InputTooLong(
                f"the state has seen {state.position} tokens and the prompt has {len(request.prompt)} more, and this model positions for "
                f"{n_positions}: shorten the prompt",
                param="prompt",
            )
        if not request.prompt and not request.max_tokens:
            raise InvalidRequest("the prompt has no tokens and max_tokens is 0: fork the state to get a copy of it", param="prompt")
        if not request.prompt and state.logits is None:
            raise InvalidRequest("the prompt has no tokens, and the state has no logits to draw from: send a token", param="prompt")

    # On the thread ---------------------------------------------------------------------------------------------------------------------

    @property
    def _quantum(self) -> int:
        least, most = _QUANTUM
        return most if not self._step_s else max(least, min(most, int(self.limits.max_wait_s / _QUANTA / self._step_s)))

    @property
    def _room(self) -> bool:
        return self._admission.aside < self._max_aside

    def _compute(self) -> None:
        self._feed_some()
        if self._gather():
            self._guarded(self._step, self._running.sequences)

    def _sweep(self) -> None:
        super()._sweep()
        wanted = self._admission.wanted()
        for sequence in [*self._holders, *self._admission.waiting()] if wanted else ():
            if (each := wanted.pop(sequence.run, None)) is not None:
                self._hand_over(each, self._snapshot(sequence))
                if each.ends:
                    self._trace(sequence.run, "taken")
                    self._remove(sequence)
        for each in wanted.values():
            self._hand_over(each, InvalidRequest("the run has ended: there is no snapshot to make"))

    def _forget(self, sequence: Sequence) -> None:
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
            prompt_logprobs=PromptLogprobs(sequence.run.prompt_logprobs),
            before=before,
        )

    def _state(self, sequence: Sequence, tensors: Several[Tensor], logits: Logits | None = None) -> State:
        return State(tensors=tuple(tensors), position=sequence.position, logits=logits, fingerprint=self._session.fingerprint)

    def _set_aside(self, sequence: Sequence, now: float) -> None:
        """Free the slot of a run for another run. The state is kept, so that the run can continue from it later."""
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
        """Remove a run from the decode batch and keep its state."""
        sequence.state = self._state(sequence, *self._running.copy(sequence))
        self._running.remove(sequence)
        if sequence in self._back:  # true if it has drawn no token since it got its slot back
            self._back.remove(sequence)
        elif sequence.run.usage.first_token is not None:
            sequence.drew = self._drew

    def _go_on(self, sequence: Sequence) -> None:
        """Add a run whose prompt is done to the decode batch, with the state that was kept."""
        state, sequence.state = sequence.state, None
        assert state is not None
        assert state.logits is not None
        self._running.join(sequence, state.tensors, state.logits)
        if sequence.drew:
            self._back.append(sequence)

    def _gather(self) -> bool:
        """Return whether a decode step can run. Runs whose masks are ready take part; the others wait unchanged for a later step."""
        for sequence in [each for each in self._late if is_there(each)]:
            self._late.remove(sequence)
            self._guarded(partial(self._go_on, sequence), [sequence])
        late = self._masks.late(self._running.sequences)
        if len(late) == len(self._running):  # no run can take part in a step now
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
        """Give a run its slot: in the decode batch if its prompt is done, else in the prefill."""
        if sequence.mask is None:
            self._masks.begin(sequence)
        if not sequence.fed and sequence not in self._prefill:
            self._prefixes.begin(sequence)
        if not sequence.left_of_prompt:
            self._go_on(sequence)
        elif sequence in self._prefill:
            self._prefill.back(sequence)
        else:
            self._prefill.add(sequence)
        sequence.placed_at = sequence.position

    def _feed_some(self) -> None:
        """Feed pieces of prompts until the token budget before the next decode step is used up."""
        budget = self._prefill.budget(self._step_s if len(self._running) else None)
        while budget > 0 and len(self._prefill):
            prompts, size = self._prefill.next(budget)
            self._guarded(partial(self._feed, prompts, size), [sequence for prompt in prompts for sequence in prompt.sequences])
            budget -= self._prefill.cost(prompts, size)

    def _feed(self, prompts: list[Prompt], size: int) -> None:
        """Feed a piece of each prompt. When a prompt is done, its runs join the decode batch, or wait if they have no slot now."""
        before = sum(prompt.left for prompt in prompts)
        for fed in self._prefill.feed(prompts, size):
            copied = fed.states.slots.state(fed.states.at) if any(each.aside for each in fed.sequences) else []
            self._prefixes.keep(fed.sequences[0], fed.sequences[0].tokens, fed.copy)
            for sequence in fed.sequences:
                if sequence.is_checkpoint_due:
                    self._checkpoint(sequence, fed.copy)
                if sequence.over is not None:
                    self._admission.remove(sequence)
                    state = None if sequence.request.keep is None else fed.states.slots.state(fed.states.at)
                    self._complete(sequence, sequence.over, state, fed.logits)
                elif sequence.aside:
                    sequence.state = self._state(sequence, copied, fed.logits)
                else:
                    self._running.join(sequence, fed.states, fed.logits)
                    sequence.placed_at = sequence.position
        self.metrics.prompt_tokens.inc(before - sum(prompt.left for prompt in prompts))
        self._last_call_failed = False

    def _step(self) -> None:
        """Draw one token for every running sequence, publish it, and feed it to the sequences that continue."""
        ending = self._draw()
        self._publish()  # before the graph runs, so that the event loop sends tokens meanwhile
        if len(self._running):
            started = time.perf_counter()
            self._running.step()
            self._step_s = averaged(self._step_s, time.perf_counter() - started)
            for sequence, last in ending:
                state = self._running.copy(sequence)
                self._running.remove(sequence)
                self._complete(sequence, last, *state)
        self._last_call_failed = False

    def _complete(
        self, sequence: Sequence, last: Delta, tensors: Several[Tensor] | None = None, logits: NDArray[np.float32] | None = None
    ) -> None:
        """End a run: emit its last delta. If its state is kept, do so after the state is stored."""
        run, keep = sequence.run, sequence.request.keep
        if keep is None:
            self._emit(run, last)
            return
        assert tensors is not None
        assert last.finish_reason is not None
        self._finished(run, last.finish_reason)

        def stored(failure: ServiceError | None) -> None:
            self._post(run.give if failure is None else run.fail, last if failure is None else failure)

        fed = sequence.request.prompt + tuple(sequence.completion)
        self._states.keep(keep, self._state(sequence, tensors, logits), sequence.origin, fed, stored)

    def _draw(self) -> list[tuple[Sequence, Delta]]:
        """Draw and emit the next token of every row. Remove sequences that end with it or for which no token is possible.

        Return the sequences that end but get one more step, because the state after their last token is kept, with their last deltas.
        """
        sequences, now, n_first = list(self._running.sequences), time.monotonic(), 0
        ending: list[tuple[Sequence, Delta]] = []
        drawn = self._running.draw()
        for row, (sequence, token_id) in enumerate(zip(sequences, drawn.token_ids.tolist(), strict=True)):
            if row in drawn.failures:
                self._emit(sequence.run, drawn.failures[row])
                self._running.remove(sequence)
                continue
            made, usage = sequence.accept(token_id, drawn.logprobs.get(row)), sequence.run.usage
            usage.completion_tokens += 1
            if usage.first_token is None:
                usage.first_token = now
                self.metrics.first_token_s.observe(now - usage.submitted)
                n_first += 1
            if made.finish_reason is None:
                self._emit(sequence.run, made)
                self._masks.begin(sequence)
                if sequence.is_checkpoint_due:
                    self._checkpoint(sequence, partial(self._running.copy, sequence))
                continue
            self._ended(sequence, now)
            fed_tokens = sequence.request.prompt + tuple(sequence.completion[:-1])
            self._prefixes.keep(sequence, fed_tokens, partial(self._running.copy, sequence))
            if sequence.request.keep is None:
                self._emit(sequence.run, made)
                self._running.remove(sequence)
            else:
                self._emit(sequence.run, made._replace(finish_reason=None))
                ending.append((sequence, made.last()))
        for sequence in self._back:  # their last token was drawn before they were preempted
            self.metrics.between_tokens_s.observe(now - sequence.drew, 1)
            n_first += 1
        self._back.clear()
        n_drawn = len(sequences) - len(drawn.failures)
        # The other rows drew their last token at the last step.
        self.metrics.between_tokens_s.observe(now - self._drew, n_drawn - n_first)
        self.metrics.generation_tokens.inc(n_drawn)
        self._drew = now
        return ending

    def _checkpoint(self, sequence: Sequence, copy: Callable[[], tuple[list[Tensor], Logits]]) -> None:
        """Write a checkpoint of the run if the store keeps up with them. `copy` returns its state tensors and logits."""
        if self._keeper is not None and self._keeper.has_room:
            fed = (sequence.request.prompt + tuple(sequence.completion))[: sequence.position - sequence.start]
            self._keeper.checkpoint(sequence.request, self._state(sequence, *copy()), sequence.origin, fed)
            sequence.saved_at = sequence.position

    def _finished(self, run: Run, reason: FinishReason | Literal["abort", "error"]) -> None:
        super()._finished(run, reason)
        if self._keeper is not None and reason != "abort":  # a run whose caller is gone may go on elsewhere
            self._keeper.forget(run.request)

    def _hand_over(self, wanted: Wanted, what: Snapshot | ServiceError) -> None:
        self._publish()  # deliver the tokens that the snapshot contains first
        self._post(_settle, wanted.future, what)

    def _end(self) -> None:
        self._masks.close()
        super()._end()
        for each in self._admission.wanted().values():
            self._hand_over(each, stopping())


def _settle(future: "asyncio.Future[Snapshot]", what: Snapshot | ServiceError) -> None:
    if not future.done():
        if isinstance(what, ServiceError):
            future.set_exception(what)
        else:
            future.set_result(what)
