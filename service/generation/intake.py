"""Makes the runs of the engine from requests, after checking that the model can run them, and feed their prompts in time."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from service.errors import InputTooLong, InvalidRequest, NotReady, QueueTooLong
from service.generation.request import GenerationRequest
from service.generation.run import Run
from service.generation.sampling.grammar import Grammars
from service.generation.sampling.sampler import Edits, check_ids, check_sampling
from service.generation.sequence import Sequence
from service.generation.session import StepSession
from service.generation.state import State
from service.generation.step_engine import Once
from service.generation.submission import Submission
from service.generation.text import TextStream, Vocabulary
from service.telemetry.usage import Usage

_LEAST_RETRY_S = 1.0


class Intake:
    """Makes sequences from the requests to one model. Used on the event loop."""

    def __init__(
        self,
        session: StepSession[Any],
        vocabulary: Vocabulary,
        grammars: Grammars,
        *,
        eos_token_ids: tuple[int, ...],
        max_prompt_tokens: int,
        numerics: str,
        cancel: Callable[[Run], None],
    ) -> None:
        """`cancel` is called when a run's caller cancels the run."""
        self._decoder = session.decoder
        self._vocab_size = session.vocab_size
        self._fingerprint = session.fingerprint
        self._vocabulary = vocabulary
        self._grammars = grammars
        self._eos = eos_token_ids
        self._max_prompt_tokens = max_prompt_tokens
        self._numerics = numerics
        self._cancel = cancel
        self._arrivals = 0

    async def compile(self, requests: Iterable[GenerationRequest]) -> None:
        """Compile the grammars of requests on another thread, because compiling may take seconds. `sequence` then finds them compiled."""
        for grammar in {request.grammar for request in requests if request.grammar is not None}:
            await asyncio.to_thread(self._grammars.matcher, grammar)

    def sequence(self, request: GenerationRequest, submission: Submission[Sequence], once: Once) -> Sequence:
        """Return a new run of the request, at its beginning or from its checkpoint. `once` has the states and checkpoints that
        were loaded for the request. Raises InvalidRequest, InputTooLong or NotReady.
        """
        self._check(request, once.checked)
        state = None if request.start is None else once.states[request.start]
        if state is not None:
            self._check_start(request, state)
        if (checkpoint := once.checkpoints.get(request.checkpoint)) is not None:
            checkpoint.check(self._decoder, self._vocab_size, self._fingerprint)
        self._arrivals += 1
        text = TextStream(
            self._vocabulary, stop=request.stop, include_stop=request.include_stop, skip_special_tokens=request.skip_special_tokens
        )
        usage = Usage(len(request.prompt), submitted=submission.submitted)
        seen = None if state is None else state.seen
        sequence = Sequence(
            run=Run(request, usage, self._cancel, None if request.stop else text),
            stops=text if request.stop else None,
            matcher=self._grammars.matcher(request.grammar) if request.grammar is not None else None,
            ends=frozenset((*(() if request.ignore_eos else self._eos), *request.stop_token_ids)),
            order=self._arrivals,
            submission=submission,
            n_positions=self._decoder.n_positions,
            edits=Edits.of(request.sampling, self._vocab_size, request.prompt, request.known, once.made, seen),
        )
        sequence.run.numerics = self._numerics
        if state is not None:
            sequence.begin_at(state)
        if checkpoint is not None:
            sequence.restore(checkpoint)
        if request.known:
            sequence.replay(request.known)
        return sequence

    def _check(self, request: GenerationRequest, checked: set[int]) -> None:
        """Raise an error unless this model can run the request. `checked` contains the `id()` of each collection of token ids that was
        checked before.
        """
        size, limit = len(request.prompt), self._max_prompt_tokens
        if size > limit:
            raise InputTooLong(f"the prompt has {size} tokens and the maximum context length is {limit} tokens: shorten it", param="prompt")
        n_positions = self._decoder.n_positions
        if n_positions is not None and size > n_positions:
            said = f"the prompt has {size} tokens, and this model's maximum context length is {n_positions} tokens: shorten it"
            raise InputTooLong(said, param="prompt")
        for name, ids in (("prompt", request.prompt), ("stop_token_ids", request.stop_token_ids)):
            if id(ids) not in checked:
                check_ids(ids, self._vocab_size, name)
                checked.add(id(ids))
        for name in ("max_tokens", "min_tokens"):
            if (value := getattr(request, name)) < 0:
                raise InvalidRequest(f"{name} is {value} and must be 0 or more", param=name)
        for name in ("top_logprobs", "prompt_logprobs"):
            if (wanted := getattr(request, name)) is not None and not 0 <= wanted <= self._vocab_size:
                raise InvalidRequest(f"{name} is {wanted} and must be from 0 to {self._vocab_size}, the size of the vocabulary", param=name)
        if not all(request.stop):
            raise InvalidRequest("a stop string is empty, and every text ends with it: leave it out", param="stop")
        check_sampling(request.sampling, self._vocab_size, checked)
        check_ids(request.known, self._vocab_size, "known")
        if request.known and request.numerics not in ("", self._numerics):
            raise NotReady("the run was begun by another arithmetic than this generator's: another one must go on with it")

    def _check_start(self, request: GenerationRequest, state: State) -> None:
        """Raise an error unless the request can begin at this state."""
        size, n_positions = len(request.prompt) + state.position, self._decoder.n_positions
        if n_positions is not None and size > n_positions:
            raise InputTooLong(
                f"the state has seen {state.position} tokens and the prompt has {len(request.prompt)} more, and this model's "
                f"maximum context length is {n_positions} tokens: shorten the prompt",
                param="prompt",
            )
        if not request.prompt and not request.max_tokens:
            raise InvalidRequest("the prompt has no tokens and max_tokens is 0: fork the state to get a copy of it", param="prompt")
        if not request.prompt and state.logits is None:
            raise InvalidRequest("the prompt has no tokens, and the state has no logits to draw from: send a token", param="prompt")


