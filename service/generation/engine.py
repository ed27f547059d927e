"""A decoder's engine. It alternates between a decode step for all running sequences and a chunk of prefill.

`step_engine.py` contains the parts of an engine that do not depend on how tokens are computed, `intake.py` makes a run from a request,
`places.py` moves runs between prefill and decode batch, and `saved/run_states.py` loads and stores states. This file contains the
computation of one turn of the engine's thread.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from export import contract
from service.errors import DeadlineExceeded, ServiceError
from service.generation.admission import Admission, QueueLimits
from service.generation.gpu.session import open_steps
from service.generation.intake import Intake, PromptWork
from service.generation.model import DecoderModel
from service.generation.places import Places
from service.generation.prefill import Fed, Prompt, sequences_of
from service.generation.request import Delta, FinishReason, GenerationRequest
from service.generation.run import Run
from service.generation.running import MOST_STEPS
from service.generation.sampling.grammar import Grammars
from service.generation.sampling.masks import Masks, is_there
from service.generation.sampling.sampler import SAMPLER_VERSION
from service.generation.saved.keeper import StateKeeper
from service.generation.saved.prefix_cache import PrefixCache
from service.generation.saved.prefixes import Prefixes
from service.generation.saved.run_states import RunStates
from service.generation.saved.shared_prefixes import SharedPrefixes
from service.generation.selftest import check_golden
from service.generation.sequence import Sequence
from service.generation.session import Logits, StepSession, Tensor
from service.generation.state import State
from service.generation.step_engine import Once, StepEngine
from service.generation.submission import Submission
from service.generation.text import Vocabulary
from service.runtime.moving_average import averaged
from service.runtime.pacing import hand_over_s
from service.settings import Settings
from service.states.numerics import numerics_fingerprint
from service.states.store import Store
from service.telemetry.metrics import GeneratorMetrics

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracer

_QUANTUM = (4, 128)  # smallest and largest quantum, the number of tokens for which a run keeps its slot while other runs wait
_QUANTA = 4  # the quantum is chosen so that `max_wait_s` is the time of this many quanta, within the limits of _QUANTUM


@dataclass(frozen=True, kw_only=True)
class GeneratorLimits(QueueLimits):
    """Limits of one decoder's engine."""

    max_waiting_tokens: float = 262_144
    max_prompt_tokens: int = 131_072
    prefix_cache_bytes: int = 0
    unread_s: float = 60.0
    max_aside: int = 256  # largest number of preempted runs that wait for a slot
    max_aside_bytes: int = 256 * 2**20  # most memory for the states of preempted runs; at least as much as all slots' states need is used


