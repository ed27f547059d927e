"""The workload of a decoder's engine: decode steps for all running sequences, and pieces of prompts between them."""

import math
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Several
from functools import partial
from typing import Any

from service.errors import DeadlineExceeded, ServiceError
from service.generation.admission import QueueLimits
from service.generation.prefill import Fed, Prefill, Prompt, sequences_of
from service.generation.request import Delta
from service.generation.running import MOST_STEPS, Running
from service.generation.sampling.masks import Masks, is_there
from service.generation.saved.keeper import StateKeeper
from service.generation.saved.prefixes import Prefixes
from service.generation.sequence import Sequence
from service.generation.session import Logits, StepSession, Tensor
from service.generation.state import State
from service.generation.step_engine import StepEngine
from service.generation.submission import Workload
from service.runtime.moving_average import averaged

_QUANTUM = (4, 128)  # smallest and largest quantum, the number of tokens for which a run keeps its slot while other runs wait
_QUANTA = 4  # the quantum is chosen so that `max_wait_s` is the time of this many quanta, within the limits of _QUANTUM


class Decoding(Workload[Sequence]):
    """The runs of a decoder that have slots. Each is in prefill, in the decode batch (`running`), or late: it waits for a grammar mask."""

    def __init__(
        self,
        engine: StepEngine[Sequence],
        session: StepSession[Any],
        limits: QueueLimits,
        *,
        keeper: StateKeeper | None,
        prefixes: Prefixes,
        most_aside: int,
    ) -> None:
        """`keeper` stores states. If it is None, runs keep no states and have no checkpoints. `most_aside` is the largest number of
        preempted runs that wait for a slot.
        """
        self.keeper = keeper
        self.running = Running(session, limits.slots)
        self.prefill = Prefill(session)
        self.late: list[Sequence] = []
        self.step_s = 0.0  # average duration of a step
        self._engine = engine
        self._limits = limits
        self._prefixes = prefixes
        self._fingerprint = session.fingerprint
        self._masks = Masks(session.vocab_size)
        self._most_aside = most_aside

    @property
    def holders(self) -> list[Sequence]:
        return [*self.running.sequences, *self.late, *self.prefill.sequences]

    @property
    def held(self) -> int:
        return len(self.running) + len(self.late) + len(self.prefill)

    @property
    def quantum(self) -> int:
        least, most = _QUANTUM
        return most if not self.step_s else max(least, min(most, int(self._limits.max_wait_s / _QUANTA / self.step_s)))

    @property
    def _soon(self) -> bool:
        """Return whether the next turn publishes as soon as it has drawn tokens, without other work before."""
        return self._steady and not len(self._engine.admission)

    @property
    def _steady(self) -> bool:
        """Return whether the next turns are decode steps only, unless a run is preempted."""
        others = len(self.prefill) or self.late or (len(self._engine.admission) and self.held < self._limits.slots)
        return len(self.running) > 0 and not others and all(sequence.mask is None for sequence in self.running.sequences)

    @property
    def room(self) -> bool:
        return self._engine.admission.aside < self._most_aside

    def compute(self) -> float:
        self._feed_some()
        if self._gather():
            self._engine.guarded(self._step, self.running.sequences)
        return 0.0 if self._soon else math.inf

    def end_at_deadline(self, sequence: Sequence) -> None:
        keeps = sequence.request.keep is not None
        if not sequence.completion or (keeps and sequence.left_of_prompt):  # the state after the last token is not there yet
            self._engine.fail([sequence], DeadlineExceeded("the request's deadline passed before there was a token to answer"))
            return
        last = Delta("" if sequence.stops is None else sequence.stops.finish(), finish_reason="length")
        self._complete(sequence, last, self.copy(sequence) if keeps else None)

    def set_aside(self, sequence: Sequence, now: float) -> None:
        """Free the slot of a run for another run. The state is kept, so that the run can continue from it later."""
        if sequence in self.prefill:
            self._engine.admission.set_aside(sequence, now)  # first, because this marks the run as preempted, which the prefill reads
            self.prefill.set_aside(sequence)
            return
        if sequence in self.running.sequences:
            self.hold(sequence)
        else:
            self.late.remove(sequence)
        self._engine.admission.set_aside(sequence, now)

    def _gather(self) -> bool:
        """Prepare a decode step of the runs whose grammar masks are ready; the other runs wait for a later step. Returns whether a step can
        run.
        """
        for sequence in [each for each in self.late if is_there(each)]:
            self.late.remove(sequence)
            self._engine.guarded(partial(self.decode, sequence), [sequence])
        late = self._masks.late(self.running.sequences)
        if len(late) == len(self.running):  # no run can take part in a step now
            if not len(self.running) and self.late and not len(self.prefill):
                self._masks.wait_for_one(self.late)
            return False
        for sequence in late:
            self._engine.guarded(partial(self._sit_out, sequence), [sequence])
        return len(self.running) > 0

    def _sit_out(self, sequence: Sequence) -> None:
        self.hold(sequence)
        self.late.append(sequence)

    def place(self, sequence: Sequence) -> None:
        """Give a run a slot: in the decode batch if its prompt is done, else in the prefill. A new run begins after the longest prefix of
        its prompt whose state is in the prefix cache.
        """
        if sequence.mask is None:
            self._masks.begin(sequence)
        if not sequence.fed and sequence not in self.prefill:
            self._prefixes.begin(sequence)
        if not sequence.left_of_prompt:
            self.decode(sequence)
        elif sequence in self.prefill:
            self.prefill.back(sequence)
        else:
            self.prefill.add(sequence)
        sequence.placed_at = sequence.position

    def decode(self, sequence: Sequence) -> None:
        """Add a run whose prompt is done to the decode batch, with the state that was kept."""
        state, sequence.state = sequence.state, None
        assert state is not None
        assert state.logits is not None
        self.running.join(sequence, state.tensors, state.logits)

    def hold(self, sequence: Sequence) -> None:
        """Remove a run from the decode batch and keep its state."""
        sequence.state = self.copy(sequence)
        self.running.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a run that has ended from prefill, decode batch or late runs, if it is in one of them."""
        if sequence in self.running.sequences:
            self.running.remove(sequence)
        elif sequence in self.late:
            self.late.remove(sequence)
        elif sequence in self.prefill:
            self.prefill.remove(sequence)

    def copy(self, sequence: Sequence) -> State:
        """Return a copy of the state of a run whose prompt is done."""
        if sequence in self.running.sequences:
            return self.state(sequence, *self.running.copy(sequence))
        assert sequence.state is not None
        return sequence.state

    def state(self, sequence: Sequence, tensors: Several[Tensor], logits: Logits | None = None) -> State:
        """Return a State of the run at its position, with these state tensors (each without the batch axis) and logits (V,)."""
        return State(tensors=tuple(tensors), position=sequence.position, logits=logits, fingerprint=self._fingerprint)

    def _feed_some(self) -> None:
        """Feed pieces of prompts until the token budget before the next decode step is used up. If no run is decoding, stop earlier: after
        a piece of a long prompt, because a new request may wait, and before one, because a first token may wait.
        """
        alone = not len(self.running)
        budget = self.prefill.budget(None if alone else self.step_s)
        while budget > 0 and len(self.prefill):
            prompts, size = self.prefill.next(budget, alone=alone)
            self._engine.guarded(partial(self._feed, prompts, size), sequences_of(prompts))
            budget -= self.prefill.cost(prompts, size)
            if alone and (prompts[0].left or self.prefill.all_long):
                break

    def _feed(self, prompts: list[Prompt], size: int) -> None:
        """Feed a piece of each prompt. When a prompt is done, its runs join the decode batch, or wait if they have no slot now."""
        before = sum(prompt.left for prompt in prompts)
        for fed in self.prefill.feed(prompts, size):
            if not fed.done:
                self._checkpoint_prompt(fed)
                continue
            copied = fed.states.slots.state(fed.states.at) if any(each.aside for each in fed.sequences) else []
            if (first := fed.sequences[0]).over is None or not first.completion:  # else the state before the last token was kept
                self._prefixes.keep(first, first.tokens, fed.copy)
            for sequence in fed.sequences:
                if sequence.is_checkpoint_due:
                    self._checkpoint(sequence, fed.copy)
                if sequence.over is not None:
                    self._engine.admission.remove(sequence)
                    kept = None
                    if sequence.request.keep is not None:
                        kept = self.state(sequence, fed.states.slots.state(fed.states.at), fed.logits)
                    self._complete(sequence, sequence.over, kept)
                elif sequence.aside:
                    sequence.state = self.state(sequence, copied, fed.logits)
                else:
                    self.running.join(sequence, fed.states, fed.logits)
                    sequence.placed_at = sequence.position
        self._engine.metrics.prompt_tokens.inc(before - sum(prompt.left for prompt in prompts))
        self._engine.last_call_failed = False

    def _step(self) -> None:
        """Draw one token for every running sequence, publish it, and feed it to the sequences that continue. A call may make several steps;
        their tokens are drawn and emitted one step after the other.
        """
        self._draw(time.monotonic())
        known = self.step_s > 0  # whether it is known when the next tokens are drawn, if there is no other work
        # As many steps as take about as long as tokens may wait are made by one call.
        n_steps = max(1, min(round(self._engine.hand_over_s / self.step_s), MOST_STEPS)) if known and self._steady else 1
        # Before the graph runs, so that the event loop sends tokens meanwhile.
        self._engine.publish(n_steps * self.step_s if known and self._soon else math.inf)
        if len(self.running):
            guessed = self.running.step(most=n_steps)
            self.step_s = averaged(self.step_s, self.running.step_s)
            if guessed:
                self._engine.metrics.guessed_tokens.inc(guessed)
            self._engine.n_steps += self.running.ahead
            while self.running.ahead:  # the logits of each step were there before those of the steps after it
                self._draw(time.monotonic() - self.running.ahead * self.running.step_s)
                if self.running.ahead:  # not all runs have ended
                    self.running.take()
            self._engine.last_call_failed = False

    def _complete(self, sequence: Sequence, last: Delta, state: State | None) -> None:
        """End a run: emit its last delta. If the request wants `state` kept, the delta is emitted when the state has been stored."""
        run = sequence.run
        if sequence.request.keep is None:
            self._engine.emit(run, last)
            return
        assert state is not None
        assert last.finish_reason is not None
        assert self.keeper is not None
        self._engine.publish()  # the end is delivered by another way, once the state is stored, and must not overtake the run's tokens
        self._engine.finished(run, last.finish_reason)

        def stored(failure: ServiceError | None) -> None:
            self._engine.post(run.give if failure is None else run.fail, last if failure is None else failure)

        fed = sequence.request.prompt + tuple(sequence.completion)
        self.keeper.keep(sequence.request.keep, state, sequence.origin, fed, stored)

    def _draw(self, now: float) -> None:
        """Draw and emit the next token of every row, and more tokens of the rows for which the last step guessed right. Remove sequences
        that end with such a token, and sequences for which no token is possible. `now` is when their logits were computed.
        """
        self._draw_each(None, now)
        while again := self.running.verify():
            self._engine.metrics.right_guesses.inc(len(again))
            self._draw_each(again, now)

    def _draw_each(self, only: list[Sequence] | None, now: float) -> None:
        """Draw and emit the next token of every row, or of the sequences `only`."""
        sequences, intervals_s = list(self.running.sequences), Counter[float]()
        drawn = self.running.draw(only)
        n_drawn = len(sequences if only is None else only) - len(drawn.failures)
        for row, (sequence, token_id) in enumerate(zip(sequences, drawn.token_ids.tolist(), strict=True)):
            if only is not None and sequence not in only:
                continue
            if row in drawn.failures:
                self._engine.emit(sequence.run, drawn.failures[row])
                self.running.remove(sequence)
                continue
            made, usage = sequence.accept(token_id, drawn.logprobs.get(row)), sequence.run.usage
            usage.completion_tokens += 1
            if usage.first_token is None:
                usage.first_token = now
                self._engine.metrics.first_token_s.observe(now - usage.submitted)
            else:
                intervals_s[now - sequence.drew] += 1
            sequence.drew = now
            if made.finish_reason is None:
                self._engine.emit(sequence.run, made)
                self._masks.begin(sequence)
                if sequence.is_checkpoint_due:
                    self._checkpoint(sequence, partial(self.running.copy, sequence))
                continue
            self._engine.ended(sequence, now)
            fed_tokens = sequence.request.prompt + tuple(sequence.completion[:-1])
            self._prefixes.keep(sequence, fed_tokens, partial(self.running.copy, sequence))
            if sequence.request.keep is None:
                self._engine.emit(sequence.run, made)
                self.running.remove(sequence)
            else:
                self._engine.emit(sequence.run, made._replace(finish_reason=None))
                self.hold(sequence)
                sequence.feed_last(made.last())
                self.prefill.add(sequence)
        for interval_s, count in intervals_s.items():  # one, but for runs that had no slot meanwhile
            self._engine.metrics.between_tokens_s.observe(interval_s, count)
        self._engine.metrics.generation_tokens.inc(n_drawn)

    def _checkpoint(self, sequence: Sequence, copy: Callable[[], tuple[list[Tensor], Logits]]) -> None:
        """Write a checkpoint of the run, unless the store is still busy with earlier checkpoints. `copy` returns the run's state tensors
        and logits.
        """
        if self.keeper is not None and self.keeper.has_room:
            self.keeper.checkpoint(sequence, self.state(sequence, *copy()))

    def _checkpoint_prompt(self, fed: Fed) -> None:
        """Write a checkpoint in the middle of a prompt if it is due. No checkpoint is written if several runs share the prompt, because
        each run that continues from a checkpoint would feed the rest of the prompt by itself. None is written either if the prompt's
        log-probabilities are requested, because a checkpoint does not contain them.
        """
        first, *others = fed.sequences
        if not others and first.request.prompt_logprobs is None and first.is_checkpoint_due:
            self._checkpoint(first, fed.copy)

    def close(self) -> None:
        self._masks.close()