class PromptWork:
    """The prompts of one engine that are not fed yet, also those that are still being tokenised. Used on the event loop."""

    def __init__(self, token_s: Callable[[], float], unfed: Callable[[], Iterable[tuple[GenerationRequest, int]]]) -> None:
        """`token_s` returns the seconds that a token of a prompt takes. `unfed` returns each request that waits or has a slot, with the
        number of tokens that are left of its prompt.
        """
        self._token_s = token_s
        self._unfed = unfed
        self._expected: dict[int, tuple[str, float]] = {}  # client and estimated tokens of each prompt that is being tokenised
        self._numbers = itertools.count()

    @contextmanager
    def expecting(self, client: str, tokens: float, deadline: float) -> Iterator[None]:
        """Within the block, count a prompt of about `tokens` tokens as not fed yet. Raises what `check` raises."""
        self.check(client, tokens, deadline)
        number = next(self._numbers)
        self._expected[number] = client, tokens
        try:
            yield
        finally:
            del self._expected[number]

    def check(self, client: str, tokens: float, deadline: float) -> None:
        """Raise QueueTooLong if the prompts before a new one of this size take until after its deadline. An idle engine admits any."""
        before_s = self._before(client, tokens) * self._token_s()
        left_s = max(deadline - time.monotonic(), 0.0)
        if before_s > left_s:
            raise QueueTooLong(
                f"Model is overloaded: the prompts before this one take about {before_s:.1f} s, and its deadline is in {left_s:.1f} s",
                retry_after_s=max(before_s - left_s, _LEAST_RETRY_S),
            )

    def _before(self, client: str, tokens: float) -> float:
        """Return how many tokens are fed before a new prompt's last piece, at least. Pieces alternate between the client that has been fed
        least and the shortest prompt (`prefill.py`), so it is the smaller number of both orders.
        """
        prompts = {id(request.prompt): (request.client, float(left)) for request, left in self._unfed()}
        waiting = [*prompts.values(), *self._expected.values()]
        by_client = Counter[str]()
        for each, left in waiting:
            by_client[each] += left  # type: ignore[assignment]  # typeshed allows integers only
        own = by_client.pop(client, 0)
        in_turns = own + sum(min(left, own + tokens) for left in by_client.values())
        return min(in_turns, sum(left for _, left in waiting if left <= tokens))