class GeneratorEngine(StepEngine[Sequence]):
    """The engine of a decoder: it continues token sequences."""

    limits: GeneratorLimits

    def __init__(
        self,
        session: StepSession[Any],
        vocabulary: Vocabulary,
        *,
        eos_token_ids: tuple[int, ...],
        grammars: Grammars,
        keeper: StateKeeper | None = None,
        shared: SharedPrefixes | None = None,
        limits: GeneratorLimits,
        numerics: str,
        metrics: GeneratorMetrics,
        tracer: "Tracer | None" = None,
    ) -> None:
        """`keeper` loads and stores states. If it is None, requests cannot name states. `shared` finds the states after prompts that other
        processes have fed. `numerics` identifies the arithmetic of this machine (see `states/numerics.py`).
        """
        super().__init__("generator", limits, Admission(limits), provider=session.provider, run_s=1.0, metrics=metrics, tracer=tracer)
        self.numerics = numerics
        self._session = session
        self._states = RunStates(keeper)
        self._intake = Intake(
            session,
            vocabulary,
            grammars,
            eos_token_ids=eos_token_ids,
            max_prompt_tokens=limits.max_prompt_tokens,
            numerics=numerics,
            cancel=self._admission.cancel,
        )
        state_bytes = session.decoder.state_bytes
        aside_bytes = max(limits.max_aside_bytes, limits.slots * state_bytes)
        self._max_aside = min(limits.max_aside, aside_bytes // (state_bytes + 4 * session.vocab_size))
        # Used by the engine's thread only.
        self._places = Places(session, limits.slots)
        self._running, self._prefill = self._places.running, self._places.prefill
        self._masks = Masks(session.vocab_size)
        self._prefixes = Prefixes(PrefixCache(limits.prefix_cache_bytes), shared, session.fingerprint, metrics)
        self._step_s = 0.0
        self._prompt_work = PromptWork(lambda: self.prompt_token_s, self._unfed)

    @property
    def _held(self) -> int:
        return len(self._places)

    @property
    def _holders(self) -> list[Sequence]:
        """Return the runs that have a slot."""
        return self._places.sequences

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    async def _prepare(self, requests: list[GenerationRequest], once: Once) -> None:
        """Do the slow work for requests before they are queued: compile the grammars, which may take seconds, so that `_job` finds them
        compiled, and load the states, checkpoints and shared prefixes from which the runs continue.

        Raises InvalidRequest, Overloaded, StateNotFound, StateGone or StoreFailed.
        """
        if not (first := requests[0]).reopened:
            tokens = sum({id(request.prompt): len(request.prompt) for request in requests}.values())
            with self.offered.refusing(len(requests)):
                self._prompt_work.check(first.client, tokens, first.deadline)
        await self._intake.compile(requests)
        once.states, once.checkpoints = await self._states.load(requests)
        for request in {id(request.prompt): request for request in requests if request.checkpoint not in once.checkpoints}.values():
            await self._prefixes.fetch(request)

    @property
    def prompt_token_s(self) -> float:
        return self._prefill.price.token_s

    def _unfed(self) -> list[tuple[GenerationRequest, int]]:
        return [(each.request, each.left_of_prompt) for each in (*self._holders, *self._admission.waiting())]

    @contextmanager
    def expecting(self, client: str, tokens: float, deadline: float) -> Iterator[None]:
        with self.offered.refusing(1), self._prompt_work.expecting(client, tokens, deadline):
            yield

    def _turn_s(self, holders: list[Sequence]) -> float:
        """Estimate how many seconds a run keeps its slot while others wait: one quantum, or until it ends if no run can be preempted."""
        if self._admission.aside < self._max_aside:
            return min(self._run_s, self._quantum * self._step_s) if self._step_s else self._run_s
        return super()._turn_s(holders)

    def _retry_after_s(self, submission: Submission[Sequence]) -> float:
        return self._run_s / self.limits.slots + self._prefill.price.of(submission.tokens)

    def _job(self, request: GenerationRequest, submission: Submission[Sequence], once: Once) -> Sequence:
        self._check_queueable(request)
        self._states.check(request)
        return self._intake.sequence(request, submission, once)

    # On the thread ---------------------------------------------------------------------------------------------------------------------

    @property
    def _quantum(self) -> int:
        least, most = _QUANTUM
        return most if not self._step_s else max(least, min(most, int(self.limits.max_wait_s / _QUANTA / self._step_s)))

    @property
    def _soon(self) -> bool:
        return self._steady and not len(self._admission)

    @property
    def _steady(self) -> bool:
        """Return whether the next turns are decode steps only, unless a run is preempted."""
        others = len(self._prefill) or self._places.late or (len(self._admission) and self._held < self.limits.slots)
        return len(self._running) > 0 and not others and all(sequence.mask is None for sequence in self._running.sequences)

    @property
    def _room(self) -> bool:
        return self._admission.aside < self._max_aside

    def _compute(self) -> None:
        self._feed_some()
        if self._gather():
            self._guarded(self._step, self._running.sequences)

    def _end_at_deadline(self, sequence: Sequence) -> None:
        keeps = sequence.request.keep is not None
        if not sequence.completion or (keeps and sequence.left_of_prompt):  # the state after the last token is not there yet
            self._fail([sequence], DeadlineExceeded("the request's deadline passed before there was a token to answer"))
            return
        self._publish()  # the end may be delivered by another way, and must not overtake the tokens
        last = Delta("" if sequence.stops is None else sequence.stops.finish(), finish_reason="length")
        self._complete(sequence, last, self._places.copy(sequence) if keeps else None)

    def _forget(self, sequence: Sequence) -> None:
        self._places.remove(sequence)

    def _set_aside(self, sequence: Sequence, now: float) -> None:
        """Free the slot of a run for another run. The state is kept, so that the run can continue from it later."""
        if sequence in self._prefill:
            self._admission.set_aside(sequence, now)  # first, because this marks the run as preempted, which the prefill reads
            self._prefill.set_aside(sequence)
            return
        if sequence in self._running.sequences:
            self._places.hold(sequence)
        else:
            self._places.late.remove(sequence)
        self._admission.set_aside(sequence, now)

    def _gather(self) -> bool:
        """Prepare a decode step of the runs whose grammar masks are ready; the other runs wait for a later step. Returns whether a step can
        run.
        """
        for sequence in [each for each in self._places.late if is_there(each)]:
            self._places.late.remove(sequence)
            self._guarded(partial(self._places.decode, sequence), [sequence])
        late = self._masks.late(self._running.sequences)
        if len(late) == len(self._running):  # no run can take part in a step now
            if not len(self._running) and self._places.late and not len(self._prefill):
                self._masks.wait_for_one(self._places.late)
            return False
        for sequence in late:
            self._guarded(partial(self._sit_out, sequence), [sequence])
        return len(self._running) > 0

    def _sit_out(self, sequence: Sequence) -> None:
        self._places.hold(sequence)
        self._places.late.append(sequence)

    def _place(self, sequence: Sequence) -> None:
        """Give a run a slot. A new run begins after the longest prefix of its prompt whose state is in the prefix cache."""
        if sequence.mask is None:
            self._masks.begin(sequence)
        if not sequence.fed and sequence not in self._prefill:
            self._prefixes.begin(sequence)
        self._places.put(sequence)

    def _feed_some(self) -> None:
        """Feed pieces of prompts until the token budget before the next decode step is used up. If no run is decoding, stop earlier: after
        a piece of a long prompt, because a new request may wait, and before one, because a first token may wait.
        """
        alone = not len(self._running)
        budget = self._prefill.budget(None if alone else self._step_s)
        while budget > 0 and len(self._prefill):
            prompts, size = self._prefill.next(budget, alone=alone)
            self._guarded(partial(self._feed, prompts, size), sequences_of(prompts))
            budget -= self._prefill.cost(prompts, size)
            if alone and (prompts[0].left or self._prefill.all_long):
                break

    def _feed(self, prompts: list[Prompt], size: int) -> None:
        """Feed a piece of each prompt. When a prompt is done, its runs join the decode batch, or wait if they have no slot now."""
        before = sum(prompt.left for prompt in prompts)
        for fed in self._prefill.feed(prompts, size):
            if not fed.done:
                self._checkpoint_prompt(fed)
                continue
            copied = fed.states.slots.state(fed.states.at) if any(each.aside for each in fed.sequences) else []
            self._prefixes.keep(fed.sequences[0], fed.sequences[0].tokens, fed.copy)
            for sequence in fed.sequences:
                if sequence.is_checkpoint_due:
                    self._checkpoint(sequence, fed.copy)
                if sequence.over is not None:
                    self._admission.remove(sequence)
                    kept = None
                    if sequence.request.keep is not None:
                        kept = self._places.state(sequence, fed.states.slots.state(fed.states.at), fed.logits)
                    self._complete(sequence, sequence.over, kept)
                elif sequence.aside:
                    sequence.state = self._places.state(sequence, copied, fed.logits)
                else:
                    self._running.join(sequence, fed.states, fed.logits)
                    sequence.placed_at = sequence.position
        self.metrics.prompt_tokens.inc(before - sum(prompt.left for prompt in prompts))
        self._last_call_failed = False

    def _step(self) -> None:
        """Draw one token for every running sequence, publish it, and feed it to the sequences that continue. A call may make several steps;
        their tokens are drawn and emitted one step after the other.
        """
        ending = self._draw(time.monotonic())
        known = self._step_s > 0 and not ending  # whether it is known when the next tokens are drawn, if there is no other work
        # As many steps as take about as long as tokens may wait are made by one call.
        n_steps = max(1, min(round(self._hand_over_s / self._step_s), MOST_STEPS)) if known and self._steady else 1
        # Before the graph runs, so that the event loop sends tokens meanwhile.
        self._publish(n_steps * self._step_s if known and self._soon else math.inf)
        if len(self._running):
            guessed = self._running.step([sequence for sequence, _ in ending], most=n_steps)
            self._step_s = averaged(self._step_s, self._running.step_s)
            if guessed:
                self.metrics.guessed_tokens.inc(guessed)
            self._completed(ending)
            self._steps += self._running.ahead
            while self._running.ahead:  # the logits of each step were there before those of the steps after it
                ending = self._draw(time.monotonic() - self._running.ahead * self._running.step_s)
                if self._running.ahead:  # not all runs have ended
                    self._running.take()
                    self._completed(ending)
            self._last_call_failed = False

    def _completed(self, ending: list[tuple[Sequence, Delta]]) -> None:
        """End the runs whose states are kept, after a step has fed their last tokens."""
        if ending:
            self._publish()  # the end is delivered by another way, once the state is stored, and must not overtake their tokens
        for sequence, last in ending:
            state = self._places.copy(sequence)
            self._running.remove(sequence)
            self._complete(sequence, last, state)

    def _complete(self, sequence: Sequence, last: Delta, state: State | None) -> None:
        """End a run: emit its last delta. If the request wants `state` kept, the delta is emitted when the state has been stored."""
        run = sequence.run
        if sequence.request.keep is None:
            self._emit(run, last)
            return
        assert state is not None
        assert last.finish_reason is not None
        self._finished(run, last.finish_reason)

        def stored(failure: ServiceError | None) -> None:
            self._post(run.give if failure is None else run.fail, last if failure is None else failure)

        self._states.keep(sequence, state, stored)

    def _draw(self, now: float) -> list[tuple[Sequence, Delta]]:
        """Draw and emit the next token of every row, and more tokens of the rows for which the last step guessed right. Remove sequences
        that end with such a token, and sequences for which no token is possible.

        Return the sequences that end but take part in one more step, because the state after their last token must be kept; each with its
        last delta. `now` is when their logits were computed.
        """
        ending: list[tuple[Sequence, Delta]] = []
        self._draw_each(None, now, ending)
        while again := self._running.verify([sequence for sequence, _ in ending]):
            self.metrics.right_guesses.inc(len(again))
            self._draw_each(again, now, ending)
        return ending

    def _draw_each(self, only: list[Sequence] | None, now: float, ending: list[tuple[Sequence, Delta]]) -> None:
        """Draw and emit the next token of every row, or of the sequences `only`. Add to `ending`, see `_draw`."""
        sequences, intervals_s = list(self._running.sequences), Counter[float]()
        drawn = self._running.draw(only)
        n_drawn = len(sequences if only is None else only) - len(drawn.failures)
        for row, (sequence, token_id) in enumerate(zip(sequences, drawn.token_ids.tolist(), strict=True)):
            if only is not None and sequence not in only:
                continue
            if row in drawn.failures:
                self._emit(sequence.run, drawn.failures[row])
                self._running.remove(sequence)
                continue
            made, usage = sequence.accept(token_id, drawn.logprobs.get(row)), sequence.run.usage
            usage.completion_tokens += 1
            if usage.first_token is None:
                usage.first_token = now
                self.metrics.first_token_s.observe(now - usage.submitted)
            else:
                intervals_s[now - sequence.drew] += 1
            sequence.drew = now
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
        for interval_s, count in intervals_s.items():  # one, but for runs that had no slot meanwhile
            self.metrics.between_tokens_s.observe(interval_s, count)
        self.metrics.generation_tokens.inc(n_drawn)

    def _checkpoint(self, sequence: Sequence, copy: Callable[[], tuple[list[Tensor], Logits]]) -> None:
        """Write a checkpoint of the run, unless the store is still busy with earlier checkpoints. `copy` returns the run's state tensors
        and logits.
        """
        if self._states.has_room:
            self._states.checkpoint(sequence, self._places.state(sequence, *copy()))

    def _checkpoint_prompt(self, fed: Fed) -> None:
        """Write a checkpoint in the middle of a prompt if it is due. No checkpoint is written if several runs share the prompt, because
        each run that continues from a checkpoint would feed the rest of the prompt by itself. None is written either if the prompt's
        log-probabilities are requested, because a checkpoint does not contain them.
        """
        first, *others = fed.sequences
        if not others and first.request.prompt_logprobs is None and first.is_checkpoint_due:
            self._checkpoint(first, fed.copy)

    def _finished(self, run: Run, reason: FinishReason | Literal["abort", "error"]) -> None:
        super()._finished(run, reason)
        self._states.forget(run.request, erase=reason != "abort")  # another process may continue an aborted run from its checkpoint

    def _end(self) -> None:
        self._masks.close()
        super()._end()


def open_decoder(model: DecoderModel, settings: Settings, *, threads: int, store: Store, tracer: "Tracer | None") -> GeneratorEngine:
    """Open the engine of a decoder, and test it."""
    import onnxruntime as ort

    manifest, slots, memory_gib = model.manifest, settings.slots, settings.gpu_memory_gib
    session = open_steps(model.bundle, manifest, threads=threads, provider=settings.provider, slots=slots, gpu_memory_gib=memory_gib)
    golden_logits = check_golden(model.bundle, session, model.encode)
    graph_sha256 = next(file.sha256 for file in manifest.files if file.name == manifest.graph.file)
    numerics = numerics_fingerprint(graph_sha256, ort.__version__, session.provider, golden_logits, SAMPLER_VERSION)
    keeper = StateKeeper(
        store,
        session.decoder,
        vocab_size=session.vocab_size,
        fingerprint=manifest.fingerprint,
        numerics=numerics,
        hot_bytes=settings.hot_state_bytes,
    )
    # A single generator would write states that no other process reads.
    shares = settings.profile == "split" and settings.shared_prefix_bytes and settings.prefix_cache_bytes
    return GeneratorEngine(
        session,
        model.vocabulary,
        eos_token_ids=model.eos_token_ids,
        grammars=Grammars(model.bundle / contract.TOKENIZER, model.eos_token_ids),
        keeper=keeper,
        shared=SharedPrefixes(store, keeper.packing, settings.shared_prefix_bytes) if shares else None,
        numerics=numerics,
        limits=GeneratorLimits(
            slots=slots_within(settings, session.decoder),
            max_prompt_tokens=settings.max_prompt_tokens,
            prefix_cache_bytes=settings.prefix_cache_bytes,
            max_wait_s=settings.max_wait_s,
            max_bulk_wait_s=settings.max_bulk_wait_s,
            hand_over_s=hand_over_s(settings.stream_interval_s),
        ),
        metrics=model.metrics,
        tracer=tracer,
    )


def slots_within(settings: Settings, decoder: contract.Decoder) -> int:
    """Return the number of sequences that a decoder generates at the same time: as many as set, or as `slot_bytes` holds, at least one."""
    return max(1, min(settings.slots, settings.slot_bytes // decoder.state_bytes))
